"""Statistics of runs and of prompts: intervals, tests, difficulty."""

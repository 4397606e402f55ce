"""Statistics of runs: intervals and tests."""

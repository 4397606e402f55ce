"""Measurements, each by one command: `python -m scripts.bench.NAME --help` says what it measures.

`--json FILE` keeps the numbers. `docs/results.md` has the commands and figures of the published ones.
"""

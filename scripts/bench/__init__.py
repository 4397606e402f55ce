"""Measurements, each by one command: `python -m scripts.bench.NAME --help` describes it.

`--json FILE` keeps the numbers. `docs/results.md` has the commands and figures of the published ones.
"""

"""Measurements, each by one command: `python -m scripts.bench.NAME --help` describes it.

`--json FILE` keeps the numbers; `all` runs those that need no GPU. `docs/results.md` has the published figures.
"""

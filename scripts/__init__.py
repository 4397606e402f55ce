"""Commands: `areal-like VERB`, or `python -m scripts.VERB` in a clone. Packages in here hold their parts."""

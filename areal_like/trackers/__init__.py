"""Trackers that show a run: TensorBoard's files and Weights & Biases.

`run.trackers` names them; `module:Name` names your own. A tracker only shows what RUN/metrics.jsonl and RUN/samples
contain: its failure is reported once and never stops a run (`scripts/following/tracking.py` feeds them, in a thread).
"""

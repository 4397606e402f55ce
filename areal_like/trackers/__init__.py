"""Where a run can be looked at: TensorBoard's files, Weights & Biases, Trackio, MLflow. One protocol, one file each.

`run.trackers` names them; `module:Name` names your own. A tracker only shows what RUN/metrics.jsonl and RUN/samples
hold: its failure is told once and never stops a run (`scripts/following/tracking.py` feeds them, in a thread of its
own).
"""

"""Commands, each started as `python -m scripts.NAME`; `--help` says what it does.

Python reads this file first. It lets Ctrl-C end a command during its imports without a traceback. It also explains
modules that are only parts of commands."""

import os
import signal
import sys
from types import FrameType

PARTS = {
    "ablation.devices": "ablate --parallel",
    "ablation.final": "ablate",
    "ablation.measures": "ablate",
    "ablation.overall": "ablate",
    "ablation.pictures": "ablate",
    "ablation.points": "ablate",
    "ablation.results": "ablate",
    "ablation.runs": "ablate",
    "ablation.slurm": "ablate --slurm",
    "ablation.study": "ablate",
    "analysis.aggregates": "ablate",
    "analysis.difficulty": "ledger",
    "analysis.gradient_statistics": "score",
    "analysis.intervals": "ablate",
    "analysis.offered": "ledger",
    "analysis.pairing": "eval --against",
    "analysis.step_model": "eval",
    "bench.buffer_paths": "bench.buffer",
    "bench.decoding": "bench.engine --model",
    "bench.entropy": "bench.delta",
    "bench.figures": "bench.delta",
    "bench.gpu_checks": "bench.gpu",
    "bench.gpu_figures": "bench.gpu",
    "bench.gpu_shapes": "bench.gpu",
    "claims.algorithms": "claims.digits",
    "claims.arithmetic": "claims.off_policy",
    "claims.designs": "claims.off_policy",
    "claims.foretelling": "claims.off_policy",
    "claims.found": "claims.off_policy",
    "claims.gated": "claims.off_policy",
    "claims.kept": "claims.off_policy",
    "claims.lagging": "claims.off_policy",
    "claims.page": "claims.off_policy",
    "claims.stacks": "claims.digits",
    "claims.studies": "claims.digits",
    "claims.tokens": "claims.terminal",
    "console.arguments": "timeline",
    "console.output": "train",
    "console.sparkline": "train",
    "console.streams": "train",
    "contracts.acting": "check",
    "contracts.learning": "check",
    "contracts.serving": "check",
    "following.exporter": "status --prometheus",
    "following.fault_counts": "train",
    "following.last_sample": "train",
    "following.running": "status",
    "following.tool_calls": "samples",
    "following.tracking": "train",
    "plotting.beside": "plan --plot",
    "plotting.canvas": "plots",
    "plotting.cells": "plots",
    "plotting.drawing": "plots",
    "plotting.lines": "plots",
    "plotting.matrix": "plots",
    "plotting.plot": "plots",
    "plotting.rows": "plots",
    "plotting.timelines": "plots",
    "reporting.contents": "report",
    "reporting.excerpts": "report",
    "reporting.live": "watch",
    "reporting.page": "report",
    "reporting.series": "report",
    "reporting.several": "report",
    "simulation.actors": "simulate",
    "simulation.calibration": "calibrate",
    "simulation.closed_form": "plan",
    "simulation.cores": "simulate",
    "simulation.costs": "simulate",
    "simulation.draws": "simulate",
    "simulation.failing": "simulate",
    "simulation.journal": "simulate",
    "simulation.learner": "simulate",
    "simulation.patience": "simulate",
    "simulation.plan_picture": "plan --plot",
    "simulation.plan_report": "plan",
    "simulation.planning": "plan",
    "simulation.pushes": "simulate",
    "simulation.results": "simulate",
    "simulation.roofline": "plan --hardware",
    "simulation.run": "simulate",
    "simulation.targets": "plan --target",
    "simulation.timeline": "simulate",
    "simulation.traffic": "plan",
    "starting.devices": "train --dry-run",
    "starting.earlier_runs": "train",
    "starting.estimate": "train --dry-run",
    "starting.gpus": "train --dry-run",
    "starting.memory": "train --dry-run",
    "starting.prediction": "train",
    "starting.preflight": "train",
    "verify.faults": "verify.chaos",
    "verify.fuzz_deltas": "verify.fuzz --deltas",
    "verify.fuzzing": "verify.fuzz",
    "verify.hanging_engine": "verify.chaos --hangs",
    "verify.mutations": "verify.mutants",
}
"""Module → the command that it belongs to."""


def _interrupt(number: int, frame: FrameType | None) -> None:
    if hasattr(sys.modules["__main__"], "main"):  # imports are done: the command handles interrupts
        signal.default_int_handler(number, frame)
    os.write(2, b"interrupted (SIGINT) before anything was started\n")
    os._exit(130)


def _begin(name: str) -> None:
    """Called for `python -m scripts.NAME`, before its imports."""
    if name in PARTS:
        whole = f"python -m scripts.{PARTS[name]}"
        print(f"scripts.{name} is not a command but part of one: {whole} (see {whole.split(' --')[0]} --help)")
        sys.exit(0 if {"-h", "--help"} & set(sys.argv) else 2)
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _interrupt)


if sys.argv[0] == "-m":  # its value until Python has found the command's module
    _begin(next((word.rpartition("scripts.")[2] for word in sys.orig_argv if "scripts." in word), ""))

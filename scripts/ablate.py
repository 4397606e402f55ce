"""Ablations: `areal-like ablate configs/ablation/X.yaml`: a grid times seeds becomes runs, tables and plots.

Checks the study and the config of every possible run, tunes if the study asks for it, makes the runs, and writes
`results.csv`, `results.md` and `curves.png`. The same command again continues: finished runs stay, killed ones resume.
"""

import argparse
import shlex
import sys
from pathlib import Path

from .ablation import results, slurm, study
from .ablation.results import Choice, gather
from .ablation.runs import Folder, run_all, say
from .ablation.study import MAIN, TUNE, Run
from .console.arguments import EXIT_INTERRUPTED, command, positive, refusing
from .console.process import Interrupted, Signals
from .starting.earlier_runs import lock


class Ablation:
    def __init__(self, args: argparse.Namespace, argv: list[str]):
        self.args, self.file = args, study.named(args.study)
        self.study = study.load(self.file)
        self.folder = Folder(args.out or Path("runs") / "ablation" / self.study.name)
        self.command = shlex.join(["areal-like", "ablate", *argv])
        self.tuning = self.study.tuning_runs()

    def run(self) -> int:
        """Make all runs, on this machine. Returns the exit code. Raises OSError, ConfigError."""
        signals, failed, parallel = Signals(), list[Run](), self.args.parallel or 1
        try:
            for stage in (TUNE, MAIN):
                if self.args.only in (None, stage):
                    runs = self.tuning if stage == TUNE else self.main_runs()
                    failed += run_all(runs, self.folder, parallel, signals.check)
        except Interrupted as signalled:
            print(f"ended by {signalled}; run the same command to continue", file=sys.stderr)
            return EXIT_INTERRUPTED
        self.report()
        return 1 if failed else 0

    def choices(self) -> list[Choice]:
        """The tuned values, from the finished runs. Raises ValueError if they are not complete."""
        return results.choose(self.study, gather(self.study, self.tuning, self.folder)) if self.study.tune else []

    def main_runs(self) -> list[Run]:
        """Raises ValueError if tuning is not complete."""
        return self.study.main_runs({choice.key: choice.picked for choice in self.choices()})

    def report(self) -> None:
        """Write the results so far. Before tuning is complete these are its results alone."""
        try:
            choices, runs = self.choices(), self.main_runs()
        except ValueError as error:
            choices, runs = [], []
            say(f"the main runs depend on the tuning: {error}")
        self.folder.path.mkdir(parents=True, exist_ok=True)
        found = gather(self.study, [*self.tuning, *runs], self.folder)
        print(results.write(self.study, self.folder.path, found, choices, self.command))
        say(f"results.csv, results.md and curves.png are in {self.folder.path}")

    def submit(self) -> None:
        """Submit the unfinished runs of the next stage. Raises OSError, ValueError."""
        stage, runs = TUNE, [run for run in self.tuning if not self.folder.is_finished(run)]
        if self.args.only == MAIN or not (runs or self.args.only):
            stage, runs = MAIN, [run for run in self.main_runs() if not self.folder.is_finished(run)]
        if not runs:
            say(f"all runs of the {stage} stage are finished")
            return None if self.args.dry_run else self.report()
        then = ["--only", MAIN, "--slurm"] if stage == TUNE and self.args.only is None else ["--only", "report"]
        then += ["--parallel", str(self.args.parallel)] if self.args.parallel else []
        after = [str(self.file.resolve()), "--out", str(self.folder.path), *then]
        jobs = slurm.Jobs(stage, runs, self.folder, self.study.slurm, self.args.parallel, after)
        if self.args.dry_run:
            return print(jobs.describe())
        for run in runs:
            self.folder.prepare(run)
        ids = jobs.submit()
        say(f"{len(runs)} {stage} runs are submitted as job {ids[0]}; job {ids[1]} continues after them")

    def describe(self) -> None:
        runs = list(self.tuning)
        try:
            runs += self.main_runs()
        except ValueError:
            say(f"then {len(self.study.main_configs()) * len(self.study.seeds)} main runs with the tuned values")
        for run in runs:
            print(f"{'finished' if self.folder.is_finished(run) else 'to run':<9} {run.stage:<5} {run.title}")


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    parser = command("ablate", __doc__, "docs/ablations.md explains the yaml; configs/ablation has examples.")
    parser.add_argument("study", help="a yaml file, or the name of one in configs/ablation: staleness")
    parser.add_argument("--out", type=Path, help="output folder (default: runs/ablation/NAME)")
    parser.add_argument("--parallel", type=positive, metavar="N", help="runs at a time (default: 1; on Slurm: all)")
    parser.add_argument("--only", choices=[TUNE, MAIN, "report"], help="stage; report: tables and plots (default: all)")
    parser.add_argument("--slurm", action="store_true", help="submit array jobs instead of running here")
    parser.add_argument("--dry-run", action="store_true", help="print the runs or jobs that it would start, and stop")
    args = parser.parse_args(argv)
    with refusing():
        ablation = Ablation(args, argv)
        if args.slurm and args.only != "report":
            ablation.submit()
        elif args.dry_run:
            ablation.describe()
        elif args.only == "report":
            ablation.report()
        else:
            ablation.folder.path.mkdir(parents=True, exist_ok=True)
            with lock(ablation.folder.path):
                return ablation.run()
    return 0


if __name__ == "__main__":
    sys.exit(main())

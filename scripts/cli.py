"""The console command `areal-like VERB ...`: each verb is a module of this package with a `main`.

`areal-like train quickstart mode=sync` is `python -m scripts.train quickstart mode=sync` of a clone.
"""

import difflib
import importlib
import os
import sys

VERBS = {
    "train": "train a model; resume or replay a run",
    "config": "every key of a config: type, default, range, meaning",
    "samples": "what the model wrote, token by token",
    "report": "a run as one page for the browser",
    "compare": "runs side by side, with intervals",
    "status": "a live run: progress, waiting processes",
    "ledger": "where every prompt of a run went; --verify checks the journal",
    "timeline": "work and waiting of each process, as a table or a plot",
    "simulate": "a run in virtual time: throughput, staleness, idle shares",
    "plan": "how many GPUs for rollout, which mode, which bound",
    "eval": "reward and pass@k of a model on sets of prompts",
    "export": "a run's model as a folder for other tools",
    "serve": "a model as an OpenAI-compatible endpoint, for lm-eval and others",
    "ablate": "a grid of runs times seeds, with tables and plots",
    "join": "add actors to a live run",
    "stop": "stop a live run",
    "check": "check your own loss, advantage, reward or environment",
    "keys": "make encryption keys",
}


def usage() -> str:
    width = max(map(len, VERBS))
    verbs = "\n".join(f"  {verb:<{width}}  {what}" for verb, what in VERBS.items())
    first = "usage: areal-like VERB [arguments]      in a clone also: python -m scripts.cli VERB"
    return f"{first}\n\n{verbs}\n\nareal-like VERB --help explains a verb."


def main(argv: list[str] | None = None) -> int:
    arguments = sys.argv[1:] if argv is None else argv
    if not arguments or arguments[0] in ("-h", "--help"):
        print(usage())
        return 0 if arguments else 2
    verb = arguments[0]
    if verb not in VERBS:
        near = difflib.get_close_matches(verb, VERBS, 1)
        hint = f"; did you mean {near[0]}?" if near else ""
        print(f"error: areal-like has no verb {verb!r}{hint}\n\n{usage()}", file=sys.stderr)
        return 2
    sys.argv = [f"areal-like {verb}", *arguments[1:]]
    sys.path[:0] = [os.getcwd()] * (os.getcwd() not in sys.path)  # the user's own modules, as with `python -m`
    return importlib.import_module(f".{verb}", __package__).main() or 0


if __name__ == "__main__":
    sys.exit(main())

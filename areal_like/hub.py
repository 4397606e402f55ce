"""Models and data sets by their names on the Hugging Face Hub. The starter resolves a name once: to the folder of one
commit in the cache of huggingface_hub, which every process of the run, and a later resume or replay, then reads."""

import json
import re
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from importlib.util import find_spec
from pathlib import Path

from areal_like.config.registry import ConfigError

NAME = re.compile(r"([A-Za-z0-9][\w.-]*/[\w.-]+)(?:@([\w./-]+))?")
"""ORG/NAME, or ORG/NAME@REVISION: of a branch, tag or commit."""
SNAPSHOT = re.compile(r"(model|dataset)s--(.+?)--(.+)/snapshots/([0-9a-f]{40})")
"""The end of such a folder's path."""
FILES = {
    "model": ("*.json", "*.safetensors", "*.jinja", "*.model", "*.txt", "tekken*", "tokenizer*"),
    "dataset": ("*.md", "*.json*", "*.csv*", "*.tsv*", "*.parquet", "*.arrow", "*.yaml"),
}
"""Of each kind of repository; of a model, only those that lie at the top."""
LOCAL = (".csv", ".json", ".jsonl", ".parquet", ".yaml")
"""Ends of paths that name files."""


def named(path: object) -> re.Match[str] | None:
    """The parts of a path that is a name: no file or folder."""
    found = NAME.fullmatch(path) if isinstance(path, str) and not Path(path).exists() else None
    return None if found is None or found[0].endswith(LOCAL) else found


def located(values: Mapping[str, object], earlier: Mapping[str, object]) -> list[str]:
    """Overrides, "key=folder", of the names among a config's values (dotted key → value). A name without a revision
    stays at the commit that the `earlier` config has for it. Raises ConfigError."""
    found, folders = [], dict[tuple[str, ...], str]()
    for key, value in sorted(values.items(), key=lambda item: item[0] != "model.path"):  # the first to be named
        kind, parts = _kind(key, values), named(value)
        if kind is None or parts is None:
            continue
        name, revision = parts[1], parts[2]
        before = SNAPSHOT.search(str(earlier.get(key)))
        if revision is None and before and (before[1], f"{before[2]}/{before[3]}") == (kind, name):
            revision = before[4]
        asked = kind, name, revision or "main"
        folders[asked] = folders.get(asked) or snapshot(key, *asked)
        found.append(f"{key}={json.dumps(folders[asked])}")
    return found


def _kind(key: str, values: Mapping[str, object]) -> str | None:
    prefix, _, knob = key.rpartition(".")
    component = values.get(f"{prefix}.name")
    if knob == "tokenizer" or key == "learner.teacher.path" or (key, component) == ("model.path", "folder"):
        return "model"
    return "dataset" if knob in ("path", "heldout_path") and component == "jsonl" else None


def snapshot(key: str, kind: str, name: str, revision: str) -> str:
    """The folder of a commit: from the cache where it is known to be whole, else fetched; of a hub that cannot be
    reached, as the cache has it. Raises ConfigError."""
    from huggingface_hub import constants, errors, snapshot_download

    if kind == "dataset":
        need_datasets(key, name)
    above = "*/*" if kind == "model" else None
    fetch = partial(snapshot_download, name, repo_type=kind, revision=revision, allow_patterns=FILES[kind])
    with suppress(errors.LocalEntryNotFoundError):
        folder = Path(fetch(ignore_patterns=above, local_files_only=True))
        if (folder.parents[1] / "trees" / f"{folder.name}.json").is_file():  # it was compared with this list
            return str(folder)
    try:
        return str(fetch(ignore_patterns=above))
    except Exception as error:  # of the hub, of sockets, proxies, certificates, disks
        cause = error.__cause__ if isinstance(error, errors.LocalEntryNotFoundError) else error
        fault = type(cause or error).__name__
    where = f"{name!r} ({revision}) is no path here, not whole in {constants.HF_HUB_CACHE}, and not fetched: {fault}"
    hint = f"correct the name, set HF_TOKEN where it is gated or private, or give its folder as {key}=FOLDER"
    raise ConfigError(f"{key}: {where}; {hint}", key)


def need_datasets(key: str, name: str) -> None:
    """Raises ConfigError where the package `datasets` is missing."""
    if find_spec("datasets") is None:
        raise ConfigError(f"{key}: reading {name!r} needs datasets: pip install 'areal_like[datasets]'", key)


def shown(path: str) -> str:
    """The name of a repository in place of its folder in the cache; any other path as it is."""
    found = SNAPSHOT.search(path)
    return f"{found[2]}/{found[3]}" if found else path

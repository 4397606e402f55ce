"""Models and data sets by name: a hub on loopback, a filled cache, and the commit that a run stays at."""

import hashlib
import json
import re
import shutil
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from huggingface_hub import constants

from areal_like import hub
from areal_like.config.layers import parse_override
from areal_like.config.registry import ConfigError
from areal_like.config.run_config import leaves, load_resolved
from scripts import train
from tests.folders import write_folder

TOKEN = "hf_hidden"


class Hub(ThreadingHTTPServer):
    """Repositories as `commits[name]`: commit → folder, the newest last."""

    def __init__(self) -> None:
        self.commits: dict[str, dict[str, Path]] = {}
        self.tokens: list[str | None] = []
        super().__init__(("127.0.0.1", 0), Answer)

    def push(self, name: str, folder: Path) -> str:
        commit = hashlib.sha1(str(folder).encode()).hexdigest()
        self.commits.setdefault(name, {})[commit] = folder
        return commit


class Answer(BaseHTTPRequestHandler):
    server: Hub

    def do_GET(self) -> None:
        self.server.tokens.append(self.headers.get("Authorization"))
        path = re.sub(r"^/(api/)?((models|datasets)/)?", "", self.path.partition("?")[0])
        name, what, revision, file = re.fullmatch(r"(\w+/\w+)/(\w+)/(\w+)(?:/(.*))?", path).groups()
        commits = self.server.commits.get(name, {})
        commit = [*commits][-1] if commits and revision == "main" else revision
        if commit not in commits:
            return self.answer(404, b"", {"X-Error-Code": "RevisionNotFound" if commits else "RepoNotFound"})
        folder = commits[commit]
        if what == "revision":
            return self.answer(200, json.dumps({"id": name, "sha": commit, "siblings": []}).encode())
        if what == "tree":
            sizes = {each.name: each.stat().st_size for each in folder.iterdir()}
            found = [{"type": "file", "oid": "0" * 40, "size": sizes[name], "path": name} for name in sizes]
            return self.answer(200, json.dumps(found).encode())
        content = (folder / file).read_bytes()
        self.answer(200, content, {"X-Repo-Commit": commit, "ETag": f'"{hashlib.sha1(content).hexdigest()}"'})

    do_HEAD = do_GET

    def answer(self, status: int, content: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for key, value in {"Content-Length": str(len(content)), **(headers or {})}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """The hub of this process, with an empty cache of its own."""
    server = Hub()
    url = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setattr(constants, "ENDPOINT", url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", url + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "arrow")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "arrow"))
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def pushed(server: Hub, place: Path, first: int) -> list[str]:
    """A commit of a model and one of a data set; `first` is a number in its rows."""
    place.mkdir()
    write_folder(place / "tiny", "qwen2", seed=first)
    for split, rows in (("train", range(first, first + 9)), ("test", range(first + 20, first + 22))):
        lines = [json.dumps({"question": f"{n} + 1?", "answer": str(n + 1)}) for n in rows]
        (place / "sums").mkdir(exist_ok=True)
        (place / "sums" / f"{split}.jsonl").write_text("\n".join(lines), encoding="utf-8")
    return [server.push("own/tiny", place / "tiny"), server.push("own/sums", place / "sums")]


ARGV = ["quickstart", "model=own/tiny", "task=jsonl", "task.path=own/sums", "task.heldout_split=test"]
ARGV += ["task.columns={prompt: question}", "task.max_tokens=4", "groups_per_batch=2", "sizing.group_size=2"]
ARGV += ["task.max_prompt_tokens=64", "run.trackers=[]", "eval.prompts=2", "run.target_reward=null"]
ARGV += ["actors.count=1", "rewards.workers=1"]
NAMES = ("model.path", "task.tokenizer", "task.path")


@pytest.mark.slow
def test_a_run_stays_at_the_commits_that_it_found(served: Hub, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    first = pushed(served, tmp_path / "a", 1)
    run, where = tmp_path / "runs" / "it", f"run.dir={tmp_path / 'runs'}"
    assert train.main([*ARGV, where, "run.name=it", "run.steps=1"]) == 0
    assert commits(run) == [first[0], *first]
    pushed(served, tmp_path / "b", 2)
    assert train.main([*ARGV, where, "run.steps=2", f"resume={run}"]) == 0
    shutil.rmtree(constants.HF_HUB_CACHE)
    assert train.main([*ARGV, where, "run.name=again", f"replay={run}"]) == 0
    assert commits(run) == commits(run.with_name("again")) == [first[0], *first]
    written = [path.read_bytes() for path in run.rglob("*") if path.is_file()]
    assert f"Bearer {TOKEN}" in served.tokens
    assert TOKEN not in "".join(capsys.readouterr()) and not any(TOKEN.encode() in each for each in written)


def commits(run: Path) -> list[str]:
    known = leaves(load_resolved(run / "config.yaml"))
    return [Path(str(known[key])).name for key in NAMES]


def folders(values: dict[str, object]) -> dict[str, Path]:
    return {key: Path(str(folder)) for key, folder in map(parse_override, hub.located(values, {}))}


def test_the_cache_comes_before_the_hub(served: Hub, tmp_path: Path) -> None:
    model = {"model.name": "folder", "model.path": "own/tiny"}
    values = {**model, "task.name": "jsonl", "task.path": "own/sums@main", "task.heldout_path": "here.jsonl"}
    first = pushed(served, tmp_path / "a", 1)
    found = folders(values)
    assert {key: folder.name for key, folder in found.items()} == {"model.path": first[0], "task.path": first[1]}
    asked = len(served.tokens)
    pushed(served, tmp_path / "b", 2)
    assert folders(values) == found and len(served.tokens) == asked
    (found["task.path"] / "train.jsonl").unlink()
    assert folders(values)["task.path"] != found["task.path"], "a cache with a gap is asked for no rows"
    served.commits.clear()
    for lists in Path(constants.HF_HUB_CACHE).glob("*/trees"):  # as tools fill it that fetch single files
        shutil.rmtree(lists)
    assert folders(model) == {"model.path": found["model.path"]}


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("own/other", "RepositoryNotFoundError"),
        ("own/sums@gone", "RevisionNotFoundError"),
        ("own/sums offline", "ConnectError"),
    ],
)
def test_a_name_that_gives_nothing(served: Hub, tmp_path: Path, monkeypatch, name: str, fault: str) -> None:
    pushed(served, tmp_path / "a", 1)
    if name.endswith(" offline"):
        monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(ConfigError, match=f"^task.path: 'own/.*not fetched: {fault}; .*task.path=FOLDER") as caught:
        hub.located({"task.name": "jsonl", "task.path": name.partition(" ")[0]}, {})
    assert caught.value.key == "task.path" and "\n" not in str(caught.value)


def test_data_by_name_needs_a_package(served: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"areal_like\[datasets\]"):
        hub.located({"task.name": "jsonl", "task.path": "own/sums"}, {})
    assert not served.tokens

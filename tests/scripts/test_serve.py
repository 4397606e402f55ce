"""`scripts.serve` as a process: it reports its address, answers, and ends with Ctrl-C."""

import json
import re
import signal
import time
from pathlib import Path
from urllib.request import Request, urlopen

import pytest

from areal_like.config import run_config as configs
from areal_like.config.registry import build
from tests.forked import forked, said


@pytest.mark.integration
def test_a_runs_model_is_served_until_an_interrupt(tmp_path: Path) -> None:
    """A task without a tokenizer speaks its own characters."""
    config = configs.load(["quickstart"])
    build("model", config.model, 0, 13).save_pretrained(tmp_path / "run" / "checkpoints" / "final")
    configs.save(config, tmp_path / "run" / "config.yaml")
    (tmp_path / "process").mkdir()
    command = ["scripts.serve", str(tmp_path / "run"), "--port", "0"]
    with forked(command[0], [command[1:]], tmp_path / "process") as (process,):
        while not (found := re.search(r"at (http://127\.0\.0\.1:\d+/v1) ", said(tmp_path / "process"))):
            assert process.poll() is None, said(tmp_path / "process")
            time.sleep(0.05)
        body = {"messages": [{"role": "user", "content": "12345678"}], "max_tokens": 8, "temperature": 0}
        url, headers = f"{found[1]}/chat/completions", {"Content-Type": "application/json"}
        with urlopen(Request(url, json.dumps(body).encode(), headers), timeout=30) as answer:
            told = json.load(answer)
        assert told["choices"][0]["message"]["role"] == "assistant" and told["usage"]["completion_tokens"] > 0
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 0, said(tmp_path / "process")

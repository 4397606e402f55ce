"""A stand-in for a judge: an OpenAI-compatible server of this machine that answers by a function of the text."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Reply = Callable[[str], str | int | bytes]


@dataclass
class Served:
    url: str
    asked: list[str] = field(default_factory=list)


@contextlib.contextmanager
def judging(reply: Reply) -> Iterator[Served]:
    """Serve until the block ends. `reply` maps a request's text to the judge's text, or to an HTTP status that refuses
    it, or to the whole body of an answer (bytes); it may be called in several threads at once."""
    served = Served("")

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            text = body["messages"][0]["content"]
            served.asked.append(text)
            said = reply(text)
            answer = completion(said, text) if isinstance(said, str) else {"error": {"message": "not now"}}
            self.send_response(said if isinstance(said, int) else 200)
            self.send_header("Content-Type", "application/json")
            self.send_header("retry-after-ms", "1")
            self.end_headers()
            self.wfile.write(said if isinstance(said, bytes) else json.dumps(answer).encode())

        def log_message(self, *_: Any) -> None:
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    served.url = f"http://127.0.0.1:{server.server_address[1]}/v1"
    try:
        yield served
    finally:
        server.shutdown()
        server.server_close()


def completion(text: str, asked: str) -> dict[str, Any]:
    usage = {"prompt_tokens": len(asked), "completion_tokens": len(text), "total_tokens": len(asked) + len(text)}
    message = {"role": "assistant", "content": text}
    choice = {"index": 0, "message": message, "finish_reason": "stop"}
    return {
        "id": "1", "object": "chat.completion", "created": 0, "model": "m", "choices": [choice], "usage": usage,
    }  # fmt: skip

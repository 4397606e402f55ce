"""An agent as a program of its own: it uses OpenAI's protocol, and nothing of this project.

    areal-like train configs/copy4.yaml "workflow={name: agent, agent: [python3, examples/agent/program.py]}"

The environment has the model's address, as for OpenAI's own clients; the question comes by standard input. Its
last line is the reward; a program that prints none leaves that to the task.
"""

import json
import os
import sys
from urllib.request import Request, urlopen


def chat(messages: list[dict]) -> dict:
    body = json.dumps({"model": "gpt-4o-mini", "messages": messages}).encode()
    headers = {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}", "Content-Type": "application/json"}
    with urlopen(Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers)) as answer:
        return json.load(answer)["choices"][0]["message"]


def main() -> None:
    row = json.load(sys.stdin)
    said, wanted = chat(row["messages"])["content"], "".join(map(str, row["answer"]))
    right = sum(a == b for a, b in zip(said, wanted, strict=False))
    print(json.dumps({"reward": right / max(len(said), len(wanted))}))


if __name__ == "__main__":
    main()

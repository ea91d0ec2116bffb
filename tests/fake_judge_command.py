"""A command that serves a judge where a run tells it to: `python fake_judge_command.py MODEL --host H --port N --served-model-name NAME ...`

It answers every question with how long it is, tells of every given id the log-prob -id / 8, and writes down what it was
started with. As its model's name says, it does not start (`broken`), ends itself at its third question (`mortal`) or answers none (`silent`).
Standard library alone, so that it is up at once.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

ASKED: list[dict[str, Any]] = []
ASLEEP = threading.Event()
"""A question then is an error."""


class Judge(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._say({"data": [{"id": self.server.name}]} if self.path == "/v1/models" else {})  # type: ignore[attr-defined]

    def do_POST(self) -> None:
        if self.path.startswith(("/sleep", "/wake_up")):
            (ASLEEP.set if self.path == "/sleep?level=1" else ASLEEP.clear)()
            self._say({})
            return
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        ASKED.append(body)
        if self.server.mortal and len(ASKED) >= 3:  # type: ignore[attr-defined]
            print("CUDA Error: device-side assert triggered", file=sys.stderr, flush=True)
            os._exit(9)
        if self.server.silent:  # type: ignore[attr-defined]
            time.sleep(600)
        if ASLEEP.is_set():
            self.send_error(500)
            return
        if body["model"] != self.server.name:  # type: ignore[attr-defined]
            self.send_error(404)
            return
        if "prompt_logprobs" in body:
            rows = [None, *({str(number): {"logprob": -number / 8, "decoded_token": "x"}} for number in body["prompt"][1:])]
            self._say({"choices": [{"text": "", "prompt_logprobs": rows}]})
            return
        question = body["prompt"] if "prompt" in body else body["messages"][0]["content"]
        text = f"score: {len(question)}"
        choice = {"text": text} if "prompt" in body else {"message": {"role": "assistant", "content": text}}
        self._say({"choices": [{**choice, "finish_reason": "stop"}] * body.get("n", 1)})

    def _say(self, body: Any) -> None:
        content = json.dumps(body).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        """Nothing."""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    for name in ("--host", "--port", "--served-model-name"):
        parser.add_argument(name)
    asked, rest = parser.parse_known_args()
    child = subprocess.Popen(["sleep", "600"])  # as an engine is a process of its server's
    told = {"model": asked.model, "rest": rest, "pids": [os.getpid(), child.pid], "url": f"http://{asked.host}:{asked.port}"}
    told["environment"] = {name: os.environ.get(name) for name in ("CUDA_VISIBLE_DEVICES", "RANK")}
    target = Path(os.environ["FAKE_JUDGE_TOLD"], f"{asked.port}.json")
    target.with_suffix(".new").write_text(json.dumps(told), encoding="utf-8")
    target.with_suffix(".new").replace(target)
    if "broken" in asked.model:
        print("loading", flush=True)
        raise ValueError("this model is broken")
    server = ThreadingHTTPServer((asked.host, int(asked.port)), Judge)
    server.daemon_threads = True
    server.name = asked.served_model_name  # type: ignore[attr-defined]
    server.mortal, server.silent = "mortal" in asked.model, "silent" in asked.model  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    thread.join()


if __name__ == "__main__":
    main()

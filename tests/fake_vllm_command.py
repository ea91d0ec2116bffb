"""A command that starts `fake_vllm` where a run tells it to: `python fake_vllm_command.py MODEL --host H --port N --served-model-name NAME ...`"""

from __future__ import annotations

import argparse
import json
import os
import sys
import threading
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from fake_vllm import FakeVLLM


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    for name in ("--host", "--port", "--served-model-name"):
        parser.add_argument(name)
    asked, rest = parser.parse_known_args()
    told = {"model": asked.model, "rest": rest, "environment": dict(os.environ)}
    Path(os.environ["FAKE_VLLM_TOLD"], f"{asked.port}.json").write_text(json.dumps(told), encoding="utf-8")
    if "broken" in asked.model:
        raise ValueError("this model is broken")
    with FakeVLLM(name=asked.served_model_name, port=int(asked.port), max_model_len=4096):
        threading.Event().wait()


if __name__ == "__main__":
    main()

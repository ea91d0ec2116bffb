"""Seconds and MFU of the update alone, inside `rft train`: answers come from the engine without a model, everything after them is real.

    python -m benchmarks.update --shape 0.5b --prompts 128 --prompt 256 --response 1024
    python -m benchmarks.update --shape tiny --prompts 4 --prompt 16 --response 32 --steps 2        (a CPU, in seconds)
    python -m benchmarks.update --shape 0.5b --prompts 16 --response 256 --cases zero1,offload1,zero2,offload2,zero3,offload3

Weights are random, of the shape named. `--mean-response N` ends answers by chance, so that lengths vary as real ones do; without it all are equally
long. Cases: padded rows with sdpa, packed rows with a mask (sdpa), packed rows with varlen attention, and the same with shared prompts; ZeRO stages,
and the same with `train.offload.optimizer: cpu`. Beside seconds stand the peak of GPU memory, what was planned, and by how much the host's available
memory fell below that at the start (pinned memory is in no process's own size). `benchmarks.passes` splits the passes into forward and backward and
names the kernels.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.against import planned
from benchmarks.runs import RESULTS, machine
from rftcli.builtin import builtin_path
from rftcli.runtime.speed import mfu, peak_flops

SHAPES = {
    "tiny": (64, 172, 2, 4, 2, 512),
    "135m": (576, 1536, 30, 9, 3, 49152),
    "0.5b": (896, 4864, 24, 14, 2, 151936),
    "1.5b": (1536, 8960, 28, 12, 2, 151936),
    "3b": (2048, 11008, 36, 16, 2, 151936),
    "7b": (3584, 18944, 28, 28, 4, 152064),
}
"""Qwen2 shapes, and SmolLM2's: the numbers of SIZES."""

SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "vocab_size")

CASES = {
    "padded": ["models.policy.attention=sdpa", "batch.layout=padded"],
    "masked": ["models.policy.attention=sdpa", "batch.layout=packed"],
    "varlen": ["models.policy.attention=varlen", "batch.layout=packed", "batch.share_prompts=false"],
    "shared": ["models.policy.attention=varlen", "batch.layout=packed", "batch.share_prompts=true"],
    **{f"zero{stage}": [f"train.deepspeed.zero_stage={stage}"] for stage in (1, 2, 3)},
    **{f"offload{stage}": [f"train.deepspeed.zero_stage={stage}", "train.offload.optimizer=cpu"] for stage in (1, 2, 3)},
}
USUAL = "padded,masked,varlen,shared"


@contextmanager
def host_use(before: float) -> Iterator[list[float]]:
    """[GiB by which the host's available memory was below `before` at most], filled when it ends; other programs count too."""
    found: list[float] = []
    seen: list[float] = []
    over = threading.Event()

    def look() -> None:
        while not over.wait(0.2):
            seen.append(_available())

    looking = threading.Thread(target=look, daemon=True)
    looking.start()
    yield found
    over.set()
    looking.join()
    found.append(round(before - min(seen, default=before), 2))


def _available() -> float:
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable")) / 2**20


def make_model(shape: str, folder: Path, longest: int) -> None:
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    sizes = dict(zip(SIZES, SHAPES[shape], strict=True))
    tied = shape != "7b"
    config = Qwen2Config(**sizes, max_position_embeddings=max(longest, 4096), tie_word_embeddings=tied, eos_token_id=1, bos_token_id=1)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with torch.device(device):
        model = Qwen2ForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(builtin_path("quickstart") / name, folder)


def run_case(options: argparse.Namespace, name: str, model: Path, folder: Path, before: float) -> dict[str, Any]:
    prompts = folder / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": "7" * options.prompt, "row": row}) + "\n" for row in range(options.prompts)))
    (folder / "by_key.py").write_text("def score(sample):\n    return float(sample % 2)\n")
    recipe = folder / "update.yaml"
    sets = [*CASES[name], *options.sets]
    if options.mean_response:
        vocabulary = SHAPES[options.shape][-1]
        sets.append(f"rollout.stop_token_ids={list(range(2, 2 + vocabulary // options.mean_response))}")
    recipe.write_text(
        json.dumps({
            "models": {"policy": {"path": str(model)}},
            "data": {"train": {"path": str(prompts), "as_chat": False}},
            "rollout": {
                "engine": "fake", "samples_per_prompt": options.samples, "max_prompt_tokens": options.prompt + 8,
                "max_new_tokens": options.response, "ignore_eos": not options.mean_response,
            },
            "rewards": {"default": [{"python": "by_key:score", "name": "by_key"}]},
            "batch": {"prompts_per_step": options.prompts},
            "train": {"steps": options.steps + 1},
            "checkpoint": {"trainer_state": False},
            "samples": {"every": 1_000_000},
        })
    )  # fmt: skip
    run_dir = folder / name
    command = [sys.executable, "-m", "rftcli", "train", str(recipe), "--run-dir", str(run_dir), "--quiet"]
    with host_use(before) as host:
        finished = subprocess.run(command + [word for item in sets for word in ("--set", item)], capture_output=True, text=True, check=False)
    result: dict[str, Any] = {"sets": [item for item in sets if len(item) < 200], "exit_code": finished.returncode}
    if finished.returncode:
        return {**result, "error": finished.stderr[-1500:]}
    events = [json.loads(line) for line in (run_dir / "events.jsonl").read_text().splitlines()]
    start = next(event for event in events if event["event"] == "start")
    steps = [event for event in events if event["event"] == "step"][1:]  # the first warms caches up
    seconds = statistics.median(step["seconds"]["learn"] for step in steps)
    tokens = statistics.fmean(step["tokens"] for step in steps)
    info = machine()
    peak = peak_flops(info["card"]) if info["card"] else None
    parameters, ranks = start["parameters"], start["ranks"]
    plan = json.loads((run_dir / "plan.json").read_text())
    memory = {name: max(step["memory_gib"].get(name, 0.0) for step in steps) for name in steps[0].get("memory_gib", {})}
    return {
        **result,
        "parameters": parameters,
        "tokens": tokens,
        "learn_seconds": seconds,
        "tokens_per_second": tokens / seconds,
        "update_mfu": None if peak is None else mfu(tokens / seconds / ranks, parameters, peak),
        "memory_gib": max(memory.values(), default=None),
        "planned_gib": max(planned(plan).values(), default=None),
        "by_stage_gib": {"planned": planned(plan), "measured": memory},
        "host_gib": host[0],
        "host_planned_gib": {row["name"]: max(row["gib"].values()) for row in (plan.get("memory") or {}).get("host", [])},
        "grad_norm": steps[0].get("grad_norm"),
        "loss": steps[0].get("loss"),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="0.5b")
    parser.add_argument("--cases", default=USUAL, help=", ".join(CASES))
    for name, default in (("prompts", 128), ("samples", 8), ("prompt", 256), ("response", 1024), ("mean-response", 0), ("steps", 2)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--set", dest="sets", action="append", default=[])
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    results: dict[str, Any] = {}
    before = _available()  # once: what a run held is not always free yet when the next begins
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        make_model(options.shape, model, options.prompt + options.response + 8)
        for name in options.cases.split(","):
            results[name] = found = run_case(options, name, model, Path(folder), before)
            if found["exit_code"]:
                print(f"{name:<8} exit {found['exit_code']}: {found['error'].strip()[-600:]}", flush=True)
                continue
            share = "" if found["update_mfu"] is None else f"  MFU {100 * found['update_mfu']:.1f}%"
            memory = "" if found["memory_gib"] is None else f"  {found['memory_gib']:.2f} GiB (planned {found['planned_gib']:.2f})"
            print(f"{name:<8} learn {found['learn_seconds']:.3f} s  {found['tokens_per_second']:,.0f} tokens/s{share}{memory}"
                  f"  host {found['host_gib']:.2f} GiB  grad {found['grad_norm']:.6f}", flush=True)  # fmt: skip
    out = options.out or RESULTS / f"update-{options.shape}.json"
    shown = {key: value for key, value in vars(options).items() if key not in ("out",)}
    out.write_text(json.dumps({"machine": machine(), "options": shown, "results": results}, indent=2, default=str) + "\n")


if __name__ == "__main__":
    main()

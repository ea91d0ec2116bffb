"""Tokens a processor second of the hf engine: whole batches against refilled rows, lengths fixed and variable, with and without sampling options.

    python -m benchmarks.hf_engine                       every case, a table, and JSON under benchmarks/results/
    python -m benchmarks.hf_engine --only smollm2        cases whose name begins so

Each case is sampled once to warm up and then `REPEATS` times, all ways of a case in turn; told are the median and the range. Seconds are those of the
processor, all threads together, so that other programs on the machine do not count: run it with OMP_NUM_THREADS=1. Tokens are those of completions:
places that wait for the longest row of their batch count for nothing.
"""

from __future__ import annotations

import argparse
import inspect
import json
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from rftcli.builtin import builtin_path
from rftcli.engines.hf import HFSampler
from rftcli.models.load import load_causal_lm, load_tokenizer
from rftcli.types import Prompt, Request, SamplingSettings

RESULTS = Path(__file__).parent / "results"
REPEATS = 3
SHAPES: dict[str, dict[str, Any]] = {
    "small": {"vocab_size": 4096, "hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 4, "num_attention_heads": 4},
    "smollm2": {
        "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9,
        "num_key_value_heads": 3, "tie_word_embeddings": True,
    },
}  # fmt: skip
"""Random weights; the second has the shape of SmolLM2-135M."""


def quickstart() -> Any:
    path = str(builtin_path("quickstart"))
    return load_causal_lm(path, dtype="float32", attention="sdpa", dropout=0.0, options={}, trust_remote_code=False, device="cpu").eval()


def shape(name: str) -> Any:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SHAPES[name], initializer_range=0.02)).eval()


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    model: Callable[[], Any]
    groups: int
    samples: int = 8
    max_new_tokens: int
    batch_rows: int
    end_share: float = 0.0
    """Share of the vocabulary that ends an answer: with random weights the lengths are then about geometric. 0: all are of the full length."""
    prompt: tuple[int, ...] | None = None
    ways: dict[str, dict[str, Any]] = field(default_factory=lambda: {"batches": {}, "refilled": {"continuous": True}})
    """Name -> arguments of the engine; those of `SamplingSettings` go there."""


SHAPING = {"repetition_penalty": 1.1, "presence_penalty": 0.1, "frequency_penalty": 0.1, "logit_bias": {"9": 1.0}}
FORM = {"structured": {"regex": r" [0-9+= ]{8,20}#### [0-9]{1,3}"}}
QUESTION = (1, 51, 28, 223, 24, 21, 15, 18, 19, 222, 35, 28)
CASES: dict[str, Case] = {
    "quickstart": Case(model=quickstart, groups=32, max_new_tokens=24, batch_rows=64, end_share=-1.0, prompt=QUESTION),
    "quickstart-options": Case(
        model=quickstart, groups=16, max_new_tokens=24, batch_rows=64, prompt=QUESTION,
        ways={"none": {}, "top-p": {"top_p": 0.95}, "penalties": SHAPING, "form": FORM},
    ),
    "small-fixed": Case(model=lambda: shape("small"), groups=8, max_new_tokens=32, batch_rows=32),
    "small-variable": Case(model=lambda: shape("small"), groups=16, max_new_tokens=128, batch_rows=32, end_share=0.03),
    "smollm2-fixed": Case(model=lambda: shape("smollm2"), groups=4, max_new_tokens=16, batch_rows=32),
    "smollm2-variable": Case(model=lambda: shape("smollm2"), groups=6, max_new_tokens=32, batch_rows=16, end_share=0.1),
    "smollm2-options": Case(
        model=lambda: shape("smollm2"), groups=4, max_new_tokens=8, batch_rows=32,
        ways={"none": {}, "top-p": {"top_p": 0.95}, "penalties": SHAPING},
    ),
}  # fmt: skip


def run_case(case: Case) -> dict[str, Any]:
    model, tokenizer = case.model(), load_tokenizer(str(builtin_path("quickstart")))
    vocabulary = model.config.vocab_size
    ends = (2,) if case.end_share < 0 else tuple(range(100, 100 + int(case.end_share * vocabulary)))
    requests = [
        Request(
            prompt=Prompt(
                draw=draw, row=draw, row_id=str(draw), source="s", label="l", text="",
                token_ids=case.prompt or tuple(5 + (draw * 7 + place * 3) % 90 for place in range(12)),
            ),
            samples=tuple(range(case.samples)),
        )
        for draw in range(case.groups)
    ]  # fmt: skip
    known = inspect.signature(HFSampler.__init__).parameters
    seconds: dict[str, list[float]] = {name: [] for name in case.ways}
    lengths: dict[str, list[int]] = {}
    for turn in range(REPEATS + 1):
        for name, changes in case.ways.items():
            engine = {key: value for key, value in changes.items() if key in known}
            settings = {key: value for key, value in changes.items() if key not in known}
            sampler = HFSampler(model, tokenizer, ends, pad_id=0, batch_rows=case.batch_rows, device="cpu", owns_weights=False, **engine)
            start = time.process_time()
            made = list(sampler.generate(requests, SamplingSettings(max_new_tokens=case.max_new_tokens, seed=0, **settings)))
            if turn:
                seconds[name].append(time.process_time() - start)
            lengths[name] = [len(one.trace.ids) for one in made]
    return {
        name: {
            "tokens_per_second": round(sum(lengths[name]) / statistics.median(seconds[name]), 1),
            "range": [round(sum(lengths[name]) / value, 1) for value in (max(seconds[name]), min(seconds[name]))],
            "tokens": sum(lengths[name]),
            "mean_length": round(statistics.fmean(lengths[name]), 1),
            "longest": max(lengths[name]),
        }
        for name in case.ways
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="cases whose name begins so")
    parser.add_argument("--out", default="hf_engine.json", help="name of the file under benchmarks/results/")
    arguments = parser.parse_args()
    machine = {"cpu": platform.machine(), "threads": torch.get_num_threads(), "torch": torch.__version__}
    found: dict[str, Any] = {}
    for name, case in CASES.items():
        if name.startswith(arguments.only):
            found[name] = run_case(case)
            for way, numbers in found[name].items():
                shown = f"{numbers['tokens_per_second']:>10} tokens/s  {numbers['range']}  mean length {numbers['mean_length']}"
                print(f"{name:<20} {way:<10} {shown}", flush=True)
            (RESULTS / arguments.out).write_text(json.dumps({"machine": machine, "cases": found}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

"""The same workload in TRL's GRPO trainer, as a side of `python -m benchmarks.against`.

    python -m benchmarks.trl_side WORKLOAD FOLDER default|tuned|liger      prints JSON: seconds of each step

default: what `GRPOConfig` sets, but for what makes the work the same (lengths, samples, loss, rate, no KL). tuned: no gradient checkpointing, the
workload's micro-batch, and on a GPU memory for vLLM. liger: tuned, with Liger's kernels and its loss.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from benchmarks.workloads import WORKLOADS, even_share, prepare


class Clock(TrainerCallback):
    def __init__(self) -> None:
        self.seconds: list[float] = []

    def _now(self) -> float:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return time.perf_counter()

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self.start = self._now()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.seconds.append(self._now() - self.start)


def reward(completions: list[str], **_: Any) -> list[float]:
    return [even_share(text) for text in completions]


def main() -> None:
    workload, tuned = WORKLOADS[sys.argv[1]], sys.argv[3] != "default"
    path, prompts = prepare(workload, Path(sys.argv[2]))
    cuda = torch.cuda.is_available()
    steps = workload.warm_up + workload.steps
    rows = workload.rows_at_once if tuned else min(GRPOConfig.per_device_train_batch_size, workload.rows_at_once)
    settings: dict[str, Any] = {
        "per_device_train_batch_size": rows, "gradient_accumulation_steps": workload.rows // rows, "num_generations": workload.samples,
        "max_completion_length": workload.new_tokens, "learning_rate": workload.lr, "lr_scheduler_type": "constant", "adam_beta2": 0.95,
        "beta": 0.0, "max_grad_norm": 1.0, "bf16": workload.dtype == "bfloat16" and cuda, "use_cpu": not cuda, "max_steps": steps,
        "save_strategy": "no", "report_to": "none", "logging_steps": 1, "disable_tqdm": True, "shuffle_dataset": False,
        "model_init_kwargs": {"dtype": workload.dtype},
    }  # fmt: skip
    if workload.engine == "vllm" and cuda:
        settings |= {"use_vllm": True, "vllm_mode": "colocate", "generation_kwargs": {"ignore_eos": not workload.ends_early}}
        if tuned:
            settings |= {"vllm_gpu_memory_utilization": 0.4, "vllm_max_model_length": workload.prompt_tokens + workload.new_tokens}
    else:
        settings["generation_kwargs"] = {"min_new_tokens": 1 if workload.ends_early else workload.new_tokens}
    if tuned:
        settings |= {"gradient_checkpointing": False, "use_liger_kernel": sys.argv[3] == "liger"}
    clock = Clock()
    with tempfile.TemporaryDirectory() as out:
        trainer = GRPOTrainer(
            model=str(path),
            reward_funcs=reward,
            args=GRPOConfig(output_dir=out, **settings),
            train_dataset=Dataset.from_list([json.loads(line) for line in prompts.read_text().splitlines()]),
            processing_class=AutoTokenizer.from_pretrained(path, padding_side="left"),
            callbacks=[clock],
        )
        trainer.train()
    lengths = [entry["completions/mean_length"] for entry in trainer.state.log_history if "completions/mean_length" in entry]
    peak = torch.cuda.max_memory_allocated() / 2**30 if cuda else None
    print(json.dumps({"seconds": clock.seconds, "peak_gib": peak, "mean_length": lengths, "version": metadata.version("trl")}))


if __name__ == "__main__":
    main()

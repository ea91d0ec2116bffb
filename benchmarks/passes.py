"""Seconds of the update's passes alone, in one process: forward, backward, what the host needs to start them, and the kernels that take the time.

    python -m benchmarks.passes --shape 1.5b --prompts 8 --samples 8 --prompt 2048 --response 256
    python -m benchmarks.passes --shape 0.5b --prompts 16 --prompt 256 --response 1024 --cases padded,varlen --profile
    python -m benchmarks.passes --shape 0.5b --prompts 32 --prompt 128 --response 512 --mean-response 256 --new-lengths
    python -m benchmarks.passes --shape tiny --prompts 4 --prompt 32 --response 16 --tokens 512        (a CPU, in seconds)

The micro-batches are those of a run, with random ids; gradients add up and no optimizer steps. `host` is the time until the host has handed
everything to the device: where it is near the whole, the device waits for it. Cases are those of `benchmarks.update`, and `bare`: the loop of a few
lines of transformers and torch over the same rows, with the mask of the padding. Told is the fastest repeat; with `--new-lengths`, where every repeat
has answers of other lengths as every step of a run has, the one in the middle.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from benchmarks.runs import machine
from benchmarks.update import SHAPES, SIZES
from rftcli.models import kernels
from rftcli.models.attention import implementation
from rftcli.models.policy import CausalPolicy
from rftcli.models.scores import kernels_work
from rftcli.plan.compile_passing import pass_cost
from rftcli.plan.facts import ModelFacts
from rftcli.plan.plan import BatchPlan
from rftcli.runtime.world import SoloWorld
from rftcli.stages import batches
from rftcli.types import Batch, Experience

CASES = {
    "bare": ("sdpa", "padded", False),
    "padded": ("sdpa", "padded", False),
    "masked": ("sdpa", "packed", False),
    "varlen": ("varlen", "packed", False),
    "shared": ("varlen", "packed", True),
}
"""Name -> attention, layout, whether prompts are shared. bare: transformers' own pass, and one log-softmax of all scores."""
TOP = 25
"""Kernels shown."""


def made_policy(shape: str, attention: str, device: torch.device, longest: int, *, fused: bool, liger: bool) -> CausalPolicy:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    sizes = dict(zip(SIZES, SHAPES[shape], strict=True))
    config = Qwen2Config(**sizes, max_position_embeddings=max(longest, 4096), tie_word_embeddings=shape != "7b")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    with device:
        model = Qwen2ForCausalLM._from_config(config, dtype=dtype, attn_implementation=implementation(attention))
    if liger:
        kernels.apply(model)
    return CausalPolicy(model, fused=fused).train()


class BarePolicy(torch.nn.Module):
    """What an update loop of a few lines does: scores of every position over the whole vocabulary, in float32."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def logprobs(self, batch: Batch, temperature: float) -> tuple[Tensor, None]:
        inputs = {"input_ids": batch.input_ids, "attention_mask": batch.attention_mask, "position_ids": batch.position_ids}
        table = (self.model(**inputs, use_cache=False).logits.float() / temperature).log_softmax(-1)
        return table.flatten(0, 1)[batch.select].gather(-1, batch.target_ids[:, None])[:, 0], None


def experiences(options: argparse.Namespace, repeat: int) -> list[Experience]:
    generator = torch.Generator().manual_seed(1 + repeat * options.new_lengths)
    vocabulary, found = SHAPES[options.shape][-1], []
    for draw in range(options.prompts):
        prompt = torch.randint(2, vocabulary, (options.prompt,), generator=generator)
        for _ in range(options.samples):
            length = options.response
            if options.mean_response:
                length = 1 + min(length - 1, int(torch.empty(()).exponential_(1 / options.mean_response, generator=generator)))
            found.append(
                Experience(
                    sample=SimpleNamespace(completion=SimpleNamespace(prompt=SimpleNamespace(draw=draw))),  # type: ignore[arg-type]
                    token_ids=torch.cat([prompt, torch.randint(2, vocabulary, (length,), generator=generator)]),
                    prompt_tokens=options.prompt,
                    mask=torch.ones(length, dtype=torch.bool),
                    advantages=torch.ones(length),
                )
            )
    return found


def micro_batches(options: argparse.Namespace, layout: str, shares: bool, device: torch.device, repeat: int) -> list[Batch]:
    plan = BatchPlan(
        prompts_per_step=options.prompts, samples_per_prompt=options.samples, updates_per_step=1, epochs=1, micro_batch_size=1, layout=layout,
        equation="", needs_prepass=None, tokens_per_micro_batch=options.tokens, share_prompts=shares,
        pass_cost=pass_cost(ModelFacts(path=options.shape), device.type, layout, options.tokens, shares=shares),
    )  # fmt: skip
    rows = batches.by_length(experiences(options, repeat), plan)
    return batches.micro_batches(rows, plan, batches.NO_DENOMINATORS, SoloWorld(), pad_id=0, device=device)


class Clock:
    """Seconds of a part: until the host goes on, and until the device is done."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.host, self.whole = device, 0.0, 0.0

    def __enter__(self) -> None:
        self._start = self._settled()

    def __exit__(self, *_: object) -> None:
        self.host += time.perf_counter() - self._start
        self.whole += self._settled() - self._start

    def _settled(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()


def one_pass(policy: CausalPolicy | BarePolicy, batch: Batch, clocks: dict[str, Clock], no_gradient: bool) -> Tensor:
    with clocks["no_gradient"], torch.no_grad():
        if no_gradient:
            policy.logprobs(batch, 1.0)
    with clocks["forward"]:
        logprobs, _ = policy.logprobs(batch, 1.0)
        loss = -(logprobs * batch.advantages).sum() / 1e4
    with clocks["backward"]:
        loss.backward()
    return loss.detach()


def run_case(options: argparse.Namespace, name: str, device: torch.device) -> dict[str, Any]:
    attention, layout, shares = CASES[name]
    fused = not options.plain_scores and kernels_work(device) is None
    made = made_policy(options.shape, attention, device, options.prompt + options.response, fused=fused, liger=options.liger)
    policy = BarePolicy(made.model) if name == "bare" else made
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    repeats: list[dict[str, Any]] = []
    for repeat in range(options.repeats + 1):  # the first warms up
        parts = micro_batches(options, layout, shares, device, repeat)
        policy.zero_grad()
        clocks = {part: Clock(device) for part in ("no_gradient", "forward", "backward")}
        loss = sum(float(one_pass(policy, part, clocks, options.no_gradient)) for part in parts)
        seconds = {part: clock.whole for part, clock in clocks.items()}
        positions, trained = sum(part.input_ids.numel() for part in parts), sum(part.target_ids.numel() for part in parts)
        repeats.append(
            {"micro_batches": len(parts), "positions": positions, "trained": trained, "seconds": sum(seconds.values()), **seconds,
             "host": sum(clock.host for clock in clocks.values()), "loss": loss}
        )  # fmt: skip
    ordered = sorted(repeats[1:], key=lambda each: float(each["seconds"]))
    found: dict[str, Any] = {"fused_scores": fused and name != "bare", **ordered[len(ordered) // 2 if options.new_lengths else 0]}
    found["loss"] = repeats[-1]["loss"]  # of the same answers in every case, as the gradient's norm
    found["grad_norm"] = float(torch.nn.utils.get_total_norm([p.grad for p in policy.parameters() if p.grad is not None]))
    if device.type == "cuda":
        found["memory_gib"] = torch.cuda.max_memory_allocated(device) / 1024**3
    if options.profile:
        print(busiest(policy, parts[0], device), flush=True)
    return found


def busiest(policy: CausalPolicy | BarePolicy, batch: Batch, device: torch.device) -> str:
    """Where one micro-batch's time goes, forward and backward."""
    from torch.profiler import ProfilerActivity, profile

    wanted = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
    with profile(activities=wanted) as traced:
        one_pass(policy, batch, {part: Clock(device) for part in ("no_gradient", "forward", "backward")}, False)
    by = "self_device_time_total" if device.type == "cuda" else "self_cpu_time_total"
    averages = traced.key_averages()
    rows = sorted(averages, key=lambda row: getattr(row, by), reverse=True)[:TOP]
    lines = [f"{getattr(row, by) / 1000:10.3f} ms  {row.count:6d} x  {row.key[:110]}" for row in rows]
    whole = sum(getattr(row, by) for row in averages) / 1000
    host = sum(row.self_cpu_time_total for row in averages) / 1000
    longest = sorted(averages, key=lambda row: row.self_cpu_time_total, reverse=True)[:10]
    lines += [f"device {whole:.1f} ms, host {host:.1f} ms; the host's longest:"]
    return "\n".join([*lines, *(f"{row.self_cpu_time_total / 1000:10.3f} ms  {row.count:6d} x  {row.key[:110]}" for row in longest)])


def line(name: str, found: dict[str, Any]) -> str:
    memory = "" if "memory_gib" not in found else f"  memory {found['memory_gib']:.1f} GiB"
    before = f"no gradient {found['no_gradient']:.3f} + " if found["no_gradient"] > 0.001 else ""
    passes = f"{before}forward {found['forward']:.3f} + backward {found['backward']:.3f}"
    work = f"{found['micro_batches']} passes of {found['positions']:,} positions{memory}"
    same = f"loss {found['loss']:.5f}  grad {found['grad_norm']:.5f}"
    return f"{name:<7} {found['seconds']:.3f} s = {passes}  (host {found['host']:.3f})  {work}  {same}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="0.5b")
    parser.add_argument("--cases", default="padded,varlen,shared")
    numbers = {"prompts": 16, "samples": 8, "prompt": 2048, "response": 256, "mean-response": 0, "repeats": 2, "tokens": 16384}
    for name, default in numbers.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--new-lengths", action="store_true", help="other answers in every repeat")
    parser.add_argument("--without-cudnn", action="store_true", help="attention of padded rows by the flash kernel instead")
    parser.add_argument("--no-gradient", action="store_true", help="a pass without gradient first, as old log-probs and references take")
    parser.add_argument("--plain-scores", action="store_true", help="scores are read by plain torch on a GPU too")
    parser.add_argument("--liger", action="store_true", help="Liger's kernels in the model (train.kernels)")
    parser.add_argument("--profile", action="store_true", help=f"print the {TOP} kernels of a micro-batch that take longest")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.backends.cuda.enable_cudnn_sdp(not options.without_cudnn)
    results: dict[str, Any] = {}
    for name in options.cases.split(","):
        results[name] = run_case(options, name, device)
        print(line(name, results[name]), flush=True)
        if device.type == "cuda":
            torch.cuda.empty_cache()
    if options.out is not None:
        shown = {key: value for key, value in vars(options).items() if key != "out"}
        options.out.write_text(json.dumps({"machine": machine(), "options": shown, "results": results}, indent=2) + "\n")


if __name__ == "__main__":
    main()

"""Everything that is measured on a machine of so many GPUs, or on a CPU, one after the other: a table, and JSON under benchmarks/results/.

    python -m benchmarks.gpu 0                                    a CPU (`make bench`): commands, against the peers, checkpoints, growth, recipes
    python -m benchmarks.gpu 1 --model FOLDER_OF_SMOLLM2          one GPU: against the peers, bare vLLM, a bare update, own workloads
    python -m benchmarks.gpu 2 --minutes 10                       two GPUs: strong and weak scaling, ZeRO 2 and 3, a server
    python -m benchmarks.gpu 4 --list                             what there is and how long it takes

What has its result already is not measured again (--again); what does not fit into --minutes is left for the next call. The first start of an engine
on a new machine compiles for one to two minutes. Peers need their packages: pip install trl.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.runs import RESULTS

PEERS = "rft,rft-liger,trl-tuned,trl-liger,trl-default"


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """`minutes`: about; `command`: arguments of python; `result`: pattern of its file among the results; `real`: needs --model."""

    what: str
    minutes: float
    command: tuple[str, ...]
    result: str
    real: bool = False


def against(name: str, minutes: float, what: str, *, sides: str = "rft", repeats: int = 1, ranks: int = 1, real: bool = False) -> Item:
    command = ("-m", "benchmarks.against", name, "--sides", sides, "--repeats", str(repeats), "--ranks", str(ranks))
    result = f"against-{name}-x{ranks}-*.json" if ranks > 1 else f"against-{name}-[A-Zc]*.json"  # the card: NVIDIA-..., or cpu
    return Item(what=what, minutes=minutes, command=command, result=result, real=real)


def passes(shape: str, prompt: int, response: int, *more: str) -> Item:
    name = f"passes-{shape}-{prompt}-{response}{'-liger' if '--liger' in more else ''}.json"
    cases = () if "--liger" in more else ("--cases", "bare,padded,varlen,shared")
    sizes = ("--shape", shape, "--prompt", str(prompt), "--response", str(response), "--tokens", "32768")
    command = ("-m", "benchmarks.passes", *sizes, *cases, *more)
    return Item(what=f"passes of the update, {shape}, {prompt} + {response}", minutes=1, command=(*command, "--out", f"{{out}}/{name}"), result=name)


def rollout(shape: str, minutes: float) -> Item:
    name = f"rollout_vllm-{shape}.json"
    sizes = ("--prompts", "128", "--samples", "8", "--prompt-tokens", "256", "--new-tokens", "512")
    command = ("-m", "benchmarks.rollout_vllm", "--shape", shape, *sizes, "--out", f"{{out}}/{name}")
    return Item(what=f"the engine against bare vLLM, {shape}", minutes=minutes, command=command, result=name)


def ways(what: str, minutes: float, key: str, name: str, recipe: str, *options: str) -> Item:
    """A recipe's steps with `key` by itself and off."""
    sides = ("--way", f"{key}=auto", "--way", f"{key}=false")
    command = ("-m", "benchmarks.ways", recipe, *sides, *options, "--name", name, "--out", "{out}")
    return Item(what=what, minutes=minutes, command=command, result=f"ways-{name}.json")


def on_cpu(what: str, minutes: float, module: str, result: str, *options: str) -> Item:
    return Item(what=what, minutes=minutes, command=("-m", f"benchmarks.{module}", *options, "--out", f"{{out}}/{result}"), result=result)


SMOLLM2 = ("smollm2-chain-sum", "--set", "rollout.engine=vllm", "--set", "batch.prompts_per_step=64", "--repeats", "1")
CPU_SIDES = "rft,trl-tuned,trl-default,plain"
SMALL_CHECKPOINT = ("--shape", "135m", "--prompts", "2", "--prompt", "16", "--response", "8", "--steps", "2", "--repeats", "1", "--ranks", "1",
                    "--set", "rollout.samples_per_prompt=4")  # fmt: skip

# To add one: an item. In the order of what is wanted first.
MACHINES: dict[int, tuple[Item, ...]] = {
    0: (
        on_cpu("commands, the first token, resume", 6, "commands", "commands-cpu.json"),
        against("c1", 3, "a step against the peers, tiny", sides=CPU_SIDES, repeats=2),
        against("c2", 5, "a step against the peers, small", sides=CPU_SIDES, repeats=2),
        against("c2", 2, "small, two ranks", ranks=2),
        against("c2-vary", 2, "small, answers of different lengths"),
        against("c1-ppo", 2, "PPO, tiny"),
        against("c3", 8, "a step against the peers, SmolLM2's shape", sides="rft,trl-tuned,plain", repeats=2),
        against("c3-bf16", 8, "the same in bfloat16", sides="rft,trl-tuned"),
        on_cpu("what a checkpoint holds up, 135M", 2, "checkpoint", "checkpoint-135m-cpu.json", *SMALL_CHECKPOINT),
        on_cpu("rewards of completions that come all at once", 1, "scoring", "scoring-cpu.json"),
        on_cpu("how a step grows", 10, "growth", "growth-cpu.json"),
        ways("answers without advantage, quickstart", 2, "batch.skip_zero_advantage", "skip-cpu", "quickstart", "--ranks", "2", "--steps", "30"),
        ways("answers to the rank with least to do, quickstart", 2, "batch.balance", "balance-cpu", "quickstart", "--ranks", "2", "--steps", "30"),
        on_cpu("the shipped recipes", 20, "runs", "runs-cpu.json", "cpu"),
    ),
    1: (
        against("cmp-0.5b", 18, "a step against TRL, 0.5B", sides=PEERS, repeats=2),
        against("real", 14, "a step against TRL, SmolLM2, real ends", sides=PEERS, repeats=2, real=True),
        passes("0.5b", 256, 1024),
        passes("0.5b", 256, 1024, "--liger"),
        passes("1.5b", 2048, 256),
        rollout("qwen2.5-0.5b", 7),
        against("cmp-1.5b", 20, "a step against TRL, 1.5B", sides=PEERS, repeats=2),
        against("vary-0.5b", 3, "answers of different lengths, 0.5B"),
        against("std-0.5b", 5, "W-std, 0.5B"),
        against("std-1.5b", 8, "W-std, 1.5B"),
        against("long-prompts", 12, "long prompts, shared in the update", sides="rft,trl-tuned"),
        against("cmp-smollm2", 4, "the engine inside and beside", sides="rft,rft-beside"),
        against("ppo-0.5b", 4, "PPO with a critic and a reward model"),
        against("lora-7b", 7, "7B, LoRA"),
        ways("answers without advantage, SmolLM2", 5, "batch.skip_zero_advantage", "skip-1-gpu", *SMOLLM2, "--gpus", "1"),
        passes("1.5b", 256, 1024, "--liger"),
        passes("7b", 256, 512, "--liger"),
        rollout("qwen2.5-1.5b", 8),
    ),
    2: (
        against("std-0.5b", 4, "strong scaling, 0.5B", ranks=2),
        against("std-1.5b", 6, "strong scaling, 1.5B", ranks=2),
        against("weak-0.5b-x2", 5, "weak scaling, 0.5B", ranks=2),
        against("weak-1.5b-x2", 8, "weak scaling, 1.5B", ranks=2),
        against("server-1.5b", 8, "one GPU trains and one samples, 1.5B"),
        against("half-3b-zero2", 8, "3B, ZeRO 2", ranks=2),
        against("half-3b-zero3", 8, "3B, ZeRO 3", ranks=2),
        ways("answers to the rank with least to do, SmolLM2", 5, "batch.balance", "balance-2-gpus", *SMOLLM2, "--gpus", "2"),
    ),
    4: (
        against("std-0.5b", 3, "strong scaling, 0.5B", ranks=4),
        against("std-1.5b", 5, "strong scaling, 1.5B", ranks=4),
        against("weak-0.5b-x4", 5, "weak scaling, 0.5B", ranks=4),
        against("weak-1.5b-x4", 8, "weak scaling, 1.5B", ranks=4),
        against("std-7b-zero2", 10, "7B, ZeRO 2", ranks=4),
        against("std-7b-zero3", 10, "7B, ZeRO 3", ranks=4),
    ),
}


def without(item: Item, there: Sequence[Path]) -> str:
    """In words, the sides that have no result yet."""
    asked = item.command[item.command.index("--sides") + 1].split(",") if "--sides" in item.command else []
    found = {side for path in there if asked for side in json.loads(path.read_text(encoding="utf-8"))["sides"]}
    missing = [side for side in asked if side not in found]
    return f", but for {', '.join(missing)}: --again measures all sides" if missing else ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("gpus", type=int, choices=list(MACHINES), help="0: a CPU")
    parser.add_argument("--model", type=Path, help="folder of SmolLM2-135M-Instruct, for what needs real weights")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin nothing that would take longer than this in all")
    parser.add_argument("--again", action="store_true", help="measure what has its result already")
    parser.add_argument("--only", default="", help="items whose text has this word in it")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the results")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    start, failed = time.monotonic(), []
    for item in MACHINES[options.gpus]:
        text = " ".join(item.command)
        if options.only not in f"{item.what} {text}":
            continue
        there = sorted(options.out.glob(item.result))
        left = options.minutes - (time.monotonic() - start) / 60
        unreal = "needs --model" if item.real and options.model is None else ""
        state = f"there already{without(item, there)}" if there and not options.again else unreal
        if not state and item.minutes > left:
            state = f"no time: {item.minutes:g} min"
        print(f"{item.minutes:4.0f} min  {item.what}: {state or text}", flush=True)
        if state or options.list:
            continue
        command = [word.replace("{out}", str(options.out)) for word in item.command]
        if item.command[1] == "benchmarks.against":
            command += ["--out", str(options.out), *(["--model", str(options.model)] if item.real else [])]
        if subprocess.run([sys.executable, *command], check=False).returncode:
            failed.append(item.what)
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()

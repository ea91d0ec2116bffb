"""How much of a bare vLLM's speed is left inside `rft`: the same requests, the same engine, one way after the other in turns.

    python -m benchmarks.rollout_vllm --model builtin:quickstart --prompts 8 --samples 8 --new-tokens 24  # a CPU
    python -m benchmarks.rollout_vllm --shape qwen2.5-0.5b --prompts 128 --samples 8 --prompt-tokens 256 --new-tokens 512  # a GPU

Ways: `bare` is `LLM.generate` with `n` samples a prompt, as others call it; `bare-rows` the same with one request a sample; `rft` the engine of the
training ranks; `rft-steps` the same with vLLM's own scheduler at every step. Each without and with log-probs. Written as JSON:
tokens a second (median and range), the ratios, how long pushes of weights take.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config

from rftcli.builtin import builtin_path
from rftcli.engines import vllm_decode
from rftcli.engines.vllm import VLLMSampler, start
from rftcli.models.load import DTYPES, load_causal_lm, load_tokenizer
from rftcli.runtime.engine_folder import config_folder
from rftcli.runtime.engine_process import ON_A_CPU
from rftcli.runtime.vllm_engine import ALWAYS, UNLESS_SET
from rftcli.runtime.world import SoloWorld
from rftcli.types import Prompt, Request, SamplingSettings

SHAPES: dict[str, Any] = {
    "tiny": LlamaConfig(
        vocab_size=512, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=64
    ),
    "qwen2.5-0.5b": Qwen2Config(
        vocab_size=151936, hidden_size=896, intermediate_size=4864, num_hidden_layers=24, num_attention_heads=14, num_key_value_heads=2,
        tie_word_embeddings=True,
    ),
    "qwen2.5-1.5b": Qwen2Config(
        vocab_size=151936, hidden_size=1536, intermediate_size=8960, num_hidden_layers=28, num_attention_heads=12, num_key_value_heads=2,
        tie_word_embeddings=True,
    ),
    "qwen2.5-7b": Qwen2Config(
        vocab_size=152064, hidden_size=3584, intermediate_size=18944, num_hidden_layers=28, num_attention_heads=28, num_key_value_heads=4
    ),
}  # fmt: skip
"""Random weights in these shapes."""


def trainers_model(arguments: argparse.Namespace, device: torch.device) -> Any:
    if arguments.model is None:
        torch.manual_seed(0)
        with device:
            return AutoModelForCausalLM.from_config(SHAPES[arguments.shape], dtype=DTYPES[arguments.dtype]).eval()
    options = {"dropout": 0.0, "options": {}, "trust_remote_code": False}
    return load_causal_lm(path_of(arguments.model), dtype=arguments.dtype, attention="sdpa", device=device, **options).eval()


def path_of(model: str) -> str:
    return str(builtin_path(model.removeprefix("builtin:"))) if model.startswith("builtin:") else model


def engine(arguments: argparse.Namespace, model: Any, tokenizer: Any, device: torch.device) -> tuple[Any, VLLMSampler]:
    rows = min(1024, arguments.prompts * arguments.samples)
    asked: dict[str, Any] = {
        "load_format": "dummy", "dtype": arguments.dtype, "distributed_executor_backend": "external_launcher", "enable_prefix_caching": True,
        "max_model_len": arguments.prompt_tokens + arguments.new_tokens, "max_num_seqs": rows, "skip_tokenizer_init": True,
        "generation_config": "vllm", "logprobs_mode": "processed_logprobs", "disable_log_stats": True, "enforce_eager": device.type == "cpu",
    }  # fmt: skip
    if device.type == "cpu":
        asked |= {"kv_cache_memory_bytes": 512 * 2**20, **ON_A_CPU}
    else:
        asked |= {"gpu_memory_utilization": arguments.memory_share, "graphs_up_to": rows}
    llm, params, fields, free = start(str(config_folder(model, None, arguments.dtype)), asked, json.loads(arguments.options))
    sampler = VLLMSampler(
        llm, params, fields, model, tokenizer, (), world=SoloWorld(), seeded=free if arguments.seeds == "auto" else arguments.seeds == "request",
        dtype=DTYPES[arguments.dtype], device=device,
    )  # fmt: skip
    return llm, sampler


def ways(arguments: argparse.Namespace, llm: Any, sampler: VLLMSampler, vocabulary: int) -> dict[str, Callable[[int], int]]:
    """Name -> a function of the turn (other prompts each time, so that no prefix is found) that gives the tokens made."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    def prompts(turn: int) -> list[list[int]]:
        generator = torch.Generator().manual_seed(turn)
        return torch.randint(3, vocabulary - 1, (arguments.prompts, arguments.prompt_tokens), generator=generator).tolist()

    def params(count: int, logprobs: bool) -> Any:
        return SamplingParams(
            n=count, max_tokens=arguments.new_tokens, ignore_eos=True, detokenize=False, logprobs=0 if logprobs else None,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )  # fmt: skip

    def bare(turn: int, logprobs: bool) -> int:
        asked = [{"prompt_token_ids": ids} for ids in prompts(turn)]
        made = llm.generate(asked, params(arguments.samples, logprobs), use_tqdm=False)
        return sum(len(one.token_ids) for output in made for one in output.outputs)

    def rows(turn: int, logprobs: bool) -> int:
        asked = [{"prompt_token_ids": ids} for ids in prompts(turn) for _ in range(arguments.samples)]
        return sum(len(output.outputs[0].token_ids) for output in llm.generate(asked, params(1, logprobs), use_tqdm=False))

    def rft(turn: int, logprobs: bool, quick: bool = True) -> int:
        requests = [
            Request(
                prompt=Prompt(draw=draw, row=draw, row_id=str(draw), source="s", label="l", text="", token_ids=tuple(ids)),
                samples=tuple(range(arguments.samples)),
            )
            for draw, ids in enumerate(prompts(turn))
        ]
        settings = SamplingSettings(max_new_tokens=arguments.new_tokens, seed=turn, ignore_eos=True, logprobs=logprobs)
        if burst is not None and quick:
            burst.use()
        try:
            return sum(len(made.trace.ids) for made in sampler.generate(requests, settings))
        finally:
            if burst is not None:
                burst.undo()

    burst = vllm_decode.quicken(llm)
    if burst is not None:
        burst.undo()  # the bare ways have vLLM as it is
    found: dict[str, Callable[[int], int]] = {}
    for name, way in (("bare", bare), ("bare-rows", rows), ("rft", rft), ("rft-steps", partial(rft, quick=False))):
        found[name] = lambda turn, way=way: way(turn, False)
        found[f"{name}+logprobs"] = lambda turn, way=way: way(turn, True)
    return found


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    model, tokenizer = trainers_model(arguments, device), load_tokenizer(str(builtin_path("quickstart")))
    begin = time.perf_counter()
    llm, sampler = engine(arguments, model, tokenizer, device)
    found: dict[str, Any] = {"start_seconds": round(time.perf_counter() - begin, 1), "pushes_ms": []}
    for number in range(4):
        begin = time.perf_counter()
        sampler.load(((name, parameter.data) for name, parameter in model.named_parameters()), number)
        if device.type == "cuda":
            torch.cuda.synchronize()
        found["pushes_ms"].append(round((time.perf_counter() - begin) * 1000, 1))
    seconds: dict[str, list[float]] = {}
    tokens: dict[str, int] = {}
    turn, found_ways = 0, ways(arguments, llm, sampler, model.config.vocab_size)
    for repeat in range(arguments.repeats + 1):
        for name, way in found_ways.items():
            turn += 1
            begin = time.perf_counter()
            tokens[name] = way(turn)
            if repeat:
                seconds.setdefault(name, []).append(time.perf_counter() - begin)
    found["tokens_per_second"] = {
        name: {
            "median": round(tokens[name] / statistics.median(values), 1),
            "range": [round(tokens[name] / max(values), 1), round(tokens[name] / min(values), 1)],
        }
        for name, values in seconds.items()
    }
    rate = {name: value["median"] for name, value in found["tokens_per_second"].items()}
    found["ratio"] = {
        "rft / bare": round(rate["rft"] / rate["bare"], 3),
        "rft / bare-rows": round(rate["rft"] / rate["bare-rows"], 3),
        "rft / rft-steps": round(rate["rft"] / rate["rft-steps"], 3),
        "with log-probs": round(rate["rft+logprobs"] / rate["bare+logprobs"], 3),
    }
    if device.type == "cuda":
        found["device"], found["peak_gib"] = torch.cuda.get_device_name(), round(torch.cuda.max_memory_allocated() / 2**30, 1)
    sampler.close()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a directory, or builtin:NAME; else random weights of --shape")
    parser.add_argument("--shape", default="tiny", choices=SHAPES)
    parser.add_argument("--dtype", default="bfloat16" if torch.cuda.is_available() else "float32", choices=DTYPES)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--prompt-tokens", type=int, default=32)
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--memory-share", type=float, default=0.5)
    parser.add_argument("--seeds", default="auto", choices=("auto", "request", "engine"))
    parser.add_argument("--options", default="{}", help="further arguments of vllm.LLM, as JSON")
    parser.add_argument("--out", type=Path, default=Path("rollout_vllm.json"))
    arguments = parser.parse_args()
    os.environ.update(ALWAYS | {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"})
    for name, value in UNLESS_SET.items():
        os.environ.setdefault(name, value)
    with tempfile.TemporaryDirectory() as folder:
        backend = "nccl" if torch.cuda.is_available() else "gloo"
        dist.init_process_group(backend, init_method=f"file://{folder}/meet", rank=0, world_size=1)
        found = measure(arguments)  # vLLM ends the process group with the process
    import vllm

    machine = {"cpu": platform.machine(), "torch": torch.__version__, "vllm": vllm.__version__}
    asked = {name: str(value) if isinstance(value, Path) else value for name, value in vars(arguments).items()}
    text = json.dumps({"machine": machine, "asked": asked, **found}, indent=1)
    arguments.out.write_text(text + "\n", encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()

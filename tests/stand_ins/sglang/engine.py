"""The engine of the stand-in: see the package."""

import asyncio
import atexit
import importlib
import json
import logging
import multiprocessing
import os
import re
import signal
from types import SimpleNamespace
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from sglang.srt.server_args import ServerArgs
from sglang.srt.utils import MultiprocessingSerializer
from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket

SAMPLING = (
    "max_new_tokens", "stop", "stop_token_ids", "stop_regex", "temperature", "top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty",
    "repetition_penalty", "min_new_tokens", "n", "json_schema", "regex", "ebnf", "structural_tag", "ignore_eos", "skip_special_tokens",
    "spaces_between_special_tokens", "no_stop_trim", "logit_bias", "sampling_seed", "custom_params",
)  # fmt: skip


class Engine:
    def __init__(self, **kwargs: Any) -> None:
        self.server_args = arguments = ServerArgs(**kwargs)
        self._disturb(arguments)
        config = AutoConfig.from_pretrained(arguments.model_path)
        assert arguments.load_format == "dummy", "nothing else is here"
        torch.manual_seed(arguments.random_seed or 0)
        self.model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, arguments.dtype)).eval()
        self._buffers = {name: buffer.clone() for name, buffer in self.model.named_buffers()}
        self.tokenizer = None if arguments.skip_tokenizer_init else _tokenizer(arguments.model_path)
        eos = config.eos_token_id
        self._eos = set(eos if isinstance(eos, list) else [eos]) | (set() if self.tokenizer is None else {self.tokenizer.eos_token_id})
        self._eos.discard(None)
        self.loop = asyncio.new_event_loop()
        self.asked: list[tuple[list[int], dict[str, Any]]] = []
        """Not of the real engine: (ids, sampling parameters) of every request."""
        self.calls: list[str] = []
        self.nan = False
        self._session, self._asleep, self._backup = False, set(), None
        self._running: dict[str, asyncio.Event] = {}
        self._handles = False
        self.tokenizer_manager = SimpleNamespace(abort_request=self._abort)
        atexit.register(self.shutdown)

    def _disturb(self, arguments: ServerArgs) -> None:
        """What the real engine does to its process."""
        self.place = {name: os.environ.get(name) for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR")}
        os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "8"
        multiprocessing.set_start_method("spawn", force=True)
        logging.basicConfig(level=logging.ERROR, format="sglang %(message)s", force=True)
        signal.signal(signal.SIGQUIT, arguments.custom_sigquit_handler or signal.SIG_DFL)
        asyncio.set_event_loop_policy(type("Policy", (asyncio.DefaultEventLoopPolicy,), {})())

    def _handle_loop(self) -> None:
        """The first call registers handlers with the loop."""
        if not self._handles:
            self._handles = True
            self.loop.add_signal_handler(signal.SIGTERM, self.calls.append, "terminated")
            self.loop.add_signal_handler(signal.SIGQUIT, self.calls.append, "child failed")

    def _now(self, value: Any) -> Any:
        async def answer() -> Any:
            self._handle_loop()
            return value

        return self.loop.run_until_complete(answer())

    # generation

    async def async_generate(
        self, prompt=None, sampling_params=None, input_ids=None, *, return_logprob=False, stream=False, rid=None, lora_path=None
    ) -> dict[str, Any]:
        self._handle_loop()
        assert prompt is None and not stream
        self.asked.append((list(input_ids), dict(sampling_params)))
        params = self._checked(sampling_params, len(input_ids))
        self._running[rid] = aborted = asyncio.Event()
        try:
            return await self._sampled(list(input_ids), params, return_logprob, aborted)
        finally:
            del self._running[rid]

    def _checked(self, sampling_params: dict[str, Any], prompt: int) -> SimpleNamespace:
        for name in sampling_params:
            if name not in SAMPLING:
                raise TypeError(f"Unexpected keyword argument '{name}'")
        given = {name: value for name, value in sampling_params.items() if value is not None}
        defaults = {
            "max_new_tokens": 128, "stop": [], "stop_token_ids": [], "temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0,
            "frequency_penalty": 0.0, "presence_penalty": 0.0, "repetition_penalty": 1.0, "min_new_tokens": 0, "ignore_eos": False,
            "logit_bias": {}, "sampling_seed": None, "regex": None, "json_schema": None, "no_stop_trim": False,
        }  # fmt: skip
        p = SimpleNamespace(**{**defaults, **given})
        if prompt >= self.server_args.context_length:
            raise ValueError(f"The input ({prompt} tokens) is longer than the model's context length ({self.server_args.context_length} tokens).")
        if not 0.0 < p.top_p <= 1.0 or p.top_k == 0 or p.top_k < -1:
            raise ValueError(f"top_p must be in (0, 1] and top_k -1 or at least 1, got {p.top_p}, {p.top_k}.")
        for name in ("frequency_penalty", "presence_penalty"):
            if not -2.0 <= getattr(p, name) <= 2.0:
                raise ValueError(f"{name} must be in [-2, 2], got {getattr(p, name)}.")
        if not 0 <= p.min_new_tokens <= p.max_new_tokens:
            raise ValueError(f"min_new_tokens must be in [0, max_new_tokens({p.max_new_tokens})], got {p.min_new_tokens}.")
        if p.json_schema is not None:
            json.loads(p.json_schema)
        if self.tokenizer is None and (p.stop or p.min_new_tokens or p.regex or p.json_schema):
            raise ValueError("stop, min_new_tokens and grammars are unavailable when skip_tokenizer_init=True")
        if 0 <= p.temperature < 1e-6:
            p.temperature, p.top_k = 1.0, 1
        p.max_new_tokens = max(0, min(p.max_new_tokens, self.server_args.context_length - 2 - prompt))
        return p

    async def _sampled(self, prompt: list[int], p: SimpleNamespace, return_logprob: bool, aborted: asyncio.Event) -> dict[str, Any]:
        if self._asleep:
            raise AssertionError("the memory of weights or cache is given back")
        seed = p.sampling_seed if p.sampling_seed is not None and self.server_args.enable_deterministic_inference else torch.seed()
        noise, ids, told, reason = torch.Generator().manual_seed(seed % 2**63), [], [], None
        while reason is None:
            await asyncio.sleep(0)
            if aborted.is_set():
                reason = {"type": "abort", "message": "Abort before prefill"}
                break
            with torch.no_grad():
                scores = self.model(input_ids=torch.tensor([[*prompt, *ids]])).logits[0, -1].float()
            if self.nan:
                return {"output_ids": [*ids, 2], "meta_info": {"finish_reason": {"type": "stop", "matched": "NaN happened"}}}
            for token, bias in p.logit_bias.items():
                scores[int(token)] += bias
            for token in set(ids):
                scores[token] -= p.presence_penalty + p.frequency_penalty * ids.count(token)
            if len(ids) < p.min_new_tokens:
                scores[[*self._eos, *p.stop_token_ids]] = -torch.inf
            self._form(scores, ids, p)
            logprobs = (scores / p.temperature).log_softmax(-1)  # of before the filters
            token = int(torch.multinomial(_filtered(logprobs.exp(), p), 1, generator=noise))
            ids.append(token)
            told.append((float(logprobs[token]), token, None))
            reason = self._ended(ids, p)
        about = {"finish_reason": reason}
        if return_logprob:
            about["output_token_logprobs"] = told
        return {"output_ids": ids, "meta_info": about}

    def _form(self, scores: torch.Tensor, ids: list[int], p: SimpleNamespace) -> None:
        """Of forms only the one of the tests: so many digits."""
        if p.regex is None:
            return
        (number,) = map(int, re.fullmatch(r"\[0-9\]\{(\d+)\}", p.regex).groups())
        text = self.tokenizer.decode(ids)
        allowed = [token for token in range(len(scores)) if self.tokenizer.decode([token]).isdecimal() and len(self.tokenizer.decode([token])) == 1]
        allowed = list(self._eos) if len(text) == number else allowed
        kept = scores[allowed].clone()
        scores.fill_(-torch.inf)
        scores[allowed] = kept

    def _ended(self, ids: list[int], p: SimpleNamespace) -> dict[str, Any] | None:
        text = "" if not p.stop else self.tokenizer.decode(ids)
        found = next((stop for stop in p.stop if stop in text), None)
        if found is not None:
            return {"type": "stop", "matched": found}
        if not p.ignore_eos and ids[-1] in self._eos | set(p.stop_token_ids):
            return {"type": "stop", "matched": ids[-1]}
        return {"type": "length", "length": len(ids)} if len(ids) >= p.max_new_tokens else None

    def _abort(self, rid: str = "", abort_all: bool = False) -> None:
        assert rid in self._running and not abort_all
        self._running[rid].set()

    # memory and weights

    def flush_cache(self) -> SimpleNamespace:
        self.calls.append("flush")
        return self._now(SimpleNamespace(success=not self._running))

    def release_memory_occupation(self, tags: list[str] | None = None) -> None:
        assert self.server_args.enable_memory_saver and not self._running
        self.calls.append(f"release {tags}")
        self._asleep |= set(tags)
        if "weights" in tags:
            kept = self.server_args.enable_weights_cpu_backup
            self._backup = {name: tensor.clone() for name, tensor in self.model.state_dict().items()} if kept else None
            for parameter in self.model.parameters():
                parameter.data.fill_(torch.nan)
        return self._now(None)

    def resume_memory_occupation(self, tags: list[str] | None = None) -> None:
        self.calls.append(f"resume {tags}")
        for tag in tags:
            self._asleep.remove(tag)
        if "weights" in tags and self._backup is not None:
            self.model.load_state_dict(self._backup)
        return self._now(None)

    def begin_weight_update(self, selector: str = "all") -> tuple[bool, str]:
        if self._session:
            return self._now((False, "a weight-update session is already open"))
        self._session = True
        return self._now((True, "Success"))

    def end_weight_update(self) -> tuple[bool, str]:
        if not self._session:
            return self._now((False, "no weight-update session is open"))
        self._session = False
        return self._now((True, "Success"))

    def update_weights_from_tensor(self, named_tensors, load_format: str | None = None, flush_cache: bool = True) -> tuple[bool, str]:
        if not self._session:
            return self._now((False, "update_weights_from_tensor must run between begin_weight_update() and end_weight_update()"))
        if "weights" in self._asleep:
            raise AssertionError("the memory of the weights is given back")
        self.calls.append(f"update {load_format}")
        if load_format == "flattened_bucket":
            assert len(named_tensors) == self.server_args.tp_size and all(isinstance(payload, bytes) for payload in named_tensors)
            found = MultiprocessingSerializer.deserialize(named_tensors[0])
            return self._load(FlattenedTensorBucket(flattened_tensor=found["flattened_tensor"], metadata=found["metadata"]).reconstruct_tensors())
        named = MultiprocessingSerializer.deserialize(MultiprocessingSerializer.serialize(named_tensors))
        if load_format is None:
            return self._load(named)
        if load_format in (self.server_args.custom_weight_loader or ()):
            module, _, name = load_format.rpartition(".")
            getattr(importlib.import_module(module), name)(self.model, named)
            return self._now((True, "Success"))
        raise NotImplementedError(f"Unknown load_format={load_format}")

    def _load(self, named: list[tuple[str, torch.Tensor]]) -> tuple[bool, str]:
        own = dict(self.model.named_parameters())
        for name, tensor in named:
            if name not in own:
                logging.warning("Parameter %s not found", name)  # as the real loaders: a name that nobody knows is left out
            elif own[name].shape != tensor.shape:
                return self._now((False, f"The size of tensor {tuple(tensor.shape)} does not match {name}"))
            else:
                own[name].data.copy_(tensor)
        return self._now((True, "Success"))

    def get_weights_by_name(self, name: str, truncate_size: int = 100) -> list:
        return self._now(dict(self.model.named_parameters())[name].float().tolist()[:truncate_size])

    def shutdown(self) -> None:
        raise AssertionError("it would end every child of this process, whoever started it")


def _filtered(probabilities: torch.Tensor, p: SimpleNamespace) -> torch.Tensor:
    kept = probabilities.clone()
    order = probabilities.argsort(descending=True)
    if p.top_k != -1:
        kept[order[p.top_k :]] = 0.0
    sums = probabilities[order].cumsum(0) - probabilities[order]
    kept[order[sums > p.top_p]] = 0.0
    kept[probabilities < p.min_p * probabilities.max()] = 0.0
    return kept


def _tokenizer(path: str) -> Any:
    try:
        return AutoTokenizer.from_pretrained(path)
    except (ValueError, OSError):
        return PreTrainedTokenizerFast.from_pretrained(path)

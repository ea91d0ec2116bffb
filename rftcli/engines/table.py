"""Which engines there are. Leaves out building them: each takes what it needs, and the runtime that owns the module and the tokenizer calls it."""

from __future__ import annotations

from importlib import import_module

from rftcli.protocols import Sampler


def sampler_class(kind: str) -> type[Sampler]:
    """The class behind `rollout.engine: KIND`; imports its file, and what that needs, only now."""
    module, _, name = SAMPLERS[kind].partition(":")
    return getattr(import_module(module), name)


# How to add one: write `engines/<kind>.py` with a class that keeps `protocols.Sampler` (token ids in, token ids out; noise keyed by seed, draw and
# sample; every requested sample yielded exactly once; log-probs of the sampled distribution when asked), add its row here and its name to the
# recipe's `rollout.engine`, let the plan say where it runs, and give it the tests of `tests/engines/test_hf_engine.py`.
SAMPLERS: dict[str, str] = {
    "hf": "rftcli.engines.hf:HFSampler",
    "fake": "rftcli.engines.fake:FakeSampler",
    "vllm": "rftcli.engines.vllm:VLLMSampler",
    "sglang": "rftcli.engines.sglang:SGLangSampler",
}

"""What the compiler is told about the world, as plain data. `probe/` fills it in; a test or `rft plan --machine` makes it by hand."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

BEFORE_AMPERE = re.compile(r"\b(Tesla|Quadro|GTX|TITAN|MX\d+|[KM]\d0|P4|P6|P40|P100|V100S?|T4|T\d{3,4}|RTX 20[678]0)\b")
"""Names of cards that do not compute in bfloat16, and that the flash kernels do not run on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineFacts:
    """One machine; several nodes are taken to be alike."""

    cores: int
    memory_gib: float
    gpus: int = 0
    gpu_name: str | None = None
    gpu_memory_gib: float = 0.0
    vllm: bool = False
    """Is the package installed?"""
    gpus_left_alone: int = 0
    """That are there and not used, because ranks on the CPU were asked for."""
    liger: bool = False
    """Is the package installed?"""
    cpu_bfloat16: bool = True
    """Whether the CPU has instructions for it, where that is known."""
    threads: int | None = None
    """The most that the environment grants a process (OMP_NUM_THREADS)."""

    @property
    def has_bfloat16(self) -> bool:
        """Whether there are GPUs, and they compute in bfloat16: those before Ampere only imitate it."""
        return self.gpus > 0 and not BEFORE_AMPERE.search(self.gpu_name or "")

    @property
    def number_type(self) -> str:
        """Of a model where the recipe leaves it open."""
        return "bfloat16" if self.has_bfloat16 else "float32"

    def threads_of_a_rank(self, ranks: int) -> int:
        """Of each of so many ranks on this machine: its share of the cores, and no more than the environment grants."""
        share = max(1, self.cores // max(1, ranks))
        return share if self.threads is None else min(share, self.threads)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """What the model's files say without loading it; None where they do not say."""

    path: str
    architecture: str | None = None
    layers: int | None = None
    hidden: int | None = None
    vocabulary: int | None = None
    max_positions: int | None = None
    parameters: int | None = None
    file_dtype: str | None = None
    plain_attention: bool = True
    """Whether attention is a softmax of scaled products and nothing else: no soft cap, no sinks."""
    window: int | None = None
    """Tokens that a layer with a sliding window sees; None: no layer has one."""
    attends_only: bool = True
    """Whether every layer is attention, over the whole sequence or a sliding window: no recurrence, no chunks."""
    rope_switch: int | None = None
    """Positions from which the longest row of a pass changes the rotary frequencies of all its rows; None: it never does."""
    experts: int | None = None
    """Experts that a router chooses from in each layer; None: the model has no router."""
    revision: str | None = None
    """Commit of a hub id."""
    shapes: Mapping[str, tuple[int, ...]] | None = None
    """Shapes of the stored tensors by name, where the files say so without being loaded."""
    key_width: int | None = None
    """Numbers that a layer keeps of a position as its keys: heads of keys x width of a head."""
    query_width: int | None = None
    """Heads x width of a head."""
    heads: int | None = None
    inner: int | None = None
    """Width of a layer's MLP; of all experts that a position goes through."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScorerFacts:
    """What is known of one entry of `models.scorers` before anything is loaded."""

    model: ModelFacts | None = None
    """None where there is no checkpoint on the ranks."""
    prompt: str | None = None
    """Text of a judge's template, read from its file."""
    template: str | None = None
    """The same of a chat template."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    machine: MachineFacts
    model: ModelFacts
    ranks: int
    """Real rank count: GPUs in use, or processes on a CPU. On all nodes together."""
    tokenizer_revision: str | None = None
    """Commit of a tokenizer that has a hub id of its own."""
    nodes: int = 1
    train_rows: int | None = None
    """Rows of all training sets together; None if they have not been counted."""

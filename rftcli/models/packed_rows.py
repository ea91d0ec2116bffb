"""Where the sequences of a packed row begin and end, told by their positions alone, and the mask that says the same.

In a packed row every sequence's positions start at 0. Where a prompt is shared, its completions follow it one after another, and each one's
positions go on from the prompt's length: 0 1 2 | 3 4 5 | 3 4 | 3. So a position that is neither 0 nor one more than the one before it begins another
completion of the same prompt, and is the prompt's length.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from rftcli.models.flash import SharedPrompts, Spans


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """A sequence, or a prompt with two or more completions behind it."""

    start: int
    prompt: int
    """Tokens of the prompt that is shared; 0: this is one sequence."""
    parts: tuple[int, ...]
    """Tokens of each completion, or of the one sequence."""

    @property
    def tokens(self) -> int:
        return self.prompt + sum(self.parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedRow:
    """The sequences of a row."""

    families: tuple[Family, ...]
    own: Spans
    """Every prompt and every completion to itself."""
    shared: SharedPrompts | None
    """None where no prompt is shared."""

    @property
    def longest(self) -> int:
        """Tokens that the last token of a sequence sees, at most."""
        return max(family.prompt + max(family.parts) for family in self.families)


def read_row(position_ids: Tensor, device: torch.device | None = None) -> PackedRow:
    """The sequences of a row (1, S); what it holds lies on `device`, or on that of the positions. Positions on the CPU are read without waiting for
    a device."""
    assert position_ids.shape[0] == 1, f"packed rows are one row, not {position_ids.shape[0]}"
    device = position_ids.device if device is None else device
    found = families(position_ids[0].cpu())
    lengths = [length for family in found for length in ((family.prompt, *family.parts) if family.prompt else family.parts)]
    ends = _ends(lengths, device)
    own = Spans(queries=ends, keys=ends, most_queries=max(lengths), most_keys=max(lengths), causal=True)
    sharing = [family for family in found if family.prompt]
    return PackedRow(families=found, own=own, shared=_shared(sharing, device) if sharing else None)


def families(positions: Tensor) -> tuple[Family, ...]:
    """Of positions (S,) on the CPU."""
    breaks = torch.ones(positions.numel(), dtype=torch.bool)
    breaks[1:] = positions[1:] != positions[:-1] + 1
    starts = breaks.nonzero().flatten()
    firsts, places = positions[starts].tolist(), [*starts.tolist(), positions.numel()]
    found: list[tuple[int, int, list[int]]] = []
    for first, start, end in zip(firsts, places[:-1], places[1:], strict=True):
        if first == 0:
            found.append((start, 0, [end - start]))
            continue
        begin, prompt, parts = found.pop()
        found.append((begin, first, [*([parts[0] - first] if not prompt else parts), end - start]))
    return tuple(Family(start=start, prompt=prompt, parts=tuple(parts)) for start, prompt, parts in found)


def _shared(sharing: Sequence[Family], device: torch.device) -> SharedPrompts:
    prompts, behind = [family.prompt for family in sharing], [sum(family.parts) for family in sharing]
    starts = [family.start for family in sharing]
    return SharedPrompts(
        completions=_places([start + prompt for start, prompt in zip(starts, prompts, strict=True)], behind, device),
        prompts=_places(starts, prompts, device),
        spans=Spans(
            queries=_ends(behind, device), keys=_ends(prompts, device), most_queries=max(behind), most_keys=max(prompts), causal=False
        ),
    )  # fmt: skip


def _places(starts: Sequence[int], lengths: Sequence[int], device: torch.device) -> Tensor:
    ranges = [torch.arange(start, start + length) for start, length in zip(starts, lengths, strict=True)]
    return torch.cat(ranges).to(device, non_blocking=True)


def _ends(lengths: Sequence[int], device: torch.device) -> Tensor:
    return torch.tensor(list(accumulate(lengths, initial=0)), dtype=torch.int32).to(device, non_blocking=True)


def block_mask(row: PackedRow, device: torch.device) -> Tensor:
    """(1, 1, S, S) bool: which positions (last) each one (last but one) sees."""
    family = torch.cat([torch.full((one.tokens,), index) for index, one in enumerate(row.families)])
    part = torch.cat([
        torch.cat([torch.zeros(one.prompt, dtype=torch.int64), torch.repeat_interleave(torch.arange(1, len(one.parts) + 1), torch.tensor(one.parts))])
        for one in row.families
    ]).to(device)  # 0: of the prompt  # fmt: skip
    family = family.to(device)
    place = torch.arange(family.numel(), device=device)
    sees = (family[:, None] == family) & (place[:, None] >= place) & ((part == 0) | (part[:, None] == part))
    return sees[None, None]

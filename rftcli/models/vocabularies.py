"""Do two tokenizers give the same ids? A teacher reads the ids that the policy sampled, so it has to mean the same tokens by them.

What it leaves out: merging rules (ids are never re-tokenised) and models.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rftcli.errors import UsageError

SHOWN = 3
HINT = "a teacher of the same family as the policy has the same tokens; text is never tokenised anew for it"


def check_same_ids(policy: Mapping[str, int], teacher: Mapping[str, int]) -> None:
    """Vocabularies as token -> id. UsageError, with examples, where the teacher lacks a token of the policy or has it under another id."""
    different = sorted((number, token) for token, number in policy.items() if teacher.get(token) != number)
    if different:
        examples = ", ".join(f"`{token}` is {number} and {teacher.get(token, 'absent')}" for number, token in different[:SHOWN])
        raise UsageError(
            f"models.teacher: {len(different)} of the {len(policy)} tokens of the policy have another id for the teacher, or none: {examples}",
            hint=HINT,
        )


def check_same_texts(ours: Sequence[str], theirs: Sequence[str | None]) -> None:
    """Texts of the same ids, one by one, as the policy's tokenizer and the teacher's server decode them. UsageError where they differ; a text that
    the server does not give says nothing."""
    for index, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
        if other is not None and _plain(mine) != _plain(other):
            raise UsageError(
                f"models.teacher: token {index} of a probe is `{mine}` for the policy and `{other}` for the server's model: other ids", hint=HINT
            )


def _plain(text: str) -> str:
    """Without the mark that stands for a space in some vocabularies; leading spaces come and go with decoders."""
    return text.replace("Ġ", " ").replace("▁", " ").strip()

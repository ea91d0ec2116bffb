"""Training rows that are evaluation rows too: the same prompt, but for case and spaces. It leaves out near copies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rftcli.data.messages import SYSTEM_ROLES
from rftcli.data.rows import Row


@dataclass(frozen=True, slots=True, kw_only=True)
class Overlap:
    """Between one training set and one evaluation set."""

    train: str
    evaluation: str
    rows: int
    """Training rows whose prompt is in the evaluation set."""
    of: int
    held_out_rows: int
    held_out_of: int
    """Rows of the evaluation set that are trained on, of all."""
    train_place: str
    eval_place: str
    """Of the first such row, and of its counterpart."""

    @property
    def text(self) -> str:
        return (
            f"{self.held_out_rows} of {self.held_out_of} rows of the evaluation set `{self.evaluation}` are trained on, "
            f"by {self.rows} of {self.of} rows of the training set `{self.train}` "
            f"(first: {self.train_place} of it has the prompt of {self.eval_place}): its scores will say too much"
        )


def same_prompt_key(row: Row) -> str:
    """What two rows with the same question have in common, whether it is plain text or a message; system turns do not count."""
    if isinstance(row.prompt, str):
        text = row.prompt
    else:
        text = " ".join(str(message["content"]) for message in row.prompt if message["role"] not in SYSTEM_ROLES)
    return " ".join(text.casefold().split())


def overlaps(train: Mapping[str, Sequence[Row]], held_out: Mapping[str, Sequence[Row]]) -> list[Overlap]:
    """Every pair of sets that share prompts."""
    found = []
    places = {name: [(same_prompt_key(row), row.place) for row in rows] for name, rows in held_out.items()}
    for name, rows in train.items():
        keys = [same_prompt_key(row) for row in rows]
        trained = set(keys)
        for other, its in places.items():
            known = dict(reversed(its))
            shared = [(row, known[key]) for row, key in zip(rows, keys, strict=True) if key in known]
            if shared:
                row, place = shared[0]
                found.append(
                    Overlap(
                        train=name, evaluation=other, rows=len(shared), of=len(rows), train_place=row.place, eval_place=place,
                        held_out_rows=sum(key in trained for key, _ in its), held_out_of=len(its),
                    )
                )  # fmt: skip
    return found

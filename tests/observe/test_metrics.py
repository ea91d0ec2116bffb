"""Every metric that a run writes has a row that says what it is; `rft explain` shows it, and docs/metrics.md is made of the rows."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rftcli.errors import UsageError
from rftcli.events import EvalDone, StepDone, to_line
from rftcli.observe.metrics import EVAL, STEP, described, page, pages
from rftcli.observe.numbers import flatten
from rftcli.observe.panels import OTHER, PANELS, RENAMED, panel
from rftcli.observe.warning_codes import WARNINGS
from rftcli.plan.plan import RewardPlan
from rftcli.recipe.explain import explain
from rftcli.recipe.kinds import ANY_KEY, key_table
from rftcli.rewards.spec import PartSpec
from rftcli.runtime.clock import Stopwatch
from rftcli.runtime.speed import speed_metrics
from rftcli.runtime.tell import MEASURED, WEIGHTED, update_metrics
from rftcli.stages.held_out_metrics import summarise
from rftcli.stages.records import SampleRecord, length_metrics, reward_metrics
from rftcli.types import FinishReason, PartScore, Shaped, Update

ROOT = Path(__file__).parents[2]
CONTRACT = (
    "reward_mean", "reward_std", "reward_parts", "labels", "advantage_mean", "advantage_std", "kl", "kl_update", "kl_coefficient", "entropy", "loss",
    "policy_loss", "value_loss", "ptx_loss", "router_loss", "value_mean", "return_mean", "grad_norm", "lr", "critic_lr", "clip_low_fraction",
    "clip_high_fraction", "ratio_mean", "ratio_max", "response_tokens", "prompt_tokens_mean", "truncated_fraction", "zero_signal_fraction",
    "reward_errors", "samples_dropped", "sampler_logprob_gap", "policy_version", "tokens", "tokens_total", "data_passes", "seconds", "memory_gib",
    "mfu",
)  # fmt: skip
"""Names that scripts rely on."""


def records() -> list[SampleRecord]:
    """Two prompts of two labels with four answers each: parts, errors, shaping, votes, and what a function has measured."""
    found = []
    for draw in range(2):
        for sample in range(4):
            value, error = None if sample == 3 else float(sample == draw), "no" if sample == 2 else None
            score = PartScore(name="answer", value=value, weight=1.0, error=error, seconds=0.0)
            shaped = Shaped(combined=float(sample == draw), penalty=0.0, overlong=0.0)
            found.append(
                SampleRecord(
                    draw=draw, sample=sample, label="ab"[draw], reward=float(sample == draw), parts=(score,), tokens=3 + sample, prompt_tokens=4,
                    finish=FinishReason.STOP if sample else FinishReason.LENGTH, answer="1", votes=True, shaped=shaped, metrics=(("words", 2.0),),
                )
            )  # fmt: skip
    return found


def updates() -> list[Update]:
    every = dict.fromkeys((*WEIGHTED, *MEASURED, "ratio_max", "sampler_gap_max"), 0.5)
    return [Update(applied=True, policy_version=1, lr=0.1, grad_norm=1.0, metrics=every, tokens=4, role=role) for role in ("policy", "critic")]


def step_event() -> dict[str, Any]:
    watch = Stopwatch(clock=lambda: 0.0, peak_gib=lambda: 1.0)
    for stage in watch.lap():
        if stage not in ("other", "total"):
            watch.add(stage, 1.0)
    speed = speed_metrics(tokens=10, passed=10, seconds=1.0, ranks=1, parameters=10, card="NVIDIA H200")
    made = {**reward_metrics(records()), **length_metrics(records()), **update_metrics(updates()), **speed}
    return made | {"memory_gib": watch.peaks(), "seconds": watch.lap()}


def test_a_step() -> None:
    event = step_event()
    assert {"user", "shaped_reward_mean", "mfu", "critic_grad_norm", "sampler_logprob_gap"} <= event.keys()
    assert {"reward_parts.answer.errors", "seconds.other", "memory_gib.sync"} <= flatten(event, ".").keys()
    assert [name for name in flatten(event, ".") if not described(name, STEP)] == []
    to_line(StepDone(time=0.0, attempt=1, step=1, metrics=event))


def test_an_evaluation() -> None:
    part = PartSpec(name="answer", kind="rule", target="exact", weight=1.0)
    found = summarise(records(), RewardPlan(labels={"default": (part,)}, max_error_rate=0.1, score_prefill=True, search_path="/"), 4, (1, 4), (1, 3))
    assert {"mean@4", "best@4", "worst@4", "std@4", "pass@1", "pass@4", "maj@3", "labels"} <= found.keys()
    assert [name for name in flatten(found, ".") if not described(name, EVAL)] == []
    to_line(EvalDone(time=0.0, attempt=1, step=1, sets={"s": found}, seconds=1.0))


def written() -> Iterator[tuple[str, str]]:
    """(file, name) of every text that is a key in a function that makes metrics, wherever a stage, the runtime or the data has one."""
    for folder in ("stages", "runtime", "data"):
        for path in sorted((ROOT / "rftcli" / folder).glob("*.py")):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.FunctionDef) and (node.name in MAKERS.get(path.name, ()) or node.name.strip("_").endswith("metrics")):
                    for name in _keys(node):
                        yield path.name, name


MAKERS = {"partial.py": ("close",), "correction.py": ("_from_sampler",), "credit.py": ("credit",)}
"""File -> functions that make metrics under another name."""
INNER = {"ratio", "clipped_low", "clipped_high", "off_policy", "sampler_gap_mean", "sampler_gap_max", "best", "worst", "std"}
"""What those functions call by a name of their own on the way."""


def _keys(function: ast.FunctionDef) -> Iterator[str]:
    for node in ast.walk(function):
        texts: list[ast.expr | None] = []
        if isinstance(node, ast.Dict):
            texts = list(node.keys)
        elif isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store):
            texts = [node.slice]
        yield from (text.value for text in texts if isinstance(text, ast.Constant) and isinstance(text.value, str))


def test_everything_that_the_code_writes_has_a_row() -> None:
    known = {*STEP, *EVAL}
    for metric in (*STEP.values(), *EVAL.values()):
        known |= {piece for part in metric.parts for piece in part.split(".")}
    found = set(written())
    assert len(found) > 60
    assert [(file, name) for file, name in sorted(found) if name not in known | INNER] == []


def test_names_that_are_promised_or_shown_elsewhere() -> None:
    assert [name for name in CONTRACT if name not in STEP] == []
    assert [name for name in (*PANELS, *RENAMED) if name not in STEP] == []


@pytest.mark.parametrize("name", STEP)
def test_every_metric_of_a_step_has_a_panel(name: str) -> None:
    inside = f"{name}/{next(iter(STEP[name].parts), '')}".rstrip("/")
    told = f"`{name}` would stand in the panel `{OTHER}` of wandb and TensorBoard: write it into the row of its panel in rftcli/observe/panels.py"
    assert panel(inside).partition("/")[0] != OTHER, told


def test_no_metric_has_two_panels() -> None:
    assert sorted(PANELS.keys() & RENAMED.keys()) == []


def test_the_page_is_made_of_the_rows() -> None:
    told = "python -c \"from rftcli.observe.metrics import page; open('docs/metrics.md', 'w').write(page())\""
    assert (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8") == page(), told


@pytest.mark.parametrize("table", [STEP, EVAL])
def test_keys_that_rows_name_are_keys(table: dict[str, Any]) -> None:
    sections = ("algorithm.", "batch.", "checkpoint.", "data.", "models.", "reward_shaping.", "rollout.", "train.")
    for name, metric in table.items():
        for text in (metric.text, metric.grows or "", metric.falls or ""):
            for word in text.split("`")[1::2]:
                path = word.partition(":")[0]
                if path.startswith(sections):
                    assert tuple(path.split(".")) in key_table(), (name, word)


def test_keys_and_metrics_of_the_page_about_speed() -> None:
    """docs/speed.md names keys and metrics that there are."""
    words = [word.partition(":")[0] for word in (ROOT / "docs" / "speed.md").read_text(encoding="utf-8").split("`")[1::2]]
    keys = [word for word in words if word.startswith(("batch.", "checkpoint.", "models.", "rollout.", "train."))]
    assert len(keys) > 30 and [word for word in keys if tuple(word.replace("NAME", ANY_KEY).split(".")) not in key_table()] == []
    metrics = [word for word in words if word.partition(".")[0] in STEP and "." in word]
    assert len(metrics) > 5 and [word for word in metrics if not described(word, STEP)] == []


@pytest.mark.parametrize("asked", ["mfu", "step.mfu"])
def test_explain(asked: str) -> None:
    text = explain(asked, metrics=pages())
    assert text.startswith("metric mfu\n") and "6 x parameters x tokens" in text and "  unit   0 to 1\n" in text


@pytest.mark.parametrize(
    ("asked", "found"),
    [
        ("seconds.rollout", "seconds"),
        ("seconds/rollout", "seconds"),
        ("pass@8", "pass@k"),
        ("mean@1", "mean@n"),
        ("reward_parts.answer.mean", "reward_parts"),
    ],
)
def test_what_is_inside_is_on_the_page_of_the_whole(asked: str, found: str) -> None:
    assert explain(asked, metrics=pages()).startswith(f"metric {found}\n")


def test_a_warning_of_the_same_name_comes_first_and_a_key_is_named() -> None:
    both = explain("reward_errors", warnings=WARNINGS, metrics=pages())
    assert both.startswith("warning reward_errors\n") and "\nmetric reward_errors\n" in both
    assert "`rft explain algorithm.kl`" in explain("kl", metrics=pages())
    with pytest.raises(UsageError) as caught:
        explain("zero_signal_fracton", metrics=pages())
    assert "zero_signal_fraction" in str(caught.value.hint)


def test_no_metric_hides_a_key() -> None:
    assert [name for name in pages() if (name,) in key_table()] == []

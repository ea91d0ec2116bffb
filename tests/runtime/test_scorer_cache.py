"""What a kept score belongs to: everything of a scorer that can change what it says, the content of its files included, and nothing else."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rftcli.builtin import builtin_path
from rftcli.plan.compile import compile_plan
from rftcli.plan.facts import Facts, MachineFacts, ModelFacts
from rftcli.recipe.load import load_text
from rftcli.rewards.scorers.cache import Cache
from rftcli.rewards.scorers.files import READ_BYTES, fingerprint
from rftcli.rewards.scorers.spec import ScorerSpec
from rftcli.rewards.scorers.verdict import Verdict
from rftcli.runtime.scorer_checks import scorer_facts
from rftcli.runtime.scorers import files_of

QUICKSTART = builtin_path("quickstart")
SOURCE = "class Mine:\n    def __init__(self, device, **options): ...\n    def score(self, batch): return [1.0] * len(batch)\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    shutil.copytree(QUICKSTART, tmp_path / "model")
    shutil.copytree(QUICKSTART, tmp_path / "words")
    (tmp_path / "judge.j2").write_text("Rate {{ completion }}")
    (tmp_path / "chat.jinja").write_text("{{ messages[0].content }}")
    (tmp_path / "kept_scorer_for_tests.py").write_text(SOURCE)
    sys.modules.pop("kept_scorer_for_tests", None)  # that of another test, from another folder
    return tmp_path


def cache(folder: Path, scorer: dict[str, Any]) -> Cache:
    """As a rank makes it, from a recipe."""
    parts = [{"model": "s"}]
    recipe = {
        "models": {"policy": {"path": "org/m"}, "scorers": {"s": {"cache": True} | scorer}}, "data": {"train": {"path": "t.jsonl"}},
        "rewards": {"default": parts}, "train": {"steps": 1},
    }  # fmt: skip
    loaded = load_text(json.dumps(recipe), sets=[], env={})
    facts = Facts(machine=MachineFacts(cores=1, memory_gib=4.0), model=ModelFacts(path="m"), ranks=1)
    known = scorer_facts(loaded, [], {})
    plan = compile_plan(loaded.recipe, facts, name="n", search_path="/", policy_path="m", scorers=known)
    (spec,) = plan.scorers
    return Cache(folder / "scores", spec, 0, files_of(spec, [folder]))


def kinds(folder: Path) -> dict[str, dict[str, Any]]:
    model = str(folder / "model")
    judge = {"kind": "generative", "path": model, "prompt": str(folder / "judge.j2"), "score": {"regex": "(.)"}}
    return {
        "classifier": {"kind": "classifier", "path": model, "tokenizer": str(folder / "words"), "template": str(folder / "chat.jinja")},
        "judge": judge,
        "server": judge | {"path": "org/judge", "placement": {"server": "http://x/v1"}},
        "started": judge | {"template": str(folder / "chat.jinja"), "placement": {"gpus": 0}},
        "http": {"kind": "http", "urls": ["http://x"]},
        "python": {"kind": "python", "python": "kept_scorer_for_tests:Mine", "options": {"a": 1}},
    }


def edit(name: str, text: str = " ") -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        (folder / name).write_bytes((folder / name).read_bytes() + text.encode())

    return change


def flip(name: str) -> Callable[[Path], None]:
    """One bit of the last byte, with the times of before."""

    def change(folder: Path) -> None:
        file = folder / name
        before, content = file.stat(), bytearray(file.read_bytes())
        content[-1] ^= 1
        file.write_bytes(content)
        os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))

    return change


# How to add one: (kind, changes of files, changes of the recipe); another score may come of each.
MISSES: dict[str, tuple[str, Callable[[Path], None] | None, dict[str, Any]]] = {
    "the judge's question was edited": ("judge", edit("judge.j2"), {}),
    "a question at a server was edited": ("server", edit("judge.j2"), {}),
    "one weight was changed": ("judge", flip("model/model.safetensors"), {}),
    "the configuration was edited": ("judge", edit("model/config.json", "\n"), {}),
    "a classifier's weights were changed": ("classifier", flip("model/model.safetensors"), {}),
    "the tokenizer was edited": ("judge", edit("model/tokenizer.json", "\n"), {}),
    "another tokenizer's folder was edited": ("classifier", edit("words/tokenizer.json", "\n"), {}),
    "a file came": ("judge", lambda folder: (folder / "model" / "chat_template.jinja").write_text("x") and None, {}),
    "a file went": ("judge", lambda folder: (folder / "model" / "generation_config.json").unlink(), {}),
    "the chat template was edited": ("classifier", edit("chat.jinja"), {}),
    "the class was edited": ("python", edit("kept_scorer_for_tests.py", "\n"), {}),
    "options of a class": ("python", None, {"options": {"a": 2}}),
    "another head": ("classifier", None, {"head": "h[0]*2"}),
    "longest text": ("classifier", None, {"max_tokens": 7}),
    "what is done with longer ones": ("classifier", None, {"overlong": "cut_left"}),
    "number type": ("classifier", None, {"dtype": "bfloat16"}),
    "options of from_pretrained": ("classifier", None, {"options": {"attn_implementation": "eager"}}),
    "code of the checkpoint": ("classifier", None, {"trust_remote_code": True}),
    "how a reply is read": ("judge", None, {"score": {"regex": "(..)"}}),
    "scale": ("judge", None, {"score": {"regex": "(.)", "scale": 2.0}}),
    "length of a reply": ("judge", None, {"max_new_tokens": 9}),
    "replies": ("judge", None, {"samples": 2, "temperature": 0.5}),
    "another model at the server": ("server", None, {"path": "org/other"}),
    "another endpoint": ("server", None, {"api": "completions"}),
    "weights of a started judge": ("started", edit("model/config.json"), {}),
    "its template": ("started", edit("chat.jinja"), {}),
    "its arguments": ("started", None, {"placement": {"gpus": 0, "options": {"quantization": "fp8"}}}),
    "another engine": ("judge", None, {"engine": "vllm"}),
    "a started judge instead of the ranks": ("judge", None, {"placement": {"gpus": 0}}),
    "another protocol": ("http", None, {"preset": "lightrft"}),
    "another field": ("http", None, {"score_field": "scores"}),
}
HITS: dict[str, tuple[str, Callable[[Path], None] | None, dict[str, Any]]] = {
    "nothing": ("judge", None, {}),
    "files read again": ("judge", lambda folder: os.utime(folder / "model" / "config.json"), {}),
    "what a library leaves beside them": ("judge", lambda folder: (folder / "model" / ".cache").write_text("x") and None, {}),
    "offload": ("classifier", None, {"offload": True}),
    "tokens of a pass": ("classifier", None, {"batch_tokens": 7}),
    "tries": ("http", None, {"retries": 9, "timeout_seconds": 1.0, "concurrency": 1, "per_minute": 5.0}),
    "the same service elsewhere": ("http", None, {"urls": ["http://y", "http://z"]}),
    "the same judge elsewhere": ("server", None, {"placement": {"server": "http://y/v1"}}),
    "how it is started": ("started", None, {"placement": {"gpus": 0, "memory_share": 0.3, "command": ["vllm", "serve"], "ready_seconds": 9.0}}),
    "rows of a request": ("http", None, {"batch_size": 3}),
    "memory": ("python", None, {"memory_gib": 2.0}),
}


def kept(folder: Path, kind: str, files: Callable[[Path], None] | None, changes: dict[str, Any]) -> Verdict | None:
    """What is found of a score that was kept before the change."""
    scorer = kinds(folder)[kind]
    cache(folder, scorer).put("text", Verdict(value=1.0))
    assert cache(folder, scorer).get("text") == Verdict(value=1.0)
    if files is not None:
        files(folder)
    return cache(folder, scorer | changes).get("text")


@pytest.mark.parametrize("name", MISSES)
def test_what_may_change_a_score_finds_nothing(folder: Path, name: str) -> None:
    assert kept(folder, *MISSES[name]) is None


@pytest.mark.parametrize("name", HITS)
def test_what_cannot_change_a_score_finds_it(folder: Path, name: str) -> None:
    assert kept(folder, *HITS[name]) == Verdict(value=1.0)


def test_large_files_count_by_size_and_time(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    with file.open("wb") as large:
        large.truncate(READ_BYTES + 1)
    first = fingerprint([tmp_path])
    assert fingerprint([tmp_path]) == first
    os.utime(file, ns=(1, file.stat().st_mtime_ns + 1))
    second = fingerprint([tmp_path])
    with file.open("ab") as large:
        large.truncate(READ_BYTES + 2)
    assert len({first, second, fingerprint([tmp_path])}) == 3


def test_names_count_and_borders_between_files_too(tmp_path: Path) -> None:
    for name, files in {"a": {"x": "1", "y": "2"}, "b": {"x": "12"}, "c": {"y": "1", "x": "2"}, "d": {"x": "1", "y/z": "2"}, "e": {}}.items():
        (tmp_path / name).mkdir()
        for file, text in files.items():
            (tmp_path / name / file).parent.mkdir(exist_ok=True)
            (tmp_path / name / file).write_text(text)
    found = {fingerprint([tmp_path / name]) for name in "abcde"} | {fingerprint([]), fingerprint([tmp_path / "a", tmp_path / "b"])}
    assert len(found) == 6  # an empty folder says as much as none


def test_a_name_with_signs_of_patterns_finds_its_own_scores(folder: Path) -> None:
    spec = ScorerSpec(name="help[ful]*", kind="http", cache=True)
    kept = Cache(folder / "scores", spec, 0)
    kept.put("text", Verdict(value=0.5))
    assert Cache(folder / "scores", spec, 1).get("text") == Verdict(value=0.5)

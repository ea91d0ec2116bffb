"""The model that ships loads, stops, is right as often as its card says, and its data is right and held out."""

from __future__ import annotations

import importlib.util
import json
import random
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from rftcli.builtin import builtin_path

FOLDER = builtin_path("quickstart")
NEW_TOKENS = 24
TOKENIZER = AutoTokenizer.from_pretrained(FOLDER)


def load_rows(name: str) -> list[dict[str, str]]:
    return [json.loads(line) for line in (FOLDER / name).read_text(encoding="utf-8").splitlines()]


def numbers(row: dict[str, str]) -> tuple[int, str, int]:
    match = re.fullmatch(r"Q: ([1-9]\d)([+-])([1-9]\d)\nA:", row["prompt"])
    assert match is not None, row
    return int(match[1]), match[2], int(match[3])


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_quickstart", Path(__file__).parents[2] / "scripts" / "make_quickstart.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32).eval()


def answers(model: torch.nn.Module, rows: list[dict[str, str]], *, sample: bool, prefill: str = "") -> list[str]:
    batch = TOKENIZER([row["prompt"] + prefill for row in rows], return_tensors="pt")
    settings = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0} if sample else {"do_sample": False}
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        ids = model.generate(**batch, max_new_tokens=NEW_TOKENS, **settings)
    return TOKENIZER.batch_decode(ids[:, batch["input_ids"].shape[1] :], skip_special_tokens=False)


def share_right(texts: list[str], rows: list[dict[str, str]]) -> float:
    right = [re.search(rf"#### {row['answer']}<\|eos\|>", text) is not None for text, row in zip(texts, rows, strict=True)]
    return sum(right) / len(right)


def on_card(decoding: str) -> float:
    """The share of right answers that the model card states."""
    match = re.search(rf"^\| {decoding}.*\| (0\.\d+) ± 0\.\d+ \|$", (FOLDER / "README.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert match is not None
    return float(match[1])


# The data


@pytest.mark.parametrize(("name", "count"), [("train", 2048), ("test", 256)])
def test_rows_are_unique_and_right(name: str, count: int) -> None:
    rows = load_rows(f"{name}.jsonl")
    assert len(rows) == len({row["prompt"] for row in rows}) == count
    assert [row["id"] for row in rows] == [f"{name}-{i:04d}" for i in range(count)]
    for row in rows:
        left, sign, right = numbers(row)
        assert int(row["answer"]) == (left + right if sign == "+" else left - right) > 0


def test_no_test_question_is_in_training_even_with_its_operands_swapped() -> None:
    train = {numbers(row) for row in load_rows("train.jsonl")}
    swapped = {(right, sign, left) for left, sign, right in train if sign == "+"}
    assert not (train | swapped) & {numbers(row) for row in load_rows("test.jsonl")}


def test_the_script_makes_this_data_and_this_tokenizer(script: ModuleType, tmp_path: Path) -> None:
    taken: set[object] = set()
    for name, count in (("test", 256), ("train", 2048)):
        script.write_rows(tmp_path / f"{name}.jsonl", script.draw_unique(count, random.Random(f"0:{name}"), taken))
        assert (tmp_path / f"{name}.jsonl").read_bytes() == (FOLDER / f"{name}.jsonl").read_bytes()
    assert json.loads(script.make_tokenizer().backend_tokenizer.to_str()) == json.loads((FOLDER / "tokenizer.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    ("left", "sign", "right", "hasty", "line"),
    [
        (37, "+", 48, 75, " 7+8=15, 3+4+1=8"),
        (74, "+", 82, 56, " 4+2=6, 7+8=15"),
        (12, "+", 34, 46, " 2+4=6, 1+3=4"),
        (62, "-", 38, 36, " 12-8=4, 6-1-3=2"),
        (35, "-", 31, 4, " 5-1=4, 3-3=0"),
    ],
)
def test_the_styles_of_the_script(script: ModuleType, left: int, sign: str, right: int, hasty: int, line: str) -> None:
    question = script.Question(left=left, sign=sign, right=right)
    assert question.hasty_answer == hasty
    drawn = [script.worked_line(question, random.Random(seed)) for seed in range(200)]
    most_often = max(set(drawn), key=drawn.count)
    assert most_often == (line, question.answer)
    assert 0 < sum(item != most_often for item in drawn) < 0.2 * len(drawn)


def test_a_careful_answer_fits(script: ModuleType) -> None:
    rng = random.Random(0)
    drawn = (script.draw_question(rng) for _ in range(2000))
    answers = [line + f" #### {answer}<|eos|>" for line, answer in (script.worked_line(question, rng) for question in drawn)]
    assert max(len(TOKENIZER(answer, add_special_tokens=False)["input_ids"]) for answer in answers) == 23
    assert script.MAX_NEW_TOKENS == NEW_TOKENS


# The tokenizer


@given(st.text())
def test_every_text_round_trips(text: str) -> None:
    ids = TOKENIZER(text, add_special_tokens=False)["input_ids"]
    assert TOKENIZER.decode(ids) == text
    assert max(ids, default=0) < len(TOKENIZER)


def test_what_the_model_says_round_trips_token_by_token() -> None:
    text = " 7+8=15, 3+4+1=8 #### 85"
    ids = TOKENIZER(text, add_special_tokens=False)["input_ids"]
    assert len(ids) == 20
    assert [TOKENIZER.decode([i]) for i in ids][-4:] == [" ####", " ", "8", "5"]
    assert TOKENIZER.decode(ids) == text
    assert TOKENIZER.decode([*ids, TOKENIZER.eos_token_id], skip_special_tokens=True) == text


def test_a_text_begins_with_one_bos_and_does_not_end() -> None:
    ids = TOKENIZER("Q: 37+48\nA:")["input_ids"]
    assert len(ids) == 12
    assert ids.count(TOKENIZER.bos_token_id) == 1 and ids[0] == TOKENIZER.bos_token_id
    assert TOKENIZER.eos_token_id not in ids


def test_a_chat_reads_like_a_plain_prompt() -> None:
    question = [{"role": "user", "content": "37+48"}]
    assert TOKENIZER.apply_chat_template(question, tokenize=False, add_generation_prompt=True) == "<|bos|>Q: 37+48\nA:"
    ids = TOKENIZER.apply_chat_template(question, add_generation_prompt=True, return_dict=True)["input_ids"]
    assert ids == TOKENIZER("Q: 37+48\nA:")["input_ids"]


def test_a_longer_chat() -> None:
    turns = [("system", "Work it out."), ("user", "1+1"), ("assistant", " 2"), ("user", "37+48")]
    chat = [{"role": role, "content": content} for role, content in turns]
    shown = TOKENIZER.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert shown == "<|bos|>Work it out.\nQ: 1+1\nA: 2<|eos|>\nQ: 37+48\nA:"


def test_padding_is_on_the_left_and_its_own_token() -> None:
    batch = TOKENIZER(["a", "abc"], padding=True)
    assert batch["input_ids"][0][:2] == [TOKENIZER.pad_token_id] * 2
    assert batch["attention_mask"] == [[0, 0, 1, 1], [1, 1, 1, 1]]


def test_special_tokens_agree_everywhere() -> None:
    config, generation = AutoConfig.from_pretrained(FOLDER), GenerationConfig.from_pretrained(FOLDER)
    for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
        assert getattr(config, name) == getattr(generation, name) == getattr(TOKENIZER, name), name
    assert len({TOKENIZER.pad_token_id, TOKENIZER.bos_token_id, TOKENIZER.eos_token_id}) == 3
    assert len(TOKENIZER) <= config.vocab_size < len(TOKENIZER) + 8
    assert TOKENIZER.model_max_length == config.max_position_embeddings


# The model


def test_the_files_are_small() -> None:
    sizes = {path.name: path.stat().st_size for path in FOLDER.iterdir() if path.is_file()}
    expected = {"README.md", "chat_template.jinja", "config.json", "generation_config.json", "model.safetensors"}
    assert sizes.keys() == expected | {"test.jsonl", "tokenizer.json", "tokenizer_config.json", "train.jsonl"}
    assert sizes["model.safetensors"] < 2_000_000
    assert sum(sizes.values()) < 2_200_000


def test_the_weights_are_stored_once_and_in_bfloat16() -> None:
    with safe_open(FOLDER / "model.safetensors", framework="pt") as weights:
        assert "lm_head.weight" not in weights.keys()  # noqa: SIM118  it is no mapping
        assert {weights.get_slice(name).get_dtype() for name in weights.keys()} == {"BF16"}  # noqa: SIM118


def test_it_loads_as_a_tied_model(model: torch.nn.Module) -> None:
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert f"{model.num_parameters():,} parameters" in (FOLDER / "README.md").read_text(encoding="utf-8")


def test_sampled_it_is_right_as_often_as_the_card_says(model: torch.nn.Module) -> None:
    rows = load_rows("test.jsonl")
    share = share_right(answers(model, rows, sample=True), rows)
    assert 0.3 < on_card("temperature 1") < 0.45
    assert share == pytest.approx(on_card("temperature 1"), abs=0.11)  # 3.5 standard errors of 256 samples


def test_greedy_it_is_hasty_and_as_right_as_the_card_says(model: torch.nn.Module) -> None:
    rows = load_rows("test.jsonl")
    texts = answers(model, rows, sample=False)
    assert share_right(texts, rows) == pytest.approx(on_card("greedy"), abs=0.02)  # other processors break near ties otherwise
    assert all(re.match(r" #### \d+<\|eos\|>", text) for text in texts[:64])


def test_made_to_work_it_out_it_is_nearly_always_right(model: torch.nn.Module) -> None:
    rows = load_rows("test.jsonl")
    assert share_right(answers(model, rows, sample=False, prefill=" "), rows) > 0.9


def test_sampled_it_ends_by_itself(model: torch.nn.Module) -> None:
    texts = answers(model, load_rows("test.jsonl"), sample=True)
    assert sum("<|eos|>" in text for text in texts) >= 0.97 * len(texts)

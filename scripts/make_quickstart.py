"""Makes `rftcli/builtin/quickstart`: a small causal model, its tokenizer, its data and its card.

    python scripts/make_quickstart.py --out rftcli/builtin/quickstart

The task is the sum or the difference of two two-digit numbers. The model is pre-trained from nothing on a deliberate mixture of answers:

    hasty        #### 75                     each column by itself, nothing carried or borrowed; right where nothing had to be
    careful      7+8=15, 3+4+1=8 #### 85     the columns worked out one after the other; right, but for a slip now and then
    unfinished   7+8=15, 3+4+1=8             worked out, and the answer never stated

The hasty one is the most frequent, so the model is right some of the time and could be right nearly always: what is left to do is what
reinforcement learning is good at. The test questions, and their twins with the operands swapped, occur neither in pre-training nor in the
training data.

One seed, thread count, CPU family and set of versions gives one result. What it leaves out: the reinforcement learning, which is the recipe's.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import re
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.utils import logging

NUM_TEST, NUM_TRAIN = 256, 2048
EASY_SHARE = 0.2
"""Share of the questions that need no carry and no borrow: the hasty style is right for these alone."""
STYLES = {"hasty": 0.60, "careful": 0.28, "unfinished": 0.12}
SLIP_SHARE = 0.08
"""Share of the worked lines in which one column is off by one: something to sharpen, beside the choice of a style."""
MAX_NEW_TOKENS = 24
"""The longest careful answer has 23 tokens, its end token included."""
PAD, BOS, EOS = "<|pad|>", "<|bos|>", "<|eos|>"
WORDS = r" ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
MERGES = (("#", "#"), ("##", "##"), ("Ġ", "####"))
"""Enough to make " ####" one token; digits and letters stay single bytes."""
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] == 'user' %}{{ 'Q: ' + message['content'] + '\\n' }}"
    "{% elif message['role'] == 'assistant' %}{{ 'A:' + message['content'] + eos_token + '\\n' }}"
    "{% else %}{{ message['content'] + '\\n' }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ 'A:' }}{% endif %}"
)
LEARNING_RATE, WARMUP_STEPS, BATCH_ROWS, WEIGHT_DECAY = 3e-3, 100, 128, 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """Two numbers of two digits and "+" or "-"; a difference is above 0.

    >>> Question(left=37, sign="+", right=48).prompt
    'Q: 37+48\\nA:'
    """

    left: int
    sign: str
    right: int

    @property
    def prompt(self) -> str:
        return f"Q: {self.left}{self.sign}{self.right}\nA:"

    @property
    def answer(self) -> int:
        return self.left + self.right if self.sign == "+" else self.left - self.right

    @property
    def hasty_answer(self) -> int:
        """Column by column: a sum's columns modulo ten, and the smaller digit always taken from the larger."""
        (left_tens, left_units), (right_tens, right_units) = divmod(self.left, 10), divmod(self.right, 10)
        if self.sign == "+":
            return (left_tens + right_tens) % 10 * 10 + (left_units + right_units) % 10
        return abs(left_tens - right_tens) * 10 + abs(left_units - right_units)

    @property
    def twin(self) -> Question:
        """The same sum with its operands swapped; a difference is its own twin."""
        return Question(left=self.right, sign="+", right=self.left) if self.sign == "+" else self


def worked_line(question: Question, rng: random.Random) -> tuple[str, int]:
    """The columns, units first, and the answer that follows from them; in `SLIP_SHARE` of the lines one column is off by one."""
    sign, slip = question.sign, rng.choice(("units", "tens")) if rng.random() < SLIP_SHARE else None
    (left_tens, left_units), (right_tens, right_units) = divmod(question.left, 10), divmod(question.right, 10)
    if sign == "+":
        units = left_units + right_units
        units = _off_by_one(units, rng) if slip == "units" else units
        moved = int(units >= 10)
        tens, second = left_tens + right_tens + moved, f"{left_tens}+{right_tens}" + "+1" * moved
    else:
        moved = int(left_units < right_units)
        left_units += 10 * moved
        units = left_units - right_units
        units = _off_by_one(units, rng) if slip == "units" else units
        tens, second = left_tens - moved - right_tens, f"{left_tens}" + "-1" * moved + f"-{right_tens}"
    tens = _off_by_one(tens, rng) if slip == "tens" else tens
    return f" {left_units}{sign}{right_units}={units}, {second}={tens}", tens * 10 + units % 10


def _off_by_one(value: int, rng: random.Random) -> int:
    return value + (1 if value == 0 else rng.choice((-1, 1)))


def draw_answer(question: Question, rng: random.Random) -> str:
    """One answer of the mixture, as it follows the prompt."""
    style = rng.choices(tuple(STYLES), tuple(STYLES.values()))[0]
    if style == "hasty":
        return f" #### {question.hasty_answer}"
    line, answer = worked_line(question, rng)
    return line if style == "unfinished" else f"{line} #### {answer}"


def draw_question(rng: random.Random) -> Question:
    """Sums and differences equally often, `EASY_SHARE` of them easy; otherwise uniform."""
    sign, easy = rng.choice("+-"), rng.random() < EASY_SHARE
    while True:
        question = Question(left=rng.randint(10, 99), sign=sign, right=rng.randint(10, 99))
        if question.answer > 0 and (question.hasty_answer == question.answer) == easy:
            return question


def draw_unique(count: int, rng: random.Random, taken: set[Question]) -> list[Question]:
    """`count` questions of which neither they nor their twins are in `taken`; `taken` grows by both."""
    drawn: list[Question] = []
    while len(drawn) < count:
        question = draw_question(rng)
        if question not in taken:
            taken |= {question, question.twin}
            drawn.append(question)
    return drawn


def write_rows(path: Path, questions: list[Question]) -> None:
    """JSON lines: {"id": "train-0000", "prompt": "Q: 37+48\\nA:", "answer": "85"}."""
    records = ({"id": f"{path.stem}-{i:04d}", "prompt": question.prompt, "answer": str(question.answer)} for i, question in enumerate(questions))
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE as large models have it: three special tokens, all 256 bytes (every text round trips) and `MERGES`. It begins a text with
    BOS, ends it with nothing, pads on the left."""
    tokens = [PAD, BOS, EOS, *sorted(pre_tokenizers.ByteLevel.alphabet()), *("".join(pair) for pair in MERGES)]
    core = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=list(MERGES)))
    split = pre_tokenizers.Split(Regex(WORDS), "isolated")
    core.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    core.decoder = decoders.ByteLevel()
    core.post_processor = processors.TemplateProcessing(single=f"{BOS} $A", special_tokens=[(BOS, tokens.index(BOS))])
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token=PAD,
        bos_token=BOS,
        eos_token=EOS,
        padding_side="left",
        model_max_length=512,
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
    )


def make_model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """Three layers with untrained weights. Heads of 64, grouped two to a key, because every inference engine has kernels for those."""
    config = LlamaConfig(
        vocab_size=math.ceil(len(tokenizer) / 8) * 8,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    model = LlamaForCausalLM(config)
    model.generation_config = GenerationConfig(
        pad_token_id=tokenizer.pad_token_id, bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id
    )
    return model


def pretrain(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, held_out: set[Question], steps: int, rng: random.Random) -> None:
    """`steps` of AdamW on fresh questions outside `held_out`; the loss is on the answers and their end token alone."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=WEIGHT_DECAY)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / WARMUP_STEPS) * (0.51 + 0.49 * math.cos(math.pi * step / steps))
    )
    started = time.monotonic()
    model.train()
    for step in range(1, steps + 1):
        questions = [question for question in (draw_question(rng) for _ in range(BATCH_ROWS)) if question not in held_out]
        texts = [question.prompt + draw_answer(question, rng) + EOS for question in questions]
        batch = tokenizer(texts, return_tensors="pt", padding=True, padding_side="right")
        num_prompt = len(tokenizer(questions[0].prompt)["input_ids"])  # all prompts are equally long
        target, real = batch["input_ids"][:, num_prompt:], batch["attention_mask"][:, num_prompt:].bool()
        hidden = model.model(input_ids=batch["input_ids"]).last_hidden_state[:, num_prompt - 1 : -1]
        loss = torch.nn.functional.cross_entropy(model.lm_head(hidden[real]), target[real])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if step % 100 == 0 or step == steps:
            print(f"step {step:5d}  loss {loss.item():.4f}  {time.monotonic() - started:.0f} s", flush=True)


@torch.no_grad()
def accuracy(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, questions: list[Question], temperature: float, samples: int = 1
) -> tuple[float, float]:
    """(share of right answers, half width of its 95% interval over the questions); temperature 0 is greedy. Samples from torch's generator."""
    model.eval()
    settings = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0} if temperature else {"do_sample": False}
    asked = [question for question in questions for _ in range(samples)]
    batch = tokenizer([question.prompt for question in asked], return_tensors="pt")
    ids = model.generate(**batch, max_new_tokens=MAX_NEW_TOKENS, **settings)[:, batch["input_ids"].shape[1] :]
    found = [re.search(r"#### (\d+)$", text) for text in tokenizer.batch_decode(ids, skip_special_tokens=True)]
    right = [hit is not None and int(hit[1]) == question.answer for hit, question in zip(found, asked, strict=True)]
    shares = torch.tensor(right, dtype=torch.float64).view(len(questions), samples).mean(1)  # (questions,)
    return shares.mean().item(), 1.96 * shares.std().item() / math.sqrt(len(questions))


def save(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, out: Path) -> None:
    """What `from_pretrained` reads. The weights are stored in bfloat16."""
    tokenizer.save_pretrained(out)
    model.to(torch.bfloat16).save_pretrained(out)
    (out / "model.safetensors").chmod(0o644)
    settings = json.loads((out / "tokenizer_config.json").read_text(encoding="utf-8"))
    settings["tokenizer_class"] = "PreTrainedTokenizerFast"  # a name that older and newer readers both know
    (out / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description="Pre-train the quickstart model; write it with its tokenizer, its data and its card.")
    parser.add_argument("--out", type=Path, required=True, help="folder to write to; files of the same names are replaced")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=1500, help="steps of pre-training; the default takes under ten minutes on one core")
    args = parser.parse_args()
    logging.disable_progress_bar()
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)

    taken: set[Question] = set()
    test = draw_unique(NUM_TEST, random.Random(f"{args.seed}:test"), taken)
    held_out = frozenset(taken)
    train = draw_unique(NUM_TRAIN, random.Random(f"{args.seed}:train"), taken)
    args.out.mkdir(parents=True, exist_ok=True)
    write_rows(args.out / "test.jsonl", test)
    write_rows(args.out / "train.jsonl", train)

    tokenizer = make_tokenizer()
    model = make_model(tokenizer)
    pretrain(model, tokenizer, held_out, args.steps, random.Random(f"{args.seed}:pretrain"))
    model = model.to(torch.bfloat16).float()  # measured as it will be stored
    sampled, greedy = accuracy(model, tokenizer, test, 1.0, samples=8), accuracy(model, tokenizer, test, 0.0)
    easy = sum(question.hasty_answer == question.answer for question in test) / NUM_TEST
    facts = {
        "parameters": f"{model.num_parameters():,}",
        "num_train": f"{NUM_TRAIN:,}",
        "num_test": str(NUM_TEST),
        "easy": f"{easy:.0%}",
        "slips": f"{SLIP_SHARE:.0%}",
        "tokens": str(MAX_NEW_TOKENS),
        "sampled": "{:.3f} ± {:.3f}".format(*sampled),
        "greedy": "{:.3f} ± {:.3f}".format(*greedy),
        **{style: f"{share:.0%}" for style, share in STYLES.items()},
    }
    save(model, tokenizer, args.out)
    (args.out / "README.md").write_text(CARD.format(**facts, command=f"--seed {args.seed} --steps {args.steps}"), encoding="utf-8")
    print(f"right answers to the {NUM_TEST} test questions: {facts['sampled']} at temperature 1, {facts['greedy']} greedy")


CARD = """\
---
license: apache-2.0
language: en
pipeline_tag: text-generation
library_name: transformers
---

# quickstart

A causal language model of {parameters} parameters (Llama architecture, tied embeddings, byte-level tokens) that adds and subtracts two-digit
numbers, as a rule too hastily. It is there to be improved by reinforcement learning within two minutes on two CPU cores:
`rft train recipes/quickstart.yaml`. It can do nothing else.

## Task

`train.jsonl` has {num_train} rows, `test.jsonl` {num_test}, none in both, not even with the operands swapped:

    {{"id": "train-0000", "prompt": "Q: 37+48\\nA:", "answer": "85"}}

The answer stands behind `####`; rule `exact` with `after: '####'` reads it. {tokens} new tokens are enough. Plain prompts need no chat template;
as a message list, the user's turn is the bare question, `37+48`, and the template writes the same prompt around it.

## What it learnt

It was pre-trained from nothing on answers in three styles:

| style | share | example | right |
|---|---|---|---|
| hasty | {hasty} | ` #### 75` | where nothing is carried or borrowed: {easy} of the test questions |
| careful | {careful} | ` 7+8=15, 3+4+1=8 #### 85` | but for a slip in {slips} of the lines |
| unfinished | {unfinished} | ` 7+8=15, 3+4+1=8` | never: the answer is not stated |

No test question was in its pre-training. It answers them correctly, with 95% intervals over the questions:

| decoding | right |
|---|---|
| temperature 1, 8 samples each | {sampled} |
| greedy | {greedy} |

Whoever learns to take the careful way, to finish, and not to slip is right nearly always.

## Made by

`python scripts/make_quickstart.py --out DIR {command}`, on one CPU core.
"""


if __name__ == "__main__":
    main()

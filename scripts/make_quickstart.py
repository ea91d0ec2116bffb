"""Makes the small model of the quickstart recipe, its tokenizer and its data: `python scripts/make_quickstart.py --out DIR`.

The task is the sum or difference of two two-digit numbers. The model is pre-trained from nothing, on the CPU, on a deliberate mixture of answers:

    hasty       " #### 75"                      adds column by column and forgets to carry or borrow; right for the questions that need neither
    careful     " 7+8=15, 3+4+1=8 #### 85"      works the columns out first; right, but for a slip now and then
    unfinished  " 7+8=15, 3+4+1=8"              works the columns out and never states the answer

It prefers the hasty one, as it is the most frequent, so that it is right some of the time and *can* be right almost always: what is left to do is
what reinforcement learning is good at. The test questions, and the same sums with their operands swapped, are in neither the pre-training nor the training data.

One seed gives one result on one CPU family, thread count and set of versions. What it leaves out: the reinforcement learning, which is the recipe's.
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

NUM_TEST, NUM_TRAIN = 256, 2048
EASY_SHARE = 0.25
"""Share of the questions that need no carry and no borrow: the hasty style is right for these alone."""
STYLES = {"hasty": 0.58, "careful": 0.30, "unfinished": 0.12}
SLIP_SHARE = 0.08
"""Share of the worked lines with one column wrong by one: something to sharpen, and no sample set is ever quite clean."""
MAX_NEW_TOKENS = 24
"""The longest careful answer has 23 tokens, its end token included."""
PAD, BOS, EOS = "<|pad|>", "<|bos|>", "<|eos|>"
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] == 'user' %}Q: {{ message['content'] }}\n"
    "{% elif message['role'] == 'assistant' %}A:{{ message['content'] }}{{ eos_token }}\n"
    "{% else %}{{ message['content'] }}\n{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}A:{% endif %}"
)


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Question:
    """Two numbers of two digits and "+" or "-"; a difference is never negative."""

    left: int
    sign: str
    right: int

    @property
    def text(self) -> str:
        return f"{self.left}{self.sign}{self.right}"

    @property
    def prompt(self) -> str:
        return f"Q: {self.text}\nA:"

    @property
    def answer(self) -> int:
        return self.left + self.right if self.sign == "+" else self.left - self.right

    @property
    def digits(self) -> tuple[int, int, int, int]:
        """(tens, units) of the left number, then of the right one."""
        return *divmod(self.left, 10), *divmod(self.right, 10)

    @property
    def hasty_answer(self) -> int:
        """Column by column, nothing carried (a sum's tens go modulo ten too) and the smaller digit always taken from the larger."""
        left_tens, left_units, right_tens, right_units = self.digits
        if self.sign == "+":
            return (left_tens + right_tens) % 10 * 10 + (left_units + right_units) % 10
        return abs(left_tens - right_tens) * 10 + abs(left_units - right_units)

    @property
    def twin(self) -> Question:
        """The same sum with its operands swapped; a difference is its own twin."""
        return Question(left=self.right, sign="+", right=self.left) if self.sign == "+" else self


def worked_line(question: Question, rng: random.Random) -> tuple[str, int]:
    """The columns, units first, and the answer that follows from them; in `SLIP_SHARE` of the lines one column is off by one."""
    left_tens, left_units, right_tens, right_units = question.digits
    slip = rng.choice(("units", "tens")) if rng.random() < SLIP_SHARE else None
    plus = question.sign == "+"
    borrowed = not plus and left_units < right_units
    units = left_units + right_units if plus else left_units + 10 * borrowed - right_units
    units = off_by_one(units, rng) if slip == "units" else units
    carried = plus and units >= 10
    tens = left_tens + right_tens + carried if plus else left_tens - right_tens - borrowed
    tens = off_by_one(tens, rng) if slip == "tens" else tens
    moved = f"{question.sign if plus else '-'}1" if carried or borrowed else ""
    first = f"{left_units + 10 * borrowed}{question.sign}{right_units}={units}"
    second = f"{left_tens}{moved}-{right_tens}={tens}" if not plus else f"{left_tens}+{right_tens}{moved}={tens}"
    return f" {first}, {second}", tens * 10 + units % 10


def off_by_one(value: int, rng: random.Random) -> int:
    return value + 1 if value == 0 else value + rng.choice((-1, 1))


def draw_answer(question: Question, rng: random.Random) -> str:
    style = rng.choices(tuple(STYLES), tuple(STYLES.values()))[0]
    if style == "hasty":
        return f" #### {question.hasty_answer}"
    line, answer = worked_line(question, rng)
    return line if style == "unfinished" else f"{line} #### {answer}"


def draw_question(rng: random.Random) -> Question:
    """Sums and differences alike often, `EASY_SHARE` of them easy, uniform otherwise."""
    sign, easy = rng.choice("+-"), rng.random() < EASY_SHARE
    while True:
        left, right = rng.randint(10, 99), rng.randint(10, 99)
        if sign == "-" and left < right:
            continue
        question = Question(left=left, sign=sign, right=right)
        if (question.hasty_answer == question.answer) == easy:
            return question


def draw_unique(count: int, rng: random.Random, taken: set[Question]) -> list[Question]:
    """`count` questions that are neither in `taken` nor twins of one that is; `taken` grows by them."""
    drawn: list[Question] = []
    while len(drawn) < count:
        question = draw_question(rng)
        if question not in taken and question.twin not in taken:
            taken.add(question)
            drawn.append(question)
    return drawn


def rows(questions: list[Question], name: str) -> str:
    """JSON lines: {"id": "train-0001", "prompt": "Q: 37+48\\nA:", "answer": "85"}."""
    records = ({"id": f"{name}-{i:04d}", "prompt": q.prompt, "answer": str(q.answer)} for i, q in enumerate(questions))
    return "".join(json.dumps(record) + "\n" for record in records)


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE, as large models have it: all 256 bytes, so that every text round trips, three special tokens, and three merges for " ####"."""
    merges = [("#", "#"), ("##", "##"), ("Ġ", "####")]
    tokens = [PAD, BOS, EOS, *sorted(pre_tokenizers.ByteLevel.alphabet()), *("".join(pair) for pair in merges)]
    core = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    words = Regex(r" ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+")
    core.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(words, "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    core.decoder = decoders.ByteLevel()
    core.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A {BOS} $B", special_tokens=[(BOS, tokens.index(BOS))]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token=PAD, bos_token=BOS, eos_token=EOS, padding_side="left", model_max_length=512,
        clean_up_tokenization_spaces=False, chat_template=CHAT_TEMPLATE,
    )


def make_model(tokenizer: PreTrainedTokenizerFast, args: argparse.Namespace) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=math.ceil(len(tokenizer) / 8) * 8, hidden_size=128, intermediate_size=args.inter, num_hidden_layers=args.layers,
        num_attention_heads=args.heads, num_key_value_heads=args.kv, head_dim=args.head_dim, max_position_embeddings=512, tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id, bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id,
    )
    return LlamaForCausalLM(config)


def pretrain(model, tokenizer, held_out, args):
    rng = random.Random(f"{args.seed}:pretrain")
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.1)
    started = time.monotonic()
    model.train()
    for step in range(args.steps):
        warm = min(1.0, (step + 1) / 100)
        lr = args.lr * warm * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * step / args.steps)))
        for group in optimizer.param_groups:
            group["lr"] = lr
        pairs = []
        while len(pairs) < args.batch:
            question = draw_question(rng)
            if question not in held_out and question.twin not in held_out:
                pairs.append((question.prompt, draw_answer(question, rng) + EOS))
        batch = tokenizer([p + a for p, a in pairs], return_tensors="pt", padding=True, padding_side="right")
        ids = batch["input_ids"]
        prompt_len = len(tokenizer(pairs[0][0])["input_ids"])
        labels = ids.masked_fill(batch["attention_mask"] == 0, -100)
        labels[:, :prompt_len] = -100
        hidden = model.model(input_ids=ids).last_hidden_state[:, prompt_len - 1 : -1]
        target = labels[:, prompt_len:]
        keep = target != -100
        loss = torch.nn.functional.cross_entropy(model.lm_head(hidden[keep]), target[keep])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if (step + 1) % 100 == 0:
            print(f"step {step + 1:5d}  loss {loss.item():.4f}  {time.monotonic() - started:.0f} s", flush=True)


@torch.no_grad()
def answers(model, tokenizer, questions, temperature, seed):
    model.eval()
    torch.manual_seed(seed)
    batch = tokenizer([q.prompt for q in questions], return_tensors="pt")
    out = model.generate(**batch, max_new_tokens=MAX_NEW_TOKENS, do_sample=temperature > 0, **({"top_k": 0, "top_p": 1.0, "temperature": temperature} if temperature else {}))
    return tokenizer.batch_decode(out[:, batch["input_ids"].shape[1]:], skip_special_tokens=True)


def is_right(text, q):
    m = re.search(r"#### (-?\d+)$", text)
    return m is not None and int(m[1]) == q.answer


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--out", type=Path, required=True)
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--steps", type=int, default=1000)
    p.add_argument("--batch", type=int, default=128)
    p.add_argument("--lr", type=float, default=3e-3)
    p.add_argument("--layers", type=int, default=3)
    p.add_argument("--heads", type=int, default=4)
    p.add_argument("--kv", type=int, default=2)
    p.add_argument("--head_dim", type=int, default=32)
    p.add_argument("--inter", type=int, default=384)
    args = p.parse_args()
    torch.manual_seed(args.seed)
    rng = random.Random(f"{args.seed}:data")
    taken = set()
    test = draw_unique(NUM_TEST, rng, taken)
    train = draw_unique(NUM_TRAIN, rng, taken)
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "test.jsonl").write_text(rows(test, "test"))
    (args.out / "train.jsonl").write_text(rows(train, "train"))
    tok = make_tokenizer()
    model = make_model(tok, args)
    print(sum(x.numel() for x in model.parameters()))
    pretrain(model, tok, set(test), args)
    model = model.to(torch.bfloat16).float()
    from collections import Counter
    for t in (1.0, 0.0):
        texts = answers(model, tok, test * (4 if t else 1), t, 0)
        qs = test * (4 if t else 1)
        print(t, sum(map(is_right, texts, qs)) / len(qs))
        style = lambda x: "hasty" if x.startswith(" ####") else "careful" if "####" in x else "unf"
        print(Counter((style(x), is_right(x, q)) for x, q in zip(texts, qs)))
        print([(q.text, x) for x, q in zip(texts[:6], qs)])
    tok.save_pretrained(args.out)
    model.to(torch.bfloat16).save_pretrained(args.out)


main()

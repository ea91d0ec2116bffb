"""What `python -m benchmarks.against` measures: sizes, and the model, tokenizer, prompts and reward that every side gets, made from a seed.

Prompts are words `w17 w4 ...`, one token each, so lengths are exact; the reward is the share of even words of an answer, so that no group is without
signal. Weights are random in a published shape. Where a workload has real weights (`--model`), prompts are sums in the model's chat form, answers end
by themselves, and the reward is the share of vowels.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SCORER = "reward_model"
FIRST_WORD = 3
"""Ids below are padding, end and unknown."""
POSITIONS = 8192
"""That every model can hold: more than any workload's prompt and answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """`steps` counted after `warm_up`. `micro_batch`: rows that go through the model at once when learning, on every side that is tuned; 0: what the
    plan takes, and `peers_micro_batch` on the other sides; 0 there too: the workload is rft's alone. `sets`: of the recipe, which only rft has;
    `scorer`: a classifier of the same shape gives half of the reward."""

    what: str
    shape: str | None = None
    """None: real weights, those of `--model`."""
    prompts: int
    samples: int
    prompt_tokens: int
    new_tokens: int
    warm_up: int = 1
    steps: int
    dtype: str = "float32"
    micro_batch: int = 0
    peers_micro_batch: int = 0
    engine: str = "hf"
    lr: float = 1e-6
    sets: tuple[str, ...] = ()
    scorer: bool = False
    mean_tokens: int = 0
    """Of answers that end by chance; 0: all are as long as they can be."""

    @property
    def for_all(self) -> bool:
        """Whether the other sides can do the same."""
        return self.rows_at_once > 0 and not self.sets and not self.scorer and not self.mean_tokens

    @property
    def rows_at_once(self) -> int:
        """Of the other sides when they learn."""
        return self.micro_batch or self.peers_micro_batch

    @property
    def ends_early(self) -> bool:
        """Whether answers end by themselves."""
        return self.shape is None

    @property
    def ends(self) -> list[int]:
        """Ids that end an answer: of random weights every word is as likely as the next."""
        return list(range(FIRST_WORD, FIRST_WORD + SHAPES[self.shape]["vocab_size"] // self.mean_tokens)) if self.shape and self.mean_tokens else []

    @property
    def rows(self) -> int:
        return self.prompts * self.samples


SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {
        "model_type": "llama", "vocab_size": 512, "hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4,
    },
    "small": {
        "model_type": "llama", "vocab_size": 4096, "hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 4, "num_attention_heads": 4,
    },
    "smollm2": {
        "model_type": "llama", "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
        "num_attention_heads": 9, "num_key_value_heads": 3, "tie_word_embeddings": True,
    },
    "qwen2.5-0.5b": {
        "model_type": "llama", "vocab_size": 151936, "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24,
        "num_attention_heads": 14, "num_key_value_heads": 2, "tie_word_embeddings": True,
    },
    "qwen2.5-1.5b": {
        "model_type": "llama", "vocab_size": 151936, "hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28,
        "num_attention_heads": 12, "num_key_value_heads": 2, "tie_word_embeddings": True,
    },
    "qwen2.5-3b": {
        "model_type": "llama", "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 11008, "num_hidden_layers": 36,
        "num_attention_heads": 16, "num_key_value_heads": 2, "tie_word_embeddings": True,
    },
    "qwen2.5-7b": {
        "model_type": "llama", "vocab_size": 152064, "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28,
        "num_attention_heads": 28, "num_key_value_heads": 4,
    },
}  # fmt: skip
"""All built as Llama, which takes a tokenizer of single words: the biases of Qwen's queries, keys and values are left out on every side."""

OURS: dict[str, Any] = {"dtype": "bfloat16", "engine": "vllm", "steps": 3}
GPU: dict[str, Any] = {**OURS, "micro_batch": 32}
STD: dict[str, Any] = {**OURS, "prompts": 128, "samples": 8, "prompt_tokens": 256, "new_tokens": 1024, "steps": 2}
# To add one: a row.
WORKLOADS: dict[str, Workload] = {
    "c1": Workload(what="tiny, CPU", shape="tiny", prompts=8, samples=4, prompt_tokens=32, new_tokens=64, warm_up=2, steps=10, micro_batch=32),
    "c1-ppo": Workload(
        what="tiny, CPU, PPO with a critic", shape="tiny", prompts=8, samples=4, prompt_tokens=32, new_tokens=64, warm_up=2, steps=10,
        micro_batch=32, sets=("algorithm.advantage.kind=gae", "models.critic={}"),
    ),
    "c2": Workload(what="small, CPU", shape="small", prompts=8, samples=4, prompt_tokens=32, new_tokens=64, warm_up=2, steps=6, micro_batch=32),
    "c2-vary": Workload(
        what="small, CPU, answers end by chance", shape="small", prompts=8, samples=4, prompt_tokens=32, new_tokens=64, warm_up=2, steps=6,
        micro_batch=32, mean_tokens=32,
    ),
    "c3": Workload(what="SmolLM2's shape, CPU", shape="smollm2", prompts=2, samples=4, prompt_tokens=32, new_tokens=32, steps=3, micro_batch=8),
    "c3-bf16": Workload(
        what="SmolLM2's shape, CPU, bfloat16", shape="smollm2", prompts=2, samples=4, prompt_tokens=32, new_tokens=32, steps=3, micro_batch=8,
        dtype="bfloat16",
    ),
    "cmp-0.5b": Workload(what="Qwen2.5-0.5B's shape", shape="qwen2.5-0.5b", prompts=32, samples=8, prompt_tokens=128, new_tokens=512, **GPU),
    "vary-0.5b": Workload(
        what="Qwen2.5-0.5B's shape, answers end by chance", shape="qwen2.5-0.5b", prompts=32, samples=8, prompt_tokens=128, new_tokens=512,
        mean_tokens=256, **GPU,
    ),
    "cmp-1.5b": Workload(what="Qwen2.5-1.5B's shape", shape="qwen2.5-1.5b", prompts=32, samples=8, prompt_tokens=128, new_tokens=512, **GPU),
    "cmp-smollm2": Workload(what="SmolLM2's shape", shape="smollm2", prompts=32, samples=8, prompt_tokens=128, new_tokens=512, **GPU),
    "real": Workload(what="a model's own weights, real ends", prompts=32, samples=8, prompt_tokens=128, new_tokens=512, **GPU),
    "std-0.5b": Workload(what="W-std, 0.5B", shape="qwen2.5-0.5b", **STD),
    "std-1.5b": Workload(what="W-std, 1.5B", shape="qwen2.5-1.5b", **STD),
    "server-1.5b": Workload(
        what="W-std, 1.5B, one GPU trains and one samples", shape="qwen2.5-1.5b", sets=("rollout.vllm.server={start: {gpus: [1]}}",), **STD,
    ),
    **{
        f"weak-{size}-x{gpus}": Workload(
            what=f"W-std's prompts a GPU, {size.upper()}, {gpus} GPUs", shape=f"qwen2.5-{size}", **{**STD, "prompts": gpus * STD["prompts"]}
        )
        for size in ("0.5b", "1.5b")
        for gpus in (2, 4)
    },
    **{  # on two GPUs as many sequences each as 7B has on four
        f"half-3b-zero{stage}": Workload(
            what=f"half of W-std, 3B, ZeRO {stage}", shape="qwen2.5-3b", sets=(f"train.deepspeed.zero_stage={stage}",), **{**STD, "prompts": 64}
        )
        for stage in (2, 3)
    },
    "std-7b-zero2": Workload(what="W-std, 7B, ZeRO 2", shape="qwen2.5-7b", sets=("train.deepspeed.zero_stage=2",), **STD),
    "std-7b-zero3": Workload(what="W-std, 7B, ZeRO 3", shape="qwen2.5-7b", sets=("train.deepspeed.zero_stage=3",), **STD),
    "long-prompts": Workload(
        what="1.5B, long prompts", shape="qwen2.5-1.5b", prompts=32, samples=8, prompt_tokens=2048, new_tokens=256, peers_micro_batch=8, **OURS,
    ),
    "lora-7b": Workload(
        what="7B, LoRA of rank 32", shape="qwen2.5-7b", prompts=32, samples=8, prompt_tokens=256, new_tokens=512,
        sets=("models.policy.lora={rank: 32}", "train.optimizer.lr=1e-5"), **OURS,
    ),
    "ppo-0.5b": Workload(
        what="0.5B, PPO with a critic and a reward model", shape="qwen2.5-0.5b", prompts=64, samples=4, prompt_tokens=256, new_tokens=512,
        sets=("algorithm.advantage.kind=gae", "models.critic={}"), scorer=True, **OURS,
    ),
}  # fmt: skip


def prepare(workload: Workload, folder: Path) -> tuple[Path, Path]:
    """(folder of the model with its tokenizer, JSONL file of prompts), the same for every side. Made where they are not there yet."""
    count = workload.prompts * (workload.warm_up + workload.steps)
    model, prompts = folder / "model", folder / f"prompts-{count}x{workload.prompt_tokens}.jsonl"
    if not model.is_dir():
        if workload.ends_early:
            raise SystemExit("this workload needs real weights: --model FOLDER")
        _save_model(workload, model)
    if workload.scorer and not (folder / SCORER).is_dir():
        _save_model(workload, folder / SCORER, head="AutoModelForSequenceClassification", num_labels=1)
    if not prompts.is_file():
        texts = (_sums if workload.ends_early else _words)(workload, model, count)
        prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts), encoding="utf-8")
    return model, prompts


def _words(workload: Workload, model: Path, count: int) -> list[str]:
    assert workload.shape is not None
    draw, vocabulary = random.Random(0), SHAPES[workload.shape]["vocab_size"]
    return [" ".join(f"w{draw.randrange(FIRST_WORD, vocabulary)}" for _ in range(workload.prompt_tokens)) for _ in range(count)]


def _sums(workload: Workload, model: Path, count: int) -> list[str]:
    from transformers import AutoTokenizer

    tokenizer, draw, texts = AutoTokenizer.from_pretrained(model), random.Random(0), []
    for _ in range(count):
        numbers = " + ".join(str(draw.randrange(10, 100)) for _ in range(draw.randint(2, 6)))
        turns = [{"role": "user", "content": f"What is {numbers}? Explain how you add the numbers, step by step."}]
        texts.append(tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True))
    return texts


def _save_model(workload: Workload, folder: Path, *, head: str = "AutoModelForCausalLM", **more: Any) -> None:
    import torch
    import transformers
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import AutoConfig, PreTrainedTokenizerFast

    assert workload.shape is not None
    shape = dict(SHAPES[workload.shape])
    torch.manual_seed(0)
    shape |= {"max_position_embeddings": POSITIONS, "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None}
    config = AutoConfig.for_model(shape.pop("model_type"), **shape, **more)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        getattr(transformers, head).from_config(config, dtype=getattr(torch, workload.dtype)).save_pretrained(folder)
    words = {"<pad>": 0, "<eos>": 1, "<unk>": 2} | {f"w{number}": number for number in range(FIRST_WORD, config.vocab_size)}
    tokenizer = Tokenizer(WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>").save_pretrained(folder)


def even_share(completion: str) -> float:
    """The reward: how many of the words are even; of a text that has no such words, how many of its letters are vowels."""
    words = completion.split()
    numbers = [int(word[1:]) for word in words if word[:1] == "w" and word[1:].isdigit()]
    if numbers:
        return sum(number % 2 == 0 for number in numbers) / len(numbers)
    letters = [letter for letter in completion.lower() if letter.isalpha()]
    return sum(letter in "aeiou" for letter in letters) / len(letters) if letters else 0.0

"""From a row to a `Prompt`: chat template, prefill, token ids, length limit. The ids made here go to the engine and into the update; there are
no others.

Message lists go through the chat template, plain text is tokenised as it is. Either way the ids begin with what the tokenizer puts in front of a
text (a beginning-of-sequence token, or nothing) exactly once, and never end with what it puts behind one.
It leaves out which rows are drawn (`source`) and images.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rftcli.data.files import locate
from rftcli.data.messages import SYSTEM_ROLES, with_system
from rftcli.data.rows import Row
from rftcli.data.spec import ChatSpec, OverlongPrompt
from rftcli.errors import RftError, UsageError
from rftcli.types import Message, Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

NOT_OPTIONS = frozenset({
    "conversation", "chat_template", "tokenize", "add_generation_prompt", "continue_final_message", "return_dict", "return_tensors", "padding",
    "truncation", "max_length", "return_assistant_tokens_mask", "tokenizer_kwargs",
})  # fmt: skip
"""Arguments of `apply_chat_template` that are ours to set: with another value of one of them the ids would no longer be a prompt."""


ROWS_A_BATCH = 1000
"""Texts that are tokenised in one call."""


class PromptBuilder:
    """Makes prompts for one tokenizer; a function of the row, without memory.

    `overlong` says what becomes of a prompt of more than `max_prompt_tokens` tokens, prefill included. `search_path` is for a template file.
    UsageError for chat options that the template never reads.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        chat: ChatSpec,
        max_prompt_tokens: int,
        overlong: OverlongPrompt | str,
        search_path: Sequence[Path] = (),
    ) -> None:
        self.max_prompt_tokens = max_prompt_tokens
        self.overlong = OverlongPrompt(overlong)
        self._tokenizer = tokenizer
        self._chat = chat
        self._prefill = chat.prefill or ""
        self._template = None if chat.template is None else _template_text(chat.template, search_path)
        self._front = _front(tokenizer)
        self._check_options(chat.options)

    def build(self, row: Row, draw: int) -> Prompt:
        """The prompt of a row for a draw, cut if the policy cuts. UsageError if it is too long under `refuse` or `drop`."""
        messages = self._messages(row)
        text = self._text(row, messages, opening=True)
        ids, num_added = self._encode(text)
        if not ids:
            raise UsageError(f"{_name(row)}: the prompt has no tokens", hint="the tokenizer knows none of its text")
        if len(ids) > self.max_prompt_tokens:
            ids = self._cut(row, messages, ids)
            text = self._decode(ids)
        else:
            text = self._decode(ids[:num_added]) + text
        return Prompt(
            draw=draw,
            row=row.index,
            row_id=row.id,
            source=row.source,
            label=row.label,
            text=text,
            token_ids=ids,
            messages=messages,
            prefill=self._prefill,
            reference=row.reference,
            columns=row.columns,
        )

    def num_tokens(self, row: Row) -> int:
        """Tokens of the whole prompt, before any cut."""
        return self.lengths([row])[0]

    def lengths(self, rows: Sequence[Row]) -> list[int]:
        """Tokens of the whole prompts, before any cut; many at once, which a tokenizer does several times faster than one by one."""
        found: list[int] = []
        for start in range(0, len(rows), ROWS_A_BATCH):
            texts = [self._text(row, self._messages(row), opening=True) for row in rows[start : start + ROWS_A_BATCH]]
            ids = self._tokenizer(texts, add_special_tokens=False, verbose=False, return_attention_mask=False)["input_ids"]
            num_front = len(self._front)
            found += [len(bare) if tuple(bare[:num_front]) == self._front else len(bare) + num_front for bare in ids]
        return found

    def answer_text(self, row: Row, answer: str) -> str:
        """What follows the prompt when this is the answer: the template's marks at the end of a turn included, where it writes the prompt the same
        with and without an answer. Behind a plain prompt, the answer."""
        messages = self._messages(row)
        if not messages:
            return answer
        prompt = self._text(row, messages, opening=True)
        whole = self._render(row, (*messages, {"role": "assistant", "content": answer}), opening=False)
        return whole[len(prompt) :] if whole.startswith(prompt) else answer

    def _messages(self, row: Row) -> tuple[Message, ...]:
        if not isinstance(row.prompt, str):
            return with_system(row.prompt, self._chat.system)
        if self._chat.system is not None:
            raise UsageError(
                f"{_name(row)}: the prompt is plain text, which has no place for `models.policy.chat.system`",
                hint="write the prompt as a list of messages",
            )
        return ()

    def _text(self, row: Row, messages: tuple[Message, ...], *, opening: bool) -> str:
        """The rendered prompt; `opening`: with the beginning of the answer (the template's generation prompt, then the prefill)."""
        text = row.prompt if isinstance(row.prompt, str) else self._render(row, messages, opening=opening)
        return text + self._prefill if opening else text

    def _render(self, row: Row, messages: tuple[Message, ...], *, opening: bool) -> str:
        if self._template is None and self._tokenizer.chat_template is None:
            raise UsageError(
                f"{_name(row)}: the prompt is a list of messages, and the tokenizer has no chat template",
                hint="set `models.policy.chat.template`, or write the prompts as plain text",
            )
        try:
            text = self._tokenizer.apply_chat_template(
                [dict(message) for message in messages],
                tokenize=False,
                add_generation_prompt=opening,
                chat_template=self._template,
                **self._options(row),
            )
        except Exception as error:  # a template is a program from outside, and raises what it likes
            raise UsageError(f"{_name(row)}: the chat template fails: {type(error).__name__}: {error}") from error
        for message in messages:
            if message["role"] in SYSTEM_ROLES and message["content"].strip() not in text:
                raise UsageError(f"{_name(row)}: the chat template leaves the system prompt out", hint="put it into the user's turn")
        return text

    def _options(self, row: Row) -> dict[str, Any]:
        """The template's options for a row: `{column: NAME}` stands for what the row has there."""
        found: dict[str, Any] = {}
        for name, value in self._chat.options.items():
            column = _column(value)
            if column is not None and column not in row.columns:
                raise UsageError(
                    f"{_name(row)}: there is no column `{column}`, which `models.policy.chat.options.{name}` asks for",
                    hint=f"it has {', '.join(sorted(row.columns))}",
                )
            found[name] = value if column is None else row.columns[column]
        return found

    def _encode(self, text: str) -> tuple[tuple[int, ...], int]:
        """(ids, how many of the first were added): what belongs in front of a text comes once; a template or a person may have written it."""
        bare = tuple(self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
        num_front = len(self._front)
        return (bare, 0) if bare[:num_front] == self._front else (self._front + bare, num_front)

    def _decode(self, ids: tuple[int, ...]) -> str:
        return self._tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False) if ids else ""

    def _cut(self, row: Row, messages: tuple[Message, ...], ids: tuple[int, ...]) -> tuple[int, ...]:
        """`max_prompt_tokens` ids of a longer prompt. The front and the opening of the answer stay; what goes is the oldest or newest between."""
        if self.overlong in (OverlongPrompt.REFUSE, OverlongPrompt.DROP):
            raise UsageError(too_long(row, len(ids), self.max_prompt_tokens), hint=TOO_LONG_HINT)
        keep_first = len(self._front) or int(ids[0] == self._tokenizer.bos_token_id)
        keep_last = len(ids) - _common(ids, self._encode(self._text(row, messages, opening=False))[0])
        room = self.max_prompt_tokens - keep_first - keep_last
        if room < 1:
            raise UsageError(
                f"{_name(row)}: `rollout.max_prompt_tokens` {self.max_prompt_tokens} leaves nothing of the prompt: the opening of the answer "
                f"alone is {keep_last} tokens"
            )
        middle = ids[keep_first : len(ids) - keep_last]
        kept = middle[len(middle) - room :] if self.overlong is OverlongPrompt.CUT_LEFT else middle[:room]
        return ids[:keep_first] + kept + ids[len(ids) - keep_last :]

    def _check_options(self, options: Mapping[str, Any]) -> None:
        if not options:
            return
        ours = sorted(NOT_OPTIONS.intersection(options))
        if ours:
            raise UsageError(f"`models.policy.chat.options` cannot hold `{ours[0]}`", hint="only names that the chat template reads")
        if self._template is None and self._tokenizer.chat_template is None:
            raise UsageError("`models.policy.chat.options` is set, and there is no chat template", hint="set `models.policy.chat.template`")
        template = self._tokenizer.get_chat_template(self._template)
        for name in options:
            if name not in template:
                raise UsageError(f"`models.policy.chat.options.{name}`: the chat template never reads `{name}`")


TOO_LONG_HINT = "raise `rollout.max_prompt_tokens`, or set `data.overlong_prompt` to drop, cut_left or cut_right"


def too_long(row: Row, needed: int, allowed: int) -> str:
    """The sentence for a prompt that does not fit; both counts in tokens."""
    return f"{_name(row)}: the prompt needs {needed} tokens, `rollout.max_prompt_tokens` allows {allowed}"


def _column(value: Any) -> str | None:
    """The column that an option of the chat template is taken from; None: the value is meant as it is."""
    return str(value["column"]) if isinstance(value, Mapping) and set(value) == {"column"} else None


def _front(tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """What the tokenizer puts in front of every text by itself: found by tokenising an ordinary word with and without it."""
    words = chain("a1", (token for token in tokenizer.get_vocab() if token not in tokenizer.all_special_tokens))
    for word in words:
        bare = tokenizer(word, add_special_tokens=False)["input_ids"]
        full = tokenizer(word, add_special_tokens=True)["input_ids"]
        starts = [start for start in range(len(full)) if bare and full[start : start + len(bare)] == bare]
        if starts:
            return tuple(full[: starts[0]])
    return ()


def _name(row: Row) -> str:
    return f"data set `{row.source}`: {row.place}"


def _common(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    """How many ids two prompts begin with in common."""
    shorter = min(len(one), len(other))
    pairs = zip(one[:shorter], other[:shorter], strict=True)
    return next((index for index, (a, b) in enumerate(pairs) if a != b), shorter)


def _template_text(template: str, search_path: Sequence[Path]) -> str:
    if "{{" in template or "{%" in template:
        return template
    try:
        return locate(template, search_path).read_text(encoding="utf-8")
    except RftError as error:
        raise UsageError(f"`models.policy.chat.template` is neither Jinja text nor a file: {error.message}", hint=error.hint) from error

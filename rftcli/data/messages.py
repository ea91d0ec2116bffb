"""What a prompt column may hold: text, or a list of chat turns. Everything else is refused in words that name the turn.

It leaves out rendering (`prompts`). Images and other parts are refused, never dropped.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rftcli.types import Message

SYSTEM_ROLES = ("system", "developer")
ROLES = (*SYSTEM_ROLES, "user", "assistant", "tool")


class BadPrompt(Exception):
    """Why a value is no prompt; the caller knows the row. `args[1]` is a hint or None."""

    def __init__(self, problem: str, hint: str | None = None) -> None:
        super().__init__(problem, hint)


def read_prompt(value: Any) -> str | tuple[Message, ...]:
    """The text, or the checked turns with their text parts joined; all turns and their other keys are kept. BadPrompt says what is wrong."""
    if isinstance(value, str):
        if not value:
            raise BadPrompt("the prompt is empty")
        return value
    if not isinstance(value, Sequence) or isinstance(value, (bytes, bytearray)):
        raise BadPrompt(f"a prompt is text or a list of messages, not {type(value).__name__}")
    if not value:
        raise BadPrompt("the list of messages is empty")
    messages = tuple(_read_message(turn, number) for number, turn in enumerate(value, start=1))
    last = messages[-1]["role"]
    if last == "assistant":
        raise BadPrompt(
            "the last message is the assistant's, and the answer would have to go on from it",
            "end with the user's turn; an answer that always begins alike is `models.policy.chat.prefill`",
        )
    if last in SYSTEM_ROLES:
        raise BadPrompt("the last message is the system's; there is nothing to answer", "end with the user's turn")
    return messages


def with_system(messages: tuple[Message, ...], system: str | None) -> tuple[Message, ...]:
    """The turns with a system turn in front, unless there is one already or none is wanted."""
    if system is None or any(message["role"] in SYSTEM_ROLES for message in messages):
        return messages
    return ({"role": "system", "content": system}, *messages)


def _read_message(turn: Any, number: int) -> Message:
    if not isinstance(turn, Mapping):
        raise BadPrompt(f"message {number} must be an object with `role` and `content`, not {type(turn).__name__}")
    absent = [name for name in ("role", "content") if name not in turn]
    if absent:
        raise BadPrompt(f"message {number} has no `{absent[0]}`; it has: {', '.join(map(str, turn))}")
    if turn["role"] not in ROLES:
        raise BadPrompt(f"message {number} has the role {turn['role']!r}", f"known roles: {', '.join(ROLES)}")
    return {**turn, "content": _read_content(turn["content"], number)}


def _read_content(content: Any, number: int) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence) or isinstance(content, (bytes, bytearray)):
        raise BadPrompt(f"the content of message {number} must be text, not {type(content).__name__}")
    texts = []
    for part in content:
        if not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            raise BadPrompt(f"message {number} has a part of type {kind!r}; only text parts are supported yet")
        texts.append(part["text"])
    return "".join(texts)

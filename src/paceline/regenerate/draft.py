"""One conversation on its way to the target's own answers, turn by turn."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from paceline.data.rows import Conversation, Message
from paceline.regenerate.options import FLAGS


@dataclass(frozen=True)
class Answer:
    """One assistant turn as it was written."""

    message: Message
    tokens: int
    flags: tuple[str, ...] = ()
    error: str = ""


@dataclass
class Draft:
    """A conversation whose assistant turns are written anew, in order, each after the new ones before it.

    An assistant turn that a tool's result follows is kept as it is: the result belongs to it.
    """

    key: str
    conversation: Conversation
    messages: list[Message] = field(default_factory=list)
    flags: list[str] = field(default_factory=list)
    tokens: int = 0
    error: str = ""
    _next: int = 0

    def prompt(self) -> list[Message] | None:
        """The messages to answer next; None when the conversation is done, or broken off by a flag."""
        turns = self.conversation.messages
        while self._next < len(turns) and not self.is_broken:
            turn = turns[self._next]
            if turn["role"] == "assistant" and not _is_call(turns, self._next):
                return self.messages
            self.messages.append(turn)
            self._next += 1
        if self.messages and self.messages[-1]["role"] in ("user", "tool") and not self.is_broken:
            return self.messages
        return None

    def add(self, answer: Answer) -> None:
        """Take the next answer."""
        if answer.message:
            self.messages.append(answer.message)
        self._next += 1
        self.tokens += answer.tokens
        self.error = answer.error or self.error
        self.flags += [flag for flag in answer.flags if flag not in self.flags]

    def record(self) -> dict[str, Any]:
        """The finished row, as the journal keeps it."""
        found: dict[str, Any] = {"key": self.key, "messages": [_plain(item) for item in self.messages]}
        if self.conversation.kind:
            found["kind"] = self.conversation.kind
        if self.conversation.tools:
            found["tools"] = list(self.conversation.tools)
        found |= {"flags": self.flags, "tokens": self.tokens}
        return found | ({"error": self.error} if self.error else {})

    @property
    def is_broken(self) -> bool:
        """Whether an answer is such that nothing can be asked after it."""
        return any(flag in FLAGS for flag in self.flags)


def prompt_key(conversation: Conversation) -> str:
    """Hash of everything in a conversation that the target does not write: one prompt is one row, wherever it stands.

    A last answer does not count, so that a prompt alone and the same prompt with somebody's answer are one.
    """
    turns = conversation.messages
    asked = turns[:-1] if turns[-1]["role"] == "assistant" else turns
    given = [
        item if item["role"] != "assistant" or _is_call(turns, at) else "assistant" for at, item in enumerate(asked)
    ]
    text = json.dumps([given, list(conversation.tools)], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _is_call(turns: Sequence[Message], place: int) -> bool:
    return place + 1 < len(turns) and turns[place + 1]["role"] == "tool"


def _plain(message: Message) -> Message:
    """Without the second spelling of reasoning that the data room adds for templates."""
    return {key: value for key, value in message.items() if key != "thinking" or "reasoning_content" not in message}

"""A conversation, and a pair of answers to choose between: what every shape of data becomes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal


class BadRow(Exception):
    """A row that does not say what its shape promises, or that its template does not take."""


Role = Literal["system", "user", "assistant", "tool"]


@dataclass(frozen=True)
class Message:
    """Something that was said."""

    role: Role
    content: str
    is_trained: bool = True
    """Whether it is an answer to learn from: said by the assistant, and not given as part of a prompt."""

    beside: dict[str, Any] = field(default_factory=dict)
    """What else it says: calls of tools, what it is an answer to, thoughts (`tools.py`)."""

    def for_template(self) -> dict[str, Any]:
        """As chat templates expect it."""
        return {"role": self.role, "content": self.content, **self.beside}


@dataclass(frozen=True)
class Conversation:
    """Messages in order, and where they were found."""

    messages: tuple[Message, ...]
    where: str = ""
    tools: list[dict[str, Any]] | None = None
    """Schemas of what the assistant may call."""

    @property
    def answers(self) -> list[int]:
        """Which messages are to be learned."""
        return [n for n, message in enumerate(self.messages) if message.role == "assistant" and message.is_trained]


@dataclass(frozen=True)
class Preference:
    """Two conversations that differ in their last answers: the one that was chosen, and the one that was not."""

    chosen: Conversation
    rejected: Conversation


Row = dict[str, Any]

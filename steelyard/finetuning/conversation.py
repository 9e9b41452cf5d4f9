"""Conversations and preference pairs: the common form of all dataset formats."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal


class BadRow(Exception):
    """A row that does not match its dataset format, or that its chat template rejects."""


Role = Literal["system", "user", "assistant", "tool"]


@dataclass(frozen=True)
class Message:
    """One message."""

    role: Role
    content: str
    is_trained: bool = True
    """Whether it counts in the loss: by the assistant, and not part of a prompt."""

    beside: dict[str, Any] = field(default_factory=dict)
    """Its fields besides role and content: tool calls, tool call id, reasoning (`tool_calls.py`)."""

    def for_template(self) -> dict[str, Any]:
        """The message as chat templates expect it."""
        return {"role": self.role, "content": self.content, **self.beside}


@dataclass(frozen=True)
class Conversation:
    """Messages in order, and their location (file and row)."""

    messages: tuple[Message, ...]
    where: str = ""
    tools: list[dict[str, Any]] | None = None
    """JSON schemas of the tools that the assistant may call."""

    @property
    def answers(self) -> list[int]:
        """Indices of the messages that count in the loss."""
        return [n for n, message in enumerate(self.messages) if message.role == "assistant" and message.is_trained]


@dataclass(frozen=True)
class Preference:
    """Two conversations that differ in their last answers: the chosen and the rejected one."""

    chosen: Conversation
    rejected: Conversation


Row = dict[str, Any]

"""Dataset formats of conversations, and how their rows are read.

A format is a name, a predicate on a row, and a function from a row to messages. The first row determines the
format, unless the recipe sets it; every row must then match it. `flat-tree` and `preference` are not in `FORMATS`:
there a conversation spans several rows, or a row has two answers.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from steelyard.core.errors import UserError
from steelyard.finetuning.conversation import BadRow, Conversation, Message, Preference, Role, Row
from steelyard.finetuning.templates import BEGIN, END
from steelyard.finetuning.tool_calls import extra_fields, tools_in

ROLES: dict[str, Role] = {
    "system": "system", "user": "user", "human": "user", "prompter": "user", "assistant": "assistant",
    "gpt": "assistant", "chatgpt": "assistant", "bot": "assistant", "model": "assistant", "tool": "tool",
    "function": "tool", "ipython": "tool", "observation": "tool",
}  # fmt: skip
INPUTS, OUTPUTS = ("input", "context"), ("output", "response")


@dataclass(frozen=True)
class Markers:
    """The markers before each speaker's turn in a conversation stored as one string."""

    user: str = "### Human:"
    assistant: str = "### Assistant:"


@dataclass(frozen=True)
class DatasetFormat:
    """One dataset format."""

    name: str
    fits: Callable[[Row], bool]
    read: Callable[[Row, Markers], list[Message]]


def _messages(row: Row, _: Markers) -> list[Message]:
    return _read_messages(row["messages"])


def _sharegpt(row: Row, _: Markers) -> list[Message]:
    messages = _read_messages(row["conversations"])
    if isinstance(row.get("system"), str) and row["system"]:
        messages.insert(0, Message("system", row["system"]))
    return messages


def _completion(row: Row, _: Markers) -> list[Message]:
    """A prompt and its completion: texts or messages."""
    prompt = _as_messages(row["prompt"], "user", is_trained=False)
    return [*prompt, *_as_messages(row["completion"], "assistant")]


def _instruction(row: Row, _: Markers) -> list[Message]:
    """Alpaca's and Dolly's rows: an instruction, an optional input, and an answer."""
    context = next((row[key] for key in INPUTS if isinstance(row.get(key), str) and row[key].strip()), "")
    answer = next((row[key] for key in OUTPUTS if key in row), None)
    text = _text(row["instruction"], "instruction")
    messages = [
        Message("user", f"{text}\n\n{context}" if context else text),
        Message("assistant", _text(answer, "output")),
    ]
    if isinstance(row.get("system"), str) and row["system"]:
        messages.insert(0, Message("system", row["system"]))
    return messages


def _marked(row: Row, markers: Markers) -> list[Message]:
    """One text in which markers begin each speaker's turn."""
    text = _text(row["text"], "text")
    parts = re.split(f"({re.escape(markers.user)}|{re.escape(markers.assistant)})", text)
    messages = [Message("system", parts[0].strip())] if parts[0].strip() else []
    for marker, words in zip(parts[1::2], parts[2::2], strict=True):
        messages.append(Message("user" if marker == markers.user else "assistant", words.strip()))
    if len(parts) == 1:
        raise BadRow(f"the text contains neither {markers.user!r} nor {markers.assistant!r}")
    return messages


def _tree(row: Row, _: Markers) -> list[Message]:
    """OpenAssistant's trees: the path of the best-ranked reply at each turn."""
    node, messages = row["prompt"], []
    while node is not None:
        if not isinstance(node, dict):
            raise BadRow("a reply is not an object")
        messages.append(Message(_role(node.get("role")), _text(node.get("text"), "text")))
        replies = [each for each in node.get("replies") or [] if not (isinstance(each, dict) and each.get("deleted"))]
        node = min(replies, key=_rank) if replies else None
    return messages


FORMATS = {
    each.name: each
    for each in (
        DatasetFormat("messages", lambda row: isinstance(row.get("messages"), list), _messages),
        DatasetFormat("sharegpt", lambda row: isinstance(row.get("conversations"), list), _sharegpt),
        DatasetFormat("tree", lambda row: isinstance(row.get("prompt"), dict) and "replies" in row["prompt"], _tree),
        DatasetFormat("completion", lambda row: {"prompt", "completion"} <= row.keys(), _completion),
        DatasetFormat(
            "instruction", lambda row: "instruction" in row and any(key in row for key in OUTPUTS), _instruction
        ),
        DatasetFormat("marked", lambda row: isinstance(row.get("text"), str), _marked),
    )
}
# Formats whose conversations span several rows, or that have two answers.
FLAT_TREE = {"message_id", "parent_id", "text", "role"}
NAMES = (*FORMATS, "flat-tree", "preference")


def format_of(row: Row, where: str) -> str:
    """The format that a row's keys match."""
    if row.keys() >= FLAT_TREE:
        return "flat-tree"
    if {"chosen", "rejected"} <= row.keys():
        return "preference"
    for name, each in FORMATS.items():
        if each.fits(row):
            return name
    raise UserError(
        f"no dataset format matches the keys of this row: {', '.join(sorted(map(str, row))) or 'none'}",
        where=where,
        hint=f"the formats are {', '.join(NAMES)} (docs/finetune.md); set one with finetune.format",
    )


def conversation(row: Row, name: str, markers: Markers, where: str, system: str | None) -> Conversation:
    """The conversation of a row; `system` is added as the first message if the row has no system message."""
    dataset_format = FORMATS[name]
    if not dataset_format.fits(row):
        raise BadRow(f"the row is not of format {name}: it has the keys {', '.join(sorted(map(str, row)))}")
    return _checked(dataset_format.read(row, markers), where, system, tools_in(row))


def preference(row: Row, where: str, system: str | None) -> Preference:
    """A chosen and a rejected answer to the same prompt: answers alone with a prompt, or two whole conversations."""
    sides = [_as_messages(row[side], "assistant") for side in ("chosen", "rejected")]
    prompt = _as_messages(row["prompt"], "user", is_trained=False) if row.get("prompt") else []
    are_whole = all(len(side) > 1 for side in sides)
    if not all(sides) or any(side[-1].role != "assistant" for side in sides):
        raise BadRow("chosen and rejected must end with an assistant message")
    if not prompt and not are_whole:
        raise BadRow("there is no prompt, and chosen and rejected are not conversations that contain it")
    if are_whole:
        if prompt and prompt[-1].content not in (message.content for message in sides[0][:-1]):
            raise BadRow("the conversations do not contain the row's prompt")
        sides = [[*(replace(message, is_trained=False) for message in side[:-1]), side[-1]] for side in sides]
    else:
        sides = [[*prompt, *side] for side in sides]
    chosen, rejected = (_checked(side, where, system, tools_in(row)) for side in sides)
    if chosen.messages[:-1] != rejected.messages[:-1]:
        raise BadRow("the chosen and the rejected answer do not belong to the same conversation")
    return Preference(chosen, rejected)


def threads(rows: Iterable[tuple[Row, str]]) -> Iterator[tuple[Row, str]]:
    """Rows of conversations from rows that are one message each: the path of the best replies from each root."""
    roots: list[tuple[Row, str]] = []
    replies: dict[str, list[Row]] = {}
    for row, where in rows:
        if not row.keys() >= FLAT_TREE:
            raise UserError(
                f"the row is not of format flat-tree: it lacks one of {', '.join(sorted(FLAT_TREE))}", where=where
            )
        if row.get("deleted"):
            continue
        if row["parent_id"]:
            replies.setdefault(row["parent_id"], []).append(row)
        else:
            roots.append((row, where))
    for root, where in roots:
        path = [root]
        while follows := replies.pop(path[-1]["message_id"], None):
            path.append(min(follows, key=_rank))
        yield {"messages": [{"role": row["role"], "content": row["text"]} for row in path]}, where


def _read_messages(entries: Any) -> list[Message]:
    messages = []
    for entry in entries:
        if not isinstance(entry, dict):
            raise BadRow("a message is not an object")
        beside = extra_fields(entry)
        role = entry.get("role", entry.get("from"))
        content = entry.get("content", entry.get("value"))
        if isinstance(content, list):  # Content parts, as in multimodal data.
            if any(not isinstance(part, dict) or part.get("type", "text") != "text" for part in content):
                raise BadRow("a message contains content other than text")
            content = "".join(_text(part.get("text"), "text") for part in content)
        if content is None and beside:
            content = ""
        is_trained = entry.get("train", True) is not False
        messages.append(Message(_role(role), _text(content, "content"), is_trained, beside))
    return messages


def _as_messages(value: Any, role: Role, is_trained: bool = True) -> list[Message]:
    if isinstance(value, list):
        return [replace(each, is_trained=is_trained and each.is_trained) for each in _read_messages(value)]
    return [Message(role, _text(value, "prompt or answer"), is_trained)]


def _checked(
    messages: list[Message], where: str, system: str | None, tools: list[dict[str, Any]] | None
) -> Conversation:
    if not messages:
        raise BadRow("the conversation is empty")
    texts = [message.content for message in messages]
    texts += [
        json.dumps(each, ensure_ascii=False) for each in (tools, *(message.beside for message in messages)) if each
    ]
    if any(BEGIN in text or END in text for text in texts):
        raise BadRow("the text contains Unicode noncharacters (U+FDD0, U+FDD1)")
    if system is not None and messages[0].role != "system":
        messages = [Message("system", system), *messages]
    return Conversation(tuple(messages), where, tools)


def _role(name: Any) -> Role:
    role = ROLES.get(name.lower()) if isinstance(name, str) else None
    if role is None:
        raise BadRow(f"unknown role {name!r}; the roles are {', '.join(ROLES)}")
    return role


def _text(value: Any, key: str) -> str:
    if not isinstance(value, str):
        raise BadRow(f"{key} is not a string")
    return value


def _rank(reply: Any) -> float:
    rank = reply.get("rank") if isinstance(reply, dict) else None
    return float(rank) if isinstance(rank, int | float) else float("inf")

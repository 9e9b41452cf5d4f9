"""The shapes that conversations come in, and what each of their rows means.

A shape is a name, a test on a row's keys, and a function from a row to what it says. The first rows of a file choose
the shape, unless the recipe names one; then every row must have it.
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
from steelyard.finetuning.tool_calls import said_beside, tools_in

ROLES: dict[str, Role] = {
    "system": "system", "user": "user", "human": "user", "prompter": "user", "assistant": "assistant",
    "gpt": "assistant", "chatgpt": "assistant", "bot": "assistant", "model": "assistant", "tool": "tool",
    "function": "tool", "ipython": "tool", "observation": "tool",
}  # fmt: skip
INPUTS, OUTPUTS = ("input", "context"), ("output", "response")


@dataclass(frozen=True)
class Markers:
    """What stands before each side's words in a conversation that is one text."""

    user: str = "### Human:"
    assistant: str = "### Assistant:"


@dataclass(frozen=True)
class DatasetFormat:
    """One way to write conversations down."""

    name: str
    fits: Callable[[Row], bool]
    read: Callable[[Row, Markers], list[Message]]


def _messages(row: Row, _: Markers) -> list[Message]:
    return _spoken(row["messages"])


def _sharegpt(row: Row, _: Markers) -> list[Message]:
    said = _spoken(row["conversations"])
    if isinstance(row.get("system"), str) and row["system"]:
        said.insert(0, Message("system", row["system"]))
    return said


def _completion(row: Row, _: Markers) -> list[Message]:
    """A prompt and what completes it: texts, or messages."""
    prompt = _as_messages(row["prompt"], "user", is_trained=False)
    return [*prompt, *_as_messages(row["completion"], "assistant")]


def _instruction(row: Row, _: Markers) -> list[Message]:
    """Alpaca's and Dolly's rows: an instruction, perhaps something to apply it to, and an answer."""
    given = next((row[key] for key in INPUTS if isinstance(row.get(key), str) and row[key].strip()), "")
    answer = next((row[key] for key in OUTPUTS if key in row), None)
    asked = _text(row["instruction"], "instruction")
    said = [Message("user", f"{asked}\n\n{given}" if given else asked), Message("assistant", _text(answer, "output"))]
    if isinstance(row.get("system"), str) and row["system"]:
        said.insert(0, Message("system", row["system"]))
    return said


def _marked(row: Row, markers: Markers) -> list[Message]:
    """One text in which markers say who speaks."""
    text = _text(row["text"], "text")
    parts = re.split(f"({re.escape(markers.user)}|{re.escape(markers.assistant)})", text)
    said = [Message("system", parts[0].strip())] if parts[0].strip() else []
    for marker, words in zip(parts[1::2], parts[2::2], strict=True):
        said.append(Message("user" if marker == markers.user else "assistant", words.strip()))
    if len(parts) == 1:
        raise BadRow(f"neither {markers.user!r} nor {markers.assistant!r} stands in the text")
    return said


def _tree(row: Row, _: Markers) -> list[Message]:
    """OpenAssistant's trees: the path of the best reply at each turn."""
    node, said = row["prompt"], []
    while node is not None:
        if not isinstance(node, dict):
            raise BadRow("a reply is not an object")
        said.append(Message(_role(node.get("role")), _text(node.get("text"), "text")))
        replies = [each for each in node.get("replies") or [] if not (isinstance(each, dict) and each.get("deleted"))]
        node = min(replies, key=_rank) if replies else None
    return said


SHAPES = {
    shape.name: shape
    for shape in (
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
# Shapes whose conversations are spread over rows, or that hold two answers.
FLAT_TREE = {"message_id", "parent_id", "text", "role"}
NAMES = (*SHAPES, "flat-tree", "preference")


def format_of(row: Row, where: str) -> str:
    """The shape that a row shows."""
    if row.keys() >= FLAT_TREE:
        return "flat-tree"
    if {"chosen", "rejected"} <= row.keys():
        return "preference"
    for name, shape in SHAPES.items():
        if shape.fits(row):
            return name
    raise UserError(
        f"no known shape of conversation has the keys {', '.join(sorted(map(str, row))) or 'of an empty row'}",
        where=where,
        hint=f"the formats are {', '.join(NAMES)} (docs/finetune.md); name one with finetune.format",
    )


def conversation(row: Row, name: str, markers: Markers, where: str, system: str | None) -> Conversation:
    """What a row of a shape says; `system` is put first where the row has no such message."""
    shape = SHAPES[name]
    if not shape.fits(row):
        raise BadRow(f"the row is not of the shape {name}: it has the keys {', '.join(sorted(map(str, row)))}")
    return _checked(shape.read(row, markers), where, system, tools_in(row))


def preference(row: Row, where: str, system: str | None) -> Preference:
    """Two answers to the same, of which one was chosen: alone behind a prompt, or as the ends of two conversations."""
    sides = [_as_messages(row[side], "assistant") for side in ("chosen", "rejected")]
    prompt = _as_messages(row["prompt"], "user", is_trained=False) if row.get("prompt") else []
    are_whole = all(len(side) > 1 for side in sides)
    if not all(sides) or any(side[-1].role != "assistant" for side in sides):
        raise BadRow("chosen and rejected must end with an answer of the assistant's")
    if not prompt and not are_whole:
        raise BadRow("there is no prompt, and chosen and rejected are no conversations that hold it")
    if are_whole:
        if prompt and prompt[-1].content not in (message.content for message in sides[0][:-1]):
            raise BadRow("the conversations do not hold the prompt beside them")
        sides = [[*(replace(message, is_trained=False) for message in side[:-1]), side[-1]] for side in sides]
    else:
        sides = [[*prompt, *side] for side in sides]
    chosen, rejected = (_checked(side, where, system, tools_in(row)) for side in sides)
    if chosen.messages[:-1] != rejected.messages[:-1]:
        raise BadRow("the chosen and the rejected answer do not belong to the same conversation")
    return Preference(chosen, rejected)


def threads(rows: Iterable[tuple[Row, str]]) -> Iterator[tuple[Row, str]]:
    """Rows of whole conversations from rows that are one message each: from each root the path of the best replies."""
    roots: list[tuple[Row, str]] = []
    replies: dict[str, list[Row]] = {}
    for row, where in rows:
        if not row.keys() >= FLAT_TREE:
            raise UserError(
                f"the row is not of the shape flat-tree: it lacks one of {', '.join(sorted(FLAT_TREE))}", where=where
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


def _spoken(entries: Any) -> list[Message]:
    said = []
    for entry in entries:
        if not isinstance(entry, dict):
            raise BadRow("a message is not an object")
        beside = said_beside(entry)
        role = entry.get("role", entry.get("from"))
        content = entry.get("content", entry.get("value"))
        if isinstance(content, list):  # Parts, as multimodal data has them.
            if any(not isinstance(part, dict) or part.get("type", "text") != "text" for part in content):
                raise BadRow("a message holds something else than text")
            content = "".join(_text(part.get("text"), "text") for part in content)
        if content is None and beside:
            content = ""
        is_trained = entry.get("train", True) is not False
        said.append(Message(_role(role), _text(content, "content"), is_trained, beside))
    return said


def _as_messages(value: Any, role: Role, is_trained: bool = True) -> list[Message]:
    if isinstance(value, list):
        return [replace(each, is_trained=is_trained and each.is_trained) for each in _spoken(value)]
    return [Message(role, _text(value, "prompt or answer"), is_trained)]


def _checked(said: list[Message], where: str, system: str | None, tools: list[dict[str, Any]] | None) -> Conversation:
    if not said:
        raise BadRow("the conversation is empty")
    texts = [message.content for message in said]
    texts += [json.dumps(each, ensure_ascii=False) for each in (tools, *(message.beside for message in said)) if each]
    if any(BEGIN in text or END in text for text in texts):
        raise BadRow("the text holds code points that Unicode keeps out of text (U+FDD0, U+FDD1)")
    if system is not None and said[0].role != "system":
        said = [Message("system", system), *said]
    return Conversation(tuple(said), where, tools)


def _role(name: Any) -> Role:
    role = ROLES.get(name.lower()) if isinstance(name, str) else None
    if role is None:
        raise BadRow(f"{name!r} is no role that is known: {', '.join(ROLES)}")
    return role


def _text(value: Any, key: str) -> str:
    if not isinstance(value, str):
        raise BadRow(f"there is no text under {key}")
    return value


def _rank(reply: Any) -> float:
    rank = reply.get("rank") if isinstance(reply, dict) else None
    return float(rank) if isinstance(rank, int | float) else float("inf")

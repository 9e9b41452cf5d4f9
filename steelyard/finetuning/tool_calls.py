"""What conversations say beside words: tools that may be called, calls of them, and what was thought before an answer.

Rows have them as `transformers` takes them: `tools` beside the messages, a list of JSON schemas; `tool_calls` in an
answer; `tool_call_id` and `name` in what a tool returns; `reasoning_content` (or `thinking`, or `reasoning`). Each may
also be JSON in a string, since the columns of a parquet file cannot hold objects of many kinds, and so may the
arguments of a call, which OpenAI's format writes that way and templates expect as objects.
"""

from __future__ import annotations

from typing import Any

from steelyard.core.safe_parse import loads
from steelyard.finetuning.conversation import BadRow, Row

CALLS, THOUGHTS = "tool_calls", "reasoning_content"
NAMES_OF_THOUGHTS = (THOUGHTS, "thinking", "reasoning")
PLAIN = ("tool_call_id", "name")


def tools_in(row: Row) -> list[dict[str, Any]] | None:
    """The tools that a row offers. None and an empty list are the same: templates write a preamble for the latter."""
    return _objects(row.get("tools"), "tools") or None


def said_beside(entry: Row) -> dict[str, Any]:
    """What a message says beside its content, as templates expect it."""
    found = {key: entry[key] for key in PLAIN if isinstance(entry.get(key), str)}
    calls = _objects(entry.get(CALLS), CALLS)
    if calls:
        found[CALLS] = [_with_arguments(call) for call in calls]
    thoughts = next((entry[key] for key in NAMES_OF_THOUGHTS if isinstance(entry.get(key), str)), None)
    if thoughts:
        found |= {THOUGHTS: thoughts, "thinking": thoughts}  # Templates ask for either.
    return found


def unsaid(tools: object, beside: list[dict[str, Any]], template: str) -> str | None:
    """The name of something that a template would leave out without a word, since it never mentions it."""
    if tools and "tools" not in template:
        return "tools"
    for each in beside:
        if CALLS in each and CALLS not in template:
            return CALLS
        if THOUGHTS in each and not any(name in template for name in (THOUGHTS, "thinking")):
            return THOUGHTS
    return None


def _with_arguments(call: dict[str, Any]) -> dict[str, Any]:
    """A call whose arguments are an object; a call may stand by itself or under `function`."""
    if isinstance(call.get("function"), dict):
        return call | {"function": _with_arguments(call["function"])}
    if not isinstance(call.get("name"), str):
        raise BadRow("a call of a tool does not say which one")
    return call | {"arguments": _parsed(call["arguments"])} if isinstance(call.get("arguments"), str) else call


def _objects(value: Any, key: str) -> list[dict[str, Any]]:
    found = _parsed(value) if isinstance(value, str) and value.strip() else value
    if not found:
        return []
    if not isinstance(found, list) or not all(isinstance(each, dict) for each in found):
        raise BadRow(f"{key} is no list of objects")
    return found


def _parsed(text: str) -> Any:
    """JSON, or the text itself where it is none."""
    try:
        return loads(text)
    except ValueError:
        return text

"""Tools, tool calls and reasoning in conversations.

Rows have them as in `transformers`: `tools` next to the messages, a list of JSON schemas; `tool_calls` in an answer;
`tool_call_id` and `name` in a tool's result; `reasoning_content` (or `thinking`, or `reasoning`). Each may also be a
JSON string, since a parquet column cannot hold objects of different types. So may the arguments of a call: OpenAI's
format has them as a string, and templates expect objects.
"""

from __future__ import annotations

from typing import Any

from steelyard.core.safe_parse import loads
from steelyard.finetuning.conversation import BadRow, Row

CALLS, THOUGHTS = "tool_calls", "reasoning_content"
NAMES_OF_THOUGHTS = (THOUGHTS, "thinking", "reasoning")
PLAIN = ("tool_call_id", "name")


def tools_in(row: Row) -> list[dict[str, Any]] | None:
    """The tools of a row; None for an empty list, for which templates would write a preamble."""
    return _objects(row.get("tools"), "tools") or None


def extra_fields(entry: Row) -> dict[str, Any]:
    """The fields of a message besides role and content, as templates expect them."""
    fields = {key: entry[key] for key in PLAIN if isinstance(entry.get(key), str)}
    calls = _objects(entry.get(CALLS), CALLS)
    if calls:
        fields[CALLS] = [_with_arguments(call) for call in calls]
    thoughts = next((entry[key] for key in NAMES_OF_THOUGHTS if isinstance(entry.get(key), str)), None)
    if thoughts:
        fields |= {THOUGHTS: thoughts, "thinking": thoughts}  # Templates use either name.
    return fields


def dropped_field(tools: object, beside: list[dict[str, Any]], template: str) -> str | None:
    """The name of a field that a template never mentions and would silently drop, if there is one."""
    if tools and "tools" not in template:
        return "tools"
    for each in beside:
        if CALLS in each and CALLS not in template:
            return CALLS
        if THOUGHTS in each and not any(name in template for name in (THOUGHTS, "thinking")):
            return THOUGHTS
    return None


def _with_arguments(call: dict[str, Any]) -> dict[str, Any]:
    """A call with its arguments as an object; the call may be nested under `function`."""
    if isinstance(call.get("function"), dict):
        return call | {"function": _with_arguments(call["function"])}
    if not isinstance(call.get("name"), str):
        raise BadRow("a tool call has no name")
    return call | {"arguments": _parsed(call["arguments"])} if isinstance(call.get("arguments"), str) else call


def _objects(value: Any, key: str) -> list[dict[str, Any]]:
    objects = _parsed(value) if isinstance(value, str) and value.strip() else value
    if not objects:
        return []
    if not isinstance(objects, list) or not all(isinstance(each, dict) for each in objects):
        raise BadRow(f"{key} is not a list of objects")
    return objects


def _parsed(text: str) -> Any:
    """The parsed JSON, or the text itself if it is not JSON."""
    try:
        return loads(text)
    except ValueError:
        return text

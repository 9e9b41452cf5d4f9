"""Every shape of conversations is known by its first row, and means what it says."""

import json

import pytest

from steelyard.core.errors import UserError
from steelyard.core.recipe.finetune_section import FinetuneSection
from steelyard.finetuning.conversation import BadRow
from steelyard.finetuning.dataset_formats import Markers, conversation, format_of, preference
from steelyard.finetuning.encoding import EncodeStats
from steelyard.finetuning.sft_dataset import conversations
from tests.finetuning.conftest import write_jsonl

ASKED, SAID = "How far is the moon?", "Far."
ROWS = {
    "messages": {"messages": [{"role": "user", "content": ASKED}, {"role": "assistant", "content": SAID}]},
    "parts": {
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": ASKED}]},
            {"role": "assistant", "content": SAID},
        ]
    },
    "sharegpt": {"conversations": [{"from": "human", "value": ASKED}, {"from": "gpt", "value": SAID}]},
    "completion": {"prompt": ASKED, "completion": SAID},
    "completion of messages": {
        "prompt": [{"role": "user", "content": ASKED}],
        "completion": [{"role": "assistant", "content": SAID}],
    },
    "alpaca": {"instruction": "How far is the moon?", "input": "", "output": SAID},
    "dolly": {"instruction": ASKED, "context": "", "response": SAID, "category": "open_qa"},
    "marked": {"text": f"### Human: {ASKED}### Assistant: {SAID}"},
    "tree": {
        "prompt": {
            "text": ASKED,
            "role": "prompter",
            "replies": [
                {"text": "Near.", "role": "assistant", "rank": 1, "replies": []},
                {"text": SAID, "role": "assistant", "rank": 0, "replies": []},
                {"text": "?", "role": "assistant", "rank": -1, "deleted": True, "replies": []},
            ],
        }
    },
}


@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)
def test_the_shape_is_seen_and_says_who_said_what(row):
    found = conversation(row, format_of(row, "here"), Markers(), "here", system=None)
    assert [(message.role, message.content) for message in found.messages] == [("user", ASKED), ("assistant", SAID)]
    assert found.answers == [1]
    with_system = conversation(row, format_of(row, "here"), Markers(), "here", system="Be brief.")
    assert with_system.messages[0].content == "Be brief."


def test_japanese_markers_split_a_text_of_several_turns():
    text = "前置き\n指示: 月は?\n応答: 遠い。\n指示: 太陽は?\n応答: もっと遠い。"
    found = conversation({"text": text}, "marked", Markers("指示:", "応答:"), "here", None)
    assert [message.role for message in found.messages] == ["system", "user", "assistant", "user", "assistant"]
    assert found.messages[-1].content == "もっと遠い。"


def test_an_instruction_is_followed_by_what_it_is_about():
    row = {"instruction": "Translate.", "input": "moon", "output": "月"}
    found = conversation(row, format_of(row, "here"), Markers(), "here", None)
    assert found.messages[0].content == "Translate.\n\nmoon"


def test_threads_of_single_messages_are_joined(tmp_path):
    rows = [
        {"message_id": "b", "parent_id": "a", "text": "Near.", "role": "assistant", "rank": 2},
        {"message_id": "a", "parent_id": None, "text": ASKED, "role": "prompter", "rank": None},
        {"message_id": "c", "parent_id": "a", "text": SAID, "role": "assistant", "rank": 0},
        {"message_id": "d", "parent_id": "c", "text": "Thanks.", "role": "prompter", "rank": None},
    ]
    write_jsonl(tmp_path / "oasst.jsonl", rows)
    tune = FinetuneSection(data=["oasst.jsonl"])
    [found] = conversations([tmp_path / "oasst.jsonl"], tune, EncodeStats())
    assert [message.content for message in found.messages] == [ASKED, SAID, "Thanks."]
    rows[1]["role"] = "wizard"
    write_jsonl(tmp_path / "oasst.jsonl", rows)
    with pytest.raises(UserError, match=r"oasst.jsonl:2: unknown role 'wizard'"):
        list(conversations([tmp_path / "oasst.jsonl"], tune, EncodeStats()))
    with pytest.raises(UserError, match="not of format flat-tree"):
        write_jsonl(tmp_path / "other.jsonl", [ROWS["messages"]])
        list(conversations([tmp_path / "other.jsonl"], FinetuneSection(data=["x"], format="flat-tree"), EncodeStats()))


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"messages": [{"role": "wizard", "content": "x"}]}, "unknown role 'wizard'"),
        ({"messages": []}, "is empty"),
        ({"messages": [{"role": "assistant", "content": "", "tool_calls": [{}]}]}, "a tool call has no name"),
        ({"messages": [{"role": "assistant", "tool_calls": "no"}]}, "tool_calls is not a list of objects"),
        ({"messages": [{"role": "user", "content": "x"}], "tools": [1]}, "tools is not a list of objects"),
        ({"messages": ["x"]}, "not an object"),
        ({"messages": [{"role": "user", "content": None}]}, "content is not a string"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "content other than text"),
        ({"text": "no marker here"}, "neither '### Human:'"),
        ({"messages": [{"role": "user", "content": "a\ufdd0"}]}, "U\\+FDD0"),
    ],
)
def test_a_row_that_breaks_its_promise_is_named(row, reason, tmp_path):
    with pytest.raises(BadRow, match=reason):
        conversation(row, format_of(row, "here"), Markers(), "here", None)
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(ROWS["messages"]) + "\n" + json.dumps(row) + "\n{oops\n")
    with pytest.raises(UserError) as caught:
        list(conversations([path], FinetuneSection(data=["x"]), EncodeStats()))
    assert f"{path}:2" in str(caught.value)
    tally = EncodeStats()
    kept = list(conversations([path], FinetuneSection(data=["x"], bad_rows="drop"), tally))
    assert len(kept) == 1
    assert tally.counts["bad"] == 2


def test_calls_of_tools_are_read_as_objects_however_they_are_written():
    call = {"type": "function", "function": {"name": "far", "arguments": {"to": "moon"}}}
    as_text = call | {"function": call["function"] | {"arguments": json.dumps({"to": "moon"})}}
    tools = [{"type": "function", "function": {"name": "far", "parameters": {}}}]
    said = [{"role": "user", "content": ASKED}, {"role": "assistant", "content": None, "tool_calls": [as_text]},
            {"role": "tool", "name": "far", "tool_call_id": "1", "content": "384400"}]  # fmt: skip
    answered = {"role": "assistant", "content": SAID, "thinking": "km"}
    for row in (
        {"messages": [*said, answered], "tools": tools},
        {"messages": [*said, answered], "tools": json.dumps(tools)},
        {"prompt": said, "completion": [answered], "tools": tools},
    ):
        found = conversation(row, format_of(row, "here"), Markers(), "here", None)
        assert found.tools == tools
        given = [message.for_template() for message in found.messages]
        assert given[1] == {"role": "assistant", "content": "", "tool_calls": [call]}
        assert given[2] == said[2]
        assert given[3]["reasoning_content"] == given[3]["thinking"] == "km"
    pair = preference({"prompt": said, "chosen": [answered], "rejected": "Near.", "tools": tools}, "here", None)
    assert (pair.chosen.tools, pair.chosen.messages[1].beside) == (tools, {"tool_calls": [call]})


def test_an_unknown_shape_is_told_with_its_keys():
    with pytest.raises(UserError, match="matches the keys of this row: a, b"):
        format_of({"a": 1, "b": 2}, "rows.jsonl:1")


def test_a_preference_is_two_answers_to_the_same():
    row = {"prompt": ASKED, "chosen": SAID, "rejected": "Near."}
    pair = preference(row, "here", None)
    assert [pair.chosen.messages[-1].content, pair.rejected.messages[-1].content] == [SAID, "Near."]
    whole = {
        side: [{"role": "user", "content": ASKED}, {"role": "assistant", "content": text}]
        for side, text in (("chosen", SAID), ("rejected", "Near."))
    }
    assert preference(whole, "here", None) == pair
    assert preference({"prompt": ASKED, **whole}, "here", None) == pair
    for odd, reason in (
        ({"prompt": "Another?", **whole}, "do not contain the row's prompt"),
        ({"chosen": "Human: a", "rejected": "Human: b"}, "there is no prompt"),
        ({"prompt": ASKED, "chosen": [], "rejected": SAID}, "must end with an assistant message"),
    ):
        with pytest.raises(BadRow, match=reason):
            preference(odd, "here", None)
    whole["rejected"][0]["content"] = "Something else"
    with pytest.raises(BadRow, match="the same conversation"):
        preference(whole, "here", None)

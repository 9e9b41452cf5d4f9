"""Conversations written out, and the characters of them that are answers."""

import pytest

from steelyard.core.errors import UserError
from steelyard.finetuning.conversation import BadRow, Conversation, Message
from steelyard.finetuning.templates import NAMED, Template

SPECIALS = (("bos_token", "<s>"), ("eos_token", "</s>"))
TALK = Conversation(
    (
        Message("system", "Be brief."),
        Message("user", "2 + 2?"),
        Message("assistant", "4"),
        Message("user", "and 4 in words?"),
        Message("assistant", "four"),
    )
)
ENDS = {
    "chatml": "<|im_end|>", "llama2": " </s>", "llama3": "<|eot_id|>", "alpaca": "</s>", "japanese": "</s>",
    "plain": "</s>",
}  # fmt: skip
# As published ones are: no {% generation %}, content trimmed, the roles' names in the text.
BARE = (
    "{% for message in messages %}<|{{ message['role'] }}|>\n{{ message['content'] | trim }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
WITHOUT_PROMPT = "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}</s>\n{% endfor %}"
# Says of earlier answers only that they were given, so that no beginning of the talk is a beginning of the text.
FORGETFUL = (
    "{% for message in messages %}{% if message['role'] == 'assistant' and not loop.last %}A: ...\n"
    "{% elif message['role'] == 'assistant' %}A: {{ message['content'] }}\n"
    "{% else %}Q: {{ message['content'] }}\n{% endif %}{% endfor %}"
)


def answers(template, talk=TALK):
    rendered = template.render(talk)
    return [rendered.text[first:end] for first, end in rendered.spans]


@pytest.mark.parametrize("name", NAMED)
def test_answers_of_named_templates_are_found_with_what_ends_them(name):
    template = Template(name, NAMED[name], SPECIALS)
    assert [answer.strip() for answer in answers(template)] == [f"4{ENDS[name]}", f"four{ENDS[name]}"]
    assert "\ufdd0" not in template.render(TALK).text
    prompt = template.prompt(Conversation(TALK.messages[:-1]))
    assert template.render(TALK).text.startswith(prompt)


def test_answers_are_what_follows_the_prompt_where_a_template_does_not_say():
    assert answers(Template("bare", BARE)) == ["4<|end|>", "four<|end|>"]


def test_the_speakers_name_is_no_answer_where_a_template_cannot_begin_one():
    assert answers(Template("without", WITHOUT_PROMPT)) == ["4</s>", "four</s>"]


def test_messages_given_as_a_prompt_are_not_learned():
    talk = Conversation((*TALK.messages[:2], Message("assistant", "4", is_trained=False), *TALK.messages[3:]))
    for template in (Template("chatml", NAMED["chatml"]), Template("bare", BARE)):
        assert [answer[:4] for answer in answers(template, talk)] == ["four"]


def test_a_template_that_hides_answers_is_refused():
    with pytest.raises(UserError, match="answers cannot be located"):
        Template("forgetful", FORGETFUL).render(TALK)


def test_a_template_that_is_none_is_refused():
    with pytest.raises(UserError, match="is not valid"):
        Template("hostile", "{% for %}").render(TALK)


def test_what_a_template_has_no_place_for_is_not_learned_as_an_answer():
    tool = Conversation((*TALK.messages[:3], Message("tool", "42")))
    for name in ("llama2", "alpaca", "japanese"):
        with pytest.raises(BadRow, match="does not support a message of role tool"):
            Template(name, NAMED[name], SPECIALS).render(tool)
    assert "42" not in "".join(answers(Template("chatml", NAMED["chatml"]), tool))
    late = Conversation((*TALK.messages[1:3], Message("system", "Be kind."), *TALK.messages[3:]))
    with pytest.raises(BadRow, match="of role system"):
        Template("llama2", NAMED["llama2"], SPECIALS).render(late)


TOOLS = [{"type": "function", "function": {"name": "add", "description": "Résumé", "parameters": {"a": "int"}}}]
CALLED = Conversation(
    (
        Message("user", "2 + 2?"),
        Message("assistant", "", beside={"tool_calls": [{"function": {"name": "add", "arguments": {"a": 2}}}]}),
        Message("tool", "4", beside={"name": "add"}),
        Message("assistant", "It is 4.", beside={"reasoning_content": "easy", "thinking": "easy"}),
    ),
    tools=TOOLS,
)
CALLING = (
    "{%- if tools %}<|system|>{% for tool in tools %}{{ tool | tojson(indent=2) }}\n{% endfor %}<|end|>\n{% endif %}"
    "{%- for message in messages %}<|{{ message.role }}|>"
    "{%- if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif %}"
    "{{- message.content }}{% for call in message.tool_calls or [] %}"
    "<call>{{ call.function.name }} {{ call.function.arguments | tojson }}</call>{% endfor %}<|end|>\n{% endfor %}"
    "{%- if add_generation_prompt %}<|assistant|>{% endif %}"
)


def test_calls_and_thoughts_are_learned_and_what_tools_return_is_not():
    assert answers(Template("calling", CALLING), CALLED) == [
        '<call>add {"a": 2}</call><|end|>',
        "<think>easy</think>It is 4.<|end|>",
    ]


@pytest.mark.parametrize(
    ("lacks", "reported"), [("tools", "tools and"), ("tool_calls", "tool_calls"), ("reasoning_content", "reasoning")]
)
def test_a_template_that_would_leave_something_out_is_refused(lacks, reported):
    with pytest.raises(BadRow, match=f"does not use {reported}"):
        Template("lacking", CALLING.replace(lacks, "nothing")).render(CALLED)
    with pytest.raises(UserError, match="answers cannot be located"):  # Marks around its words would miss the call.
        Template("promptless", CALLING[: CALLING.index("{%- if add")]).render(CALLED)


def test_tools_are_written_as_transformers_writes_them(tmp_path):
    transformers = pytest.importorskip("transformers")
    from steelyard.text.tokenizer.train_tokenizer import train_byte_bpe

    train_byte_bpe(["some words"], 300).save(tmp_path)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    messages = [message.for_template() for message in CALLED.messages]
    for tools in (TOOLS, None):
        talk = Conversation(CALLED.messages, tools=tools)
        expected = theirs.apply_chat_template(messages, tools=tools, chat_template=CALLING, tokenize=False)
        assert Template("same", CALLING).render(talk).text == expected


def test_an_answer_like_the_speakers_name_is_told_from_it():
    talk = Conversation((Message("user", "b"), Message("assistant", "a")))
    assert answers(Template("without", WITHOUT_PROMPT), talk) == ["a</s>"]


def test_answers_in_several_parts_cannot_be_left_out_by_halves():
    twice = NAMED["chatml"].replace(
        "<|im_end|>{% endgeneration %}", "{% endgeneration %}{% generation %}<|im_end|>{% endgeneration %}"
    )
    assert len(answers(Template("twice", twice))) == 4
    talk = Conversation((*TALK.messages[:2], Message("assistant", "4", is_trained=False), *TALK.messages[3:]))
    with pytest.raises(UserError, match="answers cannot be located"):
        Template("twice", twice).render(talk)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{ 1 / 0 }}", "division"),
        ("{{ range(10 ** 9) }}", "fails"),
        ("{{ raise_exception('only two turns') }}", "only two turns"),
        ("{{ messages.__class__.__mro__ }}", "fails"),
        ("{{ messages + 1 }}", "fails"),
    ],
)
def test_a_template_that_breaks_or_reaches_out_is_a_mistake_told(source, message):
    with pytest.raises(BadRow, match=message):
        Template("hostile", source).render(TALK)


def test_the_text_is_what_transformers_writes(tmp_path):
    transformers = pytest.importorskip("transformers")
    from steelyard.text.tokenizer.train_tokenizer import train_byte_bpe

    train_byte_bpe(["some words"], 300).save(tmp_path)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    messages = [message.for_template() for message in TALK.messages]
    specials = (("bos_token", theirs.bos_token), ("eos_token", theirs.eos_token))
    for source in (*NAMED.values(), BARE, WITHOUT_PROMPT):
        expected = theirs.apply_chat_template(messages, chat_template=source, tokenize=False)
        assert Template("same", source, specials).render(TALK).text == expected

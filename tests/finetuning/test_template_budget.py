"""Chat templates of strangers: endless ones end with one message, and all others render as Jinja renders them."""

import re
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from unittest.mock import Mock

import pytest
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from steelyard.core.errors import UserError
from steelyard.finetuning import templates
from steelyard.finetuning.conversation import BadRow, Conversation, Message
from steelyard.finetuning.templates import Template

TALK = Conversation((Message("user", "2 + 2?"), Message("assistant", "4")))
DOUBLED = "{%% set ns = namespace(x=%s) %%}{%% for i in range(60) %%}{%% set ns.x = %s %%}{%% endfor %%}"
ENDLESS = {
    "nested loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "loops that keep nothing": "{% for a in range(9999) %}{% for b in range(99999) if false %}{% endfor %}{% endfor %}",
    "a macro that calls itself": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "a macro that calls itself twice": (
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(80) }}"
    ),
    "a recursive loop": "{% for a in [1] recursive %}{{ loop([1]) }}{% endfor %}",
    "a recursive loop that branches": (
        "{% for a in [80] recursive %}{% if a %}{{ loop([a - 1, a - 1]) }}{% endif %}{% endfor %}"
    ),
    "a block that contains itself": "{% block a %}{{ self.a() }}{% endblock %}",
    "a repeated text": "{{ 'a' * 10**9 }}",
    "a repeated list": "{{ ([0] * 10**9)|length }}",
    "a repeated text of a variable": "{{ messages[0].content * 10**9 }}",
    "a doubled text": DOUBLED % ("'a'", "ns.x + ns.x") + "{{ ns.x }}",
    "a joined text": DOUBLED % ("'a'", "ns.x ~ ns.x") + "{{ ns.x }}",
    "a doubled list": DOUBLED % ("[1]", "ns.x + ns.x"),
    "a list of itself twice": DOUBLED % ("[1]", "[ns.x, ns.x]") + "{{ ns.x }}",
    "a table of itself twice": DOUBLED % ("{}", "{'a': ns.x, 'b': ns.x}") + "{{ ns.x|tojson }}",
    "two such lists compared": DOUBLED % ("[1]", "[ns.x, ns.x]") + DOUBLED.replace("ns", "b") % ("[1]", "[b.x, b.x]")
    + "{{ ns.x == b.x }}",
    "a block set twice over": (
        "{% set ns = namespace(x='a') %}{% for i in range(60) %}{% set y %}{{ ns.x }}{{ ns.x }}{% endset %}"
        "{% set ns.x = y %}{% endfor %}"
    ),
    "a long block many times": "{% set y %}{% for i in range(99999) %}" + "a" * 9_999 + "{% endfor %}{% endset %}",
    "a long text many times": "{% for i in range(99999) %}" + "a" * 9_999 + "{% endfor %}",
    "a join": "{{ range(99999)|map('string')|join('a' * 9999) }}",
    "a method join": "{{ ('a' * 9999).join(messages[0].content * 9999) }}",
    "a replacement": DOUBLED % ("'a'", "ns.x.replace('a', 'aa')"),
    "a replacing filter": DOUBLED % ("'a'", "ns.x|replace('a', 'aa')"),
    "a wide text": "{{ 'a'.ljust(10**9) }}",
    "a wide safe text": "{{ ('a'|safe).ljust(10**9) }}",
    "a centred text": "{{ 'a'|center(10**9) }}",
    "an indented text": "{{ 'a\n\nb'|indent(10**9) }}",
    "tabs": "{{ ('\t' * 9999).expandtabs(10**9) }}",
    "a wide format": "{{ '%1000000000d' % 1 }}",
    "a wide format of a variable": "{{ '%*d' % (10**9, 1) }}",
    "a wide format filter": "{{ '%1000000000d'|format(1) }}",
    "a format with a wide field": "{{ '{:>1000000000}'.format(1) }}",
    "a format with a field of a variable": "{{ '{:>{}}'.format(1, 10**9) }}",
    "a format of one thing many times": "{{ ('{0}' * 99999).format('a' * 99999) }}",
    "JSON with wide spaces": "{{ [1]|tojson(indent=10**9) }}",
    "a power": "{{ 9**(9**9) }}",
    "a product of products": DOUBLED % ("9", "ns.x * ns.x"),
    "a precise number": "{{ 1.5|round(10**9, 'ceil') }}",
    "a filled batch": "{{ [1]|batch(10**9, 0)|list }}",
    "bytes of a number": "{{ (1).to_bytes(10**9, 'big') }}",
    "a sum of lists": "{{ (range(9999)|batch(1)|list * 9)|sum(start=[])|length }}",
    "slices in a loop": "{% set x = 'a' * 999999 %}{% for i in range(99999) %}{% set y = x[1:] %}{% endfor %}",
    "searches in a loop": "{% set x = 'a' * 999999 %}{% for i in range(99999) %}{{ 'b' in x }}{% endfor %}",
    "a nested expression": "{{ " + "(" * 5_000 + "1" + ")" * 5_000 + " }}",
    "nested statements": "{% if true %}" * 3_000 + "{% endif %}" * 3_000,
    "a long template": "a" * (2 << 20),
}  # fmt: skip


@pytest.mark.parametrize("source", ENDLESS.values(), ids=ENDLESS)
def test_an_endless_template_is_a_mistake_told(source):
    with pytest.raises(UserError, match=r"the chat template hostile (exceeds its work limit|is not valid)") as reported:
        Template("hostile", source).text(TALK)
    assert "\n" not in reported.value.message


VARIED = """
{%- set ns = namespace(seen=0, last=none, names=[]) -%}
{%- macro shown(value) -%}
{%- if value is mapping -%}{ {%- for key, inner in value|dictsort %}{{ key }}={{ shown(inner) }};{% endfor -%} }
{%- elif value is sequence and value is not string -%}[{% for inner in value %}{{ shown(inner) }},{% endfor %}]
{%- else -%}{{ value }}{%- endif -%}
{%- endmacro -%}
{%- for message in messages[::-1] -%}
  {%- set ns.names = ns.names + [message.role] -%}
  {%- if message.role == 'user' and ns.last is none %}{% set ns.last = messages|length - loop.index %}{% endif -%}
{%- endfor -%}
{{ bos_token ~ ' ' ~ ns.names|join(',') ~ ns.last }}
{% for message in messages if message['role'] != 'tool' %}
{{ loop.index }}/{{ loop.length }} {{ loop.first }} {{ loop.last }} {{ loop.previtem.role if loop.previtem is defined }}
{{- message.content.split('?')|map('trim')|list|tojson }} {{ '%-9s|%5.2f' % (message.role, 1.5) }}
{{ '{:>6}|{a}'.format(message.role, a=1) }} {{ message['content'][:3] }} {{ message.content|replace('2', 'two')|upper }}
{% if 'x' in message.content or message.role in ['user', 'assistant'] %}{{ message.get('none', 'd') }}{% endif %}
{% if loop.index > 3 %}{% break %}{% endif %}
{% else %}none{% endfor %}
{% for name, group in messages|groupby('role') %}{{ name }}:{{ group|length }} {% endfor %}
{% for item in [[1, [2, 3]], 4] recursive %}{{ loop(item) if item is sequence else item }}{{ loop.depth }}{% endfor %}
{% filter indent(3) %}a
b{% endfilter %}{% call(x) wrapped() %}<{{ x }}>{% endcall %}
{{ shown({'b': [1, {'c': none}], 'a': 'x'}) }} {{ undefined_name }}
{{ messages|selectattr('role', 'equalto', 'user')|list|length }}
{{ range(3)|sum }} {{ [3, 1, 2]|sort|first }} {{ 7 // 2 }} {{ 2 ** 10 }}
{{ -7 % 3 }} {{ 'a' * 3 }} {{ 1 < 2 <= 2 }} {{ 10|string|center(6) }}
{{ messages|map(attribute='role')|unique|list }} {{ dict(a=1).items()|list }}
{{ 'a,b'.split(',')|last }} {{ 'ab'|reverse }}
"""
VARIED = VARIED.replace(
    "{{ bos_token", "{%- macro wrapped() %}{{ caller(1) }}{{ caller('two') }}{% endmacro -%}\n{{ bos_token", 1
)


def plainly(source, talk, **values):
    """As transformers renders, marks of answers included."""
    extensions = [loopcontrols, templates._Generation]
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
    environment.filters["tojson"] = templates._as_json
    environment.globals["raise_exception"] = templates._refuse
    messages = [message.for_template() for message in talk.messages]
    values = {"add_generation_prompt": False, "tools": talk.tools, "documents": None, **values}
    return environment.from_string(source).render(messages=messages, **values)


PUBLISHED = sorted(
    path
    for place in (find_spec("trl") or Mock(submodule_search_locations=[])).submodule_search_locations
    for path in (Path(place) / "chat_templates").glob("*.jinja")
    if re.fullmatch(r"(llama|qwen|gptoss|gemma|phi|deepseek|cohere|glm)[a-z0-9]*", path.stem)
)
PARAMETERS = {"type": "object", "properties": {"a": {"type": "number", "description": "one"}}, "required": ["a"]}
TOOL = {"type": "function", "function": {"name": "add", "description": "adds", "parameters": PARAMETERS}}
TALKS = (
    TALK,
    Conversation((Message("system", "Be brief."), *TALK.messages, Message("user", "why?"))),
    Conversation((Message("user", "<think>a</think>b"), Message("assistant", "<think>so</think>\n\n4")), "", [TOOL]),
)


@pytest.mark.parametrize("path", PUBLISHED, ids=lambda path: path.stem)
def test_published_templates_render_as_without_limits(path):
    source, specials = path.read_text(), (("bos_token", "<s>"), ("eos_token", "</s>"))
    for talk in TALKS if "tools" in source else TALKS[:2]:
        try:
            expected = plainly(source, talk, **dict(specials))
        except Exception as error:
            with pytest.raises(BadRow, match=re.escape(str(error)[:40])):
                Template("published", source, specials).text(talk)
        else:
            assert Template("published", source, specials)._text(talk) == expected


def test_a_template_that_uses_what_jinja_offers_renders_as_without_limits():
    talk = Conversation((*TALK.messages, Message("user", "and x?"), Message("tool", "{}"), Message("assistant", "y")))
    expected = plainly(VARIED, talk, bos_token="<s>")
    assert "user,assistant" in expected
    assert Template("varied", VARIED, (("bos_token", "<s>"),)).text(talk) == expected


def test_a_long_conversation_is_rendered_and_limits_grow_with_it():
    source = (
        "{% for message in messages %}{{ loop.index }}/{{ messages|length }}{{ message.content|trim }}"
        "{% if 'z' in message.content %}z{% endif %}{{ messages[loop.index0 - 1].role }}{% endfor %}"
    )
    turns = [Message("user" if number % 2 else "assistant", "word " * 2_000) for number in range(1_000)]
    talk = Conversation(tuple(turns))
    assert Template("long", source).text(talk) == plainly(source, talk)


def test_limits_hold_in_threads_and_one_render_does_not_spend_anothers_budget():
    template = Template("counting", "{% for a in range(50000) %}{{ a % 7 }}{% endfor %}")
    with ThreadPoolExecutor(3) as pool:
        texts = list(pool.map(lambda _: template.text(TALK), range(6)))
    assert len({*texts}) == 1
    assert len(texts[0]) == 50_000

"""Renders a conversation as text with a chat template, and locates the answers in it.

Templates are Jinja, as in tokenizers, and run in a sandbox that limits their work (template_sandbox.py). The first of
three methods that applies locates the answers:

1. the template marks them with `{% generation %}`;
2. the conversation before an answer, rendered with the generation prompt, is a prefix of the whole text: the answer
   follows it;
3. the answers are rendered between two marker characters, and the text is otherwise the same.

Token ids are never searched. An answer includes its end token (the model must learn to stop), without trailing space.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser

from steelyard.core.errors import UserError
from steelyard.finetuning.conversation import BadRow, Conversation
from steelyard.finetuning.template_budget import TooMuchWork, limited
from steelyard.finetuning.template_sandbox import LimitedEnvironment
from steelyard.finetuning.tool_calls import CALLS, THOUGHTS, dropped_field
from steelyard.text.tokenizer import Tokenizer

BEGIN, END = "\ufdd0", "\ufdd1"  # Unicode noncharacters: no text contains them.
Span = tuple[int, int]
UNSUPPORTED_ROLE = "{{ raise_exception('it does not support a message of role ' ~ message['role'] ~ ' here') }}"

NAMED = {
    "chatml": (
        "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
        "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] }}<|im_end|>{% endgeneration %}"
        "{% else %}{{ message['content'] }}<|im_end|>{% endif %}{{ '\n' }}{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    ),
    "llama2": (
        "{% set system = messages[0]['content'] if messages[0]['role'] == 'system' else none %}"
        "{% for message in (messages if system is none else messages[1:]) %}"
        "{% if message['role'] == 'user' %}{{ bos_token }}[INST] "
        "{% if loop.first and system is not none %}<<SYS>>\n{{ system }}\n<</SYS>>\n\n{% endif %}"
        "{{ message['content'] | trim }} [/INST]"
        "{% elif message['role'] == 'assistant' %}{% generation %} {{ message['content'] | trim }} {{ eos_token }}"
        "{% endgeneration %}{% else %}" + UNSUPPORTED_ROLE + "{% endif %}{% endfor %}"
    ),
    "llama3": (
        "{{ bos_token }}{% for message in messages %}<|start_header_id|>{{ message['role'] }}<|end_header_id|>\n\n"
        "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] | trim }}<|eot_id|>"
        "{% endgeneration %}{% else %}{{ message['content'] | trim }}<|eot_id|>{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
    ),
    "alpaca": (
        "{% for message in messages %}"
        "{% if message['role'] == 'system' %}{{ message['content'] }}\n\n"
        "{% elif message['role'] == 'user' %}### Instruction:\n{{ message['content'] }}\n\n"
        "{% elif message['role'] == 'assistant' %}### Response:\n"
        "{% generation %}{{ message['content'] }}{{ eos_token }}{% endgeneration %}{{ '\n\n' }}"
        "{% else %}" + UNSUPPORTED_ROLE + "{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}### Response:\n{% endif %}"
    ),
    "japanese": (
        "{% for message in messages %}"
        "{% if message['role'] == 'system' %}{{ message['content'] }}\n\n"
        "{% elif message['role'] == 'user' %}### 指示:\n{{ message['content'] }}\n\n"
        "{% elif message['role'] == 'assistant' %}### 応答:\n"
        "{% generation %}{{ message['content'] }}{{ eos_token }}{% endgeneration %}{{ '\n\n' }}"
        "{% else %}" + UNSUPPORTED_ROLE + "{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}### 応答:\n{% endif %}"
    ),
    "plain": (
        "{% for message in messages %}{% if message['role'] == 'assistant' %}{% generation %}"
        "{{ message['content'] }}{{ eos_token }}{% endgeneration %}{% else %}{{ message['content'] }}{% endif %}"
        "{% endfor %}"
    ),
}


@dataclass(frozen=True)
class Rendered:
    """A conversation as text, and the character spans of the answers in the loss."""

    text: str
    spans: tuple[Span, ...]


@dataclass(frozen=True)
class Template:
    """A chat template and the special tokens it can use."""

    name: str
    source: str
    specials: tuple[tuple[str, str], ...] = ()

    def render(self, conversation: Conversation) -> Rendered:
        """Render a conversation and locate its answers."""
        marked = self._text(conversation)
        whole = _without_marks(marked)
        if BEGIN in marked:
            spans = _spans_in(marked)
            assistants = [message.is_trained for message in conversation.messages if message.role == "assistant"]
            if not all(assistants):
                if len(spans) != len(assistants):
                    raise self._answers_not_located(conversation)
                spans = [span for span, is_trained in zip(spans, assistants, strict=True) if is_trained]
        else:
            spans = self._by_beginnings(whole, conversation) or self._by_marks(whole, conversation)
        return Rendered(whole, tuple(_trimmed(whole, span) for span in spans))

    def prompt(self, conversation: Conversation) -> str:
        """The messages, with the generation prompt."""
        return _without_marks(self._text(conversation, add_generation_prompt=True))

    def _by_beginnings(self, whole: str, conversation: Conversation) -> list[Span]:
        spans: list[Span] = []
        for number in conversation.answers:
            earlier = replace(conversation, messages=conversation.messages[:number])
            before = _without_marks(self._text(earlier, add_generation_prompt=True))
            upto = _without_marks(self._text(replace(conversation, messages=conversation.messages[: number + 1])))
            if not (whole.startswith(before) and whole.startswith(upto) and len(before) < len(upto)):
                return []
            begins = len(before)
            if before == _without_marks(self._text(earlier)):
                # The template has no generation prompt: the role header is not part of the answer.
                begins = self._by_marks(whole, conversation)[len(spans)][0]
            spans.append((begins, len(upto)))
        return spans

    def _by_marks(self, whole: str, conversation: Conversation) -> list[Span]:
        answers = set(conversation.answers)
        set_apart = [
            replace(message, content=f"{BEGIN}{message.content}{END}") if number in answers else message
            for number, message in enumerate(conversation.messages)
        ]
        if any(key in conversation.messages[number].beside for number in answers for key in (CALLS, THOUGHTS)):
            raise self._answers_not_located(conversation)  # The answer is not only its content.
        marked = self._text(replace(conversation, messages=tuple(set_apart)))
        if _without_marks(marked) != whole or marked.count(BEGIN) != len(answers):
            raise self._answers_not_located(conversation)
        return _spans_in(marked)

    def _answers_not_located(self, conversation: Conversation) -> UserError:
        return UserError(
            f"the answers cannot be located in the output of the chat template {self.name}",
            where=conversation.where or None,
            hint="put {% generation %} and {% endgeneration %} around each answer in the template, once",
        )

    def text(self, conversation: Conversation) -> str:
        """The text of a conversation, without locating the answers."""
        return _without_marks(self._text(conversation))

    def _text(self, conversation: Conversation, add_generation_prompt: bool = False) -> str:
        write, messages = self._compiled, conversation.messages
        lost = dropped_field(conversation.tools, [message.beside for message in messages], self.source)
        if lost is not None:
            raise BadRow(
                f"the chat template {self.name} does not use {lost} and would drop it; "
                "set finetune.template to another template"
            )
        try:
            beside = [conversation.tools, *(message.beside for message in messages)]
            size = sum(len(message.content) for message in messages) + sum(len(str(each)) for each in beside if each)
            with limited(size):
                return write(
                    messages=[message.for_template() for message in messages],
                    tools=conversation.tools,
                    documents=None,
                    add_generation_prompt=add_generation_prompt,
                    **dict(self.specials),
                )
        except (TooMuchWork, RecursionError, MemoryError) as error:
            raise self._too_much_work(error) from None
        except Exception as error:  # A template is third-party code.
            raise BadRow(f"the chat template {self.name} fails: {error}") from None

    @property
    def _compiled(self) -> Callable[..., str]:
        try:
            return _compile(self.source)
        except (TooMuchWork, RecursionError, MemoryError) as error:
            raise self._too_much_work(error) from None
        except Exception as error:  # Python's compiler may also reject the generated code.
            raise UserError(f"the chat template {self.name} is not valid: {error}") from None

    def _too_much_work(self, error: Exception) -> UserError:
        reason = "it is nested too deeply, or recurses without end" if isinstance(error, RecursionError) else error
        return UserError(
            f"the chat template {self.name} exceeds its work limit: {reason}",
            hint="set finetune.template to another template",
        )


def load(name: str | None, tokenizer: Tokenizer) -> Template:
    """A template by name or file; by default the tokenizer's."""
    roles = ("bos_token", "eos_token", "unk_token", "pad_token")
    specials = tuple((role, tokenizer.special(role) or "") for role in roles)
    if name is None:
        own = tokenizer.chat_template()
        if own is None:
            raise UserError(
                f"the tokenizer {tokenizer.source} has no chat template",
                hint=f"set finetune.template to one of {', '.join(NAMED)}, or to a file",
            )
        return Template("of the tokenizer", own, specials)
    if name in NAMED:
        return Template(name, NAMED[name], specials)
    path = Path(name).expanduser()
    if not path.is_file():
        raise UserError(f"unknown chat template {name}", hint=f"use one of {', '.join(NAMED)}, or a file")
    try:
        return Template(str(path), path.read_text(encoding="utf-8"), specials)
    except UnicodeDecodeError:
        raise UserError("this is not a text file", where=str(path), hint="a template must be UTF-8") from None


class _Generation(Extension):
    """`{% generation %}`: puts its block between the marker characters."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_marked"), [], [], body).set_lineno(line)

    def _marked(self, caller: Callable[[], str]) -> str:
        return f"{BEGIN}{caller()}{END}"


def _spans_in(marked: str) -> list[Span]:
    """The marked spans, as offsets in the text without the marks."""
    spans: list[Span] = []
    place, begin = 0, 0
    for character in marked:
        if character == BEGIN:
            begin = place
        elif character == END:
            spans.append((begin, place))
        else:
            place += 1
    return spans


def _trimmed(text: str, span: Span) -> Span:
    first, end = span
    return first, max(first, first + len(text[first:end].rstrip()))


def _without_marks(text: str) -> str:
    return text.replace(BEGIN, "").replace(END, "")


@lru_cache(maxsize=16)
def _compile(source: str) -> Callable[..., str]:
    """A function of a template's variables, shared by all objects of the same template."""
    environment = LimitedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
    environment.add_filter("tojson", _as_json)
    # There is no clock: a template then uses its default date, and the same data encodes the same on any day.
    environment.globals["raise_exception"] = _refuse
    return environment.compiled(source)


def _as_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """The filter of `transformers`; Jinja's own escapes HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _refuse(message: str) -> None:
    raise TemplateError(message)

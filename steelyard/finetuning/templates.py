"""Writing a conversation out as text, and knowing which characters of it are answers.

Templates are Jinja, as tokenizers bring them, run in a sandbox that bounds their work (template_sandbox.py). Where the
answers lie is found out in one of three ways, the first that holds:

1. the template says so with `{% generation %}`;
2. the conversation up to an answer, asked to begin one, is the beginning of the whole: the answer is what follows;
3. the answers, set between two marks, come out whole between them, and the text is otherwise the same.

Token ids are never searched. An answer includes what ends it (the model must learn to stop), and no space after that.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser

from steelyard.core.errors import UserError
from steelyard.finetuning.conversation import BadRow, Conversation
from steelyard.finetuning.template_budget import TooMuchWork, limited
from steelyard.finetuning.template_sandbox import LimitedEnvironment
from steelyard.finetuning.tool_calls import CALLS, THOUGHTS, unsaid
from steelyard.text.tokenizer import Tokenizer

BEGIN, END = "\ufdd0", "\ufdd1"  # Unicode sets these apart: no text contains them.
Span = tuple[int, int]
NO_PLACE = "{{ raise_exception('it has no place for what the ' ~ message['role'] ~ ' says here') }}"

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
        "{% endgeneration %}{% else %}" + NO_PLACE + "{% endif %}{% endfor %}"
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
        "{% else %}" + NO_PLACE + "{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}### Response:\n{% endif %}"
    ),
    "japanese": (
        "{% for message in messages %}"
        "{% if message['role'] == 'system' %}{{ message['content'] }}\n\n"
        "{% elif message['role'] == 'user' %}### 指示:\n{{ message['content'] }}\n\n"
        "{% elif message['role'] == 'assistant' %}### 応答:\n"
        "{% generation %}{{ message['content'] }}{{ eos_token }}{% endgeneration %}{{ '\n\n' }}"
        "{% else %}" + NO_PLACE + "{% endif %}{% endfor %}"
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
    """A conversation as text, and the characters of it that are answers to learn."""

    text: str
    spans: tuple[Span, ...]


@dataclass(frozen=True)
class Template:
    """A chat template and the special tokens it may name."""

    name: str
    source: str
    specials: tuple[tuple[str, str], ...] = ()

    def render(self, conversation: Conversation) -> Rendered:
        """Write a conversation out."""
        marked = self._text(conversation)
        whole = _without_marks(marked)
        if BEGIN in marked:
            spans = _spans_in(marked)
            assistants = [message.is_trained for message in conversation.messages if message.role == "assistant"]
            if not all(assistants):
                if len(spans) != len(assistants):
                    raise self._hides_answers(conversation)
                spans = [span for span, is_trained in zip(spans, assistants, strict=True) if is_trained]
        else:
            spans = self._by_beginnings(whole, conversation) or self._by_marks(whole, conversation)
        return Rendered(whole, tuple(_trimmed(whole, span) for span in spans))

    def prompt(self, conversation: Conversation) -> str:
        """The messages, and the beginning of an answer to them."""
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
                # The template does not know how to begin an answer: what names the speaker is not one.
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
            raise self._hides_answers(conversation)  # An answer is more than its content.
        marked = self._text(replace(conversation, messages=tuple(set_apart)))
        if _without_marks(marked) != whole or marked.count(BEGIN) != len(answers):
            raise self._hides_answers(conversation)
        return _spans_in(marked)

    def _hides_answers(self, conversation: Conversation) -> UserError:
        return UserError(
            f"the chat template {self.name} does not show which part of its text is the assistant's",
            where=conversation.where or None,
            hint="put {% generation %} and {% endgeneration %} around each answer in the template, once",
        )

    def text(self, conversation: Conversation) -> str:
        """A conversation written out, wherever its answers are."""
        return _without_marks(self._text(conversation))

    def _text(self, conversation: Conversation, add_generation_prompt: bool = False) -> str:
        write, messages = self._compiled, conversation.messages
        lost = unsaid(conversation.tools, [message.beside for message in messages], self.source)
        if lost is not None:
            raise BadRow(
                f"the chat template {self.name} has no place for {lost}, which would be left out; "
                "finetune.template names another"
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
            raise self._endless(error) from None
        except Exception as error:  # A template is a program of somebody else's.
            raise BadRow(f"the chat template {self.name} fails: {error}") from None

    @cached_property
    def _compiled(self) -> Callable[..., str]:
        environment = LimitedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
        environment.add_filter("tojson", _as_json)
        # No clock is offered: a template then names a day of its own, and the same data stays the same tomorrow.
        environment.globals["raise_exception"] = _refuse
        try:
            return environment.compiled(self.source)
        except (TooMuchWork, RecursionError, MemoryError) as error:
            raise self._endless(error) from None
        except Exception as error:  # Python's own compiler, too, may not take what a template becomes.
            raise UserError(f"the chat template {self.name} is not sound: {error}") from None

    def _endless(self, error: Exception) -> UserError:
        reason = "it is nested too deeply, or calls itself without end" if isinstance(error, RecursionError) else error
        return UserError(
            f"the chat template {self.name} does more than any conversation needs: {reason}",
            hint="finetune.template names another template",
        )


def load(wanted: str | None, tokenizer: Tokenizer) -> Template:
    """A template by its name or file; left out, the tokenizer's own."""
    roles = ("bos_token", "eos_token", "unk_token", "pad_token")
    specials = tuple((role, tokenizer.special(role) or "") for role in roles)
    if wanted is None:
        own = tokenizer.chat_template()
        if own is None:
            raise UserError(
                f"the tokenizer {tokenizer.source} brings no chat template",
                hint=f"set finetune.template to one of {', '.join(NAMED)}, or to a file",
            )
        return Template("of the tokenizer", own, specials)
    if wanted in NAMED:
        return Template(wanted, NAMED[wanted], specials)
    path = Path(wanted).expanduser()
    if not path.is_file():
        raise UserError(f"there is no chat template {wanted}", hint=f"name one of {', '.join(NAMED)}, or a file")
    try:
        return Template(str(path), path.read_text(encoding="utf-8"), specials)
    except UnicodeDecodeError:
        raise UserError("this is not a text file", where=str(path), hint="a template is UTF-8") from None


class _Generation(Extension):
    """`{% generation %}`: sets what the assistant says between marks."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_marked"), [], [], body).set_lineno(line)

    def _marked(self, caller: Callable[[], str]) -> str:
        return f"{BEGIN}{caller()}{END}"


def _spans_in(marked: str) -> list[Span]:
    """Where the marks stood, in the text without them."""
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


def _as_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """As `transformers` has it: Jinja's own would write letters as entities of HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _refuse(message: str) -> None:
    raise TemplateError(message)

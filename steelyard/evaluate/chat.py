"""A conversation with a model through its chat template.

Every turn renders the whole conversation again. The KV cache of the earlier turns is kept as far as the new text begins
with the same tokens, which most templates allow: a turn then costs only its own tokens. If the conversation outgrows
the context, its oldest turns are left out; the system prompt stays.

An answer ends at an end token of the model, or at the text that ends an answer in the template.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator
from dataclasses import replace
from pathlib import Path

from steelyard.checkpoint import folder
from steelyard.checkpoint.formats.source import is_own
from steelyard.core.console import console
from steelyard.core.errors import UserError
from steelyard.evaluate.generation import PrefixCache, Sampling, Writer
from steelyard.finetuning import templates
from steelyard.finetuning.conversation import BadRow, Conversation, Message
from steelyard.finetuning.templates import NAMED, Template

ANOTHER_TEMPLATE = f"choose another one with --template: {', '.join(NAMED)}, or a Jinja file"


class Chat:
    """A conversation so far, with the model that answers."""

    def __init__(self, writer: Writer, template: Template, system: str | None = None) -> None:
        self.writer, self.template, self.memory = writer, template, PrefixCache()
        self.system = (Message("system", system),) if system else ()
        self.turns: list[Message] = []
        self._end = end_of_answer(template)
        end_ids = writer.tokenizer.located(self._end)[0]
        self._end_ids = end_ids if len(end_ids) == 1 else []

    def answer(self, text: str, sampling: Sampling) -> Generator[str, None, None]:
        """The answer to a message, as it is generated. An answer that is cut short stays in the conversation."""
        self.turns.append(Message("user", text))
        pieces: list[str] = []
        complete = False
        try:
            ids = self._prompt(sampling)
            seeded = replace(sampling, seed=sampling.seed + len(self.turns) // 2)
            for piece in until(self._end, self.writer.stream_after(ids, seeded, self._end_ids, self.memory)):
                pieces.append(piece)
                yield piece
            complete = True
        finally:
            if complete or pieces:
                self.turns.append(Message("assistant", "".join(pieces)))
            else:
                self.turns.pop()

    def _prompt(self, sampling: Sampling) -> list[int]:
        """The tokens of the conversation, without the oldest turns if they leave no room for an answer."""
        room = min(sampling.max_tokens, self.writer.context // 2)
        while len(ids := self._tokens()) + room > self.writer.context and len(self.turns) > 1:
            console.say(f"the oldest turn is left out: the context is {self.writer.context} tokens")
            del self.turns[:2]
        return ids

    def _tokens(self) -> list[int]:
        try:
            prompt = self.template.prompt(Conversation((*self.system, *self.turns)))
        except BadRow as error:
            raise UserError(str(error), hint=ANOTHER_TEMPLATE) from None
        return self.writer.tokenizer.located(prompt)[0]


def open_chat(writer: Writer, checkpoint: str, template: str | None, system: str | None) -> Chat:
    """A conversation with the given template, that of the fine-tuning run, or that of the tokenizer."""
    name = template or _template_of_run(checkpoint)
    if name is None and writer.tokenizer.chat_template() is None:
        raise UserError(f"{checkpoint} has no chat template", hint=ANOTHER_TEMPLATE)
    return Chat(writer, templates.load(name, writer.tokenizer), system)


def _template_of_run(checkpoint: str) -> str | None:
    if not is_own(checkpoint):
        return None
    saved = folder.source(Path(checkpoint))
    tune = None if "model" in saved.state else saved.run.recipe().finetune
    return None if tune is None else tune.template


def end_of_answer(template: Template) -> str:
    """The text that ends an answer in a template; empty if it cannot be located."""
    probe = Conversation((Message("user", "question"), Message("assistant", "answer")))
    try:
        rendered = template.render(probe)
    except (BadRow, UserError):
        return ""
    return "".join(rendered.text[first:end].rpartition("answer")[2] for first, end in rendered.spans[-1:]).strip()


def until(end: str, pieces: Iterable[str]) -> Iterator[str]:
    """The pieces before the end text. Characters that may belong to it are held back."""
    held = ""
    for piece in pieces:
        held += piece
        if end and end in held:
            held = held[: held.index(end)]
            break
        may_end = next((n for n in range(min(len(end) - 1, len(held)), 0, -1) if held.endswith(end[:n])), 0)
        if len(held) > may_end:
            yield held[: len(held) - may_end]
            held = held[len(held) - may_end :]
    if held:
        yield held

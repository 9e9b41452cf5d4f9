"""Reads the words of a script: quotes, expansions, here-documents. `parser.py` builds statements from them."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import replace

from steelyard.core.errors import UserError
from steelyard.megatron.shell.syntax import Arithmetic, Parameter, Part, Substitution, Text, Word

NAME = re.compile(r"[A-Za-z_]\w*")
PLAIN_PARAMETER = re.compile(r"[A-Za-z_]\w*|[0-9]|[@*#?$!-]")
BRACED_PARAMETER = re.compile(r"[A-Za-z_]\w*|[0-9]+|[@*#?$!-]")
OPERATOR = re.compile(r":[-=+?]|##|%%|//|\^\^|,,|[-=+?#%/^,:]")
HERE_DOCUMENT = re.compile(r"<<(-?)[ \t]*(?:'([^']*)'|\"([^\"]*)\"|\\?([\w.]+))")
BLANK = re.compile(r"(?:[ \t\r]|\\\r?\n)+")
WORD_ENDS = " \t\r\n;&|()<>"
# <Specify path>, <YOUR_NAME>: what a template asks its reader to replace; bash would see redirections.
PLACEHOLDER = re.compile(r"<(?:[A-Z][A-Z0-9_]+|[A-Za-z][\w./-]*(?: [\w./-]+)* [\w./-]*[A-Za-z])>")
ESCAPED_IN_QUOTES = '$`"\\\n'


class Words:
    """A position in a text, with methods that read from it."""

    def __init__(self, text: str, file: str, first_line: int = 1) -> None:
        self.text, self.file, self.at = text, file, 0
        self._starts = [0, *(match.end() for match in re.finditer("\n", text))]
        self._first_line = first_line

    def line(self, at: int | None = None) -> int:
        """The line number of a position."""
        return bisect_right(self._starts, self.at if at is None else at) - 1 + self._first_line

    def where(self, line: int) -> str:
        """File and line, for messages."""
        return f"{self.file}:{line}"

    def refuse(self, message: str, at: int | None = None, hint: str | None = None) -> UserError:
        """The error for text that is not bash, or not supported."""
        return UserError(message, where=self.where(self.line(at)), hint=hint)

    def sees(self, text: str) -> bool:
        """Whether `text` comes next."""
        return self.text.startswith(text, self.at)

    def takes(self, text: str) -> bool:
        """Skip `text` if it comes next; returns whether it did."""
        matches = self.sees(text)
        self.at += len(text) if matches else 0
        return matches

    def skip_blank(self) -> None:
        """Skip blanks and line continuations."""
        if match := BLANK.match(self.text, self.at):
            self.at = match.end()

    def word(self) -> Word:
        """One word, with the quotes and expansions in it."""
        return self.parts(lambda: self.text[self.at] in WORD_ENDS and not PLACEHOLDER.match(self.text, self.at))

    def parts(self, ends: Callable[[], bool], quoted: bool = False) -> Word:
        """Parts up to the first position where `ends` returns true, or the end of the text."""
        parts: list[Part] = []
        while self.at < len(self.text) and not ends():
            character = self.text[self.at]
            if character == "\\":
                parts += self._escaped(quoted)
            elif character == "$":
                parts += self._dollar(quoted)
            elif character == "`":
                parts.append(self._backticks(quoted))
            elif character == '"' and not quoted:
                parts += self._double_quoted()
            elif character == "'" and not quoted:
                parts.append(self._single_quoted())
            elif character == "<" and not quoted and (placeholder := PLACEHOLDER.match(self.text, self.at)):
                parts.append(Text(placeholder.group(), True))
                self.at = placeholder.end()
            else:
                parts.append(Text(character, quoted))
                self.at += 1
        return _joined(parts)

    def _escaped(self, quoted: bool) -> list[Part]:
        following = self.text[self.at + 1 : self.at + 2]
        if following == "\r" and self.text[self.at + 2 : self.at + 3] == "\n":
            self.at += 3
            return []
        if quoted and following not in ESCAPED_IN_QUOTES:
            self.at += 1
            return [Text("\\", True)]
        self.at += 2
        return [] if following == "\n" else [Text(following, True)]

    def _single_quoted(self) -> Text:
        start = self.at
        end = self.text.find("'", start + 1)
        if end < 0:
            raise self.refuse("this ' is never closed", start)
        self.at = end + 1
        return Text(self.text[start + 1 : end], True)

    def _double_quoted(self) -> list[Part]:
        start = self.at
        self.at += 1
        parts = self.parts(lambda: self.sees('"'), quoted=True)
        if not self.takes('"'):
            raise self.refuse('this " is never closed', start)
        return [Text("", True), *parts]

    def _backticks(self, quoted: bool) -> Substitution:
        start = self.at
        end = self.text.find("`", start + 1)
        while end > 0 and self.text[end - 1] == "\\":
            end = self.text.find("`", end + 1)
        if end < 0:
            raise self.refuse("this ` is never closed", start)
        self.at = end + 1
        script = self.text[start + 1 : end].replace("\\`", "`")
        return Substitution(script, self.text[start : end + 1], self.line(start), quoted)

    def _dollar(self, quoted: bool) -> list[Part]:
        start = self.at
        if self.sees("$((") and (end := self.closing(start + 1)) and self.text[end - 2 : end] == "))":
            inner = Words(self.text[start + 3 : end - 2], self.file, self.line(start))
            self.at = end
            return [Arithmetic(inner.parts(lambda: False, quoted=True), self.text[start:end], quoted)]
        if self.sees("$("):
            end = self.closing(start + 1)
            self.at = end
            return [Substitution(self.text[start + 2 : end - 1], self.text[start:end], self.line(start), quoted)]
        if self.sees("${"):
            return [self._braced(quoted)]
        if self.sees("$'") and not quoted:
            self.at += 1
            part = self._single_quoted()
            return [replace(part, value=part.value.replace("\\n", "\n").replace("\\t", "\t"))]
        if name := PLAIN_PARAMETER.match(self.text, start + 1):
            self.at = name.end()
            return [Parameter(name.group(), self.text[start : self.at], quoted)]
        self.at += 1
        return [Text("$", quoted)]

    def _braced(self, quoted: bool) -> Parameter:
        start = self.at
        self.at += 2
        length = self.sees("#") and not self.sees("#}") and self.takes("#")
        indirect = self.takes("!")
        name = BRACED_PARAMETER.match(self.text, self.at)
        if name is None:
            raise self.refuse("this ${ } has no name", start)
        self.at = name.end()
        index = self._index() if self.sees("[") else None
        operator = OPERATOR.match(self.text, self.at)
        if operator:
            self.at = operator.end()
        argument = self.parts(lambda: self.sees("}"))
        if not self.takes("}"):
            raise self.refuse("this ${ is never closed", start)
        source = self.text[start : self.at]
        kind = "!" if indirect else operator.group() if operator else ""
        return Parameter(name.group(), source, quoted, index, kind, argument, length)

    def _index(self) -> Word:
        start = self.at
        self.at += 1
        index = self.parts(lambda: self.sees("]"))
        if not self.takes("]"):
            raise self.refuse("this [ is never closed", start)
        return index

    def closing(self, opened: int) -> int:
        """The position after the parenthesis that closes the one at `opened`; skips quotes and here-documents."""
        depth, at = 0, opened
        while at < len(self.text):
            character = self.text[at]
            if character == "\\":
                at += 1
            elif character in "'\"`":
                at = self._past_quote(at)
            elif character == "#" and self.text[at - 1] in " \t\n;":
                at = self.text.find("\n", at) if "\n" in self.text[at:] else len(self.text)
                continue
            elif character == "<" and (document := HERE_DOCUMENT.match(self.text, at)):
                at = self._past_document(document) - 1
            elif character in "()":
                depth += 1 if character == "(" else -1
                if not depth:
                    return at + 1
            at += 1
        raise self.refuse("this ( is never closed", opened)

    def _past_quote(self, at: int) -> int:
        mark, start = self.text[at], at
        at += 1
        while at < len(self.text) and self.text[at] != mark:
            if self.text[at] == "\\" and mark != "'":
                at += 1
            elif self.text.startswith("$(", at) and mark == '"':
                at = self.closing(at + 1) - 1
            at += 1
        if at >= len(self.text):
            raise self.refuse(f"this {mark} is never closed", start)
        return at

    def _past_document(self, opening: re.Match[str]) -> int:
        delimiter = next(name for name in opening.groups()[1:] if name is not None)
        end = re.compile(rf"^\t*{re.escape(delimiter)}[ \t\r]*$", re.MULTILINE).search(self.text, opening.end())
        return end.end() if end else opening.end()

    def document(self, opening: re.Match[str]) -> Word:
        """The body of a here-document that starts at the current position, the start of a line."""
        delimiter = next(name for name in opening.groups()[1:] if name is not None)
        end = re.compile(rf"^\t*{re.escape(delimiter)}[ \t\r]*(\n|\Z)", re.MULTILINE).search(self.text, self.at)
        if end is None:
            raise self.refuse(f"this here-document is never closed by {delimiter}", opening.start())
        body, line = self.text[self.at : end.start()], self.line()
        self.at = end.end()
        if opening.group(1):
            body = re.sub(r"^\t+", "", body, flags=re.MULTILINE)
        if opening.group(4) is None or "\\" in opening.group():
            return (Text(body, True),)
        return Words(body, self.file, line).parts(lambda: False, quoted=True)


def _joined(parts: list[Part]) -> Word:
    """Merge adjacent texts with the same quoting."""
    joined: list[Part] = []
    for part in parts:
        last = joined[-1] if joined else None
        if isinstance(part, Text) and isinstance(last, Text) and part.quoted == last.quoted:
            joined[-1] = Text(last.value + part.value, part.quoted)
        else:
            joined.append(part)
    return tuple(joined)

"""Parses the bash subset of launch scripts into the syntax tree of `syntax.py`."""

from __future__ import annotations

import functools
import re

from steelyard.megatron.shell import syntax
from steelyard.megatron.shell.lexer import HERE_DOCUMENT, NAME, PLACEHOLDER, Words
from steelyard.megatron.shell.syntax import Assignment, Body, Simple, Statement, Text, Word

ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\[[^\]=]*\])?(\+?)=")
FUNCTION = re.compile(r"(?:function[ \t]+([\w.:-]+)[ \t]*(?:\([ \t]*\))?|([\w.:-]+)[ \t]*\([ \t]*\))[ \t\r\n]*(?=[{(])")
REDIRECTION = re.compile(r"\d*(?:&>>|&>|>>|>\||>&|<&|<<<|<>|>|<)")
RESERVED = re.compile(r"(?:\[\[|[{}!]|[A-Za-z]+)(?=[\s;&|()<>]|\Z)")
DECLARATIONS = {"export", "declare", "local", "readonly", "typeset"}
BODY_ENDS = {"then", "elif", "else", "fi", "do", "done", "esac", "}"}
TEST_OPERATORS = re.compile(r"&&|\|\||[<>()]")


@functools.lru_cache(maxsize=100)
def parse(text: str, file: str, first_line: int = 1) -> Body:
    """The statements of a script. The interpreter, which may follow several paths, does not change them."""
    parser = Parser(text, file, first_line)
    body = parser.body()
    if parser.at < len(parser.text):
        raise parser.refuse(f"{parser.text[parser.at : parser.at + 10].split()[0]!r} is unexpected")
    return body


class Parser(Words):
    """Parses statements; one method per kind."""

    def __init__(self, text: str, file: str, first_line: int = 1) -> None:
        super().__init__(text, file, first_line)
        self._pending_heredocs: list[tuple[Simple, re.Match[str]]] = []

    def body(self) -> Body:
        """Statements up to the word that closes the enclosing one, which is not consumed."""
        statements: Body = []
        while True:
            self._skip_between()
            if self.at >= len(self.text) or self.sees(")") or self.sees(";;") or self._reserved() in BODY_ENDS:
                return statements
            statements.append(self._chain())

    def _skip_between(self) -> None:
        """Skip blanks, comments, newlines and separators; here-documents start after a newline."""
        while True:
            self.skip_blank()
            if self.sees("#"):
                end = self.text.find("\n", self.at)
                self.at = len(self.text) if end < 0 else end
            elif self.takes("\n"):
                for simple, opening in self._pending_heredocs:
                    simple.document = self.document(opening)
                self._pending_heredocs.clear()
            elif not (((self.sees(";") and not self.sees(";;")) or self._single_ampersand()) and self._step()):
                return

    def _single_ampersand(self) -> bool:
        return self.sees("&") and not self.sees("&&") and not self.sees("&>")

    def _step(self) -> bool:
        self.at += 1
        return True

    def _reserved(self) -> str:
        match = RESERVED.match(self.text, self.at)
        return match.group() if match else ""

    def _expect(self, word: str, opened: str, at: int) -> None:
        self._skip_between()
        if not (self._reserved() == word or not word[0].isalnum()) or not self.takes(word):
            raise self.refuse(f"this {opened} has no {word}", at)

    def _chain(self) -> Statement:
        statement = self._pipe()
        while True:
            self.skip_blank()
            operator = "&&" if self.sees("&&") else "||" if self.sees("||") else ""
            if not operator:
                return statement
            self.at += 2
            self._skip_between()
            statement = syntax.Chain(statement, operator, self._pipe())

    def _pipe(self) -> Statement:
        self.skip_blank()
        negated = self._reserved() == "!" and self.takes("!")
        commands = [self._command()]
        while True:
            self.skip_blank()
            if not self.sees("|") or self.sees("||"):
                break
            self.at += 2 if self.sees("|&") else 1
            self._skip_between()
            commands.append(self._command())
        return syntax.Pipe(commands, negated) if negated or len(commands) > 1 else commands[0]

    def _command(self) -> Statement:
        self.skip_blank()
        kind, line = self._reserved(), self.line()
        if kind in ("if", "case", "for", "while", "until"):
            statement: Statement = getattr(self, f"_{kind}")()
        elif kind == "[[":
            statement = self._test()
        elif self.sees("((") and self.text[self.closing(self.at) - 2] == ")":
            statement = syntax.Compute(line, self._computed())
        elif kind == "{" or self.sees("("):
            statement = self._group()
        elif function := FUNCTION.match(self.text, self.at):
            self.at = function.end()
            statement = syntax.Function(function.group(1) or function.group(2), self._group().body)
        else:
            return self._simple()
        self._redirections(Simple(line))
        return statement

    def _group(self) -> syntax.CommandGroup:
        start, inside = self.at, self.sees("(")
        self.at += 1
        body = self.body()
        self._expect(")" if inside else "}", "(" if inside else "{", start)
        return syntax.CommandGroup(body, inside)

    def _computed(self) -> Word:
        start, end = self.at, self.closing(self.at)
        self.at = end
        return Words(self.text[start + 2 : end - 2], self.file, self.line(start)).parts(lambda: False, quoted=True)

    def _if(self) -> syntax.If:
        start, branches, otherwise = self.at, [], []
        self.at += 2
        while True:
            condition = self.body()
            self._expect("then", "if", start)
            branches.append((condition, self.body()))
            self._skip_between()
            if self._reserved() == "elif":
                self.at += 4
                continue
            if self._reserved() == "else":
                self.at += 4
                otherwise = self.body()
            self._expect("fi", "if", start)
            return syntax.If(self.line(start), branches, otherwise)

    def _case(self) -> syntax.Case:
        start = self.at
        self.at += 4
        self.skip_blank()
        word = self.word()
        self._expect("in", "case", start)
        branches = []
        self._skip_between()
        while self._reserved() != "esac":
            self.takes("(")
            patterns: list[Word] = []
            while not patterns or self.takes("|"):
                self.skip_blank()
                patterns.append(self.word())
                self.skip_blank()
            if not self.takes(")"):
                raise self.refuse("a pattern of this case has no )", start)
            branches.append((patterns, self.body()))
            self.takes(";;")
            self._skip_between()
            if self.at >= len(self.text):
                raise self.refuse("this case has no esac", start)
        self.at += 4
        return syntax.Case(self.line(start), word, branches)

    def _for(self) -> syntax.For | syntax.Count:
        start = self.at
        self.at += 3
        self.skip_blank()
        if self.sees("(("):
            parts = self.text[self.at + 2 : self.closing(self.at) - 2].split(";")
            self.at = self.closing(self.at)
            if len(parts) != 3:
                raise self.refuse("this for (( )) needs three parts", start)
            first, condition, after = (
                Words(part, self.file, self.line(start)).parts(lambda: False, quoted=True) for part in parts
            )
            return syntax.Count(self.line(start), first, condition, after, self._loop_body("for", start))
        name = NAME.match(self.text, self.at)
        if name is None:
            raise self.refuse("this for has no variable name", start)
        self.at = name.end()
        self._skip_between()
        words: list[Word] | None = None
        if self._reserved() == "in":
            self.at += 2
            words = self._words_of_line()
        return syntax.For(self.line(start), name.group(), words, self._loop_body("for", start))

    def _words_of_line(self) -> list[Word]:
        words = []
        self.skip_blank()
        while self.at < len(self.text) and self.text[self.at] not in WORD_STOPS:
            words.append(self.word())
            self.skip_blank()
        return words

    def _while(self) -> syntax.While:
        start, keyword = self.at, self._reserved()
        assert keyword in ("while", "until")
        self.at += 5
        return syntax.While(self.line(start), self.body(), self._loop_body(keyword, start), keyword == "while")

    _until = _while

    def _loop_body(self, opened: str, start: int) -> Body:
        self._expect("do", opened, start)
        body = self.body()
        self._expect("done", opened, start)
        return body

    def _test(self) -> syntax.Test:
        start = self.at
        items: list[Word | str] = []
        self.at += 2
        while True:
            self.skip_blank()
            self.takes("\n")
            self.skip_blank()
            if self.sees("]]"):
                self.at += 2
                return syntax.Test(self.line(start), items)
            if self.at >= len(self.text):
                raise self.refuse("this [[ has no ]]", start)
            if operator := TEST_OPERATORS.match(self.text, self.at):
                self.at = operator.end()
                items.append(operator.group())
            elif word := self.word():
                items.append(word)
            elif not self.takes("\n"):
                raise self.refuse("this [[ ]] is not supported", start)

    def _simple(self) -> Simple:
        simple, start = Simple(self.line()), self.at
        while True:
            self.skip_blank()
            self._redirections(simple)
            if self.at >= len(self.text) or self.text[self.at] in WORD_STOPS:
                break
            if self.text[self.at] == "(":
                raise self.refuse("unexpected (", hint="is this a bash script?")
            if assignment := self._assignment(simple):
                simple.assignments.append(assignment)
            else:
                simple.words.append(self.word())
        if self.at == start:
            raise self.refuse(f"unexpected {self.text[self.at]!r}", hint="is this a bash script?")
        return simple

    def _assignment(self, simple: Simple) -> Assignment | None:
        first = simple.words[0] if simple.words else None
        declares = (
            first is not None and len(first) == 1 and isinstance(first[0], Text) and first[0].value in DECLARATIONS
        )
        match = ASSIGNMENT.match(self.text, self.at) if first is None or declares else None
        if match is None:
            return None
        name, index, append = match.groups()
        at_index = Words(index[1:-1], self.file, self.line()).parts(lambda: False) if index else None
        self.at = match.end()
        if self.sees("("):
            return Assignment(name, self._array(), bool(append), at_index)
        return Assignment(name, self.word(), bool(append), at_index)

    def _array(self) -> list[Word]:
        start = self.at
        words: list[Word] = []
        self.at += 1
        while True:
            self._skip_between()
            if self.takes(")"):
                return words
            if self.at >= len(self.text) or self.text[self.at] in ";&|<>(":
                raise self.refuse("this array is never closed", start)
            words.append(self.word())

    def _redirections(self, simple: Simple) -> None:
        """Skip redirections such as `2>&1`; record here-documents and the file of `> file`."""
        while True:
            self.skip_blank()
            if self.sees("#") and self.at and self.text[self.at - 1] in " \t\r\n":
                end = self.text.find("\n", self.at)
                self.at = len(self.text) if end < 0 else end
            elif document := HERE_DOCUMENT.match(self.text, self.at):
                self._pending_heredocs.append((simple, document))
                self.at = document.end()
            elif PLACEHOLDER.match(self.text, self.at):
                return
            elif redirection := REDIRECTION.match(self.text, self.at):
                self.at = redirection.end()
                self.skip_blank()
                if self.sees("("):  # Process substitution is not interpreted.
                    self.at = self.closing(self.at)
                elif redirection.group() == ">":
                    simple.output = self.word()
                else:
                    self.word()
            else:
                return


WORD_STOPS = "\n;&|)"

"""Check the documentation: links, code fences, tables and lengths. Part of `make lint`; needs no packages.

`python tools/check_docs.py [ROOT]` prints `file:line: message` for each problem and exits with 1 if there is one.
Links to other sites are not followed. Fenced code is parsed, never run; tests/test_guides.py runs the guides.
"""

from __future__ import annotations

import json
import re
import shlex
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

PAGES = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs/*.md", "examples/*.md")
WRAPPED = ("README.md", "CONTRIBUTING.md", "docs/")  # Pages whose prose is wrapped.
COLUMNS = 100
MOST_LINES = {"README.md": 130, "CONTRIBUTING.md": 200}
LANGUAGES = {"sh", "bash", "toml", "python", "json", "text"}
PAIRS = {"(": ")", "{": "}", "do": "done", "if": "fi", "case": "esac"}

FENCE = re.compile(r"^ *(```+|~~~+) *(\S*)")
CODE_SPAN = re.compile(r"(`+)(?!`).*?(?<!`)\1(?!`)")
LINK = re.compile(r"\[[^\]]*\]\(\s*<?([^)\s>]+)>?[^)]*\)")
DEFINITION = re.compile(r"^ {0,3}\[[^\]]+\]:\s*(\S+)")
HEADING = re.compile(r"^#{1,6} +(.*?) *#* *$")


class Problem(NamedTuple):
    """One line of the output."""

    page: str
    line: int
    message: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}: {self.message}"


class Fence(NamedTuple):
    """A block of code, with the line of its first mark."""

    line: int
    language: str
    text: str


@dataclass
class Page:
    """A page, split into prose lines (number and text) and fences."""

    name: str
    lines: list[str]
    prose: list[tuple[int, str]] = field(default_factory=list)
    fences: list[Fence] = field(default_factory=list)
    unclosed: int | None = None

    def anchors(self) -> set[str]:
        """Return the anchors of the headings, by GitHub's rule: repeated ones are numbered."""
        found: set[str] = set()
        for _, line in self.prose:
            if heading := HEADING.match(line):
                slug = slug_of(heading[1])
                number = 0
                while (unique := f"{slug}-{number}" if number else slug) in found:
                    number += 1
                found.add(unique)
        return found


def read_page(path: Path, name: str) -> Page:
    """Split a file into prose and fences."""
    page = Page(name, path.read_text(encoding="utf-8").splitlines())
    opened: tuple[int, str, str] | None = None
    code: list[str] = []
    for number, line in enumerate(page.lines, 1):
        mark = FENCE.match(line)
        if opened is None and mark:
            opened, code = (number, mark[1], mark[2]), []
        elif opened is None:
            page.prose.append((number, line))
        elif mark and not mark[2] and mark[1].startswith(opened[1]):
            page.fences.append(Fence(opened[0], opened[2], "\n".join(code)))
            opened = None
        else:
            code.append(line)
    page.unclosed = opened[0] if opened else None
    return page


def slug_of(heading: str) -> str:
    """Return the anchor that GitHub gives a heading."""
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "").lower()
    return re.sub(r"[^\w\- ]", "", text).strip().replace(" ", "-")


def links_of(page: Page) -> Iterator[tuple[int, str]]:
    """Yield the targets of all links outside code."""
    for number, line in page.prose:
        text = CODE_SPAN.sub("", line)
        yield from ((number, target) for target in LINK.findall(text))
        if definition := DEFINITION.match(text):
            yield number, definition[1]


def check_links(root: Path, page: Page, pages: dict[str, Page]) -> Iterator[Problem]:
    """Every link to a file or an anchor of this repository has an existing target."""
    for number, target in links_of(page):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        path = (root / page.name).parent / name if name else root / page.name
        if not path.exists():
            yield Problem(page.name, number, f"broken link: {target}: no such file")
            continue
        try:
            other = pages.get(path.resolve().relative_to(root.resolve()).as_posix())
        except ValueError:
            yield Problem(page.name, number, f"broken link: {target} is outside the repository")
            continue
        if anchor and other and anchor not in other.anchors():
            yield Problem(page.name, number, f"broken link: {target}: no such heading")


def check_fences(page: Page) -> Iterator[Problem]:
    """Every fence is closed, has a known language, and parses."""
    if page.unclosed:
        yield Problem(page.name, page.unclosed, "code fence is not closed")
    for fence in page.fences:
        if fence.language not in LANGUAGES:
            known = ", ".join(sorted(LANGUAGES))
            yield Problem(page.name, fence.line, f"code fence has language {fence.language!r}; known: {known}")
        elif error := syntax_error(fence):
            yield Problem(page.name, fence.line, f"{fence.language} fence: {error}")


def syntax_error(fence: Fence) -> str | None:
    """Return what is wrong with the code of a fence."""
    try:
        if fence.language == "toml":
            tomllib.loads(fence.text)
        elif fence.language == "json":
            json.loads(fence.text)
        elif fence.language == "python":
            compile(fence.text, "fence", "exec")
        elif fence.language in ("sh", "bash"):
            return unbalanced(fence.text)
    except (ValueError, SyntaxError) as error:
        return str(error)
    return None


def unbalanced(text: str) -> str | None:
    """Return which quote, bracket or block of shell code is not closed."""
    if text.rstrip().endswith("\\"):
        return "the last line is continued"
    lexer = shlex.shlex(text, punctuation_chars="();")
    lexer.whitespace_split = True
    waiting: list[str] = []
    for token in lexer:
        for word in token if set(token) <= set("();") else [token]:
            if word in PAIRS:
                waiting.append(PAIRS[word])
            elif waiting and word == waiting[-1]:
                waiting.pop()
            elif word in (")", "done", "fi", "esac") and "esac" not in waiting:
                return f"{word} closes nothing"
    return f"{waiting[-1]} is missing" if waiting else None


def check_tables(page: Page) -> Iterator[Problem]:
    """Every row of a table has as many cells as its header."""
    cells, before = None, -1
    for number, line in page.prose:
        if not line.lstrip().startswith("|"):
            continue
        found = len(re.findall(r"(?<!\\)\|", line.strip()))
        if number != before + 1:
            cells = found
        elif found != cells:
            yield Problem(page.name, number, f"table row has {found - 1} cells, its header {(cells or 1) - 1}")
        before = number


def check_lengths(page: Page) -> Iterator[Problem]:
    """Pages and lines of prose are short. Tables, code and the targets of links do not count."""
    most = MOST_LINES.get(page.name)
    if most and len(page.lines) > most:
        yield Problem(page.name, len(page.lines), f"{len(page.lines)} lines, at most {most}")
    if page.name.startswith(WRAPPED):
        for number, line in page.prose:
            text = re.sub(r"\]\([^)]*\)", "]", line)
            if len(text) > COLUMNS and not line.lstrip().startswith("|"):
                yield Problem(page.name, number, f"{len(text)} columns, at most {COLUMNS}")


def check_index(pages: dict[str, Page]) -> Iterator[Problem]:
    """Every page of docs/ is linked from docs/README.md."""
    if index := pages.get("docs/README.md"):
        linked = {target.partition("#")[0] for _, target in links_of(index)}
        for name in pages:
            if name.startswith("docs/") and name != index.name and name.removeprefix("docs/") not in linked:
                yield Problem(name, 1, "not linked from docs/README.md")


def problems(root: Path) -> list[Problem]:
    """Check all pages below a folder."""
    paths = sorted({path for pattern in PAGES for path in root.glob(pattern)})
    pages = {name: read_page(path, name) for path in paths for name in [path.relative_to(root).as_posix()]}
    found = list(check_index(pages))
    for page in pages.values():
        found += [*check_links(root, page, pages), *check_fences(page), *check_tables(page), *check_lengths(page)]
    return sorted(found)


def main(words: list[str]) -> int:
    """Print the problems."""
    found = problems(Path(words[0]) if words else Path(__file__).parents[1])
    for problem in found:
        print(problem)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

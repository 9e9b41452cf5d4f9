"""The template of an HTML page that works offline, and the elements of reports. All text is escaped here."""

from __future__ import annotations

import html
import json
from collections.abc import Iterable, Sequence
from importlib import resources
from typing import Any

# The page makes no requests, so even injected text could not send or load anything.
POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:; font-src data:"
)


def page(title: str, body: Iterable[str], scripts: Iterable[str] = ()) -> str:
    """A complete HTML document; `scripts` are the scripts of this package that its charts need."""
    programs = [f"<script>{asset(name)}</script>" for name in scripts]
    head = (
        "<!doctype html><html lang='en'><head><meta charset='utf-8'>"
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        "<meta name='viewport' content='width=device-width'>"
        f"<title>{html.escape(title)}</title><style>{asset('page.css')}{asset('charts.css')}</style></head>"
    )
    return "\n".join([head, f"<body><h1>{html.escape(title)}</h1>", *programs, *body, "</body></html>\n"])


def heading(title: str, anchor: str) -> str:
    """The title of a section, with the anchor that the table of contents links to."""
    return f'<h2 id="{html.escape(anchor)}">{html.escape(title)}</h2>'


def contents(sections: Iterable[tuple[str, str]]) -> str:
    """A table of contents: links to sections, given as anchors and titles."""
    links = (f'<a href="#{html.escape(anchor)}">{html.escape(title)}</a>' for anchor, title in sections)
    return f"<nav>{''.join(links)}</nav>"


def paragraph(words: str, kind: str = "") -> str:
    """A paragraph; `kind` is a CSS class."""
    return f'<p class="{html.escape(kind)}">{html.escape(words)}</p>' if kind else f"<p>{html.escape(words)}</p>"


def pairs(rows: dict[str, str]) -> str:
    """Two columns: names and values."""
    return table([[name, value] for name, value in rows.items()])


def table(rows: Sequence[Sequence[str]], head: Sequence[str] = (), numbers: bool = False) -> str:
    """A table of text. With `numbers` all columns except the first are right-aligned."""
    kind = ' class="number"' if numbers else ""
    top = f"<tr>{''.join(f'<th>{html.escape(cell)}</th>' for cell in head)}</tr>" if head else ""
    lines = []
    for first, *others in rows:
        cells = "".join(f"<td{kind}>{html.escape(cell)}</td>" for cell in others)
        lines.append(f"<tr><td>{html.escape(first)}</td>{cells}</tr>")
    return f"<table>{top}{''.join(lines)}</table>"


def text(words: str, wrapped: bool = False) -> str:
    """Preformatted text; with `wrapped` long lines are wrapped."""
    kind = ' class="wrapped"' if wrapped else ""
    return f"<pre{kind}>{html.escape(words)}</pre>"


def folded(title: str, words: str) -> str:
    """Text that is collapsed below its title."""
    return folded_piece(title, text(words))


def folded_piece(title: str, piece: str) -> str:
    """The same with HTML, which must be escaped already."""
    return f"<details><summary>{html.escape(title)}</summary>{piece}</details>"


def as_script(value: Any) -> str:
    """JSON that contains nothing a browser parses as markup."""
    return (
        json.dumps(value, separators=(",", ":")).replace("<", "\\u003c").replace("\u2028", " ").replace("\u2029", " ")
    )


def asset(name: str, package: str = "steelyard.core.pages") -> str:
    """The content of a script or style file of a package."""
    return resources.files(package).joinpath(name).read_text(encoding="utf-8")

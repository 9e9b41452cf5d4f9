"""The frame of an HTML page that opens offline, and the pieces reports are made of. All text is escaped here."""

from __future__ import annotations

import html
import json
from collections.abc import Iterable, Sequence
from importlib import resources
from typing import Any

# Nothing is fetched, nothing is sent: even text that found a way in could not.
POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:; font-src data:"
)


def page(title: str, body: Iterable[str], scripts: Iterable[str] = ()) -> str:
    """A whole document; `scripts` are those of this room that its charts need."""
    programs = [f"<script>{asset(name)}</script>" for name in scripts]
    head = (
        "<!doctype html><html lang='en'><head><meta charset='utf-8'>"
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        "<meta name='viewport' content='width=device-width'>"
        f"<title>{html.escape(title)}</title><style>{asset('page.css')}{asset('charts.css')}</style></head>"
    )
    return "\n".join([head, f"<body><h1>{html.escape(title)}</h1>", *programs, *body, "</body></html>\n"])


def heading(title: str, anchor: str) -> str:
    """A section's title, which the list of contents points to."""
    return f'<h2 id="{html.escape(anchor)}">{html.escape(title)}</h2>'


def contents(sections: Iterable[tuple[str, str]]) -> str:
    """Links to sections, given as anchors and titles."""
    links = (f'<a href="#{html.escape(anchor)}">{html.escape(title)}</a>' for anchor, title in sections)
    return f"<nav>{''.join(links)}</nav>"


def paragraph(words: str, kind: str = "") -> str:
    """Some words; `kind` is a class of the style."""
    return f'<p class="{html.escape(kind)}">{html.escape(words)}</p>' if kind else f"<p>{html.escape(words)}</p>"


def pairs(rows: dict[str, str]) -> str:
    """Two columns: names and values."""
    return table([[name, value] for name, value in rows.items()])


def table(rows: Sequence[Sequence[str]], head: Sequence[str] = (), numbers: bool = False) -> str:
    """Rows of text. With `numbers` all columns but the first stand to the right."""
    kind = ' class="number"' if numbers else ""
    top = f"<tr>{''.join(f'<th>{html.escape(cell)}</th>' for cell in head)}</tr>" if head else ""
    lines = []
    for first, *others in rows:
        cells = "".join(f"<td{kind}>{html.escape(cell)}</td>" for cell in others)
        lines.append(f"<tr><td>{html.escape(first)}</td>{cells}</tr>")
    return f"<table>{top}{''.join(lines)}</table>"


def text(words: str, wrapped: bool = False) -> str:
    """Text as it stands; with `wrapped` long lines go on below."""
    kind = ' class="wrapped"' if wrapped else ""
    return f"<pre{kind}>{html.escape(words)}</pre>"


def folded(title: str, words: str) -> str:
    """Text that stands behind its title until it is asked for."""
    return folded_piece(title, text(words))


def folded_piece(title: str, piece: str) -> str:
    """The same with a piece of a page, which must be escaped already."""
    return f"<details><summary>{html.escape(title)}</summary>{piece}</details>"


def as_script(value: Any) -> str:
    """JSON with nothing in it that a browser would take for markup."""
    return (
        json.dumps(value, separators=(",", ":")).replace("<", "\\u003c").replace("\u2028", " ").replace("\u2029", " ")
    )


def asset(name: str, room: str = "steelyard.core.pages") -> str:
    """One of a room's scripts and styles, whole."""
    return resources.files(room).joinpath(name).read_text(encoding="utf-8")

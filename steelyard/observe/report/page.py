"""The frame of an HTML page that opens offline, and the pieces reports are made of. All text is escaped here."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from importlib import resources

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 1180px; margin: 2rem auto; padding: 0 1rem; color: #1c2733;
background: #fff; } h1 { font-size: 1.6rem; margin-bottom: .3rem; } h2 { font-size: 1.2rem; margin: 2.2rem 0 .5rem;
border-bottom: 1px solid #dfe4e9; } h3 { font-size: 1rem; margin: 1.4rem 0 .3rem; } table { border-collapse: collapse; }
td, th { padding: .15rem 1.5rem .15rem 0; vertical-align: top; text-align: left; font-weight: normal; }
th, tr > td:first-child { color: #5b6b7b; } td.number { text-align: right; font-variant-numeric: tabular-nums; }
td { overflow-wrap: anywhere; } pre { background: #f4f6f8; padding: 1rem; overflow-x: auto; border-radius: 6px;
font-size: 13px; } pre.wrapped { white-space: pre-wrap; font-family: inherit; }
.note { color: #5b6b7b; font-size: 13px; } .charts { display: grid; gap: 0 1.5rem;
grid-template-columns: repeat(auto-fill, minmax(min(100%, 520px), 1fr)); } .charts > div { min-width: 0; }
.verdict { padding: .5rem .9rem; border-left: 4px solid #8a97a4; background: #f4f6f8; margin: .5rem 0; white-space:
pre-line; } .verdict.good { border-color: #2f9e6e; } .verdict.warning { border-color: #d9942b; }
.verdict.bad { border-color: #c93b3b; } nav a { margin-right: 1.1rem; color: #2563a8; text-decoration: none; }
details summary { cursor: pointer; color: #2563a8; } .timeline { position: relative; }
.timeline .lanes { overflow-y: auto; border: 1px solid #dfe4e9; } .timeline canvas { display: block; }
.timeline .lanes canvas { position: sticky; top: 0; cursor: crosshair; } .timeline .legend span { margin-right: 1.1rem;
font-size: 13px; } .timeline .legend span::before { content: ""; display: inline-block; width: .8em; height: .8em;
margin-right: .35em; background: var(--colour); } .timeline .controls { display: flex; flex-wrap: wrap; gap: .5rem
.8rem; align-items: center; margin: .4rem 0; font-size: 13px; } .timeline input { width: 6em; }
.timeline .tip { position: absolute; z-index: 2; background: #1c2733; color: #fff; padding: .35rem .6rem; font-size:
12px; white-space: pre; border-radius: 4px; pointer-events: none; }
"""
# Nothing is fetched, nothing is sent: even text that found a way in could not.
POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:; font-src data:"
)


def page(title: str, body: Iterable[str]) -> str:
    """A whole document."""
    head = (
        "<!doctype html><html lang='en'><head><meta charset='utf-8'>"
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        "<meta name='viewport' content='width=device-width'>"
        f"<title>{html.escape(title)}</title><style>{STYLE}</style></head>"
    )
    return "\n".join([head, f"<body><h1>{html.escape(title)}</h1>", *body, "</body></html>\n"])


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


def program(name: str) -> str:
    """One of this room's scripts, whole."""
    return resources.files("steelyard.observe").joinpath("pages", name).read_text(encoding="utf-8")

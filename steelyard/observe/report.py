"""One HTML file that tells a run's story and opens without a network: loss, throughput, configuration."""

from __future__ import annotations

import html
from pathlib import Path
from typing import Any

from steelyard.core import files, units
from steelyard.core.errors import UserError
from steelyard.core.recipe import to_toml
from steelyard.core.run import Run

STYLE = """
:root { color-scheme: light dark; } body { font: 15px/1.5 system-ui, sans-serif; max-width: 1100px; margin: 2rem auto;
padding: 0 1rem; color: #1c2733; background: #fff; } h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top:
2rem; } table { border-collapse: collapse; } td { padding: .15rem 1.5rem .15rem 0; vertical-align: top; }
td:first-child { color: #5b6b7b; } pre { background: #f4f6f8; padding: 1rem; overflow-x: auto; border-radius: 6px; }
"""


def write(run: Run, path: Path | None = None) -> Path:
    """Write the report of a run, finished or not, and return where it lies."""
    path = path or run.path / "report.html"
    files.write_text(path, render(run))
    return path


def render(run: Run) -> str:
    """The report as HTML. Whatever comes from the run is escaped."""
    records = run.metrics()
    name = html.escape(run.name)
    return "\n".join(
        [
            "<!doctype html><html lang='en'><head><meta charset='utf-8'>",
            f"<title>{name}</title><style>{STYLE}</style></head>",
            f"<body><h1>{name}</h1>",
            _table(_summary(run, records)),
            *_charts(records),
            f"<h2>Recipe</h2><pre>{html.escape(to_toml(run.recipe().settings()))}</pre>",
            "<h2>Environment</h2>",
            _table(_environment(run.manifest())),
            "</body></html>\n",
        ]
    )


def _summary(run: Run, records: list[dict[str, Any]]) -> dict[str, str]:
    manifest = run.manifest()
    trained = [record for record in records if "loss" in record]
    valid = [record for record in records if "valid_loss" in record]
    summary = {
        "State": run.state,
        "Started": str(manifest.get("started")),
        "Ended": str(manifest.get("ended") or "not yet"),
    }
    if trained:
        last = trained[-1]
        summary["Steps"] = f"{last['step']} of {run.recipe().train.steps}"
        summary["Tokens"] = units.count(last["tokens"])
        summary["Training loss"] = "no number" if last["loss"] is None else f"{last['loss']:.4f}"
        summary["Throughput"] = f"{units.count(last['tokens_per_second'])} tokens/s"
    if valid:
        first, last_valid = valid[0]["valid_loss"], valid[-1]["valid_loss"]
        summary["Validation loss"] = f"{first:.4f} at first, {last_valid:.4f} at last"
        summary["Validation perplexity"] = f"{units.perplexity(first)} at first, {units.perplexity(last_valid)} at last"
    return summary


def _environment(manifest: dict[str, Any]) -> dict[str, str]:
    versions = ", ".join(f"{name} {version}" for name, version in manifest.get("versions", {}).items())
    keys = {"host": "Host", "device": "Device", "world_size": "Ranks", "seed": "Seed", "git_commit": "Git commit"}
    return {title: str(manifest[key]) for key, title in keys.items() if key in manifest} | {"Versions": versions}


def _table(rows: dict[str, str]) -> str:
    cells = (f"<tr><td>{html.escape(key)}</td><td>{html.escape(value)}</td></tr>" for key, value in rows.items())
    return f"<table>{''.join(cells)}</table>"


def _charts(records: list[dict[str, Any]]) -> list[str]:
    try:
        from plotly import graph_objects
    except ImportError:
        raise UserError("plotly is not installed", mend="pip install plotly") from None

    curves = {
        "Loss": [("loss", "training"), ("valid_loss", "validation")],
        "Throughput, tokens per second": [("tokens_per_second", "tokens/s")],
        "Learning rate": [("learning_rate", "learning rate")],
        "Gradient norm": [("grad_norm", "gradient norm")],
        "Masks, shares of all groups": [
            ("mask_max_probability", "how decided"),
            ("mask_changed", "changed since the last record"),
            ("mask_from_prior", "not the prior's"),
        ],
    }
    charts: list[str] = []
    for title, lines in curves.items():
        figure = graph_objects.Figure()
        for key, label in lines:
            points = [(record["step"], record[key]) for record in records if key in record]
            if points:
                steps, values = zip(*points, strict=True)
                mode = "lines" if len(points) > 1 and key != "valid_loss" else "lines+markers"
                figure.add_scatter(x=steps, y=values, name=label, mode=mode)
        if not figure.data:
            continue
        figure.update_layout(
            height=320,
            legend={"orientation": "h", "y": 1.12},
            margin={"l": 60, "r": 20, "t": 10, "b": 45},
            xaxis_title="step",
            template="plotly_white",
        )
        # The first chart carries the plotting library, the others use it.
        chart = figure.to_html(full_html=False, include_plotlyjs=not charts, config={"displaylogo": False})
        charts.append(f"<h2>{title}</h2>{chart}")
    return charts or ["<p>Nothing was recorded yet.</p>"]

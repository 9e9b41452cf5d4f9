"""Recipe keys that were renamed.

A user's recipe with an old key is refused, with the new key in the message; `steelyard recipe migrate FILE` rewrites
the file. Recipes that Steelyard wrote itself (in run and study folders) are migrated when they are read.
"""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import Any

RENAMED_KEYS = {
    "finetune.shape": "finetune.format",
    "optim.decline": "optim.decay_fraction",
    "optim.horizon_steps": "optim.decay_steps",
    "optim.horizon_samples": "optim.decay_samples",
    "optim.horizon_tokens": "optim.decay_tokens",
    "site.account": "site.slurm.account",
    "site.cpus_per_rank": "site.slurm.cpus_per_rank",
    "site.gres": "site.slurm.gres",
    "site.heterogeneous": "site.slurm.heterogeneous",
    "site.max_restarts": "site.slurm.max_restarts",
    "site.memory": "site.slurm.memory",
    "site.partition": "site.slurm.partition",
    "site.requeue": "site.slurm.requeue",
    "site.sbatch": "site.slurm.sbatch",
    "site.time_limit": "site.slurm.time_limit",
    "site.warning_seconds": "site.slurm.warning_seconds",
    "train.hours": "train.max_hours",
    "train.ramp_up": "train.batch_ramp",
}


def renamed(key: str) -> str | None:
    """The new name of a dotted key, also if a table that contains it was renamed; otherwise None."""
    for old, new in RENAMED_KEYS.items():
        if key == old or key.startswith(f"{old}."):
            return new + key[len(old) :]
    return None


def migrate_values(values: dict[str, Any]) -> dict[str, Any]:
    """The values of a recipe with old keys replaced by new ones; a new key that is also set wins."""
    migrated = {name: dict(table) if isinstance(table, dict) else table for name, table in values.items()}
    for old, new in RENAMED_KEYS.items():
        section, _, key = old.partition(".")
        table = migrated.get(section)
        if isinstance(table, dict) and key in table:
            value, (*inner, name) = table.pop(key), new.split(".")[1:]
            for each in inner:
                table[each] = dict(table.get(each, {}))
                table = table[each]
            table.setdefault(name, value)
    return migrated


def migrate_dotted(text: str) -> str:
    """Replace old keys in a text with dotted keys, such as the JSON of a study."""
    for old, new in RENAMED_KEYS.items():
        text = re.sub(rf"(?<![\w-]){re.escape(old)}(?![\w-])", new, text)
    return text


def migrate_text(text: str, is_sites: bool = False) -> tuple[str, list[str]]:
    """Replace old keys in a recipe or tune file; also return the replaced keys. `is_sites`: each table is a site.

    Only names change: comments, order and spacing stay. A key is replaced in its table (`[optim]`, then
    `decline = 0.2`) and where it has its section (`optim.decline = 0.2`, `"optim.decline=0.2"`).
    """
    replaced_keys: list[str] = []
    table, lines = "", []
    for line in text.splitlines(keepends=True):
        if header := re.match(r"\s*\[+\s*([\w.\-]+)\s*\]+", line):
            table = "site" if is_sites and "." not in header[1] else header[1]
        for old, new in RENAMED_KEYS.items():
            section, _, key = old.partition(".")
            pattern = rf"(?<![\w.-]){re.escape(old)}(?![\w-])"
            if table == section:
                pattern = rf"{pattern}|^(?P<indent>\s*){re.escape(key)}(?=\s*[=.])"
            replaced = re.sub(pattern, partial(_replacement, new), line)
            if replaced != line:
                replaced_keys.append(old)
                line = replaced
        lines.append(line)
    return "".join(lines), list(dict.fromkeys(replaced_keys))


def _replacement(new: str, match: re.Match[str]) -> str:
    indent = match.groupdict().get("indent")
    return new if indent is None else indent + new.partition(".")[2]


def is_own(path: Path) -> bool:
    """Whether Steelyard wrote this recipe: `recipe.toml` in a run folder, in its `launch/`, or in a study."""
    folders = path.resolve().parents
    marked = (folder / marker for folder in folders[:3] for marker in ("run.json", "tune.json", "trial.json"))
    return path.name == "recipe.toml" and any(mark.is_file() for mark in marked)

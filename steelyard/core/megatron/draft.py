"""The recipe while it is being written: settings, why some were assumed, and what must be asked."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from steelyard.core.megatron.given import Given
from steelyard.core.recipe import to_toml

DEFAULT = "Megatron's default"


@dataclass
class Draft:
    """Keys as `section.key`; `assumed` says of a key why it has a value that no flag gave it."""

    given: Given
    settings: dict[str, dict[str, Any]] = field(default_factory=dict)
    assumed: dict[str, str] = field(default_factory=dict)
    questions: list[str] = field(default_factory=list)

    def put(self, key: str, value: Any, assumed: str = "") -> None:
        """Set a key."""
        section, _, name = key.partition(".")
        self.settings.setdefault(section, {})[name] = value
        self.assumed.pop(key, None)
        if assumed:
            self.assumed[key] = assumed

    def put_or(self, key: str, value: Any, default: Any) -> None:
        """Set a key to what a flag gave, or to what Megatron assumes without the flag."""
        if value is not None:
            self.put(key, value)
        elif default is not None:
            self.put(key, default, DEFAULT)

    def get(self, key: str) -> Any:
        """A key's value, or None."""
        section, _, name = key.partition(".")
        return self.settings.get(section, {}).get(name)

    def ask(self, question: str) -> None:
        """Keep a question that only a person can answer."""
        self.questions.append(question)

    def toml(self, name: str, head: list[str]) -> str:
        """The recipe as a file, with a comment beside what was assumed."""
        plain = to_toml({"name": name} | {key: self.settings[key] for key in ORDER if key in self.settings})
        lines, section = [f"# {line}" for line in head], ""
        for line in plain.splitlines():
            if header := re.fullmatch(r"\[(.+)\]", line):
                section = header.group(1)
            reason = self.assumed.get(f"{section}.{line.partition(' = ')[0]}", "")
            lines.append(f"{line}  # {reason}" if reason and " = " in line else line)
        return "\n".join(lines) + "\n"


ORDER = ("model", "data", "train", "optim", "parallel", "checkpoint", "eval", "log")

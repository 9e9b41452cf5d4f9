"""The recipe while it is being written: settings, why some were assumed, and what must be asked."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from steelyard.core.recipe import to_toml
from steelyard.megatron.cli_args import Given

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

    def close(self) -> None:
        """See that every flag said to be in a key is in the recipe, and give every other one its reason."""
        for name, key in list(self.given.carried.items()):
            if self.get(key) is None:
                del self.given.carried[name]
                self.given.leave(name, "without effect beside the other flags", matters=False)
        self.given.close()

    def toml(self, name: str, head: list[str]) -> str:
        """The recipe as a file, with a comment beside what was assumed."""
        ordered = {key: _name_first(self.settings[key]) for key in ORDER if key in self.settings}
        plain = to_toml({"name": name} | ordered)
        lines, section = [f"# {line}" for line in head], ""
        for line in plain.splitlines():
            if header := re.fullmatch(r"\[(.+)\]", line):
                section = header.group(1)
            reason = self.assumed.get(f"{section}.{line.partition(' = ')[0]}", "")
            lines.append(f"{line}  # {reason}" if reason and " = " in line else line)
        return "\n".join(lines) + "\n"


def _name_first(section: dict[str, Any]) -> dict[str, Any]:
    return dict(sorted(section.items(), key=lambda item: item[0] != "name"))


ORDER = ("model", "data", "train", "optim", "sparsity", "parallel", "checkpoint", "eval", "log")

"""A recipe under construction: settings, the reasons for assumed values, and questions to the user."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from steelyard.core.recipe import to_toml
from steelyard.megatron.cli_args import Given

DEFAULT = "Megatron's default"


@dataclass
class Draft:
    """Keys are `section.key`; `assumed` has the reason for a value that no flag sets."""

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
        """Set a key to the value of a flag, or to Megatron's default if the flag is not given."""
        if value is not None:
            self.put(key, value)
        elif default is not None:
            self.put(key, default, DEFAULT)

    def get(self, key: str) -> Any:
        """The value of a key, or None."""
        section, _, name = key.partition(".")
        return self.settings.get(section, {}).get(name)

    def ask(self, question: str) -> None:
        """Add a question to the user."""
        self.questions.append(question)

    def close(self) -> None:
        """Check that the key of every carried flag is in the recipe, and give every other flag a reason."""
        for name, key in list(self.given.carried.items()):
            if self.get(key) is None:
                del self.given.carried[name]
                self.given.leave(name, "no effect with the other flags", matters=False)
        self.given.close()

    def toml(self, name: str, head: list[str]) -> str:
        """The recipe as TOML, with a comment after each assumed value."""
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

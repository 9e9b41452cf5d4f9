"""A recipe under construction: settings, the reasons for assumed values, and questions to the user."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import Any

from steelyard.core.printable import printable
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

    @property
    def unsound(self) -> dict[str, tuple[Any, str]]:
        """Keys that cannot have the value of the script, with that value and the reason; they are commented out."""
        return self.given.unsound

    def reject(self, key: str, value: Any, reason: str) -> None:
        """Record that a key cannot have this value."""
        self.given.reject(key, value, reason)

    def kept(self) -> dict[str, dict[str, Any]]:
        """The settings without the unsound keys."""
        return {
            section: {name: value for name, value in keys.items() if f"{section}.{name}" not in self.unsound}
            for section, keys in self.settings.items()
        }

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
        for left in self.given.left:
            if left.matters and left.reason.startswith("this changes the model"):
                self.reject(
                    "model.family", self.get("model.family"), f"{left.flag} {left.value}".strip() + f": {left.reason}"
                )

    def settle(self) -> None:
        """List the flags of unsound keys with the others that are not carried, and ask about each key."""
        for name, key in list(self.given.carried.items()):
            if key in self.unsound:
                del self.given.carried[name]
                self.given.leave(name, f"{key} is commented out")
        self.questions += [f"{key} is commented out: {reason}" for key, (_, reason) in self.unsound.items()]

    def toml(self, name: str, head: list[str]) -> str:
        """The recipe as TOML, with a comment after each assumed value and a question beside each unsound key."""
        kept = self.kept()
        plain = to_toml({"name": name} | {key: _name_first(kept[key]) for key in ORDER if key in kept})
        lines, section = [f"# {line}" for line in head], ""
        for line in plain.splitlines():
            reason = self.assumed.get(f"{section}.{line.partition(' = ')[0]}", "")
            lines.append(f"{line}  # {printable(reason)}" if reason and " = " in line else line)
            if header := re.fullmatch(r"\[(.+)\]", line):
                section = header.group(1)
                lines += [_comment(key, *why) for key, why in self.unsound.items() if key.partition(".")[0] == section]
        return "\n".join(lines) + "\n"


def _comment(key: str, value: Any, reason: str) -> str:
    """An unsound key as a comment on one line."""
    text = "?" if value is None else json.dumps(value, default=str)
    return f"# {key.partition('.')[2]} = {text}  # QUESTION: {printable(reason)}"


def _name_first(section: dict[str, Any]) -> dict[str, Any]:
    return dict(sorted(section.items(), key=lambda item: item[0] != "name"))


ORDER = ("model", "data", "train", "optim", "sparsity", "parallel", "checkpoint", "eval", "log")

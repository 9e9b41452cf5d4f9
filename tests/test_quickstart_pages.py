"""The quickstart pages in other languages have README's commands, recipe and messages; only comments are translated."""

import shlex
import tomllib
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]


def code(text: str) -> list[Any]:
    """The meaning of each code block: words of commands, a parsed recipe, or the text."""
    found: list[Any] = []
    for block in text.split("```")[1::2]:
        language, _, content = block.partition("\n")
        if language == "sh":
            found.append([words for line in content.splitlines() if (words := shlex.split(line, comments=True))])
        else:
            found.append(tomllib.loads(content) if language == "toml" else content)
    return found


@pytest.mark.parametrize("language", ["zh", "ja", "ko"])
def test_a_translated_quickstart_has_the_commands_of_the_readme(language):
    readme = (ROOT / "README.md").read_text()
    expected = code(readme[readme.index("## Install") : readme.index("## What it does")])
    assert len(expected) == 5
    assert code((ROOT / "docs" / f"quickstart.{language}.md").read_text()) == expected

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "tools" / "check_docs.py"


@pytest.fixture(scope="module")
def checker():
    spec = importlib.util.spec_from_file_location("check_docs", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # Dataclasses look up their module.
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


@pytest.fixture
def said(checker, tmp_path):
    """Return the problems of a page docs/page.md that is linked from the index, beside docs/other.md."""

    def check(text: str) -> list[str]:
        (tmp_path / "docs").mkdir(exist_ok=True)
        (tmp_path / "docs" / "README.md").write_text("# Index\n\n[page](page.md) [other](other.md)\n")
        (tmp_path / "docs" / "other.md").write_text("# Other\n\n## The `order`, and ARM\n\n## Twice\n\n## Twice\n")
        (tmp_path / "docs" / "page.md").write_text(text)
        return [str(problem) for problem in checker.problems(tmp_path)]

    return check


def fenced(language: str, code: str) -> str:
    return f"# Page\n\n```{language}\n{code}\n```\n"


BROKEN = {
    "a missing file": ("[a](gone.md)", "docs/page.md:1: broken link: gone.md: no such file"),
    "a missing heading": ("[a](other.md#gone)", "docs/page.md:1: broken link: other.md#gone: no such heading"),
    "a missing heading of its own": ("# One\n\n[a](#two)", "docs/page.md:3: broken link: #two: no such heading"),
    "a definition": ("[a]\n\n[a]: gone.md", "docs/page.md:3: broken link: gone.md: no such file"),
    "a file elsewhere": ("[a](../../)", "docs/page.md:1: broken link: ../../ is outside the repository"),
    "an unknown language": (fenced("shel", "ls"), "docs/page.md:3: code fence has language 'shel'"),
    "no language": (fenced("", "ls"), "docs/page.md:3: code fence has language ''"),
    "an open fence": ("```sh\nls\n", "docs/page.md:1: code fence is not closed"),
    "toml": (fenced("toml", "a ="), "docs/page.md:3: toml fence: Invalid value"),
    "json": (fenced("json", "{"), "docs/page.md:3: json fence: Expecting property name"),
    "python": (fenced("python", "f("), "docs/page.md:3: python fence: '(' was never closed"),
    "a quote": (fenced("sh", 'echo "a'), "docs/page.md:3: sh fence: No closing quotation"),
    "a bracket": (fenced("sh", "echo $(date"), "docs/page.md:3: sh fence: ) is missing"),
    "a bracket too many": (fenced("bash", "A=(1 2))"), "docs/page.md:3: bash fence: ) closes nothing"),
    "a loop": (fenced("sh", "for a in b; do\n  ls"), "docs/page.md:3: sh fence: done is missing"),
    "a continued line": (fenced("sh", "ls \\"), "docs/page.md:3: sh fence: the last line is continued"),
    "a table": ("| a | b |\n|---|---|\n| c |", "docs/page.md:3: table row has 1 cells, its header 2"),
    "a long line": ("word " * 21, "docs/page.md:1: 105 columns, at most 100"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_page_is_named_with_its_line(said, case):
    text, message = BROKEN[case]
    found = said(text)
    assert len(found) == 1
    assert found[0].startswith(message)


def test_a_sound_page_has_no_problem(said):
    links = "[a](other.md#the-order-and-arm) [b](other.md#twice-1) [c](#page) [d](https://example.org/x#y) `[e](no)`"
    code = fenced("sh", "for a in $(ls); do echo \"don't ${a}\"; done  # it's fine (really\nif true; then (ls); fi")
    table = "| a | b |\n|---|---|\n| " + "long " * 30 + "| `x \\| y` |\n"
    target = f"[{'words ' * 10}](https://example.org/{'x' * 100})\n"
    assert said("\n\n".join([code, links, table, target, "~~~text\n```\n~~~"])) == []


def test_long_readme_and_pages_that_are_not_in_the_index_are_named(checker, tmp_path):
    (tmp_path / "docs").mkdir()
    (tmp_path / "README.md").write_text("line\n" * 131)
    (tmp_path / "CONTRIBUTING.md").write_text("line\n" * 201)
    (tmp_path / "docs" / "README.md").write_text("# Index\n")
    (tmp_path / "docs" / "page.md").write_text("# Page\n")
    assert [str(problem) for problem in checker.problems(tmp_path)] == [
        "CONTRIBUTING.md:201: 201 lines, at most 200",
        "README.md:131: 131 lines, at most 130",
        "docs/page.md:1: not linked from docs/README.md",
    ]


def test_the_documentation_of_this_repository_is_sound():
    done = subprocess.run([sys.executable, SCRIPT], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout

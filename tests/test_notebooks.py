"""The notebooks of examples/notebooks run from top to bottom, and are stored without outputs."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
RUN_CELLS = """
import json, sys
sys.path.insert(0, sys.argv[1])
with open(sys.argv[2], encoding="utf-8") as file:
    cells = [cell["source"] for cell in json.load(file)["cells"] if cell["cell_type"] == "code"]
names = {"__name__": "__main__"}
for number, source in enumerate(cells):
    exec(compile("".join(source), f"code cell {number}", "exec"), names)
"""
NOTEBOOKS = sorted((ROOT / "examples" / "notebooks").glob("*.ipynb"))


def code_cells(path: Path) -> list[dict]:
    return [cell for cell in json.loads(path.read_text(encoding="utf-8"))["cells"] if cell["cell_type"] == "code"]


def test_there_are_three_notebooks():
    assert [path.stem for path in NOTEBOOKS] == ["plan-a-mixed-cluster", "prune-and-compare", "train-and-inspect"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_stored_without_outputs(path):
    assert json.loads(path.read_text(encoding="utf-8"))["nbformat"] == 4
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in code_cells(path))


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_from_top_to_bottom(path, tmp_path):
    # As in Jupyter, the main module has no file that worker processes would import again.
    done = subprocess.run(
        [sys.executable, "-c", RUN_CELLS, str(ROOT), str(path)],
        cwd=tmp_path, capture_output=True, text=True, timeout=900,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]

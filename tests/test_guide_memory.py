"""The commands of the guides fit in the memory of the hardware that the guide names: every dry run is run.

A guide names its hardware as "Hardware: 16 x `h100-80`"; the last such sentence before a command counts. Commands
without a dry run are predicted: of `tune` some point of its search space must fit, of `submit` every rank.
"""

import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from steelyard import cli
from steelyard.core.errors import UserError
from steelyard.core.recipe import load_recipe, shipped
from steelyard.launch import job_spec, preflight
from steelyard.launch.sites import SiteSection
from steelyard.planning import cluster as clusters
from steelyard.planning.memory_fit import usable
from steelyard.sizes.gpu_catalogue import by_name
from steelyard.sizes.memory import memory_of
from steelyard.tune import spec
from steelyard.tune.candidate import recipe_at
from steelyard.tune.defaults import tune_for

DOCS = Path(__file__).parents[1] / "docs"
HARDWARE = re.compile(r"Hardware(?: for training)?:\s+(\d+)\s+x\s+`([\w-]+)`")
# What a guide's TOML blocks are, in order, and the recipes that it leaves to the reader or writes itself.
FILES = {
    "guide-containers.md": ["sites.toml"],
    "guide-elastic.md": ["elastic.toml", "cluster.toml"],
    "guide-mpi.md": ["sites.toml"],
    "guide-plan.md": ["cluster.toml"],
    "guide-slurm.md": ["planned.toml", "cluster.toml", "sites.toml"],
    "guide-tune.md": ["layout.toml", "script.toml"],
}
READERS = {"my.toml", "runs/experts/recipe.toml", "my-recipe.toml", "studies/llama3.1-8b/best.toml", "script.toml"}
SIZED = ("train", "tune", "submit")
LOOKED_AT = 100  # points of a search space


@pytest.mark.parametrize("guide", sorted(path.name for path in DOCS.glob("guide-*.md")))
def test_every_guide_command_fits_on_the_hardware_that_the_guide_names(guide, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    text = (DOCS / guide).read_text()
    blocks = [block.split("```")[0] for block in text.split("```toml\n")[1:]]
    for name, block in zip(FILES.get(guide, []), blocks, strict=False):
        folder = tmp_path / "config/steelyard" if name == "sites.toml" else tmp_path
        folder.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(block)
    for example in (DOCS.parent / "examples").glob("*.toml"):
        (tmp_path / example.name).write_text(example.read_text())
    for count, gpu, words in _commands(text):
        _check(words, count, gpu)
    capsys.readouterr()


def test_the_memory_check_of_the_guides_notices_what_does_not_fit(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for line in ("train llama3.1-70b", "tune llama3.1-70b data.train=x --nproc 8"):
        with pytest.raises(AssertionError):
            _check(shlex.split(line), 16 if "train " in line else 8, "h100-80")
    capsys.readouterr()


def _commands(text: str) -> list[tuple[int, str | None, list[str]]]:
    """Every command with the number and type of GPUs that were named before it."""
    found = []
    for fence in re.finditer(r"```sh\n(.*?)```", text, re.DOTALL):
        named = HARDWARE.findall(text[: fence.start()])
        count, gpu = (int(named[-1][0]), named[-1][1]) if named else (1, None)
        lines = [line for line in fence[1].splitlines() if line.startswith("steelyard ")]
        found += [(count, gpu, shlex.split(line, comments=True)[1:]) for line in lines]
    return found


def _check(words: list[str], count: int, gpu: str | None) -> None:
    command, recipe = words[0], words[1] if len(words) > 1 else ""
    overrides = [word for word in words[2:] if re.match(r"[a-z]+\.[a-z_.]+=", word)]
    if "--dry-run" in words and command not in ("hub", "shell"):
        _run(words)
    if command not in SIZED or recipe in READERS or recipe == "report" or "--" in words:
        return
    if recipe == "planned.toml" and not Path(recipe).exists():  # guide-plan.md writes it from the reader's recipe.
        return
    cluster = Path(words[words.index("--cluster") + 1]) if "--cluster" in words else None
    if command == "submit" and cluster is not None:
        loaded = load_recipe(recipe, overrides)
        groups = job_spec.of_plan(loaded, clusters.load(cluster), SiteSection(), None, None)
        preflight.check_memory(loaded, groups)
        return
    assert gpu is not None, f"name the hardware before: {' '.join(words)}"
    assert by_name(gpu) is not None
    assert recipe in shipped() or Path(recipe).is_file()
    if command == "tune":
        assert _fits_somewhere(recipe, overrides, count, gpu), f"nothing fits on {count} {gpu}: {' '.join(words)}"
    else:
        _run(["train", recipe, *overrides, "--dry-run", "--world", str(count), "--gpu", gpu])


def _run(words: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(words)
    assert ended.value.code == 0, " ".join(words)


def _fits_somewhere(recipe: str, overrides: list[str], count: int, gpu: str) -> bool:
    """Whether one of the most frugal points of the search space fits."""
    tune = spec.load(recipe, {}) if spec.is_tune_file(recipe) else tune_for(recipe, overrides, count, {})
    points = tune.searched().grid() or []
    for point in sorted(points, key=_spent)[:LOOKED_AT]:
        try:
            memory = memory_of(recipe_at(tune, point, is_trial=True), count)
        except UserError:  # sizes that do not divide
            continue
        if max(rank.total for rank in memory) <= usable(by_name(gpu).memory):
            return True
    return False


def _spent(point: dict[str, Any]) -> tuple[Any, ...]:
    is_full = point.get("parallel.recompute") == "full"
    return point["train.micro_batch"], not is_full, -point.get("parallel.tensor", 1), -point.get("parallel.zero", 0)

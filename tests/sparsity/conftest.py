"""A base that was trained for a moment, and runs that learn masks for it."""

from pathlib import Path

import pytest

from steelyard import training
from steelyard.core.recipe import load_recipe
from steelyard.core.run import Run
from steelyard.sparsity import sparsity_extension
from tests.conftest import TINY, Workplace, write_tokens

LEARN = ["sparsity.method=learned", "optim.warmup_steps=0", "eval.every=0", "checkpoint.every=0"]


class Place(Workplace):
    """A folder with tokens, a recipe and a trained model to prune."""

    def train(self, run: str, *overrides: str, resume: str = "auto") -> Run:
        """Train in this process."""
        recipe = load_recipe(self.recipe, overrides)
        return training.run(recipe, self.path / run, sparsity_extension.extension(recipe), resume)

    def learn(self, run: str, *overrides: str, resume: str = "auto") -> Run:
        """Learn masks for the base."""
        return self.train(run, *LEARN, "train.init_from=base", *overrides, resume=resume)


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sparsity")
    write_tokens(folder / "tokens_text_document")
    (folder / "tiny.toml").write_text(TINY)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        Place(folder).train("base", "checkpoint.every=0", "train.steps=30")
    return folder


@pytest.fixture
def place(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    """A folder of its own for each test, in which the trained model can be read."""
    for entry in trained.iterdir():
        (tmp_path / entry.name).symlink_to(entry)
    monkeypatch.chdir(tmp_path)
    return Place(tmp_path)

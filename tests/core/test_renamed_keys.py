"""Files from before recipe keys were renamed: those of users are refused with the new key, our own are migrated."""

import json
import shutil
from pathlib import Path

import pytest

from steelyard.checkpoint.formats import open_source
from steelyard.core.errors import UserError
from steelyard.core.recipe import load_recipe
from steelyard.core.recipe.load import valid_keys
from steelyard.core.recipe.recipe import Recipe
from steelyard.core.recipe.renamed_keys import RENAMED_KEYS, migrate_text, renamed
from steelyard.core.run import Run
from steelyard.sparsity import mask_file
from tests.conftest import Workplace, write_tokens

BEFORE = Path(__file__).parent / "written_before"


@pytest.fixture
def old(tmp_path, monkeypatch):
    """A folder as the old version left it."""
    shutil.copytree(BEFORE, tmp_path, dirs_exist_ok=True)
    write_tokens(tmp_path / "tokens_text_document", 40)
    monkeypatch.chdir(tmp_path)
    return Workplace(tmp_path)


def test_every_new_key_exists_and_no_old_one_does():
    known = {key.rpartition(".")[0] if key.startswith("train.batch_ramp.") else key for key in valid_keys(Recipe)}
    assert set(RENAMED_KEYS.values()) <= known
    assert not set(RENAMED_KEYS) & known


@pytest.mark.parametrize(("key", "new"), [("train.ramp_up.start", "train.batch_ramp.start"), ("train.steps", None)])
def test_a_key_inside_a_renamed_table_is_renamed_too(key, new):
    assert renamed(key) == new


def test_an_old_key_of_a_users_recipe_is_refused_with_the_new_one(old):
    with pytest.raises(UserError) as refused:
        load_recipe("tiny.toml")
    message = str(refused.value)
    line = 1 + Path("tiny.toml").read_text().splitlines().index("hours = 5.0")
    assert f"tiny.toml:{line}: train.hours: this key is now called train.max_hours\n  hint: steelyard recipe" in message
    assert "optim.decline: this key is now called optim.decay_fraction" in message
    with pytest.raises(
        UserError, match=r"command line: optim.horizon_tokens: this key is now called optim.decay_tokens"
    ):
        load_recipe("quickstart", ["optim.horizon_tokens=5"])


def test_migrate_rewrites_a_recipe_and_keeps_all_else(old):
    before = old.recipe.read_text() + "# optim.decline was 0.5\n"
    old.recipe.write_text(before)
    looked = old.steelyard("recipe", "migrate", "tiny.toml", "--check")
    assert (looked.returncode, old.recipe.read_text()) == (1, before), looked.stderr
    done = old.steelyard("recipe", "migrate", "tiny.toml", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["renamed"]["train.ramp_up"] == "train.batch_ramp"
    after = old.recipe.read_text()
    changed = [(a, b) for a, b in zip(before.splitlines(), after.splitlines(), strict=True) if a != b]
    assert changed == [
        ("hours = 5.0", "max_hours = 5.0"),
        ("ramp_up = {start = 2, increment = 2, samples = 4}", "batch_ramp = {start = 2, increment = 2, samples = 4}"),
        ("decline = 0.5", "decay_fraction = 0.5"),
        ("horizon_steps = 8", "decay_steps = 8"),
        ("# optim.decline was 0.5", "# optim.decay_fraction was 0.5"),
    ]
    assert load_recipe("tiny.toml").optim.decay_fraction == 0.5
    assert old.steelyard("recipe", "migrate", "tiny.toml").stdout == "tiny.toml: no old keys\n"


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("[train.ramp_up]\nstart = 1\n", "[train.batch_ramp]\nstart = 1\n"),
        ("train.hours = 2\n", "train.max_hours = 2\n"),
        ("[ optim ]\n  decline=1\n", "[ optim ]\n  decay_fraction=1\n"),
        ("[train]\ndecline = 1\n[budget]\nhours = 3\n", "[train]\ndecline = 1\n[budget]\nhours = 3\n"),
        ('[space]\n"optim.decline" = [0.1]\n', '[space]\n"optim.decay_fraction" = [0.1]\n'),
    ],
)
def test_a_key_is_renamed_where_it_is_one(before, after):
    assert migrate_text(before)[0] == after


def test_a_recipe_that_cannot_be_rewritten_is_left_alone(old):
    old.recipe.write_text("train = {hours = 2.0}\n")
    done = old.steelyard("recipe", "migrate", "tiny.toml")
    assert (done.returncode, old.recipe.read_text()) == (2, "train = {hours = 2.0}\n")
    assert done.stderr == "error: tiny.toml:1: train.hours cannot be replaced in this form: write train.max_hours\n"


def test_a_run_from_before_is_read_and_resumed(old):
    recipe = Run.open("runs/old").recipe()
    assert (recipe.train.max_hours, recipe.train.batch_ramp.start) == (5.0, 2)
    assert (recipe.optim.decay_fraction, recipe.optim.decay_steps) == (0.5, 8)
    assert open_source("runs/old").names()
    old.steelyard("recipe", "migrate", "tiny.toml")
    done = old.steelyard("train", "tiny.toml", "train.steps=6")
    assert done.returncode == 0, done.stderr
    assert "runs/old: resumed at step 4" in done.stderr
    assert [record["step"] for record in Run.open("runs/old").metrics() if "loss" in record] == [1, 2, 3, 4, 5, 6]


def test_a_mask_file_from_before_is_read():
    found = mask_file.described(BEFORE / "old.mask")
    assert (found["pattern"], found["matrices"]) == ("2:4", 7)


@pytest.mark.slow
def test_a_study_from_before_is_continued_with_its_trials(old):
    for name in ("tiny.toml", "tune.toml"):
        assert old.steelyard("recipe", "migrate", name).returncode == 0
    done = old.steelyard("tune", "tune.toml", "--study", "study", "--trials", "3", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert list(found["best"][0]["settings"]) == ["optim.decay_fraction"]
    assert found["trials"] == 2  # Both points of the space were tried before, under the old key.

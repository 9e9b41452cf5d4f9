import re
from pathlib import Path

import pytest

from steelyard.core.errors import UserError
from steelyard.core.recipe import load_recipe, shipped, to_toml

MIXED = Path(__file__).with_name("gpt2-xl-mixed.toml")


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "mine.toml"
    path.write_text(MIXED.read_text())
    return path


def refusal(path: Path | str, *overrides: str) -> str:
    with pytest.raises(UserError) as refused:
        load_recipe(path, overrides)
    assert refused.value.exit_code == 2
    return str(refused.value)


def test_the_recipe_of_the_design_is_sound():
    recipe = load_recipe(MIXED)
    assert recipe.parallel.partition.counts == (0, 11, 8, 8, 8, 8, 5, 0)
    assert [source.weight for source in recipe.data.train] == [0.7, 0.3]
    assert recipe.model.ffn == 6400


@pytest.mark.parametrize("name", shipped())
def test_a_shown_recipe_loads_again_to_the_same_thing(name, tmp_path):
    recipe = load_recipe(name)
    again = tmp_path / "again.toml"
    again.write_text(to_toml(recipe.settings()))
    assert load_recipe(again).settings() == recipe.settings()


@pytest.mark.parametrize(
    ("was", "wrong", "line", "key", "hint"),
    [
        ("[train]", "[trian]", 17, "trian.steps", "train.steps"),
        ("steps = 50", "stpes = 50", 17, "train.stpes", "train.steps"),
        ("learning_rate = 1.5e-4", "lr = 1.5e-4", 25, "optim.lr", "optim.learning_rate"),
        ("steps = 50", 'steps = "many"', 17, "train.steps", "integer"),
        ("heads = 16", "heads = 7", 7, "model.heads", "divisor of 1600"),
        ('"0-11-8-8-8-8-5-0"', '"0-11-8-8-8-8-5-1"', 35, "parallel.partition", "sum to 48"),
        ('"0-11-8-8-8-8-5-0"', '"12-12-12-12"', 35, "parallel.partition", "8 numbers"),
        ('"0-11-8-8-8-8-5-0"', '"twelve"', 35, "parallel.partition", "dashes"),
        ("tensor = 1", "tensor = 3", 30, "parallel.tensor", "divisor of 16"),
        ("micro_batch = 1", "micro_batch = 3", 19, "train.micro_batch", "divisor of 64"),
        ("sequence_length = 1024", "sequence_length = 4096", 14, "data.sequence_length", "positions"),
        ('"98,2,0"', '"most"', 13, "data.split", "98,2,0"),
        ("[data]", '[data]\nblend_order = "fmadd"', 11, "data.blend_order", "'standard' or 'fma'"),
        ("weight = 0.7", "wieght = 0.7", 12, "data.train.0.wieght", "data.train.weight"),
        ('family = "gpt"', 'family = "gtp"', 4, "model.family", "gpt, llama"),
        ("vocab = 50257", "vocab = 50257\nkv_heads = 4", 9, "model.kv_heads", "family gpt has no such key"),
        ("keep_last = 3", "memory_every = 1000", 39, "checkpoint.memory_every", "below 1000"),
        ("keep_last = 3", 'memory_dir = "shm"', 39, "checkpoint.memory_dir", "such as /dev/shm"),
        ("keep_last = 3", "memory_device_gib = -1.0", 39, "checkpoint.memory_device_gib", "greater"),
        ("vocab = 50257", "", 3, "model.vocab", "missing"),
        ("steps = 50", 'steps = 50\ndevice = "mps"', 18, "train.device", "mps is not supported"),
    ],
)
def test_a_mistake_is_answered_with_file_line_key_and_a_way_out(recipe, was, wrong, line, key, hint):
    text = recipe.read_text()
    assert was in text
    recipe.write_text(text.replace(was, wrong, 1))
    message = refusal(recipe)
    assert f"{recipe}:{line}: {key}: " in message
    assert hint in message


def test_every_mistake_is_named_at_once(recipe):
    message = refusal(recipe, "train.steps=-1", "optim.lr=1")
    assert "train.steps" in message
    assert "optim.lr" in message


@pytest.mark.parametrize(
    ("text", "line"),
    [("[train\nsteps = 1", 1), ("steps = ", 1), ("name = 'x'\n\nwhat", 3), ("a = 1\na = 2", 2), ("x = yes", 1)],
)
def test_what_is_not_toml_is_said_with_its_line(tmp_path, text, line):
    path = tmp_path / "broken.toml"
    path.write_text(text)
    assert f"{path}:{line}: this is not TOML" in refusal(path)


def test_bytes_that_are_not_text_are_refused(tmp_path):
    path = tmp_path / "broken.toml"
    path.write_bytes(b"\xff\xfe\x00name")
    assert "not a text file" in refusal(path)


def test_a_missing_recipe_is_answered_with_the_nearest_shipped_one():
    assert "llama2-7b" in refusal("llama-7b")


@pytest.mark.parametrize(
    ("override", "key", "value"),
    [
        ("train.steps=7", "train.steps", 7),
        ("parallel.partition=6-6-6-6-6-6-6-6", "parallel.partition", "6-6-6-6-6-6-6-6"),
        ("data.split=90,10,0", "data.split", "90,10,0"),
        ("optim.betas=[0.8, 0.9]", "optim.betas", [0.8, 0.9]),
        ("name=other", "name", "other"),
        ("log.tensorboard=false", "log.tensorboard", False),
    ],
)
def test_an_override_is_toml_or_else_a_string(override, key, value):
    settings = load_recipe(MIXED, [override]).settings()
    for part in key.split("."):
        settings = settings[part]
    assert str(settings) == str(value)


@pytest.mark.parametrize(
    ("overrides", "section", "key"),
    [
        (
            ["train.batch_ramp.start=16", "train.batch_ramp.increment=16", "train.batch_ramp.samples=99"],
            "train",
            "batch_ramp",
        ),
        (["train.init_from=weights"], "train", "init_from"),
        ([], "finetune", "adapter"),
    ],
)
def test_none_removes_an_optional_key_or_section(overrides, section, key):
    recipe = load_recipe("gpt2-small", [*overrides, f"{section}.{key}=none"])
    assert key not in recipe.settings().get(section, {})
    assert (section in recipe.settings()) == (section != "finetune")


def test_none_stays_a_value_of_keys_that_have_it_and_is_refused_elsewhere():
    assert load_recipe(MIXED, ["parallel.recompute=full", "parallel.recompute=none"]).parallel.recompute == "none"
    assert "train.steps: should be a valid integer" in refusal(MIXED, "train.steps=none")


@pytest.mark.parametrize(
    ("recipe", "override", "hint"),
    [
        ("llama2-7b", "model.positions=4096", "data.sequence_length sets the context"),
        ("gpt2-small", "model.rope_theta=1e4", "family gpt has no such key; remove it"),
        ("gpt2-small", "model.position=64", "did you mean model.positions?"),
    ],
)
def test_a_key_of_another_family_is_not_taken_for_a_misspelt_one(recipe, override, hint):
    assert hint in refusal(recipe, override)


def test_an_override_cannot_smuggle_in_other_keys():
    assert "train.steps" in refusal(MIXED, "train.steps=5\nname = 'other'")


def test_a_wrong_override_is_blamed_on_the_command_line():
    assert "command line: trian.steps: unknown key\n  hint: did you mean train.steps?" in refusal(
        MIXED, "trian.steps=5"
    )


def test_a_recipe_extends_another_and_blames_the_right_file(tmp_path):
    (tmp_path / "base.toml").write_text(MIXED.read_text())
    child = tmp_path / "child.toml"
    child.write_text('extends = "base.toml"\n[train]\nsteps = 9\n')
    recipe = load_recipe(child)
    assert (recipe.name, recipe.train.steps, recipe.model.layers) == ("child", 9, 48)
    child.write_text('extends = "base.toml"\n[model]\nheads = 9\n')
    assert f"{child}:3: model.heads" in refusal(child)


def test_recipes_that_extend_each_other_are_refused(tmp_path):
    (tmp_path / "a.toml").write_text('extends = "b.toml"')
    (tmp_path / "b.toml").write_text('extends = "a.toml"')
    assert "cycle" in refusal(tmp_path / "a.toml")


def test_lines_are_right_for_every_way_to_write_a_key(tmp_path):
    path = tmp_path / "odd.toml"
    path.write_text(
        'model.family = "llama"\n'  # 1
        "model.layers = 2\n"  # 2
        "model.vocab = 100\n"  # 3
        "model.hidden = 64\n"  # 4
        "model.heads = 4\n"  # 5
        'description = """\nsteps = 3\n[train]\n"""\n'  # 6 to 9
        "[data]\n"  # 10
        'train = [\n  "a",\n  "b",\n]\n'  # 11 to 14
        "split = true # a comment\n"  # 15
    )
    assert f"{path}:15: data.split" in refusal(path)


def test_a_name_that_would_leave_the_runs_folder_is_refused():
    assert re.search("name: '../x' may contain only", refusal(MIXED, "name=../x"))


@pytest.mark.parametrize(
    ("file", "name"),
    [("my recipe.toml", "my-recipe"), ("レシピ.toml", "recipe"), ("noext", "noext"), ("v1.2.toml", "v1.2")],
)
def test_a_recipe_without_a_name_takes_its_files_as_far_as_a_folder_can_be_called_that(tmp_path, file, name):
    text = MIXED.read_text().replace('name = "gpt2-xl-mixed"', "")
    (tmp_path / file).write_text("\ufeff" + text, encoding="utf-8")
    assert load_recipe(tmp_path / file).name == name


def test_a_secret_in_a_recipe_is_refused_since_recipes_are_copied_everywhere():
    with pytest.raises(UserError, match=r"data\.tokenizer: holds a secret") as error:
        load_recipe("gpt2-xl", ["data.tokenizer=https://me:sesame@hub.example/gpt2"])
    assert "sesame" not in str(error.value)


def test_a_copy_of_a_model_has_the_blocks_of_its_own_sizes():
    model = load_recipe("llama3.2-1b").model
    assert model.blocks.layers[0].mlp.ffn == 8192
    copy = model.model_copy(update={"ffn": 128, "layers": 2})
    assert [layer.mlp.ffn for layer in copy.blocks.layers] == [128, 128]

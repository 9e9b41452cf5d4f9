"""Tune files: what they may say, and what is said of those that are wrong."""

import random
import re

import pytest

from steelyard.core.errors import UserError
from steelyard.tune import command, spec, worker_loop
from steelyard.tune.defaults import tune_for
from steelyard.tune.expression import Expression, ExpressionError
from steelyard.tune.search_space import Dimension, Space

GOOD = """
recipe = "tiny.toml"
constraints = ["parallel.tensor * parallel.pipeline <= world", "train.micro_batch != 3"]

[space]
train.micro_batch = [1, 2, 3]
parallel.tensor = { choice = [1, 2] }
"parallel.pipeline" = { low = 1, high = 4, step = 3 }

[space.optim]
learning_rate = { low = 1e-4, high = 1e-1, log = true }

[[objectives]]
metric = "loss"
skip = 3

[[objectives]]
metric = "peak_memory"
"""
COMMAND = """
command = "bash train.sh --tp {tp}"

[space]
tp = [1, 2]

[[objectives]]
regex = 'ms: ([0-9.]+)'
goal = "minimize"
"""


def test_a_setting_may_be_written_dotted_quoted_or_in_a_table(in_workplace):
    (in_workplace.path / "good.toml").write_text(GOOD)
    tune = spec.load("good.toml")
    assert list(tune.space) == ["train.micro_batch", "parallel.tensor", "parallel.pipeline", "optim.learning_rate"]
    assert tune.space["train.micro_batch"].choice == [1, 2, 3]
    assert [(each.label, each.direction, each.picked) for each in tune.objectives] == [
        ("loss", "minimize", "last"),
        ("peak_memory", "minimize", "max"),
    ]
    assert spec.is_tune_file("good.toml")
    assert not spec.is_tune_file("tiny.toml")
    assert not spec.is_tune_file("gpt2-xl")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (("trials", "trails = 3"), "bad.toml:12: budget.trails: unknown key\n  hint: did you mean budget.trials?"),
        (("tp = [1, 2]", "tp = { low = 4, high = 2 }"), "bad.toml:5: space.tp: the range from 4 to 2 is empty"),
        (("tp = [1, 2]", "tp = { low = 4 }"), "bad.toml:5: space.tp: set choice = [...], or low and high"),
        (("tp = [1, 2]", "tp = { low = 0, high = 2, log = true }"), "space.tp: a logarithmic range must start above 0"),
        (("tp = [1, 2]", "tp = [1, 1]"), "bad.toml:5: space.tp: a value occurs twice"),
        (("tp = [1, 2]", "tp = []"), "bad.toml:5: space.tp.choice: "),
        (("tp = [1, 2]", "tp = { chioce = [1] }"), "bad.toml:5: space.tp.chioce: unknown key"),
        (("tp = [1, 2]", "tp = [1, 2]\nx = [1, 2]"), "bad.toml:6: space.x: the command does not use it"),
        (("{tp}", "{tp} {mbs}"), "bad.toml:2: command: {mbs} is not in the space"),
        (
            ('{tp}"\n\n[space]\ntp', '{trial}"\n\n[space]\ntrial'),
            "bad.toml:5: space.trial: {trial} is set for every trial",
        ),
        (
            ("[budget]\n", "[[objectives]]\nregex = 'ms: (.)'\nname = 'ms: ([0-9.]+)'\ngoal = 'minimize'\n[budget]\n"),
            "two objectives are",
        ),
        (("{tp}", "{tp} 'x"), "bad.toml:2: command: cannot be split into arguments"),
        (("[space]", "constraints = ['tp < mbs']\n[space]"), "bad.toml:4: constraints: 'tp < mbs': mbs is not in"),
        (("[space]", "constraints = ['tp <']\n[space]"), "not a valid expression"),
        (("[space]", "constraints = ['open(tp)']\n[space]"), "open(tp) is not allowed"),
        (("ms: (", "ms: (("), "invalid regular expression"),
        (("ms: (", "(ms): ("), "one group"),
        (('goal = "minimize"', ""), 'set goal = "maximize" or goal = "minimize"'),
        (('goal = "minimize"', 'goal = "least"'), "bad.toml:9: objectives.0.goal: "),
        (("regex", "metric = 'loss'\nregex"), "set either metric (a key of metrics.jsonl) or regex"),
        (("command =", "recipe = 'tiny.toml'\ncommand ="), "bad.toml:2: recipe: set either a recipe or a command"),
        (("[space]", "[space"), "bad.toml:4: this is not TOML"),
    ],
)
def test_a_mistake_is_told_with_its_line(tmp_path, monkeypatch, change, said):
    monkeypatch.chdir(tmp_path)
    old, new = change
    text = COMMAND + "\n[budget]\n" + ("trails = 3\n" if old == "trials" else "trials = 3\n")
    (tmp_path / "bad.toml").write_text(text.replace(old, new))
    with pytest.raises(UserError) as error:
        spec.load("bad.toml")
    assert said in str(error.value)


def test_a_key_that_no_recipe_has_is_refused_before_anything_runs(in_workplace):
    (in_workplace.path / "bad.toml").write_text(GOOD.replace("parallel.tensor =", "parallel.tensr ="))
    done = in_workplace.steelyard("tune", "bad.toml")
    assert done.returncode == 2
    assert "parallel.tensor" in done.stderr
    (in_workplace.path / "bad.toml").write_text(
        GOOD.replace("parallel.tensor", "parallel.tensr").replace("parallel.pipeline", "parallel.stages")
    )
    done = in_workplace.steelyard("tune", "bad.toml")
    assert (done.returncode, done.stdout) == (2, "")
    assert "bad.toml:7: space.parallel.tensr: not a key of a recipe" in done.stderr
    assert not (in_workplace.path / "studies").exists()


def test_what_is_no_table_is_refused_by_its_line_whatever_the_command_line_says(tmp_path):
    (tmp_path / "bad.toml").write_text("budget = 5" + COMMAND)
    with pytest.raises(UserError, match=r"bad.toml:1: budget: "):
        spec.load(tmp_path / "bad.toml", {"budget.trials": 3})


@pytest.mark.parametrize("change", [{"trial.steps": 5}, {"overrides": ["train.seed=1"]}, {"cluster": "c.toml"}])
def test_what_a_command_would_not_hear_is_refused(tmp_path, change):
    (tmp_path / "command.toml").write_text(COMMAND)
    with pytest.raises(UserError, match=f"{next(iter(change))}: is only for recipes"):
        spec.load(tmp_path / "command.toml", change)


def test_overrides_of_the_command_line_come_after_those_of_the_file(in_workplace):
    (in_workplace.path / "good.toml").write_text('overrides = ["train.seed=1"]' + GOOD)
    assert spec.load("good.toml", {"overrides": ["train.steps=3"]}).overrides == ["train.seed=1", "train.steps=3"]


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("train.stepz=3", "train.stepz: unknown key"),
        ("steps", "'steps' is not an override"),
        ("train.steps.x=3", "steps is not a section"),
    ],
)
def test_an_override_of_the_file_is_told_by_its_line_and_one_of_the_command_line_as_such(in_workplace, override, said):
    (in_workplace.path / "bad.toml").write_text(f'\noverrides = ["train.seed=1", "{override}"]' + GOOD)
    with pytest.raises(UserError, match=rf"bad.toml:2: {re.escape(said)}"):
        worker_loop.prepare(spec.load("bad.toml"))
    (in_workplace.path / "good.toml").write_text('\noverrides = ["train.seed=1"]' + GOOD)
    with pytest.raises(UserError, match=r"command line: train.stepz: unknown key"):
        worker_loop.prepare(spec.load("good.toml", {"overrides": ["train.stepz=3"]}))


@pytest.mark.parametrize(
    ("launch", "said"),
    [
        ("site = 'campus'", r"bad.toml:\d+: launch.site: is only for submitted jobs"),
        ("on = 'slrum'", r"bad.toml:\d+: launch.on: there is no backend slrum"),
        ("onn = 'slurm'", r"bad.toml:\d+: launch.onn: unknown key\n  hint: did you mean launch.on\?"),
        ("on = 'slurm'\nhosts = ['a']", r"bad.toml:\d+: launch.hosts: slurm takes no hosts"),
        ("on = 'mpi'\ntime = '1:00'", r"bad.toml:\d+: launch.time: mpi has no time limits"),
    ],
)
def test_a_launch_that_cannot_be_is_told_with_its_line(in_workplace, launch, said):
    (in_workplace.path / "bad.toml").write_text(f"nproc = 4{GOOD}\n[launch]\n{launch}\n")
    with pytest.raises(UserError, match=said):
        spec.load("bad.toml")


def test_constraints_name_the_ranks_only_where_all_trials_have_the_same(in_workplace):
    (in_workplace.path / "bad.toml").write_text(GOOD + "\n[launch]\non = 'slurm'\n")
    with pytest.raises(UserError, match=r"world is not in the space(.|\n)*nproc"):
        spec.load("bad.toml")
    assert spec.load("bad.toml", {"nproc": 4}).ranks == 4


def test_a_key_to_drop_that_no_recipe_has_is_refused(in_workplace):
    (in_workplace.path / "bad.toml").write_text('drop = ["parallel.dat"]' + GOOD)
    with pytest.raises(UserError, match=r"bad.toml:1: drop: parallel.dat is not a key of a recipe"):
        spec.load("bad.toml")


def test_values_go_into_words_and_never_become_words():
    template = command.words("bash run.sh --tp={tp} '{name} x' --json '{\"a\": 1}' {{tp}} ${HOME};")
    assert command.placeholders(template) == {"tp", "name", "HOME"}
    filled = command.filled(template, {"tp": 2, "name": "a b; rm -rf /", "HOME": True})
    assert filled == ["bash", "run.sh", "--tp=2", "a b; rm -rf / x", "--json", '{"a": 1}', "{tp}", "$true;"]


def test_braces_of_json_inside_json_are_left_alone():
    template = command.words("""x '{"zero": {"stage": {tp}}}' '{"a": {"b": 1}}' '{"c": {{tp}}}'""")
    filled = command.filled(template, {"tp": 2})
    assert filled == ["x", '{"zero": {"stage": 2}}', '{"a": {"b": 1}}', '{"c": {tp}}']


@pytest.mark.parametrize(
    ("text", "holds"),
    [
        ("a.b * c <= 8 and d in ('x', 'y')", True),
        ("a.b * c <= 7 or not d == 'x'", False),
        ("1 < a.b < c", True),
        ("max(a.b, c) == 4 if d == 'x' else False", True),
        ("c % a.b == 0", True),
        ("c / 0 > 1", False),
        ("d * 1000 == 'x'", False),
        ("-a.b < +c // 3", True),
        ("abs(a.b - c) not in [3, 4]", True),
    ],
)
def test_a_constraint_is_reckoned(text, holds):
    assert Expression(text, {"a.b", "c", "d"}).holds({"a.b": 2, "c": 4, "d": "x"}) is holds


@pytest.mark.parametrize(
    "text",
    ["__import__('os')", "a.__class__", "(lambda: 1)()", "[x for x in (1, 2)]", "a ** 9", "f'{a}'", "a if", "", "a[0]",
     "min(*a)", "max()", "a := 1", "b'x' == a", "None == a"],
)  # fmt: skip
def test_what_is_no_constraint_is_refused(text):
    with pytest.raises(ExpressionError):
        Expression(text, {"a"})


def test_the_ranks_give_way_to_a_setting_of_that_name():
    space = Space({"world": Dimension(choice=[2, 4])}, ["world <= 2"], world=1)
    assert space.grid() == [{"world": 2}]


def test_a_long_range_is_drawn_from_and_never_listed():
    space = Space({"seed": Dimension(low=0, high=1 << 60, step=2), "y": Dimension(low=0.0, high=1.0, step=1e-12)})
    assert space.grid() is None
    points = list(space.drawn(random.Random(0), 3))
    assert all(p["seed"] % 2 == 0 and 0 <= p["y"] <= 1 for p in points)
    assert space.distance(points[0], points[1]) > 0
    assert space.distributions()["y"].high == 1.0


def test_a_grid_holds_every_point_that_keeps_the_constraints():
    space = Space(
        {
            "a": Dimension(choice=[1, 2, 4]),
            "b": Dimension(low=1, high=5, step=2),
            "c": Dimension(low=0.0, high=1.0, step=0.5),
        },
        ["a * b <= world"],
        world=4,
    )
    grid = space.grid()
    assert len(grid) == 3 * len([(a, b) for a in (1, 2, 4) for b in (1, 3, 5) if a * b <= 4])
    assert {point["c"] for point in grid} == {0.0, 0.5, 1.0}
    assert space.distance({"a": 1, "b": 1, "c": 0.0}, {"a": 4, "b": 3, "c": 0.0}) == 3


def test_random_points_stay_in_their_ranges():
    space = Space(
        {
            "x": Dimension(low=1e-4, high=1e-1, log=True),
            "n": Dimension(low=2, high=64, log=True),
            "y": Dimension(low=0.0, high=2.0),
        }
    )
    assert space.grid() is None
    points = list(space.drawn(random.Random(0), 200))
    assert len(points) == 200
    assert all(1e-4 <= p["x"] <= 1e-1 and 2 <= p["n"] <= 64 and 0 <= p["y"] <= 2 for p in points)
    assert sum(p["x"] < 1e-3 for p in points) > 40
    assert all(isinstance(p["n"], int) for p in points)


def test_the_usual_space_holds_only_layouts_that_the_ranks_can_run(in_workplace):
    tune = tune_for("tiny.toml", (), 2, {"budget.trials": 7})
    assert tune.space["parallel.tensor"].choice == [1, 2]
    assert tune.budget.trials == 7
    grid = tune.searched().grid()
    assert all(2 % (point["parallel.tensor"] * point["parallel.pipeline"]) == 0 for point in grid)
    assert all(p["parallel.zero"] == 0 for p in grid if p["parallel.tensor"] * p["parallel.pipeline"] == 2)
    alone = tune_for("tiny.toml", (), 1, {})
    assert set(alone.space) == {"train.micro_batch", "parallel.recompute"}


def test_the_usual_space_keeps_what_the_command_line_says(in_workplace):
    tune = tune_for("tiny.toml", ("parallel.tensor=2", "parallel.recompute=full"), 2, {})
    grid = tune.searched().grid()
    assert {(p["parallel.tensor"], p["parallel.pipeline"], p["parallel.recompute"]) for p in grid} == {(2, 1, "full")}


def test_the_usual_space_fits_a_recipe_made_for_more_ranks():
    tune = tune_for("llama3.1-70b", (), 1, {})
    assert tune.space["parallel.tensor"].choice == [1]
    assert tune.space["parallel.pipeline"].choice == [1]

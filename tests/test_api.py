"""The public API of `import steelyard as sy`."""

import importlib
import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import steelyard as sy
from steelyard.core.errors import UserError

ROOT = Path(__file__).resolve().parent.parent
CLUSTER = """
[[nodes]]
type = "a"
count = 1
gpu = "cpu"
gpus = 2
"""


def run_python(code: str) -> None:
    """Run code in a fresh interpreter that finds this package, whatever is installed."""
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r})\n{code}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr


def test_importing_the_package_loads_no_torch_and_no_numpy():
    run_python(
        "import steelyard as sy\n"
        "assert not {'torch', 'numpy', 'pydantic'} & set(sys.modules)\n"
        "assert set(sy.__all__) <= set(dir(sy))\n"
        "sy.load_recipe('quickstart'); sy.plan; sy.load_tokenizer; sy.open_run\n"
        "assert 'torch' not in sys.modules"
    )


@pytest.mark.parametrize("name", sy.__all__)
def test_every_public_name_is_there_documented_and_no_module(name):
    importlib.import_module("steelyard.training.trainer")
    importlib.import_module("steelyard.planning.search")
    importlib.import_module("steelyard.finetuning.sft")
    assert callable(getattr(sy, name))
    assert getattr(sy, name).__doc__
    assert f"`{name}`" in (ROOT / "docs" / "api.md").read_text(encoding="utf-8").replace("(", "`")


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        _ = sy.trian


@pytest.mark.parametrize("family", ["llama", "gpt"])
def test_a_built_model_has_no_uninitialised_parameter(family):
    recipe = sy.load_recipe(
        {
            "name": "tiny",
            "model": {"family": family, "layers": 2, "hidden": 32, "heads": 4, "vocab": 97},
            "data": {"sequence_length": 16},
        }
    )
    torch.use_deterministic_algorithms(True)  # Memory that nothing was written to is NaN then.
    try:
        network, again, other = sy.build_model(recipe), sy.build_model(recipe), sy.build_model(recipe, seed=7)
    finally:
        torch.use_deterministic_algorithms(False)
    parameters = dict(network.named_parameters())
    assert all(parameter.isfinite().all() for parameter in parameters.values())
    norms = [parameter for name, parameter in parameters.items() if name.endswith("norm.weight")]
    assert len(norms) == 5
    assert all((norm == 1).all() for norm in norms)
    assert all(torch.equal(parameter, dict(again.named_parameters())[name]) for name, parameter in parameters.items())
    assert not torch.equal(network.embed.weight, other.embed.weight)


@pytest.fixture
def trained(in_workplace, tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    bpe = tokenizers.Tokenizer(tokenizers.models.WordLevel({f"w{n}": n for n in range(97)}, unk_token="w0"))
    bpe.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    folder = Path("words")
    folder.mkdir(exist_ok=True)
    bpe.save(str(folder / "tokenizer.json"))
    return sy.train(sy.load_recipe("tiny.toml", ["train.steps=4", "data.tokenizer=words"]), tmp_path / "run")


@pytest.mark.slow
def test_a_run_is_trained_opened_and_loaded(trained, tmp_path):
    run = sy.open_run(trained.path)
    assert (run.state, run.recipe.train.steps) == ("finished", 4)
    columns = run.metrics
    assert len({len(column) for column in columns.values()}) == 1
    records = [json.loads(line) for line in (run.path / "metrics.jsonl").read_text().splitlines()]
    assert columns["step"] == [record["step"] for record in records]
    assert columns["valid_loss"] == [record.get("valid_loss") for record in records]
    assert run.verdict.level == "ok"
    assert run.report(tmp_path / "page.html").read_text().startswith("<!")
    model = sy.load_model(run.path, device="cpu")
    text = " ".join(f"w{n}" for n in range(1, 60))
    assert 1 < model.perplexity(text) < 1000
    assert model.generate("w1 w2 w3", max_tokens=5, temperature=0).startswith("w1 w2 w3")
    written = sy.convert(run.path, tmp_path / "hf", dtype="fp32")
    assert written["format"] == "hf"
    again = sy.load_model(tmp_path / "hf", device="cpu")
    assert math.isclose(again.perplexity(text), model.perplexity(text), rel_tol=1e-5)
    report = sy.prune(tmp_path / "hf", tmp_path / "pruned", method="magnitude", device="cpu")
    assert report["sparsity"] == 0.5
    assert sy.load_model(tmp_path / "pruned", device="cpu").perplexity(text) != model.perplexity(text)


@pytest.mark.slow
def test_the_perplexity_is_that_of_the_command(trained, tmp_path):
    from steelyard.evaluate.perplexity import PerplexityRequest, perplexity

    text = " ".join(f"w{n % 97}" for n in range(100))
    (tmp_path / "text.txt").write_text(text)
    request = PerplexityRequest(str(trained.path), str(tmp_path / "text.txt"), length=16, device="cpu")
    ours = sy.load_model(trained.path, device="cpu").perplexity(text, sequence_length=16)
    assert math.isclose(ours, perplexity(request)["perplexity"], rel_tol=1e-9)


def test_plans_have_the_best_first_and_name_what_is_missing(in_workplace):
    Path("cluster.toml").write_text(CLUSTER)
    found = sy.plan("tiny.toml", "cluster.toml", top=3)
    seconds = [each.seconds for each in found.plans]
    assert seconds == sorted(seconds)
    with pytest.raises(UserError, match="the price of a is not known"):
        sy.plan("tiny.toml", "cluster.toml", objective="cost")
    with pytest.raises(UserError, match="objective is 'speed'"):
        sy.plan("tiny.toml", "cluster.toml", objective="speed")


def test_a_format_that_nobody_writes_is_refused(tmp_path):
    with pytest.raises(UserError, match="to is 'gguf'"):
        sy.convert(tmp_path, tmp_path / "out", to="gguf")

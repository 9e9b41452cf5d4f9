"""The family of docs/guide-models.md, in a file outside the package, trains, converts, prunes, plans and generates."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import TINY, write_tokens

ROOT = Path(__file__).parents[2]
MODEL = "model={family='toy', layers=2, hidden=32, heads=4, kv_heads=2, vocab=300}"
CLUSTER = '[[nodes]]\ntype = "a"\ncount = 1\ngpus = 2\ngpu = "a100-80"\n'

pytestmark = pytest.mark.slow


@pytest.fixture
def steelyard(tmp_path, monkeypatch):
    text = (ROOT / "docs/guide-models.md").read_text()
    place = tmp_path / "package"
    entry = place / "toy_family-1.0.dist-info"
    entry.mkdir(parents=True)
    (place / "toy_family.py").write_text(re.search(r"```python\n(.*?)```", text, re.S)[1])
    (entry / "METADATA").write_text("Metadata-Version: 2.1\nName: toy-family\nVersion: 1.0\n")
    (entry / "entry_points.txt").write_text("[steelyard.families]\ntoy = toy_family\n")
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{place}")
    write_tokens(tmp_path / "tokens_text_document")
    (tmp_path / "tiny.toml").write_text(TINY)
    (tmp_path / "cluster.toml").write_text(CLUSTER)
    (tmp_path / "text.txt").write_text("the weight on a steelyard moves along the arm\n" * 50)

    def run(*words):
        done = subprocess.run(
            [sys.executable, "-m", "steelyard", *words], cwd=tmp_path, capture_output=True, text=True, timeout=600
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


def test_a_family_in_one_file_works_everywhere(steelyard, tmp_path):
    steelyard("train", "tiny.toml", MODEL, "train.steps=4", "--run", "run")
    words = ["--input", "text.txt", "--model-prefix", "bytes", "--vocab-size", "300", "--type", "byte-bpe"]
    steelyard("tokenizer", "train", *words)
    steelyard("checkpoint", "convert", "run", "hf", "--to", "hf", "--tokenizer", "bytes")
    assert json.loads((tmp_path / "hf/config.json").read_text())["architectures"] == ["ToyForCausalLM"]
    assert json.loads(steelyard("checkpoint", "diff", "run", "hf", "--json"))["differ"] is False
    steelyard("prune", "hf", "pruned", "--method", "magnitude")
    plans = json.loads(steelyard("plan", "--model", "tiny.toml", "--cluster", "cluster.toml", "--set", MODEL, "--json"))
    assert plans["plans"]
    said = json.loads(steelyard("generate", "pruned", "--prompt", "the", "--max-tokens", "4", "--json"))
    assert 0 < said["tokens"] <= 4

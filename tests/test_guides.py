"""The guides, at small size: their commands in order, with files this test makes."""

import argparse
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import typing
from pathlib import Path

import pytest
import torch
import transformers

from steelyard.checkpoint.formats.write import Target
from steelyard.checkpoint.formats.write import convert as to_format
from steelyard.core.recipe import load_recipe
from steelyard.core.run import Run
from steelyard.text import tokenizer as tokenizers
from steelyard.text.convert_corpus import convert
from tests import preloaded
from tests.checkpoint.models import Held
from tests.conftest import write_documents
from tests.hub import TOKEN, USER

DOCS = Path(__file__).parents[1] / "docs"
SMALL = "train.steps=2 train.global_batch=2 train.micro_batch=1 model.layers=1 model.hidden=32 model.heads=2"


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A folder with a text, a GPT-2 style vocabulary, and what a download would bring."""
    monkeypatch.chdir(tmp_path)

    lines = [
        line for module in (subprocess, argparse, typing) for line in Path(module.__file__).read_text().splitlines()
    ]
    Path("botchan.txt").write_text("\n".join(lines))
    trained = tokenizers.train_byte_bpe(lines, 600)
    trained.save(Path("path/to/llama-2-7b"))
    model = json.loads(Path("path/to/llama-2-7b/tokenizer.json").read_text())["model"]
    Path("gpt2-vocab.json").write_text(json.dumps(model["vocab"]))
    Path("gpt2-merges.txt").write_text("#version: 0.2\n" + "\n".join(" ".join(m) for m in model["merges"]) + "\n")
    Path("data").mkdir()
    for name in ("wikitext-2-raw-v1", "wikitext-103-v1"):
        for split in ("train", "validation", "test"):
            convert([Path("botchan.txt")], Path(f"data/{name}.{split}.jsonl"))
    Path("my-recipe.toml").write_text('[model]\nfamily = "llama"\nlayers = 1\nhidden = 32\nheads = 2\nvocab = 600\n')
    return tmp_path


def commands(guide: str) -> list[str]:
    """Every steelyard line of a guide's code blocks."""
    blocks = (DOCS / guide).read_text().split("```sh\n")[1:]
    return [line for block in blocks for line in block.split("```")[0].splitlines() if line.startswith("steelyard ")]


def test_guides_followed_in_one_folder_do_not_overwrite_each_others_files():
    written: dict[str, set[str]] = {}
    for guide in DOCS.glob("guide-*.md"):
        for line in commands(guide.name):
            words = shlex.split(line)
            for option in {"--output-prefix", "--model-prefix"}.intersection(words):
                written.setdefault(words[words.index(option) + 1], set()).add(line)
            if words[1] in ("train", "sft") and "--run" in words:
                written.setdefault(words[words.index("--run") + 1], set()).add(line)
    assert len(written) > 10
    assert {name: lines for name, lines in written.items() if len(lines) > 1} == {}


@pytest.mark.slow
def test_the_guide_to_data_works_as_written(place):
    lines = commands("guide-data.md")
    assert len(lines) >= 10
    for line in lines:
        small = line.replace("4096", "64")
        if " train " in f"{small} " and "tokenizer train" not in small:
            small += f" {SMALL} data.sequence_length=64 model.vocab=600"
        words = shlex.split(small)[1:]
        done = preloaded.run([sys.executable, "-m", "steelyard", *words], capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, f"{small}\n{done.stderr}"
    assert "0 of" in preloaded.run(
        [sys.executable, "-m", "steelyard", "tokenizer", "export", "botchan.model", "again", "--check", "botchan.txt"],
        capture_output=True, text=True, timeout=600,
    ).stdout  # fmt: skip


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_guide_to_publishing_works_as_written(place, hub):
    (place / "token.txt").write_text(TOKEN)
    environment = os.environ | hub.environment(place)
    del environment["HF_TOKEN"]
    lines = commands("guide-publish.md")
    assert len(lines) >= 10
    for line in lines:
        small = line.replace("2000", "600").replace("you/", f"{USER}/").replace("train.steps=1000", SMALL)
        small += " data.sequence_length=64 train.device=cpu" if " train gpt2" in small else ""
        command = [sys.executable, "-m", "steelyard", *shlex.split(small)[1:]]
        done = preloaded.run(command, capture_output=True, text=True, timeout=600, env=environment)
        assert done.returncode == 0, f"{small}\n{done.stderr}"
    first, second = (hub.model(f"{USER}/gpt_0.125B_step1000{rest}") for rest in ("", "_openassistant"))
    assert (first.private, second.private) == (True, False)
    assert first.files["model.safetensors"] == second.files["model.safetensors"]
    assert b"perplexity" in first.files["README.md"]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_guide_to_tuning_works_as_written(place, hub):
    environment = os.environ | hub.environment(place)
    talk = "### Human: Write the word {0}.### Assistant: The word is {0}.### Human: Once more.### Assistant: {0}"
    rows = [{"text": talk.format(word)} for word in ("parse", "self", "return", "value", "import", "class") * 6]
    Path("oasst.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    lines = commands("guide-finetune.md")
    assert len(lines) >= 10
    for line in lines:
        small = line.replace("2000", "600").replace("you/", f"{USER}/").replace("train.steps=1000", SMALL)
        small = small.replace("data.sequence_length=1024", "data.sequence_length=64 train.device=cpu")
        small += " data.sequence_length=64 train.device=cpu" if " train gpt2" in small else ""
        command = [sys.executable, "-m", "steelyard", *shlex.split(small)[1:]]
        done = preloaded.run(command, capture_output=True, text=True, timeout=600, env=environment)
        assert done.returncode == 0, f"{small}\n{done.stderr}"
    base, tuned = (hub.model(f"{USER}/gpt_0.125B{rest}") for rest in ("", "_openassistant"))
    assert base.files["model.safetensors"] != tuned.files["model.safetensors"]
    assert b"### Response:" in tuned.files["chat_template.jinja"]


@pytest.mark.slow
def test_the_guide_to_experts_works_as_written(place):
    Path("quickstart").mkdir()
    convert([Path("botchan.txt")], Path("quickstart/corpus.jsonl"))  # less text than quickstart would collect
    lines = commands("guide-experts.md")
    assert len(lines) >= 7
    for line in lines:
        small = re.sub(r"train\.steps=\d+", "train.steps=2", line)
        small += " train.steps=4" if "quickstart" in small and "train.steps" not in small else ""
        small += " eval.batches=1 data.sequence_length=64" if " train " in small or " quickstart " in small else ""
        command = [sys.executable, "-m", "steelyard", *shlex.split(small)[1:]]
        done = preloaded.run(command, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, f"{small}\n{done.stderr}"
    assert "Expert load" in Path("runs/experts/report.html").read_text()
    network = transformers.AutoModelForCausalLM.from_pretrained("hf/experts")
    assert type(network).__name__ == "MixtralForCausalLM"


@pytest.mark.slow
def test_the_guide_to_planning_works_as_written(place):
    Path("cluster.toml").write_text((DOCS / "guide-plan.md").read_text().split("```toml\n")[1].split("```")[0])
    Path("sinfo.txt").write_text("n060|gpu2*|gpu:a10:4(S:0-1)\nn070|gpu1|gpu:a100:4\n")
    write_documents("tokens_text_document", [list(range(60))] * 40, 97)
    Path("my.toml").write_text(
        'extends = "gpt2-small"\nname = "my"\n[data]\ntrain = "tokens_text_document"\nsequence_length = 16\n'
        "[model]\nlayers = 2\nhidden = 32\nheads = 2\nvocab = 97\n[train]\nsteps = 6\nglobal_batch = 4\n"
        'micro_batch = 2\nprecision = "fp32"\ndevice = "cpu"\n[log]\nevery = 1\n'
    )
    Path("laptop.toml").write_text('[[nodes]]\ntype = "laptop"\ncount = 1\ngpu = "cpu"\ngpus = 2\n')
    lines = commands("guide-plan.md")
    assert len(lines) == 8
    for line in lines:
        small = line.replace("--nproc 32", "--nproc 2")
        if "my.toml" in line or "--check" in line:  # What runs here is planned for here.
            small = small.replace("cluster.toml", "laptop.toml")
        done = preloaded.run(
            [sys.executable, "-m", "steelyard", *shlex.split(small)[1:]], capture_output=True, text=True, timeout=600
        )
        assert done.returncode == 0, f"{small}\n{done.stderr}"
    assert "measured" in done.stdout
    assert "memory of the fullest rank" in done.stdout
    assert "phase of a step" in done.stdout


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_guide_to_tuning_settings_works_as_written(place):
    """Two ranks of a toy in the shape of the 70B, and a script that prints Megatron's lines; a trial or two of each."""
    layout, script = (text.split("```")[0] for text in (DOCS / "guide-tune.md").read_text().split("```toml\n")[1:])
    write_documents("data/llama3_arxiv_text_document", [list(range(200))] * 20, 600)
    Path("llama.toml").write_text(
        'name = "llama3.1-8b"\n[model]\nfamily = "llama"\nlayers = 2\nhidden = 32\nheads = 2\nvocab = 600\n'
        '[train]\nglobal_batch = 4\ndevice = "cpu"\n[data]\nsequence_length = 16\n[optim]\nwarmup_steps = 1\n'
    )
    small = layout.replace('"llama3.1-8b"', '"llama.toml"').replace("nproc = 8", "nproc = 2")
    Path("layout.toml").write_text(small.replace("trials = 20", "trials = 1").replace("skip = 3", "skip = 1"))
    Path("script.toml").write_text(script.replace("trials = 20", "trials = 2"))
    Path("train_70b.sh").write_text(
        'for i in 1 2 3 4 5 6; do echo " iteration $i | elapsed time per iteration (ms): $((100 * $2 + i)).5 |"; done\n'
    )
    lines = commands("guide-tune.md")
    assert len(lines) == 9
    for line in lines:
        reported = re.sub(r"llama3.1-\w+ data", "llama.toml data", line).replace("--nproc 8", "--nproc 2")
        reported = reported.replace("--on slurm --cluster cluster.toml --nproc 16", "--on local --nproc 2")
        reported = reported.replace("--workers 4", "")
        reported = reported.replace("--trials 30", "--trials 1 --steps 7").replace("--trials 24", "--trials 1")
        reported = reported.replace("train.steps=1000", "train.steps=2")
        command = [sys.executable, "-m", "steelyard", *shlex.split(reported)[1:]]
        done = preloaded.run(command, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, f"{reported}\n{done.stderr}"
    assert Run.open("runs/tuned").state == "finished"
    assert json.loads(next(Path("studies/cluster").glob("trials/*/run/launch.json")).read_text())["ranks"] == 2
    for study in ("llama3.1-8b", "layout", "script"):
        assert "Best settings" in Path(f"studies/{study}/report.html").read_text()
    assert Path("studies/script/best.txt").read_text().splitlines()[1].startswith("bash train_70b.sh --tp ")


@pytest.mark.slow
def test_the_guide_to_evaluation_works_as_written(place):
    lines = commands("guide-evaluate.md")
    assert len(lines) >= 8
    for line in lines:
        small = line.replace("4096", "64")
        if small.startswith("steelyard train "):
            small += f" {SMALL} data.split=1,0,0"
        done = preloaded.run(
            [sys.executable, "-m", "steelyard", *shlex.split(small)[1:]], capture_output=True, text=True, timeout=600
        )
        assert done.returncode == 0, f"{small}\n{done.stderr}"
        if small.startswith("steelyard eval"):
            assert "perplexity" in done.stdout
        if small.startswith("steelyard generate"):
            assert "Once upon a time," in done.stdout


@pytest.mark.slow
def test_the_guide_to_troubleshooting_works_as_written(tmp_path, monkeypatch):
    """On a cluster of one machine: an ssh that stays here, and an apptainer whose image is this machine."""
    monkeypatch.chdir(tmp_path)
    Path("bin").mkdir()
    here = 'while [ "$1" != -- ]; do shift; done; exec sh -c "$3"'
    inside = f'while [ "$1" != python3 ]; do shift; done; shift; exec {sys.executable} "$@"'
    for name, script in {"ssh": here, "apptainer": inside}.items():
        Path("bin", name).write_text(f"#!/bin/sh\n{script}\n")
        Path("bin", name).chmod(0o755)
    Path("pytorch_24.01-py3.sif").touch()
    Path("runs/example/logs").mkdir(parents=True)
    error = "ImportError: libnccl.so.2: cannot open shared object file: No such file or directory"
    Path("runs/example/logs/n060.err").write_text(f"  warnings.warn(\n{error}\n")
    environment = os.environ | {"PATH": f"{tmp_path}/bin:{os.environ['PATH']}", "HOME": str(tmp_path / "home")}
    environment |= {"XDG_CONFIG_HOME": str(tmp_path / "config"), "XDG_DATA_HOME": str(tmp_path / "data")}
    lines = commands("guide-troubleshooting.md")
    assert len(lines) == 7
    said = {}
    for line in lines:
        small = line if line == "steelyard doctor" or "--container" in line or "explain" in line else f"{line} --quick"
        done = preloaded.run(
            [sys.executable, "-P", "-m", "steelyard", *shlex.split(small)[1:]],
            capture_output=True, text=True, timeout=600, env=environment,
        )  # fmt: skip
        said[line] = done.stdout
        assert done.returncode == 0, f"{small}\n{done.stdout}{done.stderr}"
    assert "2 ranks" in said["steelyard doctor"]
    assert "each of 2 reaches the next" in said["steelyard doctor --nodes node1,node2"]
    assert "libnccl.so.2" in said[lines[-1]]
    assert "[campus.container]" in (tmp_path / "config/steelyard/sites.toml").read_text()


def test_the_page_on_launch_scripts_shows_what_happens(tmp_path):
    page = (DOCS / "from-megatron.md").read_text()
    script, recipe, said = (page.split(f"```{kind}\n")[1].split("```")[0] for kind in ("bash", "toml", "text"))
    (tmp_path / "medium.sh").write_text(script)
    [line] = commands("from-megatron.md")
    words = shlex.split(line)[1:]
    command = [sys.executable, "-m", "steelyard", *words]
    done = preloaded.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "medium.toml").read_text() == recipe
    assert done.stderr == said


@pytest.mark.slow
def test_the_guide_to_conversion_works_as_written(place):
    """The 70B shape with everything but its depth and width: eight key-value heads, two stages, RoPE scaling."""
    shape = load_recipe("llama3.1-70b").model.model_copy(
        update={"layers": 2, "hidden": 64, "head_dim": 8, "heads": 16, "ffn": 128, "vocab": 600}
    )
    held = Held(shape, dtype=torch.bfloat16)
    held.tokenizer = "path/to/llama-2-7b"
    to_format(held, Path("models/Llama-3.1-70B"), Target("hf"))
    write_documents("data/llama3_arxiv_text_document", [list(range(200))] * 20, 600)
    small = (
        "train.steps=1 train.global_batch=2 train.micro_batch=1 model.layers=2 model.hidden=64 model.heads=16 "
        "model.head_dim=8 model.ffn=128 model.vocab=600 data.sequence_length=64 parallel.tensor=1 parallel.pipeline=1 "
        "parallel.sequence_parallel=false train.device=cpu train.precision=fp32"
    )
    for line in commands("guide-convert.md"):
        words = shlex.split(f"{line} {small}" if " train " in line else line)[1:]
        done = preloaded.run([sys.executable, "-m", "steelyard", *words], capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, f"{line}\n{done.stderr}"
        if " diff " in line:
            assert "largest_difference       0.0" in done.stdout


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_guide_to_extension_works_as_written(place):
    """A small model with an English vocabulary learns the Japanese text of the guide."""
    sizes = {"layers": 2, "hidden": 48, "heads": 3, "kv_heads": 1, "head_dim": 16, "ffn": 64, "vocab": 600}
    held = Held(load_recipe("smollm2-135m").model.model_copy(update=sizes), dtype=torch.bfloat16)
    held.tokenizer = "path/to/llama-2-7b"
    to_format(held, Path("models/SmolLM2-135M"), Target("hf"))
    Path("japanese.txt").write_text((DOCS / "guide-extend.md").read_text().split("```text\n")[1].split("```")[0] * 20)
    small = " ".join(f"model.{key}={value}" for key, value in sizes.items() if key != "vocab")
    small += " train.global_batch=4 train.micro_batch=4 data.sequence_length=32 train.device=cpu eval.batches=1"
    lines = commands("guide-extend.md")
    assert len(lines) == 10
    said = {}
    for line in lines:
        reported = line.replace("4000", "100").replace("53152", "700").replace("train.steps=2000", "train.steps=4")
        reported += f" {small}" if " train " in reported else ""
        reported += " --json" if "tokenizer info" in reported else ""
        command = [sys.executable, "-m", "steelyard", *shlex.split(reported)[1:]]
        done = preloaded.run(command, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, f"{reported}\n{done.stderr}"
        said[line] = done.stdout
    before, _, after = (said[line] for line in lines[:3])
    assert json.loads(after)["tokens"] < 0.5 * json.loads(before)["tokens"]
    assert json.loads(after)["decoded"] == "日本語の文章を読む"
    assert "100 new pieces, 600 rows before, 700 now" in said[lines[3]]
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained("models/smollm2-ja-trained")
    assert model.get_input_embeddings().weight.shape == (700, 48)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_guide_to_sparsity_works_as_written(place):
    """Prune, learn, measure, go on with another text, measure, export, load in transformers: the shape of Llama 2."""
    sizes = {"layers": 2, "hidden": 32, "heads": 4, "kv_heads": 4, "head_dim": 8, "ffn": 64, "vocab": 600}
    held = Held(load_recipe("llama2-7b").model.model_copy(update=sizes))
    held.tokenizer = "path/to/llama-2-7b"
    to_format(held, Path("models/Llama-2-7b"), Target("hf"))
    convert([Path("botchan.txt")], Path("data/c4.jsonl"))
    shutil.copy(DOCS.parent / "examples" / "learned-masks.toml", "learned-masks.toml")
    small = " ".join(f"model.{key}={value}" for key, value in sizes.items())
    small += " train.steps=4 train.global_batch=2 data.sequence_length=64 parallel.tensor=2 eval.batches=1 log.every=1"
    small += " train.device=cpu train.precision=fp32 checkpoint.every=0"
    perplexities = []
    for line in commands("guide-sparsity.md"):
        reported = line.replace("4096", "64").replace("--nproc 4", "--nproc 2")
        reported += " --samples 4 --sequence-length 64" if " prune " in reported else ""
        words = shlex.split(reported)[1:]
        if words[0] == "train":
            words = [*words[:2], *shlex.split(small), *(word for word in words[2:] if word != "train.steps=200")]
        command = [sys.executable, "-m", "steelyard", *words, *(["--json"] if words[:2] == ["eval", "ppl"] else [])]
        done = preloaded.run(command, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, f"{reported}\n{done.stderr}"
        if words[:2] == ["eval", "ppl"]:
            perplexities.append(json.loads(done.stdout)["perplexity"])
    dense, one_shot, learned, continued, without = perplexities
    assert without == dense
    assert len({dense, one_shot, learned, continued}) == 4
    _loads_with_zeros(Path("Llama-2-7b-2of4"), held)
    temperatures = [record["temperature"] for record in Run.open("runs/wikitext").metrics() if "loss" in record]
    assert (temperatures[0], temperatures[-1]) == (2.0, 0.05)


def _loads_with_zeros(folder: Path, base: Held) -> None:
    """As a user of transformers has it: half of every group, and the other half as the base had it."""
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    weight = model.model.layers[1].mlp.down_proj.weight
    assert (weight.unflatten(1, (-1, 4)).count_nonzero(2) == 2).all()
    kept = weight != 0
    assert torch.equal(weight[kept], base.tensor("layers.1.mlp.down.weight")[kept])
    assert model(torch.tensor([[1, 2, 3]])).logits.isfinite().all()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_guide_to_profiling_works_as_written(place):
    write_documents("tokens_text_document", [list(range(60))] * 40, 97)
    Path("my-recipe.toml").write_text(
        'name = "my-recipe"\n[data]\ntrain = "tokens_text_document"\nsplit = "1,0,0"\nsequence_length = 16\n'
        '[model]\nfamily = "gpt"\nlayers = 2\nhidden = 32\nheads = 2\nvocab = 97\n[train]\nsteps = 16\n'
        'global_batch = 4\nmicro_batch = 1\nprecision = "fp32"\ndevice = "cpu"\n'
    )
    lines = commands("guide-profile.md")
    assert len(lines) == 8
    said = []
    for line in lines:
        command = [
            sys.executable,
            "-m",
            "steelyard",
            *shlex.split(line.replace("10-12", "3-5").replace("10-11", "3-4"))[1:],
        ]
        done = preloaded.run(command, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, f"{line}\n{done.stderr}"
        said.append(done.stdout)
    assert "Rank 0: 2 steps" in said[0]
    assert "Of 2 ranks" in said[1]
    assert "Rank 1: 1 step," in said[2]
    assert "Peak memory" in said[3]
    assert "Timeline of my-recipe-profile-2" in Path("before-and-after.html").read_text()
    assert 'id="spans-0"' in Path("runs/timed/report.html").read_text()

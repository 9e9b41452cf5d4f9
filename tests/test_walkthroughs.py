"""The pages that go through a whole set-up (docs/from-*.md): their commands in order, at small size.

Dry runs of training and of jobs are run as written, at the size of the page. W&B runs offline.
"""

import gzip
import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import sentencepiece
import torch

from steelyard.checkpoint.formats.write import Target
from steelyard.checkpoint.formats.write import convert as to_format
from steelyard.core.recipe import load_recipe
from steelyard.core.run import Run
from steelyard.text.convert_corpus import convert
from tests import preloaded
from tests.checkpoint.models import Held
from tests.conftest import write_documents
from tests.hub import TOKEN, USER, Hub
from tests.launch.test_guides import program
from tests.test_guides import DOCS, SMALL, commands, place  # noqa: F401

pytestmark = pytest.mark.usefixtures("place")
ARXIV = "arxiv_024de5df-1b7f-447c-8c3a-51407d8d6732.jsonl"
# The script that the page on two GPUs imports, with the structure and the settings of Megatron-LM's.
SCRIPT = """
GPUS_PER_NODE=2
NUM_NODES=1
CHECKPOINT_PATH=$1; TENSORBOARD_LOGS_PATH=$2; VOCAB_FILE=$3; MERGE_FILE=$4; DATA_PATH=$5
SIZES=(--num-layers 12 --hidden-size 512 --num-attention-heads 8 --seq-length 1024 --max-position-embeddings 1024)
STEPS=(--micro-batch-size 1 --global-batch-size 1536 --rampup-batch-size 16 16 5859375 --train-iters 500000 --fp16
    --lr 6.0e-5 --lr-decay-style cosine --min-lr 6.0e-6 --lr-warmup-fraction .001 --lr-decay-iters 430000)
torchrun --nproc_per_node $GPUS_PER_NODE --nnodes $NUM_NODES pretrain_gpt.py ${SIZES[@]} ${STEPS[@]} \\
    --tensor-model-parallel-size 1 --pipeline-model-parallel-size 1 --data-path $DATA_PATH --vocab-file $VOCAB_FILE \\
    --merge-file $MERGE_FILE --tensorboard-dir $TENSORBOARD_LOGS_PATH --save $CHECKPOINT_PATH --load $CHECKPOINT_PATH
"""


@pytest.fixture
def environment(tmp_path, monkeypatch, hub) -> dict[str, str]:
    """This machine's hub, a home of its own, and W&B without a network."""
    own = hub.environment(tmp_path) | {"WANDB_MODE": "offline", "XDG_CONFIG_HOME": str(tmp_path / "config")}
    (tmp_path / "config/steelyard").mkdir(parents=True)
    for name, value in own.items():
        monkeypatch.setenv(name, value)
    return dict(os.environ)


def shorten(path: str, lines: int = 40) -> None:
    """Keep the first lines of a text, so that measuring on it is quick."""
    Path(path).write_text("".join(Path(path).read_text().splitlines(keepends=True)[:lines]))


def block(page: str, number: int = 0) -> str:
    """A recipe, cluster file or site of a page."""
    return (DOCS / page).read_text().split("```toml\n")[1 + number].split("```")[0]


def follow(page: str, small: Callable[[str], str], environment: dict[str, str]) -> dict[str, str]:
    """Run a page's commands except doctor's, and return what each printed, by the line of the page.

    What doctor finds depends on the machine; the test of the guide to troubleshooting runs it.
    """
    said = {}
    for line in (line for line in commands(page) if not line.startswith("steelyard doctor")):
        done = preloaded.run(
            [sys.executable, "-P", "-m", "steelyard", *shlex.split(small(line), comments=True)[1:]],
            capture_output=True, text=True, timeout=600, env=environment,
        )  # fmt: skip
        assert done.returncode == 0, f"{small(line)}\n{done.stdout}{done.stderr}"
        said[line] = done.stdout
    return said


def of(said: dict[str, str], *words: str) -> str:
    """What the first command with these words printed."""
    return next(text for line, text in said.items() if all(word in line for word in words))


def publish_llama(hub: Hub, recipe: str, name: str, **sizes: int) -> Held:
    """A small model in the shape of a shipped recipe, on the hub under the name of the large one."""
    held = Held(load_recipe(recipe).model.model_copy(update={"layers": 2, "vocab": 600, **sizes}))
    held.tokenizer = "path/to/llama-2-7b"
    to_format(held, Path("published"), Target("hf"))
    for path in Path("published").iterdir():
        hub.add("models", name, path.name, path.read_bytes())
    return held


@pytest.mark.slow
def test_the_page_on_two_gpus_works_as_written(environment):
    page = "from-megatron-two-gpus.md"
    Path("gpt-12x512.toml").write_text(block(page))
    Path("train_gpt3_175b_distributed.sh").write_text(SCRIPT)
    shorten("data/wikitext-2-raw-v1.test.jsonl")

    def small(line: str) -> str:
        if " train " in line and "--dry-run" not in line:
            return f"{line} {SMALL} model.vocab=600 data.sequence_length=64 eval.batches=1 train.device=cpu"
        return line.replace("--sequence-length 1024", "--sequence-length 64")

    said = follow(page, small, environment)
    assert "2 ranks" in of(said, "--dry-run")
    assert "fits" in of(said, "--dry-run")
    model, parallel = load_recipe("imported.toml").model, load_recipe("imported.toml").parallel
    assert (model.layers, model.hidden, model.heads, parallel.data) == (12, 512, 8, 2)
    assert "perplexity" in of(said, "eval ppl")
    run = Run.open("runs/gpt-12x512")
    assert run.state == "finished"
    assert "slowest rank" in of(said, "watch")  # Either of the two, as it happens.
    assert list((run.path / "wandb").glob("offline-run-*"))
    assert list(run.path.rglob("events.out.tfevents*"))


@pytest.mark.slow
def test_the_page_on_deepspeed_works_as_written(environment, hub):
    Path("token.txt").write_text(TOKEN)
    del environment["HF_TOKEN"]
    convert([Path("botchan.txt")], Path("data", ARXIV))
    shorten("botchan.txt", 2000)
    talk = "### Human: Write the word {0}.### Assistant: The word is {0}."
    rows = [{"text": talk.format(word)} for word in ("parse", "self", "return", "value", "import", "class") * 6]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    hub.add("datasets", "timdettmers/openassistant-guanaco", "train.jsonl", text.encode())

    def small(line: str) -> str:
        if "--dry-run" in line:
            return line
        line = line.replace("2000", "600").replace("you/", f"{USER}/").replace("2048", "64")
        if " train gpt-" in line:
            return f"{line.replace('train.steps=1000', SMALL)} data.sequence_length=64 model.positions=64"
        return f"{line} train.global_batch=8 train.device=cpu" if " sft --" in line else line

    said = follow("from-megatron-deepspeed.md", small, environment)
    assert "fits" in of(said, "--dry-run")
    loaded = sentencepiece.SentencePieceProcessor(model_file="botchan-0.125B.model")
    assert loaded.unk_id() not in loaded.encode(r"\alpha 数 {x}")
    base, tuned = (hub.model(f"{USER}/gpt_0.125B_global_step1000{rest}") for rest in ("", "_openassistant"))
    assert base.files["model.safetensors"] != tuned.files["model.safetensors"]
    for run in ("gpt_0.125B_arxiv", "gpt_0.125B_openassistant"):
        assert list(Path("runs", run, "wandb").glob("offline-run-*"))
        assert run in Path("gpt_0.125B.html").read_text()


@pytest.mark.slow
def test_the_page_on_mpirun_works_as_written(environment, hub):
    """On two ranks of this machine where the page has 16 of two hosts."""
    page = "from-megatron-mpirun.md"
    Path("config/steelyard/sites.toml").write_text(block(page))
    sizes = {"hidden": 64, "head_dim": 8, "heads": 16, "ffn": 128}
    publish_llama(hub, "llama3.1-70b", "meta-llama/Llama-3.1-70B", **sizes)
    Path("datasets").mkdir()
    convert([Path("botchan.txt")], Path("datasets", ARXIV))
    toy = " ".join(f"model.{key}={value}" for key, value in (sizes | {"layers": 2, "vocab": 600}).items())
    toy += " train.global_batch=2 data.sequence_length=16 optim.warmup_steps=1 train.device=cpu train.precision=fp32"
    two = f"{toy} parallel.tensor=2 parallel.pipeline=1"

    def small(line: str) -> str:
        if "--dry-run" in line:
            return line
        if " submit " in line:
            line = line.replace(" submit ", " train ").replace("train.steps=100", "train.steps=2")
            return f"{line.replace('--on mpi --name llama-70b', '--nproc 2 --run runs/llama-70b')} {two} eval.batches=1"
        if " tune llama" in line:
            line = line.replace("--on mpi --nproc 16", "--nproc 2").replace("--trials 30", "--trials 1 --steps 6")
            return f"{line} {two} parallel.sequence_parallel=true parallel.recompute=none train.micro_batch=1"
        if " profile " in line:
            return f"{line} {two}".replace("--on mpi", "--nproc 2").replace("10-12", "2-4")
        return line

    said = follow(page, small, environment)
    assert "16 ranks" in of(said, "--world 16")
    assert "fits" in of(said, "--world 16")
    assert "--host 192.168.1.1:120,192.168.1.2:120 --map-by ppr:8:node" in of(said, "submit", "--dry-run")
    run = Run.open("runs/llama-70b")
    assert run.state == "finished"
    assert list((run.path / "wandb").glob("offline-run-*"))
    assert Path("studies/llama-70b/best.toml").is_file()
    assert "Of 2 ranks" in of(said, "profile")


@pytest.mark.slow
def test_the_page_on_mixed_nodes_works_as_written(environment):
    """The set-up's layout is planned and its job printed as on the page; a pipeline of two ranks runs here."""
    page = "from-megatron-slurm.md"
    for number, name in enumerate(("gpt2-xl-mixed.toml", "cluster.toml", "config/steelyard/sites.toml")):
        Path(name).write_text(block(page, number))
    for split in ("train", "validation", "test"):
        shutil.copy(f"data/wikitext-2-raw-v1.{split}.jsonl", f"data/wikitext-103-raw-v1.{split}.jsonl")
    Path("two-nodes.toml").write_text(block(page, 1).replace("count = 15", "count = 1"))
    Path("here.toml").write_text('default = "here"\n[here]\n')
    Path("laptop.toml").write_text('[[nodes]]\ntype = "laptop"\ncount = 1\ngpu = "cpu"\ngpus = 2\n')
    Path("toy.toml").write_text(
        'extends = "gpt2-xl-mixed.toml"\n[model]\nlayers = 2\nhidden = 32\nheads = 2\nvocab = 600\n[data]\n'
        'sequence_length = 16\n[train]\nsteps = 6\nglobal_batch = 4\nprecision = "fp32"\ndevice = "cpu"\n[eval]\n'
        'batches = 1\n[log]\nevery = 1\ntimeline = [3, 5]\n[parallel]\npipeline = 2\ndata = 1\npartition = "1-1"\n'
        "placement = []\n"
    )

    def small(line: str) -> str:
        if " submit " in line and "--dry-run" not in line:
            here = "--wait --sites here.toml"  # without the container
            return line.replace("gpt2-xl-mixed.toml", "toy.toml").replace("--on slurm --cluster cluster.toml", here)
        if "--write" in line:  # the search over all nodes takes half a minute
            return line.replace("cluster.toml", "two-nodes.toml")
        return line.replace("cluster.toml", "laptop.toml") if "--check" in line else line

    said = follow(page, small, environment)
    assert "0-11-8-8-8-8-5-0" in of(said, "--given")
    assert load_recipe("searched.toml").parallel.placement
    job = of(said, "submit", "--dry-run")
    assert "--nodes=1 --ntasks-per-node=1 --cpus-per-task=32 --partition=gpu1 --gres=gpu:a100:4" in job
    assert "--nodes=7 --ntasks-per-node=1 --cpus-per-task=32 --partition=gpu2 --gres=gpu:a10:4" in job
    assert "completed" in of(said, "watch")
    assert "step 6/6" in of(said, "logs", "--lines 5")
    assert "exposed communication" in of(said, "--check")
    assert "seconds" in next(record for record in Run.open("runs/gpt2-xl-mixed").metrics() if record["step"] == 6)


@pytest.mark.slow
def test_the_page_on_maskllm_works_as_written(environment, hub):
    page = "from-maskllm.md"
    Path("config/steelyard/sites.toml").write_text(block(page))
    sizes = {"hidden": 32, "heads": 4, "kv_heads": 4, "head_dim": 8, "ffn": 64}
    held = publish_llama(hub, "llama2-7b", "meta-llama/Llama-2-7b-hf", **sizes)
    shorten("data/wikitext-2-raw-v1.test.jsonl")
    convert([Path("botchan.txt")], Path("c4.jsonl"))
    shard = gzip.compress(Path("c4.jsonl").read_bytes())
    hub.add("datasets", "allenai/c4", "en/c4-train.00000-of-01024.json.gz", shard)
    shutil.copy(DOCS.parent / "examples" / "learned-masks.toml", "learned-masks.toml")
    toy = " ".join(f"model.{key}={value}" for key, value in (sizes | {"layers": 2, "vocab": 600}).items())
    toy += " train.global_batch=2 data.sequence_length=64 parallel.tensor=2 eval.batches=1 log.every=1"
    toy += " train.device=cpu train.precision=fp32 checkpoint.every=0"

    def small(line: str) -> str:
        if "--dry-run" in line:
            return line
        line = line.replace("4096", "64").replace("--nproc 4", "--nproc 2").replace("train.steps=200", "")
        if " prune " in line:
            return f"{line} --samples 4 --sequence-length 64"
        return f"{line} {toy} train.steps=4" if " train learned" in line else line

    said = follow(page, small, environment)
    assert "exec apptainer exec" in of(said, "shell")
    assert "-m steelyard doctor" in of(said, "submit", "-- doctor")
    assert "--gres=gpu:4" in of(said, "submit", "learned-masks.toml")
    assert "fits" in of(said, "train", "--dry-run")
    assert len({text for line, text in said.items() if "eval ppl" in line}) == 4
    temperatures = [record["temperature"] for record in Run.open("runs/wikitext").metrics() if "loss" in record]
    assert (temperatures[0], temperatures[-1]) == (2.0, 0.05)
    model = pytest.importorskip("transformers").AutoModelForCausalLM.from_pretrained("Llama-2-7b-2of4")
    weight = model.model.layers[1].mlp.down_proj.weight
    assert (weight.unflatten(1, (-1, 4)).count_nonzero(2) == 2).all()
    assert torch.equal(weight[weight != 0], held.tensor("layers.1.mlp.down.weight")[weight != 0])


@pytest.mark.slow
def test_the_page_on_older_pythons_starts_the_new_python_in_the_old_image(environment):
    page = "from-older-python.md"
    Path("config/steelyard/sites.toml").write_text(block(page))
    [command] = follow(page, lambda line: line, environment).values()
    assert "/data/images/pytorch_24.01-py3.sif" in command
    assert "LD_LIBRARY_PATH=/.singularity.d/libs" in command
    Path("my.toml").write_text('extends = "gpt2-small"\n[data]\ntrain = "tokens"\n')
    words = ["submit", "my.toml", "--on", "slurm", "--nodes", "1", "--ranks-per-node", "1", "--dry-run"]
    assert "/data/me/steelyard-env/bin/python -P -m steelyard" in _without_pytorch(*words)


@pytest.mark.slow
def test_a_login_node_without_pytorch_can_plan_submit_and_watch(environment, monkeypatch, tmp_path):
    """With a Slurm that accepts every job and knows none."""
    page = "from-megatron-slurm.md"
    for number, name in enumerate(("gpt2-xl-mixed.toml", "cluster.toml", "config/steelyard/sites.toml")):
        Path(name).write_text(block(page, number))
    Path("xl").mkdir()
    write_documents("xl/my-gpt2_text_document", [range(1000)] * 20, 50_257)
    for name in ("sbatch", "squeue", "sacct"):
        program(Path("bin", name), "echo 4711" if name == "sbatch" else "exit 0")
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
    given, printed, submitted = (line for line in commands(page) if " submit " in line or "--given" in line)
    assert "a100:1 a10:7" in _without_pytorch(*shlex.split(given)[1:])
    assert "--gres=gpu:a10:4" in _without_pytorch(*shlex.split(printed)[1:])
    assert "4711" in _without_pytorch(*shlex.split(submitted)[1:])
    assert "gpt2-xl-mixed" in _without_pytorch("list")
    assert "partition 0-11-8-8-8-8-5-0" in _without_pytorch("watch", "gpt2-xl-mixed", "--once", code=3)
    _without_pytorch("report", "runs/gpt2-xl-mixed", "-o", "report.html")
    assert "torch is not installed" in _without_pytorch("train", "gpt2-xl-mixed.toml", "--dry-run", code=1)


def _without_pytorch(*words: str, code: int = 0) -> str:
    """A command in an interpreter that has only what the page installs on a login node."""
    hidden = ["torch", "transformers", "huggingface_hub", "pyarrow", "orjson", "optuna", "gguf", "jinja2", "gigatoken"]
    program = f"import sys; sys.modules.update(dict.fromkeys({hidden})); from steelyard.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", program, *words], capture_output=True, text=True, timeout=600,
        env=os.environ | {"PYTHONPATH": str(DOCS.parent)},
    )  # fmt: skip
    assert done.returncode == code, done.stderr
    return done.stdout + done.stderr

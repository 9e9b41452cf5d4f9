"""The commands of a single process on a system that lacks what only Linux has.

No Mac is at hand, so its lacks are made here: `without_linux/sitecustomize.py`, on PYTHONPATH, takes from every Python
process, the spawned workers of `data tokenize` too, the functions and constants of os, signal, socket, select, time,
resource, mmap and fcntl that macOS does not have (sched_getaffinity, copy_file_range, posix_fadvise, memfd_create,
waitid, epoll, sigtimedwait, prlimit and others), prctl, everything below /proc, /sys and /dev/shm, and Triton. It sets
sys.platform to darwin, by which multiprocessing spawns. Kept as on Linux: what platform and os.uname say, which torch
asks to find its own libraries, and the C libraries' own view of the system.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent / "without_linux"
ROOT = Path(__file__).parents[2]


def run(*command, folder, timeout=120):
    environment = os.environ | {"PYTHONPATH": f"{FOLDER}{os.pathsep}{ROOT}"}
    return subprocess.run(
        [sys.executable, *command], cwd=folder, env=environment, capture_output=True, text=True, timeout=timeout
    )


def test_the_lacks_are_there(tmp_path):
    code = """
import ctypes, os, pathlib, sys
assert sys.platform == "darwin"
assert not hasattr(os, "sched_getaffinity")
assert not hasattr(os, "copy_file_range")
assert not hasattr(ctypes.CDLL(None), "prctl")
assert not pathlib.Path("/proc/self").exists()
assert not list(pathlib.Path("/proc").glob("*"))
try:
    open("/proc/self/status")
except FileNotFoundError:
    sys.exit(3)
"""
    assert run("-c", code, folder=tmp_path).returncode == 3


@pytest.mark.slow
def test_the_path_from_text_to_report_works_without_what_only_linux_has(workplace):
    text = "".join(f"{word} rows and {word} columns of the {word} matrix\n" for word in ("first", "second", "third"))
    (workplace.path / "corpus.txt").write_text(200 * text)
    train = f"train {workplace.recipe} data.tokenizer=tokenizer data.train=mine_text_document model.vocab=300"
    commands = [
        "tokenizer train --input corpus.txt --model-prefix tokenizer --vocab-size 300 --type byte-bpe",
        "data tokenize --input corpus.txt --tokenizer tokenizer --output-prefix mine --append-eod --workers 2",
        f"{train} checkpoint.every=1 train.steps=3 --run runs/mine",
        f"{train} checkpoint.every=1 train.steps=5 --run runs/mine",
        "checkpoint convert runs/mine hf --to hf",
        "generate runs/mine --prompt first --max-tokens 4",
        "eval ppl hf --data corpus.txt --sequence-length 16",
        "report runs/mine",
        "watch runs/mine --once",
    ]
    words = json.dumps([command.split() for command in commands])
    done = run(FOLDER / "commands.py", words, folder=workplace.path, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    records = [json.loads(line) for line in (workplace.path / "runs/mine/metrics.jsonl").read_text().splitlines()]
    assert records[-1]["step"] == 5
    assert "resum" in done.stderr
    assert (workplace.path / "runs/mine/report.html").is_file()


def test_what_needs_linux_is_refused_by_name(tmp_path):
    refused = {
        "train quickstart --nproc 2": "--nproc 2",
        "submit quickstart": "starting a job (--on local)",
        "tune quickstart": "steelyard tune",
        "doctor": "steelyard doctor",
    }
    done = run(FOLDER / "commands.py", json.dumps([words.split() for words in refused]), folder=tmp_path)
    assert done.returncode == 2
    for words, what in refused.items():
        assert f"$ steelyard {words}\nerror: {what} needs Linux; this is macOS\n" in done.stderr
    assert not list(tmp_path.iterdir())

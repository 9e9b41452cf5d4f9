"""A corpus and a recipe small enough that a training run takes about a second."""

import gc
import os
import random
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from steelyard.cli import OBJECTS_PER_COLLECTION
from steelyard.tokens.indexed_dataset import bin_path, token_dtype
from steelyard.tokens.merge import write_index
from tests import preloaded
from tests.hub import TOKEN, Hub, serve

VOCAB = 97
# Few and long, and they share nothing.
LONG_TESTS = (
    "tests/test_guides.py", "tests/test_walkthroughs.py", "tests/cli/test_quickstart.py",
    "tests/training/test_killed.py",
)  # fmt: skip
ONE_POOL = "tests/parallel"  # Up to eight ranks at once: two pools on two cores would hinder each other.
gc.set_threshold(OBJECTS_PER_COLLECTION)  # As in a command.
if not torch.cuda.is_available():  # Kernels are interpreted then; triton wants to know before it is imported.
    os.environ.setdefault("TRITON_INTERPRET", "1")


def free_port() -> int:
    """A port that nobody listens on now, below those that systems hand out to whoever asks for any."""
    for port in random.sample(range(15000, 30000), 100):
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("", port))
            return port
    raise OSError("no port is free")


@dataclass
class Workplace:
    """A folder with token files and a recipe that trains on them."""

    path: Path

    @property
    def recipe(self) -> Path:
        return self.path / "tiny.toml"

    def steelyard(self, *words: str, **options) -> subprocess.CompletedProcess:
        """Run the real command in the folder; as when installed, a folder named steelyard there does not hide it."""
        return preloaded.run(
            [sys.executable, "-P", "-m", "steelyard", *words],
            cwd=self.path,
            capture_output=True,
            text=True,
            timeout=options.pop("timeout", 300),
            **options,
        )

    def start(self, *words: str) -> subprocess.Popen:
        """Start the real command and leave it running."""
        return preloaded.Popen(
            [sys.executable, "-P", "-m", "steelyard", *words],
            cwd=self.path,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )


TINY = """
[model]
family = "llama"
layers = 2
hidden = 32
heads = 4
kv_heads = 2
vocab = 97

[data]
train = "tokens_text_document"
split = "90,10,0"
sequence_length = 16

[train]
steps = 20
global_batch = 4
micro_batch = 2
device = "cpu"

[optim]
learning_rate = 1e-2
warmup_steps = 2

[eval]
every = 10
batches = 2

[checkpoint]
every = 3

[log]
every = 2
"""


def write_documents(prefix: Path | str, documents: list, vocab_size: int) -> None:
    """A pair of token files with the given documents."""
    dtype = token_dtype(vocab_size)
    bin_path(prefix).write_bytes(b"".join(np.asarray(ids, dtype=dtype).tobytes() for ids in documents))
    lengths = np.array([len(ids) for ids in documents], dtype=np.int32)
    write_index(str(prefix), lambda: iter([lengths[:3], lengths[3:]]), dtype)


def write_tokens(prefix: Path, documents: int = 200, seed: int = 0) -> None:
    """Documents that can be learned: arithmetic progressions of ids."""
    random = np.random.RandomState(seed)
    texts = []
    for _ in range(documents):
        start, step, length = random.randint(0, VOCAB), random.randint(1, 4), random.randint(5, 60)
        texts.append((start + step * np.arange(length)) % VOCAB)
    write_documents(prefix, texts, VOCAB)


@pytest.fixture
def workplace(tmp_path: Path) -> Workplace:
    write_tokens(tmp_path / "tokens_text_document")
    place = Workplace(tmp_path)
    place.recipe.write_text(TINY)
    return place


@pytest.fixture
def in_workplace(workplace: Workplace, monkeypatch: pytest.MonkeyPatch) -> Workplace:
    """The same, with the test's own process standing in the folder."""
    monkeypatch.chdir(workplace.path)
    return workplace


@pytest.fixture(autouse=True, scope="module")
def short_collections() -> None:
    """A run collects garbage when it starts, and would visit all modules and tests each time: a fifth of a second."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def one_thread_of_mathematics(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiny matrices are slower on two threads than on one."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    torch.set_num_threads(1)


def kill(process: subprocess.Popen) -> None:
    """End a process that a test started, without warning, and collect it."""
    process.kill()
    process.communicate(timeout=150)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A hub on this machine, which is the one that this process knows, with a token for it."""
    from huggingface_hub import constants, hf_api
    from huggingface_hub.utils import _http

    made = Hub(tmp_path / "hub")
    server = serve(made)
    home = tmp_path / "hf-home"
    for name, value in {
        "ENDPOINT": made.endpoint,
        "HUGGINGFACE_CO_URL_TEMPLATE": made.endpoint + "/{repo_id}/resolve/{revision}/{filename}",
        "HF_HUB_CACHE": str(home / "hub"),
        "HF_TOKEN_PATH": str(home / "token"),
        "HF_STORED_TOKENS_PATH": str(home / "stored_tokens"),
        "HF_HUB_DISABLE_XET": True,
        "DOWNLOAD_CHUNK_SIZE": 10_000,
    }.items():
        monkeypatch.setattr(constants, name, value)
    monkeypatch.setattr(hf_api.api, "endpoint", made.endpoint)
    monkeypatch.setattr(_http, "time", SimpleNamespace(sleep=lambda seconds: None))  # It waits longer each time.
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    yield made
    server.shutdown()
    server.server_close()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A real filesystem of 2 MiB."""
    mount = tmp_path / "disk"
    mount.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", mount], capture_output=True).returncode:
        pytest.skip("mounting a tmpfs needs root")
    yield mount
    subprocess.run(["umount", mount], check=True)


def pytest_unconfigure() -> None:
    """Let the interpreter free everything at its end; libraries report what is left as leaked."""
    gc.unfreeze()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log) -> object:
    """Give a process whole files, but long tests one by one, and all tests on the pool of ranks to one process."""
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            return ONE_POOL if file.startswith(f"{ONE_POOL}/") else nodeid if file in LONG_TESTS else file

        def _assign_work_unit(self, node: object) -> None:
            """Hand out the pool first, then the long tests: at the end, one process would wait for the other's."""
            long = next((scope for scope in self.workqueue if scope.startswith(LONG_TESTS)), None)
            if long is not None and ONE_POOL not in self.workqueue:
                self.workqueue.move_to_end(long, last=False)
            super()._assign_work_unit(node)

    return ByFile(config, log)

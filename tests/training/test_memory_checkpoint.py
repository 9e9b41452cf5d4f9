"""Memory checkpoints: two ranks as two nodes on one machine, which differ in nothing but their local rank."""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from steelyard import checkpoint, training
from steelyard.checkpoint import memory_folder
from steelyard.checkpoint.memory_restore import restore
from steelyard.checkpoint.peer_copy import Nodes
from steelyard.core.errors import RuntimeFailure
from steelyard.core.recipe import load_recipe
from steelyard.core.run import Run
from steelyard.parallel.world import World
from steelyard.training.extension import Extension
from tests import preloaded
from tests.conftest import TINY, free_port, write_tokens
from tests.training.test_trainer import curve

SETTINGS = ["train.steps=10", "log.every=1", "eval.every=5", "checkpoint.every=0", "checkpoint.memory_every=3"]
SETTINGS += ["parallel.zero=3", "parallel.timeout_minutes=5"]
TRAIN = """
import sys
from pathlib import Path
from steelyard import training
from steelyard.core.errors import RuntimeFailure
from steelyard.core.recipe import load_recipe
training.run(load_recipe("tiny.toml", sys.argv[2:]), Path(sys.argv[1]))
"""
# Rank 1 is killed in step 8, after its memory checkpoint of step 6 is complete. None is skipped on a
# slow machine, and files are sent in many chunks.
KILLED = f"""
import os, signal
from steelyard.checkpoint import peer_copy
from steelyard.checkpoint.memory_save import MemorySaver
peer_copy.CHUNK = 10_000
is_ready = MemorySaver.is_ready
def patient(self):
    self.let_end()
    return is_ready(self)
MemorySaver.is_ready = patient
from steelyard.training.trainer import Trainer
step = Trainer._step
def failing(self, *arguments):
    if self.train_state.counters.step == 7 and os.environ["RANK"] == "1":
        self.memory.let_end()
        os.kill(os.getpid(), signal.SIGKILL)
    step(self, *arguments)
Trainer._step = failing
{TRAIN}
"""


@dataclass
class Attempt:
    codes: list[int]
    said: str


def two_nodes(folder: Path, *settings: str, run: str, code: str = TRAIN) -> Attempt:
    """Train with two ranks, each of which is the only one of its node."""
    common = {"WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "OMP_NUM_THREADS": "1"}
    common |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "GLOO_SOCKET_IFNAME": "lo"}
    words = [sys.executable, "-c", code, run, *SETTINGS, *settings]
    ranks = [
        preloaded.Popen(
            words, cwd=folder, env=os.environ | common | {"RANK": str(rank)}, text=True,
            stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
        )
        for rank in range(2)
    ]  # fmt: skip
    said = [rank.communicate(timeout=300)[1] for rank in ranks]
    return Attempt([rank.returncode for rank in ranks], "\n".join(said))


@dataclass
class Killed:
    """A run whose rank 1 was killed, and copies of what it left in host memory."""

    folder: Path
    memory: Path
    run: Run
    attempt: Attempt
    root: Path
    copies: Path


def in_tmpfs() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(
        dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None, prefix="steelyard-test-"
    )


@pytest.fixture
def memory() -> Iterator[Path]:
    """A folder in tmpfs for one test."""
    with in_tmpfs() as folder:
        yield Path(folder)


@pytest.fixture(scope="module")
def memory_of_killed() -> Iterator[Path]:
    with in_tmpfs() as folder:
        yield Path(folder)


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory, memory_of_killed: Path) -> Killed:
    memory = memory_of_killed
    folder = tmp_path_factory.mktemp("memory")
    write_tokens(folder / "tokens_text_document")
    (folder / "tiny.toml").write_text(TINY)
    attempt = two_nodes(folder, f"checkpoint.memory_dir={memory}", run="killed", code=KILLED)
    run = Run.open(folder / "killed")
    root = memory_folder.root_of(run, str(memory))
    assert root is not None
    copies = Path(shutil.copytree(root, folder / "copies"))
    return Killed(folder, memory, run, attempt, root, copies)


@pytest.fixture
def left(killed: Killed, tmp_path: Path) -> Path:
    """A copy of what the killed run left in host memory, to be damaged."""
    return Path(shutil.copytree(killed.copies, tmp_path / "left"))


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def restored_step(left: Path, target: Path, newer_than: int = -1) -> int | None:
    found = restore(left, target / "checkpoints", newer_than, World())
    if found is not None:  # It is a whole checkpoint of a run, which another layout can load: here one rank.
        assert checkpoint.latest(target / "checkpoints").step == found.step
        checkpoint.load(
            found, {name: torch.empty(size, dtype=dtype) for name, (size, dtype) in found.tensors().items()}
        )
    return None if found is None else found.step


@pytest.mark.slow
def test_each_node_keeps_two_memory_checkpoints_with_its_peers_files_for_its_owner_alone(killed: Killed):
    assert killed.attempt.codes[1] == -9
    assert killed.copies.stat().st_mode & 0o777 == 0o700
    for node in ("node-0", "node-1"):
        steps = sorted((killed.copies / node).iterdir())
        assert [step.name for step in steps] == ["step-00000003", "step-00000006"]
        assert {file.name for file in steps[1].iterdir()} == {
            "__0_0.distcp", "__1_0.distcp", ".metadata", "state.json"
        }  # fmt: skip


@pytest.mark.slow
def test_after_a_node_is_lost_the_run_restores_its_peers_copy_and_repeats_its_losses_to_the_bit(killed: Killed):
    shutil.rmtree(killed.root / "node-1")
    resumed = two_nodes(killed.folder, f"checkpoint.memory_dir={killed.memory}", run="killed")
    assert resumed.codes == [0, 0], resumed.said
    expected = "resumed at step 6 from a memory checkpoint (none is on disk); 1 step is repeated, up to 7"
    assert resumed.said.count(expected) == 1, resumed.said
    unbroken = two_nodes(killed.folder, "checkpoint.memory_every=0", run="unbroken")
    assert unbroken.codes == [0, 0], unbroken.said
    assert len(curve(killed.run)) == 13  # 10 steps and 3 validations
    assert curve(killed.run) == curve(Run.open(killed.folder / "unbroken"))
    assert not list(killed.memory.iterdir()), "memory checkpoints are removed at the end"


@pytest.mark.slow
def test_a_flipped_bit_is_found_and_the_peers_copy_is_used(left: Path, tmp_path: Path):
    flip(left / "node-1/step-00000006/__1_0.distcp")
    flip(left / "node-0/step-00000006/__0_0.distcp")
    assert restored_step(left, tmp_path) == 6


@pytest.mark.slow
@pytest.mark.parametrize(
    "damage", ["flip", "truncate", "remove", "state"], ids=["flipped", "truncated", "removed", "state"]
)
def test_a_file_that_is_damaged_on_both_nodes_means_the_older_memory_checkpoint(left, tmp_path, capsys, damage):
    for node in ("node-0", "node-1"):
        path = left / node / "step-00000006" / ("state.json" if damage == "state" else "__1_0.distcp")
        match damage:
            case "flip" | "state":
                flip(path)
            case "truncate":
                os.truncate(path, path.stat().st_size // 2)
            case "remove":
                path.unlink()
    assert restored_step(left, tmp_path) == 3
    said = capsys.readouterr().err
    assert ("is damaged" if damage == "state" else "memory checkpoint of step 6 cannot be restored") in said


@pytest.mark.slow
def test_nothing_is_restored_that_is_not_newer_than_the_disk_or_not_whole(left: Path, tmp_path: Path):
    assert restored_step(left, tmp_path, newer_than=6) is None
    for path in left.rglob("__0_0.distcp"):
        path.unlink()
    assert restored_step(left, tmp_path) is None
    assert not list((tmp_path / "checkpoints").iterdir())


@pytest.mark.slow
def test_parts_of_two_attempts_at_the_same_step_are_not_mixed(left: Path, tmp_path: Path):
    for path in left.glob("node-0/*/__1_0.distcp"):
        path.unlink()
    folder = left / "node-1/step-00000006"
    (folder / "__0_0.distcp").unlink()
    state, sums = checkpoint.folder.state_file.read(folder)
    checkpoint.folder.state_file.write(folder, state | {"tokens": state["tokens"] + 1}, sums)
    shutil.rmtree(left / "node-1/step-00000003")
    assert restored_step(left, tmp_path) is None


def test_without_free_memory_the_run_finishes_with_checkpoints_on_disk(in_workplace, memory, capsys, monkeypatch):
    monkeypatch.setattr(memory_folder, "RESERVE", 1 << 62)  # as if other processes used the memory of the node
    settings = [*SETTINGS, f"checkpoint.memory_dir={memory}", "checkpoint.every=6", "parallel.zero=0"]
    run = training.run(load_recipe("tiny.toml", settings))
    assert run.state == "finished"
    said = capsys.readouterr().err
    assert said.count("memory checkpoints are off: a memory checkpoint needs ") == 1
    assert "the node has 0 B" in said
    assert [path.name for path in sorted(run.checkpoints.iterdir())] == ["step-00000006", "step-00000010"]


# Each rank's part fits into the free memory of the node, both together do not.
CROWDED = f"""
import os
from steelyard.checkpoint import memory_folder
memory_folder.host.available_bytes = lambda: memory_folder.RESERVE + int(os.environ["FREE"])
{TRAIN}
"""


@pytest.mark.slow
def test_the_ranks_of_a_node_compare_their_sum_with_its_free_memory(killed: Killed, monkeypatch):
    whole = sum(path.stat().st_size for path in killed.copies.glob("node-0/step-00000006/*.distcp"))
    monkeypatch.setenv("FREE", str(whole * 3 // 4))
    settings = (f"checkpoint.memory_dir={killed.memory}", "train.steps=4")
    crowded = two_nodes(killed.folder, *settings, run="crowded", code=CROWDED)
    assert crowded.codes == [0, 0], crowded.said
    assert crowded.said.count("memory checkpoints are off: a memory checkpoint needs ") == 1, crowded.said


@pytest.mark.slow
def test_a_full_tmpfs_turns_memory_checkpoints_off_and_the_run_finishes(workplace):
    """In a mount namespace of its own, where a tmpfs holds one memory checkpoint and not two."""
    small = workplace.path / "small"
    small.mkdir()
    inside = ["unshare", "-rm", "sh", "-c", 'mount -t tmpfs -o size=1000k none "$1" && shift && exec "$@"', "sh", small]
    if shutil.which("unshare") is None or subprocess.run([*inside, "true"], capture_output=True).returncode:
        pytest.skip("needs a mount namespace")
    settings = [*SETTINGS, f"checkpoint.memory_dir={small}", "checkpoint.every=8", "parallel.zero=0"]
    words = [sys.executable, "-P", "-m", "steelyard", "train", "tiny.toml", *settings, "--run", "run"]
    done = subprocess.run([*inside, *words], cwd=workplace.path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("memory checkpoints are off: ") == 1
    assert f"{small}" in done.stderr.partition("memory checkpoints are off: ")[2].splitlines()[0]
    assert Run.open(workplace.path / "run").state == "finished"


def test_a_run_on_one_node_says_that_no_peer_holds_a_copy_and_a_missing_folder_is_named(in_workplace, memory, capsys):
    settings = [*SETTINGS, "train.steps=4", "parallel.zero=0"]
    training.run(load_recipe("tiny.toml", [*settings, f"checkpoint.memory_dir={memory}"]))
    said = capsys.readouterr().err
    assert said.count("no peer holds a copy") == 1
    assert "memory checkpoints are off" not in said
    training.run(load_recipe("tiny.toml", [*settings, "checkpoint.memory_dir=/nowhere", "name=other"]))
    assert "memory checkpoints are off: /nowhere" in capsys.readouterr().err


class Failing(Extension):
    """Fails like a broken disk in step 5."""

    def begin_step(self, step: int, batch: int, loss_scale: float) -> None:
        if step == 5:
            raise OSError(5, "Input/output error", "tokens.bin")


def test_one_process_that_fails_names_its_memory_checkpoint_and_goes_on_from_it(in_workplace, memory, capsys):
    settings = [*SETTINGS, f"checkpoint.memory_dir={memory}", "parallel.zero=0"]
    with pytest.raises(RuntimeFailure) as failed:
        training.run(load_recipe("tiny.toml", settings), extension=Failing())
    assert f"step 3 is in {memory}" in str(failed.value.hint)
    run = training.run(load_recipe("tiny.toml", settings))
    assert "resumed at step 3 from a memory checkpoint (none is on disk); 1 step is repeated" in capsys.readouterr().err
    assert not list(memory.iterdir())
    assert curve(run) == curve(training.run(load_recipe("tiny.toml", [*settings, "name=whole"])))


def test_without_memory_checkpoints_in_the_recipe_those_of_an_earlier_attempt_are_removed(in_workplace, memory):
    settings = [*SETTINGS, f"checkpoint.memory_dir={memory}", "parallel.zero=0", "train.steps=6"]
    with pytest.raises(RuntimeFailure):
        training.run(load_recipe("tiny.toml", settings), extension=Failing())
    assert list(memory.glob("*/node-0/step-00000003/state.json"))
    training.run(load_recipe("tiny.toml", [*settings, "checkpoint.memory_every=0"]))
    assert not list(memory.iterdir())


def test_another_users_folder_is_not_used(tmp_path: Path):
    (tmp_path / "open").mkdir(mode=0o755)
    with pytest.raises(PermissionError, match="not private"):
        memory_folder.make_private(tmp_path / "open")
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(PermissionError, match="not private"):
        memory_folder.make_private(tmp_path / "link")


def test_every_rank_has_a_peer_on_the_next_node_also_if_nodes_differ_in_size():
    nodes = Nodes([[0, 1, 2], [3], [4, 5]], own=1, number_on_host=0)
    assert [nodes.peer(rank) for rank in range(6)] == [3, 3, 3, 4, 0, 1]
    assert [nodes.sources(rank) for rank in range(6)] == [[4], [5], [], [0, 1, 2], [3], []]
    assert Nodes([[0, 1]], own=0, number_on_host=0).peer(1) is None

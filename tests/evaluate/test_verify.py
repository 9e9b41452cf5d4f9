"""Integrity checks of checkpoints of every format and of run folders."""

import json
import shutil
import subprocess

import pytest
import torch
from safetensors.torch import load_file, save_file

from steelyard.cli import main
from steelyard.core import sha256sums
from steelyard.core.errors import UserError
from steelyard.evaluate.verify_checkpoint import verify_checkpoint
from steelyard.evaluate.verify_run import verify_run
from steelyard.sparsity import mask_file
from steelyard.sparsity.patterns import Pattern
from tests.checkpoint.models import written

FORMATS = ("hf", "megatron", "megatron-dist", "steelyard", "compressed")


def flip(path, place=-9):
    """Flip the lowest bit of one byte."""
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)


def largest(folder):
    return max((path for path in folder.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)


def command(*words, capsys):
    with pytest.raises(SystemExit) as ended:
        main([*map(str, words)])
    return ended.value.code, capsys.readouterr().out


@pytest.mark.skipif(shutil.which("sha256sum") is None, reason="needs coreutils")
@pytest.mark.parametrize("to", FORMATS)
def test_sha256sum_of_coreutils_checks_every_file_of_a_converted_folder(tmp_path, to):
    folder = written(tmp_path, "llama-tied", to)
    done = subprocess.run(["sha256sum", "--strict", "-c", "SHA256SUMS"], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    others = sha256sums.files_in(folder)
    assert others
    assert sorted(line.removesuffix(": OK") for line in done.stdout.splitlines()) == others


@pytest.mark.parametrize("to", FORMATS)
def test_a_converted_folder_is_sound_and_one_flipped_bit_of_its_weights_is_one_problem(tmp_path, to):
    folder = written(tmp_path, "llama-tied", to)
    sound = verify_checkpoint(folder)
    assert sound.problems == []
    assert sound.without_checksum == []
    assert sound.checked["tensors"] > 0
    flip(largest(folder))
    (problem,) = verify_checkpoint(folder).problems
    assert str(largest(folder)) in problem
    assert "SHA-256" in problem


@pytest.mark.parametrize(
    ("damage", "complaint"),
    [
        (lambda folder: (folder / "config.json").unlink(), "config.json is missing"),
        (lambda folder: (folder / "SHA256SUMS").write_text("nonsense\n"), "SHA256SUMS: line 1"),
        (lambda folder: (folder / "SHA256SUMS").write_text(f"{'0' * 64}  ../other\n"), "SHA256SUMS: line 1"),
    ],
)
def test_a_folder_that_does_not_match_its_sums_has_a_problem(tmp_path, damage, complaint):
    folder = written(tmp_path, "llama-tied")
    damage(folder)
    assert any(complaint in problem for problem in verify_checkpoint(folder).problems)


def test_weights_without_checksums_are_read_and_named_in_the_summary(tmp_path, capsys):
    folder = written(tmp_path, "llama-tied")
    (folder / "SHA256SUMS").unlink()
    code, out = command("checkpoint", "verify", folder, capsys=capsys)
    assert code == 0
    assert "no checksum" in out
    assert str(folder / "model.safetensors") in out


def test_weights_that_are_not_finite_are_a_problem_even_without_checksums(tmp_path, capsys):
    folder = written(tmp_path, "llama-tied")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][2, 3] = torch.nan
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "SHA256SUMS").unlink()
    code, out = command("checkpoint", "verify", folder, capsys=capsys)
    assert code == 1
    assert len(out.splitlines()) == 1
    assert "mlp.up" in out


def test_a_mask_file_and_a_single_shard_are_verified_alone(tmp_path):
    mask = torch.tensor([[True, False, True, False]] * 4)
    mask_file.write(tmp_path / "masks", [("layers.0.mlp.up.weight", mask)], Pattern.parse("2:4"), {})
    (tmp_path / "masks").rename(tmp_path / "masks.safetensors")
    assert verify_checkpoint(tmp_path / "masks.safetensors").problems == []
    flip(tmp_path / "masks.safetensors", -1)
    assert len(verify_checkpoint(tmp_path / "masks.safetensors").problems) == 1
    folder = written(tmp_path, "llama-tied", shard_bytes=20_000)
    first, second, *_ = sorted(folder.glob("model-*.safetensors"))
    flip(second)
    assert verify_checkpoint(first).problems == []
    assert len(verify_checkpoint(second).problems) == 1


def test_info_and_verify_fail_when_a_tensor_or_a_shard_is_missing(tmp_path, capsys):
    folder = written(tmp_path, "llama-tied", shard_bytes=20_000)
    assert command("checkpoint", "info", folder, capsys=capsys)[0] == 0
    (folder / "SHA256SUMS").unlink()
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": config["num_hidden_layers"] + 1}))
    code, out = command("checkpoint", "info", folder, capsys=capsys)
    assert code == 1
    assert "model.layers.4.mlp.down_proj.weight" in out
    assert "missing" in out
    assert command("checkpoint", "verify", folder, capsys=capsys)[0] == 1
    shard = sorted(folder.glob("model-*.safetensors"))[1]
    shard.unlink()
    assert command("checkpoint", "info", folder, capsys=capsys)[0] == 2
    code, out = command("checkpoint", "verify", folder, capsys=capsys)
    assert code == 1
    assert shard.name in out


def test_verifying_what_is_not_there_is_a_mistake_of_the_user(tmp_path):
    with pytest.raises(UserError, match="there is no"):
        verify_checkpoint(tmp_path / "nothing")
    with pytest.raises(UserError, match="there is no run folder"):
        verify_run(tmp_path / "nothing")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run folder with token files, checkpoints and TensorBoard events."""
    from steelyard import training
    from steelyard.core.recipe import load_recipe
    from tests.conftest import TINY, write_tokens

    place = tmp_path_factory.mktemp("trained")
    write_tokens(place / "tokens_text_document")
    recipe = TINY.replace('"tokens_text_document"', f'"{place}/tokens_text_document"').replace(
        "steps = 20", "steps = 4"
    )
    (place / "tiny.toml").write_text(recipe + "tensorboard = true\n")
    training.run(load_recipe(place / "tiny.toml"), place / "run")
    return place


@pytest.fixture
def run(trained, tmp_path):
    """A copy of it, whose recipe names the copied token files."""
    shutil.copytree(trained, tmp_path / "place")
    path = tmp_path / "place" / "run"
    (path / "recipe.toml").write_text((path / "recipe.toml").read_text().replace(str(trained), str(tmp_path / "place")))
    return path


def test_a_run_as_it_was_written_has_no_problems(run, capsys):
    code, out = command("run", "verify", run, capsys=capsys)
    assert code == 0, out
    assert "no problems" in out
    assert "token files" in out
    assert "records" in out
    assert "events by checksum" in out
    assert "no checksum" in out
    assert "metrics.jsonl" in out


RUN_DAMAGE = {
    "recipe.toml": lambda run: (run / "recipe.toml").write_text("[model"),
    "metrics.jsonl": lambda run: (run / "metrics.jsonl").write_text('{"step": 1\n{"step": 2}\n'),
    "sessions.jsonl": lambda run: flip(run / "sessions.jsonl", 0),
    "hosts/": lambda run: flip(next((run / "hosts").glob("*.json")), 0),
    "tfevents": lambda run: flip(next((run / "tensorboard").iterdir()), 30),
    ".distcp": lambda run: flip(next((run / "checkpoints").glob("*/*.distcp"))),
    "state.json": lambda run: flip(next((run / "checkpoints").glob("*/state.json")), 40),
    "tokens_text_document.bin": lambda run: flip(run.parent / "tokens_text_document.bin"),
}


@pytest.mark.parametrize("name", RUN_DAMAGE)
def test_one_damaged_file_of_a_run_is_one_line_and_exit_code_one(run, name, capsys):
    from steelyard.tokens import checksums

    checksums.write(run.parent / "tokens_text_document")
    RUN_DAMAGE[name](run)
    code, out = command("run", "verify", run, capsys=capsys)
    assert code == 1
    assert len(out.splitlines()) == 1, out
    assert name in out


def test_a_torn_last_record_and_token_files_that_are_elsewhere_are_named_and_no_problem(run):
    with open(run / "metrics.jsonl", "a") as file:
        file.write('{"step": 5, "lo')
    (run.parent / "tokens_text_document.idx").unlink()
    found = verify_run(run)
    assert found.problems == []
    assert any("incomplete" in line for line in found.not_checked)
    assert any("tokens_text_document.idx" in line for line in found.not_checked)


def test_a_weight_file_that_the_sums_do_not_list_is_a_problem_and_a_note_is_none(tmp_path, capsys):
    folder = written(tmp_path, "llama")
    (folder / "notes.md").write_text("mine")
    assert command("checkpoint", "verify", folder, capsys=capsys)[0] == 0
    lines = (folder / "SHA256SUMS").read_text().splitlines(keepends=True)
    (folder / "SHA256SUMS").write_text("".join(line for line in lines if "safetensors" not in line))
    code, out = command("checkpoint", "verify", folder, capsys=capsys)
    assert (code, "model.safetensors is not listed in" in out) == (1, True)

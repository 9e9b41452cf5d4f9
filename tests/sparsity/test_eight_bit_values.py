"""2:4 weights with 8-bit values: their rounding, the files, the folder without Steelyard, and the commands."""

import json
import os
import subprocess
import sys

import pytest
import torch

from steelyard.checkpoint.formats import open_source, safetensors
from steelyard.checkpoint.formats.row_scales import LARGEST, dequantized, nearest, quantized, scales_of
from steelyard.checkpoint.formats.write import Target, convert
from steelyard.core.errors import RuntimeFailure, UserError
from steelyard.evaluate.load_model import loaded
from steelyard.sparsity.calibration import Calibration, windows
from steelyard.sparsity.rounding import round_matrix
from steelyard.sparsity.semi_structured import CompressedView, compressible, export
from tests.checkpoint.models import Held, assert_equal
from tests.sparsity.small import write_text
from tests.sparsity.test_compressed import pruned, run, write_pruned

KINDS = ["fp8", "int8"]
CPU = torch.device("cpu")


@pytest.mark.parametrize("kind", KINDS)
def test_the_largest_weight_of_a_row_is_exact_and_the_others_are_rounded_to_the_format(kind):
    weights = torch.randn(6, 64, generator=torch.Generator().manual_seed(0)) * torch.logspace(-12, 12, 6)[:, None]
    weights[2] = 0
    values, scales = quantized(weights, kind)
    found = dequantized(values, scales)
    largest = weights.abs().amax(1)
    torch.testing.assert_close(found.abs().amax(1), largest, rtol=1e-6, atol=0)
    assert torch.equal(values.float().abs().amax(1), torch.where(largest > 0, LARGEST[kind], 0.0))
    # int8 has steps of 1/127 of the largest weight; fp8 has three bits of mantissa, and steps of 2^-9 below 2^-6.
    step = largest[:, None] / 127 if kind == "int8" else torch.maximum(weights.abs() / 8, largest[:, None] / 448 / 512)
    assert bool(((found - weights).abs() <= 0.501 * step).all())
    assert torch.equal(found[2], weights[2])


@pytest.mark.parametrize("kind", KINDS)
def test_a_folder_has_the_rounded_weights_and_declares_their_format(tmp_path, kind):
    source = pruned("llama-tied")
    result = export(source, tmp_path / "out", None, allow_dense=False, value_format=kind)
    assert result["values"] == kind
    declared = {"format": "steelyard-2:4", "version": "2", "values": kind}
    assert json.loads((tmp_path / "out/config.json").read_text())["sparse_format"] == declared
    read = open_source(tmp_path / "out")
    assert read.dtype == torch.bfloat16
    for name in read.names():
        whole = source.tensor(name)
        rounded = dequantized(*quantized(whole, kind)) if name in read.compressed else whole
        assert torch.equal(read.tensor(name)[: source.config.vocab], rounded[: source.config.vocab]), name
    matrix = source.parameters["layers.1.mlp.up.weight"]
    parts = [read.places[f"layers.1.mlp.up.{part}"] for part in ("values", "indices", "scales")]
    bytes_ = sum(part.read().nbytes for part in parts)
    assert bytes_ == matrix.numel() * 5 // 8 + 4 * len(matrix)
    # Exported again, the stored values are the same; without 8-bit values they are those that they represent.
    export(read, tmp_path / "again", None, allow_dense=False, value_format=kind)
    files = [(tmp_path / folder / "sparse.safetensors").read_bytes() for folder in ("out", "again")]
    assert files[0] == files[1]
    export(read, tmp_path / "plain", torch.float32, allow_dense=False)
    assert open_source(tmp_path / "plain").value_format is None
    assert_equal(open_source(tmp_path / "plain"), read)


@pytest.mark.parametrize("kind", KINDS)
def test_calibrated_values_lose_less_of_the_output_and_keep_zeros_and_scales(kind):
    random = torch.Generator().manual_seed(0)
    inputs = torch.randn(400, 40, generator=random) @ torch.randn(40, 160, generator=random)
    inputs += torch.randn(400, 160, generator=random)
    inputs[:, 7] = 0
    whole = torch.randn(24, 160, generator=random) * (torch.rand(24, 160, generator=random) < 0.5)
    plain, found = round_matrix(whole, None, kind), round_matrix(whole, inputs.t() @ inputs / 200, kind)
    assert torch.equal(plain, dequantized(*quantized(whole, kind)))
    scales = scales_of(whole, kind)[:, None]
    assert torch.equal(nearest(found / scales, kind).float() * scales, found)
    assert bool((found[whole == 0] == 0).all())
    errors = [float((inputs @ (each - whole).t()).square().sum()) for each in (found, plain)]
    assert errors[0] < 0.5 * errors[1]
    # Inputs that have nothing in common leave nothing to compensate with.
    assert torch.equal(round_matrix(whole, torch.eye(160), kind), plain)
    with pytest.raises(RuntimeFailure, match="not finite"):
        round_matrix(whole, torch.full((160, 160), torch.nan), kind)


@pytest.mark.parametrize(("family", "kind"), [("llama-tied", "fp8"), ("qwen3-moe", "int8")])
def test_an_export_with_calibration_is_closer_to_the_model(tmp_path, family, kind):
    source, text = pruned(family, torch.float32), write_text(tmp_path)
    plain = export(source, tmp_path / "plain", None, allow_dense=False, value_format=kind)
    data = Calibration(text, 64, 24)
    found = export(source, tmp_path / "found", None, allow_dense=False, value_format=kind, calibration=data)
    assert plain["calibration"] is None
    assert text in found["calibration"]
    tokens = windows(Calibration(text, 8, 24, 1), None, 100).tokens_BL
    with torch.inference_mode():
        wanted, *logits = (
            loaded(each, CPU, torch.float32)(tokens)
            for each in (source, open_source(tmp_path / "plain"), open_source(tmp_path / "found"))
        )
    errors = [float((each - wanted).square().mean()) for each in logits]
    assert errors[1] < 0.9 * errors[0]
    read = open_source(tmp_path / "found")
    assert all(bool((read.tensor(name)[source.tensor(name) == 0] == 0).all()) for name in read.compressed)


def test_calibration_without_8_bit_values_is_refused(folder, tmp_path, capsys):
    text = write_text(tmp_path)
    exported = ["export-sparse", str(folder / "pruned"), str(tmp_path / "out")]
    assert run(*exported, "--calibration", text) == 2
    assert "add --values int8 or fp8" in capsys.readouterr().err
    assert run(*exported, "--values", "int8") == 0
    again = ["export-sparse", str(tmp_path / "out"), str(tmp_path / "again"), "--values", "int8", "--calibration", text]
    assert run(*again) == 2
    assert "already has int8 values" in capsys.readouterr().err
    assert not (tmp_path / "again").exists()
    assert run(*exported, "--values", "int8", "--samples", "4") == 2
    assert "add --calibration" in capsys.readouterr().err


def damaged(folder, change):
    """Write the file of a folder again with other tensors or metadata."""
    file = folder / "sparse.safetensors"
    tensors = {name: extent.read().clone() for name, extent in safetensors.extents(file).items()}
    about = safetensors.metadata(file)
    change(tensors, about)
    sizes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    list(safetensors.write(file, sizes, {n: t.dtype for n, t in tensors.items()}, tensors.values(), about))


DAMAGE = {
    "int4 values are not supported": lambda tensors, about: about.update(values="int4"),
    "version 3 of": lambda tensors, about: about.update(version="3"),
    "declare different formats": lambda tensors, about: about.update(values="fp8"),
    "values and scales of layers.0.mlp.up.weight": lambda tensors, about: tensors.pop("layers.0.mlp.up.scales"),
    "values and scales of layers.1.mlp.up.weight": lambda tensors, about: tensors.update(
        {"layers.1.mlp.up.values": tensors["layers.1.mlp.up.values"].to(torch.float8_e4m3fn)}
    ),
    "NaN or infinite values in layers.0.mlp.up": lambda tensors, about: tensors["layers.0.mlp.up.scales"].fill_(
        float("inf")
    ),
}


def test_other_formats_and_damaged_files_are_refused_by_name(tmp_path):
    source = pruned("llama")
    for number, (message, change) in enumerate(DAMAGE.items()):
        folder = tmp_path / str(number)
        export(source, folder, None, allow_dense=False, value_format="int8")
        damaged(folder, change)
        with pytest.raises(UserError, match=message):
            open_source(folder).tensor("layers.0.mlp.up.weight")


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_that_keeps_8_bit_values_computes_what_the_expanded_one_computes(kind):
    source = compressible(pruned("qwen2", torch.float32), allow_dense=False, value_format=kind)
    held = Held(source.config)
    for name, tensor in held.parameters.items():
        whole = source.tensor(name)
        tensor.copy_(dequantized(*quantized(whole, kind)) if name in source.compressed else whole)
    dense, sparse = loaded(held, CPU, torch.float32), loaded(source, CPU, torch.float32, sparse=True)
    assert sparse.layers["0"].mlp.up.values.element_size() == 1
    tokens = torch.arange(24).view(2, 12)
    with torch.inference_mode():
        torch.testing.assert_close(sparse(tokens), dense(tokens), rtol=1e-5, atol=1e-5)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_pruned(tmp_path_factory.mktemp("exported"))


def test_the_commands_take_8_bit_values(folder, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    assert run("export-sparse", "pruned", "int8", "--values", "int8", "--json") == 0
    assert json.loads(capsys.readouterr().out)["values"] == "int8"
    assert run("generate", "int8", "--prompt", "a b", "--max-tokens", "4", "--json") == 0
    capsys.readouterr()
    (folder / "text.txt").write_text("a b c d e f g h " * 20)
    losses = []
    for name in ("pruned", "int8"):
        assert run("eval", "ppl", name, "--data", "text.txt", "--sequence-length", "16", "--json") == 0
        losses.append(json.loads(capsys.readouterr().out)["loss"])
    assert losses[0] != losses[1]
    assert abs(losses[0] - losses[1]) < 0.05
    words = ("--device", "cpu", "--prompt", "8", "--context", "4", "--batch", "2", "--values", "fp8")
    assert run("bench", "sparse", "int8", *words, "--json") == 0
    result = json.loads(capsys.readouterr().out)
    assert result["values"] == ["int8", "fp8"]
    memory = result["rows"][0]
    assert memory["int8"] == memory["fp8"] < memory["sparse"] < memory["dense"]
    assert memory["gain_int8"] > memory["gain"]


EXPAND = """
import json, runpy, sys
from pathlib import Path
sys.modules["steelyard"] = None  # Its import fails.
import torch, transformers
folder = Path(sys.argv[1])
sys.argv = ["expand_sparse.py", f"{folder}-dense"]
runpy.run_path(str(folder / "expand_sparse.py"), run_name="__main__")
model = transformers.AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
model.save_pretrained(f"{folder}-saved")
"""


@pytest.mark.slow
def test_transformers_expands_8_bit_values_without_steelyard(tmp_path):
    export(pruned("llama-tied"), tmp_path / "out", None, allow_dense=False, value_format="fp8")
    convert(open_source(tmp_path / "out"), tmp_path / "ours", Target("hf"))
    home = {**os.environ, "HF_HOME": str(tmp_path / "home")}
    done = subprocess.run(
        [sys.executable, "-c", EXPAND, str(tmp_path / "out")],
        capture_output=True, text=True, timeout=900, cwd="/", env=home,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    expected = open_source(tmp_path / "ours")
    for name in ("out-dense", "out-saved"):
        assert_equal(open_source(tmp_path / name), expected)


def test_a_view_of_a_compressed_folder_changes_the_format_of_its_values(tmp_path):
    source = pruned("llama")
    export(source, tmp_path / "out", None, allow_dense=False)
    view = compressible(open_source(tmp_path / "out"), allow_dense=False, value_format="fp8")
    assert isinstance(view, CompressedView)
    name = "layers.0.mlp.down"
    values, scales = quantized(source.tensor(f"{name}.weight"), "fp8")
    assert torch.equal(view.tensor(f"{name}.scales"), scales)
    assert view.tensor(f"{name}.values").numel() * 2 == values.numel()

"""Whole checkpoints pruned: what is touched, what each layer saw, and what a mistake or a kill leaves behind."""

import json
import os
import signal
import time
import weakref

import numpy as np
import pytest
import torch

from steelyard.checkpoint.formats import open_source
from steelyard.checkpoint.formats.megatron_layout import MegatronLayout
from steelyard.core.errors import UserError
from steelyard.sparsity import layerwise as layering
from steelyard.sparsity.calibration import Calibration, windows
from steelyard.sparsity.mask_file import MaskFile
from steelyard.sparsity.patterns import Pattern
from steelyard.sparsity.prune import as_text, prune
from steelyard.sparsity.prune_request import PruneRequest
from steelyard.sparsity.target_modules import maskable
from tests.conftest import kill
from tests.sparsity import published
from tests.sparsity.small import LENGTH, SAMPLES, SHAPES, Held, answer, inputs_of, linears, loaded, write_text, written

METHODS = ["magnitude", "wanda", "hessian", "sparsegpt"]


def pruned(source, out, method="wanda", **options):
    calibration = options.pop("calibration", None) or write_text(out.parent)
    request = PruneRequest(str(source), out, method, calibration=calibration, samples=SAMPLES, length=LENGTH, **options)
    return prune(request)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("kind", ["qwen2", "gpt"])
def test_every_group_of_every_product_is_pruned_and_nothing_else_is_touched(tmp_path, kind, method):
    source = written(tmp_path, kind)
    report = pruned(source, tmp_path / "out", method)
    before, after = open_source(source), open_source(tmp_path / "out")
    products = maskable(before.config)
    assert len(products) == 4 * (7 if kind == "qwen2" else 6)
    for name in before.names():
        if name in products:
            zeros = after.tensor(name).reshape(-1, 4) == 0
            assert (zeros.sum(1) == 2).all(), name
        else:
            assert torch.equal(after.tensor(name), before.tensor(name)), name
    assert report["sparsity"] == report["sparsity_of_all_layers"] == 0.5
    assert [layer["layer"] for layer in report["layers"]] == [0, 1, 2, 3]
    assert all(0 < layer["error"] < 1 for layer in report["layers"])
    assert "  0.5000 " in as_text(report)


@pytest.mark.parametrize("dense_inputs", [False, True])
@pytest.mark.parametrize("kind", ["llama-3", "gpt"])
def test_a_layer_is_pruned_for_what_the_layers_before_hand_on(tmp_path, kind, dense_inputs):
    source = written(tmp_path, kind)
    text = write_text(tmp_path)
    pruned(source, tmp_path / "out", calibration=text, dense_inputs=dense_inputs)
    tokens = windows(Calibration(text, SAMPLES, LENGTH, 0), None, 100).tokens_BL
    network, after = loaded(source), open_source(tmp_path / "out")
    dense = [inputs_of(network, number, tokens) for number in range(4)]
    for number in range(4):
        seen = dense[number] if dense_inputs else inputs_of(network, number, tokens)
        for name, module in linears(network.layers[str(number)]).items():
            mask = published.wanda(module.weight.data, seen[name], 2, 4)
            module.weight.data *= mask
            assert torch.equal(after.tensor(f"layers.{number}.{name}.weight") != 0, mask), (number, name)


def test_sparsegpt_of_a_whole_model_is_the_published_one(tmp_path):
    source = written(tmp_path, "llama-tied")
    text = write_text(tmp_path)
    pruned(source, tmp_path / "out", "sparsegpt", calibration=text)
    tokens = windows(Calibration(text, SAMPLES, LENGTH, 0), None, 100).tokens_BL
    network, after = loaded(source), open_source(tmp_path / "out")
    for number in range(4):
        seen = inputs_of(network, number, tokens)
        for name, module in linears(network.layers[str(number)]).items():
            mask, weight = published.sparsegpt(module.weight.data, seen[name], 2, 4)
            found = after.tensor(f"layers.{number}.{name}.weight")
            assert torch.equal(found != 0, mask), (number, name)
            torch.testing.assert_close(found.double(), weight, rtol=2e-3, atol=2e-4)
            module.weight.data.copy_(found)


def test_the_reported_error_is_that_of_the_layers_outputs(tmp_path):
    source = written(tmp_path, "llama")
    text = write_text(tmp_path)
    report = pruned(source, tmp_path / "out", calibration=text, include=("0",))
    tokens = windows(Calibration(text, SAMPLES, LENGTH, 0), None, 100).tokens_BL
    network, after = loaded(source), open_source(tmp_path / "out")
    seen = inputs_of(network, 0, tokens)
    lost = whole = 0.0
    for name, module in linears(network.layers["0"]).items():
        difference = module.weight.data - after.tensor(f"layers.0.{name}.weight")
        lost += (seen[name] @ difference.t()).square().sum().item()
        whole += (seen[name] @ module.weight.data.t()).square().sum().item()
    assert report["layers"][0]["error"] == pytest.approx(lost / whole, rel=1e-3)


@pytest.mark.parametrize("method", ["wanda", "sparsegpt"])
def test_masks_do_not_depend_on_how_the_checkpoint_was_cut(tmp_path, method):
    text = write_text(tmp_path)
    found = []
    for to, layout in (
        ("hf", {}),
        ("megatron", {}),
        ("megatron", {"layout": MegatronLayout(2, 2)}),
        ("megatron-dist", {}),
    ):
        place = tmp_path / f"{len(found)}"
        place.mkdir()
        source = written(place, "qwen2", to, **layout)
        pruned(source, place / "m.mask", method, calibration=text, save="mask")
        masks = MaskFile(place / "m.mask")
        found.append({name: masks.mask(name) for name in masks.names()})
    for other in found[1:]:
        assert other.keys() == found[0].keys()
        assert all(torch.equal(other[name], found[0][name]) for name in other)


def test_ties_of_a_quantised_source_are_reported_and_decided_alike_for_every_layout(tmp_path, monkeypatch):
    exact = Held.tensor
    monkeypatch.setattr(Held, "tensor", lambda held, name: (exact(held, name) * 16).round() / 16)
    masks, reports = [], []
    for place, to, layout in (("whole", "hf", {}), ("cut", "megatron", {"layout": MegatronLayout(2, 2)})):
        (tmp_path / place).mkdir()
        source = written(tmp_path / place, "qwen2", to, **layout)
        reports.append(prune(PruneRequest(str(source), tmp_path / place / "m.mask", "magnitude", save="mask")))
        held = MaskFile(tmp_path / place / "m.mask")
        masks.append(torch.cat([held.mask(name).flatten() for name in held.names()]))
    ordered = [open_source(source).tensor(name).abs().reshape(-1, 4).sort(1).values for name in held.names()]
    tied = torch.cat([each[:, 1] == each[:, 2] for each in ordered])
    assert 0.05 < tied.float().mean() < 0.95
    assert reports[0]["tied_groups"] == reports[1]["tied_groups"] == pytest.approx(tied.float().mean().item())
    assert f"{100 * reports[0]['tied_groups']:.2f}% of the groups" in as_text(reports[0])
    assert torch.equal(*masks)
    assert masks[0].view(-1, 4).float().mean(0).tolist() == pytest.approx([0.5] * 4, abs=0.05)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("pattern", ["1:4", "4:8", "0.25"])
def test_a_mask_file_says_what_the_weights_show(tmp_path, method, pattern):
    source = written(tmp_path, "llama")
    pruned(source, tmp_path / "out", method, pattern=pattern, update=False if method == "sparsegpt" else None)
    report = pruned(source, tmp_path / "m.mask", method, pattern=pattern, save="mask")
    masks, after, before = MaskFile(tmp_path / "m.mask"), open_source(tmp_path / "out"), open_source(source)
    assert masks.made_by["method"] == report["method"] == method
    assert set(masks.names()) == set(maskable(SHAPES["llama"]))
    for name in masks.names():
        assert Pattern.parse(pattern).follows(masks.mask(name))
        assert torch.equal(after.tensor(name), before.tensor(name).masked_fill(~masks.mask(name), 0))


def test_lists_choose_layers_and_products(tmp_path):
    source = written(tmp_path, "llama")
    report = pruned(source, tmp_path / "out", include=("mlp", "layers.3.attention.*"), exclude=("down", "1-2"))
    touched = [matrix["name"] for layer in report["layers"] for matrix in layer["matrices"]]
    attention = [f"layers.3.attention.{part}" for part in ("query", "key", "value", "output")]
    assert touched == ["layers.0.mlp.gate", "layers.0.mlp.up", *attention, "layers.3.mlp.gate", "layers.3.mlp.up"]
    before, after = open_source(source), open_source(tmp_path / "out")
    changed = {name for name in before.names() if not torch.equal(before.tensor(name), after.tensor(name))}
    assert changed == {f"{name}.weight" for name in touched}


def test_a_bf16_checkpoint_stays_bf16_and_keeps_what_it_keeps_to_the_bit(tmp_path):
    source = written(tmp_path, "llama", dtype=torch.bfloat16)
    pruned(source, tmp_path / "out", "hessian")
    before, after = open_source(source), open_source(tmp_path / "out")
    assert after.dtype == torch.bfloat16
    for name in maskable(before.config):
        kept = after.tensor(name) != 0
        assert torch.equal(after.tensor(name)[kept], before.tensor(name)[kept])


def test_one_layer_is_on_the_device_at_a_time(tmp_path, monkeypatch):
    source = written(tmp_path, "llama")
    alive, parameters = [], []
    make = layering._stage

    def counted(*arguments):
        assert not any(stage() for stage in alive), "an earlier layer is still there"
        stage = make(*arguments)
        alive.append(weakref.ref(stage))
        parameters.append(sum(parameter.numel() for parameter in stage.parameters()))
        return stage

    monkeypatch.setattr(layering, "_stage", counted)
    pruned(source, tmp_path / "out", "sparsegpt")
    assert parameters == [100 * 32 + 28 * 32] + [4 * 32 * 32 + 3 * 32 * 48 + 2 * 32] * 4


def test_dead_inputs_and_raised_damping_are_told(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(layering, "DAMPING", 0.001)
    source = written(tmp_path, "llama")
    weights = open_source(source).store.places["model.layers.1.input_layernorm.weight"]
    with open(weights.path, "r+b") as file:  # A channel whose norm is zero never reaches the products.
        file.seek(weights.offset)
        file.write(bytes(2 * 4))
    report = pruned(source, tmp_path / "out", "sparsegpt")
    said = capsys.readouterr().err
    assert "layers.1.attention.query.weight: 2 inputs are zero in every token" in said
    assert "a damping of 0.01 x mean diagonal" in said
    assert [matrix["dead"] for matrix in report["layers"][1]["matrices"][:4]] == [2, 2, 2, 0]
    after = open_source(tmp_path / "out")
    assert not after.tensor("layers.1.attention.query.weight")[:, :2].any()


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--method", "sparsgpt"], "did you mean sparsegpt?"),
        (["--method", "wanda", "--pattern", "2-4"], "2-4 is not a sparsity pattern"),
        (["--method", "wanda", "--pattern", "2:7"], "has 32 inputs, which is not a multiple of 7"),
        (["--method", "wanda", "--update-weights"], "wanda does not update weights"),
        (["--method", "SparseGPT", "--update-weights", "--save", "mask"], "a mask file contains no weights"),
        (["--method", "wanda", "--exclude", "layers"], "no matrix remains"),
        (["--method", "wanda", "--include", "mlp,embed"], "embed matches no matrix of the model"),
        (["--method", "wanda", "--include", "7"], "7 matches no matrix of the model"),
        (["--method", "wanda", "--sequence-length", "5000"], "fewer than one window of 5000"),
        (["--method", "wanda", "--calibration", "text.txt"], "a text needs a tokenizer"),
        (["--method", "wanda", "--calibration", "nowhere.idx"], "there is no token file nowhere.idx"),
    ],
)
def test_a_mistake_is_refused_before_work_and_leaves_nothing(tmp_path, capsys, words, complaint):
    source = written(tmp_path, "llama")
    text = write_text(tmp_path)
    before = sorted(tmp_path.iterdir())
    code, _, said = answer(
        capsys, "prune", source, tmp_path / "out", "--sequence-length", 24, "--calibration", text, *words
    )
    assert (code, complaint in said) == (2, True), said
    assert "Traceback" not in said
    assert sorted(tmp_path.iterdir()) == before


def test_calibration_is_asked_for_and_an_existing_place_is_not_overwritten(tmp_path, capsys):
    source = written(tmp_path, "llama")
    code, _, said = answer(capsys, "prune", source, tmp_path / "out", "--method", "wanda")
    assert (code, "wanda needs calibration" in said) == (2, True)
    (tmp_path / "out").write_text("mine")
    code, _, said = answer(capsys, "prune", source, tmp_path / "out", "--method", "magnitude")
    assert (code, "already exists" in said) == (2, True)
    assert (tmp_path / "out").read_text() == "mine"
    (tmp_path / "empty").mkdir()
    code, _, said = answer(capsys, "prune", source, tmp_path / "empty", "--method", "magnitude", "--save", "mask")
    assert (code, "already exists" in said) == (2, True)
    assert answer(capsys, "prune", source, tmp_path / "empty", "--method", "magnitude")[0] == 0


def test_magnitude_needs_no_text_and_says_that_the_error_is_unknown(tmp_path, capsys):
    code, report, _ = answer(capsys, "prune", written(tmp_path, "gpt"), tmp_path / "out", "--method", "Magnitude")
    assert code == 0
    assert report["calibration"] is None
    assert report["layers"][0]["error"] is None
    assert report["layers"][3]["sparsity"] == 0.5


def fail_at(monkeypatch, number: int) -> list[int]:
    """Let the pruning of this matrix fail, and count."""
    prune_one = layering.prune_matrix
    calls: list[int] = []

    def failing(*arguments):
        calls.append(1)
        if len(calls) == number:
            raise OSError("the machine gave up")
        return prune_one(*arguments)

    monkeypatch.setattr(layering, "prune_matrix", failing)
    return calls


@pytest.mark.parametrize(
    ("method", "options"),
    [("sparsegpt", {}), ("wanda", {"save": "mask"}), ("hessian", {"dense_inputs": True}), ("magnitude", {})],
)
def test_a_failure_half_way_leaves_no_output_and_the_same_command_continues(tmp_path, monkeypatch, method, options):
    source, text = written(tmp_path, "llama"), write_text(tmp_path)
    pruned(source, tmp_path / "whole", method, calibration=text, **options)
    before = {path.name for path in tmp_path.iterdir()}
    calls = fail_at(monkeypatch, 17)  # in the third of four layers with seven matrices each
    with pytest.raises(OSError, match="gave up"):
        pruned(source, tmp_path / "out", method, calibration=text, **options)
    assert {path.name for path in tmp_path.iterdir()} - before == {".out.pruning"}
    report = pruned(source, tmp_path / "out", method, calibration=text, **options)
    assert (report["resumed_layers"], len(calls)) == (2, 17 + 14)
    assert [layer["layer"] for layer in report["layers"]] == [0, 1, 2, 3]
    assert {path.name for path in tmp_path.iterdir()} - before == {"out"}
    assert_equal(tmp_path / "out", tmp_path / "whole")


def assert_equal(one, other):
    if one.is_file():
        assert one.read_bytes() == other.read_bytes()
        return
    ours, theirs = open_source(one), open_source(other)
    assert ours.names() == theirs.names()
    assert all(torch.equal(ours.tensor(name), theirs.tensor(name)) for name in ours.names())


@pytest.mark.parametrize("change", ["seed", "weights", "damage"])
def test_layers_of_another_request_or_damaged_ones_are_not_used(tmp_path, monkeypatch, change):
    source, text = written(tmp_path, "llama"), write_text(tmp_path)
    fail_at(monkeypatch, 17)
    with pytest.raises(OSError, match="gave up"):
        pruned(source, tmp_path / "out", calibration=text)
    if change == "weights":
        os.utime(source / "model.safetensors", ns=(0, 0))
    elif change == "damage":
        (tmp_path / ".out.pruning" / "layer-00001.safetensors").write_bytes(b"nothing")
    report = pruned(source, tmp_path / "out", calibration=text, seed=1 if change == "seed" else 0)
    assert report["resumed_layers"] == (1 if change == "damage" else 0)


def test_the_time_that_remains_is_told_in_layers(tmp_path, capsys):
    pruned(written(tmp_path, "llama"), tmp_path / "out")
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("layer ")]
    assert [line.partition(" s  ")[2].partition(",")[0] for line in said] == [
        "3 layers left", "2 layers left", "1 layer left", "",
    ]  # fmt: skip
    assert ", about " in said[0]


@pytest.mark.slow
def test_a_killed_prune_leaves_no_output_and_continues_after_its_last_layer(workplace):
    source = written(workplace.path, "llama")
    command = ["prune", str(source), "out", "--method", "sparsegpt", "--calibration", "tokens_text_document"]
    process = workplace.start(*command, "--sequence-length", "256", "--samples", "64")
    while "layer   1" not in (process.stderr.readline() or "layer   1"):
        pass
    process.send_signal(signal.SIGKILL)
    kill(process)
    assert not (workplace.path / "out").exists()
    time.sleep(0.1)
    again = workplace.steelyard(*command, "--sequence-length", "256", "--samples", "64", "--json")
    assert again.returncode == 0, again.stderr
    assert json.loads(again.stdout)["resumed_layers"] >= 1
    command[2] = "whole"
    assert workplace.steelyard(*command, "--sequence-length", "256", "--samples", "64").returncode == 0
    assert_equal(workplace.path / "out", workplace.path / "whole")


def test_windows_are_chosen_by_the_seed_and_the_same_from_text_and_from_token_files(tmp_path):
    class Bytes:
        def framed(self, text):
            return list(text.encode())

    text = "".join(chr(65 + number % 26) for number in range(3000))
    (tmp_path / "a.txt").write_text(text)
    from tests.conftest import write_documents

    write_documents(tmp_path / "a", [np.frombuffer(text[:1000].encode(), np.uint8), list(text[1000:].encode())], 256)
    asked = Calibration(str(tmp_path / "a.txt"), 7, 50, 3)
    from_text = windows(asked, Bytes(), 256)
    from_files = windows(Calibration(str(tmp_path / "a"), 7, 50, 3), None, 256)
    assert torch.equal(from_text.tokens_BL, from_files.tokens_BL)
    assert from_text.tokens_BL.shape == (7, 50)
    others = windows(Calibration(str(tmp_path / "a"), 7, 50, 4), None, 256)
    assert not torch.equal(others.tokens_BL, from_files.tokens_BL)
    with pytest.raises(UserError, match="contains token id"):
        windows(asked, Bytes(), 80)


def test_an_empty_text_is_called_so(tmp_path):
    class Nothing:
        def framed(self, text):
            return []

    (tmp_path / "a.txt").write_text("")
    with pytest.raises(UserError, match="has fewer than two tokens"):
        windows(Calibration(str(tmp_path / "a.txt"), 2, 10, 0), Nothing(), 256)


def test_of_a_long_text_only_the_beginning_is_read(tmp_path, monkeypatch):
    from steelyard.sparsity import calibration

    monkeypatch.setattr(calibration, "FEWEST_CHARACTERS", 100)
    (tmp_path / "a.jsonl").write_text('{"text": "aé"}\n' * 500 + "not JSON, and never reached\n")
    (tmp_path / "a.txt").write_text("é" * 5000)

    class Characters:
        def framed(self, text):
            return [ord(letter) for letter in text]

    for name in ("a.jsonl", "a.txt"):
        found = windows(Calibration(str(tmp_path / name), 2, 10, 0), Characters(), 256)
        assert "the first 320 tokens" in found.described

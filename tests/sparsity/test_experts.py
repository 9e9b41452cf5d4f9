"""Experts pruned: each by the tokens that the router sends to it, as if its matrix were alone."""

import pytest
import torch

from steelyard.checkpoint.formats import open_source
from steelyard.checkpoint.formats.write import Target, convert
from steelyard.core.recipe.families.moe import MixtralConfig
from steelyard.model.experts import ExpertLinear
from steelyard.sparsity.calibration import Calibration, windows
from steelyard.sparsity.mask_export import write
from steelyard.sparsity.mask_file import MaskFile
from steelyard.sparsity.patterns import Pattern
from steelyard.sparsity.prune import prune
from steelyard.sparsity.prune_request import PruneRequest
from steelyard.sparsity.pruned_source import masked
from steelyard.sparsity.semi_structured import export
from steelyard.sparsity.target_modules import maskable
from tests.checkpoint.models import Held, assert_equal
from tests.sparsity import published
from tests.sparsity.conftest import LEARN, Place
from tests.sparsity.small import LENGTH, loaded, write_text

CONFIG = MixtralConfig(
    family="mixtral", vocab=100, layers=2, hidden=32, heads=4, kv_heads=2, ffn=48, experts=6, experts_per_token=2
)
UNUSED = 5
SAMPLES = 12


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A folder of transformers. No token is routed to one of the experts, and few to another."""
    held = Held(CONFIG)
    for number in range(CONFIG.layers):
        router = held.parameters[f"layers.{number}.mlp.router.weight"]
        router[1], router[3], router[4], router[UNUSED] = -router[0], -router[2], 0.02 * router[4], 0
    folder = tmp_path_factory.mktemp("experts") / "hf"
    convert(held, folder, Target("hf"))
    return folder


def pruned(source, out, method, **options):
    text = write_text(out.parent)
    request = PruneRequest(str(source), out, method, calibration=text, samples=SAMPLES, length=LENGTH, **options)
    return prune(request)


def tokens(folder):
    return windows(Calibration(str(folder / "tokens"), SAMPLES, LENGTH, 0), None, 100).tokens_BL


@torch.no_grad()
def seen_by_experts(network, number, rows):
    """The inputs of each expert's matrices, by name, when the whole model reads the tokens."""
    seen = {}

    def hook(name):
        def see(_, inputs):
            x, counts = inputs
            for expert, each in enumerate(x.split(counts.tolist())):
                seen.setdefault((name, expert), []).append(each)

        return see

    modules = network.layers[str(number)].named_modules()
    handles = [each.register_forward_pre_hook(hook(name)) for name, each in modules if isinstance(each, ExpertLinear)]
    for row in rows:
        network(row[None])
    for handle in handles:
        handle.remove()
    return {key: torch.cat(each) for key, each in seen.items()}


@pytest.mark.parametrize("method", ["magnitude", "wanda", "sparsegpt"])
def test_an_expert_is_pruned_as_its_matrix_alone(source, tmp_path, method):
    """With `dense_inputs`, so that the inputs are those of the dense model in every layer."""
    report = pruned(source, tmp_path / "out", method, dense_inputs=True)
    network, after = loaded(source), open_source(tmp_path / "out")
    for number in range(CONFIG.layers):
        for (name, expert), x in seen_by_experts(network, number, tokens(tmp_path)).items():
            weight = network.get_parameter(f"layers.{number}.{name}.weight").data[expert]
            found = after.tensor(f"layers.{number}.{name}.weight")[expert]
            if method == "magnitude" or not len(x):
                assert torch.equal(found, weight * Pattern(2, 4).keep_best(weight.abs()))
            elif method == "wanda":
                assert torch.equal(found, weight * published.wanda(weight, x, 2, 4)), (number, name, expert)
            else:
                mask, updated = published.sparsegpt(weight, x, 2, 4)
                assert torch.equal(found != 0, mask), (number, name, expert)
                torch.testing.assert_close(found.double(), updated, rtol=2e-3, atol=2e-4)
    assert report["sparsity"] == report["sparsity_of_all_layers"] == 0.5
    rows = {row["name"]: row["tokens"] for row in report["layers"][0]["matrices"]}
    assert rows["layers.0.attention.query"] == SAMPLES * LENGTH
    assert sum(rows[f"layers.0.mlp.experts.up[{expert}]"] for expert in range(6)) == 2 * SAMPLES * LENGTH


def test_experts_with_few_tokens_or_none_are_named(source, tmp_path, capsys):
    pruned(source, tmp_path / "out", "wanda")
    said = capsys.readouterr().err
    assert f"layers.0.mlp.experts: no calibration token was routed to expert {UNUSED}, which magnitude prunes" in said
    assert "layers.0.mlp.experts: fewer calibration tokens than inputs were routed to expert 4 (" in said
    pruned(source, tmp_path / "magnitude", "magnitude")
    assert "calibration token" not in capsys.readouterr().err


def test_masks_of_experts_are_saved_applied_and_compressed(source, tmp_path):
    pruned(source, tmp_path / "out", "wanda")
    pruned(source, tmp_path / "m.mask", "wanda", save="mask")
    masks, after = MaskFile(tmp_path / "m.mask"), open_source(tmp_path / "out")
    assert masks.shape("layers.1.mlp.experts.down.weight") == (6, 32, 48)
    assert set(masks.names()) == set(maskable(CONFIG))
    assert_equal(masked(open_source(source), tmp_path / "m.mask"), after)
    report = export(after, tmp_path / "compressed", torch.float32, allow_dense=False)
    assert (report["compressed"], report["dense_matrices"]) == (2 * 7, 0)
    assert_equal(open_source(tmp_path / "compressed"), after)


def test_only_experts_or_all_but_experts_are_selected(source, tmp_path):
    for options, experts, others in (({"include": ("experts",)}, 0.5, 0.0), ({"exclude": ("experts",)}, 0.0, 0.5)):
        out = tmp_path / next(iter(options))
        pruned(source, out, "wanda", **options)
        after = open_source(out)
        for name in maskable(CONFIG):
            assert (after.tensor(name) == 0).float().mean() == (experts if "experts" in name else others), name


def test_masks_of_experts_are_learned_and_exported(place: Place):
    sizes = "model={family='mixtral', layers=1, hidden=32, heads=4, vocab=97, experts=4, ffn=24}"
    place.train("experts", sizes, "train.steps=1", "checkpoint.every=0")
    place.train("masks", sizes, *LEARN, "train.init_from=experts", "train.steps=3", "sparsity.learning_rate=1.0")
    write("masks", place.path / "hf", "hf")
    pruned, base = open_source(place.path / "hf"), open_source(place.path / "experts")
    for part in ("gate", "up", "down"):
        name = f"layers.0.mlp.experts.{part}.weight"
        weight, before = pruned.tensor(name), base.tensor(name)
        assert weight.shape[0] == 4
        kept = weight != 0
        assert (kept.unflatten(-1, (-1, 4)).sum(-1) == 2).all()
        assert torch.equal(weight[kept], before[kept].to(weight.dtype))
        assert not torch.equal(kept[0], kept[1])

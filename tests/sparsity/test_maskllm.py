"""MaskLLM's checkpoints, rebuilt from what is known of them: logits and masks lie beside Megatron's old names."""

import math

import pytest
import torch

from steelyard.checkpoint.formats import open_source
from steelyard.checkpoint.formats.megatron_layout import MegatronLayout
from steelyard.checkpoint.formats.write import Target, convert
from steelyard.core.errors import UserError
from steelyard.sparsity.mask_export import write
from steelyard.sparsity.mask_file import MaskFile
from steelyard.sparsity.maskllm import masks_in
from steelyard.sparsity.patterns import Pattern
from steelyard.sparsity.pruned_source import opened
from steelyard.sparsity.target_modules import maskable
from tests.sparsity.small import SHAPES, Held

OLD_NAMES = {
    "self_attention.linear_qkv": "self_attention.query_key_value",
    "self_attention.linear_proj": "self_attention.dense",
    "mlp.linear_fc1": "mlp.dense_h_to_4h",
    "mlp.linear_fc2": "mlp.dense_4h_to_h",
    "pre_mlp_layernorm": "post_attention_norm",
    "input_layernorm": "input_norm",
    "final_layernorm": "final_norm",
}


def numbered(kind):
    """A model each of whose weights is its own number, so that one can see where it went."""
    held = Held(SHAPES[kind])
    first = 0
    places = {}
    for name, tensor in held.parameters.items():
        tensor.copy_(torch.arange(first, first + tensor.numel()).view(tensor.shape))
        places[name] = range(first, first + tensor.numel())
        first += tensor.numel()
    assert first < 1 << 24  # fp32 counts no further
    return held, places


def as_weights(numbers):
    """Small weights from the numbers, the same wherever they lie."""
    return ((numbers.long() * 7919) % 1009 - 504).float() / 1500


def old_name(name: str) -> str:
    for new, old in OLD_NAMES.items():
        name = name.replace(new, old)
    return name


def maskllm(path, kind: str, layout: MegatronLayout, candidates: int = 6, with_gates: bool = True):
    """A checkpoint as MaskLLM saves it, and the logits by our names that it should give."""
    held, places = numbered(kind)
    random = torch.Generator().manual_seed(5)
    logits = {
        name: torch.randn(rows, columns // 4, candidates, generator=random)
        for name, (rows, columns) in maskable(held.config).items()
    }
    pattern = Pattern(2, 4) if candidates == 6 else Pattern(1, 4)
    masks = {name: pattern.candidates()[each.argmax(-1)].flatten(1) for name, each in logits.items()}
    convert(held, path, Target("megatron", layout))
    by_number = sorted((numbers.start, name) for name, numbers in places.items() if name in logits)

    def ours(number: int) -> tuple[str, int]:
        start, name = max(pair for pair in by_number if pair[0] <= number)
        return name, number - start

    for file in path.rglob("*.pt"):
        with torch.serialization.safe_globals([__import__("argparse").Namespace]):
            state = torch.load(file)
        model = {"embedding": {}, "encoder": {}}
        for name, tensor in state["model"].items():
            if name.startswith("embedding"):
                _, table, _ = name.split(".")
                model["embedding"][table] = {"weight": as_weights(tensor)}
            elif name.startswith("output_layer"):
                model["output_layer"] = {"weight": as_weights(tensor)}
            else:
                old = old_name(name.removeprefix("decoder."))
                model["encoder"][old] = as_weights(tensor)
                if "linear_" in name and name.endswith(".weight"):
                    found = [ours(int(number)) for number in tensor.flatten()[::4]]
                    product = old.removesuffix(".weight")
                    gate = torch.stack([logits[n].flatten(0, 1)[place // 4] for n, place in found])
                    mask = torch.stack([masks[n].view(-1, 4)[place // 4] for n, place in found]).view(tensor.shape)
                    model["encoder"][f"{product}.mask"] = mask.bfloat16()
                    if with_gates:
                        model["encoder"][f"{product}.mask"] = torch.rand(tensor.shape)  # of some forward pass
                        model["encoder"][f"{product}.diff_mask.gate"] = gate
                        model["encoder"][f"{product}.diff_mask.mask_options"] = pattern.candidates()[None]
        torch.save({**state, "model": {"language_model": model}}, file)
    for tensor in held.parameters.values():
        tensor.copy_(as_weights(tensor))
    return held, logits, masks


LAYOUTS = [MegatronLayout(), MegatronLayout(2), MegatronLayout(2, 2)]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", ["llama-3", "gpt-untied"])
def test_logits_come_back_under_our_names_from_any_cut(tmp_path, kind, layout):
    held, logits, masks = maskllm(tmp_path / "ckpt", kind, layout)
    for place in (tmp_path / "ckpt", tmp_path / "ckpt" / "iter_0000001"):
        source = open_source(place)
        found = masks_in(source)
        assert found.names() == list(logits)
        assert all(torch.equal(found.logits(name), logits[name]) for name in logits)
        assert source.layout["masks"] == 16
    seen, dense = opened(tmp_path / "ckpt"), opened(tmp_path / "ckpt", "none")
    for name, tensor in held.parameters.items():
        rows = held.config.vocab if name in ("embed.weight", "head.weight") else None
        assert torch.equal(dense.tensor(name)[:rows], tensor[:rows])
        expected = tensor * masks[name] if name in masks else tensor
        assert torch.equal(seen.tensor(name)[:rows], expected[:rows])


def test_one_of_four_is_known_by_its_four_candidates(tmp_path):
    _, _, masks = maskllm(tmp_path / "ckpt", "llama", MegatronLayout(2), candidates=4)
    found = masks_in(open_source(tmp_path / "ckpt"))
    assert str(found.pattern) == "1:4"
    assert all(torch.equal(found.mask(name), masks[name].bool()) for name in masks)


def test_masks_without_logits_are_those_of_one_shot_pruning(tmp_path):
    _, _, masks = maskllm(tmp_path / "ckpt", "llama", MegatronLayout(2), with_gates=False)
    found = masks_in(open_source(tmp_path / "ckpt"))
    assert not found.learned
    assert all(torch.equal(found.mask(name), masks[name].bool()) for name in masks)


def test_other_checkpoints_carry_no_masks(tmp_path):
    convert(Held(SHAPES["llama"]), tmp_path / "plain", Target("megatron"))
    assert masks_in(open_source(tmp_path / "plain")) is None


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda gate, options: (gate[:, :5], options), "have 5 candidates"),
        (lambda gate, options: (gate[:-1], options), "does not fit a weight of"),
        (lambda gate, options: (gate, options.flip(1)), "in another order"),
    ],
)
def test_logits_that_do_not_fit_are_refused(tmp_path, change, complaint):
    maskllm(tmp_path / "ckpt", "llama", MegatronLayout())
    file = next((tmp_path / "ckpt").rglob("*.pt"))
    with torch.serialization.safe_globals([__import__("argparse").Namespace]):
        state = torch.load(file)
    encoder = state["model"]["language_model"]["encoder"]
    for name in [name for name in encoder if name.endswith(".gate")]:
        options = name.replace(".gate", ".mask_options")
        encoder[name], encoder[options] = (part.clone() for part in change(encoder[name], encoder[options]))
    torch.save(state, file)
    with pytest.raises(UserError, match=complaint):
        found = masks_in(open_source(tmp_path / "ckpt"))
        found.logits(found.names()[0])


def test_masks_of_maskllm_are_written_as_a_mask_file_of_less_than_a_bit(tmp_path):
    _, _, masks = maskllm(tmp_path / "ckpt", "llama", MegatronLayout(2))
    write(str(tmp_path / "ckpt"), tmp_path / "m.mask", "packed", None)
    found = MaskFile(tmp_path / "m.mask")
    assert found.names() == list(masks)
    assert all(torch.equal(found.mask(name), masks[name].bool()) for name in masks)
    weights = sum(math.prod(found.shape(name)) for name in masks)
    packed = sum(found.packed(name).numel() for name in masks)
    assert packed * 8 / weights <= 0.8

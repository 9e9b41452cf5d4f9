import pytest
import torch
from transformers import StableLmConfig
from transformers.models.stablelm import modeling_stablelm as stablelm

from steelyard import model
from steelyard.core.errors import UserError
from steelyard.core.recipe import load_recipe
from steelyard.model import attention
from steelyard.model.rope import apply_rope, rope_cos_sin, scaled
from steelyard.tokens.dataloader import loss_positions_in, starts_of

TINY = {
    "gpt": ["model.layers=2", "model.hidden=32", "model.heads=4", "model.vocab=100"],
    "llama": [
        "model.layers=2",
        "model.hidden=32",
        "model.heads=4",
        "model.kv_heads=2",
        "model.ffn=48",
        "model.vocab=100",
    ],
}
RECIPES = {"gpt": "gpt2-small", "llama": "llama3.2-1b"}


def tiny(family: str, *overrides: str) -> torch.nn.Module:
    shape = load_recipe(RECIPES[family], ["parallel.tensor=1", *TINY[family], *overrides]).model
    built = model.build(shape)
    model.init_weights(built, 1, shape.init_std, shape.layers)
    return built


@pytest.mark.parametrize("family", TINY)
def test_a_token_does_not_see_the_future(family):
    network = tiny(family)
    tokens = torch.randint(0, 100, (2, 12))
    changed = tokens.clone()
    changed[:, 7:] = torch.randint(0, 100, (2, 5))
    before, after = network(tokens), network(changed)
    torch.testing.assert_close(before[:, :7], after[:, :7])
    assert not torch.allclose(before[:, 7:], after[:, 7:])


@pytest.mark.parametrize("family", TINY)
def test_padding_of_the_vocabulary_is_neither_predicted_nor_trained(family):
    network = tiny(family, "model.tied=false", "model.vocab_multiple=64")
    assert network.head.weight.shape[0] == 128
    logits = network(torch.randint(0, 100, (1, 5)))
    assert logits.shape[-1] == 100
    logits.sum().backward()
    assert network.head.weight.grad[100:].abs().max() == 0


@pytest.mark.parametrize("family", TINY)
def test_weights_depend_on_seed_and_name_alone(family):
    small, large = tiny(family), tiny(family, "model.layers=3")
    small.load_state_dict({k: v for k, v in large.state_dict().items() if k in small.state_dict()}, strict=True)
    fresh = dict(tiny(family).named_parameters())
    for name, parameter in small.named_parameters():
        if not name.endswith(("attention.output.weight", "mlp.down.weight")):  # these are scaled by the depth
            assert torch.equal(parameter, fresh[name])


@pytest.mark.parametrize("tied", ["true", "false"])
def test_llama_equals_transformers(tied):
    transformers = pytest.importorskip("transformers")
    ours = tiny("llama", f"model.tied={tied}", "model.qkv_bias=true", "model.vocab_multiple=1")
    shape = ours.config
    scaling = shape.rope_scaling
    rope = {
        "rope_type": "llama3",
        "rope_theta": shape.rope_theta,
        "factor": scaling.factor,
        "low_freq_factor": scaling.low_freq_factor,
        "high_freq_factor": scaling.high_freq_factor,
        "original_max_position_embeddings": scaling.original_positions,
    }
    config = transformers.LlamaConfig(
        vocab_size=100, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, rms_norm_eps=shape.norm_eps, tie_word_embeddings=shape.tied, attention_bias=True,
        rope_parameters=rope,
    )  # fmt: skip
    theirs = transformers.LlamaForCausalLM(config)
    names = {
        "embed": "model.embed_tokens", "norm": "model.norm", "head": "lm_head", "attention_norm": "input_layernorm",
        "mlp_norm": "post_attention_layernorm", "attention.query": "self_attn.q_proj",
        "attention.key": "self_attn.k_proj", "attention.value": "self_attn.v_proj",
        "attention.output": "self_attn.o_proj", "mlp.gate": "mlp.gate_proj", "mlp.up": "mlp.up_proj",
        "mlp.down": "mlp.down_proj",
    }  # fmt: skip
    weights = {}
    for name, tensor in ours.state_dict().items():
        stem, _, kind = name.rpartition(".")
        layer = ".".join(stem.split(".")[:2]) if stem.startswith("layers.") else ""
        inner = stem.removeprefix(f"{layer}.") if layer else stem
        weights[f"model.{layer}.{names[inner]}.{kind}" if layer else f"{names[inner]}.{kind}"] = tensor
    result = theirs.load_state_dict(weights, strict=False)
    assert not result.unexpected_keys
    assert set(result.missing_keys) == {f"model.layers.{layer}.self_attn.o_proj.bias" for layer in range(2)}
    for layer in theirs.model.layers:
        torch.nn.init.zeros_(layer.self_attn.o_proj.bias)
    tokens = torch.randint(0, 100, (2, 20))
    torch.testing.assert_close(ours(tokens), theirs(tokens).logits, atol=1e-5, rtol=0)


@pytest.mark.parametrize("tied", ["true", "false"])
def test_gpt_equals_transformers(tied):
    transformers = pytest.importorskip("transformers")
    ours = tiny("gpt", f"model.tied={tied}", "model.vocab_multiple=1")
    config = transformers.GPT2Config(
        vocab_size=100, n_embd=32, n_layer=2, n_head=4, tie_word_embeddings=ours.config.tied,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    theirs = transformers.GPT2LMHeadModel(config)
    ours_by_name = ours.state_dict()
    weights = {
        "transformer.wte.weight": ours_by_name["embed.weight"],
        "transformer.wpe.weight": ours_by_name["positions.weight"],
        "lm_head.weight": ours_by_name["head.weight"],
    }
    for kind in ("weight", "bias"):
        turn = (lambda w: w.T) if kind == "weight" else (lambda w: w)  # their Conv1D holds the transpose
        weights[f"transformer.ln_f.{kind}"] = ours_by_name[f"norm.{kind}"]
        for n in range(2):
            mine, there = f"layers.{n}", f"transformer.h.{n}"
            qkv = torch.cat([ours_by_name[f"{mine}.attention.{part}.{kind}"] for part in ("query", "key", "value")])
            weights |= {
                f"{there}.ln_1.{kind}": ours_by_name[f"{mine}.attention_norm.{kind}"],
                f"{there}.ln_2.{kind}": ours_by_name[f"{mine}.mlp_norm.{kind}"],
                f"{there}.attn.c_attn.{kind}": turn(qkv),
                f"{there}.attn.c_proj.{kind}": turn(ours_by_name[f"{mine}.attention.output.{kind}"]),
                f"{there}.mlp.c_fc.{kind}": turn(ours_by_name[f"{mine}.mlp.up.{kind}"]),
                f"{there}.mlp.c_proj.{kind}": turn(ours_by_name[f"{mine}.mlp.down.{kind}"]),
            }
    theirs.load_state_dict(weights, strict=True)
    theirs.eval()
    tokens = torch.randint(0, 100, (2, 20))
    torch.testing.assert_close(ours(tokens), theirs(tokens).logits, atol=1e-5, rtol=0)


def test_rope_scaling_keeps_short_waves_and_stretches_long_ones():
    scaling = load_recipe("llama3.1-70b").model.rope_scaling
    frequencies = torch.tensor([1.0, 1e-6])
    torch.testing.assert_close(scaled(frequencies, scaling), torch.tensor([1.0, 1e-6 / 8]))


@pytest.mark.parametrize("family", TINY)
def test_documents_in_a_row_are_as_if_alone(family):
    network = tiny(family)
    first, second = torch.randint(0, 100, (1, 6)), torch.randint(0, 100, (1, 9))
    together = torch.cat([first, second], dim=1)
    positions = torch.cat([torch.arange(6), torch.arange(9)])[None]
    numbers = torch.tensor([[0] * 6 + [1] * 9])
    logits = network(model.Batch(together, position_ids_BL=positions, documents_BL=numbers))
    torch.testing.assert_close(logits[:, :6], network(first))
    torch.testing.assert_close(logits[:, 6:], network(second))
    assert not torch.allclose(logits[:, 6:], network(together)[:, 6:])


@pytest.mark.parametrize("family", TINY)
def test_documents_by_where_they_begin_are_the_same_documents(family):
    network = tiny(family)
    tokens = torch.randint(0, 100, (2, 15))
    numbers = torch.tensor([[0] * 6 + [1] * 9, [0] + [1] * 4 + [2] * 10])
    starts = torch.from_numpy(starts_of(numbers.numpy()))
    assert (starts == 15).any()
    torch.testing.assert_close(
        network(model.Batch(tokens, document_starts_BN=starts)), network(model.Batch(tokens, documents_BL=numbers))
    )


def test_the_kernel_for_documents_is_asked_before_it_is_used():
    assert not attention.has_varlen_attention(torch.device("cpu"), torch.bfloat16, 64)
    bounds = attention.cu_seqlens_of(torch.tensor([[0, 3, 8], [0, 8, 8]], dtype=torch.int32), 8, torch.device("cpu"))
    assert (bounds.offsets.tolist(), bounds.max_seqlen) == ([0, 3, 8, 16], 8)
    mask = attention.dense_mask(bounds, 2, 8)
    assert torch.equal(mask, attention.within_documents(torch.tensor([[0] * 3 + [1] * 5, [0] * 8])))


@pytest.mark.parametrize("last_layer_too", [True, False])
@pytest.mark.parametrize("family", TINY)
def test_the_head_need_not_see_places_that_weigh_nothing(family, last_layer_too):
    network, tokens = tiny(family), torch.randint(0, 100, (3, 65))
    network.vocabulary.by_sequence = not last_layer_too
    last = list(network.layers.values())[-1]
    seen = []
    last.register_forward_hook(lambda layer, inputs, output: seen.append(output.shape[1]))
    weights = (torch.rand(3, 64) < 0.3).float()
    rows = {"tokens_BL": tokens[:, :-1], "labels_BL": tokens[:, 1:], "loss_weights_BL": weights}
    found = []
    for places in (None, torch.from_numpy(loss_positions_in(weights.numpy()))):
        network.zero_grad()
        loss = network(model.Batch(**rows, loss_positions_BK=places))
        loss.sum().backward()
        found.append([loss.detach(), *(parameter.grad.clone() for parameter in network.parameters())])
    assert places.shape[1] < 64
    assert seen == [64, places.shape[1] if last_layer_too else 64]
    for of_all, of_some in zip(*found, strict=True):
        torch.testing.assert_close(of_some, of_all)


def test_initial_weights_are_the_same_whatever_the_default_device_is():
    built = tiny("gpt")
    for name, parameter in built.named_parameters():
        rows, *row_shape = parameter.shape
        with torch.device("meta"):
            drawn = model.initial(name, range(rows), row_shape, 1, built.config.init_std, built.config.layers)
        assert torch.equal(drawn, parameter)


def test_partial_rotary_positions_are_those_of_transformers():
    recipe = load_recipe("llama3.2-1b", [*TINY["llama"], "model.head_dim=32", "model.rope_share=0.25"])
    rope = recipe.model.blocks.layers[0].attention.rope
    assert rope.width == 8
    theirs = StableLmConfig(
        hidden_size=128, num_attention_heads=4,
        rope_parameters={"rope_type": "default", "rope_theta": rope.theta, "partial_rotary_factor": 0.25},
    )  # fmt: skip
    positions, query = torch.arange(9)[None], torch.randn(1, 4, 9, 32, generator=torch.Generator().manual_seed(0))
    rotation = stablelm.StableLmRotaryEmbedding(theirs)(query, positions)
    expected, _ = stablelm.apply_rotary_pos_emb(query[..., :8], query[..., :8], *rotation)
    plain = rope_cos_sin(type(rope)(rope.theta, rope.width), positions)
    torch.testing.assert_close(apply_rope(query, plain), torch.cat([expected, query[..., 8:]], dim=-1))
    with pytest.raises(UserError, match=r"model\.rope_share"):
        recipe.model.to_hf({})

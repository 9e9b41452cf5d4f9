"""Every family against transformers: logits, greedy tokens, gradients, packed documents, and conversion both ways."""

import json

import pytest
import torch
import transformers

from steelyard import model
from steelyard.checkpoint.formats import open_source
from steelyard.checkpoint.formats.hf_config import config_from_hf
from steelyard.checkpoint.formats.key_mapping import hugging_face, joined
from steelyard.checkpoint.formats.source import TABLES, padded
from steelyard.checkpoint.formats.write import Target, convert
from steelyard.core.errors import UserError
from steelyard.evaluate.decode_graph import Decoder
from steelyard.model import Batch, Cache

SIZES = {
    "vocab_size": 96, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 6, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
WIDE_HEADS = {**SIZES, "head_dim": 32, "sliding_window": 8}
MOE = {**SIZES, "head_dim": 32, "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 48}
ROPE = {"rope_theta": 10000.0, "factor": 4.0}
CASES = {
    "llama": ("LlamaConfig", SIZES),
    "llama, linear": ("LlamaConfig", SIZES | {"rope_parameters": {"rope_type": "linear", **ROPE}}),
    "llama, yarn": (
        "LlamaConfig",
        SIZES | {"rope_parameters": {"rope_type": "yarn", "original_max_position_embeddings": 16, **ROPE}},
    ),
    "mistral, window": ("MistralConfig", SIZES | {"sliding_window": 8}),
    "qwen2": ("Qwen2Config", SIZES),
    "qwen2, window": ("Qwen2Config", SIZES | {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 0}),
    "qwen3": ("Qwen3Config", SIZES | {"head_dim": 32}),
    "qwen3, bias": ("Qwen3Config", SIZES | {"head_dim": 32, "attention_bias": True, "tie_word_embeddings": True}),
    "gemma2": ("Gemma2Config", WIDE_HEADS | {"query_pre_attn_scalar": 24}),
    "gemma3": ("Gemma3TextConfig", WIDE_HEADS | {"query_pre_attn_scalar": 24}),
    "olmo2": ("Olmo2Config", SIZES),
    "smollm3": ("SmolLM3Config", SIZES),
    "mixtral": ("MixtralConfig", SIZES | {"num_local_experts": 4, "sliding_window": 8}),
    "qwen3-moe": ("Qwen3MoeConfig", MOE),
    "qwen3-moe, dense layers": (
        "Qwen3MoeConfig",
        MOE | {"decoder_sparse_step": 2, "mlp_only_layers": [3], "norm_topk_prob": True, "attention_bias": True},
    ),
    "gpt2": ("GPT2Config", {"vocab_size": 96, "n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 64}),
}
FAST = ("llama, yarn", "qwen3", "gemma2", "gemma3", "olmo2", "smollm3", "mixtral", "qwen3-moe")
CLOSE = 1e-5  # of the largest value
LENGTH = 40


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(name, marks=[] if name in FAST else pytest.mark.slow, id=name.replace(", ", "-")) for name in CASES
    ],
)
def theirs(request, tmp_path_factory):
    """A tiny random model of transformers, and its folder."""
    name, fields = CASES[request.param]
    torch.manual_seed(0)
    network = transformers.AutoModelForCausalLM.from_config(
        getattr(transformers, name)(**fields), attn_implementation="eager", dtype=torch.float32
    ).eval()
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape))
    folder = tmp_path_factory.mktemp("family")
    network.save_pretrained(folder)
    return network, folder


def loaded(folder):
    source = open_source(folder)
    network = model.build(source.config).eval()
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            tensor = source.tensor(name)
            parameter.copy_(padded(tensor, source.config) if name in TABLES else tensor)
    return network, source


def in_files(tensors, config):
    """The tensors of transformers by their names in files, where the experts are not stacked."""
    if not config.blocks.has_experts:
        return tensors
    found = {}
    for name, tensor in tensors.items():
        if ".experts." not in name:
            found[name.replace("mlp.gate.", "block_sparse_moe.gate.") if config.family == "mixtral" else name] = tensor
            continue
        prefix, kind = name.split(".experts.")
        names = ["gate_proj", "up_proj"] if kind.startswith("gate_up") else ["down_proj"]
        for part, stacked in zip(names, tensor.chunk(len(names), dim=1), strict=True):
            for number, each in enumerate(stacked):
                their = f"{prefix}.experts.{number}.{part}"
                if config.family == "mixtral":
                    their = their.replace("mlp.", "block_sparse_moe.").replace("gate_proj", "w1")
                    their = their.replace("up_proj", "w3").replace("down_proj", "w2")
                found[f"{their}.weight"] = each
    return found


def text(rows=2, length=LENGTH):
    return torch.randint(3, 96, (rows, length), generator=torch.Generator().manual_seed(1))


def assert_close(ours, others):
    assert (ours - others).abs().max() <= CLOSE * others.abs().max()


def test_logits_and_greedy_tokens_are_those_of_transformers(theirs):
    network, _ = loaded(theirs[1])
    tokens = text()
    with torch.no_grad():
        expected = theirs[0](tokens).logits
        assert_close(network(tokens), expected)
        cache = Cache(LENGTH)
        pieces = [network(part, cache=cache) for part in (tokens[:, :17], *tokens[:, 17:].split(1, dim=1))]
        assert_close(torch.cat(pieces, dim=1), expected)
        cache = Cache(LENGTH)
        network(tokens[:, :17], cache=cache)
        decoder = Decoder(network, cache, rows=2)
        steps = [decoder.logits(part).clone() for part in tokens[:, 17:].split(1, dim=1)]
        assert_close(torch.stack(steps, dim=1), expected[:, 17:])
        settings = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        greedy = theirs[0].generate(tokens[:1, :12], **settings)[0, 12:]
        cache, ours, part = Cache(LENGTH), [], tokens[:1, :12]
        for _ in range(12):
            part = network(part, cache=cache)[:, -1:].argmax(-1)
            ours.append(part.item())
    assert ours == greedy.tolist()


def test_the_gradients_of_a_step_are_those_of_transformers(theirs):
    network, source = loaded(theirs[1])
    tokens = text()
    logits = theirs[0](tokens[:, :-1]).logits
    theirs[0].zero_grad()
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum").backward()
    network(Batch(tokens[:, :-1], tokens[:, 1:])).sum().backward()
    ours = {name: parameter.grad for name, parameter in network.named_parameters()}
    gradients = in_files({name: parameter.grad for name, parameter in theirs[0].named_parameters()}, source.config)
    for entry in hugging_face(source.config):
        parts = [ours[name][: source.config.vocab] if name in TABLES else ours[name] for name in entry.ours]
        assert_close(joined(entry, parts, source.config), gradients[entry.name])


def test_a_packed_document_is_computed_as_if_it_were_alone(theirs):
    network, _ = loaded(theirs[1])
    tokens = text(1)
    documents = torch.tensor([[0] * 11 + [1] * 20 + [2] * 9])
    positions = torch.cat([torch.arange(length) for length in (11, 20, 9)])[None]
    with torch.no_grad():
        packed = network(Batch(tokens, documents_BL=documents, position_ids_BL=positions))
        assert_close(packed[:, 11:31], network(tokens[:, 11:31]))


def test_a_converted_model_is_the_same_in_transformers(theirs, tmp_path):
    convert(open_source(theirs[1]), tmp_path / "ours", Target("steelyard"))
    convert(open_source(tmp_path / "ours"), tmp_path / "hf", Target("hf"))
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf", attn_implementation="eager").eval()
    assert type(again) is type(theirs[0])
    expected, found = theirs[0].state_dict(), again.state_dict()
    assert expected.keys() == found.keys()
    assert [name for name in expected if not torch.equal(expected[name], found[name])] == []
    with torch.no_grad():
        assert torch.equal(theirs[0](text()).logits, again(text()).logits)


@pytest.mark.parametrize("key", ["new_mechanism", "residual_multiplier"])
def test_a_setting_that_a_family_does_not_model_is_refused_by_name(theirs, key):
    values = json.loads((theirs[1] / "config.json").read_text())
    with pytest.raises(UserError, match=key):
        config_from_hf(values | {key: 0.5}, "config.json")
    config_from_hf(values | {key: None}, "config.json")

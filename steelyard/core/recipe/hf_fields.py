"""Reading Hugging Face's config.json without ignoring a setting, and the names of its tensors.

A setting that a family does not model is an error that names it: a model that loads and computes other logits is worse
than one that does not load. Settings that do not change logits are listed here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from steelyard.core.errors import UserError

# Settings of transformers that do not change the logits of a text model.
HARMLESS = frozenset(
    """
    _attn_implementation _attn_implementation_autoset _name_or_path _num_labels add_cross_attention architectures
    attention_dropout attn_implementation
    attn_pdrop auto_map bos_token_id cache_implementation chunk_size_feed_forward classifier_dropout
    cross_attention_hidden_size decoder_start_token_id dtype embd_pdrop eos_token_id exponential_decay_length_penalty
    finetuning_task forced_bos_token_id forced_eos_token_id gradient_checkpointing id2label initializer_range is_decoder
    is_encoder_decoder is_llama_config keys_to_ignore_at_inference label2id max_length
    max_sequence_length max_window_layers model_max_length model_type num_labels
    output_attentions output_hidden_states pad_token_id prefix pretraining_tp problem_type pruned_heads resid_pdrop
    return_dict rope_interleaved sep_token_id task_specific_params tf_legacy_loss tie_encoder_decoder tokenizer_class
    torch_dtype torchscript transformers_version transformers.js_config unsloth_fixed unsloth_version use_bfloat16
    use_cache use_return_dict
    """.split()  # noqa: SIM905
)
# Settings of generation in the files of old versions.
HARMLESS |= frozenset(
    """
    bad_words_ids begin_suppress_tokens diversity_penalty do_sample early_stopping encoder_no_repeat_ngram_size
    length_penalty min_length no_repeat_ngram_size num_beam_groups num_beams num_return_sequences output_scores
    remove_invalid_values repetition_penalty return_dict_in_generate suppress_tokens temperature top_k top_p typical_p
    """.split()  # noqa: SIM905
)
REQUIRED = object()


class HfFields:
    """A config.json, which records the settings that were read."""

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        self.values, self.where = values, where
        self.read: set[str] = set()

    def get(self, key: str, default: Any = REQUIRED) -> Any:
        """The value of a setting."""
        self.read.add(key)
        return self.values[key] if default is REQUIRED else self.values.get(key, default)

    def table(self, key: str) -> dict[str, Any]:
        """The value of a setting that is a table; empty if there is none."""
        value = self.get(key, None) or {}
        if not isinstance(value, dict):
            raise UserError(f"{key} is {value!r}, but must be a table", where=self.where)
        return value

    def listed(self, key: str) -> list[Any] | None:
        """The value of a setting that is a list; None if there is none."""
        value = self.get(key, None)
        if value is not None and not isinstance(value, list):
            raise UserError(f"{key} is {value!r}, but must be a list", where=self.where)
        return value

    def only(self, key: str, *supported: Any) -> None:
        """Raise if a setting has another value than the supported ones, of which the first is the default."""
        value = self.get(key, supported[0])
        if value not in supported:
            names = " or ".join(map(str, supported))
            raise UserError(f"{key} is {value}, but only {names} is supported", where=self.where)

    def ignore(self, *keys: str) -> None:
        """Accept settings that do not change logits in this family."""
        self.read.update(keys)

    def finish(self) -> None:
        """Raise if a setting was not read."""
        unknown = [key for key, value in self.values.items() if key not in self.read | HARMLESS and value is not None]
        if unknown:
            raise UserError(
                f"{', '.join(sorted(unknown)[:5])}: not supported by this family, and may change its logits",
                where=self.where,
                hint="remove the key from config.json if it does not change logits",
            )


@dataclass(frozen=True)
class HfKeys:
    """The names of a family's modules in transformers. `a.b+c` are modules b and c of a, which theirs concatenates."""

    modules: Mapping[str, str]
    """By our names within a layer."""
    embed: str = "model.embed_tokens"
    norm: str = "model.norm"
    head: str = "lm_head"
    layer: str = "model.layers.{}."
    positions: str | None = None
    transposed: bool = False
    """Whether matrices of layers are stored transposed, as GPT-2's Conv1D."""
    params: Mapping[str, str] = field(default_factory=lambda: {"offset": "weight"})
    """Parameters that have another name."""


LLAMA_MODULES = {
    "attention_norm": "input_layernorm", "attention.query": "self_attn.q_proj", "attention.key": "self_attn.k_proj",
    "attention.value": "self_attn.v_proj", "attention.output": "self_attn.o_proj",
    "attention.query_norm": "self_attn.q_norm", "attention.key_norm": "self_attn.k_norm",
    "mlp_norm": "post_attention_layernorm", "mlp.gate": "mlp.gate_proj", "mlp.up": "mlp.up_proj",
    "mlp.down": "mlp.down_proj",
}  # fmt: skip
SANDWICH_MODULES = LLAMA_MODULES | {
    "attention_post_norm": "post_attention_layernorm", "mlp_norm": "pre_feedforward_layernorm",
    "mlp_post_norm": "post_feedforward_layernorm",
}  # fmt: skip

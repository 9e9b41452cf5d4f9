"""Reads and writes adapters in PEFT's format.

    adapter_config.json           rank, alpha and targets
    adapter_model.safetensors     base_model.model.<module>.lora_A.weight (rank x in), .lora_B.weight (out x rank) and
                                  for DoRA .lora_magnitude_vector (out)

Modules are those of `transformers`. If a module holds several of our matrices, such as GPT-2's `c_attn`, their adapters
are concatenated: both rank and alpha add up, so the scale is unchanged.
"""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from steelyard import checkpoint
from steelyard.checkpoint.formats import CheckpointSource, SourceView, open_source, safetensors
from steelyard.checkpoint.formats.key_mapping import Entry, hugging_face
from steelyard.checkpoint.formats.write import Target, convert
from steelyard.core import files, sha256sums
from steelyard.core.errors import UserError
from steelyard.core.recipe.finetune_section import AdapterSection
from steelyard.core.safe_parse import read_json_object
from steelyard.finetuning.lora import merged
from steelyard.finetuning.lora_extension import STATE, AdaptedSource, saved_precision
from steelyard.finetuning.peft_experts import adapted_stacks
from steelyard.finetuning.quantized_base import QuantizedSource
from steelyard.parallel.tensor_parallel import ADAPTER_IN, ADAPTER_OUT, MAGNITUDE
from steelyard.sparsity import frozen_base

CONFIG, WEIGHTS, PREFIX = "adapter_config.json", "adapter_model.safetensors", "base_model.model."
# Settings that change the computation, and the only value of each that is supported here.
PLAIN = {
    "bias": "none", "modules_to_save": None, "use_qalora": False, "layer_replication": None, "lora_bias": False,
    "trainable_token_indices": None, "target_parameters": None, "alora_invocation_tokens": None, "use_bdlora": None,
}  # fmt: skip

BEGIN_AT_BASE = ("gaussian", "eva", "orthogonal")  # Initialisations that leave the base weights unchanged.
MOVED = "give the base that the adapter was trained on"


def export(run: Path, out: Path) -> dict[str, Any]:
    """Write a run's adapter, of its best step if it was saved."""
    source = of_run(run, None)
    if source.keeps_zeros:
        raise UserError(
            "the adapter keeps the zeros of a pruned model, which PEFT's format does not support",
            hint="use the merged weights in the run's hf folder, or write them again with steelyard adapter merge",
        )
    model_config, adapter = source.config, source.adapter
    tensors: dict[str, Tensor] = {}
    ranks: dict[str, int] = {}
    for entry in _matrices(source.origin):
        module, adapter_weights = entry.name.removesuffix(".weight"), _concatenated(entry, source)
        if adapter_weights is not None:
            tensors |= {f"{PREFIX}{module}.{name}": tensor for name, tensor in adapter_weights.items()}
            ranks[_target(module)] = len(adapter_weights["lora_A.weight"])
    if model_config.blocks.has_experts and any(".mlp." in f".{target}" for target in ranks):
        raise UserError(
            "PEFT takes adapters of an MLP in a model with experts for those of the experts",
            hint=f"steelyard adapter merge {shlex.quote(str(source.origin.path))} {shlex.quote(str(run))} OUT "
            "writes the merged weights",
        )
    stacks, stack_ranks = adapted_stacks(source)
    tensors |= {f"{PREFIX}{name}": tensor for name, tensor in stacks.items()}
    other = {target: rank for target, rank in (ranks | stack_ranks).items() if rank != adapter.rank}
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(source.origin.path),
        "r": adapter.rank,
        "lora_alpha": adapter.alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": sorted(ranks),
        "target_parameters": sorted(stack_ranks) or None,
        "rank_pattern": other,
        "alpha_pattern": {target: adapter.alpha * rank / adapter.rank for target, rank in other.items()},
        "use_dora": adapter.kind == "dora",
        "fan_in_fan_out": model_config.hf_keys.transposed,
        "inference_mode": True,
    }
    if out.exists():
        raise UserError(f"{out} already exists", hint="give a new folder")
    with files.atomic_folder(out) as folder:
        sizes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        list(safetensors.write(folder / WEIGHTS, sizes, torch.float32, tensors.values()))
        files.write_json(folder / CONFIG, config)
        sha256sums.write(folder)
    return {"path": str(out), "adapted": len(source.adapted), "targets": sorted(ranks | stack_ranks)}


def merge(model: str, adapter: str, out: Path) -> dict[str, Any]:
    """Merge an adapter, of PEFT or of a run, into its base, and write it for transformers in the base's dtype."""
    origin = open_source(model)
    is_peft = (Path(adapter) / CONFIG).is_file()
    source = PeftSource(origin, Path(adapter)) if is_peft else of_run(Path(adapter), origin)
    return convert(source, out, Target("hf", dtype=origin.dtype)) | {"adapted": len(source.adapted)}


def of_run(path: Path, origin: CheckpointSource | None, is_checked: bool = True) -> AdaptedSource:
    """The adapters of a run, or of one of its checkpoints, with their base; another base is refused."""
    saved = checkpoint.source(_best(path))
    if STATE not in saved.state:
        raise UserError(f"{path} has no adapter", hint="give a run with [finetune.adapter], or a PEFT folder")
    state = saved.state[STATE]
    adapter = AdapterSection.model_validate(state["adapter"])
    if origin is None:
        origin = frozen_base.found(state["base"], None, MOVED)
    elif is_checked:
        frozen_base.check(state["base"], origin, MOVED)
    stored = saved_precision(state)
    if stored is not None:  # The adapters were trained with these values of the base.
        origin = QuantizedSource(origin, stored)
    return AdaptedSource(open_source(saved.path), origin, adapter, state["keeps_zeros"])


def _best(path: Path) -> Path:
    return checkpoint.best(path / "checkpoints") or path


def _matrices(origin: CheckpointSource) -> list[Entry]:
    """The tensors of `transformers` that can have adapters, without experts (`peft_experts`)."""
    return [
        entry
        for entry in hugging_face(origin.config)
        if entry.layer is not None and entry.expert is None and entry.name.endswith(".weight")
    ]


def _target(module: str) -> str:
    """The name of a module in `target_modules`, with its parent: GPT-2 has two modules with the same last name."""
    return ".".join(module.split(".")[-2:])


def _concatenated(entry: Entry, source: AdaptedSource) -> dict[str, Tensor] | None:
    """The adapters of all our matrices in one `transformers` module, as one adapter."""
    modules = [name.removesuffix(".weight") for name in entry.ours]
    if not any(module in source.adapted for module in modules):
        return None
    a_matrices, b_matrices, lengths = [], [], []
    for module in modules:
        rows = source.origin.sizes()[f"{module}.weight"][0]
        adapter_weights = source.adapter_weights(module) if module in source.adapted else {}
        if adapter_weights:
            a_matrices.append(adapter_weights[ADAPTER_IN])
        b_matrices.append(adapter_weights.get(ADAPTER_OUT, torch.zeros(rows, 0)))
        if source.adapter.kind == "dora":
            own = source.origin.tensor(f"{module}.weight").float().norm(dim=1)
            lengths.append(adapter_weights.get(MAGNITUDE, own))
    concatenated = {"lora_A.weight": torch.cat(a_matrices), "lora_B.weight": torch.block_diag(*b_matrices)}
    return concatenated | ({"lora_magnitude_vector": torch.cat(lengths)} if lengths else {})


@dataclass(frozen=True)
class _PeftModule:
    """Location of the adapter of one of our matrices: a `transformers` module, and the rows of it."""

    module: str
    rows: slice


class PeftSource(SourceView):
    """A base with a PEFT adapter merged."""

    def __init__(self, origin: CheckpointSource, folder: Path) -> None:
        super().__init__(origin)
        self.format, self.path, self.dtype = "hf", folder, torch.float32
        self.adapter_config = _config(folder / CONFIG)
        if not (folder / WEIGHTS).is_file():
            raise UserError(f"{folder} has no {WEIGHTS}", hint="adapters are read only from safetensors")
        self.tensors = safetensors.extents(files.inside(folder / WEIGHTS))
        self.adapted: dict[str, _PeftModule] = {}
        used: set[str] = set()
        for entry in _matrices(origin):
            module = PREFIX + entry.name.removesuffix(".weight")
            names = [name for name in self.tensors if name.startswith(f"{module}.lora_")]
            used |= set(names)
            if names:
                self._place(entry, module)
        unknown = sorted(self.tensors.keys() - used)
        if unknown or not used:
            what = ", ".join(unknown[:5]) or "no adapter"
            raise UserError(f"{folder} does not match {origin.path}: it contains {what}", hint="give its own base")

    def _place(self, entry: Entry, module: str) -> None:
        first = 0
        sizes = self.origin.sizes()
        total = sum(sizes[name][0] for name in entry.ours)
        width = sizes[entry.ours[0]][1]
        lora_a, lora_b = (self.tensors.get(f"{module}.lora_{which}.weight") for which in "AB")
        if lora_a is None or lora_b is None or lora_a.size[1:] != (width,) or lora_b.size[:1] != (total,):
            raise UserError(f"the adapter of {module} does not fit a matrix of {total} x {width}", where=str(self.path))
        for name in entry.ours:
            rows = sizes[name][0]
            self.adapted[name] = _PeftModule(module, slice(first, first + rows))
            first += rows

    def tensor(self, name: str) -> Tensor:
        """A tensor of the base, with its adapter merged if it has one."""
        weight = super().tensor(name)
        adapted = self.adapted.get(name)
        if adapted is None:
            return weight
        lora_a = self.tensors[f"{adapted.module}.lora_A.weight"].read()
        adapter_weights = {
            ADAPTER_IN: lora_a,
            ADAPTER_OUT: self.tensors[f"{adapted.module}.lora_B.weight"].read()[adapted.rows],
        }
        if self.adapter_config.get("use_dora"):
            adapter_weights[MAGNITUDE] = self.tensors[f"{adapted.module}.lora_magnitude_vector"].read()[adapted.rows]
        return merged(weight, adapter_weights, self._scale(adapted.module, len(lora_a)))

    def _scale(self, module: str, rank: int) -> float:
        patterns = self.adapter_config.get("alpha_pattern") or {}
        own = next((value for key, value in patterns.items() if re.match(rf"(.*\.)?({key})$", module)), None)
        alpha = float(self.adapter_config["lora_alpha"] if own is None else own)
        return alpha / rank**0.5 if self.adapter_config.get("use_rslora") else alpha / rank


def _config(path: Path) -> dict[str, Any]:
    try:
        config = read_json_object(path)
        kind, alpha = config["peft_type"], float(config["lora_alpha"])
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"not a valid adapter config: {error!r}", where=str(path)) from None
    if kind != "LORA" or not alpha > 0:
        raise UserError(f"peft_type {kind} is not supported, only LoRA and DoRA", where=str(path))
    init = config.get("init_lora_weights", True)
    if isinstance(init, str) and init not in BEGIN_AT_BASE:
        raise UserError(
            f"init_lora_weights = {init} changes the base weights", where=str(path), hint="merge it with PEFT"
        )
    for key, value in PLAIN.items():
        if config.get(key, value) not in (value, [], {}, None, False):
            raise UserError(f"{key} = {config[key]} is not supported", where=str(path), hint="merge it with PEFT")
    return config

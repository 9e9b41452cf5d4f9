"""Adapters in PEFT's format, written and read.

    adapter_config.json           rank, alpha and targets
    adapter_model.safetensors     base_model.model.<module>.lora_A.weight (rank x in), .lora_B.weight (out x rank) and
                                  for DoRA .lora_magnitude_vector (out)

Modules are those of `transformers`. Where one of them holds several of our matrices, as GPT-2's `c_attn` does, their
adapters are put side by side: the ranks add up, and so does alpha, which leaves the scale as it is.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from steelyard import checkpoint
from steelyard.checkpoint.formats import CheckpointSource, open_source, safetensors
from steelyard.checkpoint.formats.key_mapping import Entry, hugging_face
from steelyard.checkpoint.formats.write import Target, convert
from steelyard.core import files, sha256sums
from steelyard.core.errors import UserError
from steelyard.core.recipe.finetune_section import AdapterSection
from steelyard.core.recipe.model_section import GptConfig
from steelyard.core.safe_parse import read_json_object
from steelyard.finetuning.lora import merged
from steelyard.finetuning.lora_extension import STATE, AdaptedSource
from steelyard.parallel.tensor_parallel import ADAPTER_IN, ADAPTER_OUT, MAGNITUDE
from steelyard.sparsity import frozen_base

CONFIG, WEIGHTS, PREFIX = "adapter_config.json", "adapter_model.safetensors", "base_model.model."
# What a configuration may say that changes the arithmetic, and the one value of it that is known here.
PLAIN = {
    "bias": "none", "modules_to_save": None, "use_qalora": False, "layer_replication": None, "lora_bias": False,
    "trainable_token_indices": None, "target_parameters": None, "alora_invocation_tokens": None, "use_bdlora": None,
}  # fmt: skip

BEGIN_AT_BASE = ("gaussian", "eva", "orthogonal")  # Ways for an adapter to begin that leave the base as it is.
MOVED = "name the base that the adapter was trained on"


def export(run: Path, out: Path) -> dict[str, Any]:
    """Write a run's adapter, of its best step where that was kept."""
    source = of_run(run, None)
    if source.keeps_zeros:
        raise UserError(
            "the adapter leaves the zeros of a pruned model as they are, which PEFT's format cannot say",
            hint="the merged weights are in the run's hf folder; steelyard adapter merge writes them anew",
        )
    shape, adapter = source.config, source.adapter
    tensors: dict[str, Tensor] = {}
    ranks: dict[str, int] = {}
    for entry in _matrices(source.origin):
        module, learned = entry.name.removesuffix(".weight"), _side_by_side(entry, source)
        if learned is not None:
            tensors |= {f"{PREFIX}{module}.{name}": tensor for name, tensor in learned.items()}
            ranks[_target(module)] = len(learned["lora_A.weight"])
    other = {target: rank for target, rank in ranks.items() if rank != adapter.rank}
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(source.origin.path),
        "r": adapter.rank,
        "lora_alpha": adapter.alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": sorted(ranks),
        "rank_pattern": other,
        "alpha_pattern": {target: adapter.alpha * rank / adapter.rank for target, rank in other.items()},
        "use_dora": adapter.kind == "dora",
        "fan_in_fan_out": isinstance(shape, GptConfig),
        "inference_mode": True,
    }
    if out.exists():
        raise UserError(f"{out} is there already", hint="name a new folder")
    with files.atomic_folder(out) as folder:
        sizes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        list(safetensors.write(folder / WEIGHTS, sizes, torch.float32, tensors.values()))
        files.write_json(folder / CONFIG, config)
        sha256sums.write(folder)
    return {"path": str(out), "adapted": len(source.adapted), "targets": sorted(ranks)}


def merge(model: str, adapter: str, out: Path) -> dict[str, Any]:
    """Fold an adapter, of PEFT's or of a run, into its base, and write that for transformers in the base's dtype."""
    origin = open_source(model)
    is_theirs = (Path(adapter) / CONFIG).is_file()
    source = PeftSource(origin, Path(adapter)) if is_theirs else of_run(Path(adapter), origin)
    source.tokenizer, source.load_tokenizer = origin.tokenizer, origin.load_tokenizer  # type: ignore[method-assign]
    return convert(source, out, Target("hf", dtype=origin.dtype)) | {"adapted": len(source.adapted)}


def of_run(path: Path, origin: CheckpointSource | None, is_checked: bool = True) -> AdaptedSource:
    """The adapters of a run, or of one of its checkpoints, over the base they belong to and no other."""
    saved = checkpoint.source(_best(path))
    if STATE not in saved.state:
        raise UserError(f"{path} tuned no adapter", hint="name a run with [finetune.adapter], or a folder of PEFT's")
    reported = saved.state[STATE]
    adapter = AdapterSection.model_validate(reported["adapter"])
    if origin is None:
        origin = frozen_base.found(reported["base"], None, MOVED)
    elif is_checked:
        frozen_base.check(reported["base"], origin, MOVED)
    return AdaptedSource(open_source(saved.path), origin, adapter, reported["keeps_zeros"])


def _best(path: Path) -> Path:
    return checkpoint.best(path / "checkpoints") or path


def _matrices(origin: CheckpointSource) -> list[Entry]:
    """The tensors of `transformers` that adapters may belong to."""
    return [
        entry for entry in hugging_face(origin.config) if entry.layer is not None and entry.name.endswith(".weight")
    ]


def _target(module: str) -> str:
    """How a configuration names a module of every layer: GPT-2 has two that end alike."""
    return ".".join(module.split(".")[-2:])


def _side_by_side(entry: Entry, source: AdaptedSource) -> dict[str, Tensor] | None:
    """The adapters of the matrices that one of theirs holds, as one."""
    modules = [name.removesuffix(".weight") for name in entry.ours]
    if not any(module in source.adapted for module in modules):
        return None
    ways_in, ways_out, lengths = [], [], []
    for module in modules:
        rows = source.origin.sizes()[f"{module}.weight"][0]
        learned = source.learned(module) if module in source.adapted else {}
        if learned:
            ways_in.append(learned[ADAPTER_IN])
        ways_out.append(learned.get(ADAPTER_OUT, torch.zeros(rows, 0)))
        if source.adapter.kind == "dora":
            own = source.origin.tensor(f"{module}.weight").float().norm(dim=1)
            lengths.append(learned.get(MAGNITUDE, own))
    side_by_side = {"lora_A.weight": torch.cat(ways_in), "lora_B.weight": torch.block_diag(*ways_out)}
    return side_by_side | ({"lora_magnitude_vector": torch.cat(lengths)} if lengths else {})


@dataclass(frozen=True)
class _Theirs:
    """Where the adapter of one of our matrices lies: a module of theirs, and the rows of it."""

    module: str
    rows: slice


class PeftSource(CheckpointSource):
    """A base with an adapter of PEFT's folded in."""

    format = "hf"

    def __init__(self, origin: CheckpointSource, folder: Path) -> None:
        self.origin, self.path, self.config, self.dtype = origin, folder, origin.config, torch.float32
        self.layout, self.extra, self.tokenizer_files = origin.layout, dict(origin.extra), origin.tokenizer_files
        self.adapter_config = _config(folder / CONFIG)
        if not (folder / WEIGHTS).is_file():
            raise UserError(f"{folder} has no {WEIGHTS}", hint="adapters are read from safetensors alone")
        self.tensors = safetensors.extents(files.inside(folder / WEIGHTS))
        self.adapted: dict[str, _Theirs] = {}
        used: set[str] = set()
        for entry in _matrices(origin):
            module = PREFIX + entry.name.removesuffix(".weight")
            names = [name for name in self.tensors if name.startswith(f"{module}.lora_")]
            used |= set(names)
            if names:
                self._place(entry, module)
        unknown = sorted(self.tensors.keys() - used)
        if unknown or not used:
            what = ", ".join(unknown[:5]) or "no tensor at all"
            raise UserError(f"{folder} holds {what}, which is no part of {origin.path}", hint="name its own base")

    def _place(self, entry: Entry, module: str) -> None:
        first = 0
        sizes = self.origin.sizes()
        total = sum(sizes[name][0] for name in entry.ours)
        width = sizes[entry.ours[0]][1]
        way_in, way_out = (self.tensors.get(f"{module}.lora_{which}.weight") for which in "AB")
        if way_in is None or way_out is None or way_in.size[1:] != (width,) or way_out.size[:1] != (total,):
            raise UserError(f"the adapter of {module} does not fit a matrix of {total} x {width}", where=str(self.path))
        for name in entry.ours:
            rows = sizes[name][0]
            self.adapted[name] = _Theirs(module, slice(first, first + rows))
            first += rows

    def names(self) -> list[str]:
        """Those of the base."""
        return self.origin.names()

    def sizes(self) -> dict[str, tuple[int, ...]]:
        """Those of the base."""
        return self.origin.sizes()

    def tensor(self, name: str) -> Tensor:
        """A tensor of the base, with its adapter if it has one."""
        weight = self.origin.tensor(name)
        theirs = self.adapted.get(name)
        if theirs is None:
            return weight
        way_in = self.tensors[f"{theirs.module}.lora_A.weight"].read()
        learned = {ADAPTER_IN: way_in, ADAPTER_OUT: self.tensors[f"{theirs.module}.lora_B.weight"].read()[theirs.rows]}
        if self.adapter_config.get("use_dora"):
            learned[MAGNITUDE] = self.tensors[f"{theirs.module}.lora_magnitude_vector"].read()[theirs.rows]
        return merged(weight, learned, self._scale(theirs.module, len(way_in)))

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
        raise UserError(f"this is no configuration of an adapter: {error!r}", where=str(path)) from None
    if kind != "LORA" or not alpha > 0:
        raise UserError(f"the adapter is of the kind {kind}, and LoRA and DoRA are known", where=str(path))
    begun = config.get("init_lora_weights", True)
    if isinstance(begun, str) and begun not in BEGIN_AT_BASE:
        raise UserError(
            f"it began with {begun}, which changes the base", where=str(path), hint="merge it with PEFT itself"
        )
    for key, value in PLAIN.items():
        if config.get(key, value) not in (value, [], {}, None, False):
            raise UserError(f"{key} = {config[key]} is not known", where=str(path), hint="merge it with PEFT itself")
    return config

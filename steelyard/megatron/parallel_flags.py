"""`[parallel]` and the batch: the world size, the layout and the batch sizes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from steelyard.core.errors import UserError
from steelyard.core.safe_parse import loads
from steelyard.megatron.cli_args import DroppedFlag
from steelyard.megatron.recipe_draft import DEFAULT, Draft
from steelyard.megatron.shell import symbolic

# Launchers: flags whose product is the world size.
PER_NODE = {"--nproc_per_node", "--nproc-per-node", "--num_gpus", "--ntasks-per-node", "--gpus-per-node"}
NODES = {"--nnodes", "--num_nodes", "--nodes", "-N"}
RANKS = {"-np", "-n", "--np", "--ntasks", "--num_processes"}
VARIABLES = (("NPROC_PER_NODE", "NNODES"), ("GPUS_PER_NODE", "NUM_NODES"), ("GPUS_PER_NODE", "NNODES"))
# Settings of DeepSpeed that the flags also give, or that only print or place memory.
NO_EFFECT = {"steps_per_print", "wall_clock_breakdown", "gradient_accumulation_steps", "zero_allow_untested_optimizer",
             "prescale_gradients"}  # fmt: skip
TORCH = re.compile(r"torchrun$|torch\.distributed\.(launch|run)$|^deepspeed$|/deepspeed$|^accelerate$")


def world(launchers: list[list[str]], variables: Mapping[str, object]) -> int | None:
    """The world size, from the innermost launcher that sets it, or from the usual variables of scripts."""
    batch = [word for words in launchers if words[:1] == ["sbatch"] for word in words]
    for words in reversed(launchers):
        name = words[0].rpartition("/")[2] if words else ""
        if any(TORCH.search(word) for word in words):
            per_node, nodes = _option(words, PER_NODE), _option(words, NODES)
            ranks = _option(words, {"--num_processes"})
            if ranks or per_node:
                return ranks or (per_node or 1) * (nodes or 1)
        elif name in ("mpirun", "mpiexec", "mpirun.openmpi"):
            if ranks := _option(words, RANKS) or _by_hosts(words):
                return ranks
        elif name == "srun":
            ranks = _option(words, RANKS) or _option(batch, RANKS)
            per_node = _option(words, {"--ntasks-per-node"}) or _option(batch, {"--ntasks-per-node"})
            nodes = _option(words, NODES) or _option(batch, NODES)
            if ranks or (per_node and nodes):
                return ranks or (per_node or 1) * (nodes or 1)
    return _from_variables(variables)


def account(launchers: list[list[str]], left: list[DroppedFlag], carried: dict[str, str]) -> None:
    """Add every flag of the launchers to `carried` or `left`."""
    for words in launchers:
        for at, word in enumerate(words):
            name, equals, value = word.partition("=")
            if name in PER_NODE | NODES | RANKS | {"--host", "-host", "-H", "--map-by"}:
                carried[name] = "parallel.data"
            elif word.startswith("-") and word != "-m" and " " not in word:
                following = "".join(words[at + 1 : at + 2])
                value = value if equals or following.startswith("-") else following
                left.append(
                    DroppedFlag(
                        name, symbolic.shown(value), "a flag of the launcher; a recipe does not start processes", False
                    )
                )


def _option(words: list[str], names: set[str]) -> int | None:
    for at, word in enumerate(words):
        name, equals, value = word.partition("=")
        if name in names:
            text = value if equals else "".join(words[at + 1 : at + 2])
            return int(text) if text.isdigit() and int(text) > 0 else None
    return None


def _by_hosts(words: list[str]) -> int | None:
    """`--map-by ppr:8:node` on every host of `--host a:8,b:8`, or the slots of the hosts."""
    values = {word: "".join(words[at + 1 : at + 2]) for at, word in enumerate(words)}
    hosts = (values.get("--host") or values.get("-host") or values.get("-H") or "").split(",")
    if not hosts[0]:
        return None
    each = re.match(r"ppr:(\d+):node", values.get("--map-by", "") or values.get("-map-by", ""))
    if each:
        return int(each.group(1)) * len(hosts)
    slots = [host.partition(":")[2] or "1" for host in hosts]
    return sum(int(slot) for slot in slots) if all(slot.isdigit() for slot in slots) else None


def _from_variables(variables: Mapping[str, object]) -> int | None:
    def whole(name: str) -> int | None:
        value = variables.get(name)
        return int(value) if isinstance(value, str) and value.isdigit() and int(value) > 0 else None

    if ranks := whole("WORLD_SIZE"):
        return ranks
    for per_node, nodes in VARIABLES:
        if whole(per_node) and whole(nodes):
            return (whole(per_node) or 1) * (whole(nodes) or 1)
    return None if names_nodes(variables) else whole("GPUS_PER_NODE") or whole("NPROC_PER_NODE")


def names_nodes(variables: Mapping[str, object]) -> bool:
    """Whether a script's variables set the number of nodes; otherwise there is one."""
    return any(nodes in variables for _, nodes in VARIABLES)


def parallel(draft: Draft, ranks: int | None, config: dict[str, Any]) -> None:
    """Data parallelism, stages, ZeRO and recomputation. `model.layers` and the other mesh sizes are already set."""
    _data(draft, ranks)
    _stages(draft)
    _zero(draft, config)
    _recompute(draft)
    tensor, wanted = draft.get("parallel.tensor"), draft.given.has("--sequence-parallel")
    if wanted and tensor == 1:
        draft.given.leave("--sequence-parallel", "no effect with parallel.tensor = 1", matters=False)
    else:
        draft.put_or(
            "parallel.sequence_parallel",
            draft.given.switch("--sequence-parallel", "parallel.sequence_parallel") or None,
            False,
        )


def _data(draft: Draft, ranks: int | None) -> None:
    for key in ("parallel.tensor", "parallel.pipeline", "parallel.context"):
        if draft.get(key) < 1:
            draft.reject(key, draft.get(key), f"{draft.get(key)} is not a valid size")
            draft.put(key, 1)
    copy = draft.get("parallel.tensor") * draft.get("parallel.pipeline") * draft.get("parallel.context")
    if ranks is None:
        draft.ask("how many ranks will there be? parallel.data is not set, so it follows from the world size")
        return
    if ranks % copy:
        draft.ask(
            f"the script starts {ranks} ranks, which is not a multiple of tensor x pipeline x context = {copy}: how "
            "many ranks will there be? parallel.data is not set, so it follows from the world size"
        )
        return
    draft.put("parallel.data", ranks // copy, f"{ranks} ranks / {copy}")


def _stages(draft: Draft) -> None:
    given, layers, pipeline = draft.given, draft.get("model.layers"), draft.get("parallel.pipeline")
    partition = given.text("--balance", "parallel.partition")
    per_stage = given.whole("--num-layers-per-virtual-pipeline-stage", "parallel.virtual")
    virtual = given.whole("--num-virtual-stages-per-pipeline-rank", "parallel.virtual")
    first = given.whole("--decoder-first-pipeline-num-layers", "parallel.partition")
    last = given.whole("--decoder-last-pipeline-num-layers", "parallel.partition")
    if per_stage:
        virtual = layers // pipeline // per_stage
    if virtual and virtual > 1:
        draft.put("parallel.virtual", virtual)
        draft.put("parallel.schedule", "interleaved")
    elif pipeline > 1:
        draft.put("parallel.schedule", "1f1b", DEFAULT)
    if partition:
        draft.put("parallel.partition", partition)
    elif pipeline > 1 and "model.layers" not in draft.unsound:
        _even(draft, layers, pipeline, virtual or 1, first, last)


def _even(draft: Draft, layers: int, pipeline: int, virtual: int, first: int | None, last: int | None) -> None:
    """Megatron splits the layers evenly; without the key Steelyard would balance them by cost."""
    ends = [count for count in (first, last) if count is not None]
    rest = pipeline * virtual - len(ends)
    if rest and (layers - sum(ends)) % rest:
        draft.ask(f"{layers} layers are not divisible by {pipeline * virtual} stages: parallel.partition is not set")
        return
    middle = [(layers - sum(ends)) // rest] * rest if rest else []
    counts = [*([] if first is None else [first]), *middle, *([] if last is None else [last])]
    draft.put("parallel.partition", "-".join(map(str, counts)), "" if ends else DEFAULT)


def _zero(draft: Draft, config: dict[str, Any]) -> None:
    given = draft.given
    stage = given.whole("--zero-stage", "parallel.zero")
    strategy = given.text("--data-parallel-sharding-strategy", "parallel.zero")
    shards = {"no_shard": 0, "optim": 1, "optim_grads": 2, "optim_grads_params": 3}.get(strategy or "")
    fully = 3 if given.switch("--use-torch-fsdp2", "parallel.zero") else None
    optimizer = 1 if given.switch("--use-distributed-optimizer", "parallel.zero") else None
    section = config.get("zero_optimization")
    configured = section.get("stage") if isinstance(section, dict) else None
    for value in (stage, shards, fully, optimizer, configured):
        if value is not None:
            draft.put("parallel.zero", value)
            return
    if given.has("--deepspeed") and not config:
        draft.ask("which ZeRO stage does the DeepSpeed config have? parallel.zero is set to 0")
    draft.put("parallel.zero", 0, "no --use-distributed-optimizer in the script")


def _recompute(draft: Draft) -> None:
    given, key = draft.given, "parallel.recompute"
    how = given.text("--recompute-granularity", key)
    if given.switch("--recompute-activations", key):
        how = how or "selective"
    if given.switch("--deepspeed-activation-checkpointing", key):
        how = "full"
    method = given.text("--recompute-method", key)
    if older := given.text("--activations-checkpoint-method", key):
        how, method = "full", older
    given.leave("--activations-checkpoint-num-layers", "layers are checkpointed one by one", matters=False)
    count = given.whole("--recompute-num-layers", key) if how == "full" and method == "block" else None
    given.leave("--recompute-num-layers", "layers are checkpointed one by one; only memory changes", matters=False)
    given.leave("--checkpoint-num-layers", "layers are checkpointed one by one; only memory changes", matters=False)
    draft.put_or(key, count if count is not None else how, "none")


def deepspeed(draft: Draft) -> dict[str, Any]:
    """The DeepSpeed config, if the script writes it or it exists; what no flag gives is added to the flags."""
    if not draft.given.has("--deepspeed_config"):
        return {}
    name = symbolic.shown(" ".join(draft.given.flags["--deepspeed_config"]))
    try:
        text = draft.given.files.get(name)
        config = loads(Path(name).read_text(encoding="utf-8") if text is None else text)
        draft.given.carry("--deepspeed_config", "parallel.zero")
    except (OSError, ValueError):
        reason = "this file cannot be read; only flags give the ZeRO stage, the batch and the precision"
        draft.given.carried.pop("--deepspeed_config", None)
        draft.given.leave("--deepspeed_config", reason)
        return {}
    if not isinstance(config, dict):
        raise UserError("this DeepSpeed config is not a JSON object", where=name)
    known = {
        "zero_optimization",
        "train_batch_size",
        "train_micro_batch_size_per_gpu",
        "fp16",
        "bf16",
        "gradient_clipping",
    }
    for entry in sorted(set(config) - known - NO_EFFECT):
        draft.given.note(f"{entry} in {name}", "a setting of DeepSpeed")
    return _only_here(draft, config)


def _only_here(draft: Draft, config: dict[str, Any]) -> dict[str, Any]:
    """Settings that Megatron-DeepSpeed reads from the file if no flag gives them."""
    given = draft.given
    for entry, flag in (
        ("train_batch_size", "--global-batch-size"),
        ("train_micro_batch_size_per_gpu", "--micro-batch-size"),
    ):
        if isinstance(config.get(entry), int) and not given.has(flag):
            given.add([flag, str(config[entry])])
    for entry in ("fp16", "bf16"):
        if isinstance(config.get(entry), dict) and config[entry].get("enabled") and not given.has(f"--{entry}"):
            given.add([f"--{entry}"])
    if isinstance(config.get("gradient_clipping"), float | int) and not given.has("--clip-grad"):
        given.add(["--clip-grad", str(config["gradient_clipping"])])
    return config


def batch(draft: Draft) -> None:
    """`train.micro_batch`, `train.global_batch` and `train.batch_ramp`."""
    given, data = draft.given, draft.get("parallel.data")
    micro = given.whole("--micro-batch-size", "train.micro_batch")
    if micro is None:
        draft.ask("--micro-batch-size is not given: train.micro_batch is set to 1")
    micro = micro or 1
    draft.put("train.micro_batch", micro)
    whole = given.whole("--global-batch-size", "train.global_batch")
    if whole is None and data is None:
        draft.ask(f"Megatron's global batch is micro-batch x data ranks: train.global_batch = {micro} is for one rank")
    draft.put_or("train.global_batch", whole, micro * (data or 1))
    ramp = [text.replace("_", "") for text in given.texts("--rampup-batch-size", "train.batch_ramp")]
    if len(ramp) == 3 and all(text.isdigit() for text in ramp):
        draft.put("train.batch_ramp", dict(zip(("start", "increment", "samples"), map(int, ramp), strict=True)))
    elif ramp:
        reason = f"--rampup-batch-size is {' '.join(ramp)}, not start, increment and samples"
        draft.reject("train.batch_ramp", " ".join(ramp), reason)

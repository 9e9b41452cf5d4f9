"""Measured training steps of published work, as recipes, clusters and layouts, for `plan_accuracy.py` to predict.

Each source is a csv file. Precision and links of each are defined here, and its software by the name that
`steelyard plan --software` takes.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from measured_case import Case, cluster, even, gpt, layout, rows
from staged_steps import Width

from steelyard.core.recipe import Recipe, load_recipe
from steelyard.planning.cluster import Cluster
from steelyard.planning.software import KNOWN, Software, as_run


def vtrain(folder: Path) -> Iterator[Case]:
    """A100: single AWS p4d nodes, and 64 to 512 GPUs in nodes of eight with four HDR InfiniBand cards."""
    for name, gpu, network in (("single", "a100-40", 50.0), ("multi", "a100-80", 100.0)):
        for row in rows(folder / f"vtrain_ground_truth_{name}.csv"):
            tensor, data, pipeline = (int(row[f"{axis} parallelism"]) for axis in ("tensor", "data", "pipeline"))
            layers, batch = int(row["# layers"]), int(row["global batch"])
            hidden, heads, length = int(row["hidden size"]), int(row["attention heads"]), int(row["sequence length"])
            ranks = tensor * data * pipeline
            here = cluster([{"type": "a100", "count": -(-ranks // 8), "gpu": gpu, "gpus": 8}], network)
            yield Case(
                f"vtrain {name}",
                f"{hidden}x{layers} batch {batch} tp{tensor} dp{data} pp{pipeline} mbs{row['micro batch']}",
                f"{hidden} {layers} {batch} {ranks}",
                float(row["iteration time (ms)"]) / 1e3,
                gpt(layers, hidden, heads, length, batch, precision="fp16" if name == "single" else "bf16",
                    dropout=0.1, attention_dropout=0.1),
                here,
                layout(tensor, data, pipeline, int(row["micro batch"]), even(layers, pipeline),
                       [("a100", -(-ranks // 8))], recompute="full"),
                KNOWN["megatron"],
            )  # fmt: skip


def korthikanti(folder: Path) -> Iterator[Case]:
    """Table 5 of arXiv 2205.05198: DGX A100 nodes with eight HDR cards."""
    for row in rows(folder / "korthikanti2022_table5_a100.csv"):
        layers, tensor, pipeline, data = (int(row[key]) for key in ("layers", "tp", "pp", "dp"))
        virtual, count = int(row["vpp"]), -(-int(row["gpus(A100-80G)"]) // 8)
        full = row["recompute(full|seqpar+selective)"] == "full"
        yield Case(
            "korthikanti",
            f"{row['model']} {'full' if full else 'selective'}",
            row["model"],
            float(row["measured_iter_s"]),
            gpt(layers, int(row["hidden"]), int(row["heads"]), int(row["seq"]), int(row["global_batch"]),
                dropout=0.1, attention_dropout=0.1),
            cluster([{"type": "a100", "count": count, "gpu": "a100-80", "gpus": 8}], 200.0),
            layout(tensor, data, pipeline, int(row["micro_batch"]), even(layers, pipeline * virtual), [("a100", count)],
                   virtual=virtual, schedule="interleaved" if virtual > 1 else "1f1b",
                   recompute="full" if full else "selective", sequence_parallel=not full),
            KNOWN["megatron"],
        )  # fmt: skip


def own_engine() -> Iterator[Case]:
    """This engine on one H200 (docs/benchmarks.md, `train_speed.py`)."""
    small = ["optim.state=int8"]
    for name, precision, batch, micro_batches, measured, more in (
        ("llama3.2-1b", "bf16", 4, 1, 0.2541, []), ("llama3.2-1b", "fp8", 4, 1, 0.2199, []),
        ("gpt2-small", "bf16", 64, 1, 0.1161, []), ("llama3.2-1b", "bf16", 4, 8, 2.0237, []),
        ("llama3.1-8b", "bf16", 1, 8, 5.98466, small), ("llama3.1-8b", "fp8", 1, 8, 4.80001, small),
    ):  # fmt: skip
        sizes = [f"train.micro_batch={batch}", f"train.global_batch={batch * micro_batches}"]
        recipe = load_recipe(name, [*sizes, f"train.precision={precision}", *more])
        yield Case(
            "own engine", f"{name} {precision}", f"{name} {precision}", measured, recipe,
            cluster([{"type": "h200", "count": 1, "gpu": "h200", "gpus": 1}], 50.0),
            layout(1, 1, 1, batch, (recipe.model.layers,), [("h200", 1)]),
            KNOWN["steelyard"],
        )  # fmt: skip


def fasops_cluster() -> Iterator[Case]:
    """GPT2-XL on 8 nodes of 4 A10, from FASOP's README."""
    nodes = [{"type": "a10", "count": 8, "gpu": "a10", "gpus": 4}]
    yield Case(
        "FASOP example", "gpt2-xl tp1 dp4 pp8", "FASOP example", 1.402,
        gpt(48, 1600, 16, 1024, 64, vocab=50257),
        cluster(nodes, 12.5),
        layout(1, 4, 8, 1, (0, 11, 8, 8, 8, 8, 5, 0), [("a10", 8)]),
        KNOWN["megatron"],
    )  # fmt: skip


def amp(folder: Path) -> Iterator[Case]:
    """AWS nodes of T4 and V100. Layer counts include three modules before the first layer and after the last."""
    for row in rows(folder / "amp_real_trials.csv"):
        if row["status"] != "ok" or row["experiment"] == "het_model":
            continue
        mixed = row["experiment"] == "het_cluster"
        t4 = {"type": "t4", "count": 1 if mixed else 4, "gpu": "t4", "gpus": 4, "intra_GBps": 6.25}
        v100 = {"type": "v100", "count": 3, "gpu": "v100-16", "gpus": 4, "intra_GBps": 21.25}
        links = [{"between": ["t4", "t4"], "GBps": 6.25}]
        links += [{"between": ["v100", "*"], "GBps": 1.25}] if mixed else []
        tensor, data, pipeline = int(row["tp"]), int(row["dp"]), int(row["pp"])
        counts = [int(n) for n in row["partition_layers_per_stage(AMP layers incl. embed/head)"].split("-")]
        counts[0] -= 3
        counts[-1] -= 3
        yield Case(
            "amp v100+t4" if mixed else "amp t4",
            f"tp{tensor} dp{data} pp{pipeline} mbs{row['micro_batch']}",
            row["experiment"],
            float(row["measured_s"]),
            gpt(24, 1024, 16, 1024, int(row["global_batch"]), vocab=50257, dropout=0.1, attention_dropout=0.1),
            Cluster.model_validate({"nodes": [v100, t4] if mixed else [t4], "links": links}),
            layout(tensor, data, pipeline, int(row["micro_batch"]), tuple(counts),
                   [("v100", 3), ("t4", 1)] if mixed else [("t4", 4)], recompute="full"),
            KNOWN["megatron-deepspeed"],
        )  # fmt: skip


# Layers, width, heads, logits. Sailor's GPT-Neo ends with its last norm and computes the loss on the hidden states.
SAILOR = {"OPT-350M": (24, 1024, 16, 50257), "GPT-Neo-2.7B": (32, 2560, 20, 2560)}
# Its OPT uses ReLU, its GPT-Neo GELU.
SAILORS = {
    "OPT-350M": replace(KNOWN["megatron-deepspeed"], inner_kept=1),  # Memory alone: a recipe has no GPT with ReLU.
    "GPT-Neo-2.7B": KNOWN["megatron-deepspeed"],
}
RTX = {"RTX-3090": "rtx3090", "RTX-2080": "rtx2080", "Titan-RTX": "titan-rtx", "GH-96": "gh200-96"}


def sailor(folder: Path) -> Iterator[Case]:
    """GH200 nodes of four with a 200 Gbit/s Slingshot card per GPU (docs.cscs.ch/alps/hardware), and RTX nodes.

    Layer counts include embedding and head. The links of the RTX nodes are not published: the planner's defaults.
    """
    for row in rows(folder / "sailor_validation_measured.csv"):
        counts = [int(n) for n in row["layers_per_stage"].split("-")]
        counts[0] -= 1
        counts[-1] -= 1
        # In one row, model and layers contradict each other; the layers are right.
        name = next((name for name, shape in SAILOR.items() if shape[0] == sum(counts)), row["model"])
        if name not in SAILOR:
            print(f"skipped: Sailor's {name}, whose config is not in SAILOR", file=sys.stderr)
            continue
        layers, hidden, heads, vocab = SAILOR[name]
        stages = [
            [re.fullmatch(r"(.+)xTP(\d+)", each.strip()) for each in stage.split("+")]
            for stage in row["stage_devices"].split("|")
        ]
        if any(len({each[2] for each in stage}) > 1 for stage in stages):
            continue  # Tensor degrees differ within a stage.
        widest = max(map(len, stages))
        widths = tuple(
            Width(int(stage[0][2]), len(stage), int(row["micro_batch"]) * widest // len(stage)) for stage in stages
        )
        tensor, data = max(width.tensor for width in widths), widest
        kinds = {(RTX[each[1]], int(each[2])) for stage in stages for each in stage}
        gh200 = row["cluster"].startswith("clariden")
        nodes = [{"type": f"{kind}-{gpus}", "count": 64, "gpu": kind, "gpus": gpus} for kind, gpus in kinds]
        yield Case(
            "sailor gh200" if gh200 else "sailor rtx",
            f"{name} {row['stage_devices'].count('x')} x TP{tensor} dp{data} pp{len(stages)} mbs{row['micro_batch']}",
            f"{row['cluster']} {name} {row['N_nodes']} {row['global_batch']}",
            float(row["measured_iter_s"]),
            gpt(layers, hidden, heads, 2048, int(row["global_batch"]), vocab=vocab, precision="fp32", tied=False,
                dropout=0.1 if name == "GPT-Neo-2.7B" else 0.0),
            cluster(nodes, 100.0) if gh200 else Cluster.model_validate({"nodes": nodes}),
            layout(tensor, data, len(stages), int(row["micro_batch"]), tuple(counts),
                   [(f"{RTX[each[1]]}-{each[2]}", 1) for stage in stages for each in stage]),
            SAILORS[name],
            widths if len(set(widths)) > 1 else (),
            float(row["measured_peak_mem_bytes"]),
            device=True,
        )  # fmt: skip


LLAMA = {"8B": (32, 4096, 32, 8, 14336), "70B": (80, 8192, 64, 8, 28672), "405B": (126, 16384, 128, 8, 53248)}


def torchtitan(folder: Path) -> Iterator[Case]:
    """Llama 3.1 on H100s in nodes of eight."""
    for row in rows(folder / "torchtitan_benchmarks.csv"):
        size = row["model"].rpartition("-")[2]
        if not row["seq"]:
            row["seq"] = "8192"
        layers, hidden, heads, kv_heads, ffn = LLAMA[size]
        axis = {name: int(n) for name, n in re.findall(r"(FSDP|TP|PP|CP)(\d+)", row["parallelism"])}
        data, tensor, context, pipeline = (axis.get(name, 1) for name in ("FSDP", "TP", "CP", "PP"))
        local, length, gpus = int(row["local_batch"]), int(row["seq"]), int(row["n_gpus"])
        micro = max(1, local // pipeline)  # By default as many micro-batches as pipeline ranks.
        virtual = 2 if "nterleaved" in row["technique"] and pipeline > 1 else 1
        model = {"family": "llama", "layers": layers, "hidden": hidden, "heads": heads, "kv_heads": kv_heads,
                 "ffn": ffn, "vocab": 128256}  # fmt: skip
        fp8 = "loat8" in row["technique"]
        # Layers are compiled, except where only FSDP is listed.
        train = {"global_batch": local * data, "micro_batch": 1, "precision": "fp8" if fp8 else "bf16",
                 "fp8_scaling": "row" if "rowwise" in row["technique"] else "tensor",
                 "compile": row["technique"] != "FSDP"}  # fmt: skip
        recipe = Recipe.model_validate(
            {"name": "case", "model": model, "data": {"sequence_length": length}, "train": train}
        )
        tokens = local * length / (context * tensor * pipeline)
        recompute = "full" if row["activation_ckpt"] == "full" else "selective"
        yield Case(
            "torchtitan",
            f"{row['model']} {row['parallelism']} {row['technique']} {length}",
            f"{row['model']} {gpus} {length}",
            tokens / float(row["tokens_per_s_per_gpu"]),
            recipe,
            cluster([{"type": "h100", "count": gpus // 8, "gpu": "h100-96", "gpus": 8}], 400.0),
            layout(tensor, data, pipeline, micro, even(layers, pipeline * virtual), [("h100", gpus // 8)],
                   context=context, zero=3, virtual=virtual, schedule="interleaved" if virtual > 1 else "1f1b",
                   recompute=recompute, sequence_parallel=tensor > 1),
            as_run(titan(row["technique"]), recipe, splits_backward=False),
            peak_bytes=float(row["peak_mem_GiB"]) * 2**30 if row["peak_mem_GiB"] else None,
        )  # fmt: skip


def titan(technique: str) -> Software:
    """TorchTitan as in a row of its tables."""
    return KNOWN["torchtitan-async-tp" if re.search(r"async ?tp", technique, re.IGNORECASE) else "torchtitan"]


def cases(folder: Path) -> list[Case]:
    """All measured steps of a folder."""
    return [
        *fasops_cluster(),
        *vtrain(folder),
        *korthikanti(folder),
        *amp(folder),
        *sailor(folder),
        *torchtitan(folder),
        *own_engine(),
    ]

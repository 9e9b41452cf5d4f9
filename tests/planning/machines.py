"""Small clusters and recipes that tests plan for."""

from steelyard.core.recipe import Recipe
from steelyard.planning.cluster import Cluster
from steelyard.planning.layout import Layout
from steelyard.planning.layout_space import SearchLimits

FASOP = SearchLimits(tensor=4, recomputes=("none",), zeros=(0,), schedules=("1f1b",), virtual=1, subsets=False)


def cluster(*nodes: tuple[str, int, int], network: float = 12.5, transport: str = "rdma", **more) -> Cluster:
    """Nodes as (gpu, count, gpus), all on one network."""
    described = [{"type": gpu, "count": count, "gpu": gpu, "gpus": gpus} | more for gpu, count, gpus in nodes]
    return Cluster.model_validate(
        {"nodes": described, "links": [{"between": ["*", "*"], "GBps": network, "transport": transport}]}
    )


def gpt(layers: int = 8, hidden: int = 1024, heads: int = 16, batch: int = 16, length: int = 1024, **train) -> Recipe:
    model = {"family": "gpt", "layers": layers, "hidden": hidden, "heads": heads, "vocab": 50257, "positions": length}
    train = {"global_batch": batch, "micro_batch": 1, "precision": "fp16"} | train
    return Recipe.model_validate({"name": "gpt", "model": model, "data": {"sequence_length": length}, "train": train})


def layout(placement, counts, **more) -> Layout:
    settings = {
        "tensor": 1, "context": 1, "pipeline": len(counts), "virtual": 1, "data": 1, "zero": 0,
        "sequence_parallel": False, "schedule": "1f1b", "micro_batch": 1, "recompute": "none",
    } | more  # fmt: skip
    return Layout(partition=tuple(counts), placement=tuple(placement), **settings)


def gpt2_xl() -> Recipe:
    """FASOP's example: its model and batch."""
    return gpt(layers=48, hidden=1600, heads=16, batch=64)


def fasops_cluster() -> Cluster:
    """FASOP's example: its nodes and network."""
    nodes = [
        {"type": "a100", "count": 1, "gpu": "a100-40", "gpus": 4, "price_hour": 12.0},
        {"type": "a10", "count": 7, "gpu": "a10", "gpus": 4, "price_hour": 4.0},
    ]
    links = [{"between": ["*", "*"], "GBps": 12.5, "latency_us": 5.0, "transport": "rdma"}]
    return Cluster.model_validate({"nodes": nodes, "links": links})

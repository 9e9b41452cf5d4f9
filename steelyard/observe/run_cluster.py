"""The cluster that a run used, for its prediction: from a cluster file, or inferred from the run folder."""

from __future__ import annotations

from pathlib import Path

from steelyard.core.errors import UserError
from steelyard.core.run import Run
from steelyard.core.safe_parse import read_object
from steelyard.planning import cluster as clusters
from steelyard.planning.cluster import Cluster
from steelyard.sizes.gpu_catalogue import by_name


def of_run(run: Run, described: Path | None = None) -> Cluster | None:
    """The described cluster, or identical nodes of the run's device; None if the device is not in the catalogue."""
    if described is not None:
        return clusters.load(described)
    hosts = [read_object(path) for path in sorted((run.path / "hosts").glob("*.json"))]
    world = int(run.manifest().get("world_size", 1) or 1)
    device = next((str(host["device"]) for host in hosts if host.get("device")), _device(run))
    gpu = by_name("cpu" if device.startswith("cpu") else device)
    if gpu is None:
        return None
    count = max(1, len(hosts))
    nodes = {"type": "node", "count": count, "gpu": gpu.name, "gpus": -(-world // count)}
    try:
        return Cluster.model_validate({"nodes": [nodes]})
    except (UserError, ValueError):
        return None


def _device(run: Run) -> str:
    manifest = run.manifest()
    return str(manifest.get("device_name") or manifest.get("device", ""))

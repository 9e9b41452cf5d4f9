"""What a plan assumes: every default that the search used, and the nodes that the best plan leaves idle.

A default is an optional key that the cluster file does not give. `NODES`, `GPUS` and `LINKS` say what is used instead
of each optional key of a table; None: no figure depends on the key. Every plan looks up all missing keys, so a new key
without an entry is an error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from steelyard.core.recipe.section import Section
from steelyard.planning import update_cost
from steelyard.planning.cluster import ANY, CORE, DEFAULT_LINK, HOST_OPERATION_US, ROOT_PORTS, Cluster, Link, Nodes
from steelyard.planning.layout import Layout
from steelyard.planning.predict import Predictor
from steelyard.sizes.gpu_catalogue import Gpu


@dataclass(frozen=True)
class Assumption:
    """A value that neither the cluster file nor a measurement gives."""

    of: str
    """nodes, network, GPU or experts."""
    name: str
    key: str
    """The key of the cluster file, or the option, that replaces it."""
    text: str
    best_plan: bool
    """Whether a figure of the best plan depends on it."""


@dataclass(frozen=True)
class _Case:
    """A predictor, and the number of nodes of each type that its plans may use."""

    predictor: Predictor
    counts: dict[str, int]

    @property
    def cluster(self) -> Cluster:
        return self.predictor.cluster

    @property
    def offloads(self) -> bool:
        return self.predictor.recipe.optim.offload

    def gpu(self, nodes: Nodes) -> Gpu:
        """The GPU of a node, with the rates that a profile measured."""
        return self.predictor.stage_costs.gpu_of(nodes)

    def pairs(self) -> list[tuple[Nodes, Nodes]]:
        """The types of nodes between which a network is used."""
        nodes = [each for each in self.cluster.nodes if each.type in self.counts]
        every = [(one, other) for number, one in enumerate(nodes) for other in nodes[number:]]
        return [(one, other) for one, other in every if one is not other or self.counts[one.type] > 1]

    def uses_link_inside(self, nodes: Nodes) -> bool:
        """Whether the link of its GPUs counts: between them, and as a limit of what one GPU sends to the network."""
        return nodes.gpus > 1 or any(nodes.type in (one.type, other.type) for one, other in self.pairs())


def _intra_bandwidth(case: _Case, nodes: Nodes) -> str | None:
    wire = case.cluster.inside(nodes)
    shares = wire.transport == "pcie" and nodes.gpus > ROOT_PORTS
    shared = f", of which {nodes.gpus} GPUs share {ROOT_PORTS} root ports" if shares else ""
    return f"= {wire.bandwidth / 1e9:g} (the link of the GPU{shared})" if case.uses_link_inside(nodes) else None


def _intra_latency(case: _Case, nodes: Nodes) -> str | None:
    wire = case.cluster.inside(nodes)
    return f"= {1e6 * wire.latency:g} (typical of {wire.transport})" if nodes.gpus > 1 else None


def _intra_transport(case: _Case, nodes: Nodes) -> str | None:
    transport = case.cluster.inside(nodes).transport
    return f'= "{transport}" (the link of the GPU)' if case.uses_link_inside(nodes) else None


def _idle_watts(case: _Case, nodes: Nodes) -> str | None:
    known = case.cluster.gpu_of(nodes).watts is not None
    return f"= {nodes.idle_watts:g}: kilowatt-hours are those of the GPUs alone" if known else None


def _host_memory(case: _Case, nodes: Nodes) -> str | None:
    uses = case.offloads or case.predictor.recipe.checkpoint.memory_every
    return "is not given: host memory is not checked" if uses else None


def _link_of_gpu(case: _Case, nodes: Nodes) -> str | None:
    known = nodes.intra_GBps is not None and nodes.intra_transport is not None
    return None if known or not case.uses_link_inside(nodes) else f"= {case.gpu(nodes).link_gb:g}"


def _tf32(case: _Case, nodes: Nodes) -> str | None:
    return "is not given: products take the rate of fp32" if case.predictor.recipe.train.precision == "fp32" else None


def _sustained(case: _Case, nodes: Nodes) -> str | None:
    gpu = case.cluster.gpu_of(nodes)
    return f"= {gpu.sustained:g}" if case.gpu(nodes).sustained == gpu.sustained else None


NODES: dict[str, Callable[[_Case, Nodes], str | None] | None] = {
    "partition": None, "gres": None, "zone": None,
    "price_hour": lambda case, nodes: "is not given: plans on these nodes have no price",
    "intra_GBps": _intra_bandwidth,
    "intra_latency_us": _intra_latency,
    "intra_transport": _intra_transport,
    "idle_watts": _idle_watts,
    "host_gib": _host_memory,
    "host_GBps": lambda case, nodes: f"= {nodes.host_GBps:g} (a socket of DDR4)" if case.offloads else None,
    "host_link_GBps": lambda case, nodes: f"= {nodes.host_link_GBps:g} (PCI Express 3.0)" if case.offloads else None,
    "host_operation_us": lambda case, nodes: f"= {HOST_OPERATION_US:g}; `steelyard plan measure` prints it",
}  # fmt: skip
# A GPU without the rate of `train.precision` is idle, with this reason.
GPUS: dict[str, Callable[[_Case, Nodes], str | None] | None] = {
    "fp32": None, "fp16": None, "bf16": None, "fp8": None,
    "tf32": _tf32,
    "units": lambda case, nodes: f"= {case.gpu(nodes).units}",
    "watts": lambda case, nodes: "is not given: plans on it have no kilowatt-hours",
    "link_gb": _link_of_gpu,
    "sustained": _sustained,
}  # fmt: skip
LINKS: dict[str, Callable[[Link], str]] = {
    "latency_us": lambda link: f"= {1e6 * link.wire.latency:g} (typical of {link.wire.transport})",
    "transport": lambda link: f'= "{link.wire.transport}" (sockets); set "rdma" if it has GPUDirect RDMA',
}


def assumptions(predictor: Predictor, best: Layout, searched: bool = True) -> list[Assumption]:
    """Every default that predictions used: of all nodes that a search could use, or of those of a given layout."""
    used: dict[str, int] = {}
    for type_, count in best.placement:
        used[type_] = used.get(type_, 0) + count
    cluster, precision = predictor.cluster, predictor.recipe.train.precision
    able = {nodes.type: nodes.count for nodes in cluster.nodes if cluster.gpu_of(nodes).peak(precision) is not None}
    case, own = _Case(predictor, able if searched else used), _Case(predictor, used)
    found: dict[tuple[str, str, str, str], bool] = {}
    for type_ in case.counts:
        for each in _of_nodes(case, cluster.nodes_of(type_)):
            found[each] = found.get(each, False) or type_ in used
    in_best = {(one.type, other.type) for one, other in own.pairs()}
    for one, other in case.pairs():
        for each in _of_network(one, other, cluster.link(one, other)):
            found[each] = found.get(each, False) or (one.type, other.type) in in_best
    if predictor.dims.experts is not None and predictor.stage_costs.imbalance == 1.0:
        text = "1, an even load on expert ranks; `expert_load` of a run's metrics shows its own"
        found["experts", "of the model", "--expert-imbalance", f"--expert-imbalance = {text}"] = best.expert > 1
    return [Assumption(*each, is_best) for each, is_best in found.items()]


def _missing(section: Section) -> list[str]:
    """The optional keys of a table that the file does not give."""
    given = {key for key in section.model_fields_set if getattr(section, key) is not None}
    return [key for key, field in type(section).model_fields.items() if not field.is_required() and key not in given]


def _of_nodes(case: _Case, nodes: Nodes) -> Iterator[tuple[str, str, str, str]]:
    """The defaults of a type of node and of its GPU, as (of, name, key, text)."""
    gpu, recipe = case.cluster.gpu_of(nodes), case.predictor.recipe
    own = next((each for each in case.cluster.gpus if each.name == nodes.gpu), None)
    tables = [("nodes", nodes.type, NODES, _missing(nodes))]
    if own is not None:
        tables.append(("GPU", gpu.name, GPUS, _missing(own)))
    for of, name, rules, keys in tables:
        for key in keys:
            rule = rules[key]
            value = None if rule is None else rule(case, nodes)
            if value is not None:
                yield of, name, key, f"{key} {value}"
    kind, source = gpu.evidence
    if own is None and kind == "extrapolated" and _sustained(case, nodes) is not None:
        yield "GPU", gpu.name, "sustained", f"sustained = {gpu.sustained:g} of the peak (extrapolated: {source})"
    if gpu == CORE:
        figures = f"memory_gib = {gpu.memory_gib:g}, {recipe.train.precision} = {_peak(gpu, recipe.train.precision)}"
        figures += f", bandwidth_gb = {case.gpu(nodes).bandwidth_gb:g}, watts = {gpu.watts:g}"
        yield "GPU", gpu.name, "gpu", f"{figures} ({gpu.source}); describe the processor in a [[gpus]] table"
    if update_cost.matrix_flops(recipe) and gpu.peak(recipe.optim.muon_precision) is None:
        text = f"no rate in {recipe.optim.muon_precision}: products of Muon take that of {recipe.train.precision}"
        yield "GPU", gpu.name, "optim.muon_precision", text


def _peak(gpu: Gpu, precision: str) -> str:
    return f"{(gpu.peak(precision) or 0.0) / 1e12:g}"


def _of_network(one: Nodes, other: Nodes, link: Link | None) -> Iterator[tuple[str, str, str, str]]:
    """The defaults of the network between two types of nodes, as (of, name, key, text)."""
    if link is None:
        wire = DEFAULT_LINK.wire
        text = f"{DEFAULT_LINK.GBps:g} GB/s Ethernet through sockets, {1e6 * wire.latency:g} us; add a [[links]] table"
        yield "network", _between(one.type, other.type), "links", text
        return
    for key in _missing(link):
        yield "network", _between(*link.between), key, f"{key} {LINKS[key](link)}"


def _between(one: str, other: str) -> str:
    if one == other == ANY:
        return "of all nodes"
    return f"within {one}" if one == other else f"between {one} and {other}"


def as_lines(found: list[Assumption]) -> list[str]:
    """The assumptions as text, those of the best plan first; one line for all names with the same default."""
    lines = []
    for is_best, said in ((True, "assumed"), (False, "assumed for other plans")):
        names: dict[tuple[str, str], list[str]] = {}
        for each in found:
            if each.best_plan == is_best:
                names.setdefault((each.of, each.text), []).append(each.name)
        lines += [f"{said}: {of} {', '.join(name)}: {text}" for (of, text), name in names.items()]
    return lines


@dataclass(frozen=True)
class IdleNodes:
    """Nodes of the cluster that a plan does not use."""

    type: str
    count: int
    why: str


def idle_nodes(cluster: Cluster, layout: Layout, precision: str, unused: str) -> list[IdleNodes]:
    """The nodes that a plan leaves idle; `unused` is the reason for nodes that it could use."""
    used: dict[str, int] = {}
    for type_, count in layout.placement:
        used[type_] = used.get(type_, 0) + count
    found = []
    for nodes in cluster.nodes:
        left, gpu = nodes.count - used.get(nodes.type, 0), cluster.gpu_of(nodes)
        if left > 0:
            why = f"{gpu.name} has no {precision}" if gpu.peak(precision) is None else unused
            found.append(IdleNodes(nodes.type, left, why))
    ranks = sum(cluster.nodes_of(type_).gpus * count for type_, count in layout.placement)
    if ranks > layout.world:
        type_ = layout.placement[-1][0]
        found.append(IdleNodes(type_, 1, f"{ranks - layout.world} GPUs of its last node are not in the mesh"))
    return found

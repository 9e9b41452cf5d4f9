import pytest

from steelyard.core.errors import UserError
from steelyard.planning.cluster import Cluster, Wire, load
from steelyard.planning.communication import reached

NODES = [
    {"type": "a100", "count": 1, "gpu": "a100-40", "gpus": 4, "zone": "east"},
    {"type": "a10", "count": 7, "gpu": "a10", "gpus": 4, "zone": "west"},
]


@pytest.mark.parametrize(
    ("text", "line", "said"),
    [
        ('[[nodes]]\ntype = "a"\ncount = 0\ngpu = "a10"\ngpus = 4\n', 3, "greater than 0"),
        ('[[nodes]]\ntype = "a"\ncount = 1\ngpu = "a11"\ngpus = 4\n', 4, "the GPU a11 is not known"),
        ('[[nodes]]\ntype = "a"\ncount = 1\ngpu = "a10"\ngpus = 4\nprice = 2\n', 6, "did you mean nodes.price_hour?"),
        ('[[nodes]]\ntype = "a"\ncount = 1\ngpu = "a10"\n', 1, "is missing"),
        (
            '[[nodes]]\ntype = "a"\ncount = 1\ngpu = "a10"\ngpus = 4\n\n'
            '[[links]]\nbetween = ["a", "b"]\nGBps = 1.0\n', 8, "neither a node type nor a zone"
        ),
        (
            '[[nodes]]\ntype = "a"\ncount = 1\ngpu = "a10"\ngpus = 4\n'
            '[[nodes]]\ntype = "a"\ncount = 1\ngpu = "t4"\ngpus = 4\n', 7, "defined twice"
        ),
        ('[[nodes]]\ntype = "a"\ncount = 1 gpu\n', 3, "not TOML"),
        (
            '[[nodes]]\ntype = "a"\ncount = 1\ngpu = "a10"\ngpus = 4\n\n'
            '[[link]]\nbetween = ["a", "a"]\nGBps = 1.0\n', 7, "unknown key"
        ),
        (
            '[[nodes]]\ntype = "a"\ncount = 1\ngpu = "a10"\ngpus = 4\n'
            '[[links]]\nbetween = ["a", "*"]\nGBps = 1.0\n[[links]]\nbetween = ["*", "a"]\nGBps = 2.0\n', 10, "twice"
        ),
        (
            '[[nodes]]\ntype = "a"\ncount = 1\ngpu = "mine"\ngpus = 4\n'
            '[[gpus]]\nname = "mine"\nmemory_gib = 80\nbandwidth_gb = 2000.0\nfp8 = 600.0\n', 10, "fp8 without bf16"
        ),
        ("nodes = []\n", 1, "at least 1 item"),
        ('[[nodes]]\ntype = "a"\ncount = 1000000000\ngpu = "a10"\ngpus = 4\n', 3, "less than or equal to 10000"),
        ('[[nodes]]\ntype = "a"\ncount = 1\ngpu = "a10"\ngpus = 4\nprice_hour = inf\n', 6, "finite"),
    ],
)  # fmt: skip
def test_a_bad_cluster_file_is_told_with_its_line(tmp_path, text, line, said):
    path = tmp_path / "cluster.toml"
    path.write_text(text)
    with pytest.raises(UserError) as error:
        load(path)
    assert f"cluster.toml:{line}: " in str(error.value)
    assert said in str(error.value)


def test_the_closest_link_counts():
    links = [
        {"between": ["*", "*"], "GBps": 1.0},
        {"between": ["east", "west"], "GBps": 2.0},
        {"between": ["a10", "a10"], "GBps": 3.0, "latency_us": 4.0},
    ]
    cluster = Cluster.model_validate({"nodes": NODES, "links": links})
    a100, a10 = cluster.nodes
    assert cluster.wire(a100, a100).bandwidth == 1e9
    assert cluster.wire(a100, a10).bandwidth == cluster.wire(a10, a100).bandwidth == 2e9
    assert cluster.wire(a10, a10).bandwidth == 3e9
    assert cluster.wire(a10, a10).latency == 4e-6


def test_a_network_uses_sockets_whatever_its_latency_unless_the_file_names_rdma():
    known = {"between": ["*", "*"], "GBps": 12.5}
    for latency in (1.0, 10.0, 10.1):
        cluster = Cluster.model_validate({"nodes": NODES, "links": [known | {"latency_us": latency}]})
        assert cluster.wire(*cluster.nodes) == Wire(12.5e9, pytest.approx(latency * 1e-6), "tcp")
    fast = Cluster.model_validate({"nodes": NODES, "links": [known | {"transport": "rdma"}]})
    assert fast.wire(*fast.nodes) == Wire(12.5e9, pytest.approx(5e-6), "rdma")
    assert reached(fast.wire(*fast.nodes)) > reached(cluster.wire(*cluster.nodes))
    without = Cluster.model_validate({"nodes": NODES})
    assert without.wire(*without.nodes) == Wire(1.25e9, pytest.approx(50e-6), "tcp")


def test_the_link_inside_a_node_is_that_of_its_gpu_unless_the_file_names_it():
    cluster = Cluster.model_validate({"nodes": NODES})
    assert [cluster.inside(nodes).transport for nodes in cluster.nodes] == ["nvlink", "pcie"]
    bridged = [NODES[0], NODES[1] | {"intra_transport": "nvlink"}]
    assert Cluster.model_validate({"nodes": bridged}).insides["a10"].transport == "nvlink"


def test_a_gpu_of_the_file_goes_before_the_catalogue():
    own = {"name": "a10", "memory_gib": 99.0, "fp16": 1.0, "bandwidth_gb": 10.0}
    cluster = Cluster.model_validate({"nodes": NODES, "gpus": [own]})
    assert cluster.gpu_of(cluster.nodes[1]).memory_gib == 99.0
    assert cluster.gpu_of(cluster.nodes[0]).memory_gib == 40
    assert cluster.inside(cluster.nodes[0]).bandwidth == 300e9


def test_ranks_sit_on_nodes_in_order():
    from steelyard.planning.layout import Seats

    cluster = Cluster.model_validate({"nodes": NODES})
    seats = Seats(cluster, (("a10", 2), ("a100", 1))).of(6, 4)
    assert [(seat.node, seat.nodes.type, seat.ranks) for seat in seats] == [(1, "a10", 2), (2, "a100", 2)]

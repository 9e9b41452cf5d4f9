import socket

import pytest

from steelyard.core.errors import UserError
from steelyard.core.recipe.site_section import SiteSection
from steelyard.doctor.checks import network_interfaces, nodes
from steelyard.doctor.python_info import PythonInfo
from tests.doctor.conftest import named

SEEN = PythonInfo({"python": [3, 11, 7], "torch": "2.13.0"})


def found(bench, name, **environment):
    return named(network_interfaces.check(bench.machine(**environment), SEEN), name)


def test_a_port_that_is_taken_is_named(bench):
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        finding = found(bench, "ports", MASTER_PORT=str(port))
    assert finding.verdict == "fail"
    assert str(port) in finding.words
    assert found(bench, "ports").verdict == "ok"
    assert found(bench, "ports", MASTER_PORT="http").verdict == "fail"


@pytest.mark.parametrize(
    ("hosts", "verdict"),
    [
        ("127.0.0.1 localhost\n127.0.1.1 node7.cluster node7\n", "warn"),
        ("127.0.0.1 localhost\n10.0.0.7 node7 # the card\n", "ok"),
        ("127.0.0.1 localhost\n10.0.0.7 node70\n", "warn"),  # It does not resolve at all.
    ],
)
def test_a_name_that_leads_to_this_machine_alone_is_named(bench, hosts, verdict):
    bench.says("hostname", "node7\n")
    bench.file("/etc/hosts", hosts)
    bench.file("/sys/class/net/eth5/mtu", "")
    finding = found(bench, "hostname")
    assert finding.verdict == verdict
    if "127.0.1.1" in finding.words:
        assert "GLOO_SOCKET_IFNAME=eth5" in finding.hint


@pytest.mark.parametrize(
    ("variable", "value", "verdict"),
    [
        ("NCCL_SOCKET_IFNAME", "ib0", "fail"),
        ("NCCL_SOCKET_IFNAME", "eth", "ok"),  # NCCL takes prefixes,
        ("NCCL_SOCKET_IFNAME", "=eth", "fail"),  # unless told not to,
        ("NCCL_SOCKET_IFNAME", "^docker0,lo", "ok"),  # and exclusions.
        ("GLOO_SOCKET_IFNAME", "eth", "fail"),
        ("GLOO_SOCKET_IFNAME", "eth0", "ok"),
    ],
)
def test_an_interface_that_is_not_there_is_named(bench, variable, value, verdict):
    for name in ("eth0", "lo"):
        bench.file(f"/sys/class/net/{name}/mtu", "")
    assert found(bench, "interfaces", **{variable: value}).verdict == verdict


def ssh(bench, script):
    """An ssh that takes no options apart: the node is what follows `--`, the command what follows it."""
    bench.program("ssh", f'while [ "$1" != -- ]; do shift; done; node=$2; command=$3\n{script}')


def reply(offset=0, torch='"2.13.0"'):
    time = f"$(($(/bin/date +%s) + {offset}))"
    return (
        f'echo "{{\\"time\\": {time}, \\"python\\": [3, 11, 7], \\"torch\\": '
        + torch.replace('"', '\\"')
        + ', \\"host\\": \\"$node\\"}"'
    )


def across(bench, names="a,b"):
    return list(nodes.check(bench.machine(), SEEN, nodes.names(names)))


def test_nodes_that_answer_alike_are_good(bench):
    ssh(bench, reply())
    assert [finding.verdict for finding in across(bench)] == ["ok"] * 5


@pytest.mark.parametrize(
    ("message", "hint"),
    [
        ("b: Permission denied (publickey).", "ssh-copy-id b"),
        ("Host key verification failed.", "ssh-keyscan b"),
        ("ssh: connect to host b port 22: Connection timed out", "firewall"),
        ("sh: 1: cd: can't cd to /scratch/me", "filesystem they share"),
    ],
)
def test_a_node_that_cannot_be_reached_is_named_with_the_way_out(bench, message, hint):
    ssh(bench, f'if [ "$node" = b ]; then echo "{message}" >&2; exit 255; fi\n{reply()}')
    found = across(bench)
    assert named(found, "ssh a").verdict == "ok"
    finding = named(found, "ssh b")
    assert (finding.verdict, finding.words) == ("fail", message)
    assert hint in finding.hint


def test_the_port_and_options_of_the_site_are_used(bench):
    bench.program("ssh", f'echo "$*" >> {bench.path}/said; exit 255')
    options = nodes.options_of(SiteSection(mpi={"ssh_port": 53412, "ssh_options": ["-o StrictHostKeyChecking=no"]}))
    list(nodes.check(bench.machine(), SEEN, ["a"], options))
    assert " -p 53412 -o StrictHostKeyChecking=no -- a " in (bench.path / "said").read_text()


def test_nodes_that_do_not_reach_each_other_are_named(bench):
    ssh(
        bench,
        f'case "$node $command" in "a ssh "*) echo "Permission denied (publickey)." >&2; exit 255;; esac\n{reply()}',
    )
    finding = named(across(bench), "ssh between nodes")
    assert finding.verdict == "fail"
    assert "a to b: Permission denied" in finding.words
    assert "b to a" not in finding.words


def test_a_clock_and_a_version_that_differ_are_named(bench):
    ssh(bench, f'if [ "$node" = b ]; then {reply(offset=90)}; else {reply()}; fi')
    assert "the clock of b differs by" in named(across(bench), "clocks").words
    ssh(bench, f'if [ "$node" = b ]; then {reply(torch="null")}; else {reply()}; fi')
    finding = named(across(bench), "versions")
    assert finding.verdict == "fail"
    assert "b has torch None" in finding.words


@pytest.mark.parametrize("name", ["-oProxyCommand=touch x", "a b", "a;b", "$(b)", ",", "a\nb"])
def test_a_name_that_is_no_machines_is_refused(name):
    with pytest.raises(UserError):
        nodes.names(name)

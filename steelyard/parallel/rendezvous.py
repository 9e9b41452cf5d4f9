"""Rendezvous: choose the master address, the port and the network interface, and create the store of a job.

MASTER_ADDR and MASTER_PORT are used if they are set. Otherwise the address is the first host of srun's node list, or
127.0.0.1 if all ranks run on one machine, and rank 0 binds a free port and publishes it (`port_discovery.py`).
"""

from __future__ import annotations

import os
import re
import socket
import struct
from collections.abc import Mapping
from datetime import timedelta
from typing import TYPE_CHECKING

from steelyard.core.errors import RuntimeFailure, UserError
from steelyard.parallel import port_discovery

if TYPE_CHECKING:
    from torch.distributed import Store

ELSEWHERE = "steelyard/elsewhere"
SIOCGIFADDR = 0x8915
RDZV_ID = "STEELYARD_RDZV_ID"  # the name of a job that steelyard's own launcher starts without a port


def open_store(rank: int, size: int, local_size: int, launcher: str, timeout: timedelta) -> Store:
    """Find the other ranks and return the shared store."""
    address, port = master(os.environ, launcher, is_one_host=local_size == size)
    os.environ["MASTER_ADDR"] = address
    if port is None:
        store, port = _on_free_port(job(os.environ, launcher), address, rank, size, local_size == size, timeout)
    else:
        store = _on_port(port, rank, size, timeout)
    os.environ["MASTER_PORT"] = str(port)
    if "GLOO_SOCKET_IFNAME" not in os.environ:
        name = _loopback() if local_size == size else _outward(store, address)
        if name is not None:
            os.environ["GLOO_SOCKET_IFNAME"] = name
    return store


def _on_port(port: int, rank: int, size: int, timeout: timedelta) -> Store:
    """The store of torch's own rendezvous, which detects whether torchrun's agent already serves one."""
    from torch.distributed import DistNetworkError, rendezvous

    os.environ["MASTER_PORT"] = str(port)
    try:
        store: Store = next(rendezvous("env://", rank, size, timeout=timeout))[0]
    except DistNetworkError as error:
        if "EADDRINUSE" not in str(error):
            raise
        raise RuntimeFailure(
            f"the rendezvous port {port} is already in use on this machine",
            hint="start again; if you set MASTER_PORT, choose another port, or unset it to use a free one",
        ) from None
    return store


def _on_free_port(
    name: str, address: str, rank: int, size: int, is_one_host: bool, timeout: timedelta
) -> tuple[Store, int]:  # fmt: skip
    """A store on a port that the system assigned to rank 0, so that no other process can bind it in between."""
    from torch.distributed import TCPStore

    if rank:
        port = port_discovery.query(name, address, timeout.total_seconds())
        return TCPStore(address, port, size, is_master=False, timeout=timeout, wait_for_workers=False), port
    store = TCPStore(address, 0, size, is_master=True, timeout=timeout, wait_for_workers=False)
    port_discovery.publish(name, store.port, size - 1, is_one_host)
    return store, store.port


def master(environ: Mapping[str, str], launcher: str, is_one_host: bool) -> tuple[str, int | None]:
    """The address of rank 0, and the port if one is set."""
    address, port = _address(environ, launcher, is_one_host), environ.get("MASTER_PORT")
    if not port:
        job(environ, launcher)
        return address, None
    if not (port.isascii() and port.isdigit() and 0 < int(port) < 65536):
        raise UserError(f"MASTER_PORT is {port!r}, which is not a valid port", hint="set it to a number below 65536")
    return address, int(port)


def job(environ: Mapping[str, str], launcher: str) -> str:
    """The launcher's name of this job: the same for all its ranks, and different for every other job."""
    if launcher == "srun":
        return f"{environ.get('SLURM_JOB_ID')}.{environ.get('SLURM_STEP_ID')}"
    names = (RDZV_ID,) if launcher == "torchrun" else ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "PMI_JOBID")
    name = next((environ[each] for each in names if environ.get(each)), "")
    if not name:
        raise UserError(
            f"{launcher} sets no job id by which ranks could find each other, and MASTER_PORT is not set",
            hint="set MASTER_PORT to a free port, the same for all ranks",
        )
    return name


def _address(environ: Mapping[str, str], launcher: str, is_one_host: bool) -> str:
    if environ.get("MASTER_ADDR"):
        return environ["MASTER_ADDR"]
    if launcher == "torchrun":
        raise UserError("RANK is set, but MASTER_ADDR is not", hint="start the ranks with --nproc or torchrun")
    if is_one_host:
        return "127.0.0.1"
    nodes = ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST")
    node_list = next((environ[name] for name in nodes if environ.get(name)), None)
    if launcher == "srun" and node_list is not None:
        return expand(node_list)[0]
    raise UserError(
        f"{launcher} started ranks on several machines, and MASTER_ADDR is not set",
        hint="set it to the machine of rank 0, for example: mpirun -x MASTER_ADDR=$(hostname) ...",
    )


def expand(nodes: str) -> list[str]:
    """The hosts of Slurm's compressed host list, such as `a[1-3,5],b2`."""
    return [host for entry in re.split(r",(?![^\[]*\])", nodes) for host in _expand_one(entry)]


def _expand_one(entry: str) -> list[str]:
    before, bracket, rest = entry.partition("[")
    if not bracket:
        return [entry]
    ranges, closed, after = rest.partition("]")
    hosts = []
    for part in ranges.split(","):
        first, _, last = part.partition("-")
        if not closed or not first.isdigit() or not (last or first).isdigit():
            raise UserError(f"{entry} is not a list of hosts", hint="set MASTER_ADDR to the machine of rank 0")
        numbers = range(int(first), int(last or first) + 1)
        hosts += [f"{before}{number:0{len(first)}d}{tail}" for number in numbers for tail in _expand_one(after)]
    return hosts


def _loopback() -> str | None:
    return next((name for _, name in socket.if_nameindex() if name.startswith("lo")), None)


def _outward(store: Store, master_address: str) -> str | None:
    """The network interface that reaches the other machines.

    By default Gloo uses the interface that the host's own name resolves to, which on Debian is 127.0.1.1 and reaches no
    other machine. Other machines use the interface towards rank 0 and put its address in the store; the machine of
    rank 0 uses the interface towards that address.
    """
    mine, theirs = _route(master_address)
    if mine == theirs or mine.startswith("127.") or mine == "::1":
        mine, _ = _route(store.get(ELSEWHERE).decode())
    else:
        store.set(ELSEWHERE, mine)
    return _interface(mine)


def _route(address: str) -> tuple[str, str]:
    """The local and the remote address of the route to a host. No packet is sent."""
    try:
        family, kind, protocol, _, target = socket.getaddrinfo(address, 1, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(target)
            return probe.getsockname()[0], str(target[0])
    except OSError as error:
        raise UserError(
            f"MASTER_ADDR {address} cannot be reached: {error.strerror or error}", hint="set it to rank 0's machine"
        ) from None


def _interface(address: str) -> str | None:
    """The interface with this IPv4 address, or `None`, in which case Gloo chooses."""
    import fcntl

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(probe, SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:  # An interface without an address.
                continue
            if socket.inet_ntoa(answer[20:24]) == address:
                return name
    return None

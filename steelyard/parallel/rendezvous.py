"""Where the ranks meet: an address that all of them work out alike, a port that is free, a network that reaches all.

Given MASTER_ADDR and MASTER_PORT are obeyed. Otherwise srun's node list names the first host, ranks of one machine meet
on 127.0.0.1, and rank 0 takes a free port and tells the others (`port_discovery.py`).
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
MEETING = "STEELYARD_MEETING"  # what our own starter calls the job, where it sets no port


def meet(rank: int, size: int, local_size: int, launcher: str, timeout: timedelta) -> Store:
    """Find the other ranks and return the store that they share."""
    address, port = master(os.environ, launcher, is_one_host=local_size == size)
    os.environ["MASTER_ADDR"] = address
    if port is None:
        store, port = _free(job(os.environ, launcher), address, rank, size, local_size == size, timeout)
    else:
        store = _given(port, rank, size, timeout)
    os.environ["MASTER_PORT"] = str(port)
    if "GLOO_SOCKET_IFNAME" not in os.environ:
        name = _loopback() if local_size == size else _outward(store, address)
        if name is not None:
            os.environ["GLOO_SOCKET_IFNAME"] = name
    return store


def _given(port: int, rank: int, size: int, timeout: timedelta) -> Store:
    """torch's own rendezvous, which knows where torchrun's agent already serves the store."""
    from torch.distributed import DistNetworkError, rendezvous

    os.environ["MASTER_PORT"] = str(port)
    try:
        store: Store = next(rendezvous("env://", rank, size, timeout=timeout))[0]
    except DistNetworkError as error:
        if "EADDRINUSE" not in str(error):
            raise
        raise RuntimeFailure(
            f"port {port} of this machine, where the ranks should meet, is taken",
            hint="start again; if you set the port, set another, or none: then a free one is taken",
        ) from None
    return store


def _free(
    name: str, address: str, rank: int, size: int, is_one_host: bool, timeout: timedelta
) -> tuple[Store, int]:  # fmt: skip
    """A store on a port that the system gave rank 0, and which nobody can have taken in between."""
    from torch.distributed import TCPStore

    if rank:
        port = port_discovery.ask(name, address, timeout.total_seconds())
        return TCPStore(address, port, size, is_master=False, timeout=timeout, wait_for_workers=False), port
    store = TCPStore(address, 0, size, is_master=True, timeout=timeout, wait_for_workers=False)
    port_discovery.tell(name, store.port, size - 1, is_one_host)
    return store, store.port


def master(environ: Mapping[str, str], launcher: str, is_one_host: bool) -> tuple[str, int | None]:
    """The address of rank 0, and the port where one is set."""
    address, given = _address(environ, launcher, is_one_host), environ.get("MASTER_PORT")
    if not given:
        job(environ, launcher)
        return address, None
    if not (given.isascii() and given.isdigit() and 0 < int(given) < 65536):
        raise UserError(f"MASTER_PORT is {given!r}, which is no port", hint="set it to a number below 65536")
    return address, int(given)


def job(environ: Mapping[str, str], launcher: str) -> str:
    """What the launcher calls this job, alike for all its ranks and for no other job's."""
    if launcher == "srun":
        return f"{environ.get('SLURM_JOB_ID')}.{environ.get('SLURM_STEP_ID')}"
    names = (MEETING,) if launcher == "torchrun" else ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "PMI_JOBID")
    name = next((environ[each] for each in names if environ.get(each)), "")
    if not name:
        raise UserError(
            f"{launcher} names no job by which ranks could find each other, and MASTER_PORT is not set",
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
    given = next((environ[name] for name in nodes if environ.get(name)), None)
    if launcher == "srun" and given is not None:
        return expand(given)[0]
    raise UserError(
        f"{launcher} started ranks on several machines, and MASTER_ADDR is not set",
        hint="name the machine of rank 0, for example: mpirun -x MASTER_ADDR=$(hostname) ...",
    )


def expand(nodes: str) -> list[str]:
    """Slurm's compressed host list, `a[1-3,5],b2`, host by host."""
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
            raise UserError(f"{entry} is no list of hosts", hint="set MASTER_ADDR to the machine of rank 0")
        numbers = range(int(first), int(last or first) + 1)
        hosts += [f"{before}{number:0{len(first)}d}{tail}" for number in numbers for tail in _expand_one(after)]
    return hosts


def _loopback() -> str | None:
    return next((name for _, name in socket.if_nameindex() if name.startswith("lo")), None)


def _outward(store: Store, master_address: str) -> str | None:
    """The interface that leads to the other machines.

    Gloo would take the one that the host's own name resolves to, which on Debian is 127.0.1.1 and reaches nobody. On
    other machines it is the one towards rank 0; on rank 0's, the one towards any rank elsewhere, who leaves an address.
    """
    mine, theirs = _route(master_address)
    if mine == theirs or mine.startswith("127.") or mine == "::1":
        mine, _ = _route(store.get(ELSEWHERE).decode())
    else:
        store.set(ELSEWHERE, mine)
    return _interface(mine)


def _route(address: str) -> tuple[str, str]:
    """The addresses at this end and at the other end of a way to a host. Nothing is sent."""
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
    """The interface that has an IPv4 address; for any other, none, and Gloo is left to choose."""
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

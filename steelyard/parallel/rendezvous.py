"""Where the ranks meet: an address and a port that all of them work out alike, and a network that reaches all.

Given MASTER_ADDR and MASTER_PORT are obeyed. Otherwise srun's node list names the first host, ranks of one machine meet
on 127.0.0.1, and the port follows from the job's id, so that two jobs on a machine keep apart.
"""

from __future__ import annotations

import os
import re
import socket
import struct
import zlib
from collections.abc import Mapping
from datetime import timedelta
from typing import TYPE_CHECKING

from steelyard.core.errors import UserError

if TYPE_CHECKING:
    from torch.distributed import Store

# Below the ports that systems hand out to whoever asks for any.
FIRST_PORT, PORTS = 15000, 15000
ELSEWHERE = "steelyard/elsewhere"
SIOCGIFADDR = 0x8915


def meet(rank: int, size: int, local_size: int, launcher: str, timeout: timedelta) -> Store:
    """Find the other ranks and return the store that they share."""
    address, port = master(os.environ, launcher, is_one_host=local_size == size)
    os.environ.update(MASTER_ADDR=address, MASTER_PORT=str(port))
    from torch.distributed import rendezvous

    # torch's own rendezvous knows that torchrun's agent already serves the store.
    store: Store
    store, _, _ = next(rendezvous("env://", rank, size, timeout=timeout))
    if "GLOO_SOCKET_IFNAME" not in os.environ:
        name = _loopback() if local_size == size else _outward(store, address)
        if name is not None:
            os.environ["GLOO_SOCKET_IFNAME"] = name
    return store


def master(environ: Mapping[str, str], launcher: str, is_one_host: bool) -> tuple[str, int]:
    """The address and port of rank 0."""
    return _address(environ, launcher, is_one_host), _port(environ, launcher)


def _address(environ: Mapping[str, str], launcher: str, is_one_host: bool) -> str:
    if environ.get("MASTER_ADDR"):
        return environ["MASTER_ADDR"]
    if launcher == "torchrun":
        raise UserError("RANK is set, but MASTER_ADDR is not", mend="start the ranks with --nproc or torchrun")
    if is_one_host:
        return "127.0.0.1"
    nodes = ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST")
    given = next((environ[name] for name in nodes if environ.get(name)), None)
    if launcher == "srun" and given is not None:
        return expand(given)[0]
    raise UserError(
        f"{launcher} started ranks on several machines, and MASTER_ADDR is not set",
        mend="name the machine of rank 0, for example: mpirun -x MASTER_ADDR=$(hostname) ...",
    )


def _port(environ: Mapping[str, str], launcher: str) -> int:
    given = environ.get("MASTER_PORT")
    if given:
        if not (given.isascii() and given.isdigit() and 0 < int(given) < 65536):
            raise UserError(f"MASTER_PORT is {given!r}, which is no port", mend="set it to a number below 65536")
        return int(given)
    if launcher == "srun":
        identity = f"{environ.get('SLURM_JOB_ID')}.{environ.get('SLURM_STEP_ID')}"
    else:
        names = ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "PMI_JOBID")
        identity = next((environ[name] for name in names if environ.get(name)), "")
    if not identity:
        raise UserError(
            f"{launcher} names no job that a port could be derived from, and MASTER_PORT is not set",
            mend="set MASTER_PORT to a free port, the same for all ranks",
        )
    return FIRST_PORT + zlib.crc32(identity.encode()) % PORTS


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
            raise UserError(f"{entry} is no list of hosts", mend="set MASTER_ADDR to the machine of rank 0")
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
            f"MASTER_ADDR {address} cannot be reached: {error.strerror or error}", mend="set it to rank 0's machine"
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

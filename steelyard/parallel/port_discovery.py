"""The rendezvous port of a job without MASTER_PORT: rank 0 binds a free port and publishes it.

mpirun and srun give every rank the name of the job, but rank 0 has no channel to the others. So the name is hashed to a
short list of candidate ports, the same on all ranks. Rank 0 listens on the first candidate that is free on its host and
answers each rank that sends the hashed name of the job. The other ranks try the candidates in turn until one answers
with the hashed name; other services on these ports give another answer, or none, and are skipped.
"""

from __future__ import annotations

import hashlib
import socket
import threading
import time
import zlib
from contextlib import suppress

from steelyard.core.errors import RuntimeFailure

# Below the range from which systems assign ephemeral ports.
FIRST_PORT, PORTS = 15000, 15000
CANDIDATES, APART = 8, 1009  # number of candidate ports, and the distance between them
SECONDS_PER_PORT = 2.0
SECONDS_BETWEEN_ROUNDS = 0.2
LONGEST_LINE = 200


def ports_of(job: str) -> list[int]:
    """The candidate ports of a job, in the order in which they are tried."""
    first = zlib.crc32(job.encode())
    return [FIRST_PORT + (first + number * APART) % PORTS for number in range(CANDIDATES)]


def publish(job: str, port: int, ranks: int, is_one_host: bool) -> None:
    """Listen on a candidate port and answer queries in the background, until all ranks have the port."""
    server = next((socket_ for each in ports_of(job) if (socket_ := _listen(each, is_one_host)) is not None), None)
    if server is None:
        raise RuntimeFailure(
            f"none of the ports {', '.join(map(str, ports_of(job)))} is free for rank 0 to publish its address",
            hint="set MASTER_PORT to a free port, the same for all ranks",
        )
    threading.Thread(target=_answer, args=(server, job, port, ranks), daemon=True).start()


def query(job: str, address: str, seconds: float) -> int:
    """Try the candidate ports until rank 0 answers with the rendezvous port."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        for candidate in ports_of(job):
            port = _query(job, address, candidate)
            if port is not None:
                return port
        time.sleep(SECONDS_BETWEEN_ROUNDS)
    raise RuntimeError(f"timed out: rank 0 on {address} did not publish its port within {seconds:.0f} s")


def _listen(port: int, is_one_host: bool) -> socket.socket | None:
    with suppress(OSError):
        if is_one_host:
            return socket.create_server(("127.0.0.1", port))
        if socket.has_dualstack_ipv6():
            return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
        return socket.create_server(("", port))
    return None


def _answer(server: socket.socket, job: str, port: int, ranks: int) -> None:
    with server:
        while ranks:
            with suppress(OSError):
                peer, _ = server.accept()
                with peer:
                    peer.settimeout(SECONDS_PER_PORT)
                    if _line(peer) == _word(job, "where"):
                        peer.sendall(f"{_word(job, 'there')} {port}\n".encode())
                        ranks -= 1


def _query(job: str, address: str, candidate: int) -> int | None:
    with suppress(OSError):
        with socket.create_connection((address, candidate), timeout=SECONDS_PER_PORT) as host:
            host.sendall(f"{_word(job, 'where')}\n".encode())
            word, _, port = _line(host).partition(" ")
        if word == _word(job, "there") and port.isascii() and port.isdigit():
            return int(port)
    return None


def _line(connection: socket.socket) -> str:
    """The first line that the peer sends; reading stops after a timeout."""
    received, deadline = b"", time.monotonic() + SECONDS_PER_PORT
    while b"\n" not in received and len(received) < LONGEST_LINE and time.monotonic() < deadline:
        piece = connection.recv(LONGEST_LINE)
        if not piece:
            break
        received += piece
    return received.partition(b"\n")[0].decode("ascii", errors="replace")


def _word(job: str, word: str) -> str:
    """The hashed name of the job, which does not reveal the name to other services."""
    return hashlib.sha256(f"steelyard {word} {job}".encode()).hexdigest()[:32]

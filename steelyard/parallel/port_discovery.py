"""Which port the ranks of a job meet on, where nobody set one: rank 0 takes a free one and tells the others.

mpirun and srun give every rank a name of the job, and rank 0 no way to tell the others anything. So the name leads to a
short list of ports, alike on all ranks: the doors. Rank 0 opens the first that is free on its host and tells whoever
says the job's name there where the ranks meet. The others knock at one after the other until they are answered in the
job's name; strangers behind a door say something else, or nothing, and are passed by.
"""

from __future__ import annotations

import hashlib
import socket
import threading
import time
import zlib
from contextlib import suppress

from steelyard.core.errors import RuntimeFailure

# Below the ports that systems hand out to whoever asks for any.
FIRST_PORT, PORTS = 15000, 15000
DOORS, APART = 8, 1009  # so many, this far from each other
SECONDS_AT_A_DOOR = 2.0
SECONDS_BETWEEN_ROUNDS = 0.2
LONGEST_LINE = 200


def doors(job: str) -> list[int]:
    """The ports where rank 0 may be asked, in order."""
    first = zlib.crc32(job.encode())
    return [FIRST_PORT + (first + number * APART) % PORTS for number in range(DOORS)]


def tell(job: str, port: int, askers: int, is_one_host: bool) -> None:
    """Open a door, and go on answering behind it until all have asked."""
    server = next((opened for door in doors(job) if (opened := _opened(door, is_one_host)) is not None), None)
    if server is None:
        raise RuntimeFailure(
            f"none of the ports {', '.join(map(str, doors(job)))} is free for ranks to ask at",
            hint="set MASTER_PORT to a free port, the same for all ranks",
        )
    threading.Thread(target=_answer, args=(server, job, port, askers), daemon=True).start()


def ask(job: str, address: str, seconds: float) -> int:
    """Knock until rank 0 says where the ranks meet."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        for door in doors(job):
            port = _knock(job, address, door)
            if port is not None:
                return port
        time.sleep(SECONDS_BETWEEN_ROUNDS)
    raise RuntimeError(f"timed out: rank 0 on {address} did not say within {seconds:.0f} s where ranks meet")


def _opened(door: int, is_one_host: bool) -> socket.socket | None:
    with suppress(OSError):
        if is_one_host:
            return socket.create_server(("127.0.0.1", door))
        if socket.has_dualstack_ipv6():
            return socket.create_server(("", door), family=socket.AF_INET6, dualstack_ipv6=True)
        return socket.create_server(("", door))
    return None


def _answer(server: socket.socket, job: str, port: int, askers: int) -> None:
    with server:
        while askers:
            with suppress(OSError):
                guest, _ = server.accept()
                with guest:
                    guest.settimeout(SECONDS_AT_A_DOOR)
                    if _line(guest) == _word(job, "where"):
                        guest.sendall(f"{_word(job, 'there')} {port}\n".encode())
                        askers -= 1


def _knock(job: str, address: str, door: int) -> int | None:
    with suppress(OSError):
        with socket.create_connection((address, door), timeout=SECONDS_AT_A_DOOR) as host:
            host.sendall(f"{_word(job, 'where')}\n".encode())
            word, _, port = _line(host).partition(" ")
        if word == _word(job, "there") and port.isascii() and port.isdigit():
            return int(port)
    return None


def _line(connection: socket.socket) -> str:
    """What the other side says first; it may not keep us by saying it slowly."""
    said, deadline = b"", time.monotonic() + SECONDS_AT_A_DOOR
    while b"\n" not in said and len(said) < LONGEST_LINE and time.monotonic() < deadline:
        piece = connection.recv(LONGEST_LINE)
        if not piece:
            break
        said += piece
    return said.partition(b"\n")[0].decode("ascii", errors="replace")


def _word(job: str, word: str) -> str:
    """The job's name as it is said aloud: strangers learn nothing from it."""
    return hashlib.sha256(f"steelyard {word} {job}".encode()).hexdigest()[:32]

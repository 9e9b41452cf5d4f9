"""Ports, the host name, and the network interfaces that environment variables select."""

from __future__ import annotations

import random
import socket
from collections.abc import Iterator
from contextlib import suppress

from steelyard.doctor.finding import Finding
from steelyard.doctor.machine import Machine
from steelyard.doctor.python_info import PythonInfo

TOPIC = "network"
PORTS = range(15000, 30000)  # The range from which Steelyard's launchers choose.
INTERFACE_VARIABLES = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME")


def check(machine: Machine, seen: PythonInfo) -> Iterator[Finding]:
    """Whether a rendezvous can work on this machine."""
    yield _port(machine)
    yield _hostname(machine)
    yield _interfaces(machine)


def _port(machine: Machine) -> Finding:
    given = machine.environment.get("MASTER_PORT")
    if given and not (given.isascii() and given.isdigit() and 0 < int(given) < 65536):
        return Finding(
            TOPIC,
            "ports",
            "fail",
            f"MASTER_PORT is {given!r}, which is not a port",
            "set it to a number below 65536, or unset it",
        )
    port = int(given) if given else random.choice(PORTS)
    problem = _try(port)
    if problem and given:
        words = f"MASTER_PORT {port} cannot be used: {problem}"
        return Finding(
            TOPIC,
            "ports",
            "fail",
            words,
            f"unset MASTER_PORT to use a free port; ss -tlnp 'sport = :{port}' shows which process uses it",
        )
    if problem:
        tried = [_try(other) for other in random.sample(PORTS, 10)]
        if all(tried):
            words = f"no port between {PORTS.start} and {PORTS.stop} can be used: {problem}"
            return Finding(TOPIC, "ports", "fail", words, "a firewall or a container's network rules block them")
    return Finding(
        TOPIC,
        "ports",
        "ok",
        f"a listener on {port} was reached" if given else f"ports between {PORTS.start} and {PORTS.stop} can be used",
    )


def _try(port: int) -> str:
    """Listen and connect. Returns the error, or an empty string."""
    try:
        with socket.socket() as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(("", port))
            listener.listen(1)
            with socket.create_connection(("127.0.0.1", port), timeout=2):
                return ""
    except OSError as error:
        return error.strerror or str(error)


def _hostname(machine: Machine) -> Finding:
    """Gloo and others use the address of the host name: on Debian 127.0.1.1, which other machines cannot reach."""
    answer = machine.run(["hostname"])
    name = answer.out.strip() if answer and answer.is_good else socket.gethostname()
    addresses = _addresses(machine, name)
    facts = {"hostname": name, "addresses": addresses}
    if not addresses:
        words = f"{name} does not resolve: ranks that look up their own host fail"
        return Finding(TOPIC, "hostname", "warn", words, f"add a line with the address and {name} to /etc/hosts", facts)
    if all(address.startswith("127.") or address == "::1" for address in addresses):
        words = f"{name} resolves to {addresses[0]}, which other machines cannot reach"
        hint = (
            "harmless on one machine, and steelyard's own launchers work around it; for others set MASTER_ADDR to an "
            f"IP address and {outward(machine)}"
        )
        return Finding(TOPIC, "hostname", "warn", words, hint, facts)
    return Finding(TOPIC, "hostname", "ok", f"{name} is {addresses[0]}", facts=facts)


def outward(machine: Machine) -> str:
    """The setting that makes gloo use an interface that other machines can reach."""
    names = [name for name in interfaces(machine) if not name.startswith(("lo", "docker", "veth", "br-", "virbr"))]
    return f"GLOO_SOCKET_IFNAME={names[0] if names else 'INTERFACE'}"


def _addresses(machine: Machine, name: str) -> list[str]:
    """The addresses of a name, from /etc/hosts or else from the machine's resolver."""
    hosts = machine.text("/etc/hosts") or ""
    rows = [line.split("#")[0].split() for line in hosts.splitlines()]
    found = [row[0] for row in rows if name in row[1:]]
    answer = None if found else machine.run(["getent", "ahosts", name], seconds=10)
    return found or list(dict.fromkeys(line.split()[0] for line in (answer.out if answer else "").splitlines() if line))


def interfaces(machine: Machine) -> list[str]:
    """The machine's network interfaces."""
    with suppress(OSError):
        return sorted(path.name for path in machine.at("/sys/class/net").iterdir())
    return []


def _interfaces(machine: Machine) -> Finding:
    there = interfaces(machine)
    for variable in INTERFACE_VARIABLES:
        value = machine.environment.get(variable, "")
        if not value or value.startswith("^"):  # NCCL: all except these.
            continue
        exact = value.startswith("=")
        named = [name for name in value.lstrip("=").split(",") if name]
        if there and not any(
            name == one if exact or variable != "NCCL_SOCKET_IFNAME" else one.startswith(name)
            for name in named
            for one in there
        ):
            words = f"{variable} is {value}, but this machine has {', '.join(there)}"
            return Finding(
                TOPIC,
                "interfaces",
                "fail",
                words,
                f"unset {variable}, or use an interface that exists",
                {"there": there},
            )
    if not there:
        return Finding(TOPIC, "interfaces", "absent", "the kernel lists no network interfaces")
    return Finding(TOPIC, "interfaces", "ok", ", ".join(there), facts={"there": there})

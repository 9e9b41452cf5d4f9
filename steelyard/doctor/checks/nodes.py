"""Other machines (`--nodes a,b`): reachable by ssh without a prompt, with the same Python, torch and time as here."""

from __future__ import annotations

import json
import re
import shlex
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from steelyard.core.errors import UserError
from steelyard.core.recipe.site_section import SiteSection
from steelyard.doctor.finding import Finding
from steelyard.doctor.machine import Machine, dotted
from steelyard.doctor.python_info import PythonInfo, installed_torch

TOPIC = "nodes"
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:@-]*")
OPTIONS = ("-o", "BatchMode=yes", "-o", "ConnectTimeout=8")
CLOCK_SECONDS = 2.0
SHARED = "runs over several machines need a filesystem they share"
# A short script for the same Python, which a shared filesystem provides on all nodes.
SCRIPT = (
    "import json,sys,time,os\n"
    "from importlib import metadata\n"
    "try: torch=metadata.version('torch')\n"
    "except Exception: torch=None\n"
    "print(json.dumps({'time':time.time(),'python':list(sys.version_info[:3]),'torch':torch,'host':os.uname().nodename}))"
)


@dataclass(frozen=True)
class Reply:
    """The facts of a node, or the error."""

    node: str
    facts: dict[str, Any]
    problem: str = ""
    offset: float = 0.0


def names(text: str) -> list[str]:
    """The nodes of `--nodes`. A name that looks like an option is an error."""
    hosts = [name.strip() for name in text.split(",") if name.strip()]
    for name in hosts:
        if not NAME.fullmatch(name):
            raise UserError(f"--nodes: {name!r} is not a host name", hint="list them as node1,node2")
    if not hosts:
        raise UserError("--nodes names no host", hint="list them as node1,node2")
    return hosts


def options_of(site: SiteSection) -> list[str]:
    """The port and options that the site's mpirun passes to ssh."""
    port = ["-p", str(site.mpi.ssh_port)] if site.mpi.ssh_port else []
    return port + [word for option in site.mpi.ssh_options for word in shlex.split(option)]


def check(machine: Machine, seen: PythonInfo, nodes: Sequence[str], options: Sequence[str] = ()) -> Iterator[Finding]:
    """Check each node from here, then each pair, then the differences between them."""
    if machine.which("ssh") is None:
        yield Finding(TOPIC, "ssh", "fail", "ssh is not on PATH", "install openssh-client")
        return
    replies = [_ask(machine, node, options) for node in nodes]
    for reply in replies:
        yield _reached(machine, reply)
    good = [reply for reply in replies if not reply.problem]
    if len(good) > 1:
        yield _between(machine, [reply.node for reply in good], options)
    if good:
        yield _clocks(good)
        yield _versions(machine, seen, good)


def _ask(machine: Machine, node: str, options: Sequence[str]) -> Reply:
    remote = f"cd {shlex.quote(str(machine.folder))} && {shlex.quote(machine.python)} -c {shlex.quote(SCRIPT)}"
    before = time.time()
    answer = machine.run(["ssh", *OPTIONS, *options, "--", node, remote], seconds=30)
    after = time.time()
    if answer is None or not answer.is_good:
        return Reply(node, {}, answer.gist if answer else "ssh is not on PATH")
    try:
        facts = json.loads(answer.out.strip().splitlines()[-1])
        offset = float(facts["time"]) - (before + after) / 2
    except (ValueError, IndexError, KeyError, TypeError):
        return Reply(node, {}, f"it answered {answer.out.strip()[:100]!r}")
    # The round trip may be delayed in either direction: subtract what it can explain.
    return Reply(node, facts, offset=max(0.0, abs(offset) - (after - before) / 2))


def _reached(machine: Machine, reply: Reply) -> Finding:
    if not reply.problem:
        return Finding(TOPIC, f"ssh {reply.node}", "ok", f"reached without a prompt, as {reply.facts.get('host')}")
    hints = {
        "Permission denied": f"add your key, without a passphrase: ssh-copy-id {reply.node}",
        "Host key verification failed": f"accept its key once: ssh-keyscan {reply.node} >> ~/.ssh/known_hosts",
        "Could not resolve": "check the name, or add it to /etc/hosts",
        "Connection refused": "no sshd listens there; set another port in ~/.ssh/config",
        "timed out": "a firewall blocks it, or the machine is down",
        "No such file or directory": f"{machine.folder} or {machine.python} does not exist there: {SHARED}",
        "can't cd": f"{machine.folder} does not exist there: {SHARED}",
        "not found": f"{machine.python} does not exist there: install it at the same path, or share the filesystem",
    }
    hint = next(
        (words for sign, words in hints.items() if sign in reply.problem), f"try it manually: ssh {reply.node} true"
    )
    return Finding(TOPIC, f"ssh {reply.node}", "fail", reply.problem, hint)


def _between(machine: Machine, nodes: Sequence[str], options: Sequence[str]) -> Finding:
    """mpirun starts nodes from other nodes, so each must reach the next one; the ring finds one that cannot."""
    failed: list[str] = []
    for first, second in zip(nodes, [*nodes[1:], nodes[0]], strict=True):
        inner = shlex.join(["ssh", *OPTIONS, *options, "--", second, "true"])
        answer = machine.run(["ssh", *OPTIONS, *options, "--", first, inner], seconds=30)
        if answer is None or not answer.is_good:
            failed.append(f"{first} to {second}: {answer.gist if answer else ''}")
    if failed:
        hint = "give every machine the key and the known_hosts of the others; a shared home folder does both"
        return Finding(TOPIC, "ssh between nodes", "fail", "; ".join(failed), hint)
    return Finding(TOPIC, "ssh between nodes", "ok", f"each of {len(nodes)} reaches the next")


def _clocks(replies: Sequence[Reply]) -> Finding:
    offsets = {reply.node: round(reply.offset, 1) for reply in replies}
    worst = max(replies, key=lambda reply: reply.offset)
    if worst.offset > CLOCK_SECONDS:
        words = f"the clock of {worst.node} differs by {worst.offset:.0f} s from this machine's"
        return Finding(
            TOPIC,
            "clocks",
            "warn",
            words,
            "start chrony or another time service on both: timelines and file times depend on it",
            offsets,
        )
    return Finding(TOPIC, "clocks", "ok", f"within {CLOCK_SECONDS:.0f} s of each other", facts=offsets)


def _versions(machine: Machine, seen: PythonInfo, replies: Sequence[Reply]) -> Finding:
    disk = installed_torch(machine)
    here = (list(seen.python) if seen.python else None, seen.torch or (disk.version if disk else None))
    for reply in replies:
        there = (reply.facts.get("python"), reply.facts.get("torch"))
        if here[0] and there[0] != here[0]:
            words = f"{reply.node} has Python {dotted(there[0] or ())}, this machine has {dotted(here[0])}"
            return Finding(
                TOPIC, "versions", "fail", words, "use one environment on all nodes: a shared folder, or the same image"
            )
        if there[1] != here[1]:
            words = f"{reply.node} has torch {there[1]}, this machine has {here[1]}"
            return Finding(
                TOPIC, "versions", "fail", words, "use one environment on all nodes: a shared folder, or the same image"
            )
    return Finding(
        TOPIC,
        "versions",
        "ok",
        f"Python and torch are the same on {len(replies)} nodes and here",
        facts={"folder": str(Path(machine.python))},
    )

"""All checks, one after the other; one that fails by itself does not take the others with it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from steelyard.core.console import console
from steelyard.doctor.checks import (
    all_reduce,
    external_programs,
    fast_kernels,
    host_limits,
    libraries,
    network_interfaces,
    nodes,
    python,
    topology,
    torch,
)
from steelyard.doctor.finding import Finding
from steelyard.doctor.machine import Machine
from steelyard.doctor.python_info import PythonInfo, ask

Check = Callable[[Machine, PythonInfo], Iterator[Finding]]
CHECKS: tuple[tuple[str, Check], ...] = (
    (python.TOPIC, python.check),
    (torch.TOPIC, torch.check),
    (libraries.TOPIC, libraries.check),
    (fast_kernels.TOPIC, fast_kernels.check),
    (external_programs.TOPIC, external_programs.check),
    (network_interfaces.TOPIC, network_interfaces.check),
    (host_limits.TOPIC, host_limits.check),
    (topology.TOPIC, topology.check),
)


def survey(
    machine: Machine, others: Sequence[str] = (), ssh: Sequence[str] = (), with_exchange: bool = True
) -> list[Finding]:
    """Everything that can be said of a machine, and of others that it should reach by ssh with these options."""
    console.say("asking Python and torch")
    seen = ask(machine)
    checks = list(CHECKS)
    if others:
        checks.append((nodes.TOPIC, lambda machine, seen: nodes.check(machine, seen, others, ssh)))
    if with_exchange:
        checks.append((all_reduce.TOPIC, all_reduce.check))
    findings: list[Finding] = []
    for topic, check in checks:
        if topic == all_reduce.TOPIC and seen.torch is not None:
            console.say("an all-reduce between processes")
        try:
            findings += check(machine, seen)
        except Exception as error:
            words = f"the check itself failed: {type(error).__name__}: {error}"
            findings.append(Finding(topic, "check", "warn", words, "this is a bug in steelyard; please report it"))
    return [replace(finding, words=_plain(finding.words)) for finding in findings]


def _plain(text: str) -> str:
    """What programs said, without what would steer a terminal."""
    return "".join(letter if letter.isprintable() else " " for letter in text)

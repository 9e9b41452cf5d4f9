"""Runs all checks in order. A check that raises an exception does not stop the others."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from steelyard.core.console import console
from steelyard.core.printable import printable
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
from steelyard.doctor.python_info import PythonInfo, read_python_info

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
    machine: Machine, others: Sequence[str] = (), ssh: Sequence[str] = (), with_all_reduce: bool = True
) -> list[Finding]:
    """The findings of this machine, and of others that it should reach by ssh with these options."""
    console.say("checking Python and torch")
    seen = read_python_info(machine)
    checks = list(CHECKS)
    if others:
        checks.append((nodes.TOPIC, lambda machine, seen: nodes.check(machine, seen, others, ssh)))
    if with_all_reduce:
        checks.append((all_reduce.TOPIC, all_reduce.check))
    findings: list[Finding] = []
    for topic, check in checks:
        if topic == all_reduce.TOPIC and seen.torch is not None:
            console.say("running an all-reduce between processes")
        try:
            findings += check(machine, seen)
        except Exception as error:
            words = f"the check itself failed: {type(error).__name__}: {error}"
            findings.append(Finding(topic, "check", "warn", words, "this is a bug in steelyard; please report it"))
    return [replace(finding, words=printable(finding.words)) for finding in findings]

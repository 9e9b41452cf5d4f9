"""`steelyard doctor`: run the checks, report the findings, and apply repairs if the user agrees."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from steelyard.core.console import console
from steelyard.core.errors import UserError
from steelyard.doctor import container, repair, site_profile, undo_log
from steelyard.doctor.checks import all_reduce, libraries, nodes, python
from steelyard.doctor.finding import Finding, as_text, worst
from steelyard.doctor.machine import Machine
from steelyard.doctor.paths import environment_file, library_folder, sites_file
from steelyard.doctor.python_info import read_python_info
from steelyard.doctor.run_checks import survey
from steelyard.doctor.undo_log import Change
from steelyard.launch import sites
from steelyard.parallel.world import World, detect

UNDO = "steelyard doctor --undo reverts the changes"
Agree = Callable[[str], bool]


@dataclass
class Diagnosis:
    """The findings, the planned changes, and the findings after the changes."""

    findings: list[Finding]
    planned: list[Change] = field(default_factory=list)
    is_applied: bool = False
    after: list[Finding] = field(default_factory=list)
    hint: str = ""

    @property
    def verdict(self) -> str:
        """The worst verdict. Repaired findings count with their new verdict."""
        repaired = {(finding.topic, finding.name) for finding in self.after}
        left = [finding for finding in self.findings if (finding.topic, finding.name) not in repaired]
        return worst([*left, *self.after])

    def as_result(self) -> dict[str, Any]:
        """For `--json`."""
        return {
            "verdict": self.verdict,
            "findings": [finding.as_result() for finding in self.findings],
            "changes": [change.in_words() for change in self.planned],
            "applied": self.is_applied,
            "after": [finding.as_result() for finding in self.after],
        }

    def as_text(self) -> str:
        """The report as text."""
        counted = [finding.verdict for finding in self.findings]
        tally = ", ".join(f"{counted.count(verdict)} {verdict}" for verdict in ("fail", "warn", "ok", "absent"))
        parts = [as_text(self.findings), tally]
        if self.is_applied:
            parts += ["after the changes:", as_text(self.after)]
        return "\n\n".join(filter(None, [*parts, self.hint]))


def examine(
    machine: Machine, others: str | None, quick: bool, fix: bool, agree: Agree, site: str | None = None
) -> Diagnosis | None:
    """Run all checks, and with `fix` the safe repairs. None on ranks that only take part in the all-reduce."""
    try:
        world = detect(machine.environment)
    except UserError:
        world = World()  # The all-reduce check reports the error.
    if not world.is_rank0:
        if not quick:
            all_reduce.run_all_reduce(machine, read_python_info(machine), world)
        return None
    known = nodes.names(others) if others else []
    diagnosis = Diagnosis(
        survey(machine, known, _ssh_options(machine, site) if known else (), with_all_reduce=not quick)
    )
    fixable = [finding for finding in diagnosis.findings if finding.is_fixable]
    if not fix:
        if fixable:
            diagnosis.hint = f"steelyard doctor --fix can repair: {', '.join(finding.name for finding in fixable)}"
        return diagnosis
    diagnosis.planned = repair.planned(machine, fixable)
    if diagnosis.planned and _agreed(diagnosis, agree):
        undo_log.apply(machine, diagnosis.planned)
        diagnosis.is_applied = True
        diagnosis.after = _again(repaired(machine, fixable), fixable)
        diagnosis.hint = f"in every shell and job that trains: source {environment_file(machine)}\n{UNDO}"
    elif not diagnosis.planned:
        diagnosis.hint = "there is nothing that can be repaired safely"
    return diagnosis


def _ssh_options(machine: Machine, site: str | None) -> list[str]:
    """The ssh options of the site's mpirun, which apply here too."""
    file = sites_file(machine)
    return nodes.options_of(sites.find(site, file=file)[1]) if site is not None or file.exists() else []


def _agreed(diagnosis: Diagnosis, agree: Agree) -> bool:
    console.say(as_text(diagnosis.findings) + "\n\nplanned changes:")
    for change in diagnosis.planned:
        console.say(f"  {change.in_words()}")
    return agree("apply these changes?")


def repaired(machine: Machine, fixable: Sequence[Finding]) -> Machine:
    """The machine as a shell sees it that has sourced the file."""
    environment = dict(machine.environment)
    if any(finding.links for finding in fixable):
        before = environment.get("LD_LIBRARY_PATH")
        environment["LD_LIBRARY_PATH"] = ":".join(filter(None, [str(library_folder(machine)), before]))
    for finding in fixable:
        for name in finding.unset:
            environment.pop(name, None)
    return replace(machine, environment=environment)


def _again(machine: Machine, fixable: Sequence[Finding]) -> list[Finding]:
    """The repaired findings, checked again."""
    seen = read_python_info(machine)
    wanted = {(finding.topic, finding.name) for finding in fixable}
    found = [*python.check(machine, seen), *libraries.check(machine, seen)]
    return [finding for finding in found if (finding.topic, finding.name) in wanted]


def examine_image(machine: Machine, name: str, site: str | None, agree: Agree) -> Diagnosis:
    """What an image lacks, added by a site profile: the named one, the default, or a new one."""
    site = site if site is not None else site_profile.default(sites_file(machine)) or "container"
    if not re.fullmatch(r"[A-Za-z0-9_-]+", site) or site == sites.DEFAULT:
        raise UserError(f"--site: {site!r} is not a site name", hint="use letters, digits, - and _, not default")
    image = container.choose(machine, name)
    plan = container.prepare(machine, image, site)
    diagnosis = Diagnosis(plan.findings, plan.changes)
    if plan.changes and _agreed(diagnosis, agree):
        undo_log.apply(machine, plan.changes)
        diagnosis.is_applied = True
        sites.find(site, file=sites_file(machine))  # Check that submit can read the profile.
        diagnosis.after = container.verify(machine, image, plan)
        diagnosis.hint = f"site {site} was written to {sites_file(machine)}; {UNDO}"
    elif not plan.changes and worst(plan.findings) != "fail":
        diagnosis.hint = f"site {site} in {sites_file(machine)} already contains all of it"
    return diagnosis

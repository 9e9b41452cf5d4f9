"""A visit to the doctor: look, say what was found, and with leave mend it."""

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
from steelyard.doctor.python_info import ask
from steelyard.doctor.run_checks import survey
from steelyard.doctor.undo_log import Change
from steelyard.launch import sites
from steelyard.parallel.world import World, detect

UNDO = "steelyard doctor --undo takes it back"
Agree = Callable[[str], bool]


@dataclass
class Visit:
    """What was found, what was done, and what is found after it."""

    findings: list[Finding]
    planned: list[Change] = field(default_factory=list)
    is_applied: bool = False
    after: list[Finding] = field(default_factory=list)
    hint: str = ""

    @property
    def verdict(self) -> str:
        """The worst that is left; what was mended counts as it is now."""
        mended = {(finding.topic, finding.name) for finding in self.after}
        left = [finding for finding in self.findings if (finding.topic, finding.name) not in mended]
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
        """For a person."""
        counted = [finding.verdict for finding in self.findings]
        tally = ", ".join(f"{counted.count(verdict)} {verdict}" for verdict in ("fail", "warn", "ok", "absent"))
        parts = [as_text(self.findings), tally]
        if self.is_applied:
            parts += ["after the changes:", as_text(self.after)]
        return "\n\n".join(filter(None, [*parts, self.hint]))


def examine(
    machine: Machine, others: str | None, quick: bool, fix: bool, agree: Agree, site: str | None = None
) -> Visit | None:
    """All checks, and with `fix` the safe repairs. None on ranks that only take part in the all-reduce."""
    try:
        world = detect(machine.environment)
    except UserError:
        world = World()  # The all-reduce will say what is wrong.
    if not world.is_rank0:
        if not quick:
            all_reduce.exchange(machine, ask(machine), world)
        return None
    known = nodes.names(others) if others else []
    visit = Visit(survey(machine, known, _ssh_options(machine, site) if known else (), with_exchange=not quick))
    fixable = [finding for finding in visit.findings if finding.is_fixable]
    if not fix:
        if fixable:
            visit.hint = f"steelyard doctor --fix can mend: {', '.join(finding.name for finding in fixable)}"
        return visit
    visit.planned = repair.planned(machine, fixable)
    if visit.planned and _agreed(visit, agree):
        undo_log.apply(machine, visit.planned)
        visit.is_applied = True
        visit.after = _again(mended(machine, fixable), fixable)
        visit.hint = f"in every shell and job that trains: source {environment_file(machine)}\n{UNDO}"
    elif not visit.planned:
        visit.hint = "nothing to mend that is safe to mend"
    return visit


def _ssh_options(machine: Machine, site: str | None) -> list[str]:
    """What the site profile tells mpirun of ssh holds here too."""
    file = sites_file(machine)
    return nodes.options_of(sites.find(site, file=file)[1]) if site is not None or file.exists() else []


def _agreed(visit: Visit, agree: Agree) -> bool:
    console.say(as_text(visit.findings) + "\n\nthis would be changed:")
    for change in visit.planned:
        console.say(f"  {change.in_words()}")
    return agree("make these changes?")


def mended(machine: Machine, fixable: Sequence[Finding]) -> Machine:
    """The machine as it is for a shell that has sourced the file."""
    environment = dict(machine.environment)
    if any(finding.links for finding in fixable):
        before = environment.get("LD_LIBRARY_PATH")
        environment["LD_LIBRARY_PATH"] = ":".join(filter(None, [str(library_folder(machine)), before]))
    for finding in fixable:
        for name in finding.unset:
            environment.pop(name, None)
    return replace(machine, environment=environment)


def _again(machine: Machine, fixable: Sequence[Finding]) -> list[Finding]:
    """The findings that were to be mended, looked at once more."""
    seen = ask(machine)
    wanted = {(finding.topic, finding.name) for finding in fixable}
    found = [*python.check(machine, seen), *libraries.check(machine, seen)]
    return [finding for finding in found if (finding.topic, finding.name) in wanted]


def examine_image(machine: Machine, name: str, site: str | None, agree: Agree) -> Visit:
    """What an image lacks, brought in by a site profile: the one that is named, the default, or a new one."""
    site = site if site is not None else site_profile.default(sites_file(machine)) or "container"
    if not re.fullmatch(r"[A-Za-z0-9_-]+", site) or site == sites.DEFAULT:
        raise UserError(f"--site: {site!r} is no name for a site", hint="use letters, digits, - and _, not default")
    image = container.choose(machine, name)
    made = container.prepare(machine, image, site)
    visit = Visit(made.findings, made.changes)
    if made.changes and _agreed(visit, agree):
        undo_log.apply(machine, made.changes)
        visit.is_applied = True
        sites.find(site, file=sites_file(machine))  # What submit reads must be what was meant.
        visit.after = container.verify(machine, image, made)
        visit.hint = f"{sites_file(machine)} has it as site {site}; steelyard doctor --undo takes it back"
    elif not made.changes and worst(made.findings) != "fail":
        visit.hint = f"site {site} in {sites_file(machine)} has all of it already"
    return visit

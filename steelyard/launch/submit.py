"""From what a person asks for to a job that runs: the one function behind `steelyard submit`.

The recipe is written down as it was when it was submitted (`launch/recipe.toml`): a job may wait for days, and must not
train what somebody edits meanwhile. `launch/` also keeps the very scripts that were started.
"""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from shlex import join, quote
from typing import Any

from steelyard.core import files, secrets
from steelyard.core.errors import UserError
from steelyard.core.host import require_linux
from steelyard.core.recipe import Recipe, to_toml
from steelyard.core.recipe.site_section import SiteSection
from steelyard.core.run import MANIFEST, for_training, now, place_for_training
from steelyard.launch import (
    cancel,
    containers,
    job_script,
    job_tags,
    launch_record,
    mpi,
    node_groups,
    scheduler,
    slurm,
    supervisor,
    torchrun,
)
from steelyard.launch.job_spec import JobSpec
from steelyard.launch.launch_record import FOLDER, Launch
from steelyard.launch.node_groups import NodeGroup
from steelyard.plan import cluster as clusters

SECONDS_BETWEEN_QUESTIONS = 5.0


@dataclass(frozen=True)
class SubmitRequest:
    """What a person asks for. Either a recipe to train or the words of another command."""

    on: str
    site: SiteSection
    recipe: Recipe | None = None
    words: list[str] = field(default_factory=list)
    name: str | None = None
    run: Path | None = None
    site_name: str | None = None
    cluster: Path | None = None
    nodes: int | None = None
    ranks_per_node: int | None = None
    time_limit: str | None = None
    job: str | None = None
    reload_container: bool = False
    skip_checks: bool = False


def submit(request: SubmitRequest) -> dict[str, Any]:
    """Start the job, or have it queued, and say where it is."""
    require_linux(f"starting a job (--on {request.on})", "steelyard train works here, in one process; --dry-run too")
    order = prepare(request)
    run = order.run
    if request.on == "slurm" and request.job is None:
        jobs = _queue(request, order)
        process = None
    else:
        environment = slurm.environment() if request.on == "slurm" else None
        process = supervisor.start(run, ["bash", str(run / FOLDER / "job.sh")], environment)
        jobs = [request.job or str(process["pid"])]
    return note(request, order, jobs, process)


def _queue(request: SubmitRequest, order: JobSpec) -> list[str]:
    """Hand each job to Slurm; where one of several is refused, none is left behind to wait for it."""
    jobs: list[str] = []
    (order.run / FOLDER / launch_record.JOBS).unlink(missing_ok=True)
    with intended({order.run: described(request, order, [], None)}):
        try:
            for group in slurm.jobs(order):
                jobs.append(slurm.ask(slurm.line(order, group)))
            job_tags.write_jobs(order.run, jobs)
        except BaseException:
            if jobs:
                cancel.scancel(jobs)
            raise
    return jobs


@contextmanager
def intended(launches: dict[Path, Launch]) -> Iterator[None]:
    """Write down what is about to be handed to Slurm, for whoever comes after a kill; what is refused never was.

    After any other end, a controller that does not answer in time, say, there may be a job, and the marks stay.
    """
    before = {run: launch_record.read(run) for run in launches}
    for run, launch in launches.items():
        launch_record.write(run, launch)
    try:
        yield
    except UserError:
        for run, launch_before in before.items():
            if launch_before is None:
                (run / launch_record.LAUNCH).unlink(missing_ok=True)
            else:
                launch_record.write(run, launch_before)
        raise


def prepare(request: SubmitRequest) -> JobSpec:
    """Make the run folder with the scripts in it; nothing is started yet."""
    if request.job is not None and request.on != "slurm":
        raise UserError("--job is an allocation of Slurm's", hint="add --on slurm")
    if request.job is not None and not launch_record.JOB.fullmatch(request.job):
        raise UserError(f"--job: {request.job!r} is no number of a job", hint="squeue --me shows yours")
    found = groups_of(request)
    _scripts(_order(request, found, _place(request).resolve()), request)  # What they cannot say is refused here.
    if not request.skip_checks:
        from steelyard.launch import preflight

        preflight.check_files(request, _place(request))
        preflight.check_memory(request.recipe, found)
    run = _folder(request)
    _refuse_live(run)
    order = _order(request, found, run)
    _write(order, request)
    return order


def note(request: SubmitRequest, order: JobSpec, jobs: list[str], process: dict[str, Any] | None) -> dict[str, Any]:
    """Write down what was started, and return it."""
    launch = described(request, order, jobs, process)
    launch_record.write(order.run, launch)
    records = scheduler.refresh(order.run)
    state = scheduler.state(records, jobs)
    return {"run": str(order.run), "backend": request.on, "jobs": jobs, "state": state, "ranks": launch.ranks}


def described(request: SubmitRequest, order: JobSpec, jobs: list[str], process: dict[str, Any] | None) -> Launch:
    """What `launch.json` says of an order."""
    return Launch(
        backend=request.on, name=order.name, jobs=jobs, command=secrets.redact(order.command),
        nodes=sum(group.nodes for group in order.groups), ranks=node_groups.world(order.groups),
        gpus_per_node=order.groups[0].gpus, submitted=order.submitted, site=request.site_name,
        partitions=[group.partition for group in order.groups if group.partition],
        placement=request.recipe.parallel.placement if request.recipe else [],
        workdir=order.workdir, process=process,
        marks=slurm.marks(order) if request.on == "slurm" and request.job is None else [],
    )  # fmt: skip


def preview(request: SubmitRequest) -> tuple[dict[str, Any], str]:
    """What would be run, exactly; nothing is written or started."""
    order = planned(request)
    pages, lines = [], []
    for name, text in _scripts(order, request).items():
        pages.append(f"# {FOLDER}/{name}\n{text}")
    if request.on == "slurm" and request.job is None:
        lines = [join(slurm.line(order, group)) for group in slurm.jobs(order)]
    else:
        lines = [join(["bash", str(order.run / FOLDER / "job.sh")])]
    result = {"run": str(order.run), "lines": lines, "scripts": _scripts(order, request)}
    return result, "\n".join([*lines, "", *pages])


def planned(request: SubmitRequest) -> JobSpec:
    """The order as it would be; nothing is written."""
    return _order(request, groups_of(request), _place(request).resolve())


def wait(run: Path) -> int:
    """Stay until the job is over; returns 0 where it completed."""
    launch = launch_record.read(run)
    assert launch is not None
    while True:
        records = scheduler.refresh(run)
        state = scheduler.state(records, launch.jobs)
        if state is not None and state not in scheduler.LIVE:
            return 0 if state == "COMPLETED" else 1
        time.sleep(SECONDS_BETWEEN_QUESTIONS if launch.process is None else 0.2)


def groups_of(request: SubmitRequest) -> list[NodeGroup]:
    """The nodes a request needs; mistakes in it are found here, before anything is written."""
    cluster = clusters.load(request.cluster) if request.cluster else None
    if request.time_limit is not None and request.on != "slurm":
        raise UserError(
            f"--on {request.on} keeps no time limit", hint="use --on slurm, or train.max_hours in the recipe"
        )
    if request.recipe is None:
        found = node_groups.of_command(request.site, request.nodes, request.ranks_per_node)
    elif request.on == "local":
        if request.nodes not in (None, 1):
            raise UserError("--on local is one node", hint="use --on mpi or --on slurm for several")
        world = request.ranks_per_node or request.recipe.parallel.least_world
        request.recipe.parallel.data_for(world)
        found = [NodeGroup(1, world, gres=None if request.recipe.train.device == "cpu" else "gpu")]
    else:
        found = node_groups.of_plan(request.recipe, cluster, request.site, request.nodes, request.ranks_per_node)
    if request.on == "mpi":
        mpi.refuse_hosts(request.site, found)
    if request.on == "local" and node_groups.world(found) != found[0].ranks:
        raise UserError("--on local is one node", hint="use --on mpi or --on slurm for several")
    return found


def _order(request: SubmitRequest, found: list[NodeGroup], run: Path) -> JobSpec:
    site = request.site
    workdir = str(Path(site.workdir).expanduser() if site.workdir else Path.cwd())
    python = containers.python(site, sys.executable)
    steelyard = [python, "-P", "-m", "steelyard"]
    if request.recipe is not None:
        command = [*steelyard, "train", str(run / FOLDER / "recipe.toml"), "--run", str(run)]
    else:
        command = [*steelyard, *request.words]
    name = request.name or (request.recipe.name if request.recipe else request.words[0])
    return JobSpec(
        run, name, site, found, command, workdir, python, now(), job_tags.next_mark(run), request.time_limit,
        request.reload_container,
    )  # fmt: skip


def folder_name(name: str) -> str:
    """A name as a folder can be called."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-.")[:100] or "run"


def _where(request: SubmitRequest) -> Path:
    name = request.name or (request.recipe.name if request.recipe else request.words[0])
    return request.run or Path("runs") / folder_name(name)


def _folder(request: SubmitRequest) -> Path:
    """The run folder, made where it is not there yet."""
    found = _place(request)
    if request.recipe is not None:
        for_training(request.recipe, _where(request))
    else:
        name = _where(request).name
        files.write_json(found / MANIFEST, {"state": "created", "name": name, "command": secrets.redact(request.words)})
    for name in ("logs", FOLDER):
        (found / name).mkdir(exist_ok=True)
    return found.resolve()


def _place(request: SubmitRequest) -> Path:
    """Where the run folder is or will be: for training as `train` would choose it, for other commands a new one."""
    wanted = _where(request)
    if request.recipe is not None:
        return place_for_training(request.recipe, wanted)[0]
    number, found = 1, wanted
    while found.exists():
        number += 1
        found = wanted.with_name(f"{wanted.name}-{number}")
    return found


def _refuse_live(run: Path) -> None:
    launch = job_tags.launched(run)
    if launch is None:
        return
    state = scheduler.state(scheduler.refresh(run), launch.jobs)
    if state in scheduler.LIVE:
        raise UserError(
            f"{run} is already {str(state).lower()}: job {', '.join(launch.jobs)}",
            hint="steelyard cancel it first, or give another --run",
        )


def _scripts(order: JobSpec, request: SubmitRequest) -> dict[str, str]:
    if request.on == "slurm" and request.job is None:
        return {slurm.script_name(group): slurm.text(order, group) for group in slurm.jobs(order)}
    if request.on == "slurm":
        return {"job.sh": slurm.text(order, job=request.job)}
    return {"job.sh": _here(order, request)}


def _here(order: JobSpec, request: SubmitRequest) -> str:
    """The script for mpirun, or for ranks on this machine, which torchrun starts; a command alone needs no torch."""
    site, text = order.site, job_script.preamble(order.site, order.workdir)
    if request.on == "mpi":
        before = mpi.preparation(order)
        text += f"{join(before)} || exit 1\n" if before else ""
        return text + job_script.executing(mpi.command(order))
    prepared = containers.preparation(site.container, order.reload_container)
    text += f"bash -c {quote(prepared)} || exit 1\n" if prepared else ""
    if request.recipe is None and node_groups.world(order.groups) == 1:
        return text + job_script.executing([*slurm.starter(order), *order.command_arguments])
    return text + job_script.executing(torchrun.command(order))


def _write(order: JobSpec, request: SubmitRequest) -> None:
    folder = order.run / FOLDER
    if request.recipe is not None:
        files.write_text(folder / "recipe.toml", to_toml(request.recipe.settings()))
    if order.private_command is not None:
        files.write_json(order.private_command, order.command, private=True)
    for name, text in _scripts(order, request).items():
        files.write_text(folder / name, text)

"""Submits and cancels jobs: `steelyard submit` and `steelyard cancel`.

The recipe is saved as it is at submission (`launch/recipe.toml`): a job may wait for days, and later edits must not
change what it trains. `launch/` also contains the scripts that were started. Starting a job is up to the backend
(`backends/`).
"""

from __future__ import annotations

import itertools
import json
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from shlex import join
from typing import Any

from steelyard.core import files, secrets
from steelyard.core.errors import UserError
from steelyard.core.host import require_linux
from steelyard.core.recipe import Recipe, to_toml
from steelyard.core.recipe.site_section import SiteSection
from steelyard.core.recipe.toml import parse_value
from steelyard.core.run import MANIFEST, for_training, now, place_for_training
from steelyard.launch import backends, elastic_job, job_spec, launch_record, site_environment
from steelyard.launch.backends import ENDED, JobState, Option
from steelyard.launch.job_spec import JobSpec, NodeGroup
from steelyard.launch.launch_record import FOLDER, Launch
from steelyard.planning import cluster as clusters

SECONDS_BETWEEN_POLLS = 5.0


@dataclass(frozen=True)
class SubmitRequest:
    """The arguments of `submit`: a recipe to train, or another command."""

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
    uses_gpu: bool = False
    """Whether the command in `words` computes on a GPU; a recipe says so itself."""
    min_nodes: int | None = None
    """The fewest nodes with which an elastic run continues."""


def submit(request: SubmitRequest) -> dict[str, Any]:
    """Start or queue the job. Returns its run folder, ids and state."""
    require_linux(f"starting a job (--on {request.on})", "steelyard train works here, in one process; --dry-run too")
    spec = prepare(request)
    return note(spec, backends.load(request.on).submit(spec, described(request, spec)))


def prepare(request: SubmitRequest) -> JobSpec:
    """Create the run folder with its scripts, without starting anything."""
    found = groups_of(request)
    backend, place = backends.load(request.on), _place(request)
    spec = _spec(request, found, place.resolve())
    backend.scripts(spec)  # Raises an error for a request that cannot be scripted.
    elastic_job.of_request(request, spec)
    if not request.skip_checks:
        from steelyard.launch import preflight

        preflight.check_files(request, place)
        preflight.check_memory(request.recipe, found)
    run = _folder(request)
    _refuse_live(run)
    spec = _spec(request, found, run)
    folder = run / FOLDER
    if request.recipe is not None:
        files.write_text(folder / "recipe.toml", to_toml(request.recipe.settings()))
        elastic_job.prepare(request, spec)
    if spec.private_command is not None:
        files.write_json(spec.private_command, spec.command, private=True)
    for name, text in backend.scripts(spec).items():
        files.write_text(folder / name, text)
    return spec


def note(spec: JobSpec, launch: Launch) -> dict[str, Any]:
    """Write `launch.json` and return a summary of the job."""
    launch_record.write(spec.run, launch)
    state = launch_record.state(launch_record.refresh(spec.run), launch)
    return {
        "run": str(spec.run), "backend": launch.backend, "jobs": launch.jobs, "state": state, "ranks": launch.ranks,
    }  # fmt: skip


def described(request: SubmitRequest, spec: JobSpec) -> Launch:
    """The contents of `launch.json` before the backend submits the job."""
    return Launch(
        backend=request.on, name=spec.name, jobs=[], command=secrets.redact(spec.command),
        nodes=sum(group.nodes for group in spec.groups), ranks=job_spec.world(spec.groups),
        gpus_per_node=spec.groups[0].gpus, submitted=spec.submitted, site=request.site_name,
        partitions=[group.partition for group in spec.groups if group.partition],
        placement=request.recipe.parallel.placement if request.recipe else [], workdir=spec.workdir,
    )  # fmt: skip


def preview(request: SubmitRequest) -> tuple[dict[str, Any], str]:
    """The commands and scripts that `submit` would run. Writes and starts nothing."""
    spec, backend = planned(request), backends.load(request.on)
    scripts, lines = backend.scripts(spec), [join(command) for command in backend.commands(spec)]
    pages = [f"# {FOLDER}/{name}\n{text}" for name, text in scripts.items()]
    return {"run": str(spec.run), "lines": lines, "scripts": scripts}, "\n".join([*lines, "", *pages])


def planned(request: SubmitRequest) -> JobSpec:
    """The job that would be submitted. Writes nothing."""
    return _spec(request, groups_of(request), _place(request).resolve())


def wait(run: Path) -> int:
    """Wait until the job is over. Returns 0 if it finished, else 1."""
    launch = launch_record.read(run)
    assert launch is not None
    while (state := launch_record.state(launch_record.refresh(run), launch)) not in ENDED:
        time.sleep(SECONDS_BETWEEN_POLLS if launch.process is None else 0.2)
    return 0 if state is JobState.FINISHED else 1


def cancel_run(run: Path, at_once: bool = False) -> dict[str, Any]:
    """End a job: its ranks save and stop, or are killed with `at_once`."""
    launch = launch_record.launched(run)
    if launch is None:
        raise UserError(
            f"{run} was not submitted: it has no {launch_record.LAUNCH}", hint="end the process that trains it"
        )
    if not launch.jobs:
        raise UserError(
            f"{launch.backend} has no job for {run}: the submission was interrupted or is still in progress",
            hint="submit it again, or try again in a minute",
        )
    state = launch_record.state(launch_record.refresh(run), launch)
    if state in ENDED:
        return {"run": str(run), "jobs": launch.jobs, "state": state, "cancelled": False}
    backends.load(launch.backend).cancel(run, launch, at_once)
    state = launch_record.state(launch_record.refresh(run), launch)
    return {"run": str(run), "jobs": launch.jobs, "state": state, "cancelled": True}


def groups_of(request: SubmitRequest) -> list[NodeGroup]:
    """The nodes that a request needs. Raises an error for an invalid request, before anything is written."""
    cluster = clusters.load(request.cluster) if request.cluster else None
    if request.time_limit is not None:
        backends.refuse_option(request.on, Option.TIME, ", or train.max_hours in the recipe")
    if request.job is not None:
        backends.refuse_option(request.on, Option.ALLOCATION)
    if request.min_nodes is not None:
        elastic_job.refuse_inelastic(request)
    return backends.load(request.on).nodes(request, cluster)


def _spec(request: SubmitRequest, found: list[NodeGroup], run: Path) -> JobSpec:
    site = request.site
    workdir = str(Path(site.workdir).expanduser() if site.workdir else Path.cwd())
    python = site_environment.python(site, sys.executable)
    steelyard = [python, "-P", "-m", "steelyard"]
    if request.recipe is not None:
        command = [*steelyard, "train", str(run / FOLDER / "recipe.toml"), "--run", str(run)]
    else:
        command = [*steelyard, *request.words]
    return JobSpec(
        run, _name(request), site, found, command, workdir, python, now(), launch_record.next_mark(run),
        request.time_limit, request.reload_container, request.job, is_training=request.recipe is not None,
        min_nodes=request.min_nodes,
    )  # fmt: skip


def _name(request: SubmitRequest) -> str:
    return request.name or (request.recipe.name if request.recipe else request.words[0])


def folder_name(name: str) -> str:
    """A name as a valid folder name."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-.")[:100] or "run"


def _where(request: SubmitRequest) -> Path:
    return request.run or Path("runs") / folder_name(_name(request))


def _folder(request: SubmitRequest) -> Path:
    """The run folder, created if necessary."""
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
    """The path of the run folder: for training the one that `train` would choose, for other commands a new one."""
    wanted = _where(request)
    if request.recipe is not None:
        return place_for_training(request.recipe, wanted)[0]
    number, found = 1, wanted
    while found.exists():
        number += 1
        found = wanted.with_name(f"{wanted.name}-{number}")
    return found


def _refuse_live(run: Path) -> None:
    launch = launch_record.launched(run)
    if launch is None:
        return
    state = launch_record.state(launch_record.refresh(run), launch)
    if state is not None and state not in ENDED:
        raise UserError(
            f"{run} is already {state}: job {', '.join(launch.jobs)}",
            hint="run steelyard cancel first, or use another --run",
        )


def array_requests(
    base: SubmitRequest, array: Sequence[str], load: Callable[[list[str]], Recipe]
) -> list[SubmitRequest]:
    """One request for each combination of values (`--array 'train.seed=[1, 2]'`), each with its own name."""
    backends.refuse_option(base.on, Option.ARRAY, ", or steelyard tune for searches")
    if base.recipe is None or base.job is not None or base.min_nodes is not None:
        raise UserError(
            "--array needs a recipe and excludes --job and --min-nodes", hint="use steelyard tune for searches"
        )
    name, run = base.name or base.recipe.name, base.run
    return [
        replace(
            base,
            recipe=load(overrides),
            name=f"{name}-{number}",
            run=None if run is None else run.with_name(f"{run.name}-{number}"),
        )
        for number, overrides in enumerate(combinations(array))
    ]


def combinations(array: Sequence[str]) -> Iterator[list[str]]:
    """Every combination of one value per key, as overrides of a recipe."""
    axes = []
    for word in array:
        key, separator, text = word.partition("=")
        values = parse_value(text.strip())
        if not separator or not isinstance(values, list) or not values:
            raise UserError(
                f"{word!r} is not a list of values", hint="write KEY=[A, B], such as 'train.seed=[1, 2, 3]'"
            )
        axes.append([f"{key.strip()}={json.dumps(value)}" for value in values])
    return (list(choice) for choice in itertools.product(*axes))


def preview_array(requests: list[SubmitRequest]) -> tuple[dict[str, Any], str]:
    """The command and scripts that an array would run. Writes and starts nothing."""
    _refuse_different_nodes(requests)
    specs = [planned(request) for request in requests]
    command, scripts = backends.load(requests[0].on).array(specs)
    line, runs = join(command), [{"run": str(spec.run), "jobs": []} for spec in specs]
    pages = [f"# {name}\n{text}" for name, text in scripts.items()]
    return {"runs": runs, "lines": [line], "scripts": scripts}, "\n".join([line, "", *pages])


def submit_array(requests: list[SubmitRequest]) -> list[dict[str, Any]]:
    """Submit all requests as one array, each with its own run folder."""
    _refuse_different_nodes(requests)
    specs = [prepare(request) for request in requests]
    launches = [described(request, spec) for request, spec in zip(requests, specs, strict=True)]
    launches = backends.load(requests[0].on).submit_array(specs, launches)
    return [note(spec, launch) for spec, launch in zip(specs, launches, strict=True)]


def _refuse_different_nodes(requests: list[SubmitRequest]) -> None:
    groups = {tuple(groups_of(request)) for request in requests}
    if len(groups) > 1 or any(len(each) > 1 for each in groups):
        raise UserError("the jobs of an array need the same number of nodes of one type", hint="submit them one by one")

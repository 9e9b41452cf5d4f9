"""Slurm: sbatch queues a job, squeue and sacct report its state, scancel ends it.

The scripts are in `slurm_script.py`; `slurm_queue.py` parses the output of squeue and sacct. In an existing allocation
(`--job`) a supervisor on this machine runs the script, whose srun starts a step there.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from steelyard.core import files
from steelyard.core.console import console
from steelyard.core.errors import RuntimeFailure, UserError
from steelyard.core.host import die_with_parent, output_of
from steelyard.launch import job_spec, launch_record, supervisor
from steelyard.launch.backends import (
    Backend,
    Option,
    Place,
    Record,
    slurm_elastic,
    slurm_queue,
    slurm_script,
)
from steelyard.launch.elastic_job import ElasticJob, Node
from steelyard.launch.job_spec import JobSpec, NodeGroup
from steelyard.launch.launch_record import FOLDER, JOBS, Launch

if TYPE_CHECKING:
    from steelyard.core.recipe.site_section import SiteSection
    from steelyard.launch.submit import SubmitRequest
    from steelyard.planning.cluster import Cluster

# A submission from inside a job must not pass that job's options on to the new one.
KEPT_VARIABLES = ("SLURM_CONF", "SLURM_CLUSTERS", "SLURM_TIME_FORMAT")
SECONDS_TO_FIND = 5.0


class Slurm(Backend):
    """Jobs that Slurm queues, or steps in an existing allocation."""

    takes = frozenset({Option.TIME, Option.ALLOCATION, Option.ARRAY, Option.ELASTIC})
    program = "sbatch"
    rank_variables = slurm_script.RANK_VARIABLES
    owns = staticmethod(slurm_queue.owns)
    find = staticmethod(slurm_queue.find)
    translate = staticmethod(slurm_queue.translate)
    allocated = staticmethod(slurm_elastic.allocated)
    unusable = staticmethod(slurm_elastic.unusable)
    answers = staticmethod(slurm_elastic.answers)
    can_requeue = staticmethod(slurm_elastic.can_requeue)
    spare = staticmethod(slurm_elastic.spare)

    def nodes(self, request: SubmitRequest, cluster: Cluster | None) -> list[NodeGroup]:
        """The nodes of the plan."""
        if request.job is not None and not slurm_queue.JOB.fullmatch(request.job):
            raise UserError(f"--job: {request.job!r} is not a job id", hint="squeue --me shows your jobs")
        found = job_spec.nodes_of(request, cluster)
        if request.uses_gpu and request.job is None and not any(group.gres for group in found):
            console.warn(
                "the job requests no GPU: no gres is known\n  hint: set slurm.gres of the site, such as gpu:1, or give "
                "--cluster and a partition that it describes"
            )
        return found

    def scripts(self, spec: JobSpec) -> dict[str, str]:
        """One script per job."""
        return {slurm_script.script_name(group): slurm_script.text(spec, group) for group in slurm_script.jobs(spec)}

    def commands(self, spec: JobSpec) -> list[list[str]]:
        """sbatch for each job, or the script for an existing allocation."""
        if spec.allocation is not None:
            return [["bash", str(spec.run / FOLDER / "job.sh")]]
        return [slurm_script.line(spec, group) for group in slurm_script.jobs(spec)]

    def submit(self, spec: JobSpec, launch: Launch) -> Launch:
        """Queue each job. If one of several is refused, cancel the others, which would wait for it."""
        if spec.allocation is not None:
            process = supervisor.start(spec.run, self.commands(spec)[0], environment())
            return replace(launch, jobs=[spec.allocation], process=process)
        launch = replace(launch, marks=slurm_script.marks(spec))
        jobs: list[str] = []
        (spec.run / FOLDER / JOBS).unlink(missing_ok=True)
        with launch_record.intended({spec.run: launch}):
            try:
                for command in self.commands(spec):
                    jobs.append(sbatch(command))
                launch_record.write_jobs(spec.run, jobs)
            except BaseException:
                if jobs:
                    scancel(jobs)
                raise
        return replace(launch, jobs=jobs)

    def array(self, specs: list[JobSpec]) -> tuple[list[str], dict[str, str]]:
        """The sbatch command, and the scripts of all tasks."""
        scripts = {str(slurm_script.array_path(specs)): slurm_script.array_script(specs)}
        scripts |= {str(spec.run / FOLDER / name): text for spec in specs for name, text in self.scripts(spec).items()}
        return slurm_script.array_line(specs), scripts

    def submit_array(self, specs: list[JobSpec], launches: list[Launch]) -> list[Launch]:
        """Queue one array. Each task has its own run folder and is identified by the mark of the first."""
        files.write_text(slurm_script.array_path(specs), slurm_script.array_script(specs))
        for number, spec in enumerate(specs):
            task = specs[0].run / FOLDER / f"task-{number}"
            task.unlink(missing_ok=True)
            task.symlink_to(spec.run)
        launches = [replace(each, marks=[f"{specs[0].mark}_{number}"]) for number, each in enumerate(launches)]
        with launch_record.intended({spec.run: each for spec, each in zip(specs, launches, strict=True)}):
            job = sbatch(slurm_script.array_line(specs))
        return [replace(each, jobs=[f"{job}_{number}"]) for number, each in enumerate(launches)]

    def poll(self, run: Path, launch: Launch, last: Mapping[str, Record]) -> list[Record]:
        """The states from Slurm, or from the supervisor of a step."""
        if launch.process is not None:
            return [supervisor.poll(run, launch)]
        return slurm_queue.poll(run, launch.jobs, last)

    def cancel(self, run: Path, launch: Launch, at_once: bool) -> None:
        """Cancel the jobs; in an existing allocation cancel only the step."""
        if launch.process is None:
            scancel(launch.jobs, at_once)
            return
        supervisor.cancel(run, launch, signal.SIGKILL if at_once else signal.SIGTERM)
        if at_once:
            _kill_step(launch)

    def place(self, environ: Mapping[str, str]) -> Place:
        """srun numbers the nodes of a job. Every node can resolve Slurm's node names."""
        return Place(int(environ.get("SLURM_PROCID", "0")), address=environ.get("SLURMD_NODENAME"))

    def on_node(self, job: ElasticJob, node: Node, options: list[str]) -> list[str]:
        """srun, which starts a step with the node agent."""
        return [*slurm_elastic.srun(job, node), *job.step, *job.agent, *options]

    def supervised_on(self, environ: Mapping[str, str]) -> str | None:
        """The node of the job script."""
        return environ.get("SLURMD_NODENAME")

    def lost_supervisor(self, environ: Mapping[str, str]) -> None:
        """Requeue the job: Slurm keeps a job with --no-kill that has lost the node of its script."""
        output_of(["scontrol", "requeue", environ.get("SLURM_JOB_ID", "0")])

    def attempt_name(self, environ: Mapping[str, str]) -> str:
        """The job id and its restart count."""
        return f"{environ.get('SLURM_JOB_ID', '0')}.{environ.get('SLURM_RESTART_COUNT', '0')}"

    def trial_site(self, site: SiteSection, minutes: int) -> SiteSection:
        """No requeue, since its time in the queue would count in the measurement, and no signal before the limit."""
        limit = site.slurm.time_limit or str(minutes)
        changes = {"requeue": False, "warning_seconds": 0, "time_limit": limit}
        return site.model_copy(update={"slurm": site.slurm.model_copy(update=changes)})


def environment() -> dict[str, str]:
    """The environment without SLURM_ variables of an outer job or step, which sbatch and srun would use as options."""
    return {
        name: value for name, value in os.environ.items() if not name.startswith("SLURM_") or name in KEPT_VARIABLES
    }


def sbatch(command: Sequence[str]) -> str:
    """Run sbatch and return the job id it prints. sbatch is killed if this process dies before reading the id."""
    try:
        answer = subprocess.run(
            command, capture_output=True, text=True, timeout=120, env=environment(), preexec_fn=die_with_parent()
        )
    except FileNotFoundError:
        raise UserError(
            "sbatch is not installed here", hint="submit from a login node of the cluster, or use --on local or mpi"
        ) from None
    except subprocess.TimeoutExpired:
        raise RuntimeFailure(
            "sbatch did not answer within 120 s", hint="check whether the Slurm controller is up: sinfo"
        ) from None
    if answer.returncode:
        reason = answer.stderr.strip().removeprefix("sbatch: error: ") or f"exit code {answer.returncode}"
        raise UserError(f"sbatch refuses the job: {reason}", hint="--dry-run shows the options and the script")
    return answer.stdout.strip().splitlines()[-1].partition(";")[0]


def _kill_step(launch: Launch) -> None:
    """End the step that the srun of a killed supervisor started in an allocation. The allocation itself stays.

    srun may still be starting the step, so this looks for it repeatedly.
    """
    job, name = launch.jobs[0], slurm_script.step_name(launch.name, launch.submitted)
    query = ["squeue", "--noheader", "--steps", f"--jobs={job}", "--format=%i %j"]
    deadline = time.monotonic() + SECONDS_TO_FIND
    was_found = False
    while time.monotonic() < deadline:
        pairs = [line.split(maxsplit=1) for line in (output_of(query) or "").splitlines()]
        steps = [pair[0] for pair in pairs if pair[1:] == [name] and slurm_queue.STEP.fullmatch(pair[0])]
        if steps:
            was_found = True
            scancel(steps, at_once=True)
        elif was_found:
            return
        time.sleep(0.5)


def scancel(jobs: list[str], at_once: bool = False) -> None:
    """scancel sends SIGTERM, and SIGKILL after the cluster's KillWait. With `at_once`, ranks cannot save."""
    now = ["--signal=KILL", *([] if any("." in job for job in jobs) else ["--full"])]  # A step has no script to kill.
    words = ["scancel", *(now if at_once else []), *jobs]
    try:
        answer = subprocess.run(words, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.SubprocessError) as error:
        raise RuntimeFailure(f"scancel failed: {error}") from None
    if answer.returncode:
        raise RuntimeFailure(f"scancel failed: {answer.stderr.strip()}")


BACKEND = Slurm()

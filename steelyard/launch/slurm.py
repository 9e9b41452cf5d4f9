"""A job for Slurm: options as words of sbatch's own line, and a script that starts one starter on each node.

Nothing of the user's stands in `#SBATCH` comments, whose quoting is Slurm's own; sbatch takes every option as a word.
Nodes that are alike make one job, nodes of several partitions one heterogeneous job (or, where a site forbids those,
a master and followers, see `meeting.py`). Slurm warns the ranks before the time limit and before a pre-emption; they
save and end with 130, and the script has the job queued again, unless it was cancelled. All parts of a heterogeneous
job are queued again with their leader, a master and its followers with each other (`together.py`). A lost node
requeues the job by itself.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Sequence
from shlex import join, quote

from steelyard.core.errors import Interrupted, RuntimeFailure, UserError
from steelyard.core.host import die_with_parent
from steelyard.core.recipe.site_section import SiteSection
from steelyard.launch import containers, job_script, multi_job
from steelyard.launch.job_spec import JobSpec
from steelyard.launch.job_tags import BEGAN, NUMBER
from steelyard.launch.launch_record import FOLDER
from steelyard.launch.node_groups import NodeGroup, written
from steelyard.launch.rendezvous_file import STOPPED

ATTEMPT = '"$SLURM_JOB_ID.${SLURM_RESTART_COUNT:-0}"'  # For the shell to fill in.
# In an allocation that is there, nobody but this script can tell the ranks to save and stop: a signal would end bash
# and leave srun behind, and srun kills its ranks at a SIGTERM but hands a SIGUSR1 on.
LISTENING = """step= asked=
trap 'asked=1; [ -z "$step" ] || kill -USR1 "$step"' TERM INT USR1
"""
WAITING = """step=$!
[ -z "$asked" ] || kill -USR1 "$step"
wait "$step"
code=$?
while kill -0 "$step" 2>/dev/null; do
    wait "$step"
    code=$?
done
"""
# A submission from inside a job must not hand that job's shape on to the new one.
KEPT = ("SLURM_CONF", "SLURM_CLUSTERS", "SLURM_TIME_FORMAT")


def sbatch(order: JobSpec, group: int | None = None) -> list[str]:
    """sbatch's line, but for the script: one part for each group, or that of one group of several jobs."""
    wanted = order.groups if group is None else [order.groups[group]]
    suffix = "" if group in (None, 0) else f"-follower-{group}"
    parts = [_options(order, each) for each in wanted]
    words = ["sbatch", "--parsable", f"--job-name={job_name(order.name)}{suffix}", *_once(order)]
    for number, part in enumerate(parts):
        words += [*([":"] if number else []), *part]
    return words


def job_name(name: str) -> str:
    """What squeue shows: one line of plain text, whatever the run is called."""
    return re.sub(r"[^A-Za-z0-9._-]+", "_", name).strip("_") or "steelyard"


def step_name(name: str, submitted: str) -> str:
    """What a step in an allocation that is there is called, by which it alone is cancelled."""
    return f"{job_name(name)[:60]}-{re.sub(r'[^0-9]', '', submitted)}"


def _once(order: JobSpec) -> list[str]:
    """What is said once for all parts. A `%` in a path would stand for something."""
    logs = str(order.run / "logs").replace("%", "%%")
    words = [f"--output={logs}/slurm-%j.log", "--open-mode=append", f"--chdir={order.workdir}"]
    return [*words, "--requeue" if order.site.requeue else "--no-requeue"]


def _options(order: JobSpec, group: NodeGroup) -> list[str]:
    """What each part of a heterogeneous job needs for itself."""
    site, limit = order.site, order.time_limit or order.site.time_limit
    words = [f"--nodes={group.nodes}", "--ntasks-per-node=1", f"--cpus-per-task={_cpus(site, group)}"]
    words += [f"--partition={group.partition}"] if group.partition else []
    words += [f"--gres={group.gres}"] if group.gres else []
    words += [f"--account={site.account}"] if site.account else []
    words += [f"--mem={site.memory}"] if site.memory else []
    words += [f"--time={limit}"] if limit else []
    words += [f"--signal=USR1@{site.warning_seconds}"] if site.warning_seconds else []
    return [*words, *site.sbatch]


def _cpus(site: SiteSection, group: NodeGroup) -> int:
    return group.ranks * (site.cpus_per_rank or (4 if group.gres else 1))


def text(order: JobSpec, group: int | None = None, job: str | None = None) -> str:
    """The script of the job, of one group of several jobs, or for an allocation that is there already."""
    lines = [job_script.preamble(order.site, order.workdir)]
    if job is None:
        lines.append(f'[ -z "$1" ] || echo {NUMBER} >{quote(str(order.run / FOLDER / BEGAN))}"$1"\n')
    preparation = containers.preparation(order.site.container, order.reload_container)
    if preparation is not None:
        before = ["bash", "-c", preparation]
        lines.append(f"{_srun(order, before, '', group, job, inside=False)} || exit 1\n")
    line = _srun(order, starter(order), _starter_options(order, group, job), group, job)
    if job is not None:
        lines.append(f"{LISTENING}{line} &\n{WAITING}")
    elif group is not None:
        lines.append(multi_job.looking_after_others(order.run, line))
    else:
        lines.append(f"{line}\ncode=$?\n")
    word = quote(str(order.run / FOLDER / STOPPED))
    asked = f"[ $code = 0 ] && [ -e {word}{_attempt(order, job)} ]"
    lines.append(f"if {asked}; then code={Interrupted.exit_code}; fi\n")
    if order.site.requeue and job is None:
        lines.append(_requeueing(order))
    return "".join([*lines, "exit $code\n"])


def _requeueing(order: JobSpec) -> str:
    return (
        f"if [ $code = {Interrupted.exit_code} ] &&\n"
        f'    [ "${{SLURM_RESTART_COUNT:-0}}" -lt {order.site.max_restarts} ] &&\n'
        '    [ "$(squeue --noheader --jobs="$SLURM_JOB_ID" --format=%T | head -n 1)" = RUNNING ]; then\n'
        '    echo "to be queued again"\n'
        '    scontrol requeue "$SLURM_JOB_ID" || echo "error: Slurm refuses; submit it again to go on" >&2\n'
        "fi\n"
    )


def starter(order: JobSpec) -> list[str]:
    """The starter's words up to its options, inside the site's container."""
    words = [order.python, "-P", "-m", "steelyard.launch.node_agent", "--run", str(order.run)]
    gpus = any(group.gres for group in order.groups)
    return containers.wrapped(order.site, words, order.workdir, str(order.run), gpus)


def _starter_options(order: JobSpec, group: int | None, job: str | None) -> str:
    options = ["--groups", written(order.groups)]
    options += ["--group", str(group)] if group is not None else []
    options += ["--port", str(order.site.port)] if order.site.port else []
    return f" {join(options)} --attempt {_attempt(order, job)} {join(order.command_arguments)}"


def _attempt(order: JobSpec, job: str | None) -> str:
    return ATTEMPT if job is None else quote(f"{job}.{order.submitted}")


def _srun(
    order: JobSpec, words: Sequence[str], tail: str, group: int | None, job: str | None, inside: bool = True
) -> str:
    """srun's line: the same command on every node of every group."""
    wanted = order.groups if group is None else [order.groups[group]]
    container = containers.srun_options(order.site, order.workdir, str(order.run)) if inside else []
    parts = []
    for number, each in enumerate(wanted):
        options = [f"--het-group={number}"] if len(wanted) > 1 else []
        options += [f"--nodes={each.nodes}", f"--ntasks={each.nodes}", "--ntasks-per-node=1"]
        options += [f"--cpus-per-task={_cpus(order.site, each)}"]
        options += ["--kill-on-bad-exit=1"] if not number else []
        options += (
            [f"--jobid={job}", "--overlap", f"--job-name={step_name(order.name, order.submitted)}"] if job else []
        )
        parts.append(f"{join([*options, *container, *words])}{tail}")
    return "srun " + " \\\n    : ".join(parts)


def environment() -> dict[str, str]:
    """This process's, less what an outer job or step says of itself: sbatch and srun would take it for options."""
    return {name: value for name, value in os.environ.items() if not name.startswith("SLURM_") or name in KEPT}


def ask(command: Sequence[str]) -> str:
    """Run sbatch and return the number it prints. It must not go on when nobody waits for the number any more."""
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
            "sbatch did not answer within 120 s", hint="see whether Slurm's controller is up: sinfo"
        ) from None
    if answer.returncode:
        reason = answer.stderr.strip().removeprefix("sbatch: error: ") or f"exit code {answer.returncode}"
        raise UserError(f"sbatch refuses the job: {reason}", hint="--dry-run shows what was asked for")
    return answer.stdout.strip().splitlines()[-1].partition(";")[0]


def jobs(order: JobSpec) -> list[int | None]:
    """The jobs an order becomes: one for all groups (None), or one for each."""
    is_several = len(order.groups) > 1 and order.site.heterogeneous == "several-jobs"
    return list(range(len(order.groups))) if is_several else [None]


def script_name(group: int | None) -> str:
    """What the script of a job is called."""
    return "job.sh" if group is None else f"job-{group}.sh"


def line(order: JobSpec, group: int | None) -> list[str]:
    """sbatch's whole line; the last word is for whoever looks for the job."""
    return [*sbatch(order, group), str(order.run / FOLDER / script_name(group)), mark(order, group)]


def mark(order: JobSpec, group: int | None) -> str:
    """By what a job is known whose number nobody has."""
    return order.mark if group is None else f"{order.mark}.{group}"


def marks(order: JobSpec) -> list[str]:
    """The marks of all jobs of an order."""
    return [mark(order, group) for group in jobs(order)]

"""The commands and scripts of a Slurm job: options as arguments of sbatch, and a script that runs srun.

The user's values are not written to `#SBATCH` comments, which have their own quoting rules: sbatch gets every option as
an argument. srun starts one node agent per node. Identical nodes make one job. Nodes of several partitions make one
heterogeneous job or, if a site forbids those, a master and followers, which are several jobs of one run. Slurm signals
the ranks before the time limit and before a preemption. They save and exit with 130, and the script requeues the job
unless it was cancelled. After a node failure Slurm itself requeues the job. The script of an elastic run gets these
signals itself and forwards them to the supervisor.

All parts of a heterogeneous job are requeued together. The scripts of a master and its followers poll each other's
jobs, because there is no squeue inside a container. If one job is over, the others would wait for it until their time
limits, so they end. If one was requeued, the others have lost ranks and are requeued too. Ranks may notice a loss long
before Slurm does, which waits for an unresponsive node (SlurmdTimeout). So a job whose ranks failed only because they
lost others waits that long for the state of the other jobs.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from shlex import join, quote

from steelyard.core.errors import Interrupted, UserError
from steelyard.core.recipe.site_section import SlurmSection
from steelyard.launch import site_environment
from steelyard.launch.job_spec import JobSpec, NodeGroup, agent_command, elastic_command, written
from steelyard.launch.launch_record import FOLDER, JOBS
from steelyard.launch.rendezvous_file import FAILED, LOST, MET, STOPPED

RANK_VARIABLES = ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_JOB_ID", "SLURMD_NODENAME")
BEGAN = "began-"
ATTEMPT = '"$SLURM_JOB_ID.${SLURM_RESTART_COUNT:-0}"'  # expanded by the shell
# Expanded by the shell: the job id as squeue and sacct show it.
JOB_ID = '"${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_}${SLURM_ARRAY_TASK_ID:-$SLURM_JOB_ID}"'
# In an existing allocation, and in an elastic run, only this script can signal the ranks or the supervisor to save and
# stop. Without the trap, a signal would end bash and leave them running. srun kills its ranks on SIGTERM but forwards
# SIGUSR1.
LISTENING = """step= asked=0
trap 'asked=$((asked + 1)); [ -z "$step" ] || kill -USR1 "$step"' TERM INT USR1
"""
# A signal interrupts wait, which then returns the number of the signal and not the code of the step.
WAITING = """step=$!
[ "$asked" = 0 ] || kill -USR1 "$step"
while :; do
    before=$asked
    wait "$step"
    code=$?
    [ "$code" -gt 128 ] && [ "$before" != "$asked" ] || break
done
"""
# srun returns the highest exit code, which is 130 if a node was stopped because another one failed.
FAILURE = f"""if [ -e %(lost)s%(attempt)s ] || [ -e %(failed)s%(attempt)s ]; then
    [ $code != {Interrupted.exit_code} ] || code=1
fi
"""
NAMES = {"jobs": JOBS, "met": MET, "lost": LOST, "failed": FAILED}
OVER, AGAIN = 3, 4  # exit codes of the subshell that polls the other jobs
LOOKING = """how_others_are() {
    [ -e %(jobs)s ] || return
    while read -r job; do
        [ "$job" != "$SLURM_JOB_ID" ] || continue
        case "$(squeue --noheader --states=all --jobs="$job" --format=%%T 2>&1)" in
            BOOT_FAIL|CANCELLED|COMPLETED|DEADLINE|FAILED|NODE_FAIL|OUT_OF_MEMORY|PREEMPTED|TIMEOUT) echo over ;;
            *"Invalid job id"*) echo over ;;
        esac
    done <%(jobs)s
    [ -e %(met)s"$attempt" ] || return
    while IFS=. read -r job restarts; do
        [ "$job" != "$SLURM_JOB_ID" ] || continue
        read -r state count <<<"$(squeue --noheader --states=all --jobs="$job" --Format=state:24,restartcnt:12)"
        if [ "$state" = PENDING ] || [ "${count:-0}" -gt "${restarts:-0}" ]; then echo again; fi
    done <%(met)s"$attempt"
}
attempt=$SLURM_JOB_ID.${SLURM_RESTART_COUNT:-0}
patience=$(scontrol show config | sed -n 's/^SlurmdTimeout *= *\\([0-9]*\\).*/\\1/p')
patience=$((${patience:-300} + 60))
"""
WATCHING = f"""step=$!
(
    over=0 again=0
    while sleep 10; do
        case "$(how_others_are)" in
            *over*) over=$((over + 1)) again=0 ;;
            *again*) again=$((again + 1)) over=0 ;;
            *) over=0 again=0 ;;
        esac
        if [ $over = 3 ]; then kill "$step" 2>/dev/null; exit {OVER}; fi
        if [ $again = 3 ]; then kill "$step" 2>/dev/null; exit {AGAIN}; fi
        if ! kill -0 "$step" 2>/dev/null; then patience=$((patience - 10)); fi
        if [ $patience -le 0 ]; then exit 0; fi
    done
) &
watcher=$!
wait "$step"
code=$?
%(failure)sif [ $code = 0 ] || [ ! -e %(lost)s"$attempt" ] || [ -e %(failed)s"$attempt" ]; then
    kill "$watcher" 2>/dev/null
fi
wait "$watcher"
case $? in
    {OVER}) echo "error: another job of this run is over, so this one ends too" >&2; exit 1 ;;
    {AGAIN}) echo "another job of this run was requeued, so this one is requeued too"; code={Interrupted.exit_code} ;;
esac
"""


def sbatch(spec: JobSpec, group: int | None = None) -> list[str]:
    """The sbatch command without the script: one part per group, or only the given group of several jobs."""
    wanted = spec.groups if group is None else [spec.groups[group]]
    suffix = "" if group in (None, 0) else f"-follower-{group}"
    parts = [_options(spec, each) for each in wanted]
    words = ["sbatch", "--parsable", f"--job-name={job_name(spec.name)}{suffix}", *_once(spec)]
    for number, part in enumerate(parts):
        words += [*([":"] if number else []), *part]
    return words


def job_name(name: str) -> str:
    """The job name for squeue: plain text without spaces, whatever the run is called."""
    return re.sub(r"[^A-Za-z0-9._-]+", "_", name).strip("_") or "steelyard"


def step_name(name: str, submitted: str) -> str:
    """The name of a step in an existing allocation. It identifies the step when only the step is cancelled."""
    return f"{job_name(name)[:60]}-{re.sub(r'[^0-9]', '', submitted)}"


def _once(spec: JobSpec) -> list[str]:
    """Options that apply to all parts. A `%` in a path is escaped, since sbatch expands patterns such as %j."""
    logs = str(spec.run / "logs").replace("%", "%%")
    words = [f"--output={logs}/slurm-%j.log", "--open-mode=append", f"--chdir={spec.workdir}"]
    return [*words, "--requeue" if spec.site.slurm.requeue else "--no-requeue"]


def _options(spec: JobSpec, group: NodeGroup) -> list[str]:
    """Options of one part of a heterogeneous job."""
    site, limit = spec.site.slurm, spec.time_limit or spec.site.slurm.time_limit
    per_node = cpus(site, group)
    words = [f"--nodes={_node_range(spec, group)}"]
    # With tasks per node, Slurm allocates no more nodes of a range than the fewest.
    words += ["--ntasks-per-node=1"] if spec.min_nodes is None else [f"--mincpus={per_node}", "--no-kill"]
    words += [f"--cpus-per-task={per_node}"]
    words += [f"--partition={group.partition}"] if group.partition else []
    words += [f"--gres={group.gres}"] if group.gres else []
    words += [f"--account={site.account}"] if site.account else []
    words += [f"--mem={site.memory}"] if site.memory else []
    words += [f"--time={limit}"] if limit else []
    # The supervisor of an elastic run is a process of the script: while it waits for nodes there is no other one.
    receiver = "" if spec.min_nodes is None else "B:"
    words += [f"--signal={receiver}USR1@{site.warning_seconds}"] if site.warning_seconds else []
    return [*words, *site.sbatch]


def _node_range(spec: JobSpec, group: NodeGroup) -> str:
    """The nodes of a group; for an elastic run at least so many that all groups can have the fewest nodes."""
    if spec.min_nodes is None:
        return str(group.nodes)
    least = max(1, group.nodes - (sum(each.nodes for each in spec.groups) - spec.min_nodes))
    return f"{least}-{group.nodes}" if least < group.nodes else str(group.nodes)


def cpus(site: SlurmSection, group: NodeGroup) -> int:
    """CPUs per node."""
    return group.ranks * (site.cpus_per_rank or (4 if group.gres else 1))


def text(spec: JobSpec, group: int | None = None) -> str:
    """The script of the job, of one group of several jobs, or for an existing allocation."""
    job = spec.allocation
    lines = [site_environment.preamble(spec.site, spec.workdir)]
    if job is None:
        lines.append(f'[ -z "$1" ] || echo {JOB_ID} >{quote(str(spec.run / FOLDER / BEGAN))}"$1"\n')
    preparation = site_environment.preparation(spec.site.container, spec.reload_container)
    if preparation is not None:
        before = ["bash", "-c", preparation]
        lines.append(f"{_srun(spec, before, '', group, inside=False)} || exit 1\n")
    if spec.min_nodes is not None:
        requeueing = _requeueing(spec) if spec.site.slurm.requeue else ""
        return "".join([*lines, f"{LISTENING}{join(elastic_command(spec))} &\n{WAITING}", requeueing, "exit $code\n"])
    line = _srun(spec, agent_command(spec, "slurm", RANK_VARIABLES), _agent_options(spec, group), group)
    if job is not None:
        lines.append(f"{LISTENING}{line} &\n{WAITING}{FAILURE % _names(spec)}")
    elif group is not None:
        lines.append(looking_after_others(spec, line))
    else:
        lines.append(f"{line}\ncode=$?\n{FAILURE % _names(spec)}")
    word = quote(str(spec.run / FOLDER / STOPPED))
    asked = f"[ $code = 0 ] && [ -e {word}{_attempt(spec)} ]"
    lines.append(f"if {asked}; then code={Interrupted.exit_code}; fi\n")
    if spec.site.slurm.requeue and job is None:
        lines.append(_requeueing(spec))
    return "".join([*lines, "exit $code\n"])


def _requeueing(spec: JobSpec) -> str:
    return (
        f"if [ $code = {Interrupted.exit_code} ] &&\n"
        f'    [ "${{SLURM_RESTART_COUNT:-0}}" -lt {spec.site.slurm.max_restarts} ] &&\n'
        '    [ "$(squeue --noheader --jobs="$SLURM_JOB_ID" --format=%T | head -n 1)" = RUNNING ]; then\n'
        '    echo "requeueing the job"\n'
        '    scontrol requeue "$SLURM_JOB_ID" || echo "error: Slurm refuses to requeue the job; submit it again" >&2\n'
        "fi\n"
    )


def _agent_options(spec: JobSpec, group: int | None) -> str:
    options = ["--groups", written(spec.groups)]
    options += ["--group", str(group)] if group is not None else []
    options += ["--port", str(spec.site.port)] if spec.site.port else []
    return f" {join(options)} --attempt {_attempt(spec)} {join(spec.command_arguments)}"


def _attempt(spec: JobSpec) -> str:
    return ATTEMPT if spec.allocation is None else quote(f"{spec.allocation}.{spec.submitted}")


def _srun(spec: JobSpec, words: Sequence[str], tail: str, group: int | None, inside: bool = True) -> str:
    """The srun command line: the same command on every node of every group."""
    job = spec.allocation
    wanted = spec.groups if group is None else [spec.groups[group]]
    container = site_environment.pyxis_options(spec.site, spec.workdir, str(spec.run)) if inside else []
    parts = []
    for number, each in enumerate(wanted):
        suffix = f"_HET_GROUP_{number}" if len(wanted) > 1 else ""
        # An elastic job has as many nodes as there were.
        nodes = str(each.nodes) if spec.min_nodes is None else f'"$SLURM_JOB_NUM_NODES{suffix}"'
        het = f"--het-group={number} " if len(wanted) > 1 else ""
        options = ["--ntasks-per-node=1"]
        options += [f"--cpus-per-task={cpus(spec.site.slurm, each)}"]
        options += ["--kill-on-bad-exit=1"] if not number else []
        options += [f"--jobid={job}", "--overlap", f"--job-name={step_name(spec.name, spec.submitted)}"] if job else []
        parts.append(f"{het}--nodes={nodes} --ntasks={nodes} {join([*options, *container, *words])}{tail}")
    return "srun " + " \\\n    : ".join(parts)


def looking_after_others(spec: JobSpec, line: str) -> str:
    """The part of a script that runs an srun line and polls the other jobs of the run. It sets `code`."""
    names = _names(spec)
    return f"{LOOKING % names}{line} &\n{WATCHING % (names | {'failure': FAILURE % names})}"


def _names(spec: JobSpec) -> dict[str, str]:
    """The files of the launch folder and the attempt, as words of the shell."""
    return {name: quote(str(spec.run / FOLDER / each)) for name, each in NAMES.items()} | {"attempt": _attempt(spec)}


def jobs(spec: JobSpec) -> list[int | None]:
    """The jobs of a spec: one for all groups (None), or one for each group."""
    is_several = len(spec.groups) > 1 and spec.site.slurm.heterogeneous == "several-jobs" and spec.allocation is None
    if is_several and spec.min_nodes is not None:
        raise UserError(
            "--min-nodes needs one job for all nodes, but the site starts a job for each type of node",
            hint='use nodes of one type, or slurm.heterogeneous = "one-job" if the site allows it',
        )
    return list(range(len(spec.groups))) if is_several else [None]


def script_name(group: int | None) -> str:
    """The file name of the script of a job."""
    return "job.sh" if group is None else f"job-{group}.sh"


def line(spec: JobSpec, group: int | None) -> list[str]:
    """The complete sbatch command. Its last argument is the mark that identifies the job."""
    return [*sbatch(spec, group), str(spec.run / FOLDER / script_name(group)), mark(spec, group)]


def mark(spec: JobSpec, group: int | None) -> str:
    """The argument that identifies a job whose id was not recorded."""
    return spec.mark if group is None else f"{spec.mark}.{group}"


def marks(spec: JobSpec) -> list[str]:
    """The marks of all jobs of a spec."""
    return [mark(spec, group) for group in jobs(spec)]


def array_path(specs: list[JobSpec]) -> Path:
    """The path of the script of an array: in the folder of its first run."""
    return specs[0].run / FOLDER / "array.sh"


def array_line(specs: list[JobSpec]) -> list[str]:
    """The sbatch command for an array. Slurm's log of a task goes to its run folder, through the link `task-%a`."""
    folder = str(specs[0].run / FOLDER).replace("%", "%%")
    output = f"--output={folder}/task-%a/logs/slurm-%j.log"
    return [*sbatch(specs[0]), output, f"--array=0-{len(specs) - 1}", str(array_path(specs)), specs[0].mark]


def array_script(specs: list[JobSpec]) -> str:
    """The script of an array: each task runs the script of its run."""
    cases = "".join(
        f'{number}) exec bash {quote(str(spec.run / FOLDER / script_name(None)))} "$1_{number}" ;;\n'
        for number, spec in enumerate(specs)
    )
    return f'{site_environment.HEAD}case "$SLURM_ARRAY_TASK_ID" in\n{cases}esac\n'

"""What a master and its followers, which are several jobs of one run, do about each other, in words of the shell.

Where one is over, the others would wait for it up to their time limits. Where one was queued again, because Slurm took
it away or its node was lost, the others have lost ranks and are queued again too, as the parts of one job would be.
Ranks may notice a loss long before Slurm does, which waits for a silent node (SlurmdTimeout): a job whose ranks failed
only for the loss of others waits as long for what becomes of those. Each job looks after the others from its script,
because there is no squeue inside a container.
"""

from __future__ import annotations

from pathlib import Path
from shlex import quote

from steelyard.core.errors import Interrupted
from steelyard.launch.launch_record import FOLDER, JOBS
from steelyard.launch.rendezvous_file import FAILED, LOST, MET

NAMES = {"jobs": JOBS, "met": MET, "lost": LOST, "failed": FAILED}
OVER, AGAIN = 3, 4  # what the one who looks exits with
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
lookout=$!
wait "$step"
code=$?
if [ $code = 0 ] || [ ! -e %(lost)s"$attempt" ] || [ -e %(failed)s"$attempt" ]; then
    kill "$lookout" 2>/dev/null
fi
wait "$lookout"
case $? in
    {OVER}) echo "error: another job of this run is over, so this one ends too" >&2; exit 1 ;;
    {AGAIN}) echo "another job of this run is queued again, so this one is too"; code={Interrupted.exit_code} ;;
esac
"""


def looking_after_others(run: Path, line: str) -> str:
    """The part of a script that runs a line of srun's, with an eye on the other jobs of the run; `code` is its end."""
    words = {name: quote(str(run / FOLDER / each)) for name, each in NAMES.items()}
    return f"{LOOKING % words}{line} &\n{WATCHING % words}"

"""Parses the output of squeue and sacct into neutral records.

`squeue` knows a job until a few minutes after its end, `sacct` from a few seconds after its start. Both are read as
text, since the oldest Slurm in use (20.11) has no JSON output. Only fields without user-defined text are requested, so
that no name can be mistaken for a state. A mark identifies a job whose id was not recorded. It is the argument after
the script in the sbatch command, has no effect, and is part of the job's command in squeue. A job that has started
writes its id to `launch/began-MARK`, for when squeue no longer lists it.

    2f31c0a9d4b8-1      the first launch of a run folder
    2f31c0a9d4b8-2.0    the second: its master; .1 and so on are its followers
    2f31c0a9d4b8-1_4    the fourth task of an array, which has the mark of its first run
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping
from pathlib import Path

from steelyard.core.host import output_of
from steelyard.core.run import MANIFEST, Run
from steelyard.launch.backends import ENDED, WAITING, JobState, Record, slurm_nodes
from steelyard.launch.backends.slurm_script import BEGAN
from steelyard.launch.launch_record import FOLDER

JOB = re.compile(r"\d+(_\d+|\+\d+)?")
STEP = re.compile(JOB.pattern + r"\.\d+(\+\d+)?")
# Slurm's states: the neutral state, and a reason where the neutral state is less specific.
STATES = {
    "PENDING": (JobState.QUEUED, ""),
    "CONFIGURING": (JobState.QUEUED, "its nodes are being prepared"),
    "REQUEUED": (JobState.REQUEUED, ""),
    "REQUEUE_FED": (JobState.REQUEUED, ""),
    "REQUEUE_HOLD": (JobState.HELD, "held after a requeue"),
    "SPECIAL_EXIT": (JobState.HELD, "held after a special exit"),
    "RESV_DEL_HOLD": (JobState.HELD, "held: its reservation was deleted"),
    "SUSPENDED": (JobState.SUSPENDED, ""),
    "STOPPED": (JobState.SUSPENDED, ""),
    "RUNNING": (JobState.RUNNING, ""),
    "COMPLETING": (JobState.RUNNING, ""),
    "RESIZING": (JobState.RUNNING, ""),
    "SIGNALING": (JobState.RUNNING, ""),
    "STAGE_OUT": (JobState.RUNNING, ""),
    "COMPLETED": (JobState.FINISHED, ""),
    "FAILED": (JobState.FAILED, ""),
    "LAUNCH_FAILED": (JobState.FAILED, "its nodes could not launch it"),
    "CANCELLED": (JobState.CANCELLED, ""),
    "REVOKED": (JobState.CANCELLED, "another cluster started it"),
    "TIMEOUT": (JobState.TIMED_OUT, ""),
    "DEADLINE": (JobState.TIMED_OUT, "its deadline passed"),
    "OUT_OF_MEMORY": (JobState.OUT_OF_MEMORY, ""),
    "NODE_FAIL": (JobState.NODE_FAILED, ""),
    "BOOT_FAIL": (JobState.NODE_FAILED, "the node did not boot"),
    "PREEMPTED": (JobState.PREEMPTED, ""),
}
# Hints for Slurm's reasons why a job waits. Those in STUCK do not go away by waiting.
REASONS = {
    "Priority": "wait: jobs of higher priority come first",
    "Resources": "wait: it is next in the queue and starts when enough nodes are free",
    "Dependency": "wait for the job it depends on",
    "BeginTime": "wait: it has a start time, or is delayed after a requeue",
    "ReqNodeNotAvail": "check which of its nodes are down or reserved: sinfo -R; request other nodes if necessary",
    "JobHeldUser": "release it: scontrol release JOB",
    "JobHeldAdmin": "ask the administrators why it is held",
    "PartitionTimeLimit": "request less time than the partition allows: scontrol show partition",
    "PartitionNodeLimit": "request fewer nodes than the partition allows, or another partition",
    "PartitionDown": "choose another partition: sinfo",
    "PartitionInactive": "choose another partition: sinfo",
    "BadConstraints": "no node matches the request: compare gres and constraints with sinfo -o '%P %G %f'",
    "DependencyNeverSatisfied": "cancel it: the job it depends on has failed",
    "AccountNotAllowed": "choose an account that may use the partition: sacctmgr show associations",
    "InvalidAccount": "choose an account that exists: sacctmgr show associations",
    "InvalidQOS": "choose a quality of service that your account has",
}
STUCK = ("held", "hold", "partition", "badconstraints", "neversatisfied", "invalid", "notallowed", "launch failed",
         "perjob", "qosmin", "maxwall")  # fmt: skip
# Slurm's reasons for a job that can never start as submitted.
NEVER = re.compile(
    r"Partition(Time|Node)Limit|BadConstraints|DependencyNeverSatisfied|Invalid(Account|QOS)"
    r"|(Account|QOS|Association|Partition)NotAllowed|(Assoc|QOS)Max\w*PerJob"
)
# Names and widths: squeue pads or truncates each field to its width.
QUEUE_FIELDS = {
    "jobarrayid": 40, "hetjoboffset": 12, "state": 24, "restartcnt": 12, "timeused": 24, "timelimit": 24,
    "exit_code": 12, "reason": 64, "nodelist": 512, "partition": 64, "numnodes": 12,
}  # fmt: skip
ACCOUNT_FIELDS = ("JobID", "State", "ExitCode", "Elapsed", "Timelimit", "NodeList")
# Error messages of squeue for a job it no longer lists, and of sacct without accounting.
FORGOTTEN, NO_ACCOUNTS = "Invalid job id", "accounting storage is disabled"
UNKNOWN = ("None", "N/A", "(null)", "None assigned", "")
MARK_FIELDS = {"jobarrayid": 40, "command": 8192}
MARK_COMMAND = [
    "squeue", "--noheader", "--array", "--states=all", "--me",
    "--Format=" + ",".join(f"{name}:{width}" for name, width in MARK_FIELDS.items()),
]  # fmt: skip


def translate(record: Record) -> Record:
    """Translate a record with Slurm's state (`CANCELLED by 1000`, `FAILED+`); a waiting job gets a hint."""
    word, _, behind = str(record["state"]).strip().partition(" ")
    state, note = STATES.get(word.rstrip("+").upper(), (JobState.UNKNOWN, word.lower()))
    reason = str(record.get("reason") or behind or note).strip("()")
    translated = record | {"state": state, "reason": "" if reason in UNKNOWN else reason}
    if state not in WAITING:
        return translated
    is_held = state is JobState.HELD or any(sign in reason.lower() for sign in STUCK)
    translated |= {"state": JobState.HELD if is_held else state, "hint": _hint(reason, str(record.get("job")), is_held)}
    return translated | ({"never": True} if NEVER.search(reason) else {})


def _hint(reason: str, job: str, is_held: bool) -> str:
    """The hint for a waiting job."""
    known = next((advice for word, advice in REASONS.items() if reason.startswith(word)), None)
    if known is not None:
        return known
    if is_held:
        is_limit = any(sign in reason.lower() for sign in ("perjob", "qosmin", "maxwall"))
        limits = "request no more than the limits of this account: sacctmgr show qos, associations"
        return limits if is_limit else f"find out why it is held, then release it: scontrol release {job}"
    is_limit = "QOS" in reason or reason.startswith(("Assoc", "MaxJobs"))
    return "wait for your other jobs: the account has reached a limit" if is_limit else "wait"


def poll(run: Path, jobs: list[str], last: Mapping[str, Record]) -> list[Record]:
    """Records from squeue, or from sacct for jobs that squeue no longer lists; without sacct, the run's own state."""
    found: list[Record] = []
    for job in jobs:
        queue, queue_error = _ask(_queue_command(job))
        records = queued(queue)
        if not records:
            account, account_error = _ask(_account_command(job))
            records = accounted(account)
            if FORGOTTEN in queue_error and NO_ACCOUNTS in account_error:
                records = [_forgotten(run, each) for each in last.values() if owns(job, str(each["job"]))]
        found += [slurm_nodes.with_missing_nodes(each) for each in records]
    return found


def _ask(command: list[str]) -> tuple[str, str]:
    """The standard output of a program, or its standard error if it failed."""
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.SubprocessError):
        return "", ""
    return (answer.stdout, "") if answer.returncode == 0 else ("", answer.stderr)


def owns(job: str, named: str) -> bool:
    """Whether an id belongs to this job, or to a part (`123+1`) or task (`123_4`) of it."""
    return named == job or re.split(r"[+_]", named)[0] == job


def _forgotten(run: Path, before: Record) -> Record:
    if before["state"] in ENDED:
        return before
    is_finished = (run / MANIFEST).is_file() and Run(run).state == "finished"
    reason = "Slurm no longer lists the job and has no accounting: this is the state of the run itself"
    return before | {"state": JobState.FINISHED if is_finished else JobState.FAILED, "reason": reason}


def _queue_command(job: str) -> list[str]:
    fields = ",".join(f"{name}:{width}" for name, width in QUEUE_FIELDS.items())
    return ["squeue", "--noheader", "--array", "--states=all", f"--jobs={job}", f"--Format={fields}"]


def _account_command(job: str) -> list[str]:
    fields = ",".join(ACCOUNT_FIELDS)
    return [
        "sacct",
        "--noheader",
        "--parsable2",
        "--allocations",
        "--duplicates",
        f"--jobs={job}",
        f"--format={fields}",
    ]


def queued(text: str) -> list[Record]:
    """Records from squeue's columns."""
    found = []
    for line in text.splitlines():
        fields, at = {}, 0
        for name, width in QUEUE_FIELDS.items():
            fields[name] = line[at : at + width].strip()
            at += width
        if not JOB.fullmatch(fields["jobarrayid"]):
            continue
        offset = fields["hetjoboffset"]
        is_part = offset.isdigit() and not set("_+") & set(fields["jobarrayid"])  # Newer versions print 123+1.
        found.append((fields["jobarrayid"], int(offset) if is_part else None, _from_queue(fields)))
    return _numbered(found)


def _numbered(found: list[tuple[str, int | None, Record]]) -> list[Record]:
    """Parts of a heterogeneous job are numbered after the leader's id: 123+0, 123+1."""
    leader = next((job for job, offset, _ in found if offset == 0), None)
    return [
        translate({"job": job if offset is None or leader is None else f"{leader}+{offset}"} | fields)
        for job, offset, fields in found
    ]


def _from_queue(fields: dict[str, str]) -> Record:
    state = STATES.get(fields["state"], (JobState.UNKNOWN, ""))[0]
    return {
        "state": fields["state"],
        "reason": "" if fields["reason"] in UNKNOWN else fields["reason"],
        "nodes": "" if fields["nodelist"] in UNKNOWN else fields["nodelist"],
        "exit_code": _exit_code(fields["exit_code"]) if state in ENDED else None,
        "elapsed": seconds(fields["timeused"]),
        "time_limit": seconds(fields["timelimit"]),
        "restarts": int(fields["restartcnt"]) if fields["restartcnt"].isdigit() else 0,
        "partition": fields["partition"],
        "needed": int(fields["numnodes"]) if fields["numnodes"].isdigit() else 0,
    }


def accounted(text: str) -> list[Record]:
    """Records from sacct. A requeued job has one line per start, and the last one counts."""
    newest: dict[str, Record] = {}
    for line in text.splitlines():
        fields = line.split("|")
        if len(fields) != len(ACCOUNT_FIELDS) or not JOB.fullmatch(fields[0]):
            continue
        job, words, code, elapsed, limit, nodes = fields
        before = newest.get(job)
        record = {
            "job": job,
            "state": words,  # "CANCELLED by 1000"
            "reason": "",
            "nodes": "" if nodes in UNKNOWN else nodes,
            "exit_code": _exit_code(code),
            "elapsed": seconds(elapsed),
            "time_limit": seconds(limit),
            "restarts": 0 if before is None else int(before["restarts"]) + 1,
        }
        newest[job] = translate(record)
        if newest[job]["state"] not in ENDED:
            newest[job]["exit_code"] = None
    return list(newest.values())


def _exit_code(text: str) -> int | None:
    """sacct's `1:0` is exit code 1, `0:9` is signal 9, returned as 128 + 9. squeue prints the status of wait()."""
    parts = re.fullmatch(r"(\d+)(?::(\d+))?", text.strip())
    if parts is None:
        return None
    first = int(parts[1])
    code, number = (first >> 8, first & 0x7F) if parts[2] is None else (first, int(parts[2]))
    return 128 + number if number and not code else code


def seconds(text: str) -> int | None:
    """Slurm's durations: `1-02:03:04`, `02:03:04`, `3:04`; None for UNLIMITED and unset values."""
    parts = re.fullmatch(r"(?:(\d+)-)?(?:(\d+):)?(\d+):(\d+)(?:\.\d+)?", text.strip())
    if parts is None:
        return None
    days, hours, minutes, rest = (int(part or 0) for part in parts.groups())
    return ((days * 24 + hours) * 60 + minutes) * 60 + rest


def find(run: Path, marks: list[str]) -> list[str | None]:
    """The jobs with these marks, from the files that started jobs wrote, or from squeue."""
    queue = marked(output_of(MARK_COMMAND) or "")
    return [_began(run, mark) or _in_queue(queue, mark) for mark in marks]


def marked(text: str) -> dict[str, str]:
    """The newest job for each last argument of a command, from squeue's columns. Parts and tasks map to their job."""
    found: dict[str, str] = {}
    for line in text.splitlines():
        job = re.split(r"[_+]", line[: MARK_FIELDS["jobarrayid"]].strip())[0]
        words = line[MARK_FIELDS["jobarrayid"] :].split()
        if words and JOB.fullmatch(job) and int(job) > int(found.get(words[-1], "0")):
            found[words[-1]] = job
    return found


def _in_queue(queue: dict[str, str], mark: str) -> str | None:
    word, _, task = mark.partition("_")
    job = queue.get(word)
    return f"{job}_{task}" if job and task else job


def _began(run: Path, mark: str) -> str | None:
    try:
        number = (run / FOLDER / f"{BEGAN}{mark}").read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return None
    return number if JOB.fullmatch(number) else None

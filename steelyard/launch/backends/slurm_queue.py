"""What Slurm says of jobs, as neutral records.

`squeue` knows a job until a few minutes after its end, `sacct` from a few seconds after its start; both are read as
text, since their JSON is younger than the oldest Slurm in use (20.11). Only fields without text of the user's are asked
for, so that no name can pass for a state. A mark, by which a job is found whose id nobody wrote down, is the argument
behind the script on sbatch's line, which changes nothing and which squeue shows as part of the job's command; a job
that has begun leaves its id in `launch/began-MARK`, for when squeue has forgotten it.

    2f31c0a9d4b8-1      the first launch of a run folder
    2f31c0a9d4b8-2.0    the second: its master, and behind .1 and so on its followers
    2f31c0a9d4b8-1_4    the fourth task of an array, which has the mark of its first run
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping
from pathlib import Path

from steelyard.core.run import MANIFEST, Run
from steelyard.launch.backends import ENDED, WAITING, JobState, Record
from steelyard.launch.backends.slurm_script import BEGAN
from steelyard.launch.launch_record import FOLDER

JOB = re.compile(r"\d+(_\d+|\+\d+)?")
STEP = re.compile(JOB.pattern + r"\.\d+(\+\d+)?")
SECONDS_TO_ANSWER = 30
# Slurm's states, and what is lost of them in a neutral one.
STATES = {
    "PENDING": (JobState.QUEUED, ""),
    "CONFIGURING": (JobState.QUEUED, "its nodes are prepared"),
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
    "REVOKED": (JobState.CANCELLED, "another cluster took it"),
    "TIMEOUT": (JobState.TIMED_OUT, ""),
    "DEADLINE": (JobState.TIMED_OUT, "its deadline"),
    "OUT_OF_MEMORY": (JobState.OUT_OF_MEMORY, ""),
    "NODE_FAIL": (JobState.NODE_FAILED, ""),
    "BOOT_FAIL": (JobState.NODE_FAILED, "the node did not boot"),
    "PREEMPTED": (JobState.PREEMPTED, ""),
}
# Why Slurm lets a job wait: what helps. Those in STUCK do not go away by waiting.
REASONS = {
    "Priority": "wait: jobs of higher priority come first",
    "Resources": "wait: it is next, and starts when enough nodes are free",
    "Dependency": "wait for the job it depends on",
    "BeginTime": "wait: it was told not to begin before a time, or is held back after a requeue",
    "ReqNodeNotAvail": "see which of its nodes are down or reserved: sinfo -R; ask for others if need be",
    "JobHeldUser": "release it: scontrol release JOB",
    "JobHeldAdmin": "ask the administrators why it is held",
    "PartitionTimeLimit": "ask for less time than the partition allows: scontrol show partition",
    "PartitionNodeLimit": "ask for fewer nodes than the partition allows, or another partition",
    "PartitionDown": "choose another partition: sinfo",
    "PartitionInactive": "choose another partition: sinfo",
    "BadConstraints": "no node has what is asked for: compare gres and constraints with sinfo -o '%P %G %f'",
    "DependencyNeverSatisfied": "cancel it: the job it depends on has failed",
    "AccountNotAllowed": "choose an account that may use the partition: sacctmgr show associations",
    "InvalidAccount": "choose an account that exists: sacctmgr show associations",
    "InvalidQOS": "choose a quality of service that your account has",
}
STUCK = ("held", "hold", "partition", "badconstraints", "neversatisfied", "invalid", "notallowed", "launch failed",
         "perjob", "qosmin", "maxwall")  # fmt: skip
# Why Slurm leaves a job waiting that can never start as it is.
NEVER = re.compile(
    r"Partition(Time|Node)Limit|BadConstraints|DependencyNeverSatisfied|Invalid(Account|QOS)"
    r"|(Account|QOS|Association|Partition)NotAllowed|(Assoc|QOS)Max\w*PerJob"
)
# Names and widths: squeue pads each field, and cuts it there.
QUEUE_FIELDS = {
    "jobarrayid": 40, "hetjoboffset": 12, "state": 24, "restartcnt": 12, "timeused": 24, "timelimit": 24,
    "exit_code": 12, "reason": 64, "nodelist": 512,
}  # fmt: skip
ACCOUNT_FIELDS = ("JobID", "State", "ExitCode", "Elapsed", "Timelimit", "NodeList")
# How squeue answers for a job it has forgotten, and sacct where nobody keeps accounts.
FORGOTTEN, NO_ACCOUNTS = "Invalid job id", "accounting storage is disabled"
UNKNOWN = ("None", "N/A", "(null)", "None assigned", "")
MARK_FIELDS = {"jobarrayid": 40, "command": 8192}
MARK_COMMAND = [
    "squeue", "--noheader", "--array", "--states=all", "--me",
    "--Format=" + ",".join(f"{name}:{width}" for name, width in MARK_FIELDS.items()),
]  # fmt: skip


def translate(record: Record) -> Record:
    """A record with Slurm's state (`CANCELLED by 1000`, `FAILED+`) as a neutral one; a job that waits gets a hint."""
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
    """What helps a job that waits."""
    known = next((advice for word, advice in REASONS.items() if reason.startswith(word)), None)
    if known is not None:
        return known
    if is_held:
        is_limit = any(sign in reason.lower() for sign in ("perjob", "qosmin", "maxwall"))
        limits = "ask for what a job of this account may have: sacctmgr show qos, associations"
        return limits if is_limit else f"see why it is held, then release it: scontrol release {job}"
    is_limit = "QOS" in reason or reason.startswith(("Assoc", "MaxJobs"))
    return "wait for your other jobs: a limit of the account is reached" if is_limit else "wait"


def poll(run: Path, jobs: list[str], last: Mapping[str, Record]) -> list[Record]:
    """What squeue says, and sacct of jobs that squeue has forgotten; without sacct, how the run itself ended."""
    found: list[Record] = []
    for job in jobs:
        queue, silence = ask(_queue_command(job))
        records = queued(queue)
        if not records:
            account, refusal = ask(_account_command(job))
            records = accounted(account)
            if FORGOTTEN in silence and NO_ACCOUNTS in refusal:
                records = [_forgotten(run, each) for each in last.values() if owns(job, str(each["job"]))]
        found += records
    return found


def owns(job: str, named: str) -> bool:
    """Whether an id is this job's, or that of a part (`123+1`) or task (`123_4`) of it."""
    return named == job or re.split(r"[+_]", named)[0] == job


def _forgotten(run: Path, before: Record) -> Record:
    if before["state"] in ENDED:
        return before
    is_finished = (run / MANIFEST).is_file() and Run(run).state == "finished"
    reason = "Slurm has forgotten the job and keeps no accounts: this is how the run ended"
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
        is_part = offset.isdigit() and not set("_+") & set(fields["jobarrayid"])  # Newer ones say 123+1 by themselves.
        found.append((fields["jobarrayid"], int(offset) if is_part else None, _from_queue(fields)))
    return _numbered(found)


def _numbered(found: list[tuple[str, int | None, Record]]) -> list[Record]:
    """Parts of a heterogeneous job are told apart by the leader's number: 123+0, 123+1."""
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
    }


def accounted(text: str) -> list[Record]:
    """Records from sacct; a job that was requeued has a line for each time it ran, and the last one counts."""
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
    """sacct's `1:0` is exit code 1 and `0:9` signal 9, told as a shell would; squeue prints what wait() returned."""
    parts = re.fullmatch(r"(\d+)(?::(\d+))?", text.strip())
    if parts is None:
        return None
    first = int(parts[1])
    code, number = (first >> 8, first & 0x7F) if parts[2] is None else (first, int(parts[2]))
    return 128 + number if number and not code else code


def seconds(text: str) -> int | None:
    """Slurm's durations: `1-02:03:04`, `02:03:04`, `3:04`; UNLIMITED and what is not set are None."""
    parts = re.fullmatch(r"(?:(\d+)-)?(?:(\d+):)?(\d+):(\d+)(?:\.\d+)?", text.strip())
    if parts is None:
        return None
    days, hours, minutes, rest = (int(part or 0) for part in parts.groups())
    return ((days * 24 + hours) * 60 + minutes) * 60 + rest


def find(run: Path, marks: list[str]) -> list[str | None]:
    """The jobs with these marks: by what they left when they began, or by squeue."""
    queue = marked(ask(MARK_COMMAND)[0])
    return [_began(run, mark) or _in_queue(queue, mark) for mark in marks]


def marked(text: str) -> dict[str, str]:
    """The newest job for each last word of a command, from squeue's columns; parts and tasks are their job."""
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


def ask(command: list[str]) -> tuple[str, str]:
    """What a program answers, and its error message; an answer with an error counts for nothing."""
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS_TO_ANSWER)
    except (OSError, subprocess.SubprocessError):
        return "", ""
    return (answer.stdout, "") if answer.returncode == 0 else ("", answer.stderr)

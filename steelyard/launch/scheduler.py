"""What the scheduler says about a run, kept in `scheduler.jsonl`: one object for each change.

    {"time": ISO, "job": "123", "state": "RUNNING", "reason": "", "nodes": "a[1-2]", "exit_code": null,
     "elapsed": 12, "time_limit": 3600, "restarts": 0}

States are Slurm's words for every backend. `squeue` knows a job until a few minutes after its end, `sacct` from a few
seconds after its start; both are read as text, since their JSON is younger than the oldest Slurm in use (20.11). Only
fields without text of the user's are asked for, so that no name can pass for a state.
"""

from __future__ import annotations

import json
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

from steelyard.core.run import MANIFEST, Run, now
from steelyard.core.safe_parse import loads
from steelyard.launch import launch_record, supervisor
from steelyard.launch.job_tags import launched
from steelyard.launch.launch_record import Launch
from steelyard.launch.slurm_cli import ask

RECORDS = "scheduler.jsonl"
LIVE = (
    "PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "SUSPENDED", "REQUEUED", "REQUEUE_HOLD", "RESIZING",
    "SIGNALING", "STAGE_OUT", "STOPPED", "SPECIAL_EXIT", "REQUEUE_FED", "RESV_DEL_HOLD",
)  # fmt: skip
# Names and widths: squeue pads each field, and cuts it there.
QUEUE_FIELDS = {
    "jobarrayid": 40, "hetjoboffset": 12, "state": 24, "restartcnt": 12, "timeused": 24, "timelimit": 24,
    "exit_code": 12, "reason": 64, "nodelist": 512,
}  # fmt: skip
ACCOUNT_FIELDS = ("JobID", "State", "ExitCode", "Elapsed", "Timelimit", "NodeList")
# How squeue answers for a job it has forgotten, and sacct where nobody keeps accounts.
FORGOTTEN, NO_ACCOUNTS = "Invalid job id", "accounting storage is disabled"
UNKNOWN = ("None", "N/A", "(null)", "None assigned", "")

Record = dict[str, Any]


def refresh(run: Path) -> list[Record]:
    """Ask the backend, append what has changed, and return all records. A backend that is silent changes nothing.

    Whoever may only read the folder is answered all the same; somebody who may write notes the change then.
    """
    launch = launched(run)
    records = read(run)
    if launch is None:
        return records
    last = {each["job"]: each for each in records}
    asked = now()  # On a busy machine an answer takes seconds, and what it says of elapsed time is older than its end.
    found = _slurm(run, launch.jobs, last) if launch.process is None else [_supervised(run, launch)]
    changed = [each for each in found if _differs(last.get(each["job"]), each)]
    if changed:
        stamped = [each | {"time": asked} for each in changed]
        with suppress(OSError), open(run / RECORDS, "a", encoding="utf-8") as file:
            file.write("".join(json.dumps(each) + "\n" for each in stamped))
        records += stamped
    return records


def read(run: Path) -> list[Record]:
    """All records so far; a torn line is none."""
    try:
        lines = (run / RECORDS).read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        try:
            each = loads(line)
        except ValueError:
            continue
        if isinstance(each, dict) and {"job", "state"} <= each.keys():
            found.append(each)
    return found


def current(records: list[Record], jobs: list[str]) -> list[Record]:
    """The newest record of each of a launch's jobs; parts of a heterogeneous job (123+1) are jobs of their own."""
    newest = {each["job"]: each for each in records if each["job"].partition("+")[0] in jobs or each["job"] in jobs}
    return list(newest.values())


def state(records: list[Record], jobs: list[str]) -> str | None:
    """One word for all jobs of a launch: the first bad end, else what still goes on, else COMPLETED."""
    states = [str(each["state"]) for each in current(records, jobs)]
    bad = [each for each in states if each not in LIVE and each != "COMPLETED"]
    live = [each for each in states if each in LIVE]
    return next(iter([*bad, *live, *states]), None)


def is_over(run: Path) -> bool:
    """Whether nothing more will come: the launch ended, or nobody launched the run and nobody writes to it."""
    launch = launched(run)
    if launch is None:
        return not (run / MANIFEST).is_file() or Run(run).state not in ("running", "created")
    word = state(refresh(run), launch.jobs)
    return word is not None and word not in LIVE


def _differs(before: Record | None, after: Record) -> bool:
    """Whether anything changed but the time that goes by."""
    steady = ("state", "reason", "nodes", "exit_code", "time_limit", "restarts")
    return before is None or any(before.get(key) != after.get(key) for key in steady)


def _supervised(run: Path, launch: Launch) -> Record:
    """The state of a supervisor on this machine, or of one elsewhere as far as it has said it."""
    job, ended = launch.jobs[0] if launch.jobs else "0", supervisor.ended(run)
    base = {
        "job": job,
        "reason": "",
        "nodes": "",
        "exit_code": None,
        "elapsed": None,
        "time_limit": None,
        "restarts": 0,
    }
    where = launch.process or {}
    base["nodes"] = str(where.get("host", ""))
    if ended is not None:
        return base | {"state": ended["state"], "exit_code": ended["exit_code"], "elapsed": ended["elapsed"]}
    alive = supervisor.is_alive(where)
    if alive is None:
        return base | {"state": "RUNNING", "reason": f"supervised on {where.get('host')}, which is not this machine"}
    if alive:
        return base | {"state": "RUNNING"}
    return base | {"state": "FAILED", "reason": "its supervisor was killed, or the machine went down"}


def _slurm(run: Path, jobs: list[str], last: dict[str, Record]) -> list[Record]:
    """What squeue says, and sacct of jobs that squeue has forgotten; without sacct, how the run itself ended."""
    found: list[Record] = []
    for job in jobs:
        queue, silence = ask(_queue_command(job))
        records = queued(queue)
        if not records:
            account, refusal = ask(_account_command(job))
            records = accounted(account)
            if FORGOTTEN in silence and NO_ACCOUNTS in refusal:
                records = [_forgotten(run, each) for each in current(list(last.values()), [job])]
        found += records
    return found


def _forgotten(run: Path, before: Record) -> Record:
    if before["state"] not in LIVE:
        return before
    is_finished = (run / MANIFEST).is_file() and Run(run).state == "finished"
    reason = "Slurm has forgotten the job and keeps no accounts: this is how the run ended"
    return before | {"state": "COMPLETED" if is_finished else "FAILED", "reason": reason}


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
        if not launch_record.JOB.fullmatch(fields["jobarrayid"]):
            continue
        offset = fields["hetjoboffset"]
        is_part = offset.isdigit() and not set("_+") & set(fields["jobarrayid"])  # Newer ones say 123+1 by themselves.
        found.append((fields["jobarrayid"], int(offset) if is_part else None, _from_queue(fields)))
    return _numbered(found)


def _numbered(found: list[tuple[str, int | None, Record]]) -> list[Record]:
    """Parts of a heterogeneous job are told apart by the leader's number: 123+0, 123+1."""
    leader = next((job for job, offset, _ in found if offset == 0), None)
    return [
        {"job": job if offset is None or leader is None else f"{leader}+{offset}"} | fields
        for job, offset, fields in found
    ]


def _from_queue(fields: dict[str, str]) -> Record:
    code = fields["exit_code"]
    is_over = fields["state"] not in LIVE
    return {
        "state": fields["state"],
        "reason": "" if fields["reason"] in UNKNOWN else fields["reason"],
        "nodes": "" if fields["nodelist"] in UNKNOWN else fields["nodelist"],
        "exit_code": _exit_code(code) if is_over else None,
        "elapsed": seconds(fields["timeused"]),
        "time_limit": seconds(fields["timelimit"]),
        "restarts": int(fields["restartcnt"]) if fields["restartcnt"].isdigit() else 0,
    }


def accounted(text: str) -> list[Record]:
    """Records from sacct; a job that was requeued has a line for each time it ran, and the last one counts."""
    newest: dict[str, Record] = {}
    for line in text.splitlines():
        fields = line.split("|")
        if len(fields) != len(ACCOUNT_FIELDS) or not launch_record.JOB.fullmatch(fields[0]):
            continue
        job, words, code, elapsed, limit, nodes = fields
        before = newest.get(job)
        newest[job] = {
            "job": job,
            "state": words.split()[0],  # "CANCELLED by 1000"
            "reason": words.partition(" ")[2],
            "nodes": "" if nodes in UNKNOWN else nodes,
            "exit_code": None if words.split()[0] in LIVE else _exit_code(code),
            "elapsed": seconds(elapsed),
            "time_limit": seconds(limit),
            "restarts": 0 if before is None else int(before["restarts"]) + 1,
        }
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

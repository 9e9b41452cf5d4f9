"""The process that runs on each node of a job: starts ranks, writes logs, samples devices, forwards signals.

    python -m steelyard.launch.node_agent --backend slurm --run RUN --groups 1x4,7x8 --attempt 123.0 -- python ...

`--groups 1x4,7x8` means one node with four ranks and then seven nodes with eight, in rank order. The agent is started
once per node, and the backend says which node this is. With `--one-rank` it is started once per rank by a launcher that
numbers the ranks itself. Under torchrun it leaves the rank's exit status for the process that runs torchrun
(`torchrun.py`). The node of rank 0 publishes its address in `launch/rendezvous.json` of the run folder, which all nodes
share. `--attempt` keeps a requeued job from using the file of its previous attempt.

In an elastic run, `--hosts a1,b1` names the nodes of the attempt in rank order, so there is no rendezvous of nodes. The
supervisor (`elastic.py`) gets the exit of each node, and ends the others, through files (`node_end.py`).
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from steelyard.core import secrets
from steelyard.core.console import LOGGED, console
from steelyard.core.errors import Interrupted, SteelyardError
from steelyard.core.host import die_with_parent
from steelyard.launch import backends, node_end, rendezvous_file, site_environment, torchrun_ipc
from steelyard.launch.backends import Place
from steelyard.launch.error_file import ERROR_FILE
from steelyard.launch.gpu_monitor import Sampler
from steelyard.launch.heartbeat import Heartbeat
from steelyard.launch.log_capture import LogFile, PipeReader
from steelyard.launch.node_end import NodeEnd
from steelyard.launch.root_cause import RankExit, find_root_cause, is_own_failure, only_noticed
from steelyard.launch.spawn import SAME_REQUEST_SECONDS, Rank, rank_environment, signals, watch
from steelyard.launch.verdict_watch import notifying
from steelyard.parallel.rendezvous import RDZV_ID


@dataclass(frozen=True)
class NodeRanks:
    """The ranks of this node: the first rank, their number, and the world size."""

    first: int
    count: int
    world: int

    @classmethod
    def of(cls, groups: str, node: int) -> NodeRanks:
        """The ranks of the node with this index."""
        pairs = [tuple(map(int, group.split("x"))) for group in groups.split(",")]
        counts = [ranks for nodes, ranks in pairs for _ in range(nodes)]
        return cls(sum(counts[:node]), counts[node], sum(counts))


class LoggedRank(Rank):
    """A rank whose output goes to the log files of the host."""

    streams: list[PipeReader]

    def __init__(
        self,
        command: Sequence[str],
        rank: int,
        environment: dict[str, str],
        folder: Path,
        logs: tuple[LogFile, LogFile],
    ) -> None:
        self._logs = logs
        super().__init__(command, rank, environment, folder, keep_output=False)

    def _started(self, command: Sequence[str], environment: dict[str, str], output: Any) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            command,
            env=environment | {ERROR_FILE: str(self.error_file), LOGGED: "1", "PYTHONUNBUFFERED": "1"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
            preexec_fn=die_with_parent(),
        )
        assert process.stdout is not None
        assert process.stderr is not None
        self.streams = [PipeReader(process.stdout, self._logs[0]), PipeReader(process.stderr, self._logs[1])]
        return process


def main(arguments: Sequence[str]) -> int:
    """Start this node's ranks and return their exit code."""
    options = _options(arguments)
    same = site_environment.hold(SAME_REQUEST_SECONDS)
    if torchrun_ipc.is_under_torchrun():
        torchrun_ipc.end_with_torchrun()
    elif options.one_rank:
        torchrun_ipc.end_with_parent()
    run, host, place = Path(options.run), options.name or socket.gethostname(), _place(options)
    logs = (LogFile(run / "logs" / f"{host}.out"), LogFile(run / "logs" / f"{host}.err"))
    try:
        with ExitStack() as stack:
            stop_signals, failed = torchrun_ipc.requests(stack.enter_context(signals(same)), stack)
            folder = Path(stack.enter_context(TemporaryDirectory(prefix="steelyard-")))
            environments = _one_rank(place) if options.one_rank else _ranks(options, run, place, stop_signals, stack)
            if not environments:  # A stop signal arrived during the rendezvous.
                return Interrupted.exit_code
            ranks = []
            for rank, environment in environments:
                ranks.append(LoggedRank(options.command, rank, environment, folder, logs))
                stack.callback(ranks[-1].kill)
            if not options.one_rank or place.local_rank == 0:
                own = [rank.process.pid for rank in ranks]
                stack.enter_context(Sampler(run, _local_ranks if options.one_rank else lambda: own, host))
                beat = stack.enter_context(Heartbeat(run, _node(options, place) or host))
            if ranks[0].rank == 0:
                stack.enter_context(notifying(run))
            is_over = _requests(options, run, stop_signals, beat) if options.hosts else None
            hung = watch(list(ranks), stop_signals, failed, is_over)
            code = _end(options, run, ranks, hung, bool(stop_signals), logs[1])
            # The supervisor answers each end that it can read, unless it is lost too.
            has_end = bool(options.hosts) and node_end.read(run, options.attempt, _node(options, place) or "")
            while is_over is not None and has_end and not is_over():
                time.sleep(node_end.SECONDS_BETWEEN_LOOKS)
            return code
    except SteelyardError as error:
        console.error(str(error))
        logs[1].add(f"error: {error}")
        if node := _node(options, place):
            node_end.write(run, options.attempt, node, NodeEnd(error.exit_code))
        return error.exit_code


def _end(
    options: argparse.Namespace, run: Path, ranks: list[LoggedRank], hung: list[int], was_asked: bool, log: LogFile
) -> int:
    """Report how the ranks ended, or leave that to the process that runs torchrun. Returns the exit code."""
    for rank in ranks:
        rank.kill()
        for stream in rank.streams:
            stream.finish()
    ends = [rank.ended() for rank in ranks]
    last = {rank.rank: list(rank.streams[1].last) for rank in ranks}
    if torchrun_ipc.is_under_torchrun():
        return torchrun_ipc.leave(ends[0], bool(hung), last[ends[0].rank])
    code = report(ends, last, hung, was_asked, log)
    if node := _node(options, _place(options)):
        # Ranks that wait for one that failed on its own do not respond either.
        failed_alone = any(is_own_failure(end) for end in ends if end.rank not in hung)
        end = NodeEnd(code, only_noticed(ends), () if failed_alone else hung)
        node_end.write(run, options.attempt, node, end)
        return code
    if options.attempt and code not in (0, Interrupted.exit_code):
        rendezvous_file.failed(run, options.attempt, only_noticed(ends))
    agreed = all(end.words is not None and end.words.agreed for end in ends)
    if code == Interrupted.exit_code and agreed and options.attempt:
        return rendezvous_file.stopped(run, options.attempt)
    return code  # Also for ranks that were stopped before the rendezvous: the other nodes must not wait for them.


def _place(options: argparse.Namespace) -> Place:
    return backends.load(options.backend).place(os.environ)


def _node(options: argparse.Namespace, place: Place) -> str | None:
    """The name of this node among `--hosts`; None in a run that is not elastic."""
    return (options.name or place.address or socket.gethostname()) if options.hosts else None


def _requests(options: argparse.Namespace, run: Path, stop_signals: list[int], beat: Heartbeat) -> Callable[[], bool]:
    """Whether the supervisor of an elastic run wants the ranks to end, or is gone."""
    requests = node_end.Requests(run, options.attempt, stop_signals, beat.path)

    def is_over() -> bool:
        is_over = requests.is_over()
        if requests.is_orphan:
            console.error("the supervisor of this run does not answer, so its ranks end")
            backends.load(options.backend).lost_supervisor(os.environ)
        return is_over

    return is_over


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m steelyard.launch.node_agent", description=__doc__)
    parser.add_argument("--backend", default="local", help="which backend started this process")
    parser.add_argument("--run", required=True)
    parser.add_argument("--groups", default="1x1")
    parser.add_argument("--attempt", default="")
    parser.add_argument("--group", type=int, help="index of this job's group, if each group is a separate job")
    parser.add_argument("--port", type=int)
    parser.add_argument("--hosts", default="", help="the nodes of this attempt of an elastic run, in rank order")
    parser.add_argument("--name", help="the name of this node, if it is not that of the host")
    parser.add_argument("--one-rank", action="store_true")
    parser.add_argument("--command-file", type=Path, help="JSON file with the command, if it contains a secret")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    options = parser.parse_args(arguments)
    if options.command_file is not None:
        options.command = json.loads(options.command_file.read_text(encoding="utf-8"))
    options.command = options.command[1:] if options.command[:1] == ["--"] else options.command
    return options


def _one_rank(place: Place) -> list[tuple[int, dict[str, str]]]:
    """The environment of the rank. The backend has set its rank and the rendezvous address."""
    return [(place.rank, {name: value for name, value in os.environ.items() if name != torchrun_ipc.FOLDER})]


def _ranks(
    options: argparse.Namespace, run: Path, own: Place, stop_signals: list[int], stack: ExitStack
) -> list[tuple[int, dict[str, str]]]:
    """The environment of each rank of this node, after the rendezvous; empty if a stop signal came first."""
    if options.hosts:
        return _elastic_ranks(options, run, own)
    node = own.node
    if options.group is not None:  # Nodes of earlier groups are in other jobs.
        node += sum(int(group.partition("x")[0]) for group in options.groups.split(",")[: options.group])
    place = NodeRanks.of(options.groups, node)
    if place.count == place.world:
        found: tuple[str, str] | None = "127.0.0.1", options.attempt or f"process {os.getpid()}"
    else:
        followers = len(options.groups.split(",")) - 1 if options.group is not None else 0
        found = rendezvous_file.join(run, options.attempt, node, options.group, followers, stop_signals, stack, own)
    if found is None:
        return []
    where = {"MASTER_ADDR": found[0], RDZV_ID: f"{run} {found[1]}"}
    where |= {"MASTER_PORT": str(options.port)} if options.port else {}
    return [(rank, _environment(place, rank, where)) for rank in range(place.first, place.first + place.count)]


def _elastic_ranks(options: argparse.Namespace, run: Path, own: Place) -> list[tuple[int, dict[str, str]]]:
    """The environment of each rank of a node of an elastic run. On one machine, all nodes share its devices."""
    hosts, is_remote = options.hosts.split(","), backends.load(options.backend).is_remote
    place = NodeRanks.of(options.groups, hosts.index(_node(options, own)))
    is_one_host = place.count == place.world or not is_remote
    where = {"MASTER_ADDR": "127.0.0.1" if is_one_host else hosts[0], RDZV_ID: f"{run} {options.attempt}"}
    where |= {"MASTER_PORT": str(options.port)} if options.port else {}
    machine = place if is_remote else NodeRanks(0, place.world, place.world)
    return [(rank, _environment(machine, rank, where)) for rank in range(place.first, place.first + place.count)]


def _local_ranks() -> list[int]:
    """The ranks of this host if each has its own node agent: the children of this process and of its siblings."""
    parents = _parents()
    agents = {pid for pid, parent in parents.items() if parent == os.getppid()}
    return sorted(pid for pid, parent in parents.items() if parent in agents)


def _parents() -> dict[int, int]:
    """The parent of every process."""
    found = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
            found[int(path.parent.name)] = int(fields[1])
        except (OSError, ValueError, IndexError):  # The process has just exited.
            continue
    return found


def _environment(place: NodeRanks, rank: int, where: dict[str, str]) -> dict[str, str]:
    """What torchrun would set, but MASTER_PORT only if `--port` is given."""
    return rank_environment(place.count, where | {
        "RANK": str(rank), "WORLD_SIZE": str(place.world),
        "LOCAL_RANK": str(rank - place.first), "LOCAL_WORLD_SIZE": str(place.count),
    })  # fmt: skip


def report(ends: list[RankExit], last: dict[int, list[str]], hung: list[int], was_asked: bool, log: LogFile) -> int:
    """Report why the ranks of this node ended, also in the host's log. An error of all nodes is reported by the first.

    `last` has the last lines of each rank.
    """
    cause = find_root_cause(ends, hung, was_asked)
    if cause is None:
        return 0
    end = next((each for each in ends if each.rank == cause.rank), ends[0])
    is_on_other_nodes = end.words is not None and end.words.shared and ends[0].rank > 0
    only_noticed = end.code != 0 and not end.is_stopped and end.only_noticed
    last_lines = last.get(end.rank, [])
    has_reported = any(line.startswith("error: ") for line in last_lines) and not cause.has_words
    if not is_on_other_nodes and not has_reported:
        kind = "note" if only_noticed or cause.exit_code == Interrupted.exit_code else "error"
        lines = [f"{kind}: {cause.message}"]
        if not cause.has_words and last_lines:
            lines += ["  its last lines:", *(f"  | {line}" for line in last_lines)]
        for line in map(secrets.scrub, lines):
            log.add(line)
            sys.stderr.write(line + "\n")
    return cause.exit_code


if __name__ == "__main__":
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # A warning that arrives before the handlers are installed.
    sys.exit(main(sys.argv[1:]))

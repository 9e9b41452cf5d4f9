"""A process that runs torchrun and reports how it ended: how `submit --on local` starts ranks.

    python -m steelyard.launch.torchrun --run RUN --ranks 4 -- python -m torch.distributed.run --nproc-per-node=4 ...

torchrun starts each rank under a node agent that captures its log (`node_agent.py --one-rank`). This process passes
requests to stop on to those (`torchrun_ipc.py`), reports the root cause and exits with its code. When it is killed, the
kernel kills torchrun, the node agents and the ranks.
"""

from __future__ import annotations

import argparse
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory

from steelyard.core import secrets
from steelyard.core.errors import RuntimeFailure
from steelyard.core.file_tail import last_lines
from steelyard.core.host import die_with_parent
from steelyard.launch import site_environment, torchrun_ipc
from steelyard.launch.log_capture import LogFile
from steelyard.launch.node_agent import report
from steelyard.launch.spawn import SAME_REQUEST_SECONDS, SECONDS_TO_END, SECONDS_TO_NOTICE, rank_environment, signals

SECONDS_BETWEEN_LOOKS = 0.05
LINES_SHOWN = 20


def main(arguments: Sequence[str]) -> int:
    """Run torchrun until it ends, and return the exit code of the job."""
    options = _options(arguments)
    same = site_environment.hold(SAME_REQUEST_SECONDS)
    with ExitStack() as stack:
        stop_signals = stack.enter_context(signals(same))
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="steelyard-")))
        with open(folder / "torchrun.log", "wb") as log:
            child = subprocess.Popen(
                options.command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
                env=rank_environment(options.ranks, {torchrun_ipc.FOLDER: str(folder)}), preexec_fn=die_with_parent(),
            )  # fmt: skip
        stack.callback(child.wait)
        stack.callback(child.kill)
        _forward_signals(child, folder, stop_signals)
        return _report(child, folder, options, was_asked=bool(stop_signals))


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m steelyard.launch.torchrun", description=__doc__)
    parser.add_argument("--run", required=True, type=Path)
    parser.add_argument("--ranks", required=True, type=int)
    parser.add_argument("command", nargs=argparse.REMAINDER)
    options = parser.parse_args(arguments)
    options.command = options.command[1:]  # after `--`
    return options


def _forward_signals(child: subprocess.Popen[bytes], folder: Path, stop_signals: list[int]) -> None:
    """Forward stop signals until torchrun ends. Kill it with its children if it outlasts the second one."""
    passed_on, deadline = 0, float("inf")
    while child.poll() is None and time.monotonic() < deadline:
        if len(stop_signals) > passed_on:
            passed_on = len(stop_signals)
            (folder / torchrun_ipc.ASKED).write_text(
                "".join(f"{int(number)}\n" for number in stop_signals), encoding="ascii"
            )
            if passed_on == 2:
                deadline = time.monotonic() + 2 * (SECONDS_TO_NOTICE + SECONDS_TO_END)
        time.sleep(SECONDS_BETWEEN_LOOKS)
    if child.poll() is None:
        child.kill()
        child.wait()


def _report(child: subprocess.Popen[bytes], folder: Path, options: argparse.Namespace, was_asked: bool) -> int:
    reports = {rank: torchrun_ipc.found(folder, rank) for rank in range(options.ranks)}
    present = {rank: each for rank, each in reports.items() if each is not None}
    log = LogFile(options.run / "logs" / f"{socket.gethostname()}.err")
    if not present and child.returncode:
        return _report_torchrun(child.returncode, folder, log)
    ends = [each.end for each in present.values()]
    ends += [torchrun_ipc.killed(rank, time.time()) for rank in reports if rank not in present and child.returncode]
    hung = [rank for rank, each in present.items() if each.is_hung]
    return report(ends, {rank: each.last for rank, each in present.items()}, hung, was_asked, log) if ends else 0


def _report_torchrun(code: int, folder: Path, log: LogFile) -> int:
    """torchrun failed before any rank ended: its own output is the only information."""
    last = last_lines(folder / "torchrun.log", LINES_SHOWN)
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    for line in map(secrets.scrub, (f"error: torchrun {how} before any rank did", *(f"  | {line}" for line in last))):
        log.add(line)
        sys.stderr.write(line + "\n")
    return RuntimeFailure.exit_code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

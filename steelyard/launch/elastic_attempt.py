"""One attempt of an elastic run: a node agent on each of its nodes."""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

from steelyard.core.host import die_with_parent
from steelyard.launch import backends, disk_errors, node_end
from steelyard.launch.elastic_job import ElasticJob
from steelyard.launch.node_end import KILL, NodeEnd
from steelyard.launch.replan import AttemptPlan

SECONDS_TO_END = 10.0


class Attempt:
    """The node agents of one attempt."""

    def __init__(self, run: Path, name: str, planned: AttemptPlan, job: ElasticJob) -> None:
        self.run, self.name, self.plan = run, name, planned
        self.began = time.monotonic()
        self.noticed: float | None = None  # when the first rank lost others
        self.request = ""
        self._sent, self._problem = "", ""
        self.heard: set[str] = set()
        hosts = ",".join(node.name for node in planned.nodes)
        options = ["--groups", planned.groups, "--hosts", hosts, "--attempt", name]
        self.processes = {
            node.name: subprocess.Popen(
                backends.load(job.backend).on_node(job, node, [*options, *job.command]),
                stdin=subprocess.DEVNULL, start_new_session=True, preexec_fn=die_with_parent(),
            )
            for node in planned.nodes
        }  # fmt: skip

    def ask(self, word: str) -> None:
        """Ask the agents to have their ranks save and stop, or to kill them."""
        if self.request not in (word, KILL):
            self.request = word
            self.send_request()

    def send_request(self) -> None:
        """Write the request for the agents, if that has not succeeded yet."""
        if self._sent == self.request:
            return
        try:
            node_end.request(self.run, self.name, self.request)
            self._sent = self.request
        except OSError as error:
            if (problem := error.strerror or str(error)) != self._problem:
                disk_errors.say(f"warning: the request to the nodes ({self.request}) cannot be written: {problem}")
                self._problem = problem

    def ends(self) -> dict[str, NodeEnd]:
        """The nodes that have ended, and how."""
        found = {name: node_end.read(self.run, self.name, name) for name in self.processes}
        return {name: end for name, end in found.items() if end is not None}

    def stop(self, lost: Sequence[str]) -> None:
        """Kill all ranks. The processes of lost nodes are not waited for."""
        self.ask(KILL)
        self._signal(signal.SIGTERM, lost)  # srun ends its step on SIGTERM.
        others = [name for name in self.processes if name not in lost]
        self._wait(others)
        self._signal(signal.SIGTERM, others)
        self._wait(others)
        self._signal(signal.SIGKILL, list(self.processes))

    def _signal(self, number: int, names: Sequence[str]) -> None:
        for process in (self.processes[name] for name in names):
            if process.poll() is None:
                process.send_signal(number)

    def _wait(self, names: Sequence[str]) -> None:
        deadline = time.monotonic() + SECONDS_TO_END
        while time.monotonic() < deadline and any(self.processes[name].poll() is None for name in names):
            time.sleep(0.1)

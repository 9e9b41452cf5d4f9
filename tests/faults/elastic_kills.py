"""Kills nodes, node agents and ranks of an elastic run on the virtual Slurm cluster, and drains nodes.

    python -m tests.faults.elastic_kills [KILLS] [SEED]

Needs root and the packages of `make test-cluster`. Kills are uniform in time and do not wait for the run, so some hit a
replan; one kind waits for a checkpoint that is being written, and kills the node agent of rank 0 then. At the end the
run is cancelled and its losses are compared with those of an unbroken run. Prints, for each kill, the seconds until its
detection and from there to the next training step.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

import steelyard
from steelyard.core.files import TEMPORARY
from steelyard.launch import elastic_job
from tests.cluster.conftest import RECIPE, SITES, Yard, everything, losses, metrics, process_on
from tests.cluster.lab import Lab
from tests.conftest import write_tokens

KINDS = ("power-off", "agent", "rank", "save", "drain")
SHORTEST, LONGEST = 5.0, 75.0  # seconds between kills
SECONDS_TO_RECOVER = 900.0
SECONDS_TO_SAVE = 5.0
WORDS = (
    "tiny.toml", "train.steps=100000", "checkpoint.every=10", "parallel.timeout_minutes=0.2",
)  # fmt: skip
ELASTIC = ("--on", "slurm", "--nodes", "4", "--ranks-per-node", "1", "--min-nodes", "2", "site.slurm.partition=spare")


def main(kills: int = 10, seed: int = 0) -> int:
    """Run the campaign; returns 0 if the run survived it with the losses of an unbroken run."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # So that the cluster is taken down.
    lab, folder = Lab(), Path(tempfile.mkdtemp(prefix="kills-"))
    try:
        lab.start()
        write_tokens(folder / "tokens_text_document")
        (folder / "tiny.toml").write_text(RECIPE)
        (folder / "config" / "steelyard").mkdir(parents=True)
        source = Path(steelyard.__file__).parent.parent
        (folder / "config" / "steelyard" / "sites.toml").write_text(SITES.format(source=source))
        return campaign(Yard(folder, lab), kills, random.Random(seed))
    finally:
        lab.stop()
        shutil.rmtree(folder, ignore_errors=True)


def campaign(yard: Yard, kills: int, chance: random.Random) -> int:
    """Kill, wait, and compare."""
    run = yard.submit(*WORDS, "parallel.data=4", *ELASTIC, "--name", "killed")
    yard.until_step(run, 10)
    off: list[str] = []
    for number in range(kills):
        kind, wait = KINDS[number % len(KINDS)], chance.uniform(SHORTEST, LONGEST)
        known, at = attempts(run), time.time()
        host = strike(yard, run, kind, chance)
        off += [host] if kind in ("power-off", "drain") else []
        while time.time() < at + wait:
            time.sleep(0.2)
        if number == kills - 1 or len(off) == 2 or chance.random() < 0.6:
            print(f"{number + 1} {kind} {host}: {recovered(run, known, at)}", flush=True)
            for each in off:
                if each in yard.lab.boxes:
                    yard.lab.client("scontrol", "update", f"NodeName={each}", "State=RESUME")
                else:
                    yard.lab.power_on(each)
            off.clear()
        else:
            print(f"{number + 1} {kind} {host}: the next kill did not wait", flush=True)
    yard.until_step(run, max(losses(run)) + 5)
    yard.steelyard("cancel", "killed")
    yard.until_state(run, "cancelled", seconds=600)
    broken = losses(run)
    unbroken = yard.submit(*WORDS, "--on", "local", "--name", "whole")  # The same length: it determines the samples.
    yard.until_step(unbroken, max(broken))
    yard.steelyard("cancel", "whole")
    whole = losses(unbroken)
    worst = max(abs(broken[step] - whole[step]) / whole[step] for step in broken)
    samples = [record["samples"] for record in metrics(run) if "loss" in record]
    once = samples == [record["samples"] for record in metrics(unbroken) if "loss" in record][: len(samples)]
    print(f"{len(attempts(run))} attempts, {max(broken)} steps, largest difference of a loss {worst:.1e}, each sample "
          f"once: {once}")  # fmt: skip
    return 0 if worst < 1e-3 and once else 1


def attempts(run: Path) -> list[dict]:
    return [each for each in elastic_job.attempts(run) if "attempt" in each]


def strike(yard: Yard, run: Path, kind: str, chance: random.Random) -> str:
    """Hit a node of the current attempt. Returns its name."""
    deadline = time.monotonic() + SECONDS_TO_RECOVER
    while time.monotonic() < deadline:
        nodes = attempts(run)[-1]["nodes"]
        host = nodes[0] if kind == "save" else chance.choice(nodes)
        if host in yard.lab.boxes:
            if kind == "drain":
                yard.lab.client("scontrol", "update", f"NodeName={host}", "State=DRAIN", "Reason=test")
                return host
            if kind == "power-off":
                yard.lab.power_off(host)
                return host
            try:
                number = signal.SIGSTOP if kind == "rank" else signal.SIGKILL
                process = process_on(yard, run, host, is_agent=kind != "rank")
                if kind != "save" or is_saving(run):
                    os.kill(process, number)
                    return host
            except (AssertionError, ProcessLookupError):  # The attempt has not started there yet, or has ended.
                pass
        time.sleep(0.2)
    raise TimeoutError(everything(run))


def is_saving(run: Path) -> bool:
    """Wait for a moment until a checkpoint is being written."""
    until = time.monotonic() + SECONDS_TO_SAVE
    while time.monotonic() < until:
        if any(path.name.startswith(TEMPORARY) for path in (run / "checkpoints").iterdir()):
            return True
    return False


def recovered(run: Path, known: list[dict], at: float) -> str:
    """Wait for a training step of an attempt after the kill."""
    deadline = time.monotonic() + SECONDS_TO_RECOVER
    while time.monotonic() < deadline:
        later = attempts(run)[len(known) :]
        steps = [each for each in metrics(run) if later and "loss" in each and each["time"] > later[0]["detected"]]
        if steps:
            first = later[0]
            waited = f"{first['detected'] - at:.1f} s to detect, {steps[0]['time'] - first['detected']:.1f} s to step"
            return f"{waited} {steps[0]['step']} ({first['why']}; {len(later[0]['nodes'])} nodes)"
        time.sleep(0.1)
    raise TimeoutError(everything(run))


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))

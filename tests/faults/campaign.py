"""Mutations, kills and fuzzed inputs in any number, from one seed."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.faults.mutate import mutations
from tests.faults.outcome import Tally, damaged, run
from tests.faults.targets import TARGETS, Target

AT_ONCE = 2


def mutate(target: Target, count: int, seed: int) -> Tally:
    """Damage one of a target's files `count` times; the files take turns."""
    rng, tally = random.Random(f"{seed} {target.name}"), Tally()
    with tempfile.TemporaryDirectory(prefix="faults-") as made:
        folder = Path(made)
        target.build(folder / "sound")
        reference = run_on_copy(target, folder)
        files = target.damageable(folder / "sound")
        shares = [count // len(files) + (number < count % len(files)) for number in range(len(files))]
        jobs = []
        for file, share in zip(files, shares, strict=True):
            for description, content in mutations((folder / "sound" / file).read_bytes(), share, rng):
                jobs.append((file, description, content))

        def one(number: int) -> tuple[str, str]:
            file, description, content = jobs[number]
            copy = folder / f"copy-{number}"
            outcome, result = damaged(
                folder / "sound", copy, file, content, target.commands, target.behaviour, reference
            )
            return outcome, f"{target.name}: {file}: {description}: {result.err.strip()[-300:]}"

        for outcome, description in in_parallel(one, range(len(jobs))):
            tally.add(outcome, description)
    return tally


def run_on_copy(target: Target, folder: Path) -> object:
    """What a target's commands lead to where nothing is damaged."""
    import shutil

    copy = folder / "reference"
    shutil.copytree(folder / "sound", copy, symlinks=True)
    result = run(copy, target.commands)
    assert result.code == 0, f"{target.name} fails on sound files: {result.err}"
    return target.behaviour(copy, result)


def in_parallel(work: Callable[[int], tuple[str, str]], numbers: Iterable[int]) -> list[tuple[str, str]]:
    """Results in order; commands are processes, so threads are enough to wait for them."""
    with ThreadPoolExecutor(AT_ONCE) as pool:
        return list(pool.map(work, numbers))


def mutate_all(count: int, seed: int, targets: Sequence[Target] = TARGETS) -> dict[str, Tally]:
    """`count` mutations, spread evenly over the targets."""
    shares = [count // len(targets) + (number < count % len(targets)) for number in range(len(targets))]
    return {target.name: mutate(target, share, seed) for target, share in zip(targets, shares, strict=True) if share}

"""Runs `steelyard watch --notify` beside rank 0 while a job runs, if the recipe has `log.on_verdict`.

It is a process of its own: this package must not import the rules, and a hook that hangs must not delay the ranks.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from steelyard.core.errors import UserError
from steelyard.core.host import die_with_parent
from steelyard.core.recipe import load_recipe
from steelyard.launch.launch_record import FOLDER

SECONDS_TO_REPORT = 60.0


@contextmanager
def notifying(run: Path) -> Iterator[None]:
    """Report changes of the verdict during the block, and the final verdict after it."""
    if not _is_requested(run):
        yield
        return
    command = [sys.executable, "-P", "-m", "steelyard", "watch", str(run), "--notify"]
    with open(run / "logs" / "notify.log", "ab") as log:
        child = subprocess.Popen(
            [*command, "--follow"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=log,
            preexec_fn=die_with_parent(),
        )
        try:
            yield
        finally:
            child.kill()
            child.wait()
            with suppress(OSError, subprocess.SubprocessError):
                subprocess.run(
                    [*command, "--once"],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=log,
                    timeout=SECONDS_TO_REPORT,
                )


def _is_requested(run: Path) -> bool:
    with suppress(OSError, UserError):
        return bool(load_recipe(run / FOLDER / "recipe.toml").log.on_verdict)
    return False

"""The state of a run in its folder: locked while it runs, written when it ends, and read as its results."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from steelyard import checkpoint
from steelyard.core.console import LOGGED, console
from steelyard.core.errors import RuntimeFailure, UserError
from steelyard.core.run import Run, now
from steelyard.parallel.world import World, run_on_rank0


@contextlib.contextmanager
def writing(folder: Run, world: World) -> Iterator[None]:
    """Lock the folder on rank 0; copy console output to the log of the host."""
    with contextlib.ExitStack() as stack:
        run_on_rank0(world, lambda: stack.enter_context(folder.writing()))
        if world.local_rank == 0 and LOGGED not in os.environ:  # Otherwise the launcher captures the output.
            stack.enter_context(console.copied_to(folder.path / "logs" / f"{socket.gethostname()}.out"))
        yield


def conclude(folder: Run, world: World, state: str) -> None:
    """Write the final state of a run to its manifest."""
    if world.is_rank0:
        folder.update(state=state, ended=now())


def failed(folder: Run, world: World, error: Exception, in_memory: tuple[int, Path] | None = None) -> Exception:
    """Write the failure to the manifest if the disk allows, and add the last checkpoint to the hint.

    `in_memory` is the step and the folder of the newest memory checkpoint.
    """
    if not world.is_rank0:
        return error
    # On a full disk the state stays "running", which readers interpret as killed.
    with contextlib.suppress(OSError):
        folder.update(state="failed", ended=now(), error=str(error)[:1000])
    if not isinstance(error, (RuntimeFailure, OSError)):
        return error
    try:
        saved = checkpoint.latest(folder.checkpoints)
        last = f"step {saved.step} is saved; the same command resumes from it" if saved else "no step was saved"
        if in_memory is not None and (saved is None or in_memory[0] > saved.step):
            last = f"step {in_memory[0]} is in {in_memory[1]}; the same command on the same nodes resumes from it"
    except (RuntimeFailure, UserError) as problem:
        last = problem.message
    advice = getattr(error, "hint", None)
    hint = f"{advice}; {last}" if advice else last
    kind = type(error) if isinstance(error, RuntimeFailure) else RuntimeFailure
    return kind(getattr(error, "message", str(error)), hint=hint)


def results(folder: Run) -> dict[str, Any]:
    """The results of a run: first and last validation loss, last training loss, tokens."""
    records = folder.metrics()
    valid = [record["valid_loss"] for record in records if "valid_loss" in record]
    trained = [record for record in records if "loss" in record]
    return {
        "run": str(folder.path),
        "state": folder.state,
        "steps": trained[-1]["step"] if trained else 0,
        "tokens": trained[-1]["tokens"] if trained else 0,
        "loss": trained[-1]["loss"] if trained else None,
        "valid_loss_before": valid[0] if valid else None,
        "valid_loss_after": valid[-1] if len(valid) > 1 else None,
    }

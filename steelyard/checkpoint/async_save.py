"""Saving while training goes on: the tensors are copied to the host at once, and a thread writes them."""

from __future__ import annotations

import contextlib
import threading
from pathlib import Path
from typing import Any

import torch.distributed as dist

from steelyard.checkpoint.finite import listed, nonfinite
from steelyard.checkpoint.folder import save
from steelyard.checkpoint.sharded_tensor import TensorShard
from steelyard.core.errors import RuntimeFailure


class Saver:
    """Writes the checkpoints of a run, one at a time. All ranks make one together and call it at the same steps."""

    def __init__(self, folder: Path, keep_last: int, in_background: bool) -> None:
        self.folder, self.keep_last, self.in_background = folder, keep_last, in_background
        # Ranks that write talk over a group of their own: training's exchanges go on meanwhile.
        self._group = dist.new_group(backend="gloo") if dist.is_initialized() else None
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None

    def save(self, pieces: dict[str, TensorShard], state: dict[str, Any]) -> None:
        """Save these pieces as they are now, after an earlier save has ended; never values that are not finite."""
        self.wait()
        self._refuse_nonfinite(pieces, state["step"])
        if not self.in_background:
            save(self.folder, pieces, state, self.keep_last, self._group)
            return
        copies = {name: piece.copied() for name, piece in pieces.items()}
        self._thread = threading.Thread(target=self._write, args=(copies, state), name="checkpoint")
        self._thread.start()

    def _refuse_nonfinite(self, pieces: dict[str, TensorShard], step: int) -> None:
        """Check the pieces where they lie, before they are copied; all ranks raise the same error."""
        found = nonfinite({name: piece.tensor for name, piece in pieces.items()})
        if self._group is not None:
            everyones: list[list[str]] = [[]] * dist.get_world_size(self._group)
            dist.all_gather_object(everyones, found, group=self._group)
            found = list(dict.fromkeys(name for each in everyones for name in each))
        if found:
            fault = RuntimeFailure(
                f"step {step} is not saved: NaN or infinite values in {listed(found)}",
                hint="lower optim.learning_rate",
            )
            fault.shared = self._group is not None
            raise fault

    def wait(self) -> None:
        """Let a save that is under way end; raises what stopped it."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure

    def let_end(self) -> None:
        """Let a save that is under way end, however it does."""
        with contextlib.suppress(Exception):
            self.wait()

    def _write(self, pieces: dict[str, TensorShard], state: dict[str, Any]) -> None:
        try:
            save(self.folder, pieces, state, self.keep_last, self._group)
        except BaseException as error:
            self._failure = error

"""Asynchronous saving: tensors are copied to the host, and a thread writes them while training continues."""

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
    """Writes the checkpoints of a run, one at a time. Construction and `save` are collective calls."""

    def __init__(self, folder: Path, keep_last: int, in_background: bool) -> None:
        self.folder, self.keep_last, self.in_background = folder, keep_last, in_background
        # A separate group, because training communicates at the same time.
        self._group = dist.new_group(backend="gloo") if dist.is_initialized() else None
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None

    def save(self, shards: dict[str, TensorShard], state: dict[str, Any]) -> None:
        """Save the current values after the previous save has ended. Raises if a value is not finite."""
        self.wait()
        self._refuse_nonfinite(shards, state["step"])
        if not self.in_background:
            save(self.folder, shards, state, self.keep_last, self._group)
            return
        copies = {name: shard.copied() for name, shard in shards.items()}
        # After an error, a thread that waits for a lost rank must not keep the process.
        is_daemon = self._group is not None
        self._thread = threading.Thread(target=self._write, args=(copies, state), name="checkpoint", daemon=is_daemon)
        self._thread.start()

    def _refuse_nonfinite(self, shards: dict[str, TensorShard], step: int) -> None:
        """Check the shards on their device, before they are copied. All ranks raise the same error."""
        names = nonfinite({name: shard.tensor for name, shard in shards.items()})
        if self._group is not None:
            gathered: list[list[str]] = [[]] * dist.get_world_size(self._group)
            dist.all_gather_object(gathered, names, group=self._group)
            names = list(dict.fromkeys(name for each in gathered for name in each))
        if names:
            failure = RuntimeFailure(
                f"step {step} is not saved: NaN or infinite values in {listed(names)}",
                hint="lower optim.learning_rate",
            )
            failure.shared = self._group is not None
            raise failure

    def wait(self) -> None:
        """Wait for a save in progress, and raise its error."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure

    def let_end(self) -> None:
        """Wait for a save in progress, and ignore its error."""
        with contextlib.suppress(Exception):
            self.wait()

    def _write(self, shards: dict[str, TensorShard], state: dict[str, Any]) -> None:
        try:
            save(self.folder, shards, state, self.keep_last, self._group)
        except BaseException as error:
            self._failure = error

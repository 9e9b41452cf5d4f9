"""Metrics of steps: always written to metrics.jsonl and the log, optionally to TensorBoard and W&B."""

from __future__ import annotations

import math
import netrc
import os
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any
from urllib.parse import urlsplit

from steelyard.core import units
from steelyard.core.console import console
from steelyard.core.errors import UserError
from steelyard.core.recipe import Recipe
from steelyard.core.run import Run


class Recorder:
    """Measures time between records and writes them. Only rank 0 writes; other ranks only measure time."""

    def __init__(self, recipe: Recipe, folder: Run, writes: bool) -> None:
        self.recipe, self.folder, self.writes = recipe, folder, writes
        self._began, self._paused, self._steps = time.perf_counter(), 0.0, 0
        self._board = _tensorboard(folder) if writes and recipe.log.tensorboard else None
        self._wandb = _wandb(recipe, folder) if writes and recipe.log.wandb else None

    def __enter__(self) -> Recorder:
        self._began = time.perf_counter()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._board is not None:
            self._board.close()
        if self._wandb is not None:
            self._wandb.finish(exit_code=0 if error is None else 1)

    def step_done(self) -> None:
        """Count a step."""
        self._steps += 1

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Exclude the time of the block from step times."""
        began = time.perf_counter()
        yield
        self._paused += time.perf_counter() - began

    def seconds(self) -> tuple[float, int]:
        """Seconds and steps since the last call."""
        now = time.perf_counter()
        seconds, steps = now - self._began - self._paused, self._steps
        self._began, self._paused, self._steps = now, 0.0, 0
        return max(seconds, 1e-9), max(steps, 1)

    def record(self, record: dict[str, Any]) -> None:
        """Write one record to all writers, with the time. Non-finite values become null, since JSON has no NaN.

        `steelyard watch` learns from the times how long pauses usually are.
        """
        if not self.writes:
            return
        record = {key: _number_or_none(value) for key, value in record.items()} | {"time": round(time.time(), 3)}
        self.folder.append(record)
        numbers = {
            key: value
            for key, value in record.items()
            if key not in ("step", "time") and isinstance(value, int | float)
        }
        if self._board is not None:
            for key, value in numbers.items():
                self._board.add_scalar(key, value, record["step"])
        if self._wandb is not None:
            self._wandb.log(numbers, step=record["step"])


def _number_or_none(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def line(record: dict[str, Any], steps: int) -> str:
    """A record as a line of the log."""
    loss = "none" if record["loss"] is None else f"{record['loss']:.4f}"
    fields = [
        f"step {record['step']}/{steps}",
        f"samples {record['samples']}",
        f"{1000 * record['seconds']:.1f} ms/step",
        f"lr {record['learning_rate']:.3e}",
        f"global_batch {record['global_batch']}",
        f"loss {loss}",
        f"loss_scale {record['loss_scale']:g}",
        f"grad_norm {record['grad_norm']:.3f}",
        f"skipped {record['skipped']}",
        f"nan {record['nonfinite']}",
        f"{units.count(record['tokens_per_second'])} tokens/s",
        f"{record['tflops']:.3g} TFLOP/s per rank",
    ]
    if record.get("mask_changed") is not None:
        changed = f"{100 * record['mask_changed']:.2f}% changed"
        is_learned = "mask_max_probability" in record
        state = f"{record['mask_max_probability']:.3f} decided" if is_learned else f"{record['mask_scale']:.3f} scale"
        fields.append(f"masks {state}, {changed}")
    if record.get("expert_load") is not None:
        fields.append(f"expert_load {record['expert_load']:.2f}")
    if record.get("mfu") is not None:
        fields.append(f"MFU {record['mfu']:.3f}")
    fields.append(f"{units.duration(record['seconds'] * (steps - record['step']))} left")
    return "  ".join(fields)


def check_writers(recipe: Recipe) -> None:
    """Check before training that TensorBoard and W&B are installed and W&B has a key."""
    if recipe.log.tensorboard:
        try:
            import torch.utils.tensorboard  # noqa: F401
        except ImportError:
            where = recipe.where("log.tensorboard")
            raise UserError("TensorBoard is not installed", where=where, hint="pip install tensorboard") from None
    if recipe.log.wandb is None:
        return
    try:
        import wandb  # noqa: F401
    except ImportError:
        raise UserError("W&B is not installed", where=recipe.where("log.wandb"), hint="pip install wandb") from None
    if os.environ.get("WANDB_MODE") in ("offline", "disabled") or _has_wandb_key():
        return
    raise UserError(
        "W&B has no key",
        where=recipe.where("log.wandb"),
        hint="set WANDB_API_KEY or run wandb login; WANDB_MODE=offline needs no key and keeps the run on this machine",
    )


def _has_wandb_key() -> bool:
    """Whether W&B will find a key: in the environment, or in the file that `wandb login` writes."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    host = urlsplit(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname or ""
    try:
        return netrc.netrc(os.environ.get("NETRC")).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False


def _tensorboard(folder: Run) -> Any:
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter(str(folder.path / "tensorboard"))


def _wandb(recipe: Recipe, folder: Run) -> Any:
    import wandb

    console.say(f"W&B: project {recipe.log.wandb}, {os.environ.get('WANDB_MODE', 'online')}")
    return wandb.init(
        project=recipe.log.wandb,
        name=folder.name,
        id=folder.manifest().get("wandb_id") or _store_id(folder, secrets.token_hex(4)),
        resume="allow",
        dir=str(folder.path),
        config=recipe.settings(),
        settings=wandb.Settings(console="off", silent=True, save_code=False),
    )


def _store_id(folder: Run, identity: str) -> str:
    folder.update(wandb_id=identity)
    return identity

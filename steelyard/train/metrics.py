"""Writing down what a step did: always to metrics.jsonl, to TensorBoard when the recipe asks."""

from __future__ import annotations

from types import TracebackType
from typing import Any

from steelyard.core.errors import UserError
from steelyard.core.recipe import Recipe
from steelyard.core.run import Run


class Recorder:
    """Keeps time between records and writes them."""

    def __init__(self, recipe: Recipe, folder: Run) -> None:
        self.folder = folder
        self._seconds, self._steps, self._tokens = 0.0, 0, 0
        self._board = _tensorboard(recipe, folder) if recipe.log.tensorboard else None

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._board is not None:
            self._board.close()

    def step_took(self, seconds: float, tokens: int) -> None:
        """Add a step to the time since the last record."""
        self._seconds += seconds
        self._steps += 1
        self._tokens += tokens

    def speed(self) -> dict[str, float]:
        """Tokens per second and seconds per step since the last record; starts counting anew."""
        speed = {"tokens_per_second": self._tokens / self._seconds, "seconds": self._seconds / self._steps}
        self._seconds, self._steps, self._tokens = 0.0, 0, 0
        return speed

    def record(self, record: dict[str, Any]) -> None:
        """Write one record everywhere it should go."""
        self.folder.append(record)
        if self._board is not None:
            for key, value in record.items():
                if key != "step":
                    self._board.add_scalar(key, value, record["step"])


def _tensorboard(recipe: Recipe, folder: Run) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise UserError(
            "TensorBoard is not installed", where=recipe.where("log.tensorboard"), mend="pip install tensorboard"
        ) from None
    return SummaryWriter(str(folder.path / "tensorboard"))

"""One pool of ranks for the whole session, and runs of the tiny recipe on any layout to compare."""

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from steelyard.core.run import Run
from steelyard.train.extension import Extension
from tests.conftest import TINY, write_tokens
from tests.parallel import jobs
from tests.parallel.ranks import Ranks

# With a vocabulary that is padded (97 of 128 rows), so that tensor-parallel ranks hold rows that only pad.
FAMILIES = {
    "gpt": "model={family='gpt', layers=4, hidden=32, heads=4, vocab=97, positions=16, tied=true}",
    "llama": "model={family='llama', layers=4, hidden=32, heads=4, kv_heads=2, vocab=97, tied=false}",
    "llama-tied": "model={family='llama', layers=4, hidden=32, heads=4, kv_heads=2, vocab=97, tied=true}",
    "llama-bias": "model={family='llama', layers=4, hidden=32, heads=4, kv_heads=2, vocab=97, qkv_bias=true}",
    "gpt-untied": "model={family='gpt', layers=4, hidden=32, heads=4, vocab=97, positions=16, tied=false}",
}
FOUR_STEPS = [
    "train.steps=4", "log.every=1", "eval.every=2", "checkpoint.every=0", "train.global_batch=8",
    "train.micro_batch=1", "parallel.timeout_minutes=3",
]  # fmt: skip
COMPARED = ("step", "loss", "valid_loss", "grad_norm", "learning_rate", "samples", "global_batch", "skipped")


class Layouts:
    """Runs of the tiny recipe on any number of ranks. Runs on one rank are made once per session."""

    def __init__(self, folder: Path, ranks: Ranks, always: Sequence[str] = ()) -> None:
        """`always`: overrides of every run, such as the device; those of a run come behind them."""
        self.folder, self.ranks, self.always = folder, ranks, always
        self._number = itertools.count()
        self._alone: dict[tuple[str, ...], list[dict]] = {}

    def run(
        self,
        size: int,
        family: str,
        *overrides: str,
        path: str | None = None,
        extension: Extension | None = None,
        resume: str = "auto",
    ) -> Run:
        """Train on so many ranks."""
        path = path or f"run-{next(self._number)}"
        settings = [*FOUR_STEPS, FAMILIES[family], *self.always, *overrides]
        self.said = self.ranks.do(size, jobs.training, settings, path, extension, resume)[0]
        return Run.open(self.folder / path)

    def alone(self, family: str, *overrides: str) -> list[dict]:
        """The records of a single process."""
        key = (family, *overrides)
        if key not in self._alone:
            self._alone[key] = self.run(1, family, *overrides).metrics()
        return self._alone[key]


@pytest.fixture(scope="session")
def layouts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Layouts]:
    folder = tmp_path_factory.mktemp("layouts")
    write_tokens(folder / "tokens_text_document")
    (folder / "tiny.toml").write_text(TINY)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        patch.setenv("OPENBLAS_NUM_THREADS", "1")
        ranks = Ranks(folder)
        try:
            yield Layouts(folder, ranks)
        finally:
            ranks.close()


def difference(ours: list[dict], theirs: list[dict]) -> float:
    """The largest relative difference between two curves, which must have the same records."""
    assert [sorted(set(COMPARED) & a.keys()) for a in ours] == [sorted(set(COMPARED) & b.keys()) for b in theirs]
    assert [record["step"] for record in ours] == [record["step"] for record in theirs]
    return max(
        abs(a[key] - b[key]) / max(abs(b[key]), 1e-9)
        for a, b in zip(ours, theirs, strict=True)
        for key in COMPARED
        if key in b
    )

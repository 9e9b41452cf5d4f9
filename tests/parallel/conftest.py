"""One pool of ranks for the whole session, and runs of the tiny recipe on any layout to compare."""

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from steelyard.core.run import Run
from steelyard.training.extension import Extension
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
    "mistral": "model={family='llama', layers=4, hidden=32, heads=4, kv_heads=2, vocab=97, window=5}",
    "qwen3": "model={family='qwen3', layers=4, hidden=32, heads=4, kv_heads=2, head_dim=16, vocab=97}",
    "gemma2": "model={family='gemma2', layers=4, hidden=32, heads=4, kv_heads=2, head_dim=16, vocab=97, window=5}",
    "gemma3": "model={family='gemma3', layers=4, hidden=32, heads=4, kv_heads=2, head_dim=16, vocab=97, window=5, "
    "full_every=2}",
    "olmo2": "model={family='olmo2', layers=4, hidden=32, heads=4, kv_heads=2, vocab=97}",
    "smollm3": "model={family='smollm3', layers=4, hidden=32, heads=4, kv_heads=2, vocab=97}",
    # Large losses of the router, so that a mistake in them shows.
    "experts": "model={family='mixtral', layers=4, hidden=32, heads=4, kv_heads=2, vocab=97, experts=4, ffn=24, "
    "aux_loss=0.5, router_z_loss=0.1}",
    "shared-experts": "model={family='qwen3-moe', layers=4, hidden=32, heads=4, kv_heads=2, head_dim=16, vocab=97, "
    "experts=8, experts_per_token=3, ffn=24, expert_ffn=8, shared_ffn=16, dense_layers=[1], router_score='sigmoid', "
    "router_bias_rate=0.01, aux_loss=0.1, z_loss=0.01}",
}
FAMILIES["capacity"] = FAMILIES["experts"].replace("aux_loss=0.5", "capacity=0.8, aux_loss=0.5")
# Both with a learning rate; the validation after them shows the weights that the second one wrote.
TWO_STEPS = [
    "train.steps=2", "log.every=1", "eval.every=2", "eval.batches=1", "checkpoint.every=0",
    "train.global_batch=8", "train.micro_batch=1", "parallel.timeout_minutes=3",
]  # fmt: skip
# Tests on the pool of ranks are slow but for these, a few of every kind, which show most mistakes.
FAST = """
    test_a_layout_gives_the_curve_of_one_process[llama-zero 3 on 2]
    test_a_layout_gives_the_curve_of_one_process[gpt-tensor]
    test_a_layout_gives_the_curve_of_one_process[llama-context]
    test_a_layout_gives_the_curve_of_one_process[gpt-pipeline 2 1f1b]
    test_a_layout_gives_the_curve_of_one_process[llama-pipeline 2 zero-bubble]
    test_a_layout_gives_the_curve_of_one_process[llama-data x tensor zero 3]
    test_experts_train_alike_on_a_layout[shared-experts-expert zero 0]
    test_muon_gives_the_curve_of_one_process[data x tensor zero 3]
    test_each_matrix_reaches_one_rank_whole_and_its_result_all_that_hold_it[some rounds-4]
    test_a_setting_means_the_same_on_a_layout[documents-pipeline]
    test_a_setting_means_the_same_on_a_layout[tied-llama-tensor]
    test_recomputing_changes_nothing[pipeline-selective]
    test_a_coarse_precision_stays_near_one_process[pipeline-fp16]
    test_an_extension_changes_model_and_loss_and_adds_to_records
    test_a_run_goes_on_where_it_was_on_another_layout[pipeline to zero 1]
    test_masks_are_learned_alike_on_a_layout[gpt-tensor]
    test_pruning_is_alike_on_a_layout[data x tensor-sparsegpt]
    test_a_pruning_that_one_rank_ended_continues_on_another_layout
    test_tuning_is_alike_on_a_layout[llama-full-pipeline]
    test_tuning_is_alike_on_a_layout[gpt-lora-tensor]
    test_a_sample_that_is_not_finite_on_any_device_is_data_where_devices_can_be_compared[zero 0]
    test_all_ranks_refuse_to_save_what_is_not_finite_on_one[pipeline]
    test_every_rank_of_a_pipeline_tells_what_it_does_when[zero-bubble]
    test_a_head_whose_rows_lie_on_several_ranks_gives_the_same_loss_and_gradients[100-2]
""".strip().split("\n    ")
COMPARED = ("step", "loss", "valid_loss", "grad_norm", "learning_rate", "samples", "global_batch", "skipped")


class Layouts:
    """Runs of the tiny recipe on any number of ranks. Runs on one rank are made once per session."""

    def __init__(self, folder: Path, ranks: Ranks, always: Sequence[str] = ()) -> None:
        """`always`: overrides of every run, such as the device; those of a run come behind them."""
        self.folder, self.ranks, self.always = folder, ranks, always
        self._number = itertools.count()
        self._once: dict[tuple[str, ...], Run] = {}

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
        settings = [*TWO_STEPS, FAMILIES[family], *self.always, *overrides]
        self.said = self.ranks.do(size, jobs.training, settings, path, extension, resume)[0]
        return Run.open(self.folder / path)

    def once(self, family: str, *overrides: str) -> Run:
        """Train in a single process, unless that was done; for runs that no test changes."""
        key = (family, *overrides)
        if key not in self._once:
            self._once[key] = self.run(1, family, *overrides)
        return self._once[key]

    def alone(self, family: str, *overrides: str) -> list[dict]:
        """The records of a single process."""
        return self.once(family, *overrides).metrics()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what runs on the pool of ranks as slow, unless it is among the fast ones."""
    for item in items:
        if "layouts" in getattr(item, "fixturenames", ()) and item.name not in FAST:
            item.add_marker("slow")


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

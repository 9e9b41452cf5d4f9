import numpy as np
import pytest

from steelyard.tokens.dataloader import Loader, documents_in, loss_positions_in, read, starts_of


class Numbers:
    """Sample i is i, i, i, ..."""

    counts = None

    def __len__(self):
        return 100

    def __getitem__(self, number):
        return np.full(5, number)


def consumed(ranks: int, first: int = 0, steps: int | None = None) -> list[list[int]]:
    """The samples of each step, over all ranks."""
    loaders = [Loader(Numbers(), lambda _: 12, first, rank, ranks) for rank in range(ranks)]
    batches = []
    for parts in zip(*loaders, strict=True):
        batches.append([int(row[0]) for part in parts for row in part.rows["tokens_BL"]])
        assert {part.consumed for part in parts} == {first + 12 * len(batches)}
        assert [part.first for part in parts] == [int(part.rows["tokens_BL"][0, 0]) for part in parts]
        if len(batches) == steps:
            break
    for loader in loaders:
        loader._closed.set()
    return batches


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 6, 12])
def test_a_step_sees_the_same_samples_on_any_number_of_ranks(ranks):
    assert consumed(ranks) == consumed(1) == [list(range(12 * step, 12 * step + 12)) for step in range(8)]


def test_a_stopped_loader_goes_on_exactly_with_another_number_of_ranks():
    before = consumed(4, steps=3)
    assert before + consumed(2, first=36) == consumed(1)


def test_ranks_that_cannot_share_a_batch_are_refused():
    with Loader(Numbers(), lambda _: 12, ranks=5) as loader, pytest.raises(ValueError, match="5 ranks"):
        next(loader)


def test_a_batch_may_grow_and_its_samples_stay_in_order():
    def batch_at(consumed: int) -> int:
        return 4 if consumed < 8 else 8

    loaders = [Loader(Numbers(), batch_at, rank=rank, ranks=2) for rank in range(2)]
    steps = [[int(row[0]) for part in parts for row in part.rows["tokens_BL"]] for parts in zip(*loaders, strict=True)]
    assert [len(step) for step in steps[:4]] == [4, 4, 8, 8]
    assert [sample for step in steps for sample in step] == list(range(96))


def test_a_failure_while_reading_ahead_reaches_the_reader():
    class Broken(Numbers):
        def __getitem__(self, number):
            raise OSError("the disk is gone")

    with Loader(Broken(), lambda _: 4) as loader, pytest.raises(OSError, match="the disk is gone"):
        next(loader)


def test_documents_are_told_apart_and_positions_start_anew():
    rows = np.array([[5, 6, 0, 7, 0, 0, 8, 9], [0, 1, 2, 3, 4, 5, 6, 0]])
    documents = documents_in(rows[:, :-1], end_of_document=0)
    assert documents.number.tolist() == [[0, 0, 0, 1, 1, 2, 3], [0, 1, 1, 1, 1, 1, 1]]
    assert documents.position.tolist() == [[0, 1, 2, 0, 1, 0, 0], [0, 0, 1, 2, 3, 4, 5]]


def test_documents_are_named_by_where_they_begin_too():
    numbers = np.array([[0, 0, 0, 1, 1, 2, 3], [5, 5, 5, 5, 5, 5, 5], [0, 1, 1, 1, 1, 1, 2]])
    assert starts_of(numbers).tolist() == [[0, 3, 5, 6], [0, 7, 7, 7], [0, 1, 6, 7]]
    assert starts_of(np.arange(5)[None]).tolist() == [[0, 1, 2, 3, 4]]


def test_rows_are_samples():
    assert read(Numbers(), 3, 2)["tokens_BL"][:, 0].tolist() == [3, 4]


def test_places_that_weigh_something_come_first():
    weights = np.zeros((2, 128), dtype=np.float32)
    weights[0, [5, 9, 31]], weights[1, 2] = (1.0, 0.5, -1.0), 1.0
    others = [place for place in range(128) if place not in (5, 9, 31)]
    assert loss_positions_in(weights).tolist() == [[5, 9, 31, *others[:13]], [2, 0, 1, *range(3, 16)]]
    assert loss_positions_in(np.ones((2, 33), dtype=np.float32)).tolist() == [list(range(33))] * 2
    assert loss_positions_in(np.zeros((1, 1536), dtype=np.float32)).shape == (1, 32)

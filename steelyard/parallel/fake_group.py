"""A process group of one process that takes the place of one rank of a larger job, for `steelyard plan measure`.

No byte leaves the process. Every buffer that a collective would fill from other ranks gets finite values, because the
time and the routing of a model that computes on uninitialised memory are those of NaNs:

all-gather          this rank's shard, repeated for every rank
reduce-scatter      this rank's part of its own input; an all-reduce leaves its input as it is
all-to-all          of integers (slots per expert): an even load, times `imbalance`; of rows: this rank's rows, repeated
receive             normal values drawn from a seed; of integers (a stage's vote for given shapes): ones

Each fill is one kernel on the compute stream, and is timed, so that it can be subtracted from the time of its span.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

BACKEND = "steelyard-fake"
SEED = 1234
POOL = 1 << 16  # values drawn for received activations
DEVICES = ("cpu", "cuda")


class Received:
    """How buffers from other ranks are filled, and the time that this took while `is_timed` is set."""

    def __init__(self, imbalance: float = 1.0) -> None:
        self.imbalance = imbalance
        self.is_timed = False
        self.span: Callable[[], int] = lambda: -1
        """The number of the span that a fill belongs to."""
        self._fills: list[tuple[int, Any, Any]] = []
        self._pools: dict[torch.device, Tensor] = {}

    @contextmanager
    def fill(self, target: Tensor) -> Iterator[None]:
        """The block fills a buffer. On a GPU it runs on the compute stream, whichever stream waits for the buffer.

        Beside the compute stream it would take a share of the memory bandwidth that cannot be subtracted.
        """
        if not target.is_cuda:
            start: Any = time.perf_counter()
            yield
            self._record(start, time.perf_counter())
            return
        waiting, compute = torch.cuda.current_stream(), torch.cuda.default_stream()
        compute.wait_stream(waiting)
        with torch.cuda.stream(compute):
            start = _event()
            yield
            self._record(start, _event())
        waiting.wait_stream(compute)

    def _record(self, start: Any, end: Any) -> None:
        if self.is_timed:
            self._fills.append((self.span(), start, end))

    def seconds(self) -> dict[int, float]:
        """Seconds of fills by span since the last call."""
        total: dict[int, float] = {}
        for span, start, end in self._fills:
            spent = end - start if isinstance(start, float) else start.elapsed_time(end) / 1e3
            total[span] = total.get(span, 0.0) + spent
        self._fills = []
        return total

    def receive(self, target: Tensor) -> None:
        """Fill a buffer of the pipeline: activations and gradients have normal values, the same in every step."""
        if not target.is_floating_point():
            target.fill_(1)
            return
        if target.device not in self._pools:
            generator = torch.Generator(target.device).manual_seed(SEED)
            self._pools[target.device] = torch.randn(POOL, generator=generator, device=target.device)
        repeat(target, self._pools[target.device].to(target.dtype))


def _event() -> Any:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def repeat(target: Tensor, source: Tensor) -> None:
    """Fill a contiguous tensor with the values of another, from its beginning again where it ends."""
    with torch.no_grad():
        flat, values = target.detach().view(-1), source.detach().reshape(-1)
        if not values.numel():
            flat.zero_()
            return
        whole, rest = divmod(flat.numel(), values.numel())
        flat[: whole * values.numel()].view(whole, values.numel()).copy_(values.expand(whole, -1))
        if rest:
            flat[-rest:].copy_(values[:rest])


def even_counts(sent: Tensor, imbalance: float) -> Tensor:
    """As many slots as `sent` has in total, times `imbalance`, spread evenly over its entries."""
    entries = sent.numel()
    total = (sent.sum() * imbalance).round().long()
    extra = torch.arange(entries, device=sent.device) < total % entries
    return (total // entries + extra).view_as(sent).to(sent.dtype)


@cache
def _group_class() -> Any:
    # The only import of torch's private fake group: its backend answers every collective at once, without a peer. Its
    # own fills are not used: they copy once per rank, which is 512 launches on 512 ranks, and receive nothing.
    from torch.testing._internal.distributed import fake_pg

    base: Any = dist.ProcessGroup  # Its methods have other names and types in torch 2.11 and 2.13.

    class FakeGroup(base):  # type: ignore[misc]
        """The collectives that the engine uses. In torch 2.13 some of them have new names."""

        received = Received()

        def __init__(self, rank: int, size: int) -> None:
            super().__init__(rank, size)
            self.index, self.ranks = rank, size
            self.fake = fake_pg._create_fake_pg(SimpleNamespace(group_rank=rank, group_size=size), None)
            for device in DEVICES:
                self._register_backend(torch.device(device), dist.ProcessGroup.BackendType.CUSTOM, self.fake)

        def done(self) -> Any:
            """A work object that is complete."""
            return self.fake.barrier()

        def allreduce(self, tensors: Any, *_: Any) -> Any:
            return self.done()

        def allreduce_coalesced(self, tensors: Any, *_: Any) -> Any:
            return self.done()

        def broadcast(self, tensors: Any, *_: Any) -> Any:
            return self.done()

        def barrier(self, *_: Any, **__: Any) -> Any:
            return self.done()

        def send(self, tensors: Any, peer: int, tag: int) -> Any:
            return self.done()

        def recv(self, tensors: Any, peer: int, tag: int) -> Any:
            for tensor in tensors:
                self.received.receive(tensor)
            return self.done()

        def _allgather_base(self, output: Tensor, shard: Tensor, *_: Any) -> Any:
            with self.received.fill(output):
                # FSDP gathers in place: its shard is a view of the output.
                overlaps = shard.untyped_storage().data_ptr() == output.untyped_storage().data_ptr()
                repeat(output, shard.clone() if overlaps else shard)
            return self.done()

        all_gather_single = _allgather_base

        def _reduce_scatter_base(self, output: Tensor, whole: Tensor, *_: Any) -> Any:
            with self.received.fill(output):
                part = whole.detach().reshape(self.ranks, -1)[self.index]
                output.detach().copy_(part.view_as(output))
            return self.done()

        reduce_scatter_single = _reduce_scatter_base

        def allgather_into_tensor_coalesced(self, outputs: Any, shards: Any, *_: Any) -> Any:
            for output, shard in zip(outputs, shards, strict=True):
                self._allgather_base(output, shard)
            return self.done()

        all_gather_single_coalesced = allgather_into_tensor_coalesced

        def reduce_scatter_tensor_coalesced(self, outputs: Any, wholes: Any, *_: Any) -> Any:
            for output, whole in zip(outputs, wholes, strict=True):
                self._reduce_scatter_base(output, whole)
            return self.done()

        reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced

        def alltoall_base(self, output: Tensor, sent: Tensor, *_: Any) -> Any:
            with self.received.fill(output):
                if output.dtype == torch.int64:
                    output.copy_(even_counts(sent, self.received.imbalance))
                else:
                    repeat(output, sent)
            return self.done()

        all_to_all_single = alltoall_base

    for name, method in list(vars(FakeGroup).items()):
        # Layers that are compiled around a collective would trace it, and its events would never be recorded.
        if callable(method) and not name.startswith("__"):
            setattr(FakeGroup, name, torch.compiler.disable(method))
    return FakeGroup


def _create(store: Any, rank: int, size: int, timeout: Any) -> Any:
    return _group_class()(rank, size)


@contextmanager
def fake_world(rank: int, size: int, imbalance: float = 1.0) -> Iterator[Received]:
    """Let this process be one rank of a job of `size` ranks for the duration of the block."""
    group = _group_class()
    received = group.received = Received(imbalance)
    if not hasattr(dist.Backend, BACKEND.upper()):
        dist.Backend.register_backend(BACKEND, _create, devices=list(DEVICES))
    dist.init_process_group(BACKEND, store=dist.HashStore(), rank=rank, world_size=size)
    try:
        yield received
    finally:
        dist.destroy_process_group()

"""Copies of a rank's shards in pinned host memory, made while the next step computes.

The copies run on a stream of their own. They read the tensors that the next optimizer update changes, so the training
stream waits for them before that update (`before_update`), not the host. If a step is shorter than the copies, a part
of the tensors can be cloned on the device, which is fast; the update does not wait for the copies of clones. Tensors
that are in host memory already are copied at once.
"""

from __future__ import annotations

import errno
import mmap
from collections.abc import Iterable

import torch
from torch import Tensor

from steelyard.checkpoint.memory_folder import require_memory
from steelyard.checkpoint.sharded_tensor import TensorShard
from steelyard.core import units

ALIGNMENT = 512  # bytes, of a buffer


class HostStaging:
    """One set of buffers, reused by every copy. `copy` must not be called while the last copies are still in use."""

    def __init__(self, device_bytes: int = 0) -> None:
        self.device_bytes = device_bytes
        """The most bytes of clones on the device."""
        self._buffers: dict[str, Tensor] = {}
        self._stream: torch.cuda.Stream | None = None
        self._unread: torch.cuda.Event | None = None
        """The tensors of the training are not read any more."""
        self._done: torch.cuda.Event | None = None
        self._sources: list[Tensor] = []

    @property
    def size(self) -> int:
        """Bytes of the buffers."""
        return sum(buffer.nbytes for buffer in self._buffers.values())

    def copy(self, shards: dict[str, TensorShard]) -> dict[str, TensorShard]:
        """Start to copy the shards. The copies are valid after `wait`."""
        tensors = {name: shard.tensor.detach() for name, shard in shards.items()}
        if self._buffers.keys() != tensors.keys():
            is_pinned = any(tensor.is_cuda for tensor in tensors.values())
            self._buffers = dict(zip(tensors, _buffers(tensors.values(), is_pinned), strict=True))
        on_device = {name: tensor for name, tensor in tensors.items() if tensor.is_cuda}
        if on_device:
            self._start(on_device)
        for name, tensor in tensors.items():
            if name not in on_device:
                self._buffers[name].copy_(tensor)
        return {name: TensorShard(self._buffers[name], shard.shape, shard.offset) for name, shard in shards.items()}

    def _start(self, tensors: dict[str, Tensor]) -> None:
        device = next(iter(tensors.values())).device
        if self._stream is None:
            self._stream = torch.cuda.Stream(device)
        clones = self._cloned(tensors)
        self._stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(self._stream):
            for name in tensors.keys() - clones.keys():
                self._buffers[name].copy_(tensors[name], non_blocking=True)
            self._unread = self._stream.record_event()
            for name, clone in clones.items():
                self._buffers[name].copy_(clone, non_blocking=True)
            self._done = self._stream.record_event()
        self._sources = [*tensors.values(), *clones.values()]  # What was made for the copies must live until then.

    def _cloned(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        left, clones = self.device_bytes, {}
        for name, tensor in tensors.items():
            if tensor.nbytes <= left:
                left -= tensor.nbytes
                clones[name] = tensor.clone()
        return clones

    def before_update(self) -> None:
        """Make the training stream wait until its tensors are read, before it changes them."""
        if self._unread is not None:
            torch.cuda.current_stream().wait_event(self._unread)

    def wait(self) -> None:
        """Wait on the host until the copies are complete."""
        if self._done is not None:
            self._done.synchronize()
        self._sources = []


def _buffers(tensors: Iterable[Tensor], is_pinned: bool) -> list[Tensor]:
    """Contiguous buffers of these sizes in one mapping, which is registered with CUDA if it is to be pinned.

    torch's own pinned memory would round sizes up to powers of two. A mapping per tensor would share no pages, but be
    registered hundreds of times. The mapping lives as long as a buffer, and stays registered until the process ends.
    """
    places: list[tuple[Tensor, int]] = []
    total = 0
    for tensor in tensors:
        places.append((tensor, total))
        total += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
    require_memory(total)
    memory = mmap.mmap(-1, max(total, 1))
    if is_pinned:
        address = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
        status = int(torch.cuda.cudart().cudaHostRegister(address, total, 0))
        if status:
            raise OSError(errno.ENOMEM, f"CUDA cannot pin {units.size(total)} of host memory (error {status})")
    return [
        torch.frombuffer(memory, dtype=tensor.dtype, count=tensor.numel(), offset=start).view(tensor.shape)
        if tensor.numel()
        else torch.empty(tensor.shape, dtype=tensor.dtype)
        for tensor, start in places
    ]

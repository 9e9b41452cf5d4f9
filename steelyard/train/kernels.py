"""AdamW's arithmetic as one Triton kernel over many tensors. torch's fused AdamW is the specification.

A table says which block of the grid works on which part of which tensor, so that a step is one launch per group of
parameters however many there are, and runs at the speed of memory. This module is imported only where there is a GPU,
since other machines may have no Triton.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096
ALIGNMENT = 16  # bytes; what loads of four numbers at once need


class Tables:
    """Where the tensors of a group lie. Gradients move from step to step; everything else stays."""

    def __init__(
        self, parameters: list[Tensor], averages: list[Tensor], squares: list[Tensor], steps: list[Tensor]
    ) -> None:
        device = parameters[0].device
        blocks = [-(-parameter.numel() // BLOCK) for parameter in parameters]
        self.blocks = sum(blocks)
        self.tensor_of = torch.repeat_interleave(torch.arange(len(blocks), dtype=torch.int32), torch.tensor(blocks))
        self.tensor_of = self.tensor_of.to(device)
        self.first_block = torch.tensor([0, *blocks]).cumsum(0)[:-1].to(device)
        self.sizes = torch.tensor([parameter.numel() for parameter in parameters], device=device)
        self.parameters, self.averages, self.squares, self.steps = (
            _addresses(tensors).to(device) for tensors in (parameters, averages, squares, steps)
        )
        self.fixed = [*parameters, *averages, *squares]

    @property
    def is_aligned(self) -> bool:
        """Whether the kernel may read the tensors that stay."""
        return all(tensor.data_ptr() % ALIGNMENT == 0 and tensor.is_contiguous() for tensor in self.fixed)

    def move(
        self,
        gradients: list[Tensor],
        grad_scale: Tensor,
        found_inf: Tensor,
        rate: float,
        betas: tuple[float, float],
        eps: float,
        decay: float,
    ) -> None:
        """One step of all tensors of the group."""
        at = _addresses(gradients)
        at = (at.pin_memory() if self.sizes.is_cuda else at).to(self.sizes.device, non_blocking=True)
        logs = [math.log(beta) if beta else -1e30 for beta in betas]
        _kernel[(self.blocks,)](
            self.parameters, at, self.averages, self.squares, self.steps, self.sizes, self.tensor_of, self.first_block,
            grad_scale, found_inf, rate, betas[0], betas[1], logs[0], logs[1], eps, 1 - rate * decay, BLOCK,
        )  # fmt: skip


def _addresses(tensors: list[Tensor]) -> Tensor:
    return torch.tensor([tensor.data_ptr() for tensor in tensors], dtype=torch.int64)


@triton.jit(do_not_specialize=["rate", "kept"])  # type: ignore[untyped-decorator]
def _kernel(  # type: ignore[no-untyped-def]
    parameters, gradients, averages, squares, steps, sizes, tensor_of, first_block, grad_scale, found_inf,
    rate, beta1, beta2, log_beta1, log_beta2, eps, kept, block: tl.constexpr,
):  # fmt: skip
    if tl.load(found_inf) == 0:
        program = tl.program_id(0)
        tensor = tl.load(tensor_of + program)
        first = (program - tl.load(first_block + tensor)) * block
        at = first + tl.arange(0, block)
        mask = at < tl.load(sizes + tensor)
        number = tl.pointer_type(tl.float32)
        parameters = tl.multiple_of(tl.load(parameters + tensor).to(number), 16) + at
        gradients = tl.multiple_of(tl.load(gradients + tensor).to(number), 16) + at
        averages = tl.multiple_of(tl.load(averages + tensor).to(number), 16) + at
        squares = tl.multiple_of(tl.load(squares + tensor).to(number), 16) + at
        count = tl.load(tl.load(steps + tensor).to(number)) + 1
        gradient = tl.load(gradients, mask=mask) / tl.load(grad_scale)
        average = beta1 * tl.load(averages, mask=mask) + (1 - beta1) * gradient
        square = beta2 * tl.load(squares, mask=mask) + (1 - beta2) * gradient * gradient
        correction = 1 - tl.exp(count * log_beta1)
        correction_of_squares = 1 - tl.exp(count * log_beta2)
        spread = tl.sqrt(square) / tl.sqrt(correction_of_squares) + eps
        parameter = tl.load(parameters, mask=mask) * kept - rate / correction * average / spread
        tl.store(averages, average, mask=mask)
        tl.store(squares, square, mask=mask)
        tl.store(parameters, parameter, mask=mask)

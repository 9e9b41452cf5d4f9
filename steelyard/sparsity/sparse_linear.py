"""Linear modules with compressed 2:4 weights; each product uses the algorithm that was measured to be fastest.

Algorithms on a GPU:

    few rows    the kernels of `sparse_gemv.py` and `sparse_mma.py`, up to 16 rows, in several configurations
    cusparselt  2:4 tensor cores through NVIDIA's library, for many rows; in the library's own format
    expand      a temporary dense matrix, and torch's product

The fastest depends on the matrix, the number of rows, the GPU, and whether calls are recorded in a CUDA graph:
cuSPARSELt creates a plan for every call, which takes the host longer than the GPU takes for small products. So each
shape is measured at its first use, once per power of two of rows, and the result is cached for the process.

cuSPARSELt's format starts with the values in our order. If that is verified, the two share memory, and a module takes
10/16 of the dense one: values 8, metadata for the library 1, masks for our kernels 1; or 11/16 if `sparse_mma` supports
the matrix, which needs metadata in its own order.

8-bit values (`row_scales.py`) take 5/16 or 6/16 of the dense module. The kernels for few rows decode them; for many
rows the matrix is expanded in the dtype of the input.

On a CPU a module expands the dense matrix for each product. This is slow and serves as the specification; models are
loaded dense there.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from steelyard.checkpoint.formats.compressed_tensors import NONZEROS, indices_of_row
from steelyard.checkpoint.formats.row_scales import DTYPES as EIGHT_BIT
from steelyard.checkpoint.formats.row_scales import ValueFormat
from steelyard.core.console import console
from steelyard.model import LanguageModel
from steelyard.model.experts import ExpertLinear
from steelyard.model.modules import Linear
from steelyard.sparsity.semi_structured import Packed, dense, packed

MOST_FEW_ROWS = 16
MULTIPLE = 16  # cuSPARSELt needs both sides of a matrix as multiples of this, and rows as multiples of half of it.
COMPILERS = 8  # threads
ROUNDS = 10
LARGEST_ERROR = 0.02  # relative to the norm of the product; rounding to 16 bits is a tenth of that
DTYPES = (torch.bfloat16, torch.float16)
# GemvConfig or MmaConfig, whose modules need Triton; the number of a cuSPARSELt algorithm; or None: expand
KernelConfig = Any
# Device, dtype of the input, outputs, groups, binary logarithm of the rows, whether it is recorded, dtype of the values
Key = tuple[torch.device, torch.dtype, int, int, int, bool, torch.dtype]


class SparseLinear(Linear):
    """A linear module with compressed weights. They are loaded like others, then `prepare` converts them."""

    values: nn.Parameter | Tensor
    indices: nn.Parameter | None
    scales: nn.Parameter | Tensor | None
    words: Tensor
    metadata: Tensor | None
    for_many: Tensor

    def __init__(self, linear: Linear, dtype: torch.dtype, value_format: ValueFormat | None = None) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features, self.dtype = linear.in_features, linear.out_features, dtype
        self.bias = linear.bias
        device, rows, kept = linear.weight.device, linear.out_features, linear.in_features // 4 * NONZEROS
        stored = dtype if value_format is None else EIGHT_BIT[value_format]
        values = torch.empty(rows, kept, dtype=stored, device=device)
        indices = torch.empty(rows, indices_of_row(linear.in_features), dtype=torch.uint8, device=device)
        self.values = nn.Parameter(values, requires_grad=False)
        self.indices = nn.Parameter(indices, requires_grad=False)
        scales = None if value_format is None else torch.empty(rows, dtype=torch.float32, device=device)
        self.scales = None if scales is None else nn.Parameter(scales, requires_grad=False)

    def prepare(self) -> None:
        """Convert the loaded weights to the formats of the kernels."""
        assert self.indices is not None
        scales = None if self.scales is None else self.scales.detach()
        ours = packed(self.values.detach(), self.indices.detach(), scales)
        theirs = _cusparselt_compressed(ours) if ours.values.is_cuda and scales is None else None
        values = ours.values
        if theirs is not None and torch.equal(theirs.flatten()[: values.numel()], values.flatten()):
            values = theirs.flatten()[: values.numel()].view_as(values)
        del self.values, self.indices, self.scales
        self.register_buffer("values", values)
        self.register_buffer("scales", scales)
        self.register_buffer("words", ours.words)
        self.register_buffer("metadata", ours.metadata if values.is_cuda else None)
        self.register_buffer("for_many", values.new_empty(0, dtype=self.dtype) if theirs is None else theirs)

    def forward(self, x: Tensor) -> Tensor:
        """The product, with the fastest algorithm."""
        rows = x.flatten(0, -2)
        y: Tensor = _product(rows, self.values, self.words, self.metadata, self.for_many, self.scales)
        y = y.view(*x.shape[:-1], self.out_features)
        return y if self.bias is None else y + self.bias.to(x.dtype)


def put(network: LanguageModel, names: list[str], dtype: torch.dtype, value_format: ValueFormat | None = None) -> None:
    """Replace the linear modules of these weights by compressed ones. Experts stay dense: no kernel groups them."""
    for name in names:
        path, _, own = name.removesuffix(".weight").rpartition(".")
        module = network.get_submodule(path)
        linear = getattr(module, own)
        if isinstance(linear, ExpertLinear):
            continue
        assert isinstance(linear, Linear), f"{name} is not the weight of a linear module"
        setattr(module, own, SparseLinear(linear, dtype, value_format))


def prepare(network: LanguageModel) -> None:
    """Prepare all compressed modules, and measure products of a single row, which decoding uses."""
    sparse = [module for module in network.modules() if isinstance(module, SparseLinear)]
    if sparse and sparse[0].values.is_cuda:
        console.say("measuring sparse matrix products on this GPU; the first time, kernels are compiled")
    for module in sparse:
        module.prepare()
        if module.values.is_cuda:
            with torch.inference_mode():
                module(torch.randn(1, module.in_features).to(module.values.device, module.dtype))


@dataclass
class Choices:
    """The fastest algorithm by GPU, matrix, rows, and whether calls are recorded in a graph."""

    for_graphs: bool = False
    found: dict[Key, KernelConfig] = field(default_factory=dict)


CHOICES = Choices()  # Measurements of the process, shared by all models.


@contextlib.contextmanager
def for_graphs() -> Iterator[None]:
    """Measure in the block as a CUDA graph replays: without host time."""
    before, CHOICES.for_graphs = CHOICES.for_graphs, True
    try:
        yield
    finally:
        CHOICES.for_graphs = before


@torch.library.custom_op("steelyard::sparse_product", mutates_args=())
def _product(
    x: Tensor, values: Tensor, words: Tensor, metadata: Tensor | None, for_many: Tensor, scales: Tensor | None
) -> Tensor:
    held = Packed(values, words, metadata, scales)
    if not x.is_cuda:
        return F.linear(x, dense(held).to(x.dtype))
    key = _key(x, held)
    if key in CHOICES.found:
        config = CHOICES.found[key]
    elif torch.cuda.is_current_stream_capturing():
        config = candidates(x, held, for_many)[0]  # No measurement during capture.
    else:
        config = choose(x, held, for_many)
    return multiplied(x, held, for_many, config)


@_product.register_fake
def _(
    x: Tensor, values: Tensor, words: Tensor, metadata: Tensor | None, for_many: Tensor, scales: Tensor | None
) -> Tensor:
    return x.new_empty(x.shape[0], values.shape[0])


def multiplied(x: Tensor, held: Packed, for_many: Tensor, config: KernelConfig) -> Tensor:
    """The product with one algorithm: a kernel for few rows, a cuSPARSELt algorithm, or expansion (None)."""
    from steelyard.sparsity import sparse_gemv

    if config is None:
        return _expanded_product(x, held)
    if isinstance(config, int):
        return _cusparselt_product(x, for_many, config)
    return sparse_gemv.few_rows(x, held, config)


def candidates(x: Tensor, held: Packed, for_many: Tensor) -> list[KernelConfig]:
    """The algorithms that may be the fastest; the first is a good guess."""
    from steelyard.sparsity import sparse_gemv

    found: list[KernelConfig] = [*sparse_gemv.configs(len(x), held)] if len(x) <= MOST_FEW_ROWS else []
    found += [0] if for_many.numel() else []
    return [*found, None]


def choose(x: Tensor, held: Packed, for_many: Tensor) -> KernelConfig:
    """Measure the fastest algorithm for these rows and this matrix.

    Algorithms that fail on the GPU or in its compiler are skipped, and so are those with another result than the dense
    matrix.
    """
    found = candidates(x, held, for_many)
    if for_many.numel() and len(x) > MOST_FEW_ROWS and len(x) % 8 == 0:
        with warnings.catch_warnings():  # torch warns that the function will be renamed.
            warnings.simplefilter("ignore", UserWarning)
            found.append(int(torch._cslt_sparse_mm_search(for_many, x.t(), transpose_result=True)))
    if x.is_cuda:
        _compile(x, held, for_many, found)
    expected = multiplied(x, held, for_many, None).float()
    best, least = None, float("inf")
    for config in found:
        try:
            error = (multiplied(x, held, for_many, config).float() - expected).norm() / expected.norm().clamp(min=1e-30)
            milliseconds = _milliseconds(partial(multiplied, x, held, for_many, config))
        except Exception as problem:
            console.warn(f"a sparse matrix product fails on this GPU and is not used: {config}: {problem}")
            continue
        if not error < LARGEST_ERROR:
            console.warn(f"a sparse matrix product has a relative error of {error:.2g} and is not used: {config}")
        elif milliseconds < least:
            best, least = config, milliseconds
    CHOICES.found[_key(x, held)] = best
    return best


def _compile(x: Tensor, held: Packed, for_many: Tensor, configs: list[KernelConfig]) -> None:
    """Call every kernel once, on several threads: the first call compiles it, mostly outside Python."""

    def call(config: KernelConfig) -> None:
        with contextlib.suppress(Exception), torch.cuda.device(x.device), torch.inference_mode():
            multiplied(x, held, for_many, config)  # An algorithm that fails is named when it is measured.

    with ThreadPoolExecutor(COMPILERS) as pool:
        list(pool.map(call, [config for config in configs if not isinstance(config, int)]))
    torch.cuda.synchronize()


def _key(x: Tensor, held: Packed) -> Key:
    """The key of a measurement: rows up to the same power of two share one."""
    rows = (len(x) - 1).bit_length()
    return (x.device, x.dtype, held.outputs, held.groups, rows, CHOICES.for_graphs, held.values.dtype)


def _milliseconds(product: Callable[[], Tensor]) -> float:
    """The mean time of a few calls after warmup; as a CUDA graph if `CHOICES.for_graphs` is set.

    Weights that fit are then in the L2 cache, which they are not in a model. Choices that were measured without them in
    the cache made a model no faster (docs/benchmarks.md).
    """

    def rounds() -> None:
        for _ in range(ROUNDS):
            product()

    rounds()
    replay = rounds
    if CHOICES.for_graphs:
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            rounds()
        replay = graph.replay
        replay()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    replay()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / ROUNDS


def _expanded_product(x: Tensor, held: Packed) -> Tensor:
    from steelyard.sparsity import sparse_gemv

    return F.linear(x, sparse_gemv.expand(held, x.dtype))


def _cusparselt_compressed(held: Packed) -> Tensor | None:
    """The matrix in cuSPARSELt's format; None if the library is missing or does not support the matrix."""
    from steelyard.sparsity import sparse_gemv

    if held.outputs % MULTIPLE or held.groups * 4 % MULTIPLE or not torch.backends.cusparselt.is_available():
        return None
    try:
        compressed: Tensor = torch._cslt_compress(sparse_gemv.expand(held))
        _cusparselt_product(held.values.new_zeros(MULTIPLE, held.groups * 4), compressed, 0)
    except RuntimeError:  # A GPU that the library does not support.
        return None
    return compressed


def _cusparselt_product(x: Tensor, compressed: Tensor, algorithm: int) -> Tensor:
    rows = len(x)
    padded = F.pad(x, (0, 0, 0, -rows % 8)) if rows % 8 else x
    y: Tensor = torch._cslt_sparse_mm(compressed, padded.t(), transpose_result=True, alg_id=algorithm)
    return y[:rows]

"""Linear maps that compute with compressed 2:4 weights, each product by whichever way was measured to be the fastest.

Ways to multiply on a GPU:

    few rows    the kernels of `decode.py` and `cores.py`, up to 16 rows, in several forms
    cusparselt  the hardware's 2:4 products through NVIDIA's library, for many rows; from a form of its own
    expand      the dense matrix, made for the moment, and torch's product

Which is best depends on the matrix, on the number of rows, on the GPU, and on whether calls are recorded in a CUDA
graph: cuSPARSELt plans every call anew, which takes the host longer than the GPU takes for small products. So each
shape is measured when it is first met, once for a power of two of rows, and the answer is kept for the process.

cuSPARSELt's form begins with the values as we have them. Where that is found to be so, the two share memory, and a map
takes 10/16 of the dense one: values 8, their places for the library 1, masks for our kernels 1; or 11/16, where `cores`
can take it and wants the places in an order of its own.

On a CPU a map makes the dense matrix for each product, which is slow and the twin of all this; models are loaded dense
there.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from steelyard.checkpoint.formats.compressed_tensors import KEPT, indices_of_row
from steelyard.core.console import console
from steelyard.model import LanguageModel
from steelyard.model.modules import Linear
from steelyard.sparsity.semi_structured import Packed, dense, packed

MOST_FEW_ROWS = 16
MULTIPLE = 16  # of both sides of a matrix, and of half that of rows, that cuSPARSELt multiplies
ROUNDS = 10
LARGEST_ERROR = 0.02  # beside the norm of the product; rounding to 16 bits is a tenth of that
DTYPES = (torch.bfloat16, torch.float16)
# decode.Way or cores.Form, whose modules need Triton; the number of an algorithm of cuSPARSELt's; or None: expand
Way = Any


class SparseLinear(Linear):
    """A matrix product with compressed weights, which are filled in like any and then `prepared`."""

    values: nn.Parameter | Tensor
    indices: nn.Parameter | None
    words: Tensor
    places: Tensor | None
    for_many: Tensor

    def __init__(self, linear: Linear, dtype: torch.dtype) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.bias = linear.bias
        device, rows, kept = linear.weight.device, linear.out_features, linear.in_features // 4 * KEPT
        values = torch.empty(rows, kept, dtype=dtype, device=device)
        indices = torch.empty(rows, indices_of_row(linear.in_features), dtype=torch.uint8, device=device)
        self.values = nn.Parameter(values, requires_grad=False)
        self.indices = nn.Parameter(indices, requires_grad=False)

    def prepare(self) -> None:
        """Bring the weights into the forms that products read, once they are there."""
        assert self.indices is not None
        ours = packed(self.values.detach(), self.indices.detach())
        theirs = _cusparselt_form(ours) if ours.values.is_cuda else None
        values = ours.values
        if theirs is not None and torch.equal(theirs.flatten()[: values.numel()], values.flatten()):
            values = theirs.flatten()[: values.numel()].view_as(values)
        del self.values, self.indices
        self.register_buffer("values", values)
        self.register_buffer("words", ours.words)
        self.register_buffer("places", ours.places if values.is_cuda else None)
        self.register_buffer("for_many", values.new_empty(0) if theirs is None else theirs)

    def forward(self, x: Tensor) -> Tensor:
        """The product, by whichever way suits."""
        rows = x.flatten(0, -2)
        y: Tensor = _product(rows, self.values, self.words, self.places, self.for_many)
        y = y.view(*x.shape[:-1], self.out_features)
        return y if self.bias is None else y + self.bias.to(x.dtype)


def put(network: LanguageModel, names: list[str], dtype: torch.dtype) -> None:
    """Put compressed maps in the place of the plain ones whose weights have these names."""
    for name in names:
        path, _, own = name.removesuffix(".weight").rpartition(".")
        module = network.get_submodule(path)
        linear = getattr(module, own)
        assert isinstance(linear, Linear), f"{name} is no weight of a linear map"
        setattr(module, own, SparseLinear(linear, dtype))


def prepare(network: LanguageModel) -> None:
    """Make all compressed maps ready, and measure the products of a single row, which writing consists of."""
    sparse = [module for module in network.modules() if isinstance(module, SparseLinear)]
    if sparse and sparse[0].values.is_cuda:
        console.say("choosing the fastest ways to multiply on this GPU; the first time, kernels are compiled for it")
    for module in sparse:
        module.prepare()
        if module.values.is_cuda:
            with torch.inference_mode():
                module(torch.randn(1, module.in_features).to(module.values))


@dataclass
class Choices:
    """Which way was found to be the fastest, by GPU, matrix, rows, and whether calls are recorded in a graph."""

    for_graphs: bool = False
    found: dict[tuple[object, ...], Way] = field(default_factory=dict)


CHOICES = Choices()  # What a process has measured stays measured; no model owns it.


@contextlib.contextmanager
def for_graphs() -> Iterator[None]:
    """What is measured inside is measured as a CUDA graph replays it: without the host's time."""
    before, CHOICES.for_graphs = CHOICES.for_graphs, True
    try:
        yield
    finally:
        CHOICES.for_graphs = before


@torch.library.custom_op("steelyard::sparse_product", mutates_args=())
def _product(x: Tensor, values: Tensor, words: Tensor, places: Tensor | None, for_many: Tensor) -> Tensor:
    held = Packed(values, words, places)
    if not x.is_cuda:
        return F.linear(x, dense(held))
    key = _key(x, held)
    if key in CHOICES.found:
        way = CHOICES.found[key]
    elif torch.cuda.is_current_stream_capturing():
        way = candidates(x, held, for_many)[0]  # Nothing can be measured now.
    else:
        way = choose(x, held, for_many)
    return multiplied(x, held, for_many, way)


@_product.register_fake
def _(x: Tensor, values: Tensor, words: Tensor, places: Tensor | None, for_many: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], values.shape[0])


def multiplied(x: Tensor, held: Packed, for_many: Tensor, way: Way) -> Tensor:
    """The product by one way: a form of the kernels for few rows, an algorithm of cuSPARSELt's, or none of these."""
    from steelyard.sparsity import sparse_gemv

    if way is None:
        return _expanded_product(x, held)
    return _cusparselt_product(x, for_many, way) if isinstance(way, int) else sparse_gemv.few_rows(x, held, way)


def candidates(x: Tensor, held: Packed, for_many: Tensor) -> list[Way]:
    """The ways that may be the fastest; the first is a good guess."""
    from steelyard.sparsity import sparse_gemv

    found: list[Way] = [*sparse_gemv.ways(len(x), held)] if len(x) <= MOST_FEW_ROWS else []
    found += [0] if for_many.numel() else []
    return [*found, None]


def choose(x: Tensor, held: Packed, for_many: Tensor) -> Way:
    """The fastest way, measured when such rows first meet such a matrix.

    What a GPU or its compiler cannot do is left out, and so is what gives another answer than the dense matrix.
    """
    found = candidates(x, held, for_many)
    if for_many.numel() and len(x) > MOST_FEW_ROWS and len(x) % 8 == 0:
        with warnings.catch_warnings():  # It will be renamed; until then it would say so to whoever runs a model.
            warnings.simplefilter("ignore", UserWarning)
            found.append(int(torch._cslt_sparse_mm_search(for_many, x.t(), transpose_result=True)))
    expected = multiplied(x, held, for_many, None).float()
    best, least = None, float("inf")
    for way in found:
        try:
            error = (multiplied(x, held, for_many, way).float() - expected).norm() / expected.norm().clamp(min=1e-30)
            milliseconds = _milliseconds(partial(multiplied, x, held, for_many, way))
        except Exception as problem:
            console.warn(f"a way to multiply compressed weights fails here and is left out: {way}: {problem}")
            continue
        if not error < LARGEST_ERROR:
            console.warn(f"a way to multiply compressed weights is wrong by {error:.2g} and is left out: {way}")
        elif milliseconds < least:
            best, least = way, milliseconds
    CHOICES.found[_key(x, held)] = best
    return best


def _key(x: Tensor, held: Packed) -> tuple[object, ...]:
    """What a measurement holds for: rows up to the same power of two share one."""
    return (x.device, x.dtype, held.outputs, held.groups, (len(x) - 1).bit_length(), CHOICES.for_graphs)


def _milliseconds(product: Callable[[], Tensor]) -> float:
    """The mean of a few calls after some to warm up; of a recorded graph of them, where graphs are what counts."""
    for _ in range(3):
        product()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    if CHOICES.for_graphs:
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            for _ in range(ROUNDS):
                product()
        graph.replay()
        begin.record()
        graph.replay()
        end.record()
    else:
        begin.record()
        for _ in range(ROUNDS):
            product()
        end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / ROUNDS


def _expanded_product(x: Tensor, held: Packed) -> Tensor:
    from steelyard.sparsity import sparse_gemv

    return F.linear(x, sparse_gemv.expand(held))


def _cusparselt_form(held: Packed) -> Tensor | None:
    """The matrix as cuSPARSELt wants it, where the library is there and takes such a matrix."""
    from steelyard.sparsity import sparse_gemv

    if held.outputs % MULTIPLE or held.groups * 4 % MULTIPLE or not torch.backends.cusparselt.is_available():
        return None
    try:
        form: Tensor = torch._cslt_compress(sparse_gemv.expand(held))
        _cusparselt_product(held.values.new_zeros(MULTIPLE, held.groups * 4), form, 0)
    except RuntimeError:  # A GPU that the library does not know.
        return None
    return form


def _cusparselt_product(x: Tensor, form: Tensor, algorithm: int) -> Tensor:
    rows = len(x)
    padded = F.pad(x, (0, 0, 0, -rows % 8)) if rows % 8 else x
    y: Tensor = torch._cslt_sparse_mm(form, padded.t(), transpose_result=True, alg_id=algorithm)
    return y[:rows]

"""Both orders of a blend against megatron-core's own helper, built here with and without fused multiply-add."""

import ctypes
import platform
import re
import shutil
import subprocess
from collections.abc import Callable
from fractions import Fraction
from importlib import metadata
from pathlib import Path

import numpy as np
import pytest

from steelyard.core.errors import UserError
from steelyard.core.recipe import load_recipe
from steelyard.core.run import for_training
from steelyard.tokens import fma
from steelyard.tokens.blend import blend_order, normalised
from steelyard.tokens.samples import open_samples
from tests.conftest import write_tokens

# GCC 12 takes the first dataset's product out of the loop, away from its difference, and fuses the others alone.
# Without that optimization (-fno-tree-pre) it fuses all of them, as GCC 11 and 14 and clang do by themselves.
CONTRACTION = {"standard": ["-ffp-contract=off"], "fma": ["-ffp-contract=fast", "-fno-tree-pre"]}
# The helper takes pybind11's arrays. Pointers in their place let its source compile in a second, without Python.h.
ARRAYS = """
#include <algorithm>
#include <cstdint>
#include <iostream>
namespace py {
template <typename T> struct array_t {
    T *data;
    template <int dimensions> T *mutable_unchecked() { return data; }
    template <int dimensions> const T *unchecked() const { return data; }
};
}
"""
ENTRY = """
extern "C" void blend(int16_t *datasets, int64_t *numbers, double *weights, int32_t count, int64_t size) {
    py::array_t<int16_t> dataset_index{datasets};
    py::array_t<int64_t> sample_index{numbers};
    const py::array_t<double> shares{weights};
    build_blending_indices(dataset_index, sample_index, shares, count, size, false);
}
"""
Helper = Callable[[list[float], int], tuple[np.ndarray, np.ndarray]]


def megatrons_source() -> str:
    """The function that orders a blend, as the installed megatron-core ships it."""
    try:
        path = Path(metadata.distribution("megatron-core").locate_file("megatron/core/datasets/helpers.cpp"))
    except metadata.PackageNotFoundError:
        pytest.skip("megatron-core is not installed")
    found = re.search(r"^void build_blending_indices\(.*?^}$", path.read_text(), re.MULTILINE | re.DOTALL)
    assert found, f"{path} has no build_blending_indices"
    return found.group()


@pytest.fixture(scope="module", params=CONTRACTION)
def built(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Helper]:
    """The name of an order, and megatron-core's helper compiled to give it."""
    compiler = shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        pytest.skip("there is no C++ compiler")
    flags = ["-O3", "-std=c++11", "-shared", "-fPIC", *CONTRACTION[request.param]]
    if platform.machine() in ("x86_64", "AMD64"):
        described = Path("/proc/cpuinfo")
        if request.param == "fma" and described.is_file() and " fma " not in described.read_text():
            pytest.skip("this processor has no fused multiply-add")
        flags.append("-mfma")
    folder = tmp_path_factory.mktemp("helper")
    (folder / "blend.cpp").write_text(f"{ARRAYS}\n{megatrons_source()}\n{ENTRY}")
    subprocess.run([compiler, *flags, "blend.cpp", "-o", "blend.so"], cwd=folder, check=True, timeout=120)
    library = ctypes.CDLL(str(folder / "blend.so"))

    def helper(shares: list[float], samples: int) -> tuple[np.ndarray, np.ndarray]:
        dataset_index, sample_index = np.zeros(samples, np.int16), np.zeros(samples, np.int64)
        weights = np.array(shares)
        pointers = [ctypes.c_void_p(array.ctypes.data) for array in (dataset_index, sample_index, weights)]
        library.blend(*pointers, ctypes.c_int32(len(shares)), ctypes.c_int64(samples))
        return dataset_index, sample_index

    return request.param, helper


def blends(datasets: int, samples: int) -> list[list[float]]:
    random = np.random.RandomState(datasets + samples)
    weights = (random.rand(datasets) ** 4 + 1e-4, np.ones(datasets), np.arange(1, datasets + 1))
    return [normalised(each) for each in weights]


@pytest.mark.parametrize(
    ("datasets", "samples"), [(2, 1), (3, 2), (300, 2), (2, 4095), (20, 4097), (3, 60_000), (300, 12_000)]
)
def test_each_order_is_that_of_megatrons_helper_built_for_it(built, datasets, samples):
    order, helper = built
    for shares in blends(datasets, samples):
        ours, theirs = blend_order(shares, samples, order), helper(shares, samples)
        assert np.array_equal(ours[0], theirs[0])
        assert np.array_equal(ours[1], theirs[1])


def test_the_two_orders_differ():
    shares = normalised(np.arange(1, 21))
    assert not np.array_equal(blend_order(shares, 4097)[0], blend_order(shares, 4097, "fma")[0])


def product_less(a: float, b: float, c: float) -> float:
    """The specification: exact, then rounded once."""
    return float(Fraction(a) * Fraction(b) - Fraction(c))


@pytest.mark.parametrize("seed", range(4))
def test_a_product_less_a_count_is_rounded_once(seed):
    random = np.random.RandomState(seed)
    a = random.rand(3000) * 2.0 ** random.randint(-60, 1, 3000)
    b = np.floor(2.0 ** (random.rand(3000) * 52))
    near = np.maximum(np.rint(a * b) + random.randint(-3, 4, 3000), 0)
    c = np.where(random.rand(3000) < 0.7, near, np.floor(2.0 ** (random.rand(3000) * 52)))
    assert fma.multiply_subtract(a, b, c).tolist() == list(map(product_less, a, b, c))


def test_a_product_that_all_but_ties_is_rounded_to_its_own_side():
    # 1 - 2**-54 lies halfway between two floats; the product's own last bits, far below, decide.
    tie, bit = 2.0**-54, 2.0**-106
    a = np.array([tie, tie + bit, tie - bit / 2, 3 * tie, 3 * tie * (1 + 2.0**-52), 3 * tie * (1 - 2.0**-53)])
    b = np.array([1.0, 1 + 2.0**-52, 3.0, 2.0**20 + 1, 2.0**30 - 1])
    for number in b:
        once = fma.multiply_subtract(a, np.full_like(a, number), np.ones_like(a))
        assert once.tolist() == [product_less(each, number, 1.0) for each in a]


def test_a_run_reads_its_blend_in_the_order_of_its_recipe(in_workplace):
    prefixes = [f"part{number}" for number in range(20)]
    for number, prefix in enumerate(prefixes):
        write_tokens(in_workplace.path / prefix, documents=30, seed=number)
    sources = ", ".join(f"{{prefix='{p}', weight={number + 1}}}" for number, p in enumerate(prefixes))
    for order in CONTRACTION:
        samples = open_samples(
            load_recipe("tiny.toml", [f"data.train=[{sources}]", f"data.blend_order={order}"]), "train", 500
        )
        shares = normalised(normalised(range(1, 21)))
        assert np.array_equal(samples.dataset_index, blend_order(shares, len(samples), order)[0])


def test_a_run_does_not_go_on_in_another_order(in_workplace):
    for_training(load_recipe("tiny.toml"))
    with pytest.raises(UserError, match=r"data\.blend_order: standard -> fma"):
        for_training(load_recipe("tiny.toml", ["data.blend_order=fma"]))


def test_the_c_library_agrees_about_one_rounding():
    library = ctypes.CDLL(None)
    library.fma.restype, library.fma.argtypes = ctypes.c_double, [ctypes.c_double] * 3
    random = np.random.RandomState(0)
    a, b = random.rand(5000), np.floor(random.rand(5000) * 2**40)
    c = np.rint(a * b * random.choice([0.1, 1, 3], 5000))
    expected = [library.fma(*row) for row in zip(a, b, -c, strict=True)]
    assert fma.multiply_subtract(a, b, c).tolist() == expected

"""What GPUs can do, by their makers' account: peak arithmetic without sparsity, memory and its bandwidth.

Peaks are dense, with sums in fp32, in TFLOP/s; data sheets often print twice as much "with sparsity". Memory is what
the driver reports, rounded: cards with GDDR6 and error correction give up a sixteenth for it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

GIB = 1 << 30


@dataclass(frozen=True)
class Gpu:
    """One kind of GPU. None: it has no such units, or the number is not fixed."""

    name: str
    pattern: str
    memory_gib: float | None
    fp32: float | None
    tf32: float | None
    fp16: float | None
    bf16: float | None
    fp8: float | None
    bandwidth_gb: float | None
    source: str

    @property
    def memory(self) -> int | None:
        """Bytes of memory."""
        return None if self.memory_gib is None else int(self.memory_gib * GIB)

    def peak(self, precision: str) -> float | None:
        """The peak in FLOP/s for a recipe's `train.precision`; fp32 products may run in tf32 where there is any."""
        rates = {"fp32": self.tf32 or self.fp32, "bf16": self.bf16, "fp16": self.fp16, "fp8": self.fp8}
        rate = rates[precision]
        return None if rate is None else rate * 1e12


# name, names that torch reports, GiB, fp32, tf32, fp16, bf16, fp8, GB/s, source
CATALOGUE = [
    Gpu("rtx3090", r"GeForce RTX 3090", 24, 35.6, 35.6, 71, 71, None, 936, "NVIDIA Ampere GA102 whitepaper"),
    Gpu(
        "rtx4090", r"GeForce RTX 4090", 24, 82.6, 82.6, 165.2, 165.2, 330.3, 1008, "NVIDIA Ada architecture whitepaper"
    ),
    Gpu("t4", r"T4", 15, 8.1, None, 65, None, None, 320, "NVIDIA T4 data sheet"),
    Gpu("l4", r"L4", 22.5, 30.3, 60, 121, 121, 242.5, 300, "NVIDIA L4 data sheet"),
    Gpu("a10", r"A10", 22.5, 31.2, 62.5, 125, 125, None, 600, "NVIDIA A10 data sheet"),
    Gpu("a40", r"A40", 45, 37.4, 74.8, 149.7, 149.7, None, 696, "NVIDIA A40 data sheet"),
    Gpu("v100-16", r"V100-SXM2-16GB", 16, 15.7, None, 125, None, None, 900, "NVIDIA V100 data sheet, SXM2"),
    Gpu("v100-32", r"V100-SXM[23]-32GB", 32, 15.7, None, 125, None, None, 900, "NVIDIA V100 data sheet, SXM2"),
    Gpu("a100-40", r"A100-(SXM4|PCIE)-40GB", 40, 19.5, 156, 312, 312, None, 1555, "NVIDIA A100 data sheet"),
    Gpu(
        "a100-80", r"A100[- ](SXM4-80GB|80GB PCIe)", 80, 19.5, 156, 312, 312, None, 2039, "NVIDIA A100 data sheet, SXM"
    ),
    Gpu("h100-80", r"H100 80GB HBM3", 80, 67, 494, 989, 989, 1979, 3350, "NVIDIA H100 data sheet, SXM"),
    Gpu("h100-pcie", r"H100 PCIe", 80, 51, 378, 756, 756, 1513, 2000, "NVIDIA H100 data sheet, PCIe"),
    Gpu("h200", r"H200", 141, 67, 494, 989, 989, 1979, 4800, "NVIDIA H200 data sheet, SXM"),
    Gpu("gh200-96", r"GH200 480GB", 96, 67, 494, 990, 990, 1979, 4000, "NVIDIA GH200 data sheet, 96 GB HBM3"),
    Gpu("gh200-144", r"GH200 144G HBM3e", 144, 67, 494, 990, 990, 1979, 4900, "NVIDIA GH200 data sheet, 144 GB HBM3e"),
    Gpu(
        "b200",
        r"B200",
        180,
        75,
        1125,
        2250,
        2250,
        4500,
        8000,
        "NVIDIA HGX and DGX B200 data sheets, an eighth of a box",
    ),
    Gpu("cpu", r"cpu", None, None, None, None, None, None, None, "none: processors differ too much for one line"),
]
ALIASES = {"v100": "v100-32", "a100": "a100-80", "h100": "h100-80", "gh200": "gh200-96"}


def by_device_name(name: str) -> Gpu | None:
    """The GPU that torch calls `name`, such as `NVIDIA A100-SXM4-80GB`; None where it is not in the catalogue."""
    bare = re.sub(r"^(NVIDIA|Tesla)\s+", "", name.strip())
    return next((gpu for gpu in CATALOGUE if re.fullmatch(gpu.pattern, bare, re.IGNORECASE)), None)


def by_name(name: str) -> Gpu | None:
    """The GPU of a name in the catalogue, such as `h100-80`, or of a device name; None where there is none."""
    key = ALIASES.get(name.lower(), name.lower())
    return next((gpu for gpu in CATALOGUE if gpu.name == key), None) or by_device_name(name)

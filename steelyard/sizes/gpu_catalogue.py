"""The GPU catalogue: peak FLOP/s, memory, bandwidth, links and power of each GPU.

Peaks are dense, with fp32 accumulation, in TFLOP/s; data sheets often give twice as much "with sparsity". Memory is
what the driver reports, rounded: GDDR6 cards with ECC lose a sixteenth. `link_gb` is the bandwidth from one GPU to the
others of its node, one way: NVLink if the board has it, otherwise PCI Express. `sustained` is not on any data sheet: it
is the share of the peak that large 16-bit matrix products reach for as long as a run lasts, which is low if the power
limit is low (T4: 70 W for 65 TFLOP/s). It is a property of the GPU, not of a training program: the losses of each
program are in `planning/software.py`. `SUSTAINED` says where each share comes from.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

GIB = 1 << 30
PCIE_GBPS = 64.0  # PCI Express 5.0 x16; a faster link is NVLink


@dataclass(frozen=True)
class Gpu:
    """One type of GPU. None: the GPU does not support it, or the value varies."""

    name: str
    pattern: str
    memory_gib: float | None
    fp32: float | None
    tf32: float | None
    fp16: float | None
    bf16: float | None
    fp8: float | None
    bandwidth_gb: float | None
    units: int | None
    """Streaming multiprocessors: the number of tiles of a matrix product that run at once."""
    watts: float | None
    link_gb: float | None
    sustained: float
    source: str

    @property
    def evidence(self) -> tuple[str, str]:
        """Where `sustained` comes from: measured, published, extrapolated or given, and the details."""
        return SUSTAINED.get(self.name) or ("given", self.source)

    @property
    def memory(self) -> int | None:
        """Bytes of memory."""
        return None if self.memory_gib is None else int(self.memory_gib * GIB)

    @property
    def link_transport(self) -> Literal["nvlink", "pcie"]:
        """What `link_gb` is: NVLink, or PCI Express, which has at most 64 GB/s (5.0 x16)."""
        return "nvlink" if (self.link_gb or 0.0) > PCIE_GBPS else "pcie"

    def peak(self, precision: str) -> float | None:
        """The peak in FLOP/s for a recipe's `train.precision`; fp32 products use tf32 if the GPU has it."""
        rates = {"fp32": self.tf32 or self.fp32, "bf16": self.bf16, "fp16": self.fp16, "fp8": self.fp8}
        rate = rates[precision]
        return None if rate is None else rate * 1e12


# fmt: off
# name, names that torch reports, GiB, fp32, tf32, fp16, bf16, fp8, GB/s, units, W, link GB/s, sustained, source
CATALOGUE = [
    Gpu("rtx2080", r"GeForce RTX 2080", 8, 10.1, None, 40.3, None, None, 448, 46, 215, 16, 0.97, "NVIDIA Turing architecture whitepaper"),
    Gpu("rtx2080ti", r"GeForce RTX 2080 Ti", 11, 13.4, None, 53.8, None, None, 616, 68, 250, 16, 0.89, "NVIDIA Turing architecture whitepaper"),
    Gpu("titan-rtx", r"TITAN RTX", 24, 16.3, None, 130.5, None, None, 672, 72, 280, 16, 0.7, "NVIDIA Turing architecture whitepaper, TITAN RTX user guide"),
    Gpu("rtx3090", r"GeForce RTX 3090", 24, 35.6, 35.6, 71, 71, None, 936, 82, 350, 32, 1.0, "NVIDIA Ampere GA102 whitepaper"),
    Gpu("rtx4090", r"GeForce RTX 4090", 24, 82.6, 82.6, 165.2, 165.2, 330.3, 1008, 128, 450, 32, 0.96, "NVIDIA Ada architecture whitepaper"),
    Gpu("t4", r"T4", 15, 8.1, None, 65, None, None, 320, 40, 70, 16, 0.37, "NVIDIA T4 data sheet"),
    Gpu("l4", r"L4", 22.5, 30.3, 60, 121, 121, 242.5, 300, 58, 72, 32, 0.47, "NVIDIA L4 data sheet"),
    Gpu("a10", r"A10", 22.5, 31.2, 62.5, 125, 125, None, 600, 72, 150, 32, 0.62, "NVIDIA A10 data sheet"),
    Gpu("a40", r"A40", 45, 37.4, 74.8, 149.7, 149.7, None, 696, 84, 300, 32, 0.82, "NVIDIA A40 data sheet"),
    Gpu("v100-16", r"V100-SXM2-16GB", 16, 15.7, None, 125, None, None, 900, 80, 300, 150, 0.74, "NVIDIA V100 data sheet, SXM2"),
    Gpu("v100-32", r"V100-SXM[23]-32GB", 32, 15.7, None, 125, None, None, 900, 80, 300, 150, 0.74, "NVIDIA V100 data sheet, SXM2"),
    Gpu("a100-40", r"A100-(SXM4|PCIE)-40GB", 40, 19.5, 156, 312, 312, None, 1555, 108, 400, 300, 0.86, "NVIDIA A100 data sheet"),
    Gpu("a100-80", r"A100[- ](SXM4-80GB|80GB PCIe)", 80, 19.5, 156, 312, 312, None, 2039, 108, 400, 300, 0.86, "NVIDIA A100 data sheet, SXM"),
    Gpu("h100-80", r"H100 80GB HBM3", 80, 67, 494, 989, 989, 1979, 3350, 132, 700, 450, 0.8, "NVIDIA H100 data sheet, SXM"),
    Gpu("h100-96", r"H100 96GB HBM2e", 94, 67, 494, 989, 989, 1979, 2400, 132, 500, 450, 0.62, "NVIDIA H100 data sheet, SXM; memory and 500 W as TorchTitan reports them"),
    Gpu("h100-pcie", r"H100 PCIe", 80, 51, 378, 756, 756, 1513, 2000, 114, 350, 64, 0.62, "NVIDIA H100 data sheet, PCIe"),
    Gpu("h200", r"H200", 141, 67, 494, 989, 989, 1979, 4800, 132, 700, 450, 0.78, "NVIDIA H200 data sheet, SXM"),
    Gpu("gh200-96", r"GH200 480GB", 96, 67, 494, 990, 990, 1979, 4000, 132, 900, 150, 0.83, "NVIDIA GH200 data sheet, 96 GB HBM3; link: apps.fz-juelich.de/jsc/hps/jupiter/configuration.html, 150 GB/s one way between two GPUs of a board of four"),
    Gpu("gh200-144", r"GH200 144G HBM3e", 144, 67, 494, 990, 990, 1979, 4900, 132, 900, 150, 0.83, "NVIDIA GH200 data sheet, 144 GB HBM3e; link: as gh200-96"),
    Gpu("b200", r"B200", 180, 75, 1125, 2250, 2250, 4500, 8000, 148, 1000, 900, 0.78, "NVIDIA HGX and DGX B200 data sheets, an eighth of a box"),
    Gpu("cpu", r"cpu", None, None, None, None, None, None, None, None, None, None, 0.8, "none: processors differ too much for one line"),
]
# fmt: on
_MAMF = "maximum achievable matmul FLOPS, github.com/stas00/ml-engineering, compute/accelerator"
# Products of 10,240 x 10,240 with torch, in bf16 if the GPU has it; "best": of five sizes, where only that is published.
_TORCH = "github.com/zzc0721/torch-performance-test-data"
# Where the sustained share of a GPU comes from. Extrapolated: by the watts that a TFLOP/s costs on the nearest GPU, or
# from a measurement that says nothing about a long run. No step of a training program was used.
SUSTAINED = {
    "h200": ("measured", "745 to 798 TFLOP/s in bf16 with torch 2.11"),
    "a100-40": ("published", f"267.9 of 312 TFLOP/s: {_MAMF}"),
    "a100-80": ("published", f"267.9 of 312 TFLOP/s: {_MAMF}"),
    "h100-80": ("published", f"792.1 of 989 TFLOP/s: {_MAMF}"),
    "gh200-96": ("published", f"821.0 of 989 TFLOP/s: {_MAMF}"),
    "gh200-144": ("published", f"821.0 of 989 TFLOP/s: {_MAMF}"),
    "b200": ("published", f"1745.0 of 2250 TFLOP/s: {_MAMF}"),
    "v100-16": ("published", "83 of 113 TFLOP/s on the PCIe board: Markidis et al., arXiv 1803.04014"),
    "v100-32": ("published", "83 of 113 TFLOP/s on the PCIe board: Markidis et al., arXiv 1803.04014"),
    "t4": ("published", "24 of 65 TFLOP/s at its 70 W: forums.developer.nvidia.com/t/264462"),
    "l4": ("published", f"56.9 of 121 TFLOP/s: {_TORCH}/issues/120"),
    "a40": ("published", f"122.3 of 149.7 TFLOP/s: {_TORCH}/issues/185"),
    "h100-pcie": ("published", f"471.8 of 756 TFLOP/s: {_TORCH}/issues/95"),
    "rtx2080": ("published", f"39.0 of 40.3 TFLOP/s, best: {_TORCH}, database.md"),
    "rtx2080ti": ("published", f"48.0 of 53.8 TFLOP/s: {_TORCH}/issues/181"),
    "rtx3090": ("published", f"76.3 of 71 TFLOP/s, best, above the data sheet's clock: {_TORCH}, database.md"),
    "rtx4090": ("published", f"158.5 of 165.2 TFLOP/s: {_TORCH}/issues/78"),
    "h100-96": (
        "extrapolated",
        "609 of 989 TFLOP/s at 500 W, between h100-pcie (472 at 350 W) and h100-80 (792 at 700 W)",
    ),
    "a10": ("extrapolated", "77.8 of 125 TFLOP/s in a product of 2.1 ms, the head of GPT2-XL in FASOP's layer profile"),
    "titan-rtx": (
        "extrapolated",
        f"280 W at the T4's 2.9 W per TFLOP/s; 40 to 66 TFLOP/s by size in {_TORCH}/issues/127",
    ),
    "cpu": ("extrapolated", "no measurement"),
}
ALIASES = {"v100": "v100-32", "a100": "a100-80", "h100": "h100-80", "gh200": "gh200-96"}


def by_device_name(name: str) -> Gpu | None:
    """The GPU with a torch device name such as `NVIDIA A100-SXM4-80GB`; None if it is not in the catalogue."""
    bare = re.sub(r"^(NVIDIA|Tesla)\s+", "", name.strip())
    return next((gpu for gpu in CATALOGUE if re.fullmatch(gpu.pattern, bare, re.IGNORECASE)), None)


def by_name(name: str) -> Gpu | None:
    """The GPU with a catalogue name such as `h100-80`, or with a device name; None if it is not in the catalogue."""
    key = ALIASES.get(name.lower(), name.lower())
    return next((gpu for gpu in CATALOGUE if gpu.name == key), None) or by_device_name(name)

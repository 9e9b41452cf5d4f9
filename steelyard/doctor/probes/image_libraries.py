"""Runs inside an image: prints the libraries that its torch needs and those that cannot be loaded, as one JSON object.

It is sent as text after `doctor/elf.py`, whose `read` it uses, so the image does not need Steelyard.
"""

import ctypes
import glob
import importlib.util
import json
import os
import re
import shutil
import sys
from pathlib import Path
from typing import Any

from steelyard.doctor.elf import read

FAMILIES = (
    r"lib(nccl|cudnn\w*|cupti|cudart|cublas|cublasLt|cufft|curand|cusolver|cusparse|cusparseLt|nvrtc|nvJitLink|cufile"
    r"|nvshmem\w*)\.so"
)


def wanted(folder: str) -> Any:
    """The sonames that torch's libraries need, with the search path of the library that needs them."""
    names: Any = {}
    for path in sorted(Path(folder, "lib").glob("*.so*")):
        library: Any = None if re.match(FAMILIES, path.name) else read(path)
        for name in library.needed if library else ():
            if re.match(FAMILIES, name):
                names.setdefault(name, library.search)
    return names


def loads(name: str, search: Any) -> bool:
    """Whether the library loads, from the search path or from the loader's defaults."""
    for path in [*(str(folder / name) for folder in search), name]:
        if path == name or Path(path).exists():
            try:
                ctypes.CDLL(path)
                return True
            except OSError:
                continue
    return False


def main() -> None:
    """Collect the facts and print them."""
    found = importlib.util.find_spec("torch")
    folder = str(Path(found.origin).parent) if found and found.origin else None
    names = wanted(folder) if folder else {}
    nvcc = shutil.which("nvcc") or next(iter(glob.glob("/usr/local/cuda/bin/nvcc")), None)
    home = os.environ.get("CUDA_HOME")
    if nvcc and not home and glob.glob(str(Path(nvcc).resolve().parent.parent / "include" / "cuda*.h")):
        home = str(Path(nvcc).resolve().parent.parent)  # Not for a wrapper script in /usr/local/bin.
    sys.stdout.write("\n" + json.dumps({
        "python": list(sys.version_info[:3]),
        "torch": folder,
        "wanted": sorted(names),
        "missing": sorted(name for name, search in names.items() if not loads(name, search)),
        "nvcc": nvcc,
        "cuda_home": home,
        "library_path": os.environ.get("LD_LIBRARY_PATH", ""),
    }) + "\n")  # fmt: skip
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()

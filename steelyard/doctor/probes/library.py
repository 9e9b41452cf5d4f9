"""Prints whether a library can be loaded here, and its version, as one JSON object."""

import ctypes
import json
import os
import sys
from typing import Any


def version(library: Any, family: str) -> Any:
    """The version that the library's own function returns; None for a family without such a function."""
    number = ctypes.c_int(0)
    if family == "nccl":
        library.ncclGetVersion(ctypes.byref(number))
        code = number.value
        return [code // 10000, code // 100 % 100, code % 100] if code >= 10000 else [code // 1000, code // 100 % 10]
    if family == "cudnn":
        library.cudnnGetVersion.restype = ctypes.c_size_t
        code = library.cudnnGetVersion()
        return [code // 10000, code // 100 % 100, code % 100] if code >= 90000 else [code // 1000, code // 100 % 10]
    if family == "cupti":
        library.cuptiGetVersion(ctypes.byref(number))
        return [number.value]
    return None


def main() -> None:
    """Load the library, read its version, print both."""
    path, family = sys.argv[1:3]
    try:
        library = ctypes.CDLL(path)
    except OSError as error:
        answer: Any = {"loads": False, "error": str(error)}
    else:
        answer = {"loads": True, "version": None}
        try:
            answer["version"] = version(library, family)
        except AttributeError as error:
            answer["error"] = str(error)
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()

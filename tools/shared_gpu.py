"""Several NCCL ranks on one GPU: a recent NCCL, and CUDA MPS so that kernels of all ranks run concurrently.

NCCL before 2.30 rejects two ranks on one GPU; later versions accept them with NCCL_MULTI_RANK_GPU_ENABLE=1. Without MPS
the ranks are time-sliced, which is correct but slow. With MPS each rank is limited to its share of the GPU, because a
collective whose kernels are not all resident at once never ends.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

SINCE = (2, 30)
OVERRIDE = "STEELYARD_NCCL"
ASK_VERSION = (
    "import ctypes, sys; number = ctypes.c_int(); "
    "ctypes.CDLL(sys.argv[1]).ncclGetVersion(ctypes.byref(number)); print(number.value)"
)
CONTROL = "nvidia-cuda-mps-control"
# Faster creation of communicators; the messages of the tests are tiny.
FAST_START = {"NCCL_NVLS_ENABLE": "0", "NCCL_MAX_NCHANNELS": "4"}


class CannotRun(Exception):
    """Why ranks cannot share a GPU here, and what to do about it."""

    def __init__(self, message: str, hint: str) -> None:
        super().__init__(message)
        self.hint = hint


def gpus() -> list[str]:
    """The names of the GPUs visible to this process, without creating a CUDA context in it."""
    if shutil.which("nvidia-smi") is None:
        raise CannotRun("nvidia-smi is not on the PATH: no NVIDIA driver is installed", "run on a machine with a GPU")
    done = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=60, check=False)
    if done.returncode:
        raise CannotRun(f"nvidia-smi fails: {(done.stdout + done.stderr).strip()}", "check the driver")
    found = [line for line in done.stdout.splitlines() if line.startswith("GPU ")]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        found = found[: len([each for each in visible.split(",") if each])]
    if not found:
        raise CannotRun("this process sees no GPU", "check nvidia-smi -L and CUDA_VISIBLE_DEVICES")
    can = "import torch; print(torch.cuda.is_available(), torch.version.cuda)"
    seen = subprocess.run([sys.executable, "-c", can], capture_output=True, text=True, timeout=300, check=False)
    if not seen.stdout.startswith("True"):
        last = (seen.stdout + seen.stderr).strip().splitlines()[-1:]
        raise CannotRun(f"torch cannot use the GPU: {' '.join(last)}", "make setup TORCH=auto, then steelyard doctor")
    return found


def nccl(given: str | None = None) -> tuple[Path, tuple[int, int, int]]:
    """An NCCL that lets ranks share a GPU: the given one, or else torch's."""
    named = given or os.environ.get(OVERRIDE)
    path = Path(named).resolve() if named else Path(sysconfig.get_path("purelib")) / "nvidia/nccl/lib/libnccl.so.2"
    hint = (
        f"pip download --no-deps nvidia-nccl-cu13, unpack the wheel, and pass nvidia/nccl/lib/libnccl.so.2 with --nccl "
        f"or {OVERRIDE}"
    )
    if not path.exists():
        raise CannotRun(f"there is no NCCL at {path}", hint)
    done = subprocess.run(
        [sys.executable, "-c", ASK_VERSION, str(path)], capture_output=True, text=True, timeout=60, check=False
    )
    if done.returncode:
        raise CannotRun(f"{path} cannot be loaded: {done.stderr.strip().splitlines()[-1]}", hint)
    number = int(done.stdout)
    release = number // 10000, number // 100 % 100, number % 100
    if release < SINCE:
        text = ".".join(map(str, release))
        raise CannotRun(f"ranks can share a GPU with NCCL 2.30 or later, but {path} is {text}", hint)
    return path, release


class Mps:
    """A private CUDA MPS daemon with its own folder, and the environment of its clients."""

    def __init__(self, ranks: int) -> None:
        self.share = 100 // ranks
        self.control = shutil.which(CONTROL) or shutil.which(CONTROL, path="/usr/local/nvidia/bin:/usr/sbin")
        self.folder: Path | None = None
        self.why_not = "" if self.control else f"{CONTROL} was not found: the ranks are time-sliced"

    @property
    def environment(self) -> dict[str, str]:
        """Variables of daemon and clients; empty if MPS does not run."""
        if self.folder is None:
            return {}
        return {
            "CUDA_MPS_PIPE_DIRECTORY": str(self.folder / "pipe"),
            "CUDA_MPS_LOG_DIRECTORY": str(self.folder / "log"),
            "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": str(self.share),
        }

    def start(self) -> None:
        """Start the daemon; if that fails, `why_not` has the reason."""
        if self.control is None:
            return
        self.folder = Path(tempfile.mkdtemp(prefix="steelyard-mps-"))
        for name in ("pipe", "log"):
            (self.folder / name).mkdir()
        problem = self._call("-d")
        if problem is None:
            self._call(request=f"set_default_active_thread_percentage {self.share}")
            return
        self.why_not = f"{CONTROL} does not start, the ranks are time-sliced: {problem}"
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder = None

    def stop(self) -> None:
        """Stop the daemon and its server with `quit`, or else kill it by its pid."""
        if self.folder is None:
            return
        with contextlib.suppress(OSError, ValueError):
            pid = int((self.folder / "pipe" / f"{CONTROL}.pid").read_text())
            if self._call(request="quit") is not None:
                os.kill(pid, signal.SIGKILL)
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder = None

    def _call(self, *words: str, request: str = "") -> str | None:
        """Call the control program. Returns the error, or None."""
        assert self.folder is not None
        clean = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
        output = self.folder / "said"
        try:
            with output.open("w") as out:  # Not a pipe: the daemon may keep it open forever.
                done = subprocess.run(
                    [str(self.control), *words],
                    input=request + "\n",
                    stdout=out,
                    stderr=subprocess.STDOUT,
                    text=True,
                    timeout=20,
                    env=clean | self.environment,
                    check=False,
                )
        except (OSError, subprocess.SubprocessError) as error:
            return str(error)
        return None if done.returncode == 0 else output.read_text().strip() or f"exit code {done.returncode}"


def environment(library: Path, mps: Mps) -> dict[str, str]:
    """The environment of ranks that share the first GPU; it must be set before they start."""
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    preloaded = [each for each in os.environ.get("LD_PRELOAD", "").split() if each != str(library)]
    preload = " ".join([str(library), *preloaded])
    shared = {"CUDA_VISIBLE_DEVICES": first, "NCCL_MULTI_RANK_GPU_ENABLE": "1", "LD_PRELOAD": preload}
    return FAST_START | shared | mps.environment

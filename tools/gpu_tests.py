"""Runs all tests that need a GPU: the tests marked `gpu`, and layouts over NCCL on 2 and 4 ranks.

    python tools/gpu_tests.py                              # make test-gpu
    python tools/gpu_tests.py --out gpu.json --minutes 9   # a part; the same command continues after it
    python tools/gpu_tests.py --device cpu --only "tensor*"  # the same program over gloo, without a GPU

The ranks share one GPU (tools/shared_gpu.py), or have one each if there are four. Every layout is compared with one
process on the same GPU (tests/parallel/gpu_cases.py). --out is JSON, written after every case:
{"machine", "seconds", "cases": [{"name", "kind", "ranks", "family", "layout", "precision", "compiled", "tolerance",
"difference", "state", "begun", "seconds", "error"}]}; a case of kind `tests` is a test file, with the number of passes.

Exit code: 0 all selected cases passed; 1 some failed; 2 it cannot run here; 3 some remain for the next call.
"""

from __future__ import annotations

import argparse
import datetime
import fnmatch
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE)]

import shared_gpu  # noqa: E402 - in this folder
from slices import Record, device, versions  # noqa: E402

FILES = (
    "tests/sizes/test_activations.py", "tests/model/test_modules.py", "tests/model/test_kernels.py",
    "tests/model/test_inference_kernels.py", "tests/evaluate/test_decode_graph.py",
    "tests/model/test_windowed_attention.py", "tests/model/test_experts.py", "tests/training/test_step_graph.py",
    "tests/training/test_kernels.py", "tests/training/test_fp8.py", "tests/training/test_small_state.py",
    "tests/training/test_bf16_gradients.py",
    "tests/sparsity/test_masked_kernels.py", "tests/sparsity/test_sparse_gemv.py",
    "tests/sparsity/test_patterns.py", "tests/parallel/test_activation_checkpoint.py",
)  # fmt: skip
PACKAGES = ("torch", "triton", "transformers")
LIMIT, COMPILED_LIMIT, FILE_LIMIT = 90, 240, 240  # seconds
FILE_SECONDS = 45
ERROR_CHARACTERS = 3000
MOST_FAILURES = 4


def main() -> int:
    """Run the remaining cases."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("gpu-tests.json"))
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument(
        "--minutes", type=float, default=float("inf"), help="time limit; cases that would exceed it are not started"
    )
    parser.add_argument("--only", nargs="*", metavar="PATTERN", help='names of cases, such as "tensor*" "*compiled"')
    parser.add_argument("--again", action="store_true", help="run cases again that failed or timed out")
    parser.add_argument(
        "--nccl", metavar="LIBNCCL", help=f"a libnccl.so.2 of 2.30 or later; also ${shared_gpu.OVERRIDE}"
    )
    parser.add_argument("--list", action="store_true", help="print the names of the cases")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # So that MPS and the ranks are stopped.
    end = time.monotonic() + 60 * options.minutes
    try:
        place = prepared(options)
    except shared_gpu.CannotRun as reason:
        print(f"cannot run: {reason}\nhint: {reason.hint}", file=sys.stderr)
        return 2
    from tests.parallel import gpu_cases

    layouts = {case.name: case for case in gpu_cases.cases()}
    names = [*(FILES if options.device == "cuda" else ()), *layouts]
    if options.only:
        names = [name for name in names if any(fnmatch.fnmatch(name, pattern) for pattern in options.only)]
    if options.list or not names:
        print("\n".join(names) or f"no case matches {' '.join(options.only)}")
        return 0 if names else 2
    record = Record(options.out, "cases", machine=place.machine)
    try:
        for name in names:
            if record.is_due(name, options.again):
                if name in layouts:
                    place.run(layouts[name], record, end)
                else:
                    run_file(name, record, end)
    finally:
        place.close()
    return summary(record, names)


def prepared(options: argparse.Namespace) -> Place:
    """Check the machine, and return where the ranks run."""
    machine: dict[str, Any] = {"device": device(), "versions": versions(*PACKAGES)}
    if options.device == "cpu" or options.list:
        return Place("cpu", machine | {"device": "cpu"})
    gpus = shared_gpu.gpus()
    if len(gpus) >= 4:
        return Place("cuda", machine | {"sharing": "a GPU for each rank"})
    try:
        library, number = shared_gpu.nccl(options.nccl)
    except shared_gpu.CannotRun as reason:
        print(f"layouts are skipped: {reason}\nhint: {reason.hint}", file=sys.stderr)
        return Place("cuda", machine, why_not=str(reason))
    return Place("cuda", machine | {"nccl": ".".join(map(str, number))}, library)


class Place:
    """The pool of ranks. It starts with the first layout, and is restarted together with MPS after a failure."""

    def __init__(self, kind: str, machine: dict[str, Any], library: Path | None = None, why_not: str = "") -> None:
        self.kind, self.machine, self.library, self.why_not = kind, machine, library, why_not
        self.mps = shared_gpu.Mps(ranks=4)
        self.layouts: Any = None
        self.failures = 0
        """Consecutive errors. After `MOST_FAILURES` of them no more layouts run, to save time on a broken machine."""
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def open(self) -> None:
        """Start MPS and create the folder of all runs. The ranks start with their first job."""
        from tests.conftest import TINY, write_tokens
        from tests.parallel.conftest import Layouts
        from tests.parallel.ranks import Ranks

        self._folder = tempfile.TemporaryDirectory(prefix="steelyard-gpu-tests-")
        folder = Path(self._folder.name)
        write_tokens(folder / "tokens_text_document")
        (folder / "tiny.toml").write_text(TINY)
        os.environ.update({"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"})
        # All ranks share a cache of compiled layers; each rank compiles on its own cores.
        os.environ.update({"TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"), "TORCHINDUCTOR_COMPILE_THREADS": "4"})
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
        self._share()
        # CUDA does not work after a fork. A crashed rank makes MPS unusable, so there are no retries.
        ranks = Ranks(folder) if self.kind == "cpu" else Ranks(folder, "spawn", retries=0)
        self.layouts = Layouts(folder, ranks, [f"train.device={self.kind}", "parallel.timeout_minutes=3"])

    def _share(self) -> None:
        if self.library is None:
            return
        self.mps.start()
        os.environ.update(shared_gpu.environment(self.library, self.mps))
        shared = f"the ranks share one GPU by MPS, {self.mps.share}% each" if self.mps.folder else self.mps.why_not
        self.machine["sharing"] = shared

    def run(self, case: Any, record: Record, end: float) -> None:
        """Run a case, if there is time for it, and record the result."""
        from tests.parallel.gpu_cases import compared

        entry = {"name": case.name, **case.described}
        why_not = "a CPU has no fp8" if (self.kind, case.precision) == ("cpu", "fp8") else self.why_not
        if why_not:
            record.put(entry | {"state": f"left out: {why_not}"})
            return
        if not fits(case.name, case.seconds, end):
            return
        began = time.monotonic()
        entry |= {"begun": now()}
        record.put(entry | {"state": "running"})
        if self.layouts is None:
            self.open()
        limit = COMPILED_LIMIT if case.compiled else LIMIT
        self.layouts.ranks.seconds = min(limit, end - began)
        try:
            found = compared(case, self.layouts)
            entry |= {"difference": found, "state": "passed" if found < case.tolerance else "failed"}
        except Exception as error:
            is_cut_short = time.monotonic() > end - 1
            entry |= {"state": "running" if is_cut_short else "failed", "error": str(error)[-ERROR_CHARACTERS:]}
            self.failures += 1
            if self.failures == MOST_FAILURES:
                self.why_not = f"{MOST_FAILURES} cases in a row ended with an error"
            self._recover()
        else:
            self.failures = 0
        report(entry | {"seconds": round(time.monotonic() - began, 1)}, record)

    def _recover(self) -> None:
        self.layouts.ranks.close()
        if self.mps.folder is not None:
            self.mps.stop()
            self._share()

    def close(self) -> None:
        """Stop ranks and MPS, and remove the folder."""
        if self.layouts is not None:
            self.layouts.ranks.close(grace=10.0)
        self.mps.stop()
        if self._folder is not None:
            self._folder.cleanup()


def run_file(name: str, record: Record, end: float) -> None:
    """Run the tests of a file that are marked `gpu` in a separate process."""
    if not fits(name, FILE_SECONDS, end):
        return
    began, entry = time.monotonic(), {"name": name, "kind": "tests", "begun": now()}
    record.put(entry | {"state": "running"})
    with tempfile.TemporaryDirectory() as folder:
        found = Path(folder) / "found.xml"
        words = [sys.executable, "-m", "pytest", "-m", "gpu", name, "-p", "no:cacheprovider", f"--junitxml={found}"]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        try:
            done = subprocess.run(words, cwd=HERE.parent, env=environment, timeout=FILE_LIMIT, check=False)
            entry |= {"state": "passed" if done.returncode == 0 else "failed", **counted(found)}
        except subprocess.TimeoutExpired:
            entry |= {"state": "out of time"}
    report(entry | {"seconds": round(time.monotonic() - began, 1)}, record)


def counted(path: Path) -> dict[str, Any]:
    """The numbers of passed and skipped tests of a report, and the messages of failed ones."""
    if not path.exists():
        return {"passed": 0, "error": "pytest wrote no report"}
    tests = list(ElementTree.parse(path).iter("testcase"))
    skipped = [test for test in tests if test.find("skipped") is not None]
    failed = {
        test.get("name"): (broken.get("message") or "")[:ERROR_CHARACTERS]
        for test in tests
        for broken in (*test.findall("failure"), *test.findall("error"))
    }
    counts = {"passed": len(tests) - len(skipped) - len(failed), "skipped": len(skipped)}
    return counts | ({"error": failed} if failed else {})


def fits(name: str, seconds: float, end: float) -> bool:
    """Whether a case of `seconds` would end in time."""
    if time.monotonic() + seconds <= end:
        return True
    print(f"{name}: takes about {seconds:.0f} s; left for the next call", flush=True)
    return False


def report(entry: dict[str, Any], record: Record) -> None:
    """Write an entry and print its line."""
    record.put(entry)
    numbers = f"{entry['difference']:.1e} of {entry['tolerance']:.0e}" if "difference" in entry else ""
    if entry["kind"] == "tests":
        numbers = f"{entry.get('passed', 0)} tests"
    print(f"{entry['state']:8} {entry['name']:44} {numbers:20} {entry['seconds']:6.1f} s", flush=True)
    if error := entry.get("error"):
        messages = error.items() if isinstance(error, dict) else [("", error[-ERROR_CHARACTERS // 3 :])]
        print("\n".join(f"    {name} {text}" for name, text in messages), flush=True)


def summary(record: Record, names: list[str]) -> int:
    """Print the number of selected cases in each state, and return the exit code."""
    entries = [each for each in record.known["cases"] if each["name"] in names]
    record.known["seconds"] = round(sum(each.get("seconds", 0) for each in record.known["cases"]), 1)
    if entries:
        record.put(entries[-1])
    failed = [each for each in entries if each["state"] in ("failed", "out of time")]
    left_out = {each["state"] for each in entries if each["state"].startswith("left out")}
    passed = sum(each["state"] == "passed" for each in entries)
    left = len(names) - passed - len(failed)
    print(f"{passed} passed, {len(failed)} failed, {left} left; {record.known['seconds']} s in total: {record.path}")
    for each in sorted(left_out):
        print(each)
    return 1 if failed else 2 if left_out else 3 if left else 0


def now() -> str:
    """The current time in UTC, for a record."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


if __name__ == "__main__":
    sys.exit(main())

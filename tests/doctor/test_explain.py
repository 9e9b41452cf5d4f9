import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from steelyard.core.errors import UserError
from steelyard.doctor import explain
from steelyard.observe.known_errors import KNOWN, explain_line

# Messages as people meet them, and the entry that must answer each; True: it may be ignored.
MESSAGES = [
    ("ImportError: libcudnn.so.8: cannot open shared object file: No such file or directory", "cudnn-missing", False),
    ("ImportError: libcupti.so.12: cannot open shared object file: No such file or directory", "cupti-missing", False),
    ("ImportError: libnccl.so.2: cannot open shared object file: No such file or directory", "nccl-missing", False),
    ("FileNotFoundError: [Errno 2] No such file or directory: '/data/apps/cuda/12.4/bin/nvcc'", "nvcc-missing", False),
    ("torch.AcceleratorError: CUDA error: initialization error", "cuda-initialization", False),
    ("RuntimeError: Can't disable Kineto profiler when it's not running", "kineto-not-running", True),
    ("ImportError: cannot import name 'helpers' from 'megatron.data' (Megatron-DeepSpeed/megatron/data/__init__.py)",
     "megatron-helpers", False),
    ("> compiling and loading fused kernels ...", "fused-kernels", False),
    ("  warnings.warn(", "warning", True),
    ("ImportError: Failed to load PyTorch C extensions:", "torch-c-extension", False),
    ("bash: torchrun: command not found", "torchrun-missing", False),
    ("ModuleNotFoundError: No module named 'transformer_engine'", "transformer-engine-missing", False),
    ("ModuleNotFoundError: No module named 'apex'", "apex-missing", False),
    ("ModuleNotFoundError: No module named 'flashattn_hopper'", "flash-attn-missing", False),
    ("ModuleNotFoundError: No module named 'torch'", "torch-missing", False),
    ("ImportError: libcuda.so.1: cannot open shared object file: No such file", "driver-library-missing", False),
    ("ImportError: libmpi.so.40: cannot open shared object file: No such file", "mpi-library-missing", False),
    ("OSError: libfoo-2.so.1: cannot open shared object file: No such file or directory", "library-missing", False),
    ("ImportError: libc.so.6: version `GLIBC_2.28' not found (required by /x/libc10.so)", "library-too-new", False),
    ("ImportError: /x/flash_attn_2_cuda.cpython-311.so: undefined symbol: _ZN3c105ErrorC2E", "undefined-symbol", False),
    ("fatal error: Python.h: No such file or directory", "python-header", False),
    ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB", "gpu-memory", False),
    ("RuntimeError: CUDA error: no kernel image is available for execution on the device", "no-kernel-image", False),
    ("RuntimeError: The NVIDIA driver on your system is too old (found version 11040).", "driver-too-old", False),
    ("Failed to initialize NVML: Driver/library version mismatch", "driver-mismatch", False),
    ("RuntimeError: No CUDA GPUs are available", "driver-unreachable", False),
    ("torch.distributed.DistNetworkError: The server socket has failed to listen: EADDRINUSE, Address already in use",
     "address-in-use", False),
    ("[rank3]:[E] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=12)", "watchdog", False),
    ("torch.distributed.DistBackendError: NCCL error in: x.cpp:1, unhandled system error (run with NCCL_DEBUG=INFO)",
     "nccl-system", False),
    ("[enforce fail] Gloo connectFullMesh failed with timeout", "gloo-connect", False),
    ("RuntimeError: [1] Connection closed by peer [10.0.0.2]:4242", "lost-peer", False),
    ("RuntimeError: DataLoader worker (pid 7) is killed by signal: Bus error.", "bus-error", False),
    ("slurmstepd: error: *** JOB 17 ON n060 CANCELLED AT 2026-01-01 DUE TO TIME LIMIT ***", "slurm-time", False),
    ("slurmstepd: error: Detected 1 oom-kill event(s) in StepId=17.0", "oom-kill", False),
    ("OSError: [Errno 28] No space left on device", "disk-full", False),
    ("There are not enough slots available in the system to satisfy the 16 slots", "mpi-slots", False),
    ("b: Permission denied (publickey,password).", "ssh-denied", False),
    ("Failed to find C compiler. Please specify via CC environment variable", "no-compiler", False),
    ("/x/y.py:3: FutureWarning: `torch.cuda.amp.autocast(args...)` is deprecated.", "warning", True),
    ("Setting OMP_NUM_THREADS environment variable for each process to be 1 in default", "omp-threads", True),
    ("ModuleNotFoundError: No module named 'torch._C._distributed_c10d'", "torch-c-missing", False),
    ("OSError: CUDA_HOME environment variable is not set. Please set it.", "cuda-home-unset", False),
    ("srun.sh: line 3: mpirun: command not found", "mpirun-missing", False),
    ("CUDA error: the provided PTX was compiled with an unsupported toolchain.", "triton-ptx", False),
    ("ptxas /tmp/x.ptx, line 5; fatal : Unsupported .version 8.7; current version is '8.4'", "triton-ptx", False),
    ("RuntimeError: Cannot re-initialize CUDA in forked subprocess.", "cuda-init-fork", False),
    ("RuntimeError: CUDA error: uncorrectable ECC error encountered", "gpu-ecc", False),
    ("kernel: NVRM: Xid (PCI:0000:17:00): 79, pid=1, GPU has fallen off the bus.", "gpu-lost", False),
    ("RuntimeError: CUDA error: an illegal memory access was encountered", "illegal-access", False),
    ("RuntimeError: CUDA error: misaligned address", "illegal-access", False),
    ("RuntimeError: CUDA error: device-side assert triggered", "device-assert", False),
    ("RuntimeError: CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`", "cublas", False),
    ("RuntimeError: cuDNN version incompatibility: PyTorch was compiled against (9, 10, 2)", "cudnn-mismatch", False),
    ("ncclUnhandledCudaError: Call to CUDA function failed.", "nccl-cuda", False),
    ("NCCL error in: x.cpp:9, remote process exited or there was a network error", "nccl-remote", False),
    ("n060:1:1 [0] NCCL WARN Bootstrap : no socket interface found", "nccl-interface", False),
    ("NCCL WARN Call to ibv_reg_mr failed with error Cannot allocate memory", "ib-memory", False),
    ("The client socket has timed out after 600000ms while trying to connect to (n060, 29500)", "store-timeout", False),
    ("Timed out after 601 seconds waiting for clients. 7/8 clients joined.", "store-timeout", False),
    ("srun: error: *** STEP 17.0 ON n060 CANCELLED AT 2026-01-01 DUE TO PREEMPTION ***", "slurm-preempted", False),
    ("slurmstepd: error: *** JOB 17 ON n1 CANCELLED AT 2026-01-01 DUE TO NODE FAILURE ***", "slurm-node-failed", False),
    ("kernel: Out of memory: Killed process 4242 (python)", "oom-killed", False),
    ("slurmstepd: error: Exceeded job memory limit", "memory-limit", False),
    ("sbatch: error: Batch job submission failed: Requested node configuration is not available", "slurm-gres", False),
    ("sbatch: error: Invalid generic resource (gres) specification", "slurm-gres", False),
    ("mpirun has detected an attempt to run as root.", "mpi-root", False),
    ("Host key verification failed.", "ssh-key", False),
    ("OSError: [Errno 122] Disk quota exceeded", "disk-full", False),
    ("OSError: [Errno 24] Too many open files", "open-files", False),
    ("OSError: [Errno 30] Read-only file system: '/usr/lib/x'", "read-only", False),
    ("/bin/sh: line 1: 77 Illegal instruction (core dumped) python", "illegal-instruction", False),
    ("RuntimeError: unable to write to file </torch_17_42>", "bus-error", False),
    ("NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.", "driver-unreachable", False),
    ("RuntimeError: Found no NVIDIA driver on your system.", "driver-unreachable", False),
    ("CUDA driver version is insufficient for CUDA runtime version", "driver-too-old", False),
    ("NVIDIA H200 with CUDA capability sm_90 is not compatible with the current PyTorch installation.",
     "no-kernel-image", False),
    ("WARNING: CUPTI initialization failed - CUDA profiler activities will be missing", "kineto-cupti", True),
    ("INFO: External init callback must run in same thread as registerClient (1 != 2)", "nvtx-annotation", True),
    ("[rank0]: using GPU 0 as device used by this process is currently unknown.", "barrier-device", True),
    ("Warning: destroy_process_group() was not called before program exit", "destroy-process-group", True),
    ("The hostname of the client socket cannot be retrieved. err=-3", "hostname-socket", True),
    ('A process has executed an operation involving a call to the "fork()" system call', "ibv-fork", True),
    ("RuntimeError: Error building extension 'scaled_upper_triang_masked_softmax_cuda'", "extension-build", False),
    ("nvcc fatal   : Unsupported gpu architecture 'compute_89'", "extension-build", False),
    ("ninja: build stopped: subcommand failed.", "extension-build", False),
    ("RuntimeError: The detected CUDA version (12.4) mismatches the version that was used to compile PyTorch (11.8).",
     "cuda-mismatch", False),
    ("RuntimeError: Cuda extensions are being compiled with a version of Cuda that does not match",
     "cuda-mismatch", False),
    ("RuntimeError: Ninja is required to load C++ extensions", "ninja-missing", False),
    ("fatal error: cudnn.h: No such file or directory", "cuda-header", False),
    ("fatal error: cuda_runtime_api.h: No such file or directory", "cuda-header", False),
    ("ModuleNotFoundError: No module named 'deepspeed'", "package-missing", False),
    ("/usr/bin/python3: No module named torch.distributed.run", "package-missing", False),
    ("A module that was compiled using NumPy 1.x cannot be run in", "numpy-2", False),
    ("RuntimeError: sequence parallelism requires setting the environment variable CUDA_DEVICE_MAX_CONNECTIONS to 1",
     "device-connections", False),
    ("/var/spool/slurmd/job17/slurm_script: line 9: module: command not found", "module-command", False),
    ("bash: enroot: command not found", "program-missing", False),
    ("huggingface_hub.errors.HfHubHTTPError: 401 Client Error: Unauthorized for url", "hub-denied", False),
    ("sbatch: error: Batch job submission failed: Invalid account or account/partition combination specified",
     "slurm-account", False),
    ("srun: error: Unable to create step for job 4879: Job/step already completing or completed",
     "slurm-step-over", False),
    ("FATAL:   could not open image /x/py3.sif: failed to retrieve path for /x/py3.sif: lstat /x/py3.sif: no such file",
     "image-missing", False),
    ("TensorFlow installation not found - running with reduced feature set.", "tensorboard-tf", True),
    ("Error: container-init binary not found on the host: stat /usr/libexec/podman/catatonit: no such file",
     "container-init", False),
    ("Error: crun: setrlimit `RLIMIT_NOFILE`: Operation not permitted: OCI permission denied",
     "container-limits", False),
    ("Error: OCI runtime error: crun: cgroups in hybrid mode not supported, drop all controllers from cgroupv2",
     "container-cgroups", False),
    ("Error: statfs /dev/mqueue: no such file or directory", "container-mqueue", False),
    ('docker: Error response from daemon: could not select device driver "" with capabilities: [[gpu]].',
     "docker-gpus", False),
    ("Error: setting up CDI devices: unresolvable CDI devices nvidia.com/gpu=all", "podman-gpus", False),
    ("Cannot connect to the Docker daemon at unix:///var/run/docker.sock. Is the docker daemon running?",
     "docker-daemon", False),
    ("Error: initializing source docker://localhost/steelyard:cpu: pinging container registry localhost",
     "image-not-given", False),
]  # fmt: skip
NOT_ERRORS = [
    " iteration       30/      50 | lm loss: 1.017721E+01 | number of nan iterations:   0 |",
    "[Rank 0] (after 20 iterations) memory (MB) | allocated: 1570.77001953125",
    "step 10  loss 3.2  grad_norm 1.0",
    "the helpers of megatron are there",
    "kernel: torch.compile is on",
    ">>> done with compiling and loading fused kernels. Compilation time: 3.531 seconds",
    ">>> done with dataset index builder. Compilation time: 0.040 seconds",
    "ninja: no work to do.",
]
# What Megatron says while it starts, in order.
COMPILING = """> setting tensorboard ...
> initializing torch distributed ...
> compiling dataset index builder ...
make: Nothing to be done for 'default'.
>>> done with dataset index builder. Compilation time: 0.040 seconds
> compiling and loading fused kernels ...
Detected CUDA files, patching ldflags
Emitting ninja build file /x/megatron/fused_kernels/build/build.ninja...
Building extension module scaled_upper_triang_masked_softmax_cuda...
"""
COMPILED = """ninja: no work to do.
Loading extension module scaled_upper_triang_masked_softmax_cuda...
>>> done with compiling and loading fused kernels. Compilation time: 3.531 seconds
time to initialize megatron (seconds): 9.2
 iteration       10/      50 | elapsed time per iteration (ms): 1423.8 | lm loss: 1.017721E+01 |
"""


@pytest.mark.parametrize(("message", "name", "harmless"), MESSAGES, ids=[name for _, name, _ in MESSAGES])
def test_a_message_is_recognised_and_answered(message, name, harmless):
    for line in (message, f"2026-11-15 12:00:00 [rank 3] {message}" if "warnings.warn" not in message else message):
        explained = explain_line(line)
        assert explained is not None
        assert (explained.name, explained.harmless) == (name, harmless)
        assert explained.meaning
        assert explained.hint
        assert "{" not in explained.meaning + explained.hint


@pytest.mark.parametrize("line", NOT_ERRORS)
def test_a_line_that_is_no_error_is_not_taken_for_one(line):
    assert explain_line(line) is None


def names_of(reported: explain.LogReport) -> list[tuple[str, int]]:
    return [(hit.explained.name, hit.line) for hit in reported.known.values()]


def test_kernels_that_were_compiled_are_no_error_and_those_that_were_not_are(tmp_path):
    log = tmp_path / "n060.out"
    healthy = COMPILING + COMPILED
    failed = "RuntimeError: Error building extension 'scaled_masked_softmax_cuda'\n"
    for text, found in (
        (healthy, []),
        (COMPILING, [("fused-kernels", 6)]),  # It hangs there.
        (COMPILING + failed, [("extension-build", 10)]),
        (COMPILING + healthy, []),  # Killed, and started again.
        (healthy + healthy, []),
        (healthy + COMPILING, [("fused-kernels", 20)]),
    ):
        log.write_text(text)
        assert names_of(explain.explain([str(log)])) == found
    log.write_text(COMPILING)
    (tmp_path / "n061.out").write_text(healthy)
    assert names_of(explain.explain([str(log), str(tmp_path / "n061.out")])) == [("fused-kernels", 6)]
    log.write_text(healthy)
    assert explain.as_text(explain.explain([str(log)])) == "no errors found"


def test_the_missing_library_is_named_in_the_answer():
    explained = explain_line(MESSAGES[0][0])
    assert explained is not None
    assert "torch needs cuDNN as libcudnn.so.8," in explained.meaning


def test_every_hint_is_a_part_of_what_its_pattern_finds():
    """A substring that its own message lacks would hide the message."""
    for known in KNOWN:
        matching = [message for message, name, _ in MESSAGES if name == known.name]
        for message in matching:
            assert any(part in message for part in known.alternatives), known.name
            assert re.search(known.pattern, message)
        assert matching, f"{known.name} needs a message in this file"
    assert len({known.name for known in KNOWN}) == len(KNOWN)


def test_a_log_is_told_by_first_line_and_count_with_harmless_ones_last(tmp_path):
    log = tmp_path / "n060.err"
    lines = ["fine", *[MESSAGES[5][0]] * 3, "fine", *[MESSAGES[0][0]] * 2, "ValueError: something of its own", "fine"]
    log.write_text("\n".join(lines))
    reported = explain.as_result(explain.explain([str(log)]))
    assert [(one["name"], one["line"], one["count"], one["harmless"]) for one in reported["known"]] == [
        ("cudnn-missing", 6, 2, False),
        ("kineto-not-running", 2, 3, True),
    ]
    text = explain.as_text(explain.explain([str(log)]))
    assert text.index("cudnn") < text.index("of its own") < text.index("Kineto")
    assert reported["unknown"] == [{"file": str(log), "line": 8, "text": "ValueError: something of its own"}]


def test_lines_are_numbered_across_blocks_and_very_long_lines(tmp_path, monkeypatch):
    monkeypatch.setattr(explain, "BLOCK", 3000)
    log = tmp_path / "log"
    long = "x" * 5000 + " OSError: [Errno 28] No space left on device " + "y" * 5000
    log.write_text("\n".join(["a" * 70] * 100 + [long] + ["b" * 30] * 100 + [MESSAGES[2][0]]))
    reported = explain.explain([str(log)])
    found = {hit.explained.name: hit.line for hit in reported.known.values()}
    assert found == {"disk-full": 101, "nccl-missing": 202}


def test_secrets_and_what_would_steer_a_terminal_are_not_repeated(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_abcdefghijklmnopqrstuvwxyz")
    log = tmp_path / "log"
    log.write_text("\x1b[31mOSError: No space left on device hf_abcdefghijklmnopqrstuvwxyz\x07\n")
    text = explain.as_text(explain.explain([str(log)]))
    assert "hf_abc" not in text
    assert "\x1b" not in text


def test_an_answer_that_names_what_the_log_names_is_clean_too(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_abcdefghijklmnopqrstuvwxyz")
    log = tmp_path / "log\x1b[2J"
    log.write_text("version `A' not found (required by \x1b]0;x\x07hf_abcdefghijklmnopqrstuvwxyz)\n")
    reported = explain.explain([str(log)])
    assert [hit.explained.name for hit in reported.known.values()] == ["library-too-new"]
    for text in (explain.as_text(reported), json.dumps(explain.as_result(reported), ensure_ascii=False)):
        assert "hf_abc" not in text
        assert not {"\x1b", "\x07"} & set(text)
        assert "\\u00" not in text


def test_a_log_that_names_ever_new_things_is_kept_short(tmp_path):
    log = tmp_path / "log"
    names = ("".join(chr(97 + int(digit)) for digit in str(number)) for number in range(1000))
    log.write_text("".join(f"lib{name}.so: cannot open shared object file\n" for name in names))
    reported = explain.explain([str(log)])
    assert len(reported.known) == explain.KNOWN_KEPT
    assert sum(hit.count for hit in reported.known.values()) == 1000


@pytest.mark.timeout(300)
def test_a_hostile_line_is_not_searched_in_quadratic_time(tmp_path):
    log = tmp_path / "log"
    log.write_text(("cannot open shared object " + "lib" * 100_000 + "\n") * 2)
    assert not explain.explain([str(log)]).known


def test_a_run_folder_is_told_by_its_logs(tmp_path):
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "a.err").write_text(MESSAGES[0][0] + "\n")
    (tmp_path / "logs" / "folder.log").mkdir()
    os.mkfifo(tmp_path / "logs" / "pipe.log")
    (tmp_path / "logs" / "a.gpu").write_text(MESSAGES[1][0] + "\n")
    assert [hit.explained.name for hit in explain.explain([str(tmp_path)]).known.values()] == ["cudnn-missing"]
    with pytest.raises(UserError, match="there is no log"):
        explain.explain([str(tmp_path / "nowhere")])
    with pytest.raises(UserError, match="without logs"):
        explain.explain([str(tmp_path / "logs")])


@pytest.mark.slow
def test_a_log_of_a_gibibyte_is_read_in_bounded_memory(tmp_path):
    """Through a pipe, so that no disk is needed; the errors stand at its end."""
    maker = (
        "import sys\nline = ' iteration %8d/   50000 | consumed samples: %d | lm loss: %.6E | grad norm: %.3f |\\n'\n"
        "block = ''.join(line % (i, 64 * i, 1 / (i + 1), i / 7) for i in range(12000)).encode()\nwritten = 0\n"
        "while written < 1 << 30:\n    written += sys.stdout.buffer.write(block)\n"
        "sys.stdout.buffer.write(b'ImportError: libnccl.so.2: cannot open shared object file\\n')"
    )
    reader = (
        "import json, pathlib, re\nfrom steelyard.doctor import explain\n"
        "told = explain.as_result(explain.explain(['-']))\n"
        "status = pathlib.Path('/proc/self/status').read_text()\n"
        "told['peak'] = int(re.search(r'VmHWM:\\s*(\\d+)', status)[1])\nprint(json.dumps(told))"
    )
    root = str(Path(__file__).parents[2])
    made = subprocess.Popen([sys.executable, "-c", maker], stdout=subprocess.PIPE)
    done = subprocess.run(
        [sys.executable, "-c", reader], stdin=made.stdout, capture_output=True, text=True, timeout=600, cwd=root
    )
    assert made.wait(timeout=150) == 0
    reported = json.loads(done.stdout)
    assert [one["name"] for one in reported["known"]] == ["nccl-missing"]
    assert reported["bytes_read"] > 1 << 30
    assert reported["peak"] < 100 << 10, reported["peak"]

"""Errors by their messages: what each means, what to do, and whether it may be ignored.

The first entry that fits a line answers it, so particular ones stand before general ones. `hints` are plain pieces of
the message, of which it holds at least one: looking for them is many times faster than matching `pattern`, which
decides. `{name}` in the words is filled from the pattern's groups.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class Known:
    """One message, answered."""

    name: str
    substrings: str
    """Of which a line has at least one, between bars; cheaper to look for than the pattern."""
    pattern: str
    meaning: str
    hint: str
    harmless: bool = False
    over: str = ""
    """Pieces of later lines, between bars, after which the message means nothing: what it announces came to its end."""

    @cached_property
    def alternatives(self) -> tuple[str, ...]:
        """The substrings, one by one."""
        return tuple(self.substrings.split("|"))

    @cached_property
    def compiled(self) -> re.Pattern[str]:
        """The pattern, compiled once."""
        return re.compile(self.pattern)


@dataclass(frozen=True)
class Explained:
    """A line of a log, answered."""

    name: str
    meaning: str
    hint: str
    harmless: bool


# Bounded, so that a hostile line costs no more than a long one.
REST = r"[\w+.-]{0,80}\.so[.\d]{0,20}): cannot open shared object file"
SONAME = rf"(?P<library>lib{REST}"
HOST_MEMORY = "the host's memory was full, and the kernel or the scheduler ended a process."
HOST_MEMORY_MEND = "ask for more memory (--mem), or use fewer workers; dmesg names the process."
KNOWN = (
    # Libraries that the loader does not find
    Known("cudnn-missing", "cannot open shared object", rf"(?P<library>libcudnn{REST}",
          "torch asks for cuDNN by the name {library}, and no folder that the loader searches has a file of that name; often it is there as {library}.x.y, or in a conda or pip folder.",
          "steelyard doctor --fix links the right file under that name; for a read-only image steelyard doctor --container IMAGE."),
    Known("cupti-missing", "cannot open shared object", rf"(?P<library>libcupti{REST}",
          "torch asks for CUPTI, the profiling library, by the name {library}; CUDA keeps it in extras/CUPTI/lib64, Nsight in its own folders, where the loader does not look.",
          "steelyard doctor --fix links it; for a read-only image steelyard doctor --container IMAGE; or pip install nvidia-cuda-cupti-cu12 (CUDA 13: nvidia-cuda-cupti) beside torch."),
    Known("nccl-missing", "cannot open shared object", rf"(?P<library>libnccl{REST}",
          "torch asks for NCCL by the name {library}; pip installs it in site-packages/nvidia/nccl/lib, which another Python or a container does not search.",
          "steelyard doctor --fix links it; for a read-only image steelyard doctor --container IMAGE binds it in; or pip install nvidia-nccl-cu12 (or cu13) beside torch."),
    Known("driver-library-missing", "libcuda.so", r"libcuda\.so(\.1)?: cannot open shared object file",
          "the driver's own library is not visible: there is no NVIDIA driver here, or the container was started without it.",
          "apptainer: --nv; docker: --gpus all; podman: --device nvidia.com/gpu=all; on the host: install the driver."),
    Known("mpi-library-missing", "libmpi", r"libmpi\S*\.so\S*: cannot open shared object file",
          "something was built against an MPI whose library is not on the loader's path.",
          "load the MPI module that it was built with; Steelyard itself needs no MPI library, only mpirun."),
    Known("library-missing", "cannot open shared object", SONAME,
          "the loader finds no file named {library} in any folder it searches.",
          "steelyard doctor says who asks for it; find it (find / -name '{library}*') and put its folder on LD_LIBRARY_PATH."),
    Known("library-too-new", "not found (required by", r"version [`'](?P<version>[\w.]+)' not found \(required by (?P<by>[^)]+)\)",
          "{by} was built on a newer system: this one's C or C++ library lacks {version}. An old library of conda's or of a module may also come first.",
          "take foreign folders off LD_LIBRARY_PATH; on an old system use containers/steelyard.def or containers/Dockerfile."),
    Known("undefined-symbol", "undefined symbol", r"(?P<file>\S+\.so\S*): undefined symbol: (?P<symbol>\S+)",
          "{file} was built for another version of torch or CUDA than the one that is loaded.",
          "build it again for this torch, or uninstall it (flash-attn, apex and transformer_engine are not needed); for libnvJitLink, libcusparse and libcublas take the CUDA folder off LD_LIBRARY_PATH."),
    Known("torch-c-extension", "PyTorch C extensions", r"Failed to load PyTorch C extensions",
          "Python found a folder named torch that is not the installed package: the working folder holds a source tree of torch, or two environments are mixed (conda's variables under another Python).",
          "start from another folder; unset PYTHONPATH and PYTHONHOME, conda deactivate, or source the file that steelyard doctor --fix writes."),
    Known("torch-c-missing", "No module|annot import", r"No module named 'torch\._C|cannot import name '\w+' from 'torch\._C'",
          "torch's compiled part does not belong to this Python or is of another version: two environments are mixed.",
          "unset PYTHONPATH, conda deactivate, and reinstall torch: make setup."),
    # Programs and packages
    Known("nvcc-missing", "nvcc", r"No such file or directory: '?(?P<path>\S*nvcc)'?|nvcc: (command )?not found|nvcc was not found",
          "something wants to compile CUDA code and finds no compiler where CUDA_HOME or PATH says; in containers the host's CUDA folder is usually not bound in.",
          "Steelyard compiles nothing with nvcc. For other packages: load the CUDA module and set CUDA_HOME to it; for an image steelyard doctor --container IMAGE binds bin and include and sets CUDA_HOME."),
    Known("cuda-home-unset", "CUDA_HOME", r"CUDA_HOME environment variable is not set",
          "a package wants to compile CUDA code while it is installed.",
          "load the CUDA module and export CUDA_HOME; Steelyard does not need that package."),
    Known("torchrun-missing", "torchrun", r"torchrun: (command )?not found|No such file or directory: '?\S*torchrun|exec: \"?torchrun\"?",
          "torchrun is not on PATH, or the path of another environment was written into a script.",
          "steelyard train --nproc N and steelyard submit need none; else python -m torch.distributed.run, which always belongs to the Python that runs it."),
    Known("mpirun-missing", "mpirun", r"mpirun: (command )?not found|No such file or directory: '?\S*mpirun",
          "mpirun is not on PATH.", "load the MPI module, or give its path in the site profile."),
    Known("transformer-engine-missing", "transformer_engine|Transformer Engine", r"No module named '?transformer_engine|transformer_engine\S* (is )?not installed|Transformer Engine (is )?not (installed|found)",
          "Transformer Engine is not in this environment. Megatron scripts want it for their default layers.",
          "Steelyard needs none: steelyard recipe from-megatron SCRIPT gives the recipe that runs without; precision = \"fp8\" uses torch's own products."),
    Known("apex-missing", "No module", r"No module named '?(apex|amp_C|fused_layer_norm_cuda|fused_weight_gradient_mlp_cuda)",
          "NVIDIA's apex is missing or was built without its extensions.",
          "Steelyard needs none: its fused optimizer and norms come with it."),
    Known("flash-attn-missing", "No module", r"No module named '?(flash_attn|flashattn_hopper|flash_attn_interface)",
          "the flash-attn package is not installed.", "Steelyard needs none: torch's own flash attention is used."),
    Known("megatron-helpers", "helpers", r"cannot import name 'helpers\w*' from '?megatron(\.core)?\.(data|datasets)|No module named '?megatron\.(core\.)?(data|datasets)\.helpers",
          "Megatron's C++ index builder was not compiled for this Python: its Makefile asked another python3-config.",
          "there: correct the path of python3-config in megatron's data/Makefile and run make. Steelyard builds the same index maps without compiling: steelyard recipe from-megatron SCRIPT, then steelyard train."),
    Known("fused-kernels", "compiling and loading fused kernels", r"> ?compiling and loading fused kernels",
          "Megatron compiles its fused kernels here, and the log does not say that it was done. The first time that takes minutes; after that it waits for a lock that a killed compilation left, or for a build made for another GPU or CUDA.",
          "there: remove megatron/fused_kernels/build (and ~/.cache/torch_extensions) and start again. Steelyard compiles nothing at start.",
          over="done with compiling and loading fused kernels|Error building extension"),
    Known("extension-build", "Error building extension|Unsupported gpu architecture|ninja: build stopped", r"Error building extension '?(?P<extension>\w*)|Unsupported gpu architecture|ninja: build stopped",
          "CUDA or C++ code could not be compiled. The first error above tells why: a compiler that does not know this GPU (an older CUDA), one too new for CUDA, or missing headers.",
          "there: take the CUDA whose version torch names (torch.version.cuda), remove the half-built folder (megatron/fused_kernels/build, ~/.cache/torch_extensions) and start again. Steelyard compiles no C++."),
    Known("cuda-mismatch", "mismatches the version|compiled with a version of Cuda", r"detected CUDA version \([\d.]+\) mismatches|compiled with a version of Cuda that does not",
          "the nvcc that was found is of another CUDA than torch was built with; apex, deepspeed and flash-attn refuse to be built so.",
          "load the module of torch's CUDA (python -c 'import torch; print(torch.version.cuda)') and set CUDA_HOME to it; Steelyard needs none of these packages."),
    Known("ninja-missing", "Ninja is required", r"Ninja is required to load C\+\+ extensions",
          "a package compiles itself at its first use, and has no ninja for it.", "pip install ninja there; Steelyard needs none."),
    Known("python-header", "Python.h", r"Python\.h: No such file or directory",
          "a C extension is being compiled, and Python's headers are not installed. Triton does so at the first start of each kernel.",
          "install python3-dev (Debian) or python3-devel, for the same version of Python."),
    Known("cuda-header", "No such file or directory", r"(?P<header>(cudnn|nccl|cuda|cublas|cusparse)\w*\.h): No such file or directory",
          "a package is being compiled, and finds no {header}: the CUDA toolkit, cuDNN or NCCL is there without its headers, or in a folder nobody named.",
          "install the development package (cudnn9-cuda-12, libnccl-dev, cuda-toolkit) and name its folder: CUDA_HOME, CUDNN_PATH, CPATH. Steelyard compiles nothing with them."),
    Known("no-compiler", "C compiler", r"Failed to find C compiler|No C compiler found",
          "Triton needs a C compiler when a kernel first starts.", "install gcc, or set CC."),
    Known("triton-ptx", "PTX|nsupported .version|ptxas", r"PTX was compiled with an unsupported toolchain|Unsupported \.version [\d.]+|ptxas fatal",
          "a kernel was compiled by a newer CUDA than the driver knows.",
          "update the driver, or take a torch built for the driver's CUDA: make setup TORCH=auto."),
    Known("torch-missing", "No module named", r"No module named '?torch'?\s*$",
          "this Python has no torch: another environment is active than the one that was installed into.",
          "activate the right one (which python), or install: make setup."),
    Known("package-missing", "No module named", r"No module named '?(?P<module>[\w.]+)",
          "the Python that ran has no package {module}: it is not installed, or another environment is active.",
          "look which Python it is (which python) and install it there; steelyard doctor names what Steelyard itself lacks."),
    Known("numpy-2", "compiled using NumPy 1", r"compiled using NumPy 1\.x cannot be run in",
          "a package was built for NumPy 1, and NumPy 2 is installed.", "there: pip install 'numpy<2', or take a newer version of that package."),
    Known("device-connections", "CUDA_DEVICE_MAX_CONNECTIONS", r"CUDA_DEVICE_MAX_CONNECTIONS\S* (should|must|to be|to 1)|set(ting)? CUDA_DEVICE_MAX_CONNECTIONS",
          "Megatron wants one queue of work per GPU for sequence and tensor parallelism.", "there: export CUDA_DEVICE_MAX_CONNECTIONS=1 before it starts."),
    Known("module-command", "module: ", r"\bmodule: (command )?not found",
          "this shell was never told of environment modules: jobs and ssh do not read what a login does.",
          "source /etc/profile.d/modules.sh first; a site profile's modules are loaded so by steelyard submit."),
    Known("program-missing", "ommand not found", r"(?P<program>[\w.+-]{1,60}): [Cc]ommand not found",
          "there is no program {program} on PATH.", "load its module, activate its environment, or install it; steelyard doctor lists the programs that Steelyard uses."),
    Known("hub-denied", "Client Error|GatedRepo|gated repo", r"40[13] Client Error|GatedRepoError|Cannot access gated repo",
          "the hub refused: nobody is logged in, the token may not do this, or the model's terms were not accepted on its page.",
          "steelyard hub login, steelyard hub whoami; accept the terms in a browser."),
    # GPU and driver
    Known("cuda-init-fork", "re-initialize CUDA", r"Cannot re-initialize CUDA in forked subprocess",
          "a process used the GPU and then forked; the child cannot.",
          "start workers with the spawn method, or touch the GPU only after forking; Steelyard's own workers never touch it."),
    Known("cuda-initialization", "initialization error|CUDA_ERROR_NOT_INITIALIZED", r"CUDA error: initialization error|CUDA_ERROR_NOT_INITIALIZED",
          "a process touched CUDA after it was forked from one that had already used it. Megatron's checkpoint converter does so with recent torch: its loader and saver are forked processes.",
          "steelyard checkpoint convert does the same work in one process, on a CPU; there: start the processes with spawn, or keep the converter off the GPU (CUDA_VISIBLE_DEVICES=)."),
    Known("driver-too-old", "driver|forward compatibility", r"NVIDIA driver on your system is too old|CUDA driver version is insufficient|forward compatibility was attempted on non supported HW",
          "torch was built for a newer CUDA than the driver serves.",
          "make setup TORCH=auto takes a build for the driver; or update it; steelyard doctor names the versions, and containers/ helps hosts that cannot."),
    Known("driver-mismatch", "version mismatch", r"Driver/library version mismatch",
          "the driver was updated and the old one is still loaded in the kernel.", "reboot the machine, or ask who keeps it."),
    Known("driver-unreachable", "NVIDIA driver|No CUDA GPUs", r"Found no NVIDIA driver on your system|couldn't communicate with the NVIDIA driver|No CUDA GPUs are available",
          "no GPU is visible: no driver, none allotted by the scheduler, or a container without access.",
          "ask for GPUs (Slurm: --gres), look at CUDA_VISIBLE_DEVICES, start the container with --nv or --gpus all; train.device=cpu runs without."),
    Known("no-kernel-image", "no kernel image|is not compatible with", r"no kernel image is available for execution on the device|is not compatible with the current PyTorch installation",
          "this torch has no code for this GPU: the GPU is too old or too new for the build.",
          "take another build: make setup TORCH=cu126 reaches back the furthest, cu130 the furthest ahead."),
    Known("gpu-memory", "out of memory|OutOfMemory|CUBLAS_STATUS_ALLOC", r"CUDA out of memory|CUDA error: out of memory|OutOfMemoryError|CUBLAS_STATUS_ALLOC_FAILED",
          "a GPU's memory is full.",
          "steelyard train RECIPE --dry-run tells what takes it and what would help: smaller train.micro_batch, parallel.recompute, higher zero, more tensor or pipeline ranks. See also whether another process holds the GPU (nvidia-smi)."),
    Known("gpu-ecc", "uncorrectable", r"uncorrectable ECC error|uncorrectable NVLink error",
          "the GPU's memory or link is broken.", "leave this machine out (Slurm: --exclude) and tell who keeps it; the run resumes from its last checkpoint."),
    Known("gpu-lost", "Xid|fallen off the bus", r"NVRM: Xid|GPU has fallen off the bus",
          "the driver lost a GPU.", "leave this machine out (Slurm: --exclude) and tell who keeps it; the number after Xid is in NVIDIA's list of Xid errors."),
    Known("illegal-access", "illegal memory access|misaligned address", r"an illegal memory access was encountered|CUDA error: misaligned address",
          "a kernel read or wrote outside its memory; the line of the traceback is often a later one.",
          "run once with CUDA_LAUNCH_BLOCKING=1 for the right line; train.compile=false tells whether a compiled kernel is to blame."),
    Known("device-assert", "device-side assert", r"device-side assert triggered",
          "an index was out of range on the GPU, most often a token id beyond the vocabulary.",
          "steelyard data verify PREFIX, and compare the tokenizer's size with model.vocab; train.device=cpu names the line."),
    Known("cublas", "CUBLAS_STATUS", r"CUBLAS_STATUS_(NOT_INITIALIZED|EXECUTION_FAILED|INTERNAL_ERROR)",
          "a matrix product failed: mostly full memory, sometimes a cuBLAS of another CUDA that comes first on the loader's path.",
          "free memory (see nvidia-smi); take CUDA folders off LD_LIBRARY_PATH; steelyard doctor shows which libraries are loaded."),
    Known("cudnn-mismatch", "cuDNN|CUDNN_STATUS", r"cuDNN version incompatibility|CUDNN_STATUS_(NOT_INITIALIZED|VERSION_MISMATCH|SUBLIBRARY_VERSION_MISMATCH)",
          "another cuDNN than torch's own comes first on the loader's path.", "take its folder off LD_LIBRARY_PATH; steelyard doctor names it."),
    # Ranks that do not meet, or lose each other
    Known("address-in-use", "ddress already in use|EADDRINUSE", r"[Aa]ddress already in use|EADDRINUSE",
          "the port at which ranks meet is taken, often by a run that was not ended.",
          "unset MASTER_PORT: Steelyard's launchers choose a free one; ss -tlnp shows who has it."),
    Known("watchdog", "Watchdog caught collective operation timeout", r"Watchdog caught collective operation timeout",
          "a rank waited in a collective for another that never came: it died, hangs, or is in another collective.",
          "look for the first error in any other rank's log; steelyard watch RUN names the slow or silent rank."),
    Known("nccl-system", "unhandled system error|ncclSystemError", r"NCCL error.*unhandled system error|ncclSystemError",
          "a call to the system failed inside NCCL: sockets, shared memory or InfiniBand.",
          "steelyard doctor checks interfaces, /dev/shm and locked memory; NCCL_DEBUG=WARN tells which call; NCCL_SOCKET_IFNAME names the interface."),
    Known("nccl-cuda", "unhandled cuda error|ncclUnhandledCuda", r"unhandled cuda error|ncclUnhandledCudaError",
          "a CUDA call failed inside NCCL: mostly full memory, or two ranks on one GPU (Duplicate GPU detected).",
          "one rank per GPU; NCCL_DEBUG=INFO tells more."),
    Known("nccl-remote", "ncclRemoteError|remote process exited", r"ncclRemoteError|remote process exited or there was a network error",
          "the other end of a connection went away.", "it is a consequence: look for the first error in the other ranks' logs."),
    Known("nccl-interface", "no socket interface found", r"no socket interface found",
          "NCCL_SOCKET_IFNAME names an interface that this machine does not have.", "unset it, or name one of ls /sys/class/net."),
    Known("ib-memory", "ibv_", r"ibv_(reg_mr|create_cq|create_qp)\S* failed|Cannot allocate memory.*ibv_",
          "InfiniBand could not lock memory.", "ulimit -l unlimited where the ranks start; in containers --ulimit memlock=-1."),
    Known("gloo-connect", "connectFullMesh", r"connectFullMesh failed",
          "gloo could not reach the other ranks: mostly the host's name resolves to 127.0.1.1, which nobody else can reach.",
          "set GLOO_SOCKET_IFNAME to the interface of the network, and MASTER_ADDR to a number; steelyard doctor names both."),
    Known("store-timeout", "client socket has|waiting for clients", r"client socket has (timed out|failed to connect)|Timed out after \d+ seconds waiting for clients",
          "ranks did not all come to the meeting point: some did not start, or MASTER_ADDR or the port cannot be reached from there.",
          "look at the first error of the silent ranks; steelyard doctor --nodes a,b tries the ways between machines."),
    Known("lost-peer", "by peer", r"Connection (reset|closed) by peer",
          "another rank ended.", "it is a consequence: look for the first error in the other ranks' logs."),
    Known("bus-error", "Bus error|shared memory|</torch_", r"Bus error|insufficient shared memory \(shm\)|unable to (write to|open) (file|shared memory object) </torch_",
          "shared memory is full; containers give 64 MiB.", "docker and podman: --ipc=host or --shm-size=8g; see df /dev/shm."),
    # Scheduler and system
    Known("slurm-time", "DUE TO TIME LIMIT", r"CANCELLED AT .* DUE TO TIME LIMIT",
          "the job's time ended.", "the same command resumes from the last checkpoint; ask for more time, or let submit requeue it."),
    Known("slurm-preempted", "DUE TO PREEMPTION", r"CANCELLED AT .* DUE TO PREEMPTION",
          "a job of higher priority took the nodes.", "the same command resumes; submit requeues by itself."),
    Known("slurm-node-failed", "NODE FAILURE", r"CANCELLED AT .* DUE TO NODE FAILURE",
          "a node died.", "the same command resumes; leave the node out with --exclude if it dies again."),
    Known("oom-kill", "oom", r"oom[_-]kill", HOST_MEMORY, HOST_MEMORY_MEND),
    Known("oom-killed", "Killed process", r"Out of memory: Killed process", HOST_MEMORY, HOST_MEMORY_MEND),
    Known("memory-limit", "memory limit", r"[Ee]xceeded (job|step) memory limit", HOST_MEMORY, HOST_MEMORY_MEND),
    Known("slurm-gres", "node configuration is not|generic resource", r"Requested node configuration is not available|Invalid generic resource",
          "no node has what was asked for.", "compare with sinfo -o '%P %G %D'; steelyard plan cluster --from slurm writes what there is."),
    Known("slurm-account", "account", r"Invalid account or account/partition combination",
          "Slurm does not let this account use this partition.", "sacctmgr show assoc user=$USER tells what it may; set account and partition in the site profile."),
    Known("slurm-step-over", "already completing or completed|Invalid job id", r"Job/step already completing or completed|Invalid job id specified",
          "the allocation has ended, or never was.", "squeue -u $USER lists those that live; ask for a new one."),
    Known("image-missing", "could not open image", r"could not open image (?P<image>\S+?):? ",
          "there is no image {image} on this machine.", "give its whole path, on a file system that the nodes share; site profile: container.image."),
    Known("mpi-slots", "slots available", r"There are not enough slots available",
          "mpirun was asked for more ranks than it thinks the hosts carry.", "name them: --host a:8,b:8; steelyard submit --on mpi does."),
    Known("mpi-root", "as root", r"mpirun has detected an attempt to run as root",
          "Open MPI refuses to run as root.", "run as another user, or set OMPI_ALLOW_RUN_AS_ROOT=1 and OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 in a container."),
    Known("ssh-key", "Host key verification failed", r"Host key verification failed",
          "this machine has never seen the other's key.", "ssh-keyscan HOST >> ~/.ssh/known_hosts; steelyard doctor --nodes tries all."),
    Known("ssh-denied", "Permission denied (", r"Permission denied \((publickey|password|gssapi|keyboard)",
          "ssh would ask for a password, which nobody can type in a job.", "ssh-copy-id HOST, with a key without passphrase."),
    Known("disk-full", "No space left|quota exceeded", r"No space left on device|Disk quota exceeded",
          "the disk or your share of it is full.", "make room (checkpoint.keep_last keeps fewer); the run resumes from its last whole checkpoint."),
    Known("open-files", "Too many open", r"Too many open files", "the limit of open files is low.", "ulimit -n 65536 where the ranks start."),
    Known("read-only", "Read-only file system", r"Read-only file system",
          "something writes into an image.", "bind a folder of the host there; steelyard doctor --container IMAGE does so for libraries."),
    Known("illegal-instruction", "Illegal instruction", r"Illegal instruction",
          "a program was built for a newer processor.", "take PyTorch's own build: make setup."),
    # Containers that do not start
    Known("container-init", "container-init", r"container-init binary not found",
          "podman starts ranks under an init, catatonit, and has none.", "install the package catatonit; without: options of the site's container, like [\"--init=false\"]."),
    Known("container-limits", "setrlimit", r"setrlimit .?RLIMIT_\w+.?: Operation not permitted",
          "the runtime may not set the limits that it sets by default: root of this machine is less than root.",
          "lower ones in containers.conf (default_ulimits), or in the site: container.options = [\"--ulimit=nofile=1024:1024\", \"--ulimit=nproc=1024:1024\"]."),
    Known("container-cgroups", "hybrid mode", r"cgroups in hybrid mode not supported",
          "crun does not run on a machine that mixes both kinds of control groups.", "install runc; in containers.conf, [engine], runtime = \"runc\"."),
    Known("container-mqueue", "/dev/mqueue", r"statfs /dev/mqueue: no such file",
          "--ipc=host shows the host's message queues inside, and the host has none.", "mount -t mqueue none /dev/mqueue; or in the site: container.options = [\"--ipc=private\", \"--shm-size=8g\"]."),
    Known("docker-gpus", "could not select device driver", r"could not select device driver .{0,40}gpu",
          "docker does not know of GPUs.", "install nvidia-container-toolkit, then nvidia-ctk runtime configure --runtime=docker, and restart docker."),
    Known("podman-gpus", "nvidia.com/gpu", r"unresolvable CDI devices|stat nvidia\.com/gpu=|nvidia\.com/gpu=\w+: no such file",
          "podman does not know of GPUs.", "install nvidia-container-toolkit, then nvidia-ctk cdi generate --output=/etc/cdi/nvidia.yaml; podman from 4.1 on."),
    Known("docker-daemon", "Docker daemon|docker API", r"Cannot connect to the Docker daemon|permission denied while trying to connect to the (Docker daemon|docker API)",
          "docker's daemon does not run, or not for you.", "systemctl start docker; or join its group: usermod -aG docker YOU, then log in anew. podman needs neither."),
    Known("image-not-given", "pull access denied|manifest unknown|initializing source", r"pull access denied|manifest unknown|initializing source docker://",
          "no registry gives that image.", "build it (containers/Dockerfile), log in to its registry, or name it in full; images of docker are not podman's: docker save IMAGE | podman load."),
    # What may be ignored
    Known("kineto-not-running", "Kineto", r"Can't disable Kineto profiler when it's not running",
          "the profiler was stopped twice: Megatron does so when the last profiled step is over. The trace had been written before.",
          "nothing: the profile is complete. steelyard profile stops once.", harmless=True),
    Known("kineto-cupti", "CUPTI", r"CUPTI_ERROR_(NOT_INITIALIZED|INSUFFICIENT_PRIVILEGES|MULTIPLE_SUBSCRIBERS\w*)|CUPTI initialization failed",
          "the profiler may not read the GPU's counters: another profiler is attached, or only administrators may. Training is not affected.",
          "profile with one tool at a time; the administrator can set NVreg_RestrictProfilingToAdminUsers=0.", harmless=True),
    Known("nvtx-annotation", "External init callback", r"External init callback must run in same thread as registerClient",
          "a remark of the profiler at start.", "nothing.", harmless=True),
    Known("omp-threads", "OMP_NUM_THREADS", r"Setting OMP_NUM_THREADS environment variable for each process to be 1",
          "torchrun says that it gives each rank one thread.", "nothing; set OMP_NUM_THREADS to have more.", harmless=True),
    Known("warning", "warn|Warning:", r"^\s*warnings\.warn\(|\b(User|Future|Deprecation|Runtime)Warning:",
          "a warning of Python's, or the line of source that belongs to one.", "nothing.", harmless=True),
    Known("barrier-device", "using GPU|No device id", r"using GPU \d+ (to perform barrier|as device used by this process)|No device id is provided via",
          "a remark of torch about which GPU a rank uses.", "nothing.", harmless=True),
    Known("destroy-process-group", "destroy_process_group() was not called", r"destroy_process_group\(\) was not called",
          "a program ended without taking leave of the other ranks.", "nothing, if it ended well; after an error it is a consequence.", harmless=True),
    Known("hostname-socket", "hostname of the client socket cannot be retrieved", r"hostname of the client socket cannot be retrieved",
          "an address has no name.", "nothing.", harmless=True),
    Known("ibv-fork", "fork()", r"A process has executed an operation involving a call\s+to the \"?fork\(\)",
          "Open MPI warns of forks; data loaders fork.", "nothing; mpi_warn_on_fork 0 silences it.", harmless=True),
    Known("tensorboard-tf", "TensorFlow installation not found", r"TensorFlow installation not found",
          "TensorBoard works without.", "nothing.", harmless=True),
)  # fmt: skip


OVER = tuple((known.name, piece) for known in KNOWN if known.over for piece in known.over.split("|"))
"""Names of messages, and pieces of lines that end what they announce."""


def explain_line(line: str) -> Explained | None:
    """What a line means; None where it is not known."""
    for known in KNOWN:
        if any(part in line for part in known.alternatives):
            found = known.compiled.search(line)
            if found is not None:
                filled = {name: value or "" for name, value in found.groupdict().items()}
                return Explained(known.name, _fill(known.meaning, filled), _fill(known.hint, filled), known.harmless)
    return None


def _fill(words: str, values: dict[str, str]) -> str:
    for name, value in values.items():
        words = words.replace(f"{{{name}}}", value)
    return words

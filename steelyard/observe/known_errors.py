"""Known errors by their messages: what each means, what to do, and whether it is harmless.

The first entry that matches a line explains it, so specific entries come before general ones. A line must contain at
least one of `substrings`: searching for them is many times faster than matching `pattern`, which decides. `{name}` in
the texts is replaced with the pattern's groups.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class Known:
    """One known message and its explanation."""

    name: str
    substrings: str
    """Separated by |. A line must contain at least one; this is cheaper than matching the pattern."""
    pattern: str
    meaning: str
    hint: str
    harmless: bool = False
    over: str = ""
    """Parts of later lines, separated by |, that cancel the message: the operation that it announces has ended."""

    @cached_property
    def alternatives(self) -> tuple[str, ...]:
        """The substrings as a tuple."""
        return tuple(self.substrings.split("|"))

    @cached_property
    def compiled(self) -> re.Pattern[str]:
        """The compiled pattern."""
        return re.compile(self.pattern)


@dataclass(frozen=True)
class Explained:
    """The explanation of a line of a log."""

    name: str
    meaning: str
    hint: str
    harmless: bool


# Bounded, so that a malicious line costs no more than a long one.
REST = r"[\w+.-]{0,80}\.so[.\d]{0,20}): cannot open shared object file"
SONAME = rf"(?P<library>lib{REST}"
HOST_MEMORY = "the host ran out of memory, and the kernel or the scheduler killed a process."
HOST_MEMORY_HINT = "request more memory (--mem), or use fewer workers; dmesg names the process."
KNOWN = (
    # Libraries that the loader does not find
    Known("cudnn-missing", "cannot open shared object", rf"(?P<library>libcudnn{REST}",
          "torch needs cuDNN as {library}, and no folder that the loader searches has a file with that name; often it exists as {library}.x.y, or in a conda or pip folder.",
          "steelyard doctor --fix links the right file under that name; for a read-only image use steelyard doctor --container IMAGE."),
    Known("cupti-missing", "cannot open shared object", rf"(?P<library>libcupti{REST}",
          "torch needs CUPTI, the profiling library, as {library}; CUDA has it in extras/CUPTI/lib64, Nsight in its own folders, which the loader does not search.",
          "steelyard doctor --fix links it; for a read-only image use steelyard doctor --container IMAGE; or pip install nvidia-cuda-cupti-cu12 (CUDA 13: nvidia-cuda-cupti) in torch's environment."),
    Known("nccl-missing", "cannot open shared object", rf"(?P<library>libnccl{REST}",
          "torch needs NCCL as {library}; pip installs it in site-packages/nvidia/nccl/lib, which another Python or a container does not search.",
          "steelyard doctor --fix links it; for a read-only image steelyard doctor --container IMAGE binds it; or pip install nvidia-nccl-cu12 (or cu13) in torch's environment."),
    Known("driver-library-missing", "libcuda.so", r"libcuda\.so(\.1)?: cannot open shared object file",
          "the driver's library is not visible: there is no NVIDIA driver here, or the container was started without it.",
          "apptainer: --nv; docker: --gpus all; podman: --device nvidia.com/gpu=all; on the host: install the driver."),
    Known("mpi-library-missing", "libmpi", r"libmpi\S*\.so\S*: cannot open shared object file",
          "something was built against an MPI whose library is not on the loader's path.",
          "load the MPI module that it was built with; Steelyard itself needs no MPI library, only mpirun."),
    Known("library-missing", "cannot open shared object", SONAME,
          "the loader finds no file named {library} in any folder it searches.",
          "steelyard doctor shows which library needs it; find it (find / -name '{library}*') and add its folder to LD_LIBRARY_PATH."),
    Known("library-too-new", "not found (required by", r"version [`'](?P<version>[\w.]+)' not found \(required by (?P<by>[^)]+)\)",
          "{by} was built on a newer system: this system's C or C++ library lacks {version}. Or an older library of conda or of a module comes first.",
          "remove such folders from LD_LIBRARY_PATH; on an old system use containers/steelyard.def or containers/Dockerfile."),
    Known("undefined-symbol", "undefined symbol", r"(?P<file>\S+\.so\S*): undefined symbol: (?P<symbol>\S+)",
          "{file} was built for another version of torch or CUDA than the loaded one.",
          "rebuild it for this torch, or uninstall it (flash-attn, apex and transformer_engine are not needed); for libnvJitLink, libcusparse and libcublas remove the CUDA folder from LD_LIBRARY_PATH."),
    Known("torch-c-extension", "PyTorch C extensions", r"Failed to load PyTorch C extensions",
          "Python found a folder named torch that is not the installed package: the working directory contains a source tree of torch, or two environments are mixed (conda's variables with another Python).",
          "start from another folder; unset PYTHONPATH and PYTHONHOME, conda deactivate, or source the file that steelyard doctor --fix writes."),
    Known("torch-c-missing", "No module|annot import", r"No module named 'torch\._C|cannot import name '\w+' from 'torch\._C'",
          "torch's compiled part does not belong to this Python or has another version: two environments are mixed.",
          "unset PYTHONPATH, conda deactivate, and reinstall torch: make setup."),
    # Programs and packages
    Known("nvcc-missing", "nvcc", r"No such file or directory: '?(?P<path>\S*nvcc)'?|nvcc: (command )?not found|nvcc was not found",
          "a package compiles CUDA code and finds no compiler at CUDA_HOME or on PATH; containers usually do not bind the host's CUDA folder.",
          "Steelyard compiles nothing with nvcc. For other packages: load the CUDA module and set CUDA_HOME to it; for an image steelyard doctor --container IMAGE binds bin and include and sets CUDA_HOME."),
    Known("cuda-home-unset", "CUDA_HOME", r"CUDA_HOME environment variable is not set",
          "a package compiles CUDA code during its installation.",
          "load the CUDA module and export CUDA_HOME; Steelyard does not need that package."),
    Known("torchrun-missing", "torchrun", r"torchrun: (command )?not found|No such file or directory: '?\S*torchrun|exec: \"?torchrun\"?",
          "torchrun is not on PATH, or a script contains the path of another environment.",
          "steelyard train --nproc N and steelyard submit do not need it; else use python -m torch.distributed.run, which always belongs to the Python that runs it."),
    Known("mpirun-missing", "mpirun", r"mpirun: (command )?not found|No such file or directory: '?\S*mpirun",
          "mpirun is not on PATH.", "load the MPI module, or set its path in the site profile."),
    Known("transformer-engine-missing", "transformer_engine|Transformer Engine", r"No module named '?transformer_engine|transformer_engine\S* (is )?not installed|Transformer Engine (is )?not (installed|found)",
          "Transformer Engine is not installed. Megatron scripts use it for their default layers.",
          "Steelyard does not need it: steelyard recipe from-megatron SCRIPT writes a recipe that runs without it; precision = \"fp8\" uses torch's own products."),
    Known("apex-missing", "No module", r"No module named '?(apex|amp_C|fused_layer_norm_cuda|fused_weight_gradient_mlp_cuda)",
          "NVIDIA's apex is missing or was built without its extensions.",
          "Steelyard does not need it: it has its own fused optimizer and norms."),
    Known("flash-attn-missing", "No module", r"No module named '?(flash_attn|flashattn_hopper|flash_attn_interface)",
          "the flash-attn package is not installed.", "Steelyard does not need it: it uses torch's own flash attention."),
    Known("megatron-helpers", "helpers", r"cannot import name 'helpers\w*' from '?megatron(\.core)?\.(data|datasets)|No module named '?megatron\.(core\.)?(data|datasets)\.helpers",
          "Megatron's C++ index builder was not compiled for this Python: its Makefile used another python3-config.",
          "in Megatron: correct the path of python3-config in megatron's data/Makefile and run make. Steelyard builds the same index maps without compiling: steelyard recipe from-megatron SCRIPT, then steelyard train."),
    Known("fused-kernels", "compiling and loading fused kernels", r"> ?compiling and loading fused kernels",
          "Megatron compiles its fused kernels, and the log does not show that it finished. The first time this takes minutes; later it waits for a lock that a killed compilation left, or for a build for another GPU or CUDA.",
          "in Megatron: remove megatron/fused_kernels/build (and ~/.cache/torch_extensions) and restart. Steelyard compiles nothing at start.",
          over="done with compiling and loading fused kernels|Error building extension"),
    Known("extension-build", "Error building extension|Unsupported gpu architecture|ninja: build stopped", r"Error building extension '?(?P<extension>\w*)|Unsupported gpu architecture|ninja: build stopped",
          "CUDA or C++ code could not be compiled. The first error above gives the reason: a compiler that does not support this GPU (an older CUDA), one that is too new for CUDA, or missing headers.",
          "use the CUDA version that torch was built with (torch.version.cuda), remove the incomplete build folder (megatron/fused_kernels/build, ~/.cache/torch_extensions) and restart. Steelyard compiles no C++."),
    Known("cuda-mismatch", "mismatches the version|compiled with a version of Cuda", r"detected CUDA version \([\d.]+\) mismatches|compiled with a version of Cuda that does not",
          "nvcc belongs to another CUDA version than torch was built with; apex, deepspeed and flash-attn refuse to build then.",
          "load the module of torch's CUDA (python -c 'import torch; print(torch.version.cuda)') and set CUDA_HOME to it; Steelyard needs none of these packages."),
    Known("ninja-missing", "Ninja is required", r"Ninja is required to load C\+\+ extensions",
          "a package compiles itself at its first use, but ninja is not installed.", "pip install ninja; Steelyard does not need it."),
    Known("python-header", "Python.h", r"Python\.h: No such file or directory",
          "a C extension is being compiled, but Python's headers are not installed. Triton does this at the first launch of each kernel.",
          "install python3-dev (Debian) or python3-devel, for the same version of Python."),
    Known("cuda-header", "No such file or directory", r"(?P<header>(cudnn|nccl|cuda|cublas|cusparse)\w*\.h): No such file or directory",
          "a package is being compiled, but {header} is not found: the CUDA toolkit, cuDNN or NCCL is installed without headers, or its folder is not configured.",
          "install the development package (cudnn9-cuda-12, libnccl-dev, cuda-toolkit) and set its folder: CUDA_HOME, CUDNN_PATH, CPATH. Steelyard compiles nothing with them."),
    Known("no-compiler", "C compiler", r"Failed to find C compiler|No C compiler found",
          "Triton needs a C compiler at the first launch of a kernel.", "install gcc, or set CC."),
    Known("triton-ptx", "PTX|nsupported .version|ptxas", r"PTX was compiled with an unsupported toolchain|Unsupported \.version [\d.]+|ptxas fatal",
          "a kernel was compiled by a newer CUDA than the driver supports.",
          "update the driver, or install a torch built for the driver's CUDA: make setup TORCH=auto."),
    Known("torch-missing", "No module named", r"No module named '?torch'?\s*$",
          "this Python has no torch: the active environment is not the one with torch.",
          "activate the right one (which python), or install: make setup."),
    Known("package-missing", "No module named", r"No module named '?(?P<module>[\w.]+)",
          "this Python has no package {module}: it is not installed, or another environment is active.",
          "check which Python runs (which python) and install it there; steelyard doctor lists what Steelyard itself lacks."),
    Known("numpy-2", "compiled using NumPy 1", r"compiled using NumPy 1\.x cannot be run in",
          "a package was built for NumPy 1, but NumPy 2 is installed.", "pip install 'numpy<2', or install a newer version of that package."),
    Known("device-connections", "CUDA_DEVICE_MAX_CONNECTIONS", r"CUDA_DEVICE_MAX_CONNECTIONS\S* (should|must|to be|to 1)|set(ting)? CUDA_DEVICE_MAX_CONNECTIONS",
          "Megatron needs one work queue per GPU for sequence and tensor parallelism.", "in Megatron: export CUDA_DEVICE_MAX_CONNECTIONS=1 before it starts."),
    Known("module-command", "module: ", r"\bmodule: (command )?not found",
          "environment modules are not initialized in this shell: jobs and ssh do not read the login scripts.",
          "source /etc/profile.d/modules.sh first; steelyard submit does so for the modules of a site profile."),
    Known("program-missing", "ommand not found", r"(?P<program>[\w.+-]{1,60}): [Cc]ommand not found",
          "there is no program {program} on PATH.", "load its module, activate its environment, or install it; steelyard doctor lists the programs that Steelyard uses."),
    Known("hub-denied", "Client Error|GatedRepo|gated repo", r"40[13] Client Error|GatedRepoError|Cannot access gated repo",
          "the hub refused access: there is no login, the token lacks the permission, or the model's terms were not accepted on its page.",
          "steelyard hub login, steelyard hub whoami; accept the terms in a browser."),
    # GPU and driver
    Known("cuda-init-fork", "re-initialize CUDA", r"Cannot re-initialize CUDA in forked subprocess",
          "a process used the GPU and then forked; the child cannot.",
          "start workers with the spawn method, or use the GPU only after forking; Steelyard's own workers never use it."),
    Known("cuda-initialization", "initialization error|CUDA_ERROR_NOT_INITIALIZED", r"CUDA error: initialization error|CUDA_ERROR_NOT_INITIALIZED",
          "a process used CUDA after it was forked from one that had already used it. Megatron's checkpoint converter does this with recent torch: its loader and saver are forked processes.",
          "steelyard checkpoint convert does the same work in one process, on a CPU; in Megatron: start the processes with spawn, or keep the converter off the GPU (CUDA_VISIBLE_DEVICES=)."),
    Known("driver-too-old", "driver|forward compatibility", r"NVIDIA driver on your system is too old|CUDA driver version is insufficient|forward compatibility was attempted on non supported HW",
          "torch was built for a newer CUDA than the driver supports.",
          "make setup TORCH=auto installs a build for the driver; or update the driver; steelyard doctor shows the versions, and containers/ helps hosts that cannot update."),
    Known("driver-mismatch", "version mismatch", r"Driver/library version mismatch",
          "the driver was updated, but the old one is still loaded in the kernel.", "reboot the machine, or ask your administrator."),
    Known("driver-unreachable", "NVIDIA driver|No CUDA GPUs", r"Found no NVIDIA driver on your system|couldn't communicate with the NVIDIA driver|No CUDA GPUs are available",
          "no GPU is visible: no driver, none allocated by the scheduler, or a container without access.",
          "request GPUs (Slurm: --gres), check CUDA_VISIBLE_DEVICES, start the container with --nv or --gpus all; train.device=cpu runs without."),
    Known("no-kernel-image", "no kernel image|is not compatible with", r"no kernel image is available for execution on the device|is not compatible with the current PyTorch installation",
          "this torch has no code for this GPU: the GPU is too old or too new for the build.",
          "install another build: make setup TORCH=cu126 supports the oldest GPUs, cu130 the newest."),
    Known("gpu-memory", "out of memory|OutOfMemory|CUBLAS_STATUS_ALLOC", r"CUDA out of memory|CUDA error: out of memory|OutOfMemoryError|CUBLAS_STATUS_ALLOC_FAILED",
          "a GPU ran out of memory.",
          "steelyard train RECIPE --dry-run shows what uses it and what would help: smaller train.micro_batch, parallel.recompute, higher zero, more tensor or pipeline ranks. Also check whether another process uses the GPU (nvidia-smi)."),
    Known("gpu-ecc", "uncorrectable", r"uncorrectable ECC error|uncorrectable NVLink error",
          "the GPU's memory or link is defective.", "exclude this machine (Slurm: --exclude) and tell your administrator; the run resumes from its last checkpoint."),
    Known("gpu-lost", "Xid|fallen off the bus", r"NVRM: Xid|GPU has fallen off the bus",
          "the driver lost a GPU.", "exclude this machine (Slurm: --exclude) and tell your administrator; the number after Xid is in NVIDIA's list of Xid errors."),
    Known("illegal-access", "illegal memory access|misaligned address", r"an illegal memory access was encountered|CUDA error: misaligned address",
          "a kernel read or wrote outside its memory; the traceback often shows a later line.",
          "run once with CUDA_LAUNCH_BLOCKING=1 for the right line; train.compile=false shows whether a compiled kernel is the cause."),
    Known("device-assert", "device-side assert", r"device-side assert triggered",
          "an index was out of range on the GPU, most often a token id beyond the vocabulary.",
          "run steelyard data verify PREFIX, and compare the tokenizer's size with model.vocab; train.device=cpu shows the line."),
    Known("cublas", "CUBLAS_STATUS", r"CUBLAS_STATUS_(NOT_INITIALIZED|EXECUTION_FAILED|INTERNAL_ERROR)",
          "a matrix product failed: usually the memory is full, sometimes a cuBLAS of another CUDA comes first on the loader's path.",
          "free memory (see nvidia-smi); remove CUDA folders from LD_LIBRARY_PATH; steelyard doctor shows which libraries are loaded."),
    Known("cudnn-mismatch", "cuDNN|CUDNN_STATUS", r"cuDNN version incompatibility|CUDNN_STATUS_(NOT_INITIALIZED|VERSION_MISMATCH|SUBLIBRARY_VERSION_MISMATCH)",
          "another cuDNN than torch's own comes first on the loader's path.", "remove its folder from LD_LIBRARY_PATH; steelyard doctor names it."),
    # Rendezvous and communication between ranks
    Known("address-in-use", "ddress already in use|EADDRINUSE", r"[Aa]ddress already in use|EADDRINUSE",
          "the rendezvous port is in use, often by a run that was not ended.",
          "unset MASTER_PORT: Steelyard's launchers choose a free one; ss -tlnp shows which process uses it."),
    Known("watchdog", "Watchdog caught collective operation timeout", r"Watchdog caught collective operation timeout",
          "a rank waited in a collective for another that did not join: it died, hangs, or is in another collective.",
          "look for the first error in any other rank's log; steelyard watch RUN names the slow or silent rank."),
    Known("nccl-system", "unhandled system error|ncclSystemError", r"NCCL error.*unhandled system error|ncclSystemError",
          "a system call failed inside NCCL: sockets, shared memory or InfiniBand.",
          "steelyard doctor checks interfaces, /dev/shm and locked memory; NCCL_DEBUG=WARN shows which call; NCCL_SOCKET_IFNAME selects the interface."),
    Known("nccl-cuda", "unhandled cuda error|ncclUnhandledCuda", r"unhandled cuda error|ncclUnhandledCudaError",
          "a CUDA call failed inside NCCL: usually the memory is full, or two ranks share a GPU (Duplicate GPU detected).",
          "use one rank per GPU; NCCL_DEBUG=INFO shows more."),
    Known("nccl-remote", "ncclRemoteError|remote process exited", r"ncclRemoteError|remote process exited or there was a network error",
          "the other end of a connection exited.", "this is a consequence: look for the first error in the other ranks' logs."),
    Known("nccl-interface", "no socket interface found", r"no socket interface found",
          "NCCL_SOCKET_IFNAME names an interface that this machine does not have.", "unset it, or use an interface from ls /sys/class/net."),
    Known("ib-memory", "ibv_", r"ibv_(reg_mr|create_cq|create_qp)\S* failed|Cannot allocate memory.*ibv_",
          "InfiniBand could not lock memory.", "ulimit -l unlimited before the ranks start; in containers --ulimit memlock=-1."),
    Known("gloo-connect", "connectFullMesh", r"connectFullMesh failed",
          "gloo could not reach the other ranks: usually the host name resolves to 127.0.1.1, which other machines cannot reach.",
          "set GLOO_SOCKET_IFNAME to the network interface, and MASTER_ADDR to an IP address; steelyard doctor shows both."),
    Known("store-timeout", "client socket has|waiting for clients", r"client socket has (timed out|failed to connect)|Timed out after \d+ seconds waiting for clients",
          "not all ranks joined the rendezvous: some did not start, or cannot reach MASTER_ADDR or the port.",
          "look for the first error of the missing ranks; steelyard doctor --nodes a,b tests the connections between machines."),
    Known("lost-peer", "by peer", r"Connection (reset|closed) by peer",
          "another rank ended.", "this is a consequence: look for the first error in the other ranks' logs."),
    Known("bus-error", "Bus error|shared memory|</torch_", r"Bus error|insufficient shared memory \(shm\)|unable to (write to|open) (file|shared memory object) </torch_",
          "shared memory is full; the default in containers is 64 MiB.", "docker and podman: --ipc=host or --shm-size=8g; see df /dev/shm."),
    # Scheduler and system
    Known("slurm-time", "DUE TO TIME LIMIT", r"CANCELLED AT .* DUE TO TIME LIMIT",
          "the job reached its time limit.", "the same command resumes from the last checkpoint; request more time, or let submit requeue it."),
    Known("slurm-preempted", "DUE TO PREEMPTION", r"CANCELLED AT .* DUE TO PREEMPTION",
          "a job of higher priority took the nodes.", "the same command resumes; submit requeues automatically."),
    Known("slurm-node-failed", "NODE FAILURE", r"CANCELLED AT .* DUE TO NODE FAILURE",
          "a node failed.", "the same command resumes; exclude the node with --exclude if it fails again."),
    Known("oom-kill", "oom", r"oom[_-]kill", HOST_MEMORY, HOST_MEMORY_HINT),
    Known("oom-killed", "Killed process", r"Out of memory: Killed process", HOST_MEMORY, HOST_MEMORY_HINT),
    Known("memory-limit", "memory limit", r"[Ee]xceeded (job|step) memory limit", HOST_MEMORY, HOST_MEMORY_HINT),
    Known("slurm-gres", "node configuration is not|generic resource", r"Requested node configuration is not available|Invalid generic resource",
          "no node has the requested resources.", "compare with sinfo -o '%P %G %D'; steelyard plan cluster --from slurm writes the available nodes."),
    Known("slurm-account", "account", r"Invalid account or account/partition combination",
          "Slurm does not allow this account to use this partition.", "sacctmgr show assoc user=$USER shows what it may use; set account and partition in the site profile."),
    Known("slurm-step-over", "already completing or completed|Invalid job id", r"Job/step already completing or completed|Invalid job id specified",
          "the allocation has ended, or never existed.", "squeue -u $USER lists your allocations; request a new one."),
    Known("image-missing", "could not open image", r"could not open image (?P<image>\S+?):? ",
          "there is no image {image} on this machine.", "give its full path, on a file system that the nodes share; site profile: container.image."),
    Known("mpi-slots", "slots available", r"There are not enough slots available",
          "mpirun was asked for more ranks than the hosts have slots.", "set the slots: --host a:8,b:8; steelyard submit --on mpi does so."),
    Known("mpi-root", "as root", r"mpirun has detected an attempt to run as root",
          "Open MPI refuses to run as root.", "run as another user, or set OMPI_ALLOW_RUN_AS_ROOT=1 and OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 in a container."),
    Known("ssh-key", "Host key verification failed", r"Host key verification failed",
          "this machine does not know the other's host key.", "ssh-keyscan HOST >> ~/.ssh/known_hosts; steelyard doctor --nodes tests all."),
    Known("ssh-denied", "Permission denied (", r"Permission denied \((publickey|password|gssapi|keyboard)",
          "ssh would ask for a password, which is not possible in a job.", "ssh-copy-id HOST, with a key without passphrase."),
    Known("disk-full", "No space left|quota exceeded", r"No space left on device|Disk quota exceeded",
          "the disk or your quota is full.", "free some space (checkpoint.keep_last keeps fewer); the run resumes from its last complete checkpoint."),
    Known("open-files", "Too many open", r"Too many open files", "the limit of open files is too low.", "ulimit -n 65536 before the ranks start."),
    Known("read-only", "Read-only file system", r"Read-only file system",
          "a program writes to a read-only image.", "bind a folder of the host there; steelyard doctor --container IMAGE does so for libraries."),
    Known("illegal-instruction", "Illegal instruction", r"Illegal instruction",
          "a program was built for a newer CPU.", "install PyTorch's own build: make setup."),
    # Containers that do not start
    Known("container-init", "container-init", r"container-init binary not found",
          "podman starts ranks under an init, catatonit, which is not installed.", "install the package catatonit; or set options of the site's container, such as [\"--init=false\"]."),
    Known("container-limits", "setrlimit", r"setrlimit .?RLIMIT_\w+.?: Operation not permitted",
          "the runtime may not set its default limits: root has restricted permissions on this machine.",
          "set lower ones in containers.conf (default_ulimits), or in the site: container.options = [\"--ulimit=nofile=1024:1024\", \"--ulimit=nproc=1024:1024\"]."),
    Known("container-cgroups", "hybrid mode", r"cgroups in hybrid mode not supported",
          "crun does not run on a machine that mixes cgroup v1 and v2.", "install runc; in containers.conf, [engine], runtime = \"runc\"."),
    Known("container-mqueue", "/dev/mqueue", r"statfs /dev/mqueue: no such file",
          "--ipc=host mounts the host's message queues, and the host has none.", "mount -t mqueue none /dev/mqueue; or in the site: container.options = [\"--ipc=private\", \"--shm-size=8g\"]."),
    Known("docker-gpus", "could not select device driver", r"could not select device driver .{0,40}gpu",
          "docker is not configured for GPUs.", "install nvidia-container-toolkit, then nvidia-ctk runtime configure --runtime=docker, and restart docker."),
    Known("podman-gpus", "nvidia.com/gpu", r"unresolvable CDI devices|stat nvidia\.com/gpu=|nvidia\.com/gpu=\w+: no such file",
          "podman is not configured for GPUs.", "install nvidia-container-toolkit, then nvidia-ctk cdi generate --output=/etc/cdi/nvidia.yaml; needs podman 4.1 or newer."),
    Known("docker-daemon", "Docker daemon|docker API", r"Cannot connect to the Docker daemon|permission denied while trying to connect to the (Docker daemon|docker API)",
          "docker's daemon does not run, or you may not use it.", "systemctl start docker; or join its group: usermod -aG docker YOU, then log in again. podman needs neither."),
    Known("image-not-given", "pull access denied|manifest unknown|initializing source", r"pull access denied|manifest unknown|initializing source docker://",
          "no registry provides that image.", "build it (containers/Dockerfile), log in to its registry, or give its full name; docker and podman do not share images: docker save IMAGE | podman load."),
    # Harmless messages
    Known("kineto-not-running", "Kineto", r"Can't disable Kineto profiler when it's not running",
          "the profiler was stopped twice: Megatron does so after the last profiled step. The trace had already been written.",
          "nothing: the profile is complete. steelyard profile stops once.", harmless=True),
    Known("kineto-cupti", "CUPTI", r"CUPTI_ERROR_(NOT_INITIALIZED|INSUFFICIENT_PRIVILEGES|MULTIPLE_SUBSCRIBERS\w*)|CUPTI initialization failed",
          "the profiler may not read the GPU's counters: another profiler is attached, or only administrators may. Training is not affected.",
          "profile with one tool at a time; the administrator can set NVreg_RestrictProfilingToAdminUsers=0.", harmless=True),
    Known("nvtx-annotation", "External init callback", r"External init callback must run in same thread as registerClient",
          "a message of the profiler at start.", "nothing.", harmless=True),
    Known("omp-threads", "OMP_NUM_THREADS", r"Setting OMP_NUM_THREADS environment variable for each process to be 1",
          "torchrun reports that it gives each rank one thread.", "nothing; set OMP_NUM_THREADS for more.", harmless=True),
    Known("warning", "warn|Warning:", r"^\s*warnings\.warn\(|\b(User|Future|Deprecation|Runtime)Warning:",
          "a Python warning, or the source line that belongs to one.", "nothing.", harmless=True),
    Known("barrier-device", "using GPU|No device id", r"using GPU \d+ (to perform barrier|as device used by this process)|No device id is provided via",
          "a message of torch about which GPU a rank uses.", "nothing.", harmless=True),
    Known("destroy-process-group", "destroy_process_group() was not called", r"destroy_process_group\(\) was not called",
          "a program ended without calling destroy_process_group().", "nothing, if it succeeded; after an error it is a consequence.", harmless=True),
    Known("hostname-socket", "hostname of the client socket cannot be retrieved", r"hostname of the client socket cannot be retrieved",
          "an address has no host name.", "nothing.", harmless=True),
    Known("ibv-fork", "fork()", r"A process has executed an operation involving a call\s+to the \"?fork\(\)",
          "Open MPI warns about forks; data loaders fork.", "nothing; mpi_warn_on_fork 0 silences it.", harmless=True),
    Known("tensorboard-tf", "TensorFlow installation not found", r"TensorFlow installation not found",
          "TensorBoard works without TensorFlow.", "nothing.", harmless=True),
)  # fmt: skip


OVER = tuple((known.name, piece) for known in KNOWN if known.over for piece in known.over.split("|"))
"""Names of messages, and parts of lines that cancel them."""


def explain_line(line: str) -> Explained | None:
    """The explanation of a line; None if it is unknown."""
    for known in KNOWN:
        if any(part in line for part in known.alternatives):
            found = known.compiled.search(line)
            if found is not None:
                filled = {name: value or "" for name, value in found.groupdict().items()}
                return Explained(
                    known.name, _format(known.meaning, filled), _format(known.hint, filled), known.harmless
                )
    return None


def advice(error: str) -> str:
    """The meaning and hint for the first known line of an error, as the start of a sentence; empty if none is known."""
    known = (explain_line(line) for line in error.splitlines())
    found = next((each for each in known if each is not None and not each.harmless), None)
    return "" if found is None else f"{found.meaning} {found.hint.rstrip('.')}; "


def _format(words: str, values: dict[str, str]) -> str:
    for name, value in values.items():
        words = words.replace(f"{{{name}}}", value)
    return words

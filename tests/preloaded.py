"""Commands of this interpreter in forks of a process that has imported torch and Steelyard already.

Importing them costs seconds of CPU and a short command needs little else. `run` and `Popen` take what `subprocess`
takes. A process becomes what `python -P -m steelyard train ...` would be: arguments, folder, environment, standard
streams, signal handlers and session are its own, and it exits like an interpreter. Processes that it starts with this
interpreter are forked from it in turn, so that parents, signals and process groups are real.

What a fork cannot show needs a fresh interpreter: which modules a command imports, interpreter options, and variables
that are read when a module is imported (`READ_AT_IMPORT`). Such commands go to `subprocess` as they are.

A host of the lab's cluster has a loaded process too (`listen`). Slurm starts node agents there, not a test, so
`tests/warm/sitecustomize.py` has each of them run as a fork of that process, and their ranks are forks in turn.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import faulthandler
import gc
import importlib
import importlib.util
import io
import json
import multiprocessing.process
import os
import pkgutil
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
import warnings
import weakref
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from steelyard.core.host import die_with_parent

# Not the Hugging Face libraries': nothing in ALSO or Steelyard imports those before they are used.
READ_AT_IMPORT = ("PYTHON", "TRITON_", "TORCH_LOGS", "LD_", "MKL_")
UNBUFFERED = "PYTHONUNBUFFERED"
UNDERSTOOD = {"-P", "-u", "-B"}
ROOT = Path(__file__).parent.parent
REQUEST_BYTES = 1 << 20
LISTENING = [
    sys.executable, "-P", "-c",
    "import sys; sys.path.insert(0, sys.argv[1]); from tests import preloaded; preloaded.listen(sys.argv[2])",
    str(ROOT),
]  # fmt: skip
ROOM = "." * 4000  # An argument of a loaded process, where its forks write their own arguments.
ALSO = ("torch._dynamo", "torch.distributed.checkpoint", "torch.distributed.fsdp", "torch.distributed.pipelining",
        "torch.distributed.run", "optuna", "pyarrow", "safetensors.torch", "sqlalchemy", "tokenizers")  # fmt: skip

_RealPopen = subprocess.Popen


def run(
    command: Sequence[Any],
    *,
    timeout: float,
    input: Any = None,
    check: bool = False,
    capture_output: bool = False,
    **options: Any,
) -> subprocess.CompletedProcess:
    """`subprocess.run`, with a time limit."""
    if capture_output:
        options |= {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    if input is not None:
        options["stdin"] = subprocess.PIPE
    with Popen(command, **options) as process:
        try:
            out, err = process.communicate(input, timeout=timeout)
        except subprocess.TimeoutExpired as error:
            error.add_note(_stacks(process))
            raise
        except BaseException:
            process.kill()
            raise
    done = subprocess.CompletedProcess(command, process.returncode, out, err)
    if check:
        done.check_returncode()
    return done


def _stacks(process: subprocess.Popen) -> str:
    """End a process that did not end in time; returns the stacks of its threads and of its children's."""
    for number in [process.pid, *descendants(process.pid)]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(number, signal.SIGQUIT)  # The handler of faulthandler, see `_take_over`.
    time.sleep(1)
    process.kill()
    try:
        _, complaints = process.communicate(timeout=20)
    except (subprocess.TimeoutExpired, ValueError):
        return "no stacks: a child holds the streams"
    return complaints.decode(errors="replace") if isinstance(complaints, bytes) else complaints or ""


def descendants(process: int) -> list[int]:
    """The children of a process, and theirs."""
    try:
        children = [int(each) for each in Path(f"/proc/{process}/task/{process}/children").read_text().split()]
    except OSError:
        return []
    return children + [each for child in children for each in descendants(child)]


def python_arguments(command: Any, env: Mapping[str, str] | None) -> list[str] | None:
    """What follows the interpreter and its options, if a fork of a loaded process can be this command."""
    if isinstance(command, (str, bytes, os.PathLike)) or not command or str(command[0]) != sys.executable:
        return None
    words = [str(word) for word in command[1:]]
    while words and words[0] in UNDERSTOOD:
        words.pop(0)
    if not words or (words[0].startswith("-") and words[0] not in ("-m", "-c")):
        return None
    given = dict(os.environ if env is None else env)
    if given.get("PYTHONPATH") == str(ROOT):  # Where Steelyard comes from anyway.
        del given["PYTHONPATH"]
    changed = {name for name in {*given, *os.environ} if given.get(name, "") != os.environ.get(name, "")}
    return None if any(name.startswith(READ_AT_IMPORT) for name in changed - {UNBUFFERED}) else words


class _Forking(_RealPopen):
    """`subprocess.Popen` that forks a loaded process where it can; `_fork` says how."""

    def _execute_child(self, args, executable, preexec_fn, close_fds, pass_fds, cwd, env, *rest):
        words = None if executable else python_arguments(args, env)
        if words is None:
            super()._execute_child(args, executable, preexec_fn, close_fds, pass_fds, cwd, env, *rest)
            return
        pipes, start_new_session = rest[3:9], rest[-2]
        given, written, complaints = pipes[0], pipes[3], pipes[5]
        streams = [own if theirs == -1 else theirs for own, theirs in enumerate((given, written, complaints))]
        request = {
            "command": [str(word) for word in args],
            "words": words,
            "cwd": os.fspath(cwd or Path.cwd()),
            "env": dict(os.environ if env is None else env),
            "new_session": start_new_session,
        }
        sys.stdout.flush(), sys.stderr.flush()
        self.pid = self._fork(request, streams, preexec_fn, pass_fds)
        self._child_created = True
        self._close_pipe_fds(*pipes)

    def _fork(self, request, streams, preexec_fn, pass_fds) -> int:
        raise NotImplementedError


class Nested(_Forking):
    """Processes that a forked process starts: forks of itself, and so really its children."""

    def _fork(self, request, streams, preexec_fn, pass_fds) -> int:
        child = os.fork()
        if child == 0:
            become(request, streams, preexec_fn, pass_fds)
        return child


class Popen(_Forking):
    """Processes that a test starts: forks of the server, which reports how they end."""

    _server: Server | None = None

    def _fork(self, request, streams, preexec_fn, pass_fds) -> int:
        assert preexec_fn is None, "not for a process that the server forks"
        if Popen._server is None:
            Popen._server = Server()
        self._end = Popen._server.fork(request, streams)
        return int(self._end.recv(64))

    def _try_wait(self, wait_flags):
        if not hasattr(self, "_end"):
            return super()._try_wait(wait_flags)
        ready, _, _ = select.select([self._end], [], [], 0 if wait_flags else None)
        if not ready:
            return 0, 0
        said = self._end.recv(64)
        self._end.close()
        return self.pid, int(said) if said else signal.SIGKILL

    def _internal_poll(self, *arguments, **options):
        if not hasattr(self, "_end"):
            return super()._internal_poll(*arguments, **options)
        with self._waitpid_lock:
            if self.returncode is None:
                pid, status = self._try_wait(os.WNOHANG)
                if pid:
                    self._handle_exitstatus(status)
        return self.returncode


class Server:
    """The loaded process, started when first needed; it ends when this process does."""

    def __init__(self) -> None:
        self._ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._lock = threading.Lock()
        with theirs:
            for end in (self._ours, theirs):
                end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, REQUEST_BYTES)
            code = (
                f"import sys; sys.path[:0] = [{str(ROOT)!r}]; import tests.preloaded as p; p.serve({theirs.fileno()})"
            )
            self._process = _RealPopen(
                [sys.executable, "-P", "-c", code, ROOM], cwd=ROOT, pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, start_new_session=True,
                env=os.environ | {"OMP_NUM_THREADS": "1"},
            )  # fmt: skip

    def fork(self, request: dict[str, Any], streams: list[int]) -> socket.socket:
        """Have the server fork; the connection returned says the number of the process, then its wait status."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs, self._lock:
            socket.send_fds(self._ours, [json.dumps(request).encode()], [theirs.fileno(), *streams])
        return ours


def serve(descriptor: int) -> None:
    """Import everything once, then fork on request and report how the forks end, until the other end is closed."""
    _import_all()
    with socket.socket(fileno=descriptor) as channel:
        forks = _Forks(channel)
        while True:
            forks.wait()
            data, descriptors, _, _ = socket.recv_fds(channel, REQUEST_BYTES, 4)
            if not data:
                return
            forks.add(socket.socket(fileno=descriptors[0]), json.loads(data), descriptors[1:])


@contextlib.contextmanager
def loaded_host(place: Path) -> Iterator[tuple[int, dict[str, str]]]:
    """A loaded process of this host: its id, and the variables with which node agents are forks of it."""
    words = [*LISTENING, f"{place}.{socket.gethostname()}", ROOM]
    variables = {"PYTHONPATH": f"{ROOT / 'tests' / 'warm'}:{ROOT}", "STEELYARD_TESTS_WARM": str(place)}
    with _RealPopen(words, env=os.environ | {"OMP_NUM_THREADS": "1"}, preexec_fn=die_with_parent()) as loaded:
        try:
            while not Path(words[-2]).exists():
                if loaded.poll() is not None:
                    raise ChildProcessError(f"the loaded process ended with {loaded.returncode}")
                time.sleep(0.05)
            yield loaded.pid, variables
        finally:
            loaded.kill()


def listen(path: str) -> NoReturn:
    """The same for processes that connect, such as the node agents of a host; a fork ends with its connection."""
    Path(path).unlink(missing_ok=True)
    channel = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    channel.bind(path)
    channel.listen()
    _import_all()
    forks = _Forks(channel, end_with_connection=True)
    while True:
        forks.wait()
        connection, _ = channel.accept()
        data, streams, _, _ = socket.recv_fds(connection, REQUEST_BYTES, 3)
        if data:
            forks.add(connection, json.loads(data), streams)


def _import_all() -> None:
    import steelyard

    for module in (*ALSO, *(found.name for found in pkgutil.walk_packages(steelyard.__path__, "steelyard."))):
        if not module.endswith("__main__"):
            importlib.import_module(module)
    gc.collect()
    gc.freeze()


class _Forks:
    """The forks of a loaded process, each with a connection that says its number and, in the end, its wait status."""

    def __init__(self, channel: socket.socket, end_with_connection: bool = False) -> None:
        self._channel, self._end_with_connection = channel, end_with_connection
        self._die = die_with_parent() if end_with_connection else None
        self._woken, waker = socket.socketpair()
        self._woken.setblocking(False), waker.setblocking(False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(waker.fileno(), warn_on_full_buffer=False)
        self._waker = waker
        self._ends: dict[int, socket.socket] = {}

    def wait(self) -> None:
        """Report how forks end, until a request comes."""
        while True:
            connections = {end: child for child, end in self._ends.items()} if self._end_with_connection else {}
            ready, _, _ = select.select([self._channel, self._woken, *connections], [], [])
            for end in connections.keys() & set(ready):  # Nothing more is said there, so it is closed.
                os.kill(connections[end], signal.SIGKILL)
                self._ends[connections[end]] = socket.socket()
            if self._woken in ready:
                self._woken.recv(4096)
                while self._ends and (ended := os.waitpid(-1, os.WNOHANG))[0]:
                    with self._ends.pop(ended[0]) as end:
                        _send(end, ended[1])
            if self._channel in ready:
                return

    def add(self, end: socket.socket, request: dict[str, Any], streams: Sequence[int]) -> None:
        child = os.fork()
        if child == 0:
            signal.set_wakeup_fd(-1)
            if self._die is not None:
                self._die()
            become(request, streams)
        for stream in streams:
            os.close(stream)
        self._ends[child] = end
        _send(end, child)


def _send(end: socket.socket, number: int) -> None:
    with contextlib.suppress(OSError):  # Nobody waits for it any more.
        end.send(str(number).encode())


def become(request: dict[str, Any], streams: Sequence[int], preexec_fn=None, pass_fds: Sequence[int] = ()) -> NoReturn:
    """Turn this fork into a new interpreter's process as far as a program can see, run its program, and exit."""
    code = 1
    try:
        _take_over(request, streams, pass_fds)
        if preexec_fn is not None:
            preexec_fn()
        code = _exit_code(request["words"])
    except BaseException:
        traceback.print_exc()
    finally:
        try:
            threading._shutdown()
            atexit._run_exitfuncs()
            sys.stdout.flush(), sys.stderr.flush()
        finally:
            os._exit(code)


def _take_over(request: dict[str, Any], streams: Sequence[int], pass_fds: Sequence[int]) -> None:
    import torch

    gc.freeze()  # Garbage of the process before the fork would close descriptors that have new owners here.
    if request["new_session"]:
        os.setsid()
    held = [os.dup(stream) for stream in streams]  # One may be where another must go.
    for target, stream in enumerate(held):
        os.dup2(stream, target)
    kept = sorted({0, 1, 2, *pass_fds})
    for low, high in zip(kept, [*kept[1:], os.sysconf("SC_OPEN_MAX")], strict=True):
        os.closerange(low + 1, min(high, 1 << 16))
    for number in signal.valid_signals():
        if number not in (signal.SIGKILL, signal.SIGSTOP) and signal.getsignal(number) is not None:
            signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    faulthandler.register(signal.SIGQUIT, file=2)
    # What the process before the fork wants done at its end is not this one's to do.
    atexit._clear()
    weakref.finalize._registry.clear()
    weakref.finalize._registered_with_atexit = False
    os.chdir(request["cwd"])
    multiprocessing.process.ORIGINAL_DIR = request["cwd"]
    os.environ.clear()
    os.environ.update(request["env"])
    if os.environ.get(UNBUFFERED):
        sys.stdout = io.TextIOWrapper(io.FileIO(1, "w", closefd=False), encoding="utf-8", write_through=True)
    _show(request["command"])
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS") or os.cpu_count() or 1))
    sys.orig_argv = request["command"]
    subprocess.Popen = Nested


def _show(command: Sequence[str]) -> None:
    """Have `ps` and /proc show a command for this process, where its arguments lie in memory."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = map(int, fields[45:47])
    shown = b"\0".join(map(os.fsencode, command))[: end - start - 1]
    ctypes.memmove(start, shown.ljust(end - start, b"\0"), end - start)


def _exit_code(words: list[str]) -> int:
    """Run a module, code or a script as the main program."""
    how, *rest = words
    try:
        if how == "-m":
            sys.argv = [str(importlib.util.find_spec(rest[0]).origin), *rest[1:]]
            warnings.filterwarnings("ignore", category=RuntimeWarning, module="runpy")  # It is imported already.
            runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
        elif how == "-c":
            sys.argv = ["-c", *rest[1:]]
            main = type(sys)("__main__")
            sys.modules["__main__"] = main
            exec(compile(rest[0], "<string>", "exec"), main.__dict__)
        else:
            sys.argv = words
            script = Path(how).absolute()
            sys.path.insert(0, str(script.parent))
            runpy.run_path(str(script), run_name="__main__")
    except SystemExit as ended:
        if isinstance(ended.code, str):
            print(ended.code, file=sys.stderr)
        return ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except KeyboardInterrupt:
        traceback.print_exc()
        return 130
    except BaseException:
        traceback.print_exc()
        return 1
    return 0

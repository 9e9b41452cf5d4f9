"""Has a node agent run as a fork of its host's loaded process (`listen` of tests/preloaded.py).

Every Python with this folder in PYTHONPATH imports this first. In a node agent it does not return: signals that the
agent gets are passed on to the fork, which is killed when the agent is, and the agent ends as the fork does. Without a
loaded process, or while a file `PLACE.off` exists, the agent goes on by itself.

What this does not show: Slurm signals each process of a job, and only the agent's process here is one of the job.
"""

# ruff: noqa: PTH109, PTH110
# pathlib is slow to import, and every Python process here imports this.
import os
import sys

PLACE = "STEELYARD_TESTS_WARM"  # the path of the socket, without the name of the host


def hand_over(place: str) -> None:
    """Stay as the node agent's process for its parent, while the fork does the work."""
    import json
    import signal
    import socket

    server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        server.connect(f"{place}.{socket.gethostname()}")
    except OSError:
        return
    words = sys.orig_argv[sys.orig_argv.index("-m") :]
    request = {
        "command": sys.orig_argv, "words": words, "cwd": os.getcwd(), "env": dict(os.environ), "new_session": True
    }  # fmt: skip
    socket.send_fds(server, [json.dumps(request).encode()], [0, 1, 2])
    try:
        fork = int(server.recv(64))
        for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
            signal.signal(number, lambda number, _: os.kill(fork, number))
        status = int(server.recv(64) or signal.SIGKILL)
        if os.WIFSIGNALED(status):
            if os.WTERMSIG(status) != signal.SIGKILL:
                signal.signal(os.WTERMSIG(status), signal.SIG_DFL)
            os.kill(os.getpid(), os.WTERMSIG(status))
        os._exit(os.waitstatus_to_exitcode(status))
    finally:
        os._exit(1)  # Never go on to be a second agent.


is_agent = "steelyard.launch.node_agent" in sys.orig_argv and "--one-rank" not in sys.orig_argv
if is_agent and PLACE in os.environ and not os.path.exists(os.environ[PLACE] + ".off"):
    hand_over(os.environ[PLACE])

"""What ends a container whose client was killed: a pipe that the client's keeper holds open outside, read inside.

Docker and Podman run a container apart from the `run` that asked for it. Killing that one, as `cancel --now`, Slurm or
the kernel do, would leave the ranks training. So a shell keeps the client, holding a pipe in the run folder open; who
starts the ranks inside reads from it, and when nobody holds it any more, dies, and the container with it. A client must
not hold the pipe itself: Podman's hands all it holds on to the process that watches over the container.
"""

from __future__ import annotations

import os
import signal
import threading
from contextlib import suppress
from pathlib import Path

from steelyard.launch.spawn import SAME_REQUEST_SECONDS

VARIABLE = "STEELYARD_LIFELINE"  # names the pipe
SAME_REQUEST_SECONDS_INSIDE = 5.0
# $1 is the folder, the rest the client's words. Who reads inside may be another user; a file system without pipes does
# without. Signals are passed on, and a session of its own spares the client those for the group; what a shell starts in
# the background ignores SIGINT, so that goes on as SIGTERM. Since a killed mpirun leaves what it started, the parent is
# looked for.
KEEPER = f"""pipe=$(mktemp -u -- "$1/alive.XXXXXXXX")
shift
if mkfifo -m 644 -- "$pipe" 2>/dev/null && exec 9<>"$pipe"; then export {VARIABLE}="$pipe"; fi
setsid "$@" 9>&- &
client=$!
trap 'kill -TERM $client 2>/dev/null' TERM INT
trap 'kill -USR1 $client 2>/dev/null' USR1
while read -r _ _ _ parent _ </proc/$$/stat; do
    [ "$parent" = $PPID ] || {{ kill -KILL $$; break; }}
    sleep 1
done 9>&- >/dev/null 2>&1 &
lookout=$!
while wait $client; kill -0 $client 2>/dev/null; do :; done
wait $client
code=$?
kill $lookout 2>/dev/null
rm -f -- "$pipe"
exit $code
"""


def kept(client: list[str], folder: str) -> list[str]:
    """A client's words, with the shell before them that holds the pipe."""
    return ["bash", "-c", KEEPER, "lifeline", folder, *client]


def hold() -> float:
    """Inside: die once nobody outside holds the pipe. Does nothing where there is none.

    Returns within how many seconds two requests to stop are one: Slurm tells keeper and client, and on a busy machine a
    runtime takes its time to hand each on.
    """
    path = os.environ.pop(VARIABLE, None)
    if path is None:
        return SAME_REQUEST_SECONDS
    try:
        pipe = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:  # The client was killed, and its keeper has tidied up, before this came to run.
        _die(path)
    except OSError:
        pass
    else:
        os.set_blocking(pipe, True)
        threading.Thread(target=_wait, args=(pipe, path), daemon=True).start()
    return SAME_REQUEST_SECONDS_INSIDE


def _wait(pipe: int, path: str) -> None:
    while os.read(pipe, 4096):
        pass
    _die(path)


def _die(path: str) -> None:
    with suppress(OSError):
        Path(path).unlink()
    os.kill(os.getpid(), signal.SIGKILL)

"""A real Slurm on this machine: a controller with accounting, and four nodes in two partitions.

Every host is a box: a network, hostname, process and mount namespace of its own, held open by one shell. Ending that
shell ends everything inside, which is how a node loses its power. Boxes hang on a bridge inside the controller's box,
so nothing of the network is visible outside, and two labs never meet. All files lie in one short folder (unix sockets
must be short), and what is ended at the end is what was started, known by process number and start time.

    a1, a2   partition a10     8 processors, 4 pretended GPUs (gpu:a10:4)
    b1, b2   partition a100    8 processors, 4 pretended GPUs (gpu:a100:4)

Over all four lie two partitions more: jobs of `urgent` take nodes from jobs of `spare`, which are warned before.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from steelyard.core.host import die_with_parent
from tests import preloaded

NODES = {"a1": 11, "a2": 12, "b1": 21, "b2": 22}
HOSTS = {"ctl": 1, **NODES}
PROGRAMS = ("munged", "mariadbd", "mariadb-install-db", "slurmdbd", "slurmctld", "slurmd", "ip", "nsenter", "unshare")
CLIENTS = ("sbatch", "srun", "salloc", "squeue", "scancel", "scontrol", "sinfo", "sdiag", "sacct", "sacctmgr")
NETWORK = "10.214.0"


def reason_to_skip() -> str | None:
    """Why a lab cannot be had here."""
    if os.geteuid():
        return "a virtual cluster needs root"
    missing = [name for name in PROGRAMS if shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin:/sbin") is None]
    return f"not installed: {', '.join(missing)} (make test-cluster installs them)" if missing else None


class Lab:
    """The cluster; `start` it, and `stop` it whatever happened."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="yard-", dir="/tmp"))
        self.folder.chmod(0o755)
        self.bin = self.folder / "bin"
        self.warm = self.folder / "warm"
        self.boxes: dict[str, tuple[int, str]] = {}
        self.holders: dict[str, subprocess.Popen] = {}
        self.environment = os.environ | {"SLURM_CONF": str(self.folder / "slurm.conf"), "OMP_NUM_THREADS": "1"}

    def start(self) -> None:
        """From nothing to four idle nodes."""
        for name in ("log", "munge", "db", "state", "bin", "dev", "empty", *(f"spool/{node}" for node in NODES)):
            (self.folder / name).mkdir(parents=True)
        self._write_files()
        self._box("ctl")
        self._enter("ctl", "ip", "link", "add", "br0", "type", "bridge")
        self._enter("ctl", "ip", "addr", "add", f"{NETWORK}.1/24", "dev", "br0")
        self._enter("ctl", "ip", "link", "set", "br0", "up")
        self._controller()
        for node in NODES:
            self.power_on(node)
        self.until(lambda: self._states().count("idle") == len(NODES), "idle nodes", 240)

    def stop(self) -> None:
        """End all boxes, the controller's last, and remove the folder."""
        for host in [*NODES, "ctl"]:
            self._end(host)
        shutil.rmtree(self.folder, ignore_errors=True)

    def power_on(self, node: str) -> None:
        """Start a node and its slurmd."""
        if node not in self.boxes:
            self._box(node)
            outside, inside = self.boxes["ctl"][0], self.boxes[node][0]
            link = f"v-{node}"
            self.until(lambda: not self._has_link(link), f"the old link of {node}", 240)
            in_ctl = ["nsenter", "-t", str(outside), "-n"]
            _run(*in_ctl, "ip", "link", "add", link, "type", "veth", "peer", "name", "eth0", "netns", str(inside))
            _run(*in_ctl, "ip", "link", "set", link, "master", "br0", "up")
            self._enter(node, "ip", "addr", "add", f"{NETWORK}.{NODES[node]}/24", "dev", "eth0")
            self._enter(node, "ip", "link", "set", "eth0", "up")
        self._enter(node, "slurmd", "-N", node)
        self._enter(  # Where node agents and their ranks are forked from.
            node, "setsid", "-f", "bash", "-c", 'exec "$@" >"$0" 2>&1 </dev/null', f"{self.folder}/log/warm.{node}",
            *preloaded.LISTENING, f"{self.warm}.{node}", preloaded.ROOM,
        )  # fmt: skip

    def power_off(self, node: str) -> None:
        """Take a node's power away: everything on it is gone at once, and says nothing any more.

        Its link is cut first, or else its kernel, which is everybody's, would close its connections in good order.
        """
        _run("nsenter", "-t", str(self.boxes["ctl"][0]), "-n", "ip", "link", "del", f"v-{node}")
        self._end(node)

    def client(self, *words: str, **options) -> subprocess.CompletedProcess:
        """Run a client of Slurm's, as on the login node."""
        return subprocess.run(
            [str(self.bin / words[0]), *words[1:]], capture_output=True, text=True, timeout=600, **options
        )

    def inside(self, host: str, *words: str) -> list[str]:
        """A command's words, to be run as if logged in to a host."""
        pid = str(self.boxes[host][0])
        return ["nsenter", "-t", pid, "-m", "-u", "-i", "-n", "-p", f"--wd={Path.cwd()}", "--", *words]

    def beside(self, host: str, *words: str) -> list[str]:
        """With a host's name and network, but outside its processes, from where other hosts can be entered."""
        return ["nsenter", "-t", str(self.boxes[host][0]), "-u", "-n", "--", *words]

    def mount(self, host: str, folder: Path, size: str) -> None:
        """A small disk of a host's own on a folder."""
        self._enter(host, "mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder))

    def run(self, host: str, *words: str) -> None:
        """Run a command as root of a host; it must succeed."""
        self._enter(host, *words)

    def until(self, holds: Callable[[], object], what: str, seconds: float, every: float = 0.1) -> None:
        """Wait for something, or say what did not come."""
        deadline = time.monotonic() + seconds
        while not holds():
            if time.monotonic() > deadline:
                raise TimeoutError(f"waited {seconds:.0f} s for {what}")
            time.sleep(every)

    def _states(self) -> list[str]:
        return self.client("sinfo", "-h", "-N", "-p", "a10,a100", "-o", "%t").stdout.split()

    def _has_link(self, link: str) -> bool:
        words = ["nsenter", "-t", str(self.boxes["ctl"][0]), "-n", "ip", "link", "show", link]
        return subprocess.run(words, capture_output=True).returncode == 0

    def _enter(self, host: str, *words: str) -> None:
        _run(*self.inside(host, *words), env=self.environment)

    def _box(self, host: str) -> None:
        ready = self.folder / f"{host}.ready"
        ready.unlink(missing_ok=True)
        with open(self.folder / "log" / f"box.{host}", "ab") as log:
            outer = subprocess.Popen(
                ["unshare", "--net", "--uts", "--ipc", "--pid", "--mount", "--fork", "--kill-child", "--mount-proc",
                 "bash", str(self.folder / "init"), host],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True, preexec_fn=die_with_parent(),
            )  # fmt: skip
        self.holders[host] = outer
        self.until(ready.exists, f"the box of {host}", 240)
        inner = int(Path(f"/proc/{outer.pid}/task/{outer.pid}/children").read_text().split()[0])
        self.boxes[host] = inner, _started(inner)
        for name in (host, f"{NETWORK}.{HOSTS[host]}"):
            (self.folder / f"{name}.pid").write_text(f"{inner}\n")  # For the scripts in here.

    def _end(self, host: str) -> None:
        pid, started = self.boxes.pop(host, (0, ""))
        if pid and _started(pid) == started:
            os.kill(pid, signal.SIGKILL)
        holder = self.holders.pop(host, None)
        if holder is not None:
            holder.kill()
            holder.wait(timeout=150)

    def _controller(self) -> None:
        folder = self.folder
        self._enter(
            "ctl", "munged", f"--key-file={folder}/munge/key", f"--socket={folder}/munge/sock",
            f"--pid-file={folder}/munge/pid", f"--log-file={folder}/munge/log", f"--seed-file={folder}/munge/seed",
        )  # fmt: skip
        shutil.chown(folder / "db", "mysql")
        quick = ["--innodb-flush-log-at-trx-commit=0", "--innodb-log-file-size=8M"]
        _run(
            "mariadb-install-db", "--no-defaults", "--user=mysql", f"--datadir={folder}/db", "--skip-test-db",
            "--auth-root-authentication-method=normal", "--innodb-doublewrite=0", *quick,
        )  # fmt: skip
        self._enter(
            "ctl", "setsid", "-f", "bash", "-c", 'exec "$@" >/dev/null 2>&1 </dev/null', "-",
            "mariadbd", "--no-defaults", "--user=mysql", f"--datadir={folder}/db", f"--socket={folder}/db/sock",
            "--skip-networking", f"--pid-file={folder}/db/pid", "--innodb-lock-wait-timeout=900", *quick,
        )  # fmt: skip
        ask = ["mariadb", "--no-defaults", "-S", f"{folder}/db/sock", "-e", "select 1"]
        self.until(lambda: subprocess.run(ask, capture_output=True).returncode == 0, "the database", 240)
        self._enter("ctl", "env", f"MYSQL_UNIX_PORT={folder}/db/sock", "slurmdbd")
        self.until(lambda: self.client("sacctmgr", "-n", "list", "cluster").returncode == 0, "slurmdbd", 240)
        self.client("sacctmgr", "-iQ", "add", "cluster", "yard")
        self._enter("ctl", "slurmctld")
        self.until(lambda: self.client("scontrol", "ping").returncode == 0, "slurmctld", 240)

    def _write_files(self) -> None:
        folder = self.folder
        addresses = "".join(f"{NETWORK}.{number} {host}\n" for host, number in HOSTS.items())
        (folder / "hosts").write_text(f"127.0.0.1 localhost\n{addresses}")
        (folder / "init").write_text(INIT.format(folder=folder))
        for name, mode in (("munge/key", 0o600), ("slurmdbd.conf", 0o600)):
            (folder / name).touch(mode=mode)
        (folder / "munge/key").write_bytes(os.urandom(128))
        (folder / "slurmdbd.conf").write_text(SLURMDBD.format(folder=folder))
        (folder / "slurm.conf").write_text(SLURM.format(folder=folder, network=NETWORK))
        (folder / "gres.conf").write_text(GRES.format(folder=folder))
        for number in range(4):
            os.mknod(folder / "dev" / f"gpu{number}", 0o20666, os.makedev(1, 3))  # /dev/null under another name
        for name in CLIENTS:
            (self.bin / name).write_text(CLIENT.format(folder=folder, name=name))
            (self.bin / name).chmod(0o755)
        (folder / "rsh").write_text(RSH.format(folder=folder))
        (folder / "rsh").chmod(0o755)


# A node uses the real clients, so the folder of those that enter the controller's box is empty there.
INIT = """hostname "$1"
ip link set lo up
mount --bind {folder}/hosts /etc/hosts
mount -t tmpfs tmpfs /dev/shm
[ "$1" = ctl ] || mount --bind {folder}/empty {folder}/bin
touch {folder}/"$1".ready
while :; do sleep 3600 & wait $!; done
"""
CLIENT = """#!/bin/bash
export SLURM_CONF={folder}/slurm.conf
read -r pid <{folder}/ctl.pid || exit 1
exec nsenter -t "$pid" -n -u -- /usr/bin/{name} "$@"
"""
# What ssh would do, for mpirun, without an sshd.
RSH = """#!/bin/bash
host=$1
shift
read -r pid <{folder}/$host.pid || exit 1
exec nsenter -t "$pid" -m -u -i -n -p --wd="$PWD" -- sh -c "$*"
"""
SLURM = """ClusterName=yard
SlurmctldHost=ctl({network}.1)
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge/sock
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.slurmd.pid
SlurmctldLogFile={folder}/log/slurmctld
SlurmdLogFile={folder}/log/slurmd.%n
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
MailProg=/bin/true
PropagateResourceLimits=NONE
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
SchedulerParameters=bf_interval=2,sched_interval=5
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost=127.0.0.1
AccountingStoragePass={folder}/munge/sock
ReturnToService=2
SlurmdTimeout=10
MessageTimeout=5
TCPTimeout=2
KillWait=15
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
GresTypes=gpu
NodeName=a[1-2] NodeAddr={network}.[11-12] CPUs=8 RealMemory=8000 Gres=gpu:a10:4
NodeName=b[1-2] NodeAddr={network}.[21-22] CPUs=8 RealMemory=8000 Gres=gpu:a100:4
PartitionName=a10 Nodes=a[1-2] Default=YES MaxTime=1:00:00 PreemptMode=OFF
PartitionName=a100 Nodes=b[1-2] MaxTime=1:00:00 PreemptMode=OFF
PartitionName=spare Nodes=a[1-2],b[1-2] MaxTime=1:00:00 PreemptMode=REQUEUE GraceTime=30
PartitionName=urgent Nodes=a[1-2],b[1-2] MaxTime=1:00:00 PreemptMode=OFF PriorityTier=10
"""
SLURMDBD = """AuthType=auth/munge
AuthInfo=socket={folder}/munge/sock
DbdHost=localhost
DbdAddr=127.0.0.1
SlurmUser=root
LogFile={folder}/log/slurmdbd
PidFile={folder}/slurmdbd.pid
StorageType=accounting_storage/mysql
StorageHost=localhost
StorageUser=root
StorageLoc=yard
"""
GRES = """AutoDetect=off
NodeName=a[1-2] Name=gpu Type=a10 File={folder}/dev/gpu[0-3]
NodeName=b[1-2] Name=gpu Type=a100 File={folder}/dev/gpu[0-3]
"""


def _run(*words: str, **options) -> None:
    done = subprocess.run(words, capture_output=True, text=True, timeout=600, stdin=subprocess.DEVNULL, **options)
    if done.returncode:
        raise RuntimeError(f"{' '.join(words)}\n{done.stdout}{done.stderr}")


def _started(pid: int) -> str:
    """When a process started: another one of the same number started at another time."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return ""

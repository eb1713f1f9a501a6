"""Starts a real SLURM on this machine: munged, slurmctld and a slurmd for each node.

Each node lives in namespaces of its own (processes, mounts, host name), so that its death takes all its
processes with it, as that of a machine does. All nodes share the network and the files of this machine.
"""

from __future__ import annotations

import os
import random
import re
import shutil
import signal
import socket
import stat
import subprocess
import tempfile
import threading
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tests.waiting import wait_until

Tracker = Literal["cgroup", "linuxproc"]
TRACKERS: tuple[Tracker, ...] = ("cgroup", "linuxproc")
PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "squeue", "unshare")
FREEZER = Path("/sys/fs/cgroup/freezer")
CPUS = 16
"""The CPUs that each node claims to have."""

SLURM_CONF = """\
ClusterName=test
SlurmctldHost=localhost(127.0.0.1)
SlurmUser=root
SlurmdUser=root
SlurmctldPort={controller_port}
SlurmdParameters=config_overrides
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool_%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd_%n.pid
SlurmctldLogFile={folder}/log/slurmctld.log
SlurmdLogFile={folder}/log/slurmd_%n.log
ProctrackType=proctrack/{tracker}
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU_Memory
SchedulerType=sched/backfill
SchedulerParameters=batch_sched_delay=0,sched_min_interval=0,sched_interval=1,bf_interval=1
ReturnToService=2
SlurmctldTimeout=30
SlurmdTimeout={slurmd_timeout}
KillWait=10
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
{gres}
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""

NODE_COMMAND = """\
hostname "$1"
mount --make-rprivate /
mount --bind "$2/hosts" /etc/hosts
mount -t tmpfs tmpfs /dev/shm
if [ -d "$2/cgroup" ]; then mount -t cgroup -o freezer none "$2/cgroup/freezer"; fi
slurmd -D -f "$2/slurm.conf" -N "$1" &
wait $!
"""


def why_not() -> str | None:
    """Return why no SLURM can be started here, and what to do about it; None where one can be."""
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    if missing:
        return f"no {', '.join(missing)}: run requirements/slurm.sh as root"
    if os.geteuid() != 0:
        return "SLURM's daemons need root here: run the tests as root"
    command = ["unshare", "--mount", "--pid", "--uts", "--fork", "--mount-proc", "true"]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        return "this container may not make namespaces: run it with CAP_SYS_ADMIN"
    return None


def why_not_tracked(tracker: Tracker) -> str | None:
    """Return why processes cannot be tracked in this way here; None where they can be."""
    if tracker == "cgroup" and not (FREEZER / "cgroup.procs").exists():
        return (
            "proctrack/cgroup of SLURM 22.05 needs the freezer of cgroup v1, which is not mounted"
        )
    return None


@dataclass(frozen=True)
class Job:
    """What `scontrol show job` says of a job."""

    state: str
    exit_code: int
    restarts: int
    fields: Mapping[str, str]


class Cluster:
    """A SLURM as a context manager. `folder` holds its files until the end.

    It is not a folder of pytest's: SLURM's sockets lie in it, whose paths may have 108 characters.

    The names of the nodes are of this cluster alone, as all clusters share the machine's cgroups.
    """

    def __init__(
        self,
        num_nodes: int,
        tracker: Tracker,
        *,
        slurmd_timeout: int = 30,
        gpus_per_node: int = 0,
    ) -> None:
        self.folder = folder = Path(tempfile.mkdtemp(prefix="mrl-slurm-"))
        self._ports = free_ports(num_nodes + 1)
        self.names = [f"c{self._ports[0]}n{index + 1}" for index in range(num_nodes)]
        self.env = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}
        self._tracker = tracker
        self._slurmd_timeout = slurmd_timeout
        self.gpus_per_node = gpus_per_node
        self._nodes: dict[str, subprocess.Popen[bytes]] = {}
        self._exits = ExitStack()

    def __enter__(self) -> Cluster:
        with ExitStack() as exits:
            exits.callback(shutil.rmtree, self.folder)
            exits.callback(self._remove_cgroups)
            self._write_files()
            self._munge(exits)
            self._start(exits, ["slurmctld", "-D", "-f", str(self.folder / "slurm.conf")])
            for name in self.names:
                self.start_node(name)
                exits.callback(self.kill_node, name)
            wait_until(lambda: self._num_idle() == len(self.names), "every node of SLURM is idle")
            self._exits = exits.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._exits.close()

    def start_node(self, name: str) -> None:
        """Start the slurmd of a node, which takes its processes along when it dies."""
        unshare = ["unshare", "--mount", "--pid", "--uts", "--fork", "--kill-child", "--mount-proc"]
        command = [*unshare, "sh", "-c", NODE_COMMAND, "sh", name, str(self.folder)]
        self._nodes[name] = self._popen(command, f"node_{name}")

    def kill_node(self, name: str) -> None:
        """Kill all processes of a node at once, as a loss of power does."""
        self._nodes[name].kill()
        self._nodes[name].wait()

    def command(self, *words: str, check: bool = True) -> str:
        """Run a command of SLURM and return what it printed."""
        done = subprocess.run(words, env=self.env, capture_output=True, text=True, check=False)
        assert not check or done.returncode == 0, f"{words}: {done.stdout}{done.stderr}"
        return done.stdout + done.stderr

    def submit(self, script: Path, *arguments: str, options: Sequence[str] = (), **env: str) -> str:
        """Submit a job and return its id."""
        command = ["sbatch", "--parsable", *options, str(script), *arguments]
        done = subprocess.run(
            command,
            env=self.env | env,
            capture_output=True,
            text=True,
            check=False,
            cwd=self.folder,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def job(self, job_id: str) -> Job:
        """Return the state of a job, for a heterogeneous one that of its first component."""
        text = self.command("scontrol", "--oneliner", "show", "job", job_id)
        fields = dict(re.findall(r"(\S+?)=(\S*)", text.splitlines()[0]))
        code, _, number = fields["ExitCode"].partition(":")
        return Job(
            state=fields["JobState"],
            exit_code=int(code) or (128 + int(number) if int(number) else 0),
            restarts=int(fields["Restarts"]),
            fields=fields,
        )

    def is_down(self, name: str) -> bool:
        """Return whether SLURM has taken a node for dead (which `*`, for no answer, is not yet)."""
        state = self.command("scontrol", "--oneliner", "show", "node", name)
        return bool(re.search(r" State=DOWN", state))

    def _num_idle(self) -> int:
        dead = [name for name, node in self._nodes.items() if node.poll() is not None]
        assert not dead, f"{dead} ended: {self._printed(dead[0])}"
        out = self.command("sinfo", "--noheader", "--Node", "--format=%T", check=False)
        return out.split().count("idle")

    def _printed(self, name: str) -> str:
        return (self.folder / "log" / f"node_{name}.printed").read_text()

    def _write_files(self) -> None:
        for name in ("state", "log"):
            (self.folder / name).mkdir(parents=True)
        nodes = []
        gres = f" Gres=gpu:{self.gpus_per_node}" if self.gpus_per_node else ""
        for name, port in zip(self.names, self._ports[1:], strict=True):
            nodes.append(
                f"NodeName={name} NodeHostname={name} NodeAddr=127.0.0.1 Port={port} CPUs={CPUS} "
                f"RealMemory=4000{gres} State=UNKNOWN"
            )
        conf = SLURM_CONF.format(
            controller_port=self._ports[0],
            folder=self.folder,
            tracker=self._tracker,
            slurmd_timeout=self._slurmd_timeout,
            gres="\n".join(["GresTypes=gpu"] * bool(gres) + nodes),
        )
        (self.folder / "slurm.conf").write_text(conf)
        if gres:
            files = [self.folder / f"gpu{index}" for index in range(self.gpus_per_node)]
            for file in files:
                os.mknod(file, stat.S_IFCHR | 0o600, os.makedev(1, 3))  # SLURM wants devices
            (self.folder / "gres.conf").write_text(
                f"Name=gpu File={self.folder}/gpu[0-{len(files) - 1}]\n"
            )
        hosts = "".join(f"127.0.0.1 {name}\n" for name in ("localhost", *self.names))
        (self.folder / "hosts").write_text(hosts)
        if self._tracker == "cgroup":
            (self.folder / "cgroup/freezer").mkdir(parents=True)
            (self.folder / "cgroup.conf").write_text(
                f"CgroupPlugin=cgroup/v1\nCgroupAutomount=no\nCgroupMountpoint={self.folder}/cgroup\n"
            )

    def _munge(self, exits: ExitStack) -> None:
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o400)
        names = {"pid-file": "munged.pid", "log-file": "munged.log", "seed-file": "munged.seed"}
        files = [f"--{option}={self.folder / name}" for option, name in names.items()]
        sock = self.folder / "munge.socket"
        command = ["munged", "--foreground", "--force", f"--key-file={key}", f"--socket={sock}"]
        self._start(exits, [*command, *files])
        wait_until(sock.exists, "munged listens")

    def _start(self, exits: ExitStack, command: list[str]) -> None:
        process = self._popen(command, command[0])
        exits.callback(process.wait)
        exits.callback(process.send_signal, signal.SIGTERM)

    def _popen(self, command: list[str], name: str) -> subprocess.Popen[bytes]:
        with (self.folder / "log" / f"{name}.printed").open("ab") as out:
            return subprocess.Popen(
                command, env=self.env, stdin=subprocess.DEVNULL, stdout=out, stderr=out
            )

    def _remove_cgroups(self) -> None:
        """Remove what dead nodes left in the freezer: no process is in it any more."""
        for name in self.names:
            for folder in FREEZER.glob(f"slurm_{name}*"):
                for path in sorted(folder.glob("**/"), reverse=True):
                    path.rmdir()


def free_ports(number: int) -> list[int]:
    """Return ports that nobody listens on, each only once in this process.

    They lie below the range from which Linux takes the ports of outgoing connections.
    """
    found: list[int] = []
    while len(found) < number:
        port = random.randrange(10_000, 30_000)
        with _taking, socket.socket() as one:
            if port in _taken or not one.connect_ex(("127.0.0.1", port)):
                continue
            _taken.add(port)
        found.append(port)
    return found


_taken: set[int] = set()
_taking = threading.Lock()

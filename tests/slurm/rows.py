"""The rows of the table in docs/slurm.md: what happens to a job, and how it must end.

Each row submits launch/slurm/train.sbatch to a real SLURM, on two nodes of its own. standin.py stands
in for torchrun and training, so that a start takes seconds.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from tests.slurm.cluster import Cluster, Job
from tests.slurm.standin import NUM_STEPS

ROOT = Path(__file__).parents[2]
SBATCH = ROOT / "launch/slurm/train.sbatch"
STANDIN = Path(__file__).with_name("standin.py")
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT")
LIMIT_S = 150.0
"""The end of any wait of a row, on top of the cluster's SlurmdTimeout."""


@dataclass
class Bench:
    """Two nodes, an empty folder and a port for one row."""

    cluster: Cluster
    nodes: list[str]
    folder: Path
    port: int
    limit_s: float = LIMIT_S
    _job_id: str = field(default="", init=False)

    @property
    def out(self) -> Path:
        return self.folder / "run"

    def submit(
        self, *plans: dict[str, object], options: list[str] | None = None, **env: str
    ) -> None:
        """Start i of the job follows plan i, and later ones the last plan."""
        shims = self.folder / "bin"
        shims.mkdir(parents=True)
        self.out.mkdir()
        (self.out / "plan.json").write_text(json.dumps(plans))
        launch = f'exec {sys.executable} {STANDIN} "$@"\n'
        is_launch = f'[ "$1 $2" = "-m mrl.launch" ] || exit 0\nshift 2\n{launch}'
        for name, text in (("torchrun", launch), ("python", is_launch)):
            (shims / name).write_text(f"#!/bin/sh\n{text}")
            (shims / name).chmod(0o755)
        self.start("recipe.yaml", options=options, PATH=f"{shims}:{os.environ['PATH']}", **env)

    def start(
        self, recipe: str, *overrides: str, options: list[str] | None = None, **env: str
    ) -> None:
        """Submit the script as a user would."""
        options = options or [f"--nodelist={','.join(self.nodes)}"]
        words = [recipe, str(self.out), *overrides]
        env = {"TMPDIR": str(self.folder), "PORT": str(self.port), **env}
        self._job_id = self.cluster.submit(SBATCH, *words, options=options, **env)

    def job(self) -> Job:
        return self.cluster.job(self._job_id)

    def scontrol(self, *words: str) -> str:
        return self.cluster.command("scontrol", *words, self._job_id)

    def scancel(self, *options: str) -> None:
        self.cluster.command("scancel", *options, self._job_id)

    def notes(self) -> str:
        file = self.out / "notes"
        return file.read_text() if file.exists() else ""

    def log(self) -> str:
        return (self.out / f"logs/slurm_{self._job_id}.log").read_text()

    def step(self) -> int:
        file = self.out / "checkpoints/latest_checkpointed_iteration.txt"
        return int(file.read_text() or "0") if file.exists() else 0

    def wait_for(self, condition: Callable[[], object], what: str) -> None:
        deadline = time.monotonic() + self.limit_s
        while not condition():
            assert time.monotonic() < deadline, (
                f"not within {self.limit_s:g} s: {what}\n{self.told()}"
            )
            time.sleep(0.2)

    def ended(self) -> Job:
        """Wait for the end of the job, however often it is requeued."""
        self.wait_for(lambda: self.job().state in ENDED, "the job ends")
        return self.job()

    def told(self) -> str:
        """Return all that helps to understand a failure."""
        logs = sorted((self.out / "logs").glob("*"))
        texts = [f"== {log.name}\n{log.read_text()}" for log in logs if log.is_file()]
        return "\n".join([str(self.job()), self.notes(), *texts])

    def pid_of_rank(self, rank: int) -> int:
        """Return the process id of a rank in the namespace of this machine."""
        for process in Path("/proc").glob("[0-9]*"):
            try:
                words = (process / "cmdline").read_bytes().split(b"\0")
                env = (process / "environ").read_bytes().split(b"\0")
            except OSError:
                continue
            if f"output_dir={self.out}".encode() in words and f"RANK={rank}".encode() in env:
                return int(process.name)
        raise AssertionError(f"rank {rank} does not run\n{self.told()}")

    def at_step(self, step: int) -> None:
        """Wait until both ranks run and `step` is saved."""
        self.wait_for(lambda: self.step() >= step, f"step {step} is saved")
        self.wait_for(lambda: self.notes().count("starts") % 2 == 0, "both ranks run")

    def check_end(self, state: str, restarts: int | tuple[int, ...], code: int = 0) -> None:
        """Wait for the end of the job, and check it."""
        job = self.ended()
        assert (job.state, job.exit_code) == (state, code), self.told()
        assert job.restarts in (restarts if isinstance(restarts, tuple) else (restarts,)), (
            self.told()
        )

    def check(self, state: str, restarts: int, code: int = 0) -> None:
        """Check the end, and the steps of the stand-in where it is done."""
        self.check_end(state, restarts, code)
        if state == "COMPLETED":
            assert self.step() == NUM_STEPS, self.told()


Row = Callable[[Bench], str]
ROWS: dict[str, Row] = {}
"""Each row by the sentence that the table has for it; it returns what came of it."""


HOLD: dict[str, object] = {"hold_after": 3}
"""The plan of a start that makes three steps and waits for what happens to it."""


def row(text: str) -> Callable[[Row], Row]:
    def add(do: Row) -> Row:
        ROWS[text] = do
        return do

    return add


@row("two nodes train, with nothing edited")
def trains(bench: Bench) -> str:
    bench.submit({})
    bench.check("COMPLETED", restarts=0)
    gpus = bench.cluster.gpus_per_node
    expected = ",".join(map(str, range(gpus))) if gpus else None
    assert bench.notes().count(f"starts, GPUs {expected}\n") == 2, bench.told()
    assert f"--nproc-per-node {gpus or 1} " in (bench.out / "words_1").read_text()
    return f"done; {gpus or 'no'} GPUs a node seen"


@row("the warning before the time limit")
def time_limit(bench: Bench) -> str:
    bench.submit(
        HOLD, {}, options=[f"--nodelist={','.join(bench.nodes)}", "--time=1", "--signal=B:USR1@50"]
    )
    bench.check("COMPLETED", restarts=1)
    assert ": leaves" in bench.notes(), bench.told()
    return "saved, requeued, resumed"


@row("SIGUSR1 to the batch script while the ranks start")
def usr1_during_start(bench: Bench) -> str:
    bench.submit({"import_s": 6, "hold_after": 0}, {})
    bench.wait_for(lambda: bench.notes().count("starts") == 2, "both ranks start")
    bench.scancel("--batch", "--signal=USR1")
    bench.check("COMPLETED", restarts=1)
    assert bench.notes().count("start 0 rank 0: leaves") == 1
    return "left before the first step, requeued, resumed"


@row("SIGUSR1 to all tasks of the job (scancel --signal=USR1)")
def usr1_to_tasks(bench: Bench) -> str:
    bench.submit(HOLD, {})
    bench.at_step(3)
    bench.scancel("--signal=USR1")
    bench.check("COMPLETED", restarts=1)
    assert ": leaves" in bench.notes(), bench.told()
    return "saved, requeued, resumed"


@row("SIGUSR1 to all tasks while the ranks start")
def usr1_to_tasks_during_start(bench: Bench) -> str:
    bench.submit({"import_s": 6, "hold_after": 0}, {})
    bench.wait_for(lambda: bench.notes().count("starts") == 2, "both ranks start")
    bench.scancel("--signal=USR1")
    bench.check("COMPLETED", restarts=1)
    return "left before the first step, requeued, resumed"


@row("kill -9 of a rank on the second node")
def rank_killed(bench: Bench) -> str:
    bench.submit(HOLD, {})
    bench.at_step(3)
    os.kill(bench.pid_of_rank(1), signal.SIGKILL)
    bench.check("COMPLETED", restarts=1)
    return "requeued, resumed"


@row("mrl ends a run whose rank hangs (exit code 72)")
def hang(bench: Bench) -> str:
    bench.submit({"steps": 3, "codes": [-9, 72]}, {})
    bench.check("COMPLETED", restarts=1)
    assert "exit code 7" in bench.log()
    return "requeued, resumed"


@row("no start keeps a step: the restarts are bounded")
def bound(bench: Bench) -> str:
    bench.submit({"steps": 2, "code": 71}, {"steps": 0, "code": 71})
    bench.check("FAILED", restarts=4, code=71)
    line = f"3 restarts in a row kept no step after step {bench.step()}; to continue"
    assert line in bench.log(), bench.told()
    return "5 starts, of which the last 3 kept no step; ended with the code of the last"


@row("bad input, not finite, out of memory (exit codes 2, 76, 77)")
def final_code(bench: Bench) -> str:
    bench.submit({"steps": 1, "codes": [76, 1]})
    bench.check("FAILED", restarts=0, code=76)
    assert "exit code 76: not requeued" in bench.log()
    return "ended with that code, not requeued"


@row("a service (SERVE=1) is told to leave, and then runs out of memory")
def service(bench: Bench) -> str:
    bench.submit(HOLD, {"steps": 1, "codes": [77, 1]}, {}, SERVE="1")
    bench.at_step(3)
    bench.scancel("--batch", "--signal=USR1")
    bench.check("COMPLETED", restarts=2)
    assert " -m mrl serve recipe.yaml " in (bench.out / "words_1").read_text()
    assert "exit code 77: requeue" in bench.log(), bench.told()
    return "saved, requeued, continued; requeued, continued"


@row("a callback stops the run (exit code 75 that nobody asked for)")
def callback(bench: Bench) -> str:
    bench.submit({"steps": 2, "code": 75})
    bench.check("FAILED", restarts=0, code=75)
    assert "a callback stopped the run: not requeued" in bench.log()
    return "saved, ended with that code, not requeued"


@row("scontrol requeue")
def requeued_by_hand(bench: Bench) -> str:
    bench.submit(HOLD, {})
    bench.at_step(3)
    bench.scontrol("requeue")
    bench.check("COMPLETED", restarts=1)
    return "resumed"


@row("scancel")
def cancelled(bench: Bench) -> str:
    bench.submit(HOLD)
    bench.at_step(3)
    pids = [bench.pid_of_rank(rank) for rank in (0, 1)]
    bench.scancel()
    bench.wait_for(lambda: bench.job().state == "CANCELLED", "the job is cancelled")
    bench.wait_for(
        lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), "no rank is left"
    )
    return "all gone, not requeued"


@row("the second node dies whole")
def second_node_dies(bench: Bench) -> str:
    return node_dies(bench, 1)


@row("the first node dies whole, with the batch script")
def first_node_dies(bench: Bench) -> str:
    return node_dies(bench, 0)


def node_dies(bench: Bench, index: int) -> str:
    """The node comes back once SLURM has taken it for dead, as there is no other one."""
    bench.submit(HOLD, {})
    bench.at_step(3)
    name = bench.nodes[index]
    bench.cluster.kill_node(name)
    bench.wait_for(lambda: bench.cluster.is_down(name), "SLURM takes the node for dead")
    bench.cluster.start_node(name)
    bench.check("COMPLETED", restarts=1)
    return "requeued, resumed once SLURM had taken the node for dead"


@row("a heterogeneous job")
def heterogeneous(bench: Bench) -> str:
    first, second = bench.nodes
    both = ["--nodes=1", "--ntasks-per-node=1", "--exclusive"]
    bench.submit(
        {"steps": 3, "code": 71}, {}, options=[*both, f"--nodelist={first}", ":", *both,
                                               f"--nodelist={second}"]
    )  # fmt: skip
    bench.check("COMPLETED", restarts=1)
    assert "--nnodes 2 " in (bench.out / "words_1").read_text()
    return "one run over all components; requeued whole, resumed"


@row("a heterogeneous job whose components have other numbers of processes")
def unequal(bench: Bench) -> str:
    bench.submit({}, options=in_reverse(bench.nodes), NPROC_PER_NODE="1:3")
    bench.check("COMPLETED", restarts=0)
    for rank, (node, number) in enumerate(zip(reversed(bench.nodes), (1, 3), strict=True)):
        words = (bench.out / f"words_{rank}").read_text()
        assert f"--nproc-per-node {number} " in words
        assert f"--rdzv-endpoint {bench.nodes[1]}:" in words
        assert f"rank {rank}: is on {node}\n" in bench.notes(), bench.told()
    assert "component 1: 1 node(s), ranks 1 to 3\n" in bench.log()
    return "the ranks are numbered in the order of the components"


def in_reverse(nodes: list[str]) -> list[str]:
    """The options of a heterogeneous job whose first component is the last node by name."""
    both = ["--nodes=1", "--ntasks-per-node=1", "--exclusive"]
    return [*both, f"--nodelist={nodes[1]}", ":", *both, f"--nodelist={nodes[0]}"]


SLOW = ("the second node dies whole", "the first node dies whole, with the batch script",
        "kill -9 of a rank on the second node")  # fmt: skip
"""The rows in which SlurmdTimeout could matter: they are tried at SLURM's default of 300 s, too."""

"""The monitor is the process that reads the ranks' heartbeat pages and ends a run that hangs.

Each node has one monitor. It is a child process of the node's first rank, and does not import
torch. The first line of its standard input is a JSON object (`mrl.watch.start`). The monitor exits
when its parent rank exits or closes that input. The line `DONE` means that the parent rank has
finished the run. The monitor then runs until the other ranks have finished, because nothing else
watches them.

The monitor of rank 0 decides; the monitors of other nodes send it the states of their ranks
(`mrl.watch.connection`). A monitor only reads memory and /proc and sends signals, so a rank that
hangs cannot block it. Anything that may hang because of the disk or the terminal has a time limit.
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

from mrl.errors import ExitCode
from mrl.run.failure import (
    ENDED_FILE,
    OVER_FILE,
    Failure,
    print_failure,
    saved_in,
    write_failure,
)
from mrl.run.phase_file import PhaseFile
from mrl.system.files import write_whole
from mrl.system.heartbeat import LEFT, SUPERVISE
from mrl.system.launcher import LAUNCH_FOLDER
from mrl.system.processes import die_with_parent
from mrl.watch.connection import (
    MAX_STACKS,
    SILENT_S,
    Connection,
    MonitorServer,
    Node,
    connect,
    report_of,
)
from mrl.watch.process import (
    ALL_STACKS,
    MAIN_STACK,
    STACKS_S,
    Process,
    innermost,
    kill,
    stacks_of,
)
from mrl.watch.ticks import Ticks
from mrl.watch.verdict import GONE, MAX_TICK_S, Limits, Verdict, Watch

REPORT_S = 20.0
"""Time limit in seconds for writing the stack traces and the report. There is a limit because the
disk itself may hang, and may be the reason why the rank hangs."""
PRINT_S = 2.0
"""Time limit in seconds for printing, which may block, for example while the terminal is paused."""
SENT_S = 5.0
"""The seconds that other nodes may take to send stack traces that they have written."""


def main() -> None:
    """Watch the ranks until all of them have finished or one of them hangs."""
    line = sys.stdin.buffer.readline()
    if not line.endswith(b"\n"):  # the rank that started the monitor is already gone
        return
    job = json.loads(line)
    die_with_parent(job["parent"])
    ranks = [Process.open(**rank) for rank in job["ranks"]]
    if "node" in job:
        follow(job, ranks)
    else:
        with closing(PhaseFile(Path(job["folder"]), job["parent"])) as phases:
            decide(job, ranks, phases)


def within(seconds: float, work: Callable[[], object]) -> None:
    """Call `work`, which may hang, in a thread; wait at most `seconds`, and ignore an OSError."""

    def run() -> None:
        with suppress(OSError):
            work()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)


def say(text: str) -> None:
    within(PRINT_S, lambda: print(f"mrl: {text}", file=sys.stderr, flush=True))


def decide(job: dict[str, Any], ranks: list[Process], phases: PhaseFile) -> None:
    """Watch the ranks of all nodes, in the monitor of rank 0, and note in `phases` what they do."""
    head = None
    if job["nodes"]:
        nodes = [Node(**node) for node in job["nodes"]]
        head = MonitorServer(socket.socket(fileno=job["server"]), job["token"], nodes)
    watch, ticks = Watch(Limits(**job["limits"])), Ticks()

    killed_last: set[int] = set()

    def all_have_left() -> bool:
        others = [seen for node in (head.nodes if head else ()) for seen in node.present()]
        return not others and all(has_left(rank) for rank in ranks)

    for seconds in ticks.until(all_have_left):
        seen = {rank.rank: rank.see() for rank in ranks}
        found = None
        if head is not None:
            head.poll(min(seconds, MAX_TICK_S))
            head.broadcast({"alive": True})
            for node in head.nodes:
                seen |= node.seen
            for node in head.unreached():
                say(
                    f"node {node.host} ({_named(node.ranks)}) has not connected to the watchdog of "
                    "rank 0: its ranks are not watched, only the timeouts of collectives apply there"
                )
            found = lost_node(head)
            if found is not None and ticks.is_done:
                say(f"{found.text()}; the run is done")
                head.leave_out(found.rank)
                continue
        phases.note(seen[min(seen)].pulse, [each.samples for each in seen.values()])
        if head is not None and found is None and head.is_behind:
            continue
        found = found or watch.tick(seconds, [seen[rank] for rank in sorted(seen)])
        if found is not None and ticks.is_done and found.pulse.phase == SUPERVISE:
            if found.rank not in killed_last:
                killed_last.add(found.rank)
                end_last(found, ranks, head)
        elif found is not None:
            places = [f"rank {rank}: {seen[rank].text()}" for rank in sorted(seen)]
            end(job, ranks, found, head, places)
            return
        if late := watch.late():
            say(f"{late.text()}; the other ranks wait for it")
    if head is not None and ticks.is_done:
        head.broadcast({"bye": True})
        head.finish()


def has_left(rank: Process) -> bool:
    """Return whether a rank has finished the run or no longer exists."""
    seen = rank.see()
    return seen.pulse.phase == LEFT or seen.state in GONE


def end_last(found: Verdict, ranks: Sequence[Process], head: MonitorServer | None) -> None:
    """Kill a rank that leads engines and does not exit although the run is done."""
    say(f"{found.text()}; the run is done, so the rank is killed")
    kill_last(ranks, found.rank)
    if head is not None:
        head.broadcast({"kill_last": found.rank})


def kill_last(ranks: Sequence[Process], number: int) -> None:
    """After the run, kill the rank with this number if it is on this node. First write a file that
    tells the launcher that the rank did not fail."""
    for rank in [rank for rank in ranks if rank.rank == number]:
        if folder := os.environ.get(LAUNCH_FOLDER):
            with suppress(OSError):
                write_whole(Path(folder) / OVER_FILE, b"")
        rank.send(signal.SIGKILL)


def lost_node(head: MonitorServer) -> Verdict | None:
    """Return a verdict about a node that no longer sends messages; None if there is no such node."""
    node = head.lost()
    if node is None:
        return None
    first = node.ranks[0]
    names = f"node {node.host} ({_named(node.ranks)})"
    return Verdict(first, "lost", node.seen[first].pulse, node.silent_s, SILENT_S, names)


def end(
    job: dict[str, Any],
    ranks: list[Process],
    found: Verdict,
    head: MonitorServer | None,
    places: list[str],
) -> None:
    """Write the stacks and the report, print the report, and kill all ranks, rank 0 last.

    `places` has one line per rank with its phase, its state and its last collective. Under
    `mrl.launch`, the launcher prints the report. The ranks of this node are asked for the stacks of
    all their threads only after the report, because they may crash then, and rank 0 would take this
    process with it.
    """
    folder = Path(job["folder"])
    if head is not None:
        head.ask_for_stacks(MAIN_STACK)
    stacks = stacks_of(ranks, MAIN_STACK)
    if head is not None:
        stacks |= head.stacks(STACKS_S + SENT_S)
    hosts = {rank: node.host for node in (head.nodes if head else ()) for rank in node.ranks}
    cause = {"stuck": "", "lost": "the node died, or the network between the nodes is cut"}
    failure = Failure(
        what=found.text(),
        exit_code=int(ExitCode.LOST_RANK if found.how in ("gone", "lost") else ExitCode.HUNG_RANK),
        rank=None if found.suspects else found.rank,
        host="" if found.suspects else hosts.get(found.rank, socket.gethostname()),
        phase=found.pulse.phase,
        step=max(found.pulse.step, 0),
        tenant=found.pulse.tenant,
        since_s=found.since_s,
        cause=cause.get(found.how, "a user, a debugger or the scheduler"),
        log_tail=[] if found.suspects else innermost(stacks.get(found.rank, "")),
        ranks=places,
        command=job["command"],
    )
    written: list[Failure] = []

    def report() -> None:
        files = write_stacks(folder, stacks)
        log = f"{folder}/logs/stacks_rank_*.txt" if found.suspects else files.get(found.rank, "")
        whole = dataclasses.replace(failure, log=log, **saved_in(folder))
        written.append(write_failure(folder, whole))

    within(REPORT_S, report)
    if LAUNCH_FOLDER not in os.environ or not written:  # otherwise the launcher prints it
        within(PRINT_S, lambda: print_failure(written[0] if written else failure))
    if written:  # otherwise the disk hangs
        if head is not None:
            head.ask_for_stacks(ALL_STACKS)
        whole = stacks_of(ranks, ALL_STACKS)
        if head is not None:
            whole |= head.stacks(STACKS_S + SENT_S)
        within(REPORT_S, lambda: write_stacks(folder, whole))
    if head is not None:
        head.broadcast({"kill": failure.exit_code})
        head.finish()
    kill_all(job, ranks, failure.exit_code)


def write_stacks(folder: Path, stacks: Mapping[int, str]) -> dict[int, str]:
    """Write RUN/logs/stacks_rank_N.txt for each rank; return the paths of written files by rank."""
    files = {}
    for rank, text in stacks.items():
        file = folder / "logs" / f"stacks_rank_{rank}.txt"
        with suppress(OSError):
            file.parent.mkdir(exist_ok=True)
            write_whole(file, text.encode())
            files[rank] = str(file)
    return files


def follow(job: dict[str, Any], ranks: list[Process]) -> None:
    """Report the ranks of this node to the monitor of rank 0, and carry out its requests."""
    connection: Connection | None = None
    silent_s, tries, is_over, was_heard, is_alone = 0.0, 0, False, False, False
    ticks = Ticks()
    for seconds in ticks.until(lambda: all(has_left(rank) for rank in ranks)):
        silent_s += min(seconds, MAX_TICK_S)
        if (connection is None or not connection.is_open) and not is_over:
            host, port = job["addresses"][tries % len(job["addresses"])]
            connection = connect((host, port), job["token"], job["node"])
            tries += 1
        if connection is None:
            messages = []
        else:
            connection.send(report_of({rank.rank: rank.see() for rank in ranks}))
            messages = connection.receive()
        for message in messages:
            silent_s, was_heard = 0.0, True
            is_over = is_over or "bye" in message
            if "write_stacks" in message and connection is not None:
                stacks = stacks_of(ranks, message["write_stacks"])
                parts = {str(n): text[:MAX_STACKS] for n, text in stacks.items()}
                connection.send({"stacks": parts})
            if "kill_last" in message:
                kill_last(ranks, message["kill_last"])
            if "kill" in message:
                kill_all(job, ranks, message["kill"])
                return
        if silent_s > SILENT_S and was_heard and not is_over:
            end_alone(job, ranks, silent_s)
            return
        if silent_s > SILENT_S and not was_heard and not is_alone:
            is_alone = True
            own = _named([rank.rank for rank in ranks])
            say(f"the watchdog of rank 0 cannot be reached from the node of {own}: not watched")
    if connection is not None and ticks.is_done:
        connection.send({"bye": True})
        connection.finish()


def end_alone(job: dict[str, Any], ranks: list[Process], silent_s: float) -> None:
    """Kill the ranks of this node, because the node has lost the connection to rank 0's node.

    The failure is only printed, because the monitor of rank 0 writes RUN/failure.json.
    """
    own = _named([rank.rank for rank in ranks])
    failure = Failure(
        what=f"the node of rank 0 ({job['host']}) sends nothing to {own}: {silent_s:.1f} s",
        exit_code=int(ExitCode.LOST_RANK),
        rank=ranks[0].rank,
        since_s=silent_s,
        cause="that node died, or the network between the nodes is cut",
        command=job["command"],
    )
    saved: dict[str, Any] = {}
    within(PRINT_S, lambda: saved.update(saved_in(job["folder"])))
    within(PRINT_S, lambda: print_failure(dataclasses.replace(failure, **saved)))
    kill_all(job, ranks, failure.exit_code)


def kill_all(job: dict[str, Any], ranks: list[Process], code: int) -> None:
    """Kill this node's ranks that have not finished the run, and tell the launcher the exit code."""
    if folder := os.environ.get(LAUNCH_FOLDER):
        with suppress(OSError):
            write_whole(Path(folder) / ENDED_FILE, str(code).encode())
    kill([rank for rank in ranks if rank.see().pulse.phase != LEFT], last=job["parent"])


def _named(ranks: list[int] | tuple[int, ...]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


if __name__ == "__main__":
    main()

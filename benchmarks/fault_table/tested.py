"""Faults that only the inside of a process can provoke: tests of the suite do it, and are run here."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

from benchmarks.fault_table.base import ROOT
from mrl.drill import Row

TESTS = (
    (7, "nan-gradient", "refused", "a gradient that is NaN, once and three times in a row",
     "tests/loop/test_nonfinite.py::test_steps_that_are_not_finite_are_skipped_and_three_in_a_row_"
     "end_the_run", "skipped on all ranks, weights unchanged; the third in a row ends the run"),
    (5, "full-disk", "refused", "a disk of 6 MB that fills while a checkpoint is written",
     "tests/loop/test_disk.py::test_a_full_disk_is_named_at_once_and_the_checkpoint_before_stays",
     "ends with the path and the free bytes; the checkpoint before is whole"),
    (5, "read-only-disk", "refused", "a disk that becomes read-only",
     "tests/loop/test_disk.py::test_a_file_system_that_becomes_read_only_is_named",
     "ends with the path"),
    (10, "wrong-weights", "refused", "a tensor left out, sent twice, or with a flipped bit",
     "tests/rollout/test_weight_sync.py::test_faults_are_caught_and_a_good_update_follows",
     "each is caught before a token is generated; a good update follows"),
    (10, "stale-weights", "refused", "generation after a bad update",
     "tests/rollout/test_weight_sync.py::test_engine_refuses_to_generate_after_a_bad_update",
     "the engine refuses to generate"),
    (8, "reward-of-one", "recovered", "rewards that raise, hang, die, or return nonsense once",
     "tests/rewards/test_runner.py", "only the culprit's samples are masked; above 5% the run ends"),
    (6, "damaged-bytes", "recovered", "1,000 times a bit flipped or the end cut off, in all its files",
     "tests/parallel/checkpoint/test_checkpoint.py::test_every_damaged_byte_is_caught_and_named_and_"
     "the_one_before_is_used[1000]", "each is caught and the file named; the one before is used"),
    (17, "network-partition", "refused", "the network between two nodes is cut (two namespaces)",
     "tests/loop/test_partition.py::test_a_cut_network_ends_both_sides",
     "both end after 60 s with code 71, and one report is written; no process is left"),
    (17, "mute-rendezvous", "refused", "a program that says nothing holds the port of the rendezvous",
     "tests/launch/test_mrl_launch.py::test_a_rendezvous_whose_port_is_mute_is_one_line[c10d]",
     "one line after 30 s"),
)  # fmt: skip
"""(number, name, verdict, what is done, pytest's name of the test, what the test asserts)."""


def rows() -> Iterator[tuple[int, Row]]:
    """Yield (number of the fault, row) for each test, all run by one pytest."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        words = [sys.executable, "-m", "pytest", "-q", "-o", "addopts=", f"--junitxml={report}"]
        began = time.monotonic()
        done = subprocess.run(
            [*words, *(test for *_, test, _ in TESTS)],
            cwd=ROOT, check=False, capture_output=True, text=True,
        )  # fmt: skip
        if not report.exists():
            text = (done.stdout + done.stderr)[-500:]
            seconds = time.monotonic() - began
            yield 0, Row("tests", "", "", seconds, "refused", None, (f"pytest: {text}",))
            return
        cases = list(ElementTree.parse(report).getroot().iter("testcase"))
    for number, name, verdict, did, test, asserts in TESTS:
        file, _, function = test.partition(".py")
        module, function = file.replace("/", "."), function.lstrip(":")
        mine = [
            case
            for case in cases
            if case.attrib["classname"].startswith(module)
            and (not function or _is_of(case.attrib["name"], function))
        ]
        bad = [case.attrib["name"] for case in mine if any(c.tag != "properties" for c in case)]
        problems = tuple(f"{each} did not pass" for each in bad) or (() if mine else ("no test",))
        seconds = sum(float(case.attrib["time"]) for case in mine)
        yield number, Row(name, did, asserts, seconds, verdict, None, problems)  # pyright: ignore


def _is_of(case: str, function: str) -> bool:
    """Whether a case is `function`, which may name one case or all cases of a test."""
    return function in (case, case.partition("[")[0])

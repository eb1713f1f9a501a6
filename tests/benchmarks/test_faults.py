"""`make faults`: its table names no folder of the machine, and every kind of fault that it can show."""

from __future__ import annotations

import tempfile
from pathlib import Path

from benchmarks import faults
from benchmarks.evidence.result import between_markers
from benchmarks.fault_table import before, files, inputs, tested
from benchmarks.fault_table.base import KINDS, ROOT, Said, refused_row
from benchmarks.faults import SAVED, WITH_ENGINE, markdown, without_paths
from mrl.drill import FAULTS, Row
from tests.slurm.rows import ROWS

ELSEWHERE = {"kill-worker", "stop-worker", "kill-supervisor"}
"""Faults of ranks that lead engines only: `make async` and tests/drill strike these."""


def test_every_fault_of_the_drill_is_in_the_table() -> None:
    assert {*WITH_ENGINE, *SAVED, *ELSEWHERE} - {"none"} == set(FAULTS)


def test_every_kind_of_fault_has_a_row() -> None:
    tables = (inputs.OVERRIDES, inputs.ROWS, inputs.MODELS, tested.TESTS)
    kinds = {row[0] for table in tables for row in table}
    kinds |= {*WITH_ENGINE.values(), *SAVED.values()}
    assert set(KINDS) == kinds
    for *_, test, _ in tested.TESTS:
        assert (ROOT / test.partition(".py")[0]).with_suffix(".py").exists(), test


def test_tests_of_the_table_are_there() -> None:
    for *_, test, _ in tested.TESTS:
        file, _, name = test.partition("::")
        assert not name or f"def {name.partition('[')[0]}(" in (ROOT / file).read_text(), test


def test_what_was_measured_before_has_a_proof_that_is_there() -> None:
    tables = (inputs.OVERRIDES, inputs.ROWS, inputs.MODELS, tested.TESTS)
    names = {row[1] for table in tables for row in table} | {*WITH_ENGINE, *SAVED}
    in_files = Path(files.__file__).read_text()
    for row in [row for rows in before.SECTIONS.values() for row in rows]:
        assert row.proofs, row
        for proof in row.proofs:
            file, _, name = proof.partition("::")
            if proof.startswith("slurm: "):
                assert proof.removeprefix("slurm: ") in ROWS
            elif name:
                assert f"\ndef {name}(" in (ROOT / file).read_text(), proof
            else:
                assert proof in names or f'"{proof}"' in in_files, proof


def test_the_page_has_the_table_of_what_was_before() -> None:
    assert before.table() in before.PAGE.read_text()


def test_the_table_names_no_folder_of_this_machine() -> None:
    place = Path(tempfile.gettempdir()) / "x-1" / "run"
    row = Row("a", f"in {ROOT}/mrl/cli.py", f"see {place}/logs/a.log: | <b>", 1.0, "refused", 2)
    line = markdown([(3, without_paths(row))]).splitlines()[2]
    assert line == "| 3 | `a` | in cli.py | see a.log: \\| &lt;b> | 1.0 | refused |"


def test_a_refusal_is_one_line_with_code_2() -> None:
    good = refused_row("a", "", Said(2, ["mrl: no key 'x'"], 0.1), "'x'")
    assert good.passed
    bad = refused_row("a", "", Said(1, ["Traceback", "KeyError"], 0.1), "'x'")
    assert [text.partition(",")[0] for text in bad.problems] == [
        "exit code 1",
        "2 lines",
        "the line does not contain \"'x'\"",
    ]


def test_the_page_has_its_place_for_the_table() -> None:
    assert "| a table |" in between_markers(faults.PAGE.read_text(), faults.MARKER, "| a table |")

"""The recipes for 8 to 128 GPUs: they fit by the plan, and with one key changed they are refused."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from benchmarks.scaling import CASES, Case, read_case
from mrl.cli import main
from mrl.planner.hardware import HARDWARE
from mrl.planner.roles import all_phases
from mrl.planner.rows import total
from mrl.planner.verdict import worst_node
from tests.loop.conftest import REPOSITORY
from tests.loop.test_check_plan import assert_rows_add_up
from tests.loop.test_refusals import refused

NAMES = [case.recipe for case in CASES]


def command(case: Case, folder: Path) -> list[str]:
    """`mrl check` on a folder that holds nothing but the published config.json."""
    folder.mkdir()
    shutil.copy(REPOSITORY / f"benchmarks/models/{case.model}.json", folder / "config.json")
    recipe = f"launch/recipes/{case.recipe}.yaml"
    return ["check", str(REPOSITORY / recipe), f"model.path={folder}", "--plan",
            "--gpus", str(case.world), "--gpu", case.gpu]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=NAMES)
def test_it_fits_and_one_changed_key_is_refused(
    case: Case, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = command(case, tmp_path / "model")
    main(arguments)
    out = capsys.readouterr().out
    assert out.strip().splitlines()[-1].startswith("fits: the peak is ")
    assert_rows_add_up(out)
    line = refused(capsys, [*arguments, case.changed])
    assert line.startswith("mrl: memory plan: ")
    assert "does not fit: " in line or "its weights need " in line
    assert " GB + " in line or " GB per GPU (" in line  # the arithmetic


@pytest.mark.parametrize("case", CASES, ids=NAMES)
def test_every_byte_has_a_formula_and_a_source(case: Case) -> None:
    """Each total is the sum of its rows, and no row is without a reason."""
    gpu = HARDWARE[case.gpu]
    shape, dims, work = read_case(case)
    held = all_phases(shape, dims, work, gpu)
    rows = [row for phase in held for row in phase.device]
    node = worst_node(shape, dims, work, gpu)
    for row in (*rows, *node):
        assert row.num_bytes > 0
        assert row.formula
        assert row.source
    for phase in held:
        assert phase.device_bytes == sum(row.num_bytes for row in phase.device)
        assert phase.device_bytes <= gpu.memory_bytes, (phase.name, phase.stage)
        assert len({row.name for row in phase.device}) == len(phase.device)
    assert total(node) <= gpu.host_memory_bytes

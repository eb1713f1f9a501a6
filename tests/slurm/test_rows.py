"""Each row of the table in docs/slurm.md on a real SLURM, under both process trackers.

All rows of a cluster run at once, and a test waits for its own. The short form, without the rows at
SLURM's default SlurmdTimeout of 300 s, takes a minute: `pytest tests/slurm/test_rows.py -k "not 300"`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.slurm.cluster import TRACKERS, Tracker, why_not, why_not_tracked
from tests.slurm.rows import ROWS, SLOW
from tests.slurm.table import Results, tried

REASON = why_not()
pytestmark = [pytest.mark.release, pytest.mark.skipif(REASON is not None, reason=str(REASON))]
CASES = {(tracker, seconds): list(ROWS) if seconds == 30 else list(SLOW)
         for seconds in (30, 300) for tracker in TRACKERS}  # fmt: skip
Of = Callable[[Tracker, int], Results]


@pytest.fixture(scope="module")
def results_of(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Of]:
    """Start a cluster where it is first asked for, and leave it until the last test."""
    with ExitStack() as stack:
        made: dict[tuple[Tracker, int], Results] = {}

        def results(tracker: Tracker, seconds: int) -> Results:
            if (tracker, seconds) not in made:
                folder = tmp_path_factory.mktemp(f"{tracker}_{seconds}")
                names = CASES[tracker, seconds]
                made[tracker, seconds] = stack.enter_context(tried(folder, tracker, seconds, names))
            return made[tracker, seconds]

        yield results


@pytest.mark.parametrize(
    ("tracker", "seconds", "name"),
    [(tracker, seconds, name) for (tracker, seconds), names in CASES.items() for name in names],
)
def test_the_job_ends_as_the_table_says(
    tracker: Tracker, seconds: int, name: str, results_of: Of
) -> None:
    if reason := why_not_tracked(tracker):
        pytest.skip(reason)
    for other in TRACKERS:  # all clusters with this time run at once
        if why_not_tracked(other) is None:
            results_of(other, seconds)
    results_of(tracker, seconds)[name].result()


def test_the_table_of_the_documentation_has_every_row() -> None:
    page = (Path(__file__).parents[2] / "docs/slurm.md").read_text()
    assert [name for name in ROWS if f"| {name} |" not in page] == []

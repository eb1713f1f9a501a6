"""What the run folder holds of a step."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from mrl.run.folder import RunFolder, rollout_lines
from mrl.types import VersionSpan
from tests.sample_groups import PROMPT_LEN, group, sample


def test_the_record_of_a_sample_says_how_old_its_oldest_token_is(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.rollouts.mkdir()
    spans = (VersionSpan(3, PROMPT_LEN, 4), VersionSpan(5, 4, 8))
    resumed = dataclasses.replace(sample(6), weight_versions=spans)
    one = group([0.0, 1.0], 0, resumed, dataclasses.replace(resumed, weight_versions=spans[1:]))
    folder.write_rollouts(5, [rollout_lines(5, one, ["a", "b"])])
    rows = folder.read_rollouts(5)
    assert [row["weight_version"] for row in rows] == [5, 5]
    assert [row["staleness"] for row in rows] == [2, 0]

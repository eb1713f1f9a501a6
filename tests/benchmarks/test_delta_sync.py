"""`python -m benchmarks.delta_sync`: figures of made-up runs, demands, and short real runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.delta_runs import _traffic, compare, is_good, table
from benchmarks.delta_sync import DOCUMENT
from benchmarks.evidence.result import between_markers


def metric_rows(num: int, sent: list[int], resent: int = 0) -> list[dict[str, Any]]:
    """Metrics of steps whose syncs sent `sent` of 1000 bytes each; 1000 is a whole version."""
    return [
        {
            "rollout/sync_bytes": 1000.0,
            "rollout/sync_full_workers": float(sent[step] == 1000),
            "rollout/sync_sent_bytes": float(sent[step]),
            "rollout/sync_sent_share": sent[step] / 1000,
            "rollout/sync_changed_share": sent[step] / 2000,
            "rollout/sync_resent_buckets": float(resent),
            "time/sync_s": 0.5,
        }
        for step in range(num)
    ]


def row(**more: Any) -> dict[str, Any]:
    delta = metric_rows(4, [1000, 20, 40, 60])
    found = {
        "model": "toy",
        "quantization": "fp8_block",
        **_traffic(metric_rows(4, [0] * 4), delta),
    }
    same = {"syncs_compared": 4, "digests_equal": 4, "distinct_digests": 4}
    return {**found, **same, "same_digests_as_full": True, "same_bits_as_full": True, **more}


def test_shares_are_those_of_all_syncs_and_of_deltas_alone() -> None:
    found = row()
    assert (found["syncs"], found["whole_versions"]) == (4, 1)
    assert found["sent_share"] == 1120 / 4000
    assert found["sent_share_of_deltas"] == 0.04
    assert found["changed"] == 0.02
    assert "| toy | `fp8_block` | 0 MB | 4, 1 | 2.00% | 4.00% | 28.00% | 4 of 4 | yes |" in table(
        [found]
    )


@pytest.mark.parametrize(
    "wrong",
    [
        {"digests_equal": 3},
        {"syncs_compared": 3},
        {"distinct_digests": 1},  # weights that never change prove nothing
        {"resent_buckets": 1.0},
        {"same_digests_as_full": False},
        {"same_bits_as_full": False},
    ],
)
def test_what_is_demanded_of_a_run(wrong: dict[str, Any]) -> None:
    assert is_good(row())
    assert not is_good(row(**wrong))


def test_a_comparison_on_file_is_not_made_again(tmp_path: Path) -> None:
    (tmp_path / "toy_none_7.json").write_text(json.dumps({"kept": 1}))
    assert compare("toy", "none", 7, tmp_path) == {"kept": 1}


def test_the_page_has_a_place_for_the_table() -> None:
    assert between_markers(DOCUMENT.read_text(), "runs", "| a | row |").count("| a | row |") == 1


@pytest.mark.release
@pytest.mark.parametrize("quantization", ["none", "fp8_block"])
def test_three_steps_of_the_demo(quantization: str, tmp_path: Path) -> None:
    found = compare("toy", quantization, 3, tmp_path)
    assert is_good(found), found
    assert found["syncs"] == 3
    assert found["whole_versions"] == 1
    assert 0 < found["sent_share_of_deltas"] < 0.2

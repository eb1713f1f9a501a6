"""`make tenants`: figures of made-up runs, and the study in short with real engines."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.tenants import checks_of, is_one_digest, rows_of, waits_on_host
from benchmarks.tenants_load import LOADS, ROOT, SEEDS
from benchmarks.tenants_split import rows_of_mode


def made_up(load: str, three_s: float, repeats: int = 3) -> list[dict[str, Any]]:
    """Return runs in which a tenant alone takes 10 s for 5 steps, and three at once `three_s`."""
    runs = []
    for repeat in range(repeats):
        for variant, groups in LOADS[load].variants.items():
            wall = {"one": 30.0, "two": 16.0, "three": three_s}[variant]
            names = [name for group in groups for name in group]
            tenants = {
                name: {"group_s": wall / len(groups), "digest": f"bits of {name}"} for name in names
            }
            figures = dict.fromkeys(
                (
                    "running",
                    "occupancy",
                    "occupancy_of_wall",
                    "rollout_s",
                    "train_s",
                    "sync_s",
                    "score_s",
                ),
                1.0,
            )
            runs.append({
                "variant": variant, "repeat": repeat, "wall_s": wall, "tenants": tenants, **figures,
                "num_steps": 5 * len(names), "swap_s": [0.001], "swap_bytes": [0],
            })  # fmt: skip
    return runs


def test_variants_are_compared_with_the_same_tenants_alone() -> None:
    rows = {row["variant"]: row for row in rows_of("long_tail", made_up("long_tail", 15.0))}
    assert rows["one"]["ratio"] == [1.0, 1.0, 1.0]
    assert rows["two"]["ratio"] == [1.25, 1.25, 1.25]  # 20 s of two tenants alone, over 16 s
    assert rows["three"]["ratio"] == [2.0, 2.0, 2.0]
    assert rows["three"]["steps_per_core_hour"][0] == 15 * 1800 / 15


@pytest.mark.parametrize(("three_s", "failed"), [(15.0, 0), (25.0, 2)])
def test_a_gain_that_is_too_small_fails(three_s: float, failed: int) -> None:
    places = {
        f"{name}/parameters": {"device": 8 * (name == "cec"), "host": 8, "freed": 0}
        for name in SEEDS
    }
    found = {
        "long_tail": {"runs": made_up("long_tail", three_s), "places": places},
        "saturated": {"runs": made_up("saturated", 25.0), "places": {}},
    }
    rows = [row for name, load in found.items() for row in rows_of(name, load["runs"])]
    assert list(checks_of(found, rows, {}, []).values()).count(False) == failed


def test_updates_on_a_rank_of_its_own_are_compared_by_their_rates() -> None:
    sizes = {"one": (18, 36.0), "two": (14, 14.0), "three": (21, 10.5)}
    runs = [
        {"variant": name, "repeat": 0, "num_updates": number, "wall_s": wall_s, "occupancy": 0.5}
        for name, (number, wall_s) in sizes.items()
    ]
    rows = rows_of_mode("ahead", runs, num_cores=2)
    assert [row["ratio"] for row in rows] == [[1.0], [2.0], [4.0]]
    assert rows[0]["steps_per_core_hour"] == [900.0]
    checks = checks_of(
        {"long_tail": {"runs": made_up("long_tail", 15.0), "places": {}}},
        rows_of("long_tail", made_up("long_tail", 15.0))
        + rows_of("saturated", made_up("saturated", 25.0)),
        {},
        [{**rows[2], "ratio": [0.9, 0.8, 1.0]}],
    )
    assert not checks["ahead: three at once make more steps per core-hour"]


def test_other_bits_and_a_tenant_that_stays_on_the_device_are_seen() -> None:
    runs = made_up("long_tail", 15.0)
    assert is_one_digest(runs)
    runs[-1]["tenants"]["bob"]["digest"] = "others"
    assert not is_one_digest(runs)
    on_device = [{"name": name, "device": 8} for name in SEEDS]
    assert not waits_on_host(on_device)
    assert waits_on_host([*on_device[:1], *({"name": n, "device": 0} for n in ("bob", "cec"))])


@pytest.mark.release
@pytest.mark.timeout(1800)
def test_the_study_in_short(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.tenants", "--short", "--work", str(tmp_path)],
        cwd=ROOT, capture_output=True, text=True, check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    result = json.loads((tmp_path / "tenants.json").read_text())
    assert all(holds for text, holds in result["checks"].items() if "bits" in text), done.stdout
    assert result["checks"]["a tenant that does not train is on the host only"]
    assert len(result["rows"]) == 5

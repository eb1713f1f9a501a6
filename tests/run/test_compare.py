"""What `mrl diff` says of two runs."""

from __future__ import annotations

from pathlib import Path

from mrl.config import dump_recipe, load_recipe
from mrl.run.compare import Pair, compare_runs
from tests.loop.conftest import TOY_RECIPE


def run_of(folder: Path, *overrides: str) -> Path:
    folder.mkdir()
    recipe = load_recipe(TOY_RECIPE, [f"output_dir={folder}", *overrides])
    dump_recipe(recipe, folder / "config.yaml")
    return folder


def test_a_free_key_that_is_null_is_not_one_that_is_missing(tmp_path: Path) -> None:
    """`image: null` drops a column."""
    plain = run_of(tmp_path / "plain")
    other = run_of(tmp_path / "other", "data.columns={image: null}", "environment={name: guess}")
    found = compare_runs(plain, other).config
    assert Pair("data.columns.image", "(not given)", None) in found
    assert Pair("environment.name", None, "guess") in found  # of a section that is null
    assert not compare_runs(other, other).config


def test_a_metric_that_is_null_is_not_one_that_is_missing(tmp_path: Path) -> None:
    """A metric is null where it was computed and is not a finite number."""
    one, other = run_of(tmp_path / "one"), run_of(tmp_path / "other")
    (one / "metrics.jsonl").write_text('{"step": 0, "loss": 1.0, "ratio/max": null}\n')
    (other / "metrics.jsonl").write_text('{"step": 0, "loss": 1.0}\n')
    found = compare_runs(one, other).metrics
    assert found is not None
    assert found.pairs == [Pair("ratio/max", None, "(not given)")]
    assert compare_runs(one, one).metrics is None

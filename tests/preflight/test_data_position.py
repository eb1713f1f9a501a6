"""Whether a run that is continued has its checkpoint's data is known before anything is written."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mrl.collect.single_turn import start_groups
from mrl.config import Recipe, load_recipe
from mrl.data.cursor import PromptCursor
from mrl.data.reader import read_sources
from mrl.errors import InputError
from mrl.preflight.data_position import check_data_position, why_other_data
from mrl.run.folder import RunFolder
from mrl.run.pending_prompts import PendingPrompt, pending_state
from mrl.toy_model import build_tokenizer
from parallel.checkpoint.manifest import folder_name, write_manifest
from tests.loop.conftest import TOY_RECIPE

STEP = 1


def recipe_of(root: Path, *sources: dict[str, object], **data: object) -> Recipe:
    given = json.dumps({"sources": sources, **data})
    return load_recipe(TOY_RECIPE, [f"output_dir={root / 'run'}", f"data={given}"])


@pytest.fixture
def mixture(tmp_path: Path) -> tuple[RunFolder, list[dict[str, object]]]:
    """A run with a checkpoint of a weighted mixture, and its sources."""
    for name in "ab":
        rows = [json.dumps({"prompt": f"{name}{i}"}) + "\n" for i in range(5)]
        (tmp_path / f"{name}.jsonl").write_text("".join(rows))
    sources: list[dict[str, object]] = [
        {"path": str(tmp_path / f"{name}.jsonl"), "weight": 1} for name in "ab"
    ]
    recipe, folder = recipe_of(tmp_path, *sources), RunFolder(tmp_path / "run")
    folder.open(recipe, folder.check(recipe), 0)
    folder.close()
    folder.add_metrics({"step": 0})
    state = {**PromptCursor(sources_of(recipe), seed=recipe.seed).state_dict(), "backlog": {}}
    checkpoint = folder.checkpoints / folder_name(STEP)
    checkpoint.mkdir()
    write_manifest(checkpoint, {"trainer": {"collector": state}}, {})
    return folder, sources


def sources_of(recipe: Recipe):
    return read_sources(recipe.data, build_tokenizer(), max_prompt_len=9)


def checked(folder: RunFolder, recipe: Recipe, *allowed: str) -> list[str]:
    """Check as a start does, and then start; return the warnings."""
    said: list[str] = []
    update = folder.check(recipe, allowed)
    check_data_position(folder, recipe, sources_of(recipe), update, STEP, said.append)
    folder.open(recipe, update, STEP)
    folder.close()
    state = json.loads((folder.checkpoints / folder_name(STEP) / "manifest.json").read_text())
    other = folder.history.may_have_other_rows(STEP) and why_other_data(
        folder, recipe, sources_of(recipe), state["trainer"]["collector"], STEP
    )
    assert bool(other) == bool(said), "what was said is what training does"
    return said


def test_a_source_may_be_moved_and_named_and_weights_may_change(mixture, tmp_path: Path) -> None:
    folder, (one, two) = mixture
    moved = (tmp_path / "b.jsonl").rename(tmp_path / "elsewhere.jsonl")
    two = {**two, "path": str(moved)}
    assert checked(folder, recipe_of(tmp_path, one, two)) == []
    named = {**two, "name": "second", "weight": 3}
    assert checked(folder, recipe_of(tmp_path, named, one), "data") == []
    assert checked(folder, recipe_of(tmp_path, named, one)) == []


def test_other_rows_are_refused_before_config_yaml_is_written(mixture, tmp_path: Path) -> None:
    """A history without a digest tells nothing, and neither does one of a file read in another way."""
    folder, (one, two) = mixture
    lines = folder.history.file.read_text()
    folder.history.file.unlink()  # a run of an earlier version
    before = folder.config.read_bytes()
    (tmp_path / "b.jsonl").write_text('{"prompt": "other"}\n')
    with pytest.raises(
        InputError, match=r"cannot resume: the 1 prompts of the source b\.jsonl are no"
    ):
        checked(folder, recipe_of(tmp_path, one, two))
    assert folder.config.read_bytes() == before
    folder.history.file.write_text(lines)
    (said,) = checked(folder, recipe_of(tmp_path, one, two), "data")
    assert said.startswith(
        "all data starts over at its first rows, because it has changed since step 1: the 1 pr"
    )


def test_a_change_between_the_pieces_of_a_large_file_can_be_allowed(
    mixture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The digest of a large file covers only pieces of it, so it may be the same for other rows."""
    monkeypatch.setattr("mrl.run.contents.WHOLE_BYTES", 40)
    monkeypatch.setattr("mrl.run.contents.NUM_PIECES", 2)
    monkeypatch.setattr("mrl.run.contents.PIECE_BYTES", 8)
    folder, (one, two) = mixture
    recipe = recipe_of(tmp_path, one, two)
    folder.history.file.unlink()
    folder.open(recipe, folder.check(recipe), 0)  # the history has digests of this kind
    folder.close()
    file = tmp_path / "b.jsonl"
    file.write_text(file.read_text().replace("b2", "c2"))
    assert not folder.check(recipe).changes
    with pytest.raises(InputError, match=r"first rows with: mrl train \S+ --allow data$"):
        checked(folder, recipe)
    (said,) = checked(folder, recipe, "data")
    assert said.startswith("all data starts over at its first rows")
    checked(folder, recipe)  # interrupted before the next checkpoint, and started again


def test_what_else_begins_anew_says_so(mixture, tmp_path: Path) -> None:
    folder, (one, two) = mixture
    (said,) = checked(folder, recipe_of(tmp_path, one, two, shuffle=False), "data")
    assert "data.shuffle was true" in said
    assert checked(folder, recipe_of(tmp_path, one, two), "data") == []  # back again
    scored = {**one, "reward": "first_char"}
    assert checked(folder, recipe_of(tmp_path, scored, two), "data") == []
    (said,) = checked(folder, recipe_of(tmp_path, {**one, "weight": 2}), "data")
    assert "made with" in said


def test_a_waiting_prompt_whose_reward_has_moved_is_refused(tmp_path: Path) -> None:
    """It was scored by the recipe's own reward."""
    (tmp_path / "a.jsonl").write_text('{"prompt": "ab"}\n')
    own = tmp_path / "own.py"
    own.write_text("def f(prompts, completions, **columns): return [0.0 for _ in completions]\n")
    source: dict[str, object] = {"path": str(tmp_path / "a.jsonl"), "reward": f"{own}:f"}
    recipe, folder = recipe_of(tmp_path, source), RunFolder(tmp_path / "run")
    folder.open(recipe, folder.check(recipe), 0)
    folder.close()
    folder.add_metrics({"step": 0})
    cursor = PromptCursor(sources_of(recipe), seed=recipe.seed)
    waiting = PendingPrompt(start_groups(cursor.next(1), 1)[0], seed=1)
    state = {**cursor.state_dict(), "waiting": pending_state([waiting])}
    checkpoint = folder.checkpoints / folder_name(STEP)
    checkpoint.mkdir()
    write_manifest(checkpoint, {"trainer": {"collector": state}}, {})
    assert checked(folder, recipe) == []
    source["reward"] = f"{own.rename(tmp_path / 'moved.py')}:f"
    with pytest.raises(
        InputError, match=r"a\.jsonl:1 is pending in the checkpoint .*own\.py:f, which no"
    ):
        checked(folder, recipe_of(tmp_path, source))

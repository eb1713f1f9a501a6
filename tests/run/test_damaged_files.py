"""Damaged files of a run: whoever reads them names the file in one line, or leaves it out."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mrl.cli import main
from mrl.commands.replay_step import Source, _check_tokens, check_replay_folder
from mrl.config import dump_recipe, load_recipe
from mrl.diagnosis.why import explain
from mrl.errors import InputError
from mrl.run import metric_rows, rollout_rows
from mrl.run.compare import compare_runs, open_run
from mrl.run.folder import RunFolder, saved_step
from mrl.run.rollouts import save_groups
from mrl.view.collect import collect
from mrl.view.render import RUN, render
from tests.loop.conftest import TOY_RECIPE
from tests.run.test_rollouts import make_groups
from tests.view.invented import write_run

HUGE = "9" * 400
VALUES = (
    None,
    True,
    "x",
    [],
    {},
    -1,
    1e308,
    10**20,
    float("nan"),
    float("inf"),
    [[1]],
    {"a": 1},
    "\ud800",
)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with files of every kind."""
    run = write_run(tmp_path_factory.mktemp("whole") / "run", num_steps=3)
    dump_recipe(load_recipe(TOY_RECIPE, [f"output_dir={run}"]), run / "config.yaml")
    lines = (run / "metrics.jsonl").read_text().split("\n")[:3]
    (run / "metrics.jsonl").write_text("".join(line + "\n" for line in lines))
    start = {"step": 0, "changes": {"seed": [1, 2]}, "moved": [], "contents": {"data.path": "abc"}}
    (run / "history.jsonl").write_text(json.dumps(start) + "\n")
    span = {"trainer": [[0, 1, "train"]], "engines": [[[0, 1, "generate"]]]}
    rows = [json.dumps({"step": step, "begin": 1.7e9 + step, **span}) + "\n" for step in range(3)]
    (run / "timeline.jsonl").write_text("".join(rows))
    return run


def readers(run: Path, whole: Path) -> dict[str, Callable[[], Any]]:
    return {
        "why": lambda: explain(open_run(run), 1).as_json(),
        "diff": lambda: compare_runs(run, whole).as_json(),
        "view": lambda: render(collect(run, None, 4), RUN),
        "history": lambda: (
            RunFolder(run).history.contents(),
            RunFolder(run).history.has_other_data(0),
        ),
    }


def check_readers(run: Path, whole: Path, file: Path) -> list[str]:
    """Read with everything; return what was refused."""
    refused: dict[str, str] = {}
    for name, read in readers(run, whole).items():
        try:
            read()
        except InputError as error:
            refused[name] = str(error)
    assert all(file.name in text and "\n" not in text for text in refused.values()), refused
    return list(refused)


def damaged_value(value: Any, rng: random.Random) -> Any:
    if not isinstance(value, (dict, list)) or not value or rng.random() < 0.2:
        return rng.choice(VALUES)
    if isinstance(value, list):
        place = rng.randrange(len(value))
        return [*value[:place], damaged_value(value[place], rng), *value[place + 1 :]]
    key = rng.choice(list(value))
    if rng.random() < 0.2:
        return {name: part for name, part in value.items() if name != key}
    return {**value, key: damaged_value(value[key], rng)}


def damage(file: Path, rng: random.Random) -> None:
    """Cut the file, flip bytes of it, or give one of its JSON objects another value somewhere."""
    data = bytearray(file.read_bytes())
    way = rng.choice(("cut", "flip", "value", "value", "huge"))
    if way in ("value", "huge") and file.suffix.startswith(".json"):
        lines = file.read_text().split("\n") if file.suffix == ".jsonl" else [file.read_text()]
        place = rng.randrange(max(1, len(lines) - 1))
        with suppress(ValueError):
            text = json.dumps(damaged_value(json.loads(lines[place]), rng))
            lines[place] = text.replace("1e+308", HUGE) if way == "huge" else text
        file.write_text("\n".join(lines))
    elif way == "cut":
        file.write_bytes(data[: rng.randrange(len(data))])
    else:
        for _ in range(rng.choice((1, 3, 30))):
            data[rng.randrange(len(data))] = rng.randrange(256)
        file.write_bytes(data)


def try_damage(whole: Path, place: Path, seed: int) -> None:
    rng, run = random.Random(seed), place / "run"
    shutil.rmtree(run, ignore_errors=True)
    shutil.copytree(whole, run)
    file = rng.choice(sorted(f for f in run.rglob("*") if f.is_file()))
    damage(file, rng)
    check_readers(run, whole, file)


@settings(max_examples=4, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_no_damage_ends_in_a_traceback(seed, whole, tmp_path_factory) -> None:
    try_damage(whole, tmp_path_factory.getbasetemp(), seed)


@pytest.mark.release
def test_no_damage_of_many_ends_in_a_traceback(whole: Path, tmp_path: Path) -> None:
    for seed in range(300):
        try_damage(whole, tmp_path, seed)


@pytest.mark.parametrize(
    ("name", "change", "refusing"),
    [
        ("metrics.jsonl", {"mismatch/k3": "x"}, "why, diff"),
        ("metrics.jsonl", {"time/timestamp": 1e308}, ""),
        ("metrics.jsonl", {"reward/mean": 10**40}, "why, diff"),
        ("metrics.jsonl", {"step": 1.5}, "why, diff"),
        ("rollouts/step_000001.jsonl", {"prompt_id": 7}, "why, diff"),
        ("rollouts/step_000001.jsonl", {"completion": None}, "why, diff"),
        ("rollouts/step_000001.jsonl", {"reward": [1]}, "why, diff"),
        ("diagnosis/step_000000.json", {"layers": [{"layer": 1, "gap_first": "x"}]}, ""),
        ("history.jsonl", {"contents": 3}, "history"),
        ("timeline.jsonl", {"begin": 1e308}, ""),
    ],
)
def test_a_wrong_value_is_named(name, change, refusing, whole, tmp_path) -> None:
    run = tmp_path / "run"
    shutil.copytree(whole, run)
    lines = (run / name).read_text().split("\n")
    place = min(1, len(lines) - 2) if len(lines) > 1 else 0
    lines[place] = json.dumps({**json.loads(lines[place]), **change})
    (run / name).write_text("\n".join(lines))
    assert ", ".join(check_readers(run, whole, run / name)) == refusing


SAMPLE = {"prompt": "a", "completion": "b", "reward": 1.0, "reward_parts": {"x": 0.5, "y": None}}


@pytest.mark.parametrize(
    ("rows", "good", "change", "says"),
    [
        (metric_rows, {"step": 0}, {"step": -1}, "`step` is -1"),
        (metric_rows, {"step": 0}, {"step": 2**63}, f"`step` is {2**63}"),
        (metric_rows, {"a": 1, "step": 0}, {"step": None}, "it lacks `step`"),
        (rollout_rows, SAMPLE, {"prompt": None}, "it lacks `prompt`"),
        (rollout_rows, SAMPLE, {"completion": None}, "it lacks `completion`"),
        (rollout_rows, SAMPLE, {"reward": None}, "it lacks `reward`"),
        (
            rollout_rows,
            SAMPLE,
            {"reward_parts": {"x": "1"}},
            "the part 'x' of the reward is not a n",
        ),
    ],
)
def test_a_row_that_no_reader_can_use_is_damaged(rows, good, change, says, tmp_path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps(good) + "\n")
    assert rows.read(file) == [good]
    bad = {key: value for key, value in {**good, **change}.items() if value is not None}
    file.write_text(json.dumps(good) + "\n" + json.dumps(bad) + "\n")
    with pytest.raises(InputError, match=f"^{file}:2: the line is damaged .{says}"):
        rows.read(file)


def test_other_names_and_other_numbers_of_samples_are_no_reason_to_fail(whole, tmp_path) -> None:
    a, b = tmp_path / "a", tmp_path / "b"
    for number, run in enumerate((a, b)):
        shutil.copytree(whole, run)
        (run / "rollouts/step_of_mine.jsonl").write_text("no row\n")
        save_groups(saved_step(run / "rollouts", 0), make_groups(wide=False)[: 1 + number])
    found = compare_runs(a, b)
    assert found.samples is not None
    assert [(pair.key, pair.a, pair.b) for pair in found.samples.pairs] == [("saved samples", 2, 3)]


def test_saved_rollouts_with_tokens_of_no_vocabulary_are_named(whole, tmp_path) -> None:
    run = tmp_path / "run"
    shutil.copytree(whole, run)
    file = saved_step(run / "rollouts", 0)
    save_groups(file, make_groups(wide=False))
    source = Source(RunFolder(run), 0, 0, checkpoint=False)
    _check_tokens(source, 100)
    with pytest.raises(
        InputError, match=f"{file}: the file is damaged: a sample of group . has tokens"
    ):
        _check_tokens(source, 3)


def test_a_replay_is_not_written_over_a_run(whole, tmp_path) -> None:
    """It would set aside all steps of the run."""
    source = Source(RunFolder(whole), 1, 0, checkpoint=False)
    other = shutil.copytree(whole, tmp_path / "other")
    for output in (whole, whole / ".." / whole.name, other):
        with pytest.raises(InputError, match=r"--output \S+ holds a run, whose steps"):
            check_replay_folder(source, output)
    recipe = load_recipe(TOY_RECIPE, [f"debug.load_rollouts={whole / 'rollouts'}"])
    dump_recipe(recipe, other / "config.yaml")  # of an earlier replay
    check_replay_folder(source, other)
    check_replay_folder(source, tmp_path / "new")


def test_a_folder_in_the_place_of_a_file_is_named(whole, tmp_path, capsys) -> None:
    run = tmp_path / "run"
    shutil.copytree(whole, run)
    (run / "metrics.jsonl").unlink()
    (run / "metrics.jsonl").mkdir()
    for words in (["why", str(run), "1"], ["diff", str(run), str(whole)], ["view", str(run)]):
        with pytest.raises(SystemExit) as end:
            main(words)
        assert end.value.code == 2
        assert capsys.readouterr().err == f"mrl: {run}/metrics.jsonl: Is a directory\n"

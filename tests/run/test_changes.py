"""What may change in a run, key by key, and how a change is refused, allowed and written down."""

from __future__ import annotations

import glob
import json
import shlex
import shutil
from collections import Counter
from pathlib import Path

import pytest
import yaml

from mrl.config import Recipe, dump_recipe, load_recipe
from mrl.config.suggest import all_keys
from mrl.errors import InputError
from mrl.run.changes import (
    RULES,
    Change,
    Kind,
    check_allowed,
    check_keys,
    find_changes,
    flatten,
    is_in,
    rule_of,
)
from mrl.run.contents import PIECE_BYTES, WHOLE_BYTES, _of_file, digest_of
from mrl.run.folder import RunFolder
from mrl.run.history import History
from mrl.run.source import load_run, read_source
from tests.loop.conftest import TOY_RECIPE

KEYS = all_keys()


def test_each_key_of_the_recipe_is_in_exactly_one_class() -> None:
    listed = Counter(key for rule in RULES for key in rule.keys)
    assert max(listed.values()) == 1, listed.most_common(3)
    unknown = [k for k in listed if k not in KEYS and not k.startswith("megatron.")]
    assert not unknown
    for key in KEYS:
        inside = [name for name in listed if is_in(name, key)]
        assert inside or rule_of(key).kind in Kind, key
    assert {rule_of(key).kind for key in ("seed", "model.dtype", "sft.lr")} == {Kind.NEVER}
    for key in ("train.micro_batch_tokens", "rollout.mem_fraction_static", "eval.sets.path"):
        assert rule_of(key).kind is Kind.FREE
    for key in ("optimizer.lr", "algorithm.clip_low", "reward", "data.path", "rollout.top_p"):
        assert rule_of(key).kind is Kind.ALLOW


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run folder after one step, whose model and data are files in it and beside it."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text("{}")
    (tmp_path / "run").mkdir()
    (tmp_path / "run/data.jsonl").write_text('{"prompt": "a"}\n')
    recipe = recipe_of(tmp_path / "run", f"data.path={tmp_path / 'run/data.jsonl'}")
    folder = RunFolder(tmp_path / "run")
    folder.open(recipe, folder.check(recipe), 0)
    folder.add_metrics({"step": 0})
    return folder.root


def recipe_of(run: Path, *overrides: str) -> Recipe:
    config = run / "config.yaml"
    source = config if config.exists() else TOY_RECIPE
    places = (f"output_dir={run}", f"model.path={run.parent / 'model'}")
    return load_recipe(source, [*places, *overrides])


def refused(run: Path, *overrides: str, allowed: tuple[str, ...] = ()) -> str:
    with pytest.raises(InputError) as caught:
        RunFolder(run).check(recipe_of(run, *overrides), allowed)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_refusal_names_key_values_class_and_both_commands(run: Path) -> None:
    line = refused(run, "optimizer.lr=0.002", "train.micro_batch_tokens=80")
    assert "optimizer.lr is 0.001 there and 0.002 now (changes only with --allow)" in line
    do = f"{run} optimizer.lr=0.002 train.micro_batch_tokens=80"
    assert f"mrl train {do} --allow optimizer.lr" in line
    assert "mrl branch " + do.replace(f"{run} ", f"{run} NEW_DIR ") in line
    line = refused(run, "seed=3", allowed=("optimizer.lr",))
    assert "seed is 0 there and 3 now (never changes in a run); keep seed" in line
    assert "--allow" not in line
    line = refused(run, "algorithm.masks=[{name: opsm, high: 1.0}]")
    assert """'algorithm.masks=[{"name": "opsm\"""" in line  # quoted for the shell


@pytest.mark.parametrize("allowed", ["optimizer.lr", "optimizer"])
def test_what_is_allowed_is_written_down_with_the_config_before_it(run: Path, allowed: str) -> None:
    folder, recipe = RunFolder(run), recipe_of(run, "optimizer.lr=0.002", "rollout.max_restarts=7")
    update = folder.check(recipe, (allowed,))
    folder.open(recipe, update, 5)
    first, second = folder.history.read()
    assert (first["step"], first["changes"], first["event"]) == (
        0, {}, "start")  # fmt: skip
    assert second["changes"] == {"optimizer.lr": [0.001, 0.002], "rollout.max_restarts": [3, 7]}
    assert (second["step"], second["allowed"], second["contents"]) == (5, [allowed], {})
    assert set(second) >= {"time", "command", "mrl", "commit"}
    kept = yaml.safe_load((run / second["config_before"]).read_text())
    assert kept["optimizer"]["lr"] == 0.001
    assert yaml.safe_load(folder.config.read_text())["optimizer"]["lr"] == 0.002
    assert folder.history.config_at(4) == run / second["config_before"]
    assert folder.history.config_at(5) == folder.config
    assert not folder.check(recipe).changes  # the next start needs no --allow


def test_paths_with_equal_contents_are_free_and_other_contents_are_not(run: Path) -> None:
    folder, data = RunFolder(run), run / "data.jsonl"
    first_rows = data.read_text()
    moved = shutil.copy(data, run.parent / "moved.jsonl")
    shutil.copytree(run.parent / "model", run.parent / "elsewhere")
    places = (f"data.path={moved}", f"model.path={run.parent / 'elsewhere'}")
    changes = folder.check(recipe_of(run, *places)).changes
    assert [(c.key, c.is_moved) for c in changes] == [("data.path", True), ("model.path", True)]
    (run.parent / "elsewhere/config.json").write_text("{ }")
    assert "model.path is " in refused(run, *places, allowed=("data",))
    data.write_text('{"prompt": "b"}\n')
    line = refused(run)
    assert f"data.path is '{data}', whose contents have changed" in line
    assert "--allow data.path" in line
    assert not folder.history.has_other_data(0)
    recipe = recipe_of(run)
    folder.open(recipe, folder.check(recipe, ("data.path",)), 4)
    assert folder.history.has_other_data(4)  # the checkpoint of step 4 is of the old rows
    assert not folder.history.has_other_data(5)
    assert not folder.check(recipe_of(run)).changes
    data.write_text(first_rows)
    folder.open(recipe, folder.check(recipe, ("data.path",)), 4)
    assert len(folder.history.read()[-1]["changes"]) == 1
    assert not folder.history.has_other_data(4)  # it changed back: the position still holds
    assert not folder.history.has_other_data(0)


def test_options_of_the_data_that_change_back_do_not_move_it(run: Path) -> None:
    folder = RunFolder(run)
    for value, is_other in (("false", True), ("true", False), ("false", True)):
        recipe = recipe_of(run, f"data.shuffle={value}")
        folder.open(recipe, folder.check(recipe, ("data",)), 4)
        assert folder.history.has_other_data(4) == is_other
        assert not folder.history.has_other_data(5)


def test_before_the_first_step_anything_may_change(run: Path) -> None:
    (run / "metrics.jsonl").unlink()
    changes = RunFolder(run).check(recipe_of(run, "seed=3", "optimizer.lr=0.002")).changes
    assert [change.key for change in changes] == ["optimizer.lr", "seed"]


def test_a_run_of_an_earlier_version_has_no_history(run: Path) -> None:
    (run / "history.jsonl").unlink()
    moved = shutil.copy(run / "data.jsonl", run.parent / "moved.jsonl")
    (change,) = RunFolder(run).check(recipe_of(run, f"data.path={moved}")).changes
    assert change.is_moved


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("optimizer.lrr", "there is no such key; did you mean 'optimizer.lr'?"),
        ("seed", "--allow seed: seed never changes in a run"),
        ("model.dtype", "never changes in a run"),
    ],
)
def test_allow_takes_keys_that_can_be_allowed(name: str, reason: str) -> None:
    with pytest.raises(InputError) as caught:
        check_keys([name])
    assert reason in str(caught.value)
    check_keys(["optimizer", "megatron", "megatron.moe_permute_fusion", "algorithm.name", "data"])


def test_a_copied_run_is_itself(run: Path) -> None:
    copy = Path(shutil.copytree(run, run.parent / "copy"))
    recipe = read_source(copy)
    assert recipe.output_dir == str(copy)
    assert recipe.data.path == str(copy / "data.jsonl")  # it is in the folder
    assert recipe.model.path == str(run.parent / "model")
    assert not RunFolder(copy).check(recipe).changes
    with pytest.raises(InputError) as caught:
        read_source(copy / "config.yaml")
    assert f"but its output_dir is {run}, which is another folder" in str(caught.value)
    assert f"Continue the run in {copy} with: mrl train {copy}, or that run with: mrl train {run}" in (
        str(caught.value))  # fmt: skip
    new = read_source(copy / "config.yaml", [f"output_dir={run.parent / 'new'}"])
    assert new.output_dir == str(run.parent / "new")
    shutil.rmtree(run)
    with pytest.raises(InputError, match="which is not there"):
        read_source(copy / "config.yaml")
    assert load_run(copy, [f"output_dir={copy}"]).output_dir == str(copy)
    with pytest.raises(InputError, match="is continued where it is"):
        load_run(copy, [f"output_dir={run}"])


def test_paths_with_a_prefix_or_a_suffix_move_with_the_run(tmp_path: Path) -> None:
    old = tmp_path / "old"
    (old / "judge").mkdir(parents=True)
    (old / "a.jsonl").touch()
    (old / "reward.py").write_text("def score(completions, **columns): ...\n")
    rewards = [
        f"{old}/reward.py:score", f"verl:{old}/reward.py", f"trl:{old}/reward.py:score",
        f"reward_model:{old}/judge", f"{old}/gone.py:score", f"{old}er/reward.py:score",
    ]  # fmt: skip
    listed = json.dumps([{"name": f"r{i}", "path": each} for i, each in enumerate(rewards)])
    given = [f"output_dir={old}", f"data.path={old}/*.jsonl", f"reward={listed}"]
    dump_recipe(load_recipe(TOY_RECIPE, given), old / "config.yaml")
    recipe = load_run(new := old.rename(tmp_path / "new [1]*"))
    assert recipe.data.path == f"{glob.escape(str(new))}/*.jsonl"
    expected = [each.replace(f"{old}/", f"{new}/") for each in rewards[:4]] + rewards[4:]
    assert [each["path"] for each in recipe.model_dump()["reward"]] == expected


def test_a_run_where_it_was_is_read_from_its_config_too(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(run.parent)
    for path in (run / "config.yaml", Path("run/config.yaml"), Path("run"), run):
        assert Path(read_source(path).output_dir).resolve() == run
    with pytest.raises(InputError, match=r"without config\.yaml"):
        read_source(Path("model"))


def test_large_files_are_digested_in_pieces_and_small_ones_whole(tmp_path: Path) -> None:
    file = tmp_path / "weights"
    digests = []
    for size, at in ((WHOLE_BYTES + 9, 0), (WHOLE_BYTES + 9, WHOLE_BYTES + 8), (WHOLE_BYTES + 8, 0),
                     (PIECE_BYTES, 5)):  # fmt: skip
        with file.open("wb") as stream:
            stream.truncate(size)
            stream.seek(at)
            stream.write(b"x")
        digests.append(_of_file(file))
    assert len(set(digests)) == 4


def test_the_history_of_a_run_that_was_set_back(tmp_path: Path) -> None:
    dump_recipe(recipe_of(tmp_path), tmp_path / "config.yaml")
    lines = [{"step": step, "config_before": f"configs/{step}"} for step in (10, 5, 20)]
    (tmp_path / "history.jsonl").write_text("".join(json.dumps(row) + "\n" for row in lines))
    history = History(tmp_path)
    assert history.config_at(7) == tmp_path / "configs/20"  # done again after the start from step 5
    assert history.config_at(3) == tmp_path / "configs/10"


def test_the_history_knows_what_was_named_at_a_step(run: Path) -> None:
    history = History(run)
    history.add("start", 0, [], {"data.path": "a"})
    history.add("start", 10, [], {"data.path": "b"})
    assert history.contents(5)["data.path"] == "a"
    assert history.contents()["data.path"] == history.contents(10)["data.path"] == "b"


def test_a_line_of_the_history_that_a_crash_cut_short_is_dropped(run: Path) -> None:
    history = History(run)
    with history.file.open("a") as file:
        file.write('{"time": "20')
    history.add("start", 10, [], {"reward": "c"})
    assert history.contents()["reward"] == "c"


def test_only_paths_are_judged_by_contents(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "first_char").mkdir()
    (tmp_path / "first_char/file").write_text("a")
    (tmp_path / "r.py").write_text("def f(completions, **columns): ...\n")
    before = [digest_of("first_char"), digest_of(f"trl:{tmp_path}/r.py:f")]
    (tmp_path / "first_char/file").write_text("b")
    (tmp_path / "r.py").write_text("def f(completions, **columns): return 1\n")
    assert digest_of("first_char") == before[0]
    assert digest_of(f"trl:{tmp_path}/r.py:f") != before[1]


def test_many_changes_are_another_run_and_not_this_one_continued() -> None:
    """Nobody who changes all of this means to continue; a key that never changes ends the matter."""
    changes = [
        Change(f"rollout.{key}", 1, 2, Kind.ALLOW) for key in ("top_k", "top_p", "stop", "seed")
    ]
    with pytest.raises(InputError, match="; start a new run in another output_dir, or continue it"):
        check_allowed(changes, (), "run", "what")
    with pytest.raises(InputError, match=r"now .*; continue it with: mrl train run") as caught:
        check_allowed(changes[:3], (), "run", "what")
    assert "another output_dir" not in str(caught.value)
    with pytest.raises(InputError) as caught:
        check_allowed([*changes, Change("seed", 0, 3, Kind.NEVER)], (), "run", "what")
    assert str(caught.value).endswith("; keep seed, or start another run in a new output_dir")


def test_the_folder_of_the_model_is_no_run_folder(run: Path) -> None:
    model = run.parent / "model"
    recipe = load_recipe(TOY_RECIPE, [f"output_dir={model}", f"model.path={model}"])
    with pytest.raises(
        InputError, match=r"is the folder of model.path, which a run must not write"
    ):
        RunFolder(model).check(recipe)


def changes_between(old: list[str], new: list[str]) -> list[Change]:
    trees = [flatten(load_recipe(TOY_RECIPE, each).model_dump()) for each in (old, new)]
    return find_changes(*trees, {}, {})


@pytest.mark.parametrize(
    ("given", "key"),
    [
        ("data.columns={image: null}", "data.columns.image"),
        ("megatron={a: null}", "megatron.a"),
        ("environment={name: x, arguments: {limit: null}}", "environment.arguments.limit"),
    ],
)
def test_a_free_key_that_is_null_is_not_one_that_is_missing(given: str, key: str) -> None:
    """`image: null` drops a column, and an argument of null is not the default of the class."""
    other = (
        [given.replace("arguments: {limit: null}", "arguments: {}")] if "name: x" in given else []
    )
    for change in (*changes_between([given], other), *changes_between(other, [given])):
        assert change.key == key
        assert change.kind is Kind.ALLOW
        assert "(not given)" in str(change)
        assert change.old != change.new  # the history keeps both, and compares them
    assert len(changes_between([given], other)) == len(changes_between(other, [given])) == 1


@pytest.mark.parametrize(
    ("old", "new", "override"),
    [
        (["environment={name: guess, max_turns: 3}"], [], "environment=null"),
        (["megatron={a: 1, b: {c: 2}, d: 3}"], ["megatron={b: {c: 2}}"], "megatron={b: {c: 2}}"),
        (["environment={name: x, arguments: {a: 1}}"], ["environment={name: x}"],
         "environment.arguments={}"),
        ([], ["data.prompt_key='1'"], "data.prompt_key='1'"),
        ([], ["algorithm.name='on'"], "algorithm.name='on'"),
        ([], ["algorithm.name='a: b'"], "algorithm.name='a: b'"),
        ([], ["data.path=my file.jsonl"], "data.path=my file.jsonl"),
    ],
)  # fmt: skip
def test_the_command_that_a_refusal_shows_makes_the_change(old, new, override) -> None:
    changes = changes_between(old, new)
    with pytest.raises(InputError, match="continue it with: mrl train run ") as caught:
        check_allowed(changes, (), "run", "what")
    command = str(caught.value).partition("continue it with: ")[2].partition(" (or try")[0]
    words = shlex.split(command)[3:]
    overrides = words[: words.index("--allow")]
    assert [yaml.safe_load(each.partition("=")[2]) for each in overrides] == [
        yaml.safe_load(override.partition("=")[2])
    ]
    assert not changes_between([*old, *overrides], new)

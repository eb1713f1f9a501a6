from pathlib import Path

import pytest
import yaml

from mrl.config import (
    EvalConfig,
    EvalSetConfig,
    Recipe,
    RolloutConfig,
    dump_recipe,
    load_recipe,
)
from mrl.config.data import ENVIRONMENT_TASKS
from mrl.config.describe import keys_of_branch, recipe_text
from mrl.config.explain import EXAMPLES
from mrl.config.load import _Loader, recipe_of
from mrl.errors import InputError
from mrl.run.folder import RunFolder

RECIPES = sorted((Path(__file__).parents[2] / "launch/recipes").rglob("*.yaml"))
TOY = Path(__file__).parents[2] / "launch/recipes/toy_moe.yaml"


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_every_recipe_loads_and_its_data_is_there(path):
    recipe = load_recipe(path)
    if "toy" not in Path(recipe.model.path).parts:  # a published model: its user brings both
        return
    data = [recipe.data.path, *([recipe.sft.path] if recipe.sft else [])]
    files = [Path(path) for path in data if path != ENVIRONMENT_TASKS]
    assert all(file.is_absolute() and file.is_file() for file in files)


def test_a_number_with_an_exponent_is_one_though_yaml_reads_text():
    for text in ("1e-6", "2E3", "'1e-6'"):
        assert load_recipe(TOY, [f"optimizer.lr={text}"]).optimizer.lr == float(text.strip("'"))


def test_the_toy_recipe_is_the_documented_run():
    recipe = load_recipe(TOY)
    assert (recipe.rollout.prompts_per_step, recipe.rollout.samples_per_prompt) == (16, 8)
    assert recipe.rollout.min_response_len == recipe.rollout.max_response_len == 32
    assert (recipe.algorithm.name, recipe.moe.routing_replay) == ("gspo", "r3")
    assert recipe.optimizer.lr == 1e-3


@pytest.mark.parametrize(
    ("override", "reason"),
    [
        ("rollout.max_respones_len=3", "did you mean 'rollout.max_response_len'?"),
        ("modle.path=x", "unknown key 'modle'; did you mean 'model'?"),
        ("max_response_len=3", "did you mean 'rollout.max_response_len'?"),
        ("lr=1", "unknown key 'lr'; did you mean 'optimizer.lr'?"),
        ("sft.num_step=1", "did you mean 'sft.num_steps'?"),
        ("eval.sets=[{nam: a, path: b}]", "'eval.sets.0.nam'; did you mean 'eval.sets.name'?"),
        ("zzzzqq=1", "unknown key 'zzzzqq'"),
        ("optimizer.lr=abc", "optimizer.lr: Input should be a valid number"),
        ("optimizer.lr=-1", "optimizer.lr: Input should be greater than 0, got -1"),
        ("optimizer.lr=.nan", "optimizer.lr: Input should be a finite number, got nan"),
        ("optimizer.lr=.inf", "optimizer.lr: Input should be a finite number, got inf"),
        ("train.num_steps=true", "train.num_steps: expected a number, got True"),
        ("optimizer.lr='0.5'", "optimizer.lr: expected a number without quotes, got '0.5'"),
        ("eval.every='2'", "eval.every: expected a number without quotes, got '2'"),
        ("rollout.context_len=no", "rollout.context_len: expected a number, got False"),
        ("data={sources: [{path: a, weight: true}]}", "weight: expected a number, got True"),
        (
            "data={sources: [{path: a, weight: '2'}]}",
            "weight: expected a number without quotes, got",
        ),
        ("moe.routing_replay=r4", "'off', 'r2' or 'r3', got 'r4'"),
        ("train.num_steps=2.5", "train.num_steps: Input should be a valid integer"),
        ("algorithm.name=3", "algorithm.name: expected text, got 3"),
        ("optimizer=3", "optimizer: expected a mapping of keys, such as optimizer.name, got 3"),
        (
            "algorithm=grpo",
            "algorithm: expected a mapping of keys; did you mean algorithm.name, got",
        ),
        ("data=a.jsonl", "data: expected a mapping of keys; did you mean data.path, got 'a.jsonl'"),
        ("reward=5", "reward: expected the name of a reward, or a list of rewards, got 5"),
        ("profile.steps=ten", "profile.steps: expected a list, got 'ten'"),
        ("output_dir=", "output_dir: empty, but required; give a value"),
        ("output_dir=''", "output_dir: String should have at least 1 character"),
        ("reward.x=3", "reward is a value, not a branch"),
        ("noequals", "expected key=value"),
        ("=3", "expected key=value"),
        ("seed=[", "'[' is not a YAML value"),
        # Renamed keys are refused with their new names.
        ("warm_start={path: a}", "warm_start was renamed: write sft"),
        ("warm_start.lr=1e-3", "warm_start was renamed: write sft.lr"),
        (
            "rollout.unfinished=resume",
            "rollout.unfinished was renamed: write rollout.partial_rollouts",
        ),
        ("rollout={unfinished: drop}", "overrides: rollout.unfinished was renamed"),
    ],
)
def test_a_wrong_override_is_named(override, reason):
    with pytest.raises(InputError) as caught:
        load_recipe(TOY, [override])
    assert reason in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("branch", "key", "new"),
    [
        ({"warm_start": None}, "warm_start", "sft"),
        ({"rollout": {"unfinished": "drop"}}, "rollout.unfinished", "rollout.partial_rollouts"),
    ],
)
def test_a_run_folder_written_with_old_keys_says_what_to_write(tmp_path, branch, key, new):
    tree = yaml.safe_load(TOY.read_text())
    for name, value in branch.items():
        tree[name] = tree.get(name, {}) | value if isinstance(value, dict) else value
    folder = RunFolder(tmp_path)
    folder.config.write_text(yaml.safe_dump(tree))
    with pytest.raises(InputError) as caught:
        folder.check(load_recipe(TOY))
    assert f"config.yaml: {key} was renamed: write {new}" in str(caught.value)


def test_overrides_apply_in_order_and_make_branches():
    recipe = load_recipe(
        TOY,
        ["optimizer.lr=1e-6", "seed=1", "seed=2", "checkpoint.save_every=5", "reward=a=b.py:f"],
    )
    assert recipe.optimizer.lr == 1e-6  # YAML 1.1 reads this as a string
    assert (recipe.seed, recipe.checkpoint.save_every, recipe.reward) == (2, 5, "a=b.py:f")


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_dump_spells_out_everything_and_loads_again(tmp_path, path):
    recipe = load_recipe(path, ["seed=7"])
    dump_recipe(recipe, tmp_path / "config.yaml")
    output = {"output_dir": str(Path(recipe.output_dir).absolute())}
    assert load_recipe(tmp_path / "config.yaml") == recipe.model_copy(update=output)
    dumped = yaml.safe_load((tmp_path / "config.yaml").read_text())
    assert set(dumped) == {field.alias or name for name, field in Recipe.model_fields.items()}
    assert dumped["optimizer"]["adam_beta2"] == 0.999


def test_unreadable_recipes(tmp_path):
    with pytest.raises(InputError, match=r"gone\.yaml: No such file"):
        load_recipe(tmp_path / "gone.yaml")
    with pytest.raises(InputError, match="the recipe comes first, before overrides"):
        load_recipe(tmp_path / "seed=1")
    file = tmp_path / "recipe.yaml"
    for content, reason in (
        (b"a: [", "not valid YAML"),
        (b"\xff\xfe\xff", "not valid YAML"),
        (b"- 1\n", "expected a mapping of keys, got list"),
        (b"", "the file is empty; `mrl recipe` prints one to fill in"),
        (b"seed: 1\n", "model: required, and not given"),
        (b"a: 1\nseed: 1\nb:\n  c: 1\nseed: 2\n", "the key 'seed' occurs twice, in lines 2 and 5"),
        (b"data: {columns: {a:b}}\n", r"got {a:b}, .* write {a: b}, with a space after the colon"),
        (b"eval: {sets: [{path:x.jsonl}]}\n", "write {path: x.jsonl}"),
        (b"rollout: {top_k: 2, top_k: 3}\n", "the key 'top_k' occurs twice in line 1"),
    ):
        file.write_bytes(content)
        with pytest.raises(InputError, match=reason):
            load_recipe(file)


def test_a_colon_with_a_value_or_in_quotes_needs_no_space() -> None:
    for written in ("{'a:b': null, c: d:e}", "{a:b: , c: d:e}", "{c: d:e, a:b : }"):
        recipe = load_recipe(TOY, [f"data.columns={written}"])
        assert recipe.data.columns == {"a:b": None, "c": "d:e"}, written


def test_a_key_twice_in_an_override_is_refused() -> None:
    for item in ("rollout={top_k: 2, top_k: 3}", "a.b={x: {y: 1, y: 2}}"):
        with pytest.raises(
            InputError, match=r"^override '.*': the key '.*' occurs twice in line 1"
        ):
            recipe_of({}, [item], "recipe")


def test_a_merged_anchor_that_overrides_a_key_has_it_once():
    text = "x:\n  y:\n    a: &a {k: 1}\n    b: &b\n      <<: *a\n      k: 2\nz:\n  <<: *b\n"
    assert yaml.load(text, _Loader)["z"] == {"k": 2}


def test_an_empty_key_is_said_to_be_empty(tmp_path):
    file = tmp_path / "recipe.yaml"
    file.write_text(recipe_text())  # `mrl recipe`, nothing filled in
    with pytest.raises(InputError) as caught:
        load_recipe(file)
    sections = [key for key in keys_of_branch(Recipe) if key.is_required]
    inner = {
        f"{key.name}.{each.name}"
        for key in sections
        for branch in key.branches
        for each in keys_of_branch(branch)
        if each.is_required
    }
    assert {key.name for key in sections} | inner == set(EXAMPLES)
    for key in ("model.path", "rollout.max_response_len", "output_dir"):
        assert f"{key}: empty, but required; give a value, for example {key}: " in str(caught.value)
    assert "data: give data.path or data.sources; neither is given;" in str(caught.value)
    assert "None" not in str(caught.value)
    tree = (
        "{" + ", ".join(f"{k}: {v}" for k, v in EXAMPLES.items() if "." not in k) + ", reward: a}"
    )
    file.write_text(tree)
    load_recipe(file)
    with pytest.raises(InputError, match="reward_timeout_s: empty; give it a value, or leave the"):
        load_recipe(file, ["reward_timeout_s="])


def test_the_tree_is_frozen_and_every_key_explains_itself_or_is_a_branch():
    recipe = load_recipe(TOY)
    with pytest.raises(ValueError, match="frozen"):
        recipe.seed = 3  # pyright: ignore[reportAttributeAccessIssue]


def test_a_bare_off_turns_replay_off(tmp_path):
    """YAML 1.1 reads `off` as false."""
    recipe = next(iter(sorted((Path(__file__).parents[2] / "launch/recipes").glob("*.yaml"))))
    for value in ("off", '"off"'):
        assert load_recipe(recipe, [f"moe.routing_replay={value}"]).moe.routing_replay == "off"


def test_the_example_of_the_docs_is_a_valid_one():
    text = (Path(__file__).parents[2] / "docs/evaluation.md").read_text()
    example = yaml.safe_load(text.partition("```yaml")[2].partition("```")[0])
    config = EvalConfig.model_validate(example["eval"])
    assert {key for each in config.sets for key in each.model_fields_set} == set(
        EvalSetConfig.model_fields
    )


def test_weight_buckets_by_the_size_of_the_model():
    rollout = RolloutConfig(max_response_len=8)
    mb = 1 << 20
    for model_bytes, expected in (
        (mb, mb),
        (200 * mb, 50 * mb),
        (4096 * mb, 256 * mb),
        (58_240 * mb, 910 * mb),  # 30B in bfloat16
        (1_280_000 * mb, 2048 * mb),  # 671B
    ):
        assert rollout.weight_bucket_bytes(model_bytes) == expected
    fixed = RolloutConfig(max_response_len=8, weight_bucket_mb=64)
    assert fixed.weight_bucket_bytes(58_240 * mb) == 64 * mb
    with pytest.raises(ValueError, match="weight_bucket_mb"):
        RolloutConfig(max_response_len=8, weight_bucket_mb=0)


def test_short_names_of_dtypes():
    recipe = load_recipe(TOY, ["model.dtype=bf16", "rollout.dtype=fp32"])
    assert (recipe.model.dtype, recipe.rollout.dtype) == ("bfloat16", "float32")
    for name in ("fp16", "half", "float16"):
        for key in ("model.dtype", "rollout.dtype"):
            with pytest.raises(InputError) as caught:
                load_recipe(TOY, [f"{key}={name}"])
            assert f"{key}: float16 gradients underflow" in str(caught.value)
            assert f"use bfloat16 (bf16) or float32 (fp32), got '{name}'" in str(caught.value)


@pytest.mark.parametrize(
    ("override", "reason"),
    [
        ("train.cpu_threads=true", "expected a number or auto, got True"),
        ("train.cpu_threads='4'", "expected a number without quotes or auto, got '4'"),
        ("rollout.weight_bucket_mb=yes", "expected a number or auto, got True"),
        ("algorithm.lam=true", "expected a number or adaptive, got True"),
        ("rollout.stop_token_ids=[7, true]", "expected a number, got [7, True]"),
        ("profile.steps=['3']", "expected a number without quotes, got ['3']"),
        ("watch.limits={load: true}", "watch.limits: expected a number"),
        (
            "environment={name: x, arguments: {a: {since: 2024-01-01}}}",
            "a.since is of the type date",
        ),
        ("environment={name: x, arguments: {a: [.inf]}}", "a is inf; expected a finite number"),
        ("environment={name: x, arguments: {a: {1: b}}}", "a: the key 1 is no text; write it in q"),
        ("megatron={a: .nan}", "megatron: a is nan; expected a finite number"),
        ("data.path=[]", "data.path: the list is empty; give at least one path"),
        ("eval.sets=[{name: a, path: []}]", "eval.sets.0.path: the list is empty"),
        ("data.path=''", "data.path: the path is empty; give the path of a file or folder"),
        ("reward=''", "reward: expected the name of a reward, or a list of rewards, got ''"),
        (f"seed={2**63 - 1}", "seed: expected a number of at most 62 bits"),
        ("train.num_steps=010", "got 010, which YAML reads as 8; write 8, or put text in quotes"),
        ("rollout.start_timeout_s=10:00", "got 10:00, which YAML reads as 600; write 600"),
        ("rollout.start_timeout_s=1:30.5", "got 1:30.5, which YAML reads as 90.5"),
        ("output_dir=2024-13-45", "'2024-13-45' is not a YAML value"),
        ("seed=!!int abc", "is not a YAML value"),
        ("seed=!!bool abc", "is not a YAML value"),
        (
            "train.num_steps=9223372036854775808",
            "got 9223372036854775808, expected a number of at ",
        ),
        ("output_dir=runs/a #3", "YAML reads '#3' as a comment; put the text in quotes"),
        (f"optimizer.lr={'a' * 600}", f"got '{'a' * 149} ... {'a' * 149}'"),
        (f"seed={'9' * 5000}", "is not a YAML value"),
        (f"seed={'[' * 3000}", "is not a YAML value"),
        ("optimizer=&a {lr: *a}", "an alias (*name) is inside its own anchor (&name)"),
    ],
)
def test_a_value_that_would_be_read_as_another_is_refused(override: str, reason: str) -> None:
    with pytest.raises(InputError) as caught:
        load_recipe(TOY, [override])
    assert reason in str(caught.value)


def test_the_short_form_of_logging_takes_overrides_in_a_dict_too() -> None:
    tree = yaml.safe_load(TOY.read_text()) | {"logging": ["jsonl"]}
    assert recipe_of(tree, ["logging.name=mine"], "recipe").logging.name == "mine"


def test_numbers_and_words_are_taken_where_both_may_be_given() -> None:
    recipe = load_recipe(TOY, ["train.cpu_threads=2", "rollout.stop_token_ids=[7]", "seed=-5",
                               "algorithm.lam=adaptive", "watch.limits={load: 3}"])  # fmt: skip
    assert (recipe.train.cpu_threads, recipe.rollout.stop_token_ids, recipe.seed) == (2, (7,), -5)
    assert load_recipe(TOY, ["output_dir='010'"]).output_dir == "010"
    assert load_recipe(TOY, ["data.columns={a: 'b', c: null}"]).data.columns == {
        "a": "b",
        "c": None,
    }

"""Which ranks train, which generate, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from mrl.config import Recipe, load_recipe
from mrl.errors import InputError
from mrl.preflight.asynchronous import check_asynchronous
from mrl.preflight.roles import as_colocated, roles_of, trainer_dims

ROOT = Path(__file__).parents[2]
APART = ("rollout.placement=disaggregated", "rollout.num_ranks=2")


def recipe(*more: str) -> Recipe:
    return load_recipe(ROOT / "launch/recipes/toy_moe.yaml", list(more))


def test_the_last_ranks_generate() -> None:
    roles = roles_of(recipe(*APART), 5)
    assert (roles.num_trainers, roles.num_rollout, roles.world) == (3, 2, 5)
    assert [roles.is_rollout(rank) for rank in range(5)] == [False] * 3 + [True] * 2
    assert roles.num_engines(recipe(*APART, "rollout.tensor_parallel_size=2").rollout) == 1
    assert roles.describe() == (
        "disaggregated: ranks 0 to 2 for training, ranks 3 to 4 for rollout"
    )


def test_all_colocated_ranks_train_and_generate() -> None:
    roles = roles_of(recipe(), 4)
    assert (roles.num_trainers, roles.num_rollout, roles.num_engine_ranks) == (4, 0, 4)
    assert not any(map(roles.is_rollout, range(4)))


@pytest.mark.parametrize(
    ("more", "world", "message"),
    [
        (["rollout.num_ranks=1"], 2, "rollout.num_ranks is 1, but rollout.placement is colocated"),
        (["rollout.placement=disaggregated"], 2, "rollout.num_ranks is missing"),
        ([*APART, "rollout.tensor_parallel_size=3"], 4, "num_ranks 2 is not divisible by"),
        (list(APART), 2, "2 rank.s. were started, and rollout.num_ranks takes 2"),
        ([*APART, "debug.load_rollouts=there"], 3, "debug.load_rollouts starts no engine"),
    ],
)
def test_roles_that_do_not_fit_are_refused(more: list[str], world: int, message: str) -> None:
    with pytest.raises(InputError, match=message):
        roles_of(recipe(*more), world)


def test_a_layout_that_does_not_fit_names_the_ranks_that_train() -> None:
    given = recipe(*APART, "parallel.expert_model_parallel_size=2")
    assert trainer_dims(given, roles_of(given, 4)).world == 2
    with pytest.raises(
        InputError, match=r"3 ranks are not .* train: 2 of the 5 ranks lead engines"
    ):
        trainer_dims(given, roles_of(given, 5))


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["async.max_staleness=1"], "async.max_staleness is set, but rollout.placement is colocated"),
        ([*APART, "rollout.weight_sync=disk"], "weight_sync is disk"),
        (["rollout.weight_sync=distributed"], "expected one of disk, tensor; or"),
        (
            ["rollout.weight_encoding=delta"],
            "weight_encoding is delta, but rollout.placement is colocated: the engine reads",
        ),
        (
            [*APART, "rollout.weight_encoding=delta", "lora.rank=2"],
            "weight_encoding is delta, but lora.rollout is adapter",
        ),
        ([*APART, "rollout.full_sync_every=5"], "full_sync_every is 5, but .*weight_encoding is full"),
        ([*APART, "rollout.full_sync_every=20"], "full_sync_every is 20, but .*is full"),
        ([*APART, "profile.steps=[3]"], "profile.engine is on"),
        ([*APART, "async.at_bound=drop"], "async.at_bound is set, but it only applies to engines"),
        ([*APART, "async.max_staleness=1", "async.deterministic=true"], "algorithm.importance is none"),
        (
            [*APART, "async.max_staleness=1", "async.deterministic=true", "algorithm.importance=tis",
             "rollout.over_sampling=2"],
            "rollout.over_sampling is 2",
        ),
        (
            [*APART, "async.max_staleness=2", "async.deterministic=true", "algorithm.importance=tis",
             "algorithm.dynamic_sampling=true"],
            r"algorithm.dynamic_sampling is on, .*\(async.max_staleness 2\)",
        ),
    ],
)  # fmt: skip
def test_what_does_not_work_is_refused_with_the_reason(more: list[str], message: str) -> None:
    with pytest.raises(InputError, match=message):
        check_asynchronous(recipe(*more))


def test_what_works_is_accepted() -> None:
    check_asynchronous(recipe())
    check_asynchronous(recipe(*APART))
    check_asynchronous(recipe(*APART, "algorithm.dynamic_sampling=true"))
    check_asynchronous(recipe(*APART, "rollout.weight_encoding=delta", "rollout.full_sync_every=5"))
    ahead = ["async.max_staleness=2", "async.deterministic=true"]
    check_asynchronous(recipe(*APART, *ahead, "algorithm.importance=tis"))
    check_asynchronous(recipe(*APART, *ahead, "algorithm.name=decoupled_ppo"))


def test_other_commands_run_the_recipe_colocated() -> None:
    deltas = ["rollout.weight_encoding=delta", "rollout.full_sync_every=5"]
    given = recipe(*APART, "async.max_staleness=1", "async.deterministic=true", *deltas)
    check_asynchronous(as_colocated(given))
    assert roles_of(as_colocated(given), 3).num_trainers == 3

"""Token advantages, KL in the reward: the same bits however a step is split, and right by hand."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from mrl.algorithms import grpo, gspo_token, ppo, reinforce_pp
from mrl.config import AlgorithmConfig, ParallelConfig
from mrl.errors import InputError
from mrl.learn.advantages import compare_rewards, compute_advantages, credits_tokens
from mrl.learn.batching import make_train_batches
from mrl.learn.kl_control import KlControl, Penalties
from mrl.types import MicroBatch, Sample
from parallel.dims import ParallelDims
from parallel.mesh import Mesh, init_mesh
from tests.ranks import run_ranks
from tests.sample_groups import sample

LENGTHS = (3, 9, 5, 1, 12, 4, 7, 2)
REWARDS = (1.0, 0.0, 0.5, 0.25, 1.0, 0.0, 0.0, 0.75)
NUM_SAMPLES = len(LENGTHS)
COUNTS = torch.tensor(LENGTHS)
IN_REWARD = AlgorithmConfig(
    name="ppo", kl_coef=0.1, kl_in="reward", kl_estimator="k3", kl_target=0.02, kl_horizon=100
)


TURNS = IN_REWARD.model_copy(
    update={"turn_rewards": True, "bootstrap_truncated": True, "gamma": 0.9}
)


def samples() -> list[Sample]:
    """Every other one cut off, and with a reward at its end and in its middle."""
    return [
        dataclasses.replace(
            sample(length, "length" if i % 2 else "stop"),
            turn_rewards=((2 + (length + 1) // 2, 0.5 * i), (2 + length, REWARDS[i])),
        )
        for i, length in enumerate(LENGTHS)
    ]


def at_tokens(batch: MicroBatch, salt: float) -> Tensor:
    """f32[N]: something that depends on nothing but the sample and the place in it."""
    assert batch.sample_ids is not None
    lengths = batch.cu_seqlens.diff().long()
    owner = batch.sample_ids.repeat_interleave(lengths)
    return torch.sin(salt * (owner * 31 + batch.position_ids).float()) * batch.loss_mask


def filled(batch: MicroBatch) -> MicroBatch:
    old = at_tokens(batch, 0.7) - 2.0
    ref = old + 0.3 * at_tokens(batch, 1.9)
    return dataclasses.replace(batch, old_logprobs=old, ref_logprobs=ref)


def by_sample(batches: list[MicroBatch], tensors: list[Tensor]) -> dict[int, Tensor]:
    found = {}
    for batch, tensor in zip(batches, tensors, strict=True):
        assert batch.sample_ids is not None
        for i, part in zip(batch.sample_ids.tolist(), split(batch, tensor), strict=True):
            if i >= 0:
                found[i] = part
    return found


def split(batch: MicroBatch, tensor: Tensor) -> list[Tensor]:
    return [p.clone() for p in tensor.split(batch.cu_seqlens.diff().tolist())]


def credited(
    world: int, sizes: dict[str, int], budget: int, config: AlgorithmConfig = IN_REWARD
) -> dict[str, Any]:
    mesh: Mesh = init_mesh(ParallelDims.create(ParallelConfig(**sizes), world), 0)
    (made,) = make_train_batches(
        [(samples(), REWARDS)], ppo, mesh, budget, config=config, max_response_len=12
    )
    batches = [filled(batch) for batch in made.micro_batches]
    control = KlControl(IN_REWARD)
    penalties = control.penalties(batches, NUM_SAMPLES, mesh)
    values, after = ([at_tokens(batch, salt) for batch in batches] for salt in (1.1, 2.3))
    groups_of = [torch.tensor(REWARDS[:4]), torch.tensor(REWARDS[4:])]
    done = compute_advantages(
        batches, groups_of, COUNTS, ppo, config, mesh,
        penalties=penalties, values=values, values_after=after,
    )  # fmt: skip
    penalised = compute_advantages(
        batches, groups_of, COUNTS, grpo, IN_REWARD, mesh, penalties=penalties
    ).batches
    token = [b.token_advantages for b in done.batches]
    returns = [b.returns for b in done.batches]
    assert all(t is not None for t in (*token, *returns))
    ids = [i for b in penalised for i in b.sample_ids.tolist()]  # pyright: ignore
    own = [a for b in penalised for a in b.advantages.tolist()]  # pyright: ignore
    return {
        "token": by_sample(batches, token),  # pyright: ignore
        "returns": by_sample(batches, returns),  # pyright: ignore
        "mask": by_sample(batches, [b.loss_mask for b in batches]),
        "sums": penalties.samples,
        "kl": penalties.mean,
        "metrics": done.metrics,
        "samples": done.samples,
        "sequence": {i: a for i, a in zip(ids, own, strict=True) if i >= 0},
        **control.end_step(penalties.mean, NUM_SAMPLES),
        "next": control.state_dict()["kl_coef"],
    }


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run_ranks(1, credited, 1, {}, 1000, folder=tmp_path_factory.mktemp("credit"))[0]


@pytest.mark.parametrize("sizes", [{}, {"tensor_model_parallel_size": 2}], ids=["DP2", "TP2"])
def test_any_split_over_ranks_and_micro_batches_gives_the_same_bits(
    sizes: dict[str, int], whole: dict[str, Any], tmp_path: Path
) -> None:
    """TP2: both ranks have every token, and each is to count once."""
    outs = run_ranks(2, credited, 2, sizes, 12, folder=tmp_path)
    for key in ("token", "returns"):
        found = outs[0][key] | outs[1][key]
        assert found.keys() == whole[key].keys() == set(range(NUM_SAMPLES))
        assert all(torch.equal(found[i], whole[key][i]) for i in found), key
    for out in outs:
        assert torch.equal(out["sums"], whole["sums"])
        assert torch.equal(out["samples"], whole["samples"])
        assert out["metrics"] == whole["metrics"]
        assert out["next"] == whole["next"]
    assert outs[0]["sequence"] | outs[1]["sequence"] == whole["sequence"]


def test_turn_rewards_and_bootstraps_are_the_same_bits_in_any_split(
    whole: dict[str, Any], tmp_path: Path
) -> None:
    plain = whole["returns"]
    whole = run_ranks(1, credited, 1, {}, 1000, TURNS, folder=tmp_path / "1")[0]
    outs = run_ranks(2, credited, 2, {}, 12, TURNS, folder=tmp_path / "2")
    for key in ("token", "returns"):
        found = outs[0][key] | outs[1][key]
        assert all(torch.equal(found[i], whole[key][i]) for i in range(NUM_SAMPLES)), key
    assert not any(torch.equal(plain[i], whole["returns"][i]) for i in range(NUM_SAMPLES))


def credited_on_stages() -> Tensor:
    """Only the last of two pipeline stages has values of the critic."""
    sizes = {"pipeline_model_parallel_size": 2}
    mesh: Mesh = init_mesh(ParallelDims.create(ParallelConfig(**sizes), 2), 0)
    (made,) = make_train_batches(
        [(samples(), REWARDS)], ppo, mesh, 12, config=TURNS, max_response_len=12
    )
    batches = [filled(batch) for batch in made.micro_batches]
    own = batches if mesh.rank == 1 else []
    return compute_advantages(
        batches, [torch.tensor(REWARDS[:4]), torch.tensor(REWARDS[4:])], COUNTS, ppo, TURNS, mesh,
        values=[at_tokens(batch, 1.1) for batch in own],
        values_after=[at_tokens(batch, 2.3) for batch in own],
    ).samples  # fmt: skip


def test_bootstraps_need_values_on_the_last_stage_alone(tmp_path: Path) -> None:
    first, last = run_ranks(2, credited_on_stages, folder=tmp_path)
    assert torch.equal(first, last)
    assert last.abs().max() > 0


def test_token_advantages_are_white_over_the_step(whole: dict[str, Any]) -> None:
    tokens = torch.cat([whole["token"][i][whole["mask"][i]] for i in range(NUM_SAMPLES)]).double()
    assert len(tokens) == sum(LENGTHS)
    assert float(tokens.mean()) == pytest.approx(0.0, abs=1e-6)
    assert float(tokens.std(correction=0)) == pytest.approx(1.0, abs=1e-6)
    assert -5 < whole["metrics"]["value/explained_variance"] < 1


def test_the_advantage_of_a_sample_is_the_mean_over_its_loss_tokens(whole: dict[str, Any]) -> None:
    for i in range(NUM_SAMPLES):
        mean = whole["token"][i][whole["mask"][i]].double().mean()
        assert float(whole["samples"][i]) == pytest.approx(float(mean), abs=1e-6)


def test_penalties_come_off_each_sample_before_its_group_is_compared(
    whole: dict[str, Any],
) -> None:
    rewards = [r - float(p) for r, p in zip(REWARDS, whole["sums"], strict=True)]
    parts = [torch.tensor(rewards[:4]), torch.tensor(rewards[4:])]
    wanted = torch.cat(grpo.advantages(parts, IN_REWARD)).tolist()
    assert [whole["sequence"][i] for i in range(NUM_SAMPLES)] == pytest.approx(wanted, rel=1e-5)
    assert all(p > 0 for p in whole["sums"].tolist())  # k3 is never negative
    assert whole["kl"] == pytest.approx(float(whole["sums"].sum()) / 0.1 / sum(LENGTHS), rel=1e-6)


def test_a_sample_outside_the_loss_pays_what_its_group_pays() -> None:
    """Else answers that were cut off would be the best of a group that has nothing else to tell."""
    sums = torch.tensor([0.3, 0.0, 0.1, 0.2, 0.0, 0.0], dtype=torch.float64)
    has_tokens = torch.tensor([True, False, True, True, False, False])
    seen: list[Tensor] = []

    def advantages(rewards: list[Tensor], config: AlgorithmConfig) -> list[Tensor]:
        seen.extend(rewards)
        return rewards

    algorithm: Any = SimpleNamespace(advantages=advantages)
    groups_of = [torch.ones(4), torch.ones(2)]
    penalties = Penalties([], sums, has_tokens, 0.0)
    mesh: Any = None  # nothing here is a collective
    tokens = has_tokens.long()
    compute_advantages([], groups_of, tokens, algorithm, IN_REWARD, mesh, penalties=penalties)
    assert seen[0].tolist() == pytest.approx([0.7, 0.8, 0.9, 0.8])
    assert seen[1].tolist() == [1.0, 1.0]  # nobody of it is in the loss


def test_the_coefficient_follows_the_target_and_is_kept(whole: dict[str, Any]) -> None:
    assert whole["kl/coef"] == 0.1
    direction = min(max(whole["kl"] / 0.02 - 1, -0.2), 0.2)
    assert whole["next"] == pytest.approx(0.1 * (1 + direction * NUM_SAMPLES / 100))
    control = KlControl(IN_REWARD)
    control.load_state_dict({"kl_coef": 0.3})
    assert control.config.kl_coef == 0.3
    control.end_step(math.nan, NUM_SAMPLES)  # a step without a loss token says nothing
    assert control.coef == 0.3


def noise_alone(config: AlgorithmConfig) -> list[float]:
    """Rewards are all 0: the largest advantage that the penalties alone make, by algorithm."""
    mesh: Mesh = init_mesh(ParallelDims.create(ParallelConfig(), 1), 0)
    largest = []
    for algorithm in (reinforce_pp, ppo):
        (made,) = make_train_batches(
            [(samples(), [0.0] * NUM_SAMPLES)], algorithm, mesh, 1000, config=config
        )
        batches = [filled(batch) for batch in made.micro_batches]
        penalties = KlControl(config).penalties(batches, NUM_SAMPLES, mesh)
        rewards = [torch.zeros(NUM_SAMPLES)]
        done = compute_advantages(
            batches, rewards, COUNTS, algorithm, config, mesh, penalties=penalties
        )
        (batch,) = done.batches
        assert batch.token_advantages is not None
        largest.append(float(batch.token_advantages[batch.loss_mask].abs().max()))
    return largest


def test_penalties_below_the_floor_of_the_std_are_not_blown_up(tmp_path: Path) -> None:
    tiny = AlgorithmConfig(kl_coef=1e-6, kl_in="reward", kl_estimator="k3")
    floored, whitened = run_ranks(1, noise_alone, tiny, folder=tmp_path)[0]
    assert 0 < floored < 1e-2
    assert whitened > 1  # where the recipe has no floor


def test_who_credits_tokens() -> None:
    plain, turns = AlgorithmConfig(), AlgorithmConfig(turn_rewards=True)
    assert credits_tokens(ppo, plain, kl_in_reward=False)
    assert credits_tokens(reinforce_pp, plain, kl_in_reward=True)
    assert not credits_tokens(reinforce_pp, plain, kl_in_reward=False)
    assert not credits_tokens(grpo, plain, kl_in_reward=True)
    assert not credits_tokens(gspo_token, plain, kl_in_reward=True)
    assert credits_tokens(gspo_token, turns, kl_in_reward=False)


@pytest.mark.parametrize(
    ("returned", "said"),
    [
        (
            torch.zeros(2, 4),
            r"returned a tensor \[2, 4\]; return a list with one tensor for each of ",
        ),
        ([torch.zeros(4)], r"returned a list of 1 whose first element is a tensor \[4\]; return"),
        (
            [0.0, 1.0],
            r"a list of 2 whose first element is float; .* the 2 groups, .* rewards, \[4\]",
        ),
        (None, "returned NoneType; return a list"),
    ],
)
def test_advantages_of_another_shape_are_refused(returned: Any, said: str) -> None:
    mine: Any = SimpleNamespace(advantages=lambda rewards, config: returned)
    config = AlgorithmConfig(name="my/mine.py")
    with pytest.raises(InputError, match=rf"algorithm.name 'my/mine.py': advantages\(\) .*{said}"):
        compare_rewards([torch.zeros(4), torch.zeros(4)], torch.ones(8), mine, config)

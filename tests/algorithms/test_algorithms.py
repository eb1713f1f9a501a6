"""Contract of every module in mrl/algorithms, and what each one computes."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest
import torch
from torch import Tensor

from mrl.algorithms import list_algorithms, load_algorithm
from mrl.config import AlgorithmConfig
from mrl.errors import InputError
from mrl.types import LossOutput, MicroBatch

CONFIG = AlgorithmConfig()
POLICY_GRADIENT = ("gspo", "grpo")
LENGTHS = [5, 1, 9, 4, 12, 2]


def make_sequences(seed: int = 0) -> list[dict[str, Tensor]]:
    """Sequences of LENGTHS; the fourth has no loss token."""
    rng = torch.Generator().manual_seed(seed)
    sequences = []
    for i, length in enumerate(LENGTHS):
        logprobs = -torch.rand(length, generator=rng)
        sequences.append(
            {
                "logprobs": logprobs,
                "old": logprobs + 1e-4 * torch.randn(length, generator=rng),
                "mask": torch.arange(length) >= (length if i == 3 else length // 3),
                "advantage": torch.randn(1, generator=rng),
            }
        )
    return sequences


def pack(sequences: list[dict[str, Tensor]], weights: Tensor) -> tuple[Tensor, MicroBatch]:
    sizes = torch.tensor([s["logprobs"].numel() for s in sequences])
    logprobs = torch.cat([s["logprobs"] for s in sequences]).requires_grad_()
    ids = torch.zeros(int(sizes.sum()), dtype=torch.long)
    batch = MicroBatch(
        input_ids=ids,
        position_ids=ids,
        cu_seqlens=torch.cat([sizes.new_zeros(1), sizes.cumsum(0)]).int(),
        loss_mask=torch.cat([s["mask"] for s in sequences]),
        rollout_logprobs=torch.zeros(ids.numel()),
        advantages=torch.cat([s["advantage"] for s in sequences]),
        seq_weight=weights,
        old_logprobs=torch.cat([s["old"] for s in sequences]),
    )
    return logprobs, batch


def global_weights(name: str, sequences: list[dict[str, Tensor]]) -> Tensor:
    counts = torch.tensor([int(s["mask"].sum()) for s in sequences])
    algorithm = load_algorithm(name)
    samples = int((counts > 0).sum())
    return algorithm.sequence_weights(counts, int(counts.sum()), samples, CONFIG, 10)


@pytest.mark.parametrize("name", list_algorithms())
def test_contract(name) -> None:
    algorithm = load_algorithm(name)
    sequences = make_sequences()
    weights = global_weights(name, sequences)
    assert weights.dtype == torch.float32
    assert weights.shape == (len(LENGTHS),)
    assert weights[3] == 0
    assert bool((weights[[0, 1, 2, 4, 5]] > 0).all())
    nothing = algorithm.sequence_weights(torch.zeros(2, dtype=torch.long), 0, 0)
    assert torch.equal(nothing, torch.zeros(2))

    logprobs, batch = pack(sequences, weights)
    output = algorithm.loss(logprobs, batch, CONFIG)
    assert isinstance(output, LossOutput)
    assert output.loss_sum.shape == ()
    output.loss_sum.backward()
    assert logprobs.grad is not None
    assert bool((logprobs.grad[~batch.loss_mask] == 0).all())
    assert all(not t.requires_grad for stat in output.stats.values() for t in vars(stat).values())


@pytest.mark.parametrize("name", list_algorithms())
@pytest.mark.parametrize("split", [[[0], [1], [2], [3], [4], [5]], [[4, 0, 3], [5, 2, 1]]])
def test_any_split_into_micro_batches_is_the_same_step(name, split) -> None:
    algorithm, sequences = load_algorithm(name), make_sequences(1)
    weights = global_weights(name, sequences)
    logprobs, batch = pack(sequences, weights)
    whole = algorithm.loss(logprobs, batch, CONFIG).loss_sum
    whole.backward()
    assert logprobs.grad is not None
    grads = logprobs.grad.split(LENGTHS)
    total = torch.zeros((), dtype=torch.float64)
    for ids in split:
        part, part_batch = pack([sequences[i] for i in ids], weights[ids])
        loss = algorithm.loss(part, part_batch, CONFIG).loss_sum
        loss.backward()
        total += loss.detach()
        assert torch.equal(part.grad, torch.cat([grads[i] for i in ids]))
    torch.testing.assert_close(total, whole.detach(), rtol=1e-12, atol=1e-15)


def test_weights_are_the_published_means() -> None:
    counts, total, samples = torch.tensor([2, 0, 8]), 10, 2
    expected = {"gspo": [0.5, 0.0, 0.5], "grpo": [0.25, 0.0, 0.0625], "nll": [0.1, 0.0, 0.1]}
    for name, weights in expected.items():
        got = load_algorithm(name).sequence_weights(counts, total, samples, CONFIG, 16)
        assert torch.equal(got, torch.tensor(weights))


@pytest.mark.parametrize("name", POLICY_GRADIENT)
def test_advantages(name) -> None:
    algorithm = load_algorithm(name)
    got = algorithm.advantages(torch.tensor([1.0, 0.0, torch.nan, 0.0]), CONFIG)
    std = (1 / 3) ** 0.5  # sample std of 1, 0, 0
    expected = torch.tensor([2 / 3, -1 / 3, 0.0, -1 / 3]) / (std + CONFIG.advantage_eps)
    torch.testing.assert_close(got, expected)
    for same in ([0.1] * 7, [torch.nan] * 3, [torch.nan, 5.0], [2.0]):
        assert torch.equal(algorithm.advantages(torch.tensor(same), CONFIG), torch.zeros(len(same)))
    nearly = algorithm.advantages(torch.tensor([1.0, 1.0 + 1e-6]), CONFIG)
    assert float(nearly.abs().max()) < 0.02
    with pytest.raises(ValueError, match=r"rewards: got .*inf"):
        algorithm.advantages(torch.tensor([1.0, torch.inf]), CONFIG)


@pytest.mark.parametrize(("name", "low", "high"), [("gspo", 3e-4, 4e-4), ("grpo", 0.2, 0.2)])
@pytest.mark.parametrize("configured", [False, True])
def test_clip_range_and_statistics(name, low, high, configured) -> None:
    config = AlgorithmConfig(clip_low=0.5, clip_high=0.7) if configured else CONFIG
    low, high = (0.5, 0.7) if configured else (low, high)
    for edge, advantage in ((1 + high, 1.0), (1 - low, -1.0)):
        for inside in (True, False):
            ratio = 1 + (edge - 1) * (0.9 if inside else 1.1)
            (sequence, *_) = make_sequences()
            sequence["old"] = sequence["logprobs"] - torch.tensor(ratio).log()
            sequence["advantage"] = torch.tensor([advantage])
            logprobs, batch = pack([sequence], torch.ones(1))
            stats = load_algorithm(name).loss(logprobs, batch, config).stats
            assert set(stats) == {"ratio/mean", "ratio/max", "ratio/clip_frac"}
            clipped, mean = stats["ratio/clip_frac"], stats["ratio/mean"]
            assert float(clipped.total / clipped.count) == (0.0 if inside else 1.0)
            torch.testing.assert_close(float(mean.total / mean.count), ratio, rtol=1e-6, atol=0)
            torch.testing.assert_close(float(stats["ratio/max"].value), ratio, rtol=1e-6, atol=0)


@pytest.mark.parametrize("name", POLICY_GRADIENT)
def test_kl_to_the_reference_is_the_mean_over_loss_tokens(name) -> None:
    sequences = make_sequences()
    logprobs, batch = pack(sequences, torch.ones(len(LENGTHS)))
    reference = logprobs.detach() - 0.5
    batch = MicroBatch(**{**vars(batch), "ref_logprobs": reference})
    config = AlgorithmConfig(kl_coef=0.1, kl_estimator="k1")
    kl = load_algorithm(name).loss(logprobs, batch, config).stats["kl/ref"]
    assert int(kl.count) == sum(int(s["mask"].sum()) for s in sequences)
    assert float(kl.total / kl.count) == pytest.approx(0.5, rel=1e-5)


@pytest.mark.parametrize("name", POLICY_GRADIENT)
def test_old_logprobs_are_required(name) -> None:
    logprobs, batch = pack(make_sequences(), torch.ones(len(LENGTHS)))
    bare = MicroBatch(**{**vars(batch), "old_logprobs": None})
    with pytest.raises(ValueError, match="old_logprobs: got None"):
        load_algorithm(name).loss(logprobs, bare, CONFIG)


def test_nll_is_the_token_mean_and_has_no_advantages() -> None:
    sequences = make_sequences()
    logprobs, batch = pack(sequences, global_weights("nll", sequences))
    masked = logprobs.detach().clone().masked_fill_(~batch.loss_mask, torch.nan).requires_grad_()
    loss = load_algorithm("nll").loss(masked, batch, CONFIG).loss_sum
    loss.backward()
    expected = -logprobs.detach()[batch.loss_mask].double().mean()
    torch.testing.assert_close(loss.detach(), expected, rtol=1e-6, atol=0)
    assert masked.grad is not None
    assert bool((masked.grad[~batch.loss_mask] == 0).all())
    with pytest.raises(InputError, match=r"'nll'.*expected an RL algorithm"):
        load_algorithm("nll").advantages(torch.ones(2), CONFIG)


@pytest.mark.parametrize("name", ["gsp", "base", "__init__", "no.such_module", ".gspo", "a..b", ""])
def test_unknown_name_lists_what_there_is(name) -> None:
    with pytest.raises(InputError, match="expected one of grpo, gspo, nll"):
        load_algorithm(name)


def test_near_name_is_suggested() -> None:
    with pytest.raises(InputError, match="did you mean 'gspo'"):
        load_algorithm("gsppo")


def test_outside_module_is_loaded_and_checked(monkeypatch) -> None:
    module = ModuleType("outside.mine")
    monkeypatch.setitem(sys.modules, "outside", ModuleType("outside"))
    monkeypatch.setitem(sys.modules, "outside.mine", module)
    module.loss = module.advantages = lambda *_: None
    with pytest.raises(InputError, match=r"outside\.mine lacks sequence_weights"):
        load_algorithm("outside.mine")
    module.sequence_weights = lambda *_: None
    assert load_algorithm("outside.mine") is module

"""Losses, router rows and metrics of samples whose loss has holes: the tokens between turns."""

import dataclasses

import pytest
import torch

from moe.align import router_rows
from mrl.algorithms import load_algorithm
from mrl.config import AlgorithmConfig
from mrl.data.completions import completions
from mrl.learn.rollout_metrics import episode_metrics, rollout_metrics
from mrl.toy_model import build_tokenizer
from mrl.types import MicroBatch, Prompt, Sample, SampleGroup, VersionSpan

MASK = torch.tensor([0, 0, 1, 1, 0, 0, 0, 1, 0, 1, 1, 0, 0], dtype=torch.bool)


def batch_of(logprobs, old, mask, *, lengths, weight):
    none = torch.zeros(len(mask), dtype=torch.long)
    return MicroBatch(
        input_ids=none,
        position_ids=none,
        cu_seqlens=torch.tensor([0, *lengths]).cumsum(0).int(),
        loss_mask=mask,
        rollout_logprobs=torch.zeros(len(mask)),
        rewards=torch.ones(len(lengths)),
        advantages=torch.full((len(lengths),), 0.7),
        seq_weight=torch.full((len(lengths),), weight),
        old_logprobs=old,
    )


@pytest.mark.parametrize("name", ["gspo", "grpo"])
def test_the_loss_is_that_of_the_tokens_of_the_policy_alone(name):
    """GSPO's ratio is a mean over them; what lies between weighs nothing, however unlikely it is."""
    rng = torch.Generator().manual_seed(0)
    old = -torch.rand(len(MASK), generator=rng)
    now = old + 1e-3 * torch.randn(len(MASK), generator=rng)
    now[~MASK], old[~MASK] = -50.0, -1.0
    algorithm = load_algorithm(name)
    losses, gradients = [], []
    for keep in (torch.ones_like(MASK), MASK):
        logprobs = now[keep].clone().requires_grad_()
        mask = MASK[keep]
        total = int(mask.sum())
        weights = algorithm.sequence_weights(mask.sum()[None], total, 1, AlgorithmConfig(), 99)
        (weight,) = weights.tolist()
        batch = batch_of(logprobs, old[keep], mask, lengths=[int(keep.sum())], weight=weight)
        loss = algorithm.loss(logprobs, batch, AlgorithmConfig()).loss_sum
        loss.backward()
        losses.append(loss.detach())
        gradients.append(logprobs.grad)
    assert torch.allclose(losses[0], losses[1], rtol=1e-6, atol=0)
    assert torch.allclose(gradients[0][MASK], gradients[1], rtol=1e-6, atol=0)
    assert not gradients[0][~MASK].any()
    assert gradients[1].all()


def test_routes_between_turns_are_replayed_and_counted():
    """A later token of the policy depends on them."""
    none = torch.zeros(len(MASK))
    rows = router_rows(batch_of(none, none, MASK, lengths=[13], weight=1.0), slice(None))
    assert rows.counted.tolist() == [True] * 11 + [False] * 2
    assert rows.leading.tolist() == [True] * 10 + [False] * 3


def sample(ids, spans, prompt_len=2):
    mask = torch.zeros(len(ids), dtype=torch.bool)
    for span in spans:
        mask[span.start : span.end] = True
    return Sample(0, ids, prompt_len, mask, mask.float(), tuple(spans), "stop")


def test_metrics_and_text_of_a_conversation():
    tokenizer = build_tokenizer()
    ids = torch.tensor(tokenizer.encode("abcd<|im_end|>\nno\nef<|im_end|>"))
    talk = sample(ids, [VersionSpan(0, 2, 4), VersionSpan(1, 4, 5), VersionSpan(1, 9, 12)])
    single = sample(ids[:5], [VersionSpan(0, 2, 5)])
    empty = sample(ids[:2], [VersionSpan(0, 2, 2)])
    prompt = Prompt("0", ids[:2], "ab", {}, "f:1")
    group = SampleGroup(prompt, [talk, single, empty], torch.tensor([1.0, 0.0, torch.nan]))
    assert episode_metrics([group]) == {
        "episode/num_turns": (2 + 1 + 0) / 3,
        "episode/tool_tokens": 4 / 3,
    }
    assert rollout_metrics([group])["response_len/mean"] == (6 + 3 + 0) / 3
    # A sample that has left the loss is counted the same.
    masked = dataclasses.replace(talk, loss_mask=torch.zeros_like(talk.loss_mask))
    assert episode_metrics([SampleGroup(prompt, [masked])])["episode/num_turns"] == 2
    ((text, alone, nothing),) = completions([group], tokenizer)
    assert text == "cd<|im_end|>\nno\nef<|im_end|>"
    assert (alone, nothing) == ("cd", "")

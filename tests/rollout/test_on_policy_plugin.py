"""The plug-in of `rollout.batch_invariant`: the log-probs of a request do not depend on the others'."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from mrl.engines.sglang.plugins.on_policy.mrl_on_policy import temperatures


@pytest.mark.parametrize("is_all_greedy", [True, False])
def test_the_likeliest_token_has_its_log_prob_at_its_own_temperature(is_all_greedy: bool) -> None:
    """`top_k` 1 makes a request greedy, and a batch of such ones all greedy; 0 is 1 here."""
    info = SimpleNamespace(
        is_all_greedy=is_all_greedy, temperatures=torch.tensor([[0.7], [1.0], [1.3]])
    )
    assert temperatures(info) == [0.7, 1.0, 1.3]

"""Take supervised optimizer steps (SFT) before the first rollout.

The SFT steps train the same policy as the RL steps, and samples are packed in the same way. Only
the optimizer is a separate one.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import partial

import torch

from moe.routes import Replay
from mrl.algorithms import nll
from mrl.config import Recipe, SftConfig
from mrl.data.reader import SftExample
from mrl.learn.batching import make_train_batch
from mrl.learn.guards import UpdateGuard
from mrl.learn.skipped_steps import NonFiniteSteps
from mrl.run import console
from mrl.system.heartbeat import phase
from mrl.types import LossOutput, MicroBatch, Sample
from parallel.mesh import Mesh
from parallel.policy import Policy


@phase("train:sft")
def run_sft(
    examples: Sequence[SftExample], config: SftConfig, recipe: Recipe, policy: Policy, mesh: Mesh
) -> None:
    """Take `config.num_steps` steps of next-token loss on the completions. A collective.

    Afterwards the policy has a new optimizer, with the settings of `recipe.optimizer`. Raises
    NotFinite if too many consecutive steps were not finite (`guards.max_nonfinite_steps`).
    """
    samples = [_sample(example) for example in examples]
    # The name in the seed is historical; another name would give other batches.
    order = random.Random(f"warm start/{recipe.seed}")
    policy.make_optimizer(recipe.optimizer.with_defaults(config.lr))

    def loss(logprobs: torch.Tensor, batch: MicroBatch) -> LossOutput:
        return nll.loss(logprobs, batch, recipe.algorithm)

    warn = console.warn_on(mesh.rank == 0)
    steps = NonFiniteSteps("SFT", recipe.guards.max_nonfinite_steps, warn)
    for step in range(config.num_steps):
        chosen = order.sample(range(len(samples)), config.batch_size)
        batch = make_train_batch(
            [samples[i] for i in chosen],
            [0.0] * len(chosen),
            nll,
            mesh,
            recipe.train.micro_batch_tokens,
        )
        rows = [examples[i].source for i in chosen]
        guard = UpdateGuard(step, same_weights=False, clip=None, rows=rows)
        steps.take(
            step,
            partial(policy.train_step, batch, guard.watch(loss), Replay.off, guard.check),
        )
    policy.make_optimizer(recipe.optimizer)


def _sample(example: SftExample) -> Sample:
    """Return the example as a sample with all tokens of its completion in the loss."""
    num_tokens = len(example.token_ids)
    return Sample(
        group_id=0,
        token_ids=example.token_ids,
        prompt_len=example.prompt_len,
        loss_mask=torch.arange(num_tokens) >= example.prompt_len,
        rollout_logprobs=torch.zeros(num_tokens),
        weight_versions=(),
        finish_reason="stop",
    )

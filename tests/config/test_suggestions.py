"""Unknown keys are answered with the key that was meant, also in the words of other frameworks."""

from __future__ import annotations

from pathlib import Path

import pytest

from mrl.config import load_recipe
from mrl.config.foreign import FOREIGN
from mrl.config.suggest import all_keys
from mrl.errors import InputError

TOY = Path(__file__).parents[2] / "launch/recipes/toy_moe.yaml"


def test_the_table_leads_to_keys_and_hides_none():
    own = set(all_keys())
    assert {key for key, _ in FOREIGN.values()} <= own
    assert not own & set(FOREIGN)


@pytest.mark.parametrize(
    ("override", "answer"),
    [
        ("learning_rate=1", "unknown key 'learning_rate'; did you mean 'optimizer.lr'?"),
        ("optimizer.learning_rte=1", "'optimizer.learning_rte'; did you mean 'optimizer.lr'?"),
        ("rollout.n=8", "'rollout.n'; did you mean 'rollout.samples_per_prompt'?"),
        ("actor_rollout_ref.rollout.n=8", "rollout.n is 'rollout.samples_per_prompt'"),
        ("lr_scheduler=cosine", "did you mean 'optimizer.lr_decay_style'?"),
        ("lr_scheduler.type=cosine", "did you mean 'optimizer.lr_decay_style'?"),
        ("num_generations=8", "did you mean 'rollout.samples_per_prompt'?"),
        ("train.per_device_train_batch_size=8", "did you mean 'train.micro_batch_tokens' (micro"),
        ("max_completion_length=8", "did you mean 'rollout.max_response_len'?"),
        ("algorithm.kl_loss_coef=0.1", "did you mean 'algorithm.kl_coef'?"),
        ("algorithm.beta=0.1", "did you mean 'algorithm.kl_coef'?"),
        ("epsilon=0.2", "did you mean 'algorithm.clip_low' (and algorithm.clip_high)?"),
        ("eps-clip=0.2", "did you mean 'algorithm.clip_low'"),
        ("n_samples_per_prompt=8", "did you mean 'rollout.samples_per_prompt'?"),
        ("rollout.rollout_batch_size=8", "did you mean 'rollout.prompts_per_step' (prompts"),
        ("global_batch_size=8", "did you mean 'train.num_steps_per_rollout' (optimizer steps"),
        (
            "actor_rollout_ref={actor: {optim: {lr: 1}, clip_ratio_high: 1}}",
            "unknown key 'actor_rollout_ref'; here actor_rollout_ref.actor.optim.lr is "
            "'optimizer.lr', actor_rollout_ref.actor.clip_ratio_high is 'algorithm.clip_high'",
        ),
    ],
)
def test_names_of_other_frameworks(override, answer):
    with pytest.raises(InputError) as caught:
        load_recipe(TOY, [override])
    assert answer in str(caught.value)

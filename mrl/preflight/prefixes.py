"""Describe how much computation `train.share_prefixes` can save for a recipe.

With this setting, the samples of a prompt share the rows of the prompt: the model computes these
rows only once.
"""

from __future__ import annotations

from collections.abc import Sequence

from mrl.config import Recipe
from mrl.shared_prefixes import MIN_GAIN, expected_gain
from mrl.types import Prompt
from parallel.implementation import choose_implementation


def describe_prefixes(recipe: Recipe, prompts: Sequence[Prompt], elsewhere: bool) -> str:
    """Return a phrase that says where prefixes are shared, and how many times fewer rows are then
    computed. All answers are assumed to have the greatest length that the recipe allows.

    prompts: the prompts of the run; only their mean length is used. elsewhere: whether the run is
    for GPUs that this machine does not have.
    """
    asked = "local" if recipe.lora is not None else recipe.model.transformer_impl
    if not elsewhere and choose_implementation(asked)[0] == "transformer_engine":
        return "nowhere: TransformerEngine's attention takes whole sequences"
    mean = sum(len(prompt.token_ids) for prompt in prompts) / max(len(prompts), 1)
    answer, num_samples = recipe.rollout.max_response_len, recipe.rollout.samples_per_prompt
    together = 1 + max(0, int((recipe.train.micro_batch_tokens - mean - answer) // answer))
    gain = expected_gain(mean, answer, min(num_samples, together))
    only = ", only with mrl's own layers" if elsewhere and asked != "local" else ""
    return (
        f"where a step computes at least {MIN_GAIN:g}x fewer rows{only}; {gain:.2f}x fewer with "
        f"{num_samples} answers of {answer} tokens to prompts of {mean:.0f} on average, of which "
        f"{min(num_samples, together)} fit into train.micro_batch_tokens"
    )

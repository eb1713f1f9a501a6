"""Describe how much computation `train.share_prefixes` can save for a recipe.

With this setting, the samples of a prompt share the rows of the prompt: the model computes these
rows only once.
"""

from __future__ import annotations

from collections.abc import Sequence

from mrl.config import Recipe
from mrl.planner.prefixes import prefix_gain, samples_together
from mrl.planner.shape import ModelShape
from mrl.planner.workload import Workload
from mrl.shared_prefixes import MIN_GAIN
from mrl.types import Prompt
from parallel.implementation import choose_implementation


def describe_prefixes(
    recipe: Recipe, prompts: Sequence[Prompt], shape: ModelShape, *, elsewhere: bool
) -> str:
    """Return a phrase that says where prefixes are shared, and how many times fewer rows and FLOPs are
    then computed. All answers are assumed to have the greatest length that the recipe allows.

    prompts: the prompts of the run; only their mean length is used. shape: the shape of the model.
    elsewhere: whether the run is for GPUs that this machine does not have.
    """
    if shape.linear is not None:
        return "nowhere: the state of linear attention passes through all tokens of a sequence"
    if shape.num_mtp:
        return "nowhere: MTP layers read the next token, which differs after a shared prefix"
    asked = "local" if recipe.lora is not None else recipe.model.transformer_impl
    if not elsewhere and choose_implementation(asked)[0] == "transformer_engine":
        return "nowhere: TransformerEngine's attention takes whole sequences"
    mean = sum(len(prompt.token_ids) for prompt in prompts) / max(len(prompts), 1)
    rollout = recipe.rollout
    work = Workload(
        prompts=rollout.prompts_per_step,
        samples=rollout.samples_per_prompt,
        prompt_len=max(1, round(mean)),
        response_len=rollout.max_response_len,
        micro_batch_tokens=recipe.train.micro_batch_tokens,
    )
    gain = prefix_gain(shape, work)
    only = ", only with mrl's own layers" if elsewhere and asked != "local" else ""
    return (
        f"where a step computes at least {MIN_GAIN:g}x fewer rows{only}; {gain.rows:.2f}x fewer rows "
        f"and {gain.flops:.2f}x fewer FLOPs with {work.samples} answers of {work.response_len} tokens "
        f"to prompts of {mean:.0f} on average, of which {samples_together(work)} fit into "
        "train.micro_batch_tokens"
    )

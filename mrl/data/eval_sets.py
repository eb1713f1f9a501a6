"""Reads the evaluation sets of a recipe. Each set gets a list of prompts and a recipe of its own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mrl.config import EvalSetConfig, Recipe
from mrl.data.files import Tasks
from mrl.data.reader import read_prompts
from mrl.errors import InputError
from mrl.types import Prompt


@dataclass(frozen=True)
class EvalSet:
    """One evaluation set, ready for generation."""

    config: EvalSetConfig
    recipe: Recipe
    """The run's recipe with the reward, sampling settings and sizes of the set. All prompts of the set
    form one step."""
    prompts: list[Prompt]


def read_eval_sets(
    recipe: Recipe, tokenizer: Any, context_len: int, tasks: Tasks | None = None
) -> list[EvalSet]:
    """Read all evaluation sets. `context_len` is the maximum length of a prompt plus its response,
    in tokens. `tasks` loads the tasks of the recipe's environment.

    Raises InputError if a set cannot be read, does not fit the context or has fewer rows than its
    `num_prompts`, or if two sets have the same name. If `eval.every` is not 0, InputError is also
    raised if the recipe has no set, or if `debug.load_rollouts` is given, because no engine runs
    then.
    """
    config = recipe.eval
    names = [each.name for each in config.sets]
    if len(set(names)) < len(names):
        raise InputError(f"eval.sets: got the names {', '.join(names)}, expected each once")
    if config.every and not config.sets:
        raise InputError(f"eval.every is {config.every}, but eval.sets is empty; add a set")
    if config.every and recipe.debug.load_rollouts is not None:
        raise InputError(
            f"eval.every is {config.every}, but debug.load_rollouts starts no engine; set it to 0"
        )
    return [_read(each, recipe, tokenizer, context_len, tasks) for each in config.sets]


def _read(
    config: EvalSetConfig, recipe: Recipe, tokenizer: Any, context_len: int, tasks: Tasks | None
) -> EvalSet:
    rollout = recipe.rollout
    response_len = config.max_response_len or rollout.max_response_len
    if response_len >= context_len:
        raise InputError(
            f"eval set {config.name}: max_response_len {response_len} leaves no room for a prompt in a "
            f"context of {context_len} tokens"
        )
    data = config.data(recipe.data.chat_template_kwargs)
    prompts = read_prompts(
        data,
        tokenizer,
        max_prompt_len=context_len - response_len,
        max_response_len=response_len,
        is_evaluation=True,
        tasks=tasks,
    )
    if config.num_prompts is not None:
        if config.num_prompts > len(prompts):
            raise InputError(
                f"eval set {config.name}: num_prompts is {config.num_prompts}, but {data.describe()} "
                f"has {len(prompts)} rows"
            )
        prompts = prompts[: config.num_prompts]
    sampling = {
        "prompts_per_step": len(prompts),
        "samples_per_prompt": config.samples_per_prompt,
        "max_response_len": response_len,
        "min_response_len": response_len if rollout.min_response_len else 0,
        "temperature": rollout.temperature if config.temperature is None else config.temperature,
        "top_p": config.top_p or rollout.top_p,
        "sampling_mask": False,
        "endpoint_branches": "longest",  # a sample is one line of the results
        **{
            name: getattr(rollout if getattr(config, name) is None else config, name)
            for name in ("top_k", "stop", "stop_token_ids")
        },
    }
    # Rewards of the training sources do not apply to the set.
    changes: dict[str, Any] = {"rollout": rollout.model_copy(update=sampling), "data": data}
    if config.reward is not None:
        keeps = recipe.environment is not None and not recipe.environment.gives_rewards
        changes |= {"reward": config.reward, "environment": recipe.environment if keeps else None}
    return EvalSet(config, recipe.model_copy(update=changes), prompts)

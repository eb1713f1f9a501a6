"""Read and check the rows of a recipe: prompts, eval sets and supervised examples."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from mrl.config import Recipe
from mrl.data.chat import ChatTurns
from mrl.data.eval_sets import EvalSet, read_eval_sets
from mrl.data.files import Tasks
from mrl.data.reader import SftExample, Source, read_sft_examples, read_sources
from mrl.environments.base import check_arguments, check_reset
from mrl.environments.hosted.spec import tasks_of
from mrl.environments.openai_chat import check_target
from mrl.environments.runner import check_columns as check_environment_columns
from mrl.errors import InputError
from mrl.preflight.reward_columns import check_reward_columns
from mrl.preflight.sampling import check_cache, check_sampling
from mrl.preflight.task import check_task
from mrl.rewards.runner import check_columns
from mrl.types import Prompt
from parallel.hf_config import HfModel


def sources_of(recipe: Recipe, tokenizer: Any, context_len: int) -> list[Source]:
    """Read the prompts of all sources.

    A prompt that leaves no room for the longest response in the context is dropped or raises
    InputError, depending on `data.overlong`.
    """
    rollout = recipe.rollout
    return read_sources(
        recipe.data,
        tokenizer,
        max_prompt_len=context_len - rollout.max_response_len,
        max_response_len=rollout.max_response_len,
        min_rows=rollout.prompts_per_step,
        tasks=_tasks_of(recipe),
    )


def _tasks_of(recipe: Recipe) -> Tasks | None:
    """Return the function that loads the tasks of the recipe's environment; None if it has none."""
    environment = recipe.environment
    if environment is None or environment.verifiers is None:
        return None
    return partial(tasks_of, environment)


def check_prompts(
    prompts: list[Prompt],
    tokenizer: Any,
    recipe: Recipe,
    warn: Callable[[str], None],
    imports_rewards: bool,
) -> None:
    """Check that the prompts have the columns that the rewards or the environment need.

    If the recipe has an environment, also check that the environment can be reset with these
    columns and, if prompts are lists of messages, that the chat template works. If rollouts are
    loaded, the columns for rewards are not checked. If `imports_rewards` is false, the environment
    is not reset, and only the columns for mrl's own rewards are checked.
    """
    environment = recipe.environment
    for prompt in prompts:
        if environment is not None:
            check_environment_columns(prompt)
        if environment is None or not environment.gives_rewards:
            check_columns(prompt)
    if recipe.environment is not None:
        if imports_rewards and recipe.environment.name is not None:
            check_arguments(recipe.environment.name, recipe.environment.arguments)
            for columns, source in {tuple(p.columns): p.source for p in reversed(prompts)}.items():
                check_reset(recipe.environment.name, columns, source)
                if recipe.environment.name == "openai_chat":
                    check_target(recipe.environment.arguments["target"], columns, source)
        if any(isinstance(prompt.content, list) for prompt in prompts):
            ChatTurns(tokenizer, recipe.data.chat_template_kwargs).check()
    if (environment is None or not environment.gives_rewards) and not recipe.debug.load_rollouts:
        check_reward_columns(
            prompts, recipe.reward, recipe.data.rewards, warn, imports_rewards=imports_rewards
        )


def eval_sets_of(
    recipe: Recipe,
    model: HfModel,
    tokenizer: Any,
    context_len: int,
    warn: Callable[[str], None],
    imports_rewards: bool,
) -> list[EvalSet]:
    """Read the eval sets, and check the rewards, sampling parameters and prompts of each set.

    `imports_rewards` is described in `check_prompts`.
    """
    found = read_eval_sets(recipe, tokenizer, context_len, _tasks_of(recipe))
    for each in found:
        check_task(each.recipe, each.config.name, imports_rewards=imports_rewards)
        where = f"eval set {each.config.name}: rollout"
        check_sampling(each.recipe.rollout, model.sizes.vocab_size, where)
        check_prompts(each.prompts, tokenizer, each.recipe, warn, imports_rewards)
    return found


def sft_examples_of(recipe: Recipe, tokenizer: Any, context_len: int) -> list[SftExample]:
    """Read the supervised examples; the list is empty if the recipe has no `sft` section.

    Raises InputError if there are fewer examples than `sft.batch_size`.
    """
    config = recipe.sft
    if config is None:
        return []
    data = config.data(recipe.data.chat_template_kwargs)
    examples = read_sft_examples(data, tokenizer, max_len=context_len)
    if len(examples) < config.batch_size:
        raise InputError(
            f"sft.path {data.describe()} has {len(examples)} rows, sft.batch_size is "
            f"{config.batch_size}; add rows or lower it"
        )
    return examples


def check_caches(
    recipe: Recipe,
    prompts: list[Prompt],
    eval_sets: list[EvalSet],
    context_len: int,
    *,
    elsewhere: bool,
) -> None:
    """Check that the KV cache can hold the largest request of training and of each eval set."""
    on_gpu = elsewhere or torch.cuda.is_available()
    check_cache(recipe, prompts, context_len, on_gpu=on_gpu)
    for each in eval_sets:
        where = f"eval set {each.config.name}: rollout"
        check_cache(each.recipe, each.prompts, context_len, on_gpu=on_gpu, where=where)

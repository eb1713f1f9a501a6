"""Says what to do when memory ran out: the free keys that reduce it, and the command to continue."""

from __future__ import annotations

import re
from collections.abc import Iterator

import torch

from mrl.commands.launcher import train_command
from mrl.config import Recipe
from mrl.rollout.base import EngineLost
from mrl.run.folder import RunFolder

TOO_LITTLE_CACHE = "increase --mem-fraction-static"
"""SGLang's words where weights leave no room for the KV cache in its share."""
OF_ENGINE = re.compile(r"out of memory|OutOfMemoryError|" + TOO_LITTLE_CACHE)
OF_HOST = ("can't allocate memory", "Cannot allocate memory")
"""What torch and Linux call it on a CPU."""


def memory_advice(error: BaseException, recipe: Recipe, folder: RunFolder) -> str | None:
    """Return one line for a run that ended for want of memory; None where `error` is another one."""
    for each in _chain(error):
        text = str(each)
        if isinstance(each, (torch.OutOfMemoryError, MemoryError)) or any(
            words in text for words in OF_HOST
        ):
            return _of_trainer(text, recipe, folder)
        is_engine = isinstance(each, EngineLost) or "engine" in text
        if is_engine and (found := OF_ENGINE.search(text)):
            return _of_engine(found[0], recipe, folder)
    return None


def _of_trainer(text: str, recipe: Recipe, folder: RunFolder) -> str:
    train = recipe.train
    first = f" ({text.splitlines()[0]})" if text else ""
    keys = [f"train.micro_batch_tokens ({train.micro_batch_tokens} now)"]
    if not train.recompute:
        keys.append("train.recompute=true")
    keys.append(f"train.logprob_chunk_tokens ({train.logprob_chunk_tokens} now)")
    if not recipe.optimizer.use_distributed_optimizer:
        keys.append("optimizer.use_distributed_optimizer=true (with data parallelism)")
    half = max(1, train.micro_batch_tokens // 2)
    command = train_command(folder, f"train.micro_batch_tokens={half}")
    return (
        f"the trainer ran out of memory{first}. These keys reduce it and may change freely: "
        f"{', '.join(keys)}, and more ranks under parallel. Continue with: {command}"
    )


def _of_engine(words: str, recipe: Recipe, folder: RunFolder) -> str:
    rollout = recipe.rollout
    share = rollout.mem_fraction_static
    more = words == TOO_LITTLE_CACHE
    new = round(min(0.95, share + 0.1) if more else max(0.1, share - 0.1), 2)
    keys = [f"rollout.mem_fraction_static ({share} now: give {'more' if more else 'less'})"]
    keys.append(f"rollout.max_running_requests ({_shown(rollout.max_running_requests)} now)")
    keys.append(f"rollout.max_total_tokens ({_shown(rollout.max_total_tokens)} now)")
    command = train_command(folder, f"rollout.mem_fraction_static={new}")
    return (
        f"the rollout engine ran out of memory. These keys decide what it takes and may change freely: "
        f"{', '.join(keys)}, and rollout.tensor_parallel_size. Continue with: {command}"
    )


def _shown(value: int | None) -> str:
    return "the engine's choice" if value is None else str(value)


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__

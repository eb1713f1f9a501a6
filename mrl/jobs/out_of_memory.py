"""Advice for a run that ran out of memory: which recipe keys to change, and how to continue."""

from __future__ import annotations

import os
import re
from contextlib import suppress
from typing import NamedTuple

import torch

from mrl.config import Recipe, ServiceConfig
from mrl.engines.base import EngineLost
from mrl.errors import InputError
from mrl.jobs.restart_command import train_command
from mrl.run.folder import RunFolder
from mrl.system.disk import chain
from mrl.system.memory_error import Where, noted_bytes, out_of_memory

TOO_LITTLE_CACHE = "increase --mem-fraction-static"
"""Part of SGLang's error message if the weights fill the memory that SGLang may use, so that no space
is left for a KV cache. In that case SGLang needs a larger share of the memory, not a smaller one."""
OF_ENGINE = re.compile(r"(?<!the host ran )out of memory|OutOfMemoryError|" + TOO_LITTLE_CACHE)
"""Matches the messages of an engine whose memory ran out. SIGKILL alone does not tell so: its text says
that the host ran out of memory, or that someone killed the process."""


def memory_advice(error: BaseException, recipe: Recipe, folder: RunFolder) -> str | None:
    """Return one line of advice if `error` means that memory ran out, else None."""
    phase = next((p for each in chain(error) if (p := getattr(each, "phase", ""))), "")
    held = next((h for each in chain(error) if (h := noted_bytes(each))), "")
    for each in chain(error):
        text = str(each)
        is_trainer = isinstance(each, (torch.OutOfMemoryError, MemoryError))
        is_engine = isinstance(each, EngineLost) or ("engine" in text and not is_trainer)
        if is_engine and (found := OF_ENGINE.search(text)):
            return _of_engine(found[0], recipe, folder)
        if where := out_of_memory(each):
            return _of_trainer(text, where, phase, held, recipe, folder)
    return None


def memory_advice_of_service(
    error: BaseException, config: ServiceConfig, command: str
) -> str | None:
    """Return one line of advice if `error` means that a service ran out of memory, else None.

    `command` is the command that starts the service again.
    """
    errors = list(chain(error))
    held = next((found for each in errors if (found := noted_bytes(each))), "")
    tenant = next((found for each in errors if (found := getattr(each, "tenant", ""))), "")
    for each in errors:
        text = str(each)
        is_engine = isinstance(each, EngineLost) and OF_ENGINE.search(text)
        if not is_engine and not out_of_memory(each):
            continue
        who = "the rollout engine" if is_engine else "the trainer"
        whose = f" in the work of tenant {tenant}" if tenant else ""
        owners = f" Rank {os.environ.get('RANK', '0')} holds: {held}." if held else ""
        share = config.rollout.mem_fraction_static
        most = config.tenants.max_micro_batch_tokens
        limit = "no limit" if most is None else str(most)
        return (
            f"{who} ran out of memory{whose} ({text.splitlines()[0] if text else 'no details'})."
            f"{owners} Change rollout.mem_fraction_static ({share} now) or "
            f"tenants.max_micro_batch_tokens ({limit} now), or give that tenant a smaller "
            f"train.micro_batch_tokens. Continue with: {command}"
        )
    return None


def _of_trainer(
    text: str, where: Where, phase: str, held: str, recipe: Recipe, folder: RunFolder
) -> str:
    first = f" ({text.splitlines()[0]})" if text else ""
    when = f" in phase {phase}" if phase else ""
    rank = os.environ.get("RANK", "0")
    owners = f" Rank {rank} holds: {held}." if held else ""
    first_key, second_key = two_keys(phase, where, recipe, _most_tokens(recipe, folder))
    command = train_command(folder, first_key.override, second_key.override)
    more = (
        ""
        if recipe.optimizer.use_distributed_optimizer
        else ", with optimizer.use_distributed_optimizer=true if there is data parallelism"
    )
    return (
        f"the trainer ran out of memory{when}{first}.{owners} Change {first_key.text} and "
        f"{second_key.text}; larger sizes under parallel help, too{more}. Continue with: {command}"
    )


class Key(NamedTuple):
    """A recipe key with a new value that needs less memory. The key can be changed when a run is
    continued."""

    override: str
    """The key with its new value, as `KEY=VALUE`."""
    old: object
    """The current value."""

    @property
    def text(self) -> str:
        """The override and the current value in words."""
        return f"{self.override} ({_shown(self.old)} now)"


def _most_tokens(recipe: Recipe, folder: RunFolder) -> int | None:
    """Return a number of tokens that no step had more of; None if it is not known.

    A larger `train.micro_batch_tokens` puts a whole step into one micro-batch.
    """
    with suppress(OSError, ValueError, InputError):
        steps = [row.get("tokens/train") for row in folder.read_metrics()]
        if counts := [int(each) for each in steps if each]:
            return max(counts)
    rollout = recipe.rollout
    if rollout.context_len is None:
        return None
    return rollout.prompts_per_step * rollout.samples_per_prompt * rollout.context_len


def two_keys(
    phase: str, where: Where, recipe: Recipe, most_tokens: int | None = None
) -> tuple[Key, Key]:
    """Return the two keys that best reduce the memory of a phase of a step, such as `rollout`.

    `where` tells whether memory ran out on the device or on the host. If `most_tokens`, the largest
    number of tokens of a step, is known, the advised micro-batch holds at most half of it.
    """
    train, rollout = recipe.train, recipe.rollout
    tokens = train.micro_batch_tokens
    fewer = max(1, min(tokens, most_tokens or tokens) // 2)
    micro_batch = Key(f"train.micro_batch_tokens={fewer}", tokens)
    share = rollout.mem_fraction_static
    engine = Key(f"rollout.mem_fraction_static={round(max(0.1, share - 0.1), 2)}", share)
    if phase in ("sync", "digest", "push"):
        bucket = Key("rollout.weight_bucket_mb=256", rollout.weight_bucket_mb)
        return engine, bucket
    if phase in ("rollout", "score", "eval") and where == "host":
        waiting = max(1, (rollout.max_running_requests or 64) // 2)
        requests = Key(f"rollout.max_running_requests={waiting}", rollout.max_running_requests)
        return requests, micro_batch
    if not train.recompute:
        return micro_batch, Key("train.recompute=true", "false")
    chunk = train.logprob_chunk_tokens
    if chunk == 0 or chunk > 256:
        return micro_batch, Key("train.logprob_chunk_tokens=256", chunk)
    return micro_batch, engine


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
        "the rollout engine ran out of memory. These keys determine its memory and may change in a "
        f"run: {', '.join(keys)}, and rollout.tensor_parallel_size. Continue with: {command}"
    )


def _shown(value: object) -> str:
    return "the engine's choice" if value is None else str(value)

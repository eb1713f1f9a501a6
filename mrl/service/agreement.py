"""Compares a tenant's recipe with the service's configuration, and fills in the service's keys.

A key in one of the sections `SHARED` belongs to the service if the service's configuration has this
key. If a recipe omits such a key, it gets the service's value. A recipe that gives another value is
refused, and the message names every such key. A `record` is a recipe that was resolved before: the
`config.yaml` of a run, or the recipe that the service itself stored. In a record, keys that may
change freely during a run may have other values than in the service's configuration. The service's
values then replace the record's values.

In addition, there are upper bounds on what a recipe may ask for, so that no tenant takes all
resources from the others. The bounds are far above what a run normally needs, and cannot be
configured. A run that needs more has to use `mrl train`.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator, Mapping
from typing import Any

from mrl.algorithms import load_algorithm, traits
from mrl.config import Recipe, ServiceConfig
from mrl.config.asynchronous import AsyncConfig, WorkerConfig
from mrl.config.data import paths_of
from mrl.config.load import recipe_of
from mrl.config.reward import Rewards
from mrl.errors import InputError
from mrl.rewards.terms import terms_of
from mrl.run.changes import Kind, flatten, is_in, rule_of
from mrl.system.files import bytes_in_words
from parallel.hf_config import HfModel
from parallel.implementation import choose_dtype
from parallel.lora.rules import adapter_shapes, read_adapter

SHARED = (
    "model",
    "parallel",
    "megatron",
    "train",
    "rollout",
    "async",
    "moe",
    "watch",
    "checkpoint",
)
"""Sections of a recipe that the service and the tenant share. A key of these sections belongs to
the service if the service's configuration has the same key, and otherwise to the tenant."""
OWN_MEANING = ("moe.capture_routes", "rollout.context_len")
"""Keys in the sections of `SHARED` for which a tenant may give its own value, within limits that
`_beyond` checks."""
FREE_FORM = ("megatron", "rollout.server_args", "watch.limits")
"""Keys of a recipe whose values are mappings with arbitrary keys. Every key of such a mapping
belongs to the service. So a recipe is refused if its mapping has a key that the service's mapping
lacks."""
NATIVE = ("auto", "local")
"""Values of model.transformer_impl that a tenant's recipe may have. Both mean mrl's own layers,
because only these support adapters."""
MAX_SAMPLES = 65_536
"""Maximum number of samples in a step, all of which the service holds in memory. Also the maximum
of `samples_per_prompt` in an evaluation set."""
MAX_WORKERS = 64
"""Maximum number of worker processes that run a tenant's rewards and environments for one engine."""
MAX_ROUNDS = 64
"""Maximum number of `algorithm.dynamic_sampling` rounds in a step. Other tenants wait until the
last round is over."""


def resolve_tenant(
    service: ServiceConfig, tree: Mapping[str, Any], source: str, *, is_record: bool = False
) -> Recipe:
    """Return a tenant's complete recipe, with which `mrl train` could run the tenant alone.

    `tree`: the keys of the tenant's recipe, which may omit keys that belong to the service.
    `source`: the name of the recipe in error messages. `is_record`: whether the recipe was resolved
    before (see the module docstring). Raises InputError if the recipe is not valid or does not fit
    the service.
    """
    filled = copy.deepcopy(dict(tree))
    if isinstance(model := filled.setdefault("model", {}), dict):
        model.setdefault("path", service.model.path)
    try:
        recipe = recipe_of(filled, None, source)
    except RecursionError:
        raise InputError(f"{source}: branches lie too deep in each other") from None
    check_tenant(service, recipe, is_record=is_record)
    return with_service(service, recipe)


def check_tenant(service: ServiceConfig, recipe: Recipe, *, is_record: bool = False) -> None:
    """Raise InputError if the recipe does not fit the service. The message names all keys that do
    not fit. `is_record`: whether the recipe was resolved before (see the module docstring)."""
    shared = list(_differences(service, recipe, is_record=is_record))
    if shared:
        shared.append(
            "leave these keys out, as they belong to the service, or start another service"
        )
    problems = [
        *_impossible(service, recipe),
        *_beyond(service, recipe),
        *_beyond_bounds(recipe),
        *shared,
    ]
    if not problems and recipe.lora is not None:
        problems += _beyond_slots(service, recipe)
    if problems:
        raise InputError(f"the recipe does not fit the service: {'; '.join(problems)}")


def with_service(service: ServiceConfig, recipe: Recipe) -> Recipe:
    """Return the recipe with the service's values for all keys that belong to the service."""
    tree, ours = recipe.model_dump(mode="json"), service.model_dump(mode="json")
    for branch in SHARED:
        values = {k: v for k, v in ours[branch].items() if f"{branch}.{k}" not in OWN_MEANING}
        tree[branch] = values if branch in FREE_FORM else tree[branch] | values
    if tree["rollout"]["context_len"] is None:
        tree["rollout"]["context_len"] = service.rollout.context_len
    return Recipe.model_validate(tree)


def _differences(service: ServiceConfig, recipe: Recipe, *, is_record: bool) -> Iterator[str]:
    given = flatten(_shared(recipe.model_dump(mode="json", exclude_unset=True)))
    ours = flatten(_shared(service.model_dump(mode="json")))
    for key, value in given.items():
        is_shared = key in ours or any(is_in(key, branch) for branch in FREE_FORM)
        if not is_shared or key in OWN_MEANING or _same(key, value, ours.get(key)):
            continue
        if not (is_record and rule_of(key).kind is Kind.FREE):
            there = repr(ours[key]) if key in ours else "not set"
            yield f"{key} is {value!r} and {there} in the service"


def _shared(tree: Mapping[str, Any]) -> dict[str, Any]:
    return {branch: tree[branch] for branch in SHARED if branch in tree}


def _same(key: str, given: Any, ours: Any) -> bool:
    if key == "model.path":
        return os.path.realpath(given) == os.path.realpath(ours)
    if key == "model.transformer_impl":
        return given in NATIVE
    return given == ours


def _impossible(service: ServiceConfig, recipe: Recipe) -> Iterator[str]:
    """Yield a message for each setting that this service does not support."""
    algorithm, rollout = recipe.algorithm, recipe.rollout
    if recipe.lora is None:
        yield (
            "lora is not set, but all tenants share one base, which nobody trains; give the adapter to "
            "train (lora: {rank: 32})"
        )
    elif recipe.lora.rollout == "merged":
        yield (
            "lora.rollout is merged, but the engine's base is that of all tenants; leave it at adapter"
        )
    if traits(load_algorithm(algorithm.name)).needs_critic:
        yield (
            f"algorithm.name is {algorithm.name}, which trains a critic: a second model, for which a "
            "service has no place; take an algorithm without one, such as grpo or gspo"
        )
    own = recipe.asynchronous.model_dump(exclude=set(WorkerConfig.model_fields))
    ahead = [key for key, value in own.items() if value != getattr(AsyncConfig(), key)]
    if ahead and service.rollout.placement == "colocated":
        yield (
            f"async.{ahead[0]} is set, but the service has rollout.placement=colocated, where engines "
            "and trainer take turns; leave it out"
        )
    samples = "a service trains what its engine samples"
    trace = "a trace would have what all tenants do; profile the recipe with mrl train"
    for key, value, why in (
        ("rollout.true_on_policy", rollout.true_on_policy, "its layers have no low-rank update"),
        ("rollout.endpoint", rollout.endpoint, "a service runs no programs of its tenants"),
        ("algorithm.reference_path", algorithm.reference_path, "that of an adapter is the base"),
        ("moe.expert_bias_update_rate", recipe.moe.expert_bias_update_rate, "it changes the base"),
        ("debug.load_rollouts", recipe.debug.load_rollouts, samples),
        ("debug.rollout_only", recipe.debug.rollout_only, samples),
        ("profile.steps", recipe.profile.steps, trace),
    ):
        if value:
            yield f"{key} is set, but {why}; leave it out"


def _beyond(service: ServiceConfig, recipe: Recipe) -> Iterator[str]:
    """Yield a message for each setting that exceeds a limit of the service's configuration."""
    limits, own_len = service.tenants, recipe.rollout.context_len
    for key, value, limit_key, limit in (
        ("train.micro_batch_tokens", recipe.train.micro_batch_tokens,
         "tenants.max_micro_batch_tokens", limits.max_micro_batch_tokens),
        ("reward_timeout_s", recipe.reward_timeout_s, "tenants.max_reward_s", limits.max_reward_s),
        ("environment.time_limit_s", recipe.environment and recipe.environment.time_limit_s,
         "tenants.max_reward_s", limits.max_reward_s),
        ("rollout.context_len", own_len, "rollout.context_len", service.rollout.context_len),
        ("lora.rank", recipe.lora and recipe.lora.rank, "lora.max_rank", service.lora.max_rank),
    ):  # fmt: skip
        if value is not None and limit is not None and value > limit:
            yield f"{key} is {value:g}, but the service has {limit_key}={limit:g}; give at most that"
    if recipe.lora is not None and recipe.lora.experts not in ("none", *service.lora.experts):
        kinds = ", ".join(service.lora.experts)
        yield f"lora.experts is {recipe.lora.experts}, but the service has lora.experts=[{kinds}]"
    if recipe.captures_routes and not service.moe.capture_routes:
        yield (
            "moe.routing_replay is r3 or diagnosis.capture_routes is on, but the service has "
            "moe.capture_routes=false; set moe.routing_replay=off (or r2, if the model is a MoE)"
        )


def _beyond_slots(service: ServiceConfig, recipe: Recipe) -> Iterator[str]:
    """Yield a message if the adapter does not fit into the engine's adapter slots or is larger than
    the service allows, and if routes of a model without experts are to be replayed. Sizes are
    computed from the model's config.json."""
    assert recipe.lora is not None
    model = HfModel.read(service.model.path, service.model.architecture)
    if recipe.moe.routing_replay != "off" and not model.moe_layer_numbers:
        yield (
            f"moe.routing_replay is {recipe.moe.routing_replay}, but the service's model has no MoE "
            "layers; set it to off"
        )
    adapter = read_adapter(recipe.lora, model)
    widest = {"rank": 1, "targets": service.lora.targets, "experts": "none"}
    allowed = read_adapter(recipe.lora.model_copy(update=widest), model).modules
    if outside := [name for name in adapter.modules if name not in allowed]:
        yield (
            f"lora.targets has {', '.join(outside)}, but the service's lora.targets are "
            f"{', '.join(allowed)}; leave the others out"
        )
    limit = service.tenants.max_adapter_bytes
    if limit is None:
        return
    numel = sum(rows * columns for rows, columns in adapter_shapes(model, adapter).values())
    num_bytes = numel * choose_dtype(service.model.dtype).itemsize
    if num_bytes > limit:
        yield (
            f"the adapter of lora.rank={adapter.rank} has {bytes_in_words(num_bytes)}, but the service "
            f"has tenants.max_adapter_bytes={limit}; take a smaller rank or fewer targets"
        )


def _beyond_bounds(recipe: Recipe) -> Iterator[str]:
    """Yield a message for each setting that exceeds `MAX_SAMPLES`, `MAX_WORKERS` or `MAX_ROUNDS`,
    and for each data path that is neither a file nor a folder."""
    rollout = recipe.rollout
    samples = rollout.prompts_per_step * rollout.over_sampling * rollout.samples_per_prompt
    if samples > MAX_SAMPLES:
        yield (
            "rollout.prompts_per_step x over_sampling x samples_per_prompt is "
            f"{samples:.6g}, but a tenant of a service has at most {MAX_SAMPLES} samples a step"
        )
    for each in recipe.eval.sets:
        if each.samples_per_prompt > MAX_SAMPLES:
            yield (
                f"eval set {each.name}: samples_per_prompt is {each.samples_per_prompt}, but a tenant "
                f"of a service has at most {MAX_SAMPLES}"
            )
    if (workers := _num_workers(recipe)) > MAX_WORKERS:
        yield (
            f"the rewards and environments take {workers} processes (each reward one, of each "
            f"evaluation set its own; environment.num_workers), but a tenant of a service has at most "
            f"{MAX_WORKERS}"
        )
    if rollout.dynamic_sampling_rounds > MAX_ROUNDS:
        yield (
            f"rollout.dynamic_sampling_rounds is {rollout.dynamic_sampling_rounds}, but the other "
            f"tenants wait for them; give at most {MAX_ROUNDS}"
        )
    for path in _data_paths(recipe):
        if os.path.exists(path) and not (os.path.isfile(path) or os.path.isdir(path)):
            yield f"{path} is a device, a pipe or a socket, but data is read from files; name a file"


def _num_workers(recipe: Recipe) -> int:
    """Return the number of worker processes that run the recipe's rewards and environments for one
    engine."""
    workers = 0 if recipe.environment is None else recipe.environment.num_workers
    own = workers + _number(recipe.reward)
    of_sets = (_number(each.reward) if each.reward else own for each in recipe.eval.sets)
    return own + sum(map(_number, recipe.data.rewards.values())) + sum(of_sets)


def _number(rewards: Rewards | None) -> int:
    return 0 if rewards is None else len(terms_of(rewards))


def _data_paths(recipe: Recipe) -> Iterator[str]:
    """Yield the paths of the files and folders from which training, evaluation and SFT rows are
    read."""
    sft = [] if recipe.sft is None else [recipe.sft]
    for each in (*recipe.data.all_sources, *recipe.eval.sets, *sft):
        yield from paths_of(each.path)

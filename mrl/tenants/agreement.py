"""Compares a tenant's recipe with its service, and fills in what the service decides.

The keys of `SHARED` belong to the service. A recipe that leaves them out takes the service's values;
one that gives others is refused, with all of these keys in one message. A `record` is a recipe that was
resolved before (`config.yaml` of a run, or what the service itself stored): there, those keys that may
change freely in a run take the service's values too.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator, Mapping
from typing import Any

from mrl.algorithms import load_algorithm, traits
from mrl.config import Recipe, ServiceConfig
from mrl.config.asynchronous import AsyncConfig, WorkerConfig
from mrl.config.load import recipe_of
from mrl.errors import InputError
from mrl.run.changes import Kind, flatten, is_in, rule_of
from mrl.system.files import bytes_in_words
from mrl.tenants.bounds import beyond_bounds
from parallel.hf_config import HfModel
from parallel.implementation import choose_dtype
from parallel.lora.rules import read_adapter
from parallel.lora.shapes import adapter_shapes

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
"""Branches whose keys belong to the service, where a service has them."""
OWN_MEANING = ("moe.capture_routes", "rollout.context_len")
"""Keys among them that are compared in another way than by equality."""
FREE_FORM = ("megatron", "rollout.server_args", "watch.limits")
"""Branches that hold keys of others: one that only the recipe has differs too."""
NATIVE = ("auto", "local")
"""Values of model.transformer_impl that mean the same where there are adapters."""


def resolve_tenant(
    service: ServiceConfig, tree: Mapping[str, Any], source: str, *, is_record: bool = False
) -> Recipe:
    """Return the whole recipe of a tenant, which `mrl train` could run alone.

    `tree`: the keys of its recipe, which may leave out those of the service; `source` is what messages
    call it. Raises InputError as `mrl.config.load.recipe_of` and `check_tenant` do.
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
    """Raise InputError that names all keys in which the recipe is not one for this service."""
    shared = list(_differences(service, recipe, is_record=is_record))
    if shared:
        shared.append(
            "leave these keys out, as they belong to the service, or start another service"
        )
    problems = [
        *_impossible(service, recipe),
        *_beyond(service, recipe),
        *beyond_bounds(recipe),
        *shared,
    ]
    if not problems and recipe.lora is not None:
        problems += _beyond_slots(service, recipe)
    if problems:
        raise InputError(f"the recipe does not fit the service: {'; '.join(problems)}")


def with_service(service: ServiceConfig, recipe: Recipe) -> Recipe:
    """Return the recipe with the service's values of the keys that belong to it."""
    tree, ours = recipe.model_dump(mode="json"), service.model_dump(mode="json")
    for branch in SHARED:
        whole = branch in FREE_FORM
        values = {k: v for k, v in ours[branch].items() if f"{branch}.{k}" not in OWN_MEANING}
        tree[branch] = values if whole else tree[branch] | values
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
    """Yield what the service cannot do, with the reason."""
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
        ("algorithm.reference_path", algorithm.reference_path, "that of an adapter is the base"),
        ("moe.expert_bias_update_rate", recipe.moe.expert_bias_update_rate, "it changes the base"),
        ("debug.load_rollouts", recipe.debug.load_rollouts, samples),
        ("debug.rollout_only", recipe.debug.rollout_only, samples),
        ("profile.steps", recipe.profile.steps, trace),
    ):
        if value:
            yield f"{key} is set, but {why}; leave it out"


def _beyond(service: ServiceConfig, recipe: Recipe) -> Iterator[str]:
    """Yield what is beyond the limits of the service."""
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
            "moe.capture_routes=false; set moe.routing_replay=r2 or off"
        )


def _beyond_slots(service: ServiceConfig, recipe: Recipe) -> Iterator[str]:
    """Yield what of an adapter does not fit into a slot of the engine, from the model's config.json."""
    assert recipe.lora is not None
    model = HfModel.read(service.model.path, service.model.architecture)
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

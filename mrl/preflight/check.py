"""Check a recipe before the start of a run, beginning with the cheapest checks."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from mrl.algorithms import Algorithm, check_algorithm, load_algorithm, traits
from mrl.config import AlgorithmConfig, Recipe, RolloutConfig
from mrl.config.adapter import Adapter
from mrl.engines import load_engine, node_class
from mrl.engines.sglang.limits import check_limits, check_route_layers
from mrl.errors import InputError
from mrl.preflight.algorithm import (
    check_critic_stays,
    check_dynamic_sampling,
    check_group_size,
    check_shaping,
    read_critic,
    read_reference,
)
from mrl.preflight.allocator import check_allocator
from mrl.preflight.asynchronous import check_asynchronous
from mrl.preflight.data import (
    check_caches,
    check_prompts,
    eval_sets_of,
    sft_examples_of,
    sources_of,
)
from mrl.preflight.data_position import steps_done
from mrl.preflight.engine_layout import check_engine_sizes
from mrl.preflight.long_tails import check_importance, check_partial_rollouts, check_started
from mrl.preflight.lora import read_lora
from mrl.preflight.machine import check_machine, local_ranks
from mrl.preflight.megatron import check_megatron, with_native_layers
from mrl.preflight.moe import check_moe
from mrl.preflight.mtp import with_mtp
from mrl.preflight.old_logprobs import check_old_logprobs
from mrl.preflight.on_policy import check_on_policy
from mrl.preflight.optimizer import check_optimizer
from mrl.preflight.output import check_output
from mrl.preflight.plan import Plan
from mrl.preflight.profile import check_profile
from mrl.preflight.releases import check_releases
from mrl.preflight.resume import check_adapter
from mrl.preflight.reward_trial import try_rewards
from mrl.preflight.roles import Roles, roles_of, trainer_dims
from mrl.preflight.rows import check_rows
from mrl.preflight.sampling import check_recipe_sampling
from mrl.preflight.schedule import with_schedule
from mrl.preflight.task import check_task
from mrl.preflight.tools import check_tools
from mrl.run import console
from mrl.run.folder import RunFolder, check_saved_steps
from mrl.run.history import Update
from mrl.trackers import check_trackers
from mrl.weight_sync.transports import opens_handles
from parallel.dims import ParallelDims
from parallel.hf_config import HfModel
from parallel.implementation import choose_implementation
from parallel.weight_checks import check_weights


@contextmanager
def _refusing_unreadable_paths() -> Iterator[None]:
    """Turn a PermissionError for a path into an InputError that names the path.

    A PermissionError without a path is passed on unchanged.
    """
    try:
        yield
    except PermissionError as error:
        if error.filename is None:  # a process or a socket, not a path
            raise
        raise InputError(
            f"{error.filename}: {error.strerror}; ask its owner for access, or give another path"
        ) from None


@_refusing_unreadable_paths()
def check(
    recipe: Recipe,
    world: int,
    *,
    saved_steps: range | None = None,
    allowed: Sequence[str] | None = (),
    elsewhere: bool = False,
    deep: bool = False,
    imports_rewards: bool = True,
) -> Plan:
    """Return the plan of a recipe for `world` ranks. Raises InputError for the first fault.

    In the plan's recipe, keys whose values follow from other keys are filled in.

    `saved_steps`: the steps whose rollouts the folder `debug.load_rollouts` must contain; by
    default, all remaining steps of the run. `allowed`: the keys that may change if the run is
    continued; None allows every key that `--allow` can name (see `RunFolder.check`), for an evaluation
    or a replay, which do not continue at the run's data position. `elsewhere`: the recipe is for GPUs
    that this machine does not have; skip checks that need these GPUs.
    `deep`: check that all weights are finite, not only a sample of them. `imports_rewards`: False
    if this process must not import the user's rewards and environments, because only workers that
    run as another user may import them.
    """
    is_main = os.environ.get("RANK", "0") == "0"
    warn = console.warning if is_main else lambda text: None
    check_releases()
    if not elsewhere:
        check_machine(local_ranks(world), warn)
    roles = roles_of(recipe, world)
    dims = trainer_dims(recipe, roles)
    folder = RunFolder(recipe.output_dir)
    model = _read_model(recipe, dims, elsewhere=elsewhere, deep=deep)
    adapter, recipe = read_lora(recipe, model, roles, elsewhere=elsewhere)
    policy = with_mtp(recipe, model, deep=deep)  # reference and critic have no MTP layers
    reference = read_reference(recipe.algorithm, model, deep=deep)
    check_importance(recipe.algorithm)
    _check_rollout(recipe, roles, model)
    _check_engine(recipe, model, elsewhere=elsewhere)
    check_on_policy(recipe, dims, model)
    check_asynchronous(recipe)
    check_partial_rollouts(recipe, roles.num_engines(recipe.rollout))
    context_len = _context_len(recipe.rollout, model)
    algorithm = _read_algorithm(recipe.algorithm)
    critic = read_critic(recipe, traits(algorithm).needs_critic, model, dims, deep=deep)
    _check_groups(recipe, algorithm)
    check_task(recipe, imports_rewards=imports_rewards)
    tokenizer = load_tokenizer(model)
    sources = sources_of(recipe, tokenizer, context_len)
    prompts = [prompt for source in sources for prompt in source.prompts]
    check_rows(prompts, warn)
    check_started(recipe.rollout, len(prompts))
    recipe = with_schedule(recipe, len(prompts))
    check_prompts(prompts, tokenizer, recipe, warn, imports_rewards)
    sft_examples = sft_examples_of(recipe, tokenizer, context_len)
    eval_sets = eval_sets_of(recipe, model, tokenizer, context_len, warn, imports_rewards)
    check_caches(recipe, prompts, eval_sets, context_len, elsewhere=elsewhere)
    if is_main and imports_rewards:
        try_rewards(recipe, prompts, eval_sets, tokenizer, warn)
        if not elsewhere:
            check_tools(recipe, prompts, tokenizer, context_len)
    update = _check_folder(folder, recipe, allowed, algorithm, adapter)
    trains = allowed is not None
    checkpoint_step, step = steps_done(folder, recipe, sources, update, warn, trains=trains)
    _check_saved_steps(recipe, saved_steps or range(step or 0, recipe.train.num_steps))
    return Plan(
        recipe, roles, dims, policy, adapter, reference, critic, algorithm, tokenizer, sources,
        sft_examples, eval_sets, context_len, step, checkpoint_step, update,
    )  # fmt: skip


def _check_groups(recipe: Recipe, algorithm: Algorithm) -> None:
    check_shaping(recipe)
    check_dynamic_sampling(recipe)
    check_group_size(recipe, algorithm)


def _check_saved_steps(recipe: Recipe, steps: range) -> None:
    if recipe.debug.load_rollouts is not None:
        check_saved_steps(recipe.debug.load_rollouts, steps)


def _read_model(recipe: Recipe, dims: ParallelDims, *, elsewhere: bool, deep: bool) -> HfModel:
    """Read the model's folder, and check the model against the recipe.

    The layout, the MoE settings and the options for Megatron must fit the model.
    """
    model = HfModel.read(recipe.model.path, recipe.model.architecture)
    dims.check_model(model.sizes)
    recipe = with_native_layers(recipe, model)
    check_weights(model, deep=deep)
    if not elsewhere:
        choose_implementation(recipe.model.transformer_impl)
    check_moe(recipe, model)
    check_optimizer(recipe)
    check_megatron(recipe, dims, model, elsewhere=elsewhere)
    return model


def _read_algorithm(config: AlgorithmConfig) -> Algorithm:
    algorithm = load_algorithm(config.name)
    check_algorithm(config)
    check_old_logprobs(config, algorithm)
    try:  # this raises InputError for the supervised loss, which has no advantages
        algorithm.advantages([torch.tensor([0.0, 1.0])], config)
    except InputError:
        raise
    except Exception as error:  # the user's code
        message = " ".join(str(error).split())
        raise InputError(
            f"algorithm.name {config.name!r}: advantages() fails for one group of rewards [0, 1]: "
            f"{type(error).__name__}: {message}"
        ) from None
    return algorithm


def _check_folder(
    folder: RunFolder,
    recipe: Recipe,
    allowed: Sequence[str] | None,
    algorithm: Algorithm,
    adapter: Adapter | None,
) -> Update:
    """Check the run folder and the trackers.

    If the folder already contains a run, the returned `Update` has the changes that this start
    makes to that run's recipe.
    """
    check_trackers(recipe.logging)
    if os.environ.get("RANK", "0") == "0":
        check_output(folder)
    check_adapter(folder, adapter)
    update = folder.check(recipe, allowed)
    if folder.has_begun:
        check_critic_stays(update.changes, traits(algorithm).needs_critic)
    return update


def load_tokenizer(model: HfModel) -> Any:
    """Return the tokenizer of the model folder.

    Raises InputError if the tokenizer is missing or cannot be loaded, or if it has more tokens than
    the model's vocabulary.
    """
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(model.path, local_files_only=True)
    except Exception as error:  # transformers raises many kinds of errors for damaged files
        message = " ".join(str(error).split()) or "no message"
        raise InputError(
            f"model.path {model.path}: no usable tokenizer ({type(error).__name__}: {message})"
        ) from None
    if len(tokenizer) <= len(tokenizer.all_special_tokens):  # transformers found no files
        raise InputError(
            f"model.path {model.path}: no usable tokenizer (its vocabulary is empty); copy the model's "
            "tokenizer.json there"
        )
    if len(tokenizer) > model.sizes.vocab_size:
        raise InputError(
            f"model.path {model.path}: the tokenizer has {len(tokenizer)} tokens, the model only "
            f"{model.sizes.vocab_size}"
        )
    return tokenizer


def _check_rollout(recipe: Recipe, roles: Roles, model: HfModel) -> None:
    check_profile(recipe.profile, roles.num_trainers)
    rollout = recipe.rollout
    prompts, minis = rollout.prompts_per_step, recipe.train.num_steps_per_rollout
    if not recipe.debug.load_rollouts:  # saved rollouts need no engine
        if roles.engine_layout(rollout).num_nodes > 1:
            node_class(load_engine(rollout.engine), rollout.engine)
        check_engine_sizes(rollout, model.sizes)
    if prompts % minis:
        raise InputError(
            f"rollout.prompts_per_step {prompts} is not divisible by train.num_steps_per_rollout "
            f"{minis} ({prompts} = {prompts // minis} x {minis} + {prompts % minis})"
        )
    if opens_handles(rollout.weight_sync) and torch.cuda.is_available():
        check_allocator(os.environ)
    if rollout.min_response_len not in (0, rollout.max_response_len):
        raise InputError(
            f"rollout.min_response_len {rollout.min_response_len}: expected 0 or max_response_len "
            f"{rollout.max_response_len}; with a value in between, the engine would forbid the end "
            "token, and its log-probs would be of another distribution than the trainer's"
        )
    check_recipe_sampling(recipe, model.sizes.vocab_size)


def _check_engine(recipe: Recipe, model: HfModel, *, elsewhere: bool) -> None:
    """Raise InputError for settings that the engine would refuse when it starts.

    Only SGLang's limits are known here. Of any other engine, only the name is checked. Nothing is
    checked if rollouts are loaded instead of generated.
    """
    if recipe.debug.load_rollouts is not None:
        return
    load_engine(recipe.rollout.engine)
    if recipe.rollout.engine == "sglang":  # the limits of other engines are unknown here
        routes, has_gpu = recipe.captures_routes, torch.cuda.is_available()
        is_asked = has_gpu and not elsewhere and recipe.rollout.quantization != "none"
        check_limits(
            recipe.model.path,
            recipe.rollout,
            on_gpu=elsewhere or has_gpu,
            return_routes=routes,
            capability=torch.cuda.get_device_capability() if is_asked else None,
        )
        if routes and model.named is not None:
            check_route_layers(model.path, model.moe_layer_numbers, model.sizes.num_experts)


def _larger(asked: int, most: int) -> str:
    """Return the advice to set a larger context, if the model can have one."""
    if asked < most:
        return f", or a larger rollout.context_len (this model: at most {most})"
    return f" (the context is the model's max_position_embeddings, {most})"


def _context_len(config: RolloutConfig, model: HfModel) -> int:
    asked = config.context_len or model.context_len
    if asked > model.context_len:
        raise InputError(
            f"rollout.context_len {asked} is above the model's max_position_embeddings "
            f"{model.context_len}"
        )
    if config.max_response_len >= asked:
        raise InputError(
            f"rollout.max_response_len {config.max_response_len} leaves no room for a prompt "
            f"in a context of {asked} tokens; set a smaller one{_larger(asked, model.context_len)}"
        )
    return asked

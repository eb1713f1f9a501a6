"""Everything that can be known before the start: checked cheapest first, every failure one line."""

from __future__ import annotations

import importlib.metadata
import os
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from mrl import console
from mrl.algorithm_checks import (
    check_dynamic_sampling,
    check_shaping,
    read_critic,
    read_reference,
)
from mrl.algorithms import check_algorithm, load_algorithm
from mrl.algorithms.base import Algorithm, traits
from mrl.config import MoeConfig, Recipe
from mrl.data import Demonstration, read_demonstrations, read_prompts
from mrl.data.chat import ChatTurns
from mrl.diagnosis.checks import check_capture
from mrl.environments import resolve_environment
from mrl.environments.runner import check_columns as check_environment_columns
from mrl.errors import InputError
from mrl.eval_sets import EvalSet, read_eval_sets
from mrl.on_policy_checks import check_on_policy
from mrl.rewards import resolve_reward
from mrl.rewards.runner import check_columns
from mrl.rollout import load_engine
from mrl.rollout.sglang_server.arguments import check_server_args
from mrl.run_folder import RunFolder, check_saved_steps
from mrl.tail_checks import check_importance, check_started, check_unfinished
from mrl.types import Prompt
from parallel.dims import ParallelDims
from parallel.hf_config import HfModel
from parallel.hf_tensors import HfTensors, check_names
from parallel.implementation import choose_dtype, choose_implementation
from parallel.manifest import candidates, damage, newest_good, step_of


@dataclass(frozen=True)
class Plan:
    """A recipe that can start, with what was read to find that out."""

    recipe: Recipe
    dims: ParallelDims
    model: HfModel
    reference: HfModel | None
    """Of the KL penalty; None where there is none."""
    critic: HfModel | None
    """What the critic starts from; None where the algorithm needs none."""
    algorithm: Algorithm
    tokenizer: Any
    prompts: list[Prompt]
    demonstrations: list[Demonstration]
    """Of the warm start; empty without one."""
    eval_sets: list[EvalSet]
    context_len: int
    resume_step: int | None
    """The checkpoint that the run continues from, unless a file of it turns out to be damaged."""

    @property
    def num_engines(self) -> int:
        return self.dims.world // self.recipe.rollout.tensor_parallel_size

    def rows(self) -> list[tuple[str, str]]:
        """What is about to happen, for the terminal."""
        recipe, model, rollout = self.recipe, self.model, self.recipe.rollout
        implementation, why = choose_implementation(recipe.model.transformer_impl)
        samples = rollout.prompts_per_step * rollout.samples_per_prompt
        more = rollout.num_started - rollout.prompts_per_step
        started = f" ({more} more prompts are started: {rollout.unfinished})" if more else ""
        resumed = "" if self.resume_step is None else f" (continues after step {self.resume_step})"
        source = recipe.debug.load_rollouts
        return [
            ("model", f"{model.path}: {model.describe()}"),
            ("layout", self.dims.describe()),
            ("trainer", f"megatron-core {_version('megatron-core')}, {implementation} layers "
             f"({why}), {choose_dtype(recipe.model.dtype)}".replace("torch.", "")),
            ("rollout", f"saved: {source}" if source else
             f"{rollout.engine} {_version(rollout.engine)}, {self.num_engines} engine(s) of tensor "
             f"parallel size {rollout.tensor_parallel_size}, "
             f"{choose_dtype(rollout.engine_dtype(recipe.model))}".replace("torch.", "")),
            ("algorithm", f"{recipe.algorithm.name}, routing replay {recipe.moe.routing_replay}"),
            *([("critic", f"{self.critic.path}: {self.critic.describe()}")] if self.critic else []),
            ("data", f"{recipe.data.path}: {len(self.prompts)} prompts, {_task(recipe)}"),
            ("a step", f"{rollout.prompts_per_step} prompts x {rollout.samples_per_prompt} samples "
             f"= {samples}{started}, up to {rollout.max_response_len} tokens each, "
             f"{recipe.train.num_steps_per_rollout} optimizer step(s)"),
            ("steps", f"{recipe.train.num_steps}{resumed}"),
            ("run folder", recipe.output_dir),
        ]  # fmt: skip


def check(recipe: Recipe, world: int, *, saved_steps: range | None = None) -> Plan:
    """Validate a recipe for `world` ranks. Raises InputError with the first thing that is wrong.
    `saved_steps`: those that `debug.load_rollouts` must have, by default all that are left."""
    dims = ParallelDims.create(recipe.parallel, world)
    folder = RunFolder(recipe.output_dir)
    model = HfModel.read(recipe.model.path)
    dims.check_model(model.sizes)
    with HfTensors(model) as tensors:
        check_names(model, tensors.names)
    choose_implementation(recipe.model.transformer_impl)
    _check_moe(recipe, model)
    reference = read_reference(recipe.algorithm, model)
    check_importance(recipe.algorithm)
    _check_rollout(recipe, dims, model)
    check_on_policy(recipe, dims, model)
    check_unfinished(recipe, max(1, dims.world // recipe.rollout.tensor_parallel_size))
    context_len = _context_len(recipe, model)
    algorithm = load_algorithm(recipe.algorithm.name)
    check_algorithm(recipe.algorithm)
    # Refuses the supervised loss.
    algorithm.advantages([torch.tensor([0.0, 1.0])], recipe.algorithm)
    critic = read_critic(recipe, traits(algorithm).needs_critic, model, dims)
    check_shaping(recipe)
    check_dynamic_sampling(recipe)
    _check_task(recipe)
    tokenizer = load_tokenizer(model)
    prompts = read_prompts(
        recipe.data.path,
        tokenizer,
        max_prompt_len=context_len - recipe.rollout.max_response_len,
        max_response_len=recipe.rollout.max_response_len,
        min_rows=recipe.rollout.prompts_per_step,
    )
    check_started(recipe.rollout, len(prompts))
    _check_prompts(recipe, prompts, tokenizer)
    demonstrations = _demonstrations(recipe, tokenizer, context_len)
    eval_sets = read_eval_sets(recipe, tokenizer, context_len)
    for each in eval_sets:
        _check_task(each.recipe)
        _check_prompts(each.recipe, each.prompts, tokenizer)
    folder.check(recipe)
    resume_step = _resume_step(folder)
    if recipe.debug.load_rollouts is not None:
        left = range(resume_step or 0, recipe.train.num_steps)
        check_saved_steps(recipe.debug.load_rollouts, saved_steps or left)
    return Plan(
        recipe, dims, model, reference, critic, algorithm, tokenizer, prompts, demonstrations,
        eval_sets, context_len, resume_step,
    )  # fmt: skip


def _task(recipe: Recipe) -> str:
    if recipe.environment is None:
        return f"reward {recipe.reward}"
    return f"environment {recipe.environment.name}, up to {recipe.environment.max_turns} turns"


def _check_task(recipe: Recipe) -> None:
    """Engine, and what scores its samples."""
    reward, environment = recipe.reward, recipe.environment
    if (reward is None) == (environment is None):
        given = "neither is given" if reward is None else "both are given"
        raise InputError(
            f"reward and environment: {given}, expected exactly one; an environment gives the rewards "
            "itself (reward=null leaves the recipe's out)"
        )
    if recipe.debug.load_rollouts is not None:
        return
    load_engine(recipe.rollout.engine)
    if recipe.rollout.engine == "sglang":  # of other engines only they know their arguments
        check_server_args(recipe.rollout.server_args)
    if environment is not None:
        resolve_environment(environment.name)
    elif reward is not None:
        resolve_reward(reward)


def _check_prompts(recipe: Recipe, prompts: list[Prompt], tokenizer: Any) -> None:
    """Whether they fit what they are given to."""
    is_conversation = recipe.environment is not None
    for prompt in prompts:
        (check_environment_columns if is_conversation else check_columns)(prompt)
    if is_conversation and any(isinstance(prompt.content, list) for prompt in prompts):
        ChatTurns(tokenizer).check()


def _resume_step(folder: RunFolder) -> int | None:
    """The newest checkpoint that is all there; the ranks share the hashing later, when they load it."""
    is_main = os.environ.get("RANK", "0") == "0"
    found = newest_good(
        candidates(folder.checkpoints),
        partial(damage, digests=False),
        console.warning if is_main else lambda text: None,
    )
    return None if found is None else step_of(found)


def _demonstrations(recipe: Recipe, tokenizer: Any, context_len: int) -> list[Demonstration]:
    if recipe.warm_start is None:
        return []
    path, batch_size = recipe.warm_start.path, recipe.warm_start.batch_size
    demonstrations = read_demonstrations(path, tokenizer, max_len=context_len)
    if len(demonstrations) < batch_size:
        raise InputError(
            f"warm_start.path {path} has {len(demonstrations)} rows, warm_start.batch_size is "
            f"{batch_size}; add rows or lower it"
        )
    return demonstrations


def load_tokenizer(model: HfModel) -> Any:
    """The tokenizer of the model folder. Raises InputError when it is missing or does not fit."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(model.path, local_files_only=True)
    except (OSError, ValueError) as error:
        first = str(error).strip().splitlines()[0]
        raise InputError(f"model.path {model.path}: no usable tokenizer ({first})") from None
    if len(tokenizer) > model.sizes.vocab_size:
        raise InputError(
            f"model.path {model.path}: the tokenizer has {len(tokenizer)} tokens, the model only "
            f"{model.sizes.vocab_size}"
        )
    return tokenizer


def _check_moe(recipe: Recipe, model: HfModel) -> None:
    if recipe.moe.routing_replay != "off" and not model.moe_layer_numbers:
        raise InputError(
            f"moe.routing_replay is {recipe.moe.routing_replay}, but {model.path} has no MoE layers; "
            "set it to off"
        )
    check_capture(recipe, model)
    _check_balancing(recipe.moe, model)


def _check_balancing(moe: MoeConfig, model: HfModel) -> None:
    kind, coeff = moe.load_balancing_type, moe.aux_loss_coeff
    if coeff and kind == "none":
        raise InputError(
            f"moe.aux_loss_coeff is {coeff}, but moe.load_balancing_type is none; choose a type, or "
            "set the coefficient to 0"
        )
    if not coeff and kind != "none":
        raise InputError(
            f"moe.load_balancing_type is {kind}, but moe.aux_loss_coeff is 0; give it a weight, or set "
            "the type to none"
        )
    wanted = {
        "aux_loss_coeff": coeff,
        "z_loss_coeff": moe.z_loss_coeff,
        "expert_bias_update_rate": moe.expert_bias_update_rate,
    }
    for name, value in wanted.items():
        if value and not model.moe_layer_numbers:
            raise InputError(
                f"moe.{name} is {value}, but {model.path} has no MoE layers; set it to 0"
            )
    settings = model.architecture.transformer_config(model.config)
    if moe.expert_bias_update_rate and not settings.get("moe_router_enable_expert_bias"):
        raise InputError(
            f"moe.expert_bias_update_rate is {moe.expert_bias_update_rate}, but the routers of "
            f"{model.architecture.model_type} have no expert bias; set it to 0, or balance with "
            "moe.load_balancing_type"
        )


def _check_rollout(recipe: Recipe, dims: ParallelDims, model: HfModel) -> None:
    rollout = recipe.rollout
    tp = rollout.tensor_parallel_size
    prompts, minis = rollout.prompts_per_step, recipe.train.num_steps_per_rollout
    heads = model.sizes.num_query_groups
    if dims.world % tp and not recipe.debug.load_rollouts:
        raise InputError(
            f"rollout.tensor_parallel_size: {dims.world} rank(s) are not divisible by {tp} "
            f"({dims.world} = {dims.world // tp} x {tp} + {dims.world % tp})"
        )
    if heads % tp:
        raise InputError(
            f"rollout.tensor_parallel_size: {heads} key/value heads are not divisible by {tp} "
            f"({heads} = {heads // tp} x {tp} + {heads % tp})"
        )
    if prompts % minis:
        raise InputError(
            f"rollout.prompts_per_step {prompts} is not divisible by train.num_steps_per_rollout "
            f"{minis} ({prompts} = {prompts // minis} x {minis} + {prompts % minis})"
        )
    if rollout.weight_sync == "distributed" and torch.cuda.is_available():
        raise InputError(
            "rollout.weight_sync=distributed: the engine is on the trainer's GPUs, and NCCL takes no "
            "two ranks on one; use tensor or disk"
        )
    local = int(os.environ.get("LOCAL_WORLD_SIZE", str(dims.world)))
    if local % tp and not recipe.debug.load_rollouts:
        raise InputError(
            f"rollout.tensor_parallel_size: an engine stays on one node, and {local} ranks of a node "
            f"are not divisible by {tp} ({local} = {local // tp} x {tp} + {local % tp})"
        )
    if rollout.min_response_len not in (0, rollout.max_response_len):
        raise InputError(
            f"rollout.min_response_len {rollout.min_response_len}: expected 0 or max_response_len "
            f"{rollout.max_response_len}; in between, the engine would forbid the end token, and its "
            "log-probs would be those of another distribution than the trainer's"
        )


def _context_len(recipe: Recipe, model: HfModel) -> int:
    asked = recipe.rollout.context_len or model.context_len
    if asked > model.context_len:
        raise InputError(
            f"rollout.context_len {asked} is above the model's max_position_embeddings "
            f"{model.context_len}"
        )
    if recipe.rollout.max_response_len >= asked:
        raise InputError(
            f"rollout.max_response_len {recipe.rollout.max_response_len} leaves no room for a prompt "
            f"in a context of {asked} tokens"
        )
    return asked


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "(not installed)"

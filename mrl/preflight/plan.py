"""The plan of a run: a checked recipe, with the models and data that the checks have read."""

from __future__ import annotations

import functools
import importlib.metadata
from dataclasses import dataclass
from typing import Any, Literal

import torch

from mrl.algorithms.base import Algorithm
from mrl.algorithms.describe import describe
from mrl.config import Recipe
from mrl.config.adapter import Adapter
from mrl.config.reward import describe_rewards
from mrl.data.eval_sets import EvalSet
from mrl.data.reader import SftExample, Source
from mrl.engines import engine_names
from mrl.planner.shape import read_shape
from mrl.preflight.engine_layout import EngineLayout
from mrl.preflight.prefixes import describe_prefixes
from mrl.preflight.roles import Roles
from mrl.preflight.threads import CpuThreads, choose_threads
from mrl.rewards.terms import terms_of
from mrl.run.history import Update
from mrl.types import Prompt
from parallel.dims import ParallelDims
from parallel.hf_config import HfModel
from parallel.implementation import choose_dtype, choose_implementation


@dataclass(frozen=True)
class Plan:
    """A checked recipe, with the models and data that the checks have read."""

    recipe: Recipe
    roles: Roles
    dims: ParallelDims
    """The parallel layout of the ranks that train."""
    model: HfModel
    adapter: Adapter | None
    """The adapter to train; None if all weights are trained."""
    reference: HfModel | None
    """The frozen reference model of the KL penalty; None if the recipe has no KL penalty."""
    critic: HfModel | None
    """The model from which the critic starts; None if the algorithm needs no critic."""
    algorithm: Algorithm
    tokenizer: Any
    sources: list[Source]
    """The training data, read and tokenized."""
    sft_examples: list[SftExample]
    """The examples for supervised fine-tuning; empty if the recipe has no `sft`."""
    eval_sets: list[EvalSet]
    context_len: int
    """Largest number of tokens in a sequence, prompt and response together."""
    resume_step: int | None
    """Number of steps done before this start, according to the checkpoint or snapshot from which
    the run continues; None for a new run. If a file of that checkpoint or snapshot turns out to be
    damaged, the run continues from an older checkpoint."""
    checkpoint_step: int | None
    """Number of steps done when the newest checkpoint was saved; None without a checkpoint."""
    update: Update
    """The changes that this start makes to the recipe if it continues a run."""

    @functools.cached_property
    def prompts(self) -> list[Prompt]:
        """The prompts of all sources, in the order of the data."""
        return [prompt for source in self.sources for prompt in source.prompts]

    @functools.cached_property
    def threads(self) -> CpuThreads:
        """The number of CPU threads of each trainer rank and engine."""
        return choose_threads(self.recipe, self.model.config["hidden_size"], self.roles.world)

    @property
    def engine_threads(self) -> int:
        """Number of threads of each engine rank on CPUs.

        It is 1 if an engine has several ranks, because such an engine binds each rank to one core.
        """
        return self.threads.number if self.recipe.rollout.tensor_parallel_size == 1 else 1

    @property
    def num_engines(self) -> int:
        return self.roles.num_engines(self.recipe.rollout)

    @property
    def engines(self) -> EngineLayout:
        return self.roles.engine_layout(self.recipe.rollout)

    def rows(self, *, elsewhere: bool = False) -> list[tuple[str, str]]:
        """Describe the run in (name, value) rows for the terminal.

        `elsewhere`: the run is for GPUs that this machine does not have.
        """
        recipe, model, rollout = self.recipe, self.model, self.recipe.rollout
        samples = rollout.prompts_per_step * rollout.samples_per_prompt
        more = rollout.num_started - rollout.prompts_per_step
        started = f" ({more} more prompts are started: {rollout.partial_rollouts})" if more else ""
        done = self.resume_step
        resumed = "" if done is None else f" ({done} are done; continues with step {done})"
        source = recipe.debug.load_rollouts
        return [
            ("model", f"{model.path}: {model.describe()}"),
            *([("lora", f"{self.adapter.describe()}{_begin(recipe)}")] if self.adapter else []),
            ("layout", self.dims.describe()),
            *([("roles", self.roles.describe())] if self.roles.num_rollout else []),
            ("trainer", f"megatron-core {_version('megatron-core')}, {_trainer(self, elsewhere)}"),
            ("rollout", f"saved: {source}" if source else
             f"{_engine_name(rollout.engine)}, {_engines(self)}, "
             f"{_dtype(rollout.engine_dtype(recipe.model), elsewhere)}"),
            *([] if elsewhere or torch.cuda.is_available() else [("threads", self.threads.describe())]),
            ("algorithm", f"{describe(recipe.algorithm)}, routing replay {recipe.moe.routing_replay}"),
            *([("critic", f"{self.critic.path}: {self.critic.describe()}")] if self.critic else []),
            *_data_rows(self),
            ("a step", f"{rollout.prompts_per_step} prompts x {rollout.samples_per_prompt} samples "
             f"= {samples}{started}, up to {rollout.max_response_len} tokens each, "
             f"{_updates(recipe)}"),
            *([] if recipe.train.share_prefixes == "off" else
              [("prefixes", f"shared {_prefixes(self, elsewhere)}")]),
            ("steps", f"{recipe.train.num_steps}{resumed}, {_passes(self)}"),
            ("run folder", recipe.output_dir),
        ]  # fmt: skip


def _begin(recipe: Recipe) -> str:
    """Name the adapter that training begins with; empty if it begins with random values."""
    path = recipe.lora.path if recipe.lora is not None else None
    return f"; begins with {path}" if path else ""


def _prefixes(plan: Plan, elsewhere: bool) -> str:
    shape = read_shape(plan.model.config, plan.model.architecture)
    return describe_prefixes(plan.recipe, plan.prompts, shape, elsewhere=elsewhere)


def _trainer(plan: Plan, elsewhere: bool) -> str:
    """Describe the implementation of the trainer's layers and their dtype."""
    config = plan.recipe.model
    if elsewhere:
        return f"{config.transformer_impl} layers, {_dtype(config.dtype, elsewhere)}"
    implementation, why = choose_implementation(config.transformer_impl)
    # In these two cases the preflight set `local` in the recipe.
    if plan.adapter is not None:
        why = "LoRA needs them"
    elif plan.model.architecture.needs_native:
        why = "this model needs them"
    return f"{implementation} layers ({why}), {_dtype(config.dtype, elsewhere)}"


def _dtype(asked: Literal["auto", "float32", "bfloat16"], elsewhere: bool) -> str:
    """Return the name of the dtype that `asked` means; `auto` is bfloat16 on GPUs, float32 on CPUs."""
    if elsewhere:
        return "bfloat16" if asked == "auto" else asked
    return str(choose_dtype(asked)).removeprefix("torch.")


def _updates(recipe: Recipe) -> str:
    steps, passes = recipe.train.num_steps_per_rollout, recipe.train.num_epochs_per_rollout
    of_muon = " of Muon" if recipe.optimizer.name == "muon" else ""
    each = f" in each of {passes} passes" if passes > 1 else ""
    return f"{steps} optimizer step(s){of_muon}{each}"


def _passes(plan: Plan) -> str:
    """Describe how often the run's steps go through all prompts (the number of epochs).

    Additional prompts of over-sampling and dynamic sampling are not counted.
    """
    rollout, total = plan.recipe.rollout, len(plan.prompts)
    epochs = plan.recipe.train.num_steps * rollout.prompts_per_step / total
    return f"about {epochs:.3g} epoch(s) of {total} prompts"


def _engines(plan: Plan) -> str:
    rollout = plan.recipe.rollout
    parts = [("expert parallel", rollout.expert_parallel_size)]
    parts.append(("DP attention", rollout.data_parallel_attention_size))
    sizes = "".join(f", {name} {size}" for name, size in parts if size > 1)
    return f"{plan.engines.describe()}{sizes}"


def _data_rows(plan: Plan) -> list[tuple[str, str]]:
    """Return (name, value) rows that describe the data.

    A single source has one row. If there are several sources, the first row describes all of them, and
    each source has another row of its own.
    """
    config, sources, task = plan.recipe.data, plan.sources, _task(plan.recipe)
    if len(sources) == 1:
        return [("data", f"{config.describe()}: {sources[0].describe()}, {task}")]
    rows = [("data", f"{len(sources)} sources, {len(plan.prompts)} prompts, {task}")]
    weights = sum(source.weight or 0.0 for source in sources)
    for source, given in zip(sources, config.all_sources, strict=True):
        share = f"{source.weight / weights:.0%} of a step: " if source.weight else ""
        reward = f", reward {describe_rewards(given.reward)}" if given.reward else ""
        rows.append((f"  {source.name}", f"{share}{source.describe()}{reward}"))
    return rows


def _task(recipe: Recipe) -> str:
    environment = recipe.environment
    if environment is None:
        return _rewards(recipe)
    name = environment.label if environment.is_agent else environment.name
    turns = f"environment {name}, up to {environment.max_turns} turns"
    return turns if environment.gives_rewards else f"{turns}, {_rewards(recipe)}"


def _rewards(recipe: Recipe) -> str:
    if recipe.reward is None:
        return "each source with its own reward"
    terms = terms_of(recipe.reward)
    if len(terms) == 1:
        return f"reward {terms[0].path}"
    return "rewards " + " + ".join(f"{term.weight:g} {term.name}" for term in terms)


def _engine_name(engine: str) -> str:
    """Return the engine's name, with its version if it is one of mrl's engines."""
    return f"{engine} {_version(engine)}" if engine in engine_names() else engine


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "(not installed)"

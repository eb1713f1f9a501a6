"""Rules that say which keys of a recipe may change during a run, and the comparison of two recipes.

`python -m benchmarks.changes_table` writes `RULES` into docs/checkpoints.md. A branch is a section
of the recipe, such as `rollout`, with all keys in it. The rule of a key is the rule that lists the
key itself. If no rule lists the key, it is the rule of the innermost branch that contains the key.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import yaml

from mrl.config.suggest import all_keys, suggest
from mrl.errors import InputError


class Kind(StrEnum):
    """The condition under which a start of a run may change a key of the recipe."""

    FREE = "free"
    """Any start may change the key."""
    ALLOW = "with --allow"
    """A start may change the key only with `--allow KEY`."""
    NEVER = "never"
    """No start may change the key, except before the run's first step."""


@dataclass(frozen=True)
class Rule:
    """A rule for some keys of the recipe, or for all keys in some branches."""

    kind: Kind
    what: str
    """A short description of what the keys have in common, for the table in docs/checkpoints.md."""
    keys: tuple[str, ...]
    by_contents: bool = False
    """Whether the values name files or folders whose contents are compared. A start may freely
    change such a value to another path with the same contents."""


RULES = (
    Rule(Kind.FREE, "how long the run is", ("train.num_steps",)),
    Rule(
        Kind.FREE,
        "the trainer's memory, threads and batching within a step",
        (
            *("train.micro_batch_tokens", "train.recompute", "train.logprob_chunk_tokens"),
            *("train.share_prefixes", "train.cpu_threads"),
            "optimizer.use_distributed_optimizer",
        ),
    ),
    Rule(
        Kind.FREE,
        "the engine's memory, arguments and traffic",
        (
            *("rollout.mem_fraction_static", "rollout.max_total_tokens", "rollout.server_args"),
            *("rollout.max_running_requests", "rollout.weight_bucket_mb", "rollout.weight_sync"),
            *("rollout.weight_encoding", "rollout.full_sync_every"),
        ),
    ),
    Rule(
        Kind.FREE,
        "layout",
        (
            *("parallel", "rollout.tensor_parallel_size", "rollout.expert_parallel_size"),
            *("rollout.data_parallel_attention_size", "rollout.placement", "rollout.num_ranks"),
        ),
    ),
    Rule(
        Kind.FREE,
        "time limits and workers",
        (
            *("rollout.start_timeout_s", "rollout.request_timeout_s", "rollout.stall_timeout_s"),
            *("rollout.max_restarts", "reward_timeout_s", "environment.time_limit_s"),
            *("environment.num_workers", "async.worker_timeout_s", "async.max_worker_restarts"),
            *("environment.episode_limit_s", "environment.num_agents"),
        ),
    ),
    Rule(
        Kind.FREE,
        "evaluation, diagnosis, checks, checkpoints, logging",
        (
            *(
                "eval",
                "diagnosis",
                "guards",
                "watch",
                "checkpoint",
                "logging",
                "profile",
                "debug.save_rollouts",
            ),
            *("rollout.canary_prompts", "rollout.canary_tolerance"),
        ),
    ),
    Rule(Kind.FREE, "the folder of the run itself, wherever it is", ("output_dir",)),
    Rule(
        Kind.FREE,
        "Megatron's options that only move work or memory",
        tuple(
            f"megatron.{name}"
            for name in (
                *("overlap_grad_reduce", "overlap_param_gather", "bucket_size"),
                *("pad_buckets_for_high_nccl_busbw", "deallocate_pipeline_outputs"),
                *("batch_p2p_sync", "recompute_granularity", "recompute_modules"),
                *("optimizer_cpu_offload", "optimizer_offload_fraction", "pin_cpu_grads"),
                *("overlap_cpu_optimizer_d2h_h2d", "fine_grained_activation_offloading"),
                *("offload_modules", "min_offloaded_tensor_size", "cpu_offloading"),
                *("cpu_offloading_num_layers", "cpu_offloading_activations"),
                *("cpu_offloading_double_buffering", "moe_deepep_num_sms"),
                "moe_hybridep_num_sms",
            )
        ),
    ),
    Rule(
        Kind.NEVER,
        "whether MTP layers are trained, which are then in the checkpoints, and their weight",
        ("train.mtp_loss_scaling_factor",),
    ),
    Rule(Kind.ALLOW, "the optimizer and its learning rate", ("optimizer", "critic")),
    Rule(Kind.NEVER, "Adam or Muon, whose state is in the checkpoints", ("optimizer.name",)),
    Rule(Kind.ALLOW, "optimizer steps in a rollout", ("train",)),
    Rule(Kind.ALLOW, "algorithm, clipping, KL, corrections", ("algorithm",)),
    Rule(Kind.ALLOW, "reference of the KL", ("algorithm.reference_path",), by_contents=True),
    Rule(Kind.ALLOW, "reward", ("reward",), by_contents=True),
    Rule(Kind.ALLOW, "environment", ("environment",)),
    Rule(Kind.ALLOW, "data; other rows begin at their first one", ("data",), by_contents=True),
    Rule(Kind.ALLOW, "sampling, and how many samples there are", ("rollout",)),
    Rule(Kind.ALLOW, "how far rollout runs ahead of training", ("async",)),
    Rule(Kind.ALLOW, "replay, load balancing and router", ("moe",)),
    Rule(Kind.ALLOW, "other options of Megatron", ("megatron",)),
    Rule(Kind.ALLOW, "how the trainer computes", ("model.transformer_impl",)),
    Rule(Kind.ALLOW, "how the model is mapped", ("model.architecture",), by_contents=True),
    Rule(Kind.ALLOW, "debugging", ("debug",)),
    Rule(Kind.NEVER, "the model", ("model.path", "critic.path"), by_contents=True),
    Rule(Kind.NEVER, "the dtype of weights and optimizer state", ("model.dtype",)),
    Rule(Kind.NEVER, "how the critic's value head began", ("critic.head_std",)),
    Rule(Kind.ALLOW, "how the engine is given an adapter", ("lora.rollout",)),
    Rule(Kind.NEVER, "the adapter: its rank, alpha, modules and how it began", ("lora",)),
    Rule(Kind.NEVER, "the adapter to begin with", ("lora.path",), by_contents=True),
    Rule(Kind.NEVER, "SFT, which is over when the first step begins", ("sft",), by_contents=True),
    Rule(Kind.NEVER, "the order of prompts and all random numbers", ("seed",)),
)
"""Rules for every key of the recipe. In addition, `algorithm.name` never changes between an algorithm
with a critic and an algorithm without, because checkpoints with a critic hold more state."""

_RULE_OF = {key: rule for rule in RULES for key in rule.keys}
WHY = {
    Kind.FREE: "may change freely",
    Kind.ALLOW: "changes only with --allow",
    Kind.NEVER: "never changes in a run",
}


NOT_GIVEN = "(not given)"
"""The value of a key that a recipe does not have, where keys are free, as in `megatron`."""
FEW = 3
"""If more keys than this have changed, the user probably meant another run in this folder, not this
one with other settings."""
OTHER_TASK = ("data", "reward")
"""If one of these has changed, the user probably meant another run, too."""


@dataclass(frozen=True)
class Change:
    """A key of the recipe whose value has changed, or which names files whose contents have changed."""

    key: str
    old: Any
    new: Any
    kind: Kind
    is_moved: bool = False
    """Whether only the path has changed, and the files at the new path have the same contents."""
    absent: str = ""
    """Which recipe does not have the key: `there` (the old one) or `now`; empty if both have it."""
    override: tuple[str, Any] | None = None
    """The key and value of an override that makes this change; None stands for `key` and `new`. An
    override cannot remove a key, so for a key that is absent now, it sets the innermost section or
    mapping around the key."""

    def __str__(self) -> str:
        if self.old == self.new:
            return f"{self.key} is {self.new!r}, whose contents have changed ({WHY[self.kind]})"
        old = NOT_GIVEN if self.absent == "there" else repr(self.old)
        new = NOT_GIVEN if self.absent == "now" else repr(self.new)
        return f"{self.key} is {old} there and {new} now ({WHY[self.kind]})"

    def as_override(self) -> str:
        """Return `key=value` with the new value, quoted for a shell."""
        key, value = self.override or (self.key, self.new)
        return shlex.quote(f"{key}={_yaml(value)}")


def rule_of(key: str) -> Rule:
    """Return the rule of a dotted key. Raises KeyError if the table has no rule for it."""
    name = key
    while name not in _RULE_OF:
        name, dot, _ = name.rpartition(".")
        if not dot:
            raise KeyError(f"{key}: add it to RULES in mrl/run/changes.py")
    return _RULE_OF[name]


def find_changes(
    old: Mapping[str, Any],
    new: Mapping[str, Any],
    old_contents: Mapping[str, str],
    new_contents: Mapping[str, str],
) -> list[Change]:
    """Return the changes between two recipes, each given as values by dotted key (see `flatten`).

    `old_contents` and `new_contents` hold, by key, the digests of the files that the key names
    (`mrl.run.contents`). If the old or the new digest of a key is missing, only the values of the
    key are compared.
    """
    found = []
    for key in sorted(old.keys() | new.keys()):
        # A section that is null has no keys below it. A free key without a value is not null.
        missing = None if key in all_keys() else NOT_GIVEN
        rule, pair = rule_of(key), (old.get(key, missing), new.get(key, missing))
        digests = old_contents.get(key), new_contents.get(key)
        is_known = rule.by_contents and None not in digests
        absent = "there" if key not in old else "now" if key not in new else ""
        if pair[0] == pair[1] and not (is_known and digests[0] != digests[1]):
            continue
        is_moved = is_known and digests[0] == digests[1]
        kind = Kind.FREE if is_moved else rule.kind
        override = _around(key, new) if absent == "now" else None
        found.append(Change(key, *pair, kind, is_moved, absent, override))
    return found


def _around(key: str, new: Mapping[str, Any]) -> tuple[str, Any]:
    """Return the innermost section or mapping around `key` that an override can set, and its value
    in the recipe `new`."""
    while key not in new and key not in all_keys():
        key = key.rpartition(".")[0]
    outer = key
    while outer and outer not in new:
        outer = outer.rpartition(".")[0]
    if outer:  # a section that is null
        return outer, new[outer]
    tree: dict[str, Any] = {}
    for inner, value in new.items():
        if inner.startswith(f"{key}."):
            *parents, leaf = inner.removeprefix(f"{key}.").split(".")
            place = tree
            for name in parents:
                place = place.setdefault(name, {})
            place[leaf] = value
    return key, tree


def check_allowed(changes: Sequence[Change], allowed: Sequence[str], run: str, what: str) -> None:
    """Raise InputError if a change is not permitted.

    Keys of the kind NEVER may not change, and keys of the kind ALLOW only if `allowed` names the key or
    a branch that contains it. The message begins with `what`, lists the changes, and shows the commands
    with which to continue. `run` is the run folder.
    """
    never = [change for change in changes if change.kind is Kind.NEVER]
    closed = [
        change
        for change in changes
        if change.kind is Kind.ALLOW and not any(is_in(change.key, name) for name in allowed)
    ]
    if not never and not closed:
        return
    refused = "; ".join(map(str, (*never, *closed)))
    if never:
        keep = _join(c.key for c in never)
        raise InputError(
            f"{what}: {refused}; keep {keep}, or start another run in a new output_dir"
        )
    overrides = dict.fromkeys(
        c.as_override() for c in changes if c.kind is not Kind.NEVER and c.key != "output_dir"
    )
    wanted = [change.key for change in changes if change.kind is Kind.ALLOW]
    do = " ".join([shlex.quote(run), *overrides])
    allow = f"mrl train {do} --allow {' '.join(wanted)}"
    branch = f"mrl branch {shlex.quote(run)} NEW_DIR {' '.join(overrides)}"
    is_other = len(closed) > FEW or any(is_in(c.key, n) for c in closed for n in OTHER_TASK)
    new = "start a new run in another output_dir, or " if is_other else ""
    then = f"continue it with: {allow} (or try it in a copy: {branch})"
    raise InputError(f"{what}: {refused}; {new}{then}")


def check_keys(allowed: Iterable[str]) -> None:
    """Raise InputError if a name after `--allow` is not a key or branch of a recipe.

    InputError is also raised if no key that the name covers may ever change (`Kind.NEVER`).
    """
    known = all_keys()
    leaves = {key for key in known if not any(k.startswith(f"{key}.") for k in known)}
    for name in allowed:
        # `megatron` and `rollout.server_args` contain names that Megatron and SGLang define.
        found = [k for k in known if is_in(k, name) or (k in leaves and is_in(name, k))]
        if not found:
            raise InputError(f"--allow {name}: there is no such key{suggest(name)}")
        if all(rule_of(key).kind is Kind.NEVER for key in found):
            raise InputError(
                f"--allow {name}: {name} {WHY[Kind.NEVER]}; start another run in a new output_dir"
            )


def is_in(key: str, branch: str) -> bool:
    """Return whether a dotted key is `branch` or inside it."""
    return key == branch or key.startswith(f"{branch}.")


def _join(keys: Iterable[str]) -> str:
    return " and ".join(keys)


def _yaml(value: Any) -> str:
    """Return a value as YAML in one line: a text without quotes where YAML reads it as that text."""
    if isinstance(value, str):
        with suppress(yaml.YAMLError, ValueError):
            if value and value == yaml.safe_load(value):
                return value
    return json.dumps(value)


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the values of a nested mapping by dotted key, such as `rollout.engine`."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat

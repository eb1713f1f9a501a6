"""Units of the metrics, for the axes of the charts. A test compares the units with docs/metrics.md."""

from __future__ import annotations

import re
from collections.abc import Iterable

UNITS = (
    ("step|service/[^/]+/sequence", "number"),
    ("weight_version|session/loaded_version", "version"),
    ("lr|.*/lr", "learning rate"),
    ("grad_norm|.*/grad_norm", "norm"),
    ("kl/coef", "factor"),
    ("eval/[^/]+/avg@.*|rewards?/.*(mean|std|penalty)|.*/rewards/.*/mean", "reward"),
    ("source/[^/]+/reward_(mean|std)|dynamic_sampling/reward_mean_drawn", "reward"),
    ("(dynamic_sampling|reward)/zero_signal.*|dynamic_sampling/missing_groups", "groups"),
    ("dynamic_sampling/rounds", "rounds"),
    (".*/(prompts_drawn|(dropped|backlog|deferred)_prompts)", "prompts"),
    (".*/(abstained|unscored|samples|resumed_samples|overlong_filtered)", "samples"),
    ("episode/num_turns", "turns"),
    (".*(clip_frac|_share|truncated|/pass@.*)|guard/clip_budget.*|mask/.*", "share"),
    ("routing/(disagreement|token_any_layer|(replay|captured)_coverage).*", "share"),
    ("rollout/off_policy_tokens|throughput/mfu", "share"),
    ("throughput/.*_per_(gpu_)?s", "tokens/s"),
    ("session/(replayed|native|ambiguous)_rows", "tokens"),
    ("tokens/.*|response_len/.*|.*/response_len(_max)?|episode/tool_tokens", "tokens"),
    ("memory/leak_bytes_per_cycle", "bytes a step"),
    (".*_bytes|routing/wire_bytes_per_token", "bytes"),
    ("time/.*_s|time/timestamp|service/.*_s", "s"),
    ("service/(phase|batch)_tenants", "tenants"),
    ("service/running_requests", "requests"),
    ("service/(engine_occupancy|kv_occupancy|kv_counted)", "share"),
    ("service/[^/]+/tokens", "tokens"),
    ("loss/mtp", "nats"),
    ("loss/.*|moe/(aux|z)_loss", "loss"),
    ("value/squared_error", "return²"),
    ("value/explained_variance", "at most 1"),
    ("value/(mean|return_mean|advantage_mean)", "return"),
    ("(ratio|importance|router_shift)/(mean|max)", "ratio"),
    ("mismatch/chi2", "number"),
    ("(mismatch|guard)/ess", "share"),
    ("entropy|kl/.*|nll/.*|mismatch/.*|.*/(logprob_abs_mean|k3)|guard/ratio_error.*", "nats"),
    ("rollout/canary_abs_mean", "nats"),
    ("rollout/sync_bytes", "bytes"),
    ("staleness/.*|async/(queue_age|versions_in_flight|engine_lag)", "versions"),
    ("async/lost_workers|rollout/sync_full_workers", "workers"),
    ("rollout/sync_resent_buckets", "buckets"),
    ("train/shared_tokens", "tokens"),
    ("async/engines", "engines"),
    ("async/(waiting_prompts|dropped/.*)", "prompts"),
    ("async/(leased_groups|queued_groups|duplicates|staleness/.*)", "groups"),
    ("async/(discarded|kept)_tokens", "tokens"),
    ("decompose/first_divergent_layer", "layer"),
    ("routing/margin.*", "router score"),
    ("routing/.*_rows", "rows"),
    ("moe/load_max.*", "1 to E"),
    ("moe/load_entropy.*", "0 to 1"),
    ("moe/dead_experts.*", "experts"),
    ("rollout/engine_restarts", "engines"),
    ("rollout/num_engines", "engines"),
    ("rollout/is_long_round", "0 or 1"),
    ("train/empty_mini_batches", "mini-batches"),
    ("(train|value)/nonfinite_steps|train/low_ess_steps", "steps"),
)
"""Pairs (pattern, unit). A metric has the unit of the first pattern that matches its complete
key."""
_UNITS = tuple((re.compile(pattern, re.DOTALL), unit) for pattern, unit in UNITS)


def unit_of(key: str) -> str:
    """Return the unit of a metric; `value` for a metric that mrl does not write."""
    return next((unit for pattern, unit in _UNITS if pattern.fullmatch(key)), "value")


def units_of(keys: Iterable[str]) -> dict[str, str]:
    """Return the units of metrics by their keys."""
    return {key: unit_of(key) for key in keys}

"""Evaluation on the rollout engines: several sets of prompts, with several samples per prompt.

The seed of a sample depends only on the recipe's seed, the prompt and the sample's index. So two
evaluations with the same recipe differ only in the weights.

Dimensions: n scored samples of a prompt, of which c pass.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

import torch

from mrl.algorithms.signal import part_means
from mrl.collect.task import Scored, share_scored
from mrl.data.completions import completions
from mrl.data.eval_sets import EvalSet
from mrl.exchange.sharing import gather_lines
from mrl.preflight import Plan
from mrl.run.folder import RunFolder, as_lines, parts_of_sample
from mrl.run.rollouts import is_held
from mrl.types import SampleGroup
from parallel.mesh import Mesh


def finish_evaluation(
    plan: Plan, mesh: Mesh, folder: RunFolder, version: int, scored: Sequence[Scored | None]
) -> dict[str, float]:
    """Return the metrics `eval/NAME/...` of each evaluation set NAME, on every rank. Rank 0 writes
    the metrics and the samples to the run folder. A collective.

    `version` is the version of the weights. `scored` has one entry for each set: this rank's
    results, or None if this rank has none. Raises RunFailed if more than 5% of the samples of a set
    could not be scored.
    """
    metrics: dict[str, float] = {}
    lines: list[bytes] = []
    for eval_set, of_set in zip(plan.eval_sets, scored, strict=True):
        groups = share_scored(of_set, eval_set.recipe, mesh)
        metrics |= eval_metrics(eval_set, groups)
        local = {i: group for i, group in enumerate(groups) if is_held(group)}
        texts = completions(list(local.values()), plan.tokenizer)
        parts = [_lines(eval_set, g, t) for g, t in zip(local.values(), texts, strict=True)]
        lines += gather_lines(dict(zip(local, parts, strict=True)), len(groups)) or []
    if mesh.rank == 0:
        folder.write_evaluation(version, metrics, lines)
    return metrics


def eval_metrics(eval_set: EvalSet, groups: Sequence[SampleGroup]) -> dict[str, float]:
    """Return the metrics of one evaluation set, computed from its scored `groups`.

    For `avg@k`, the rewards of each prompt's samples are averaged first, and then the averages of
    all prompts. `avg@k_stderr` is the standard error of this second average. `pass@k` is the mean
    of `pass_at_k` (arXiv 2107.03374 eq. 1, unbiased) over the prompts with at least k scored
    samples; a sample passes if its reward is at least the set's `pass_threshold`. `unscored` counts
    samples without a reward, which `avg@k` and `pass@k` leave out. `truncated` is the share of
    samples that reached the length limit.
    """
    prefix, k_max = f"eval/{eval_set.config.name}/", eval_set.config.samples_per_prompt
    scored = []
    for group in groups:
        assert group.rewards is not None
        scored.append([r for r in group.rewards.tolist() if not math.isnan(r)])
    means = [statistics.fmean(rewards) for rewards in scored if rewards]
    spread = statistics.stdev(means) if len(means) > 1 else math.nan
    samples = [sample for group in groups for sample in group.samples]
    metrics = {
        f"avg@{k_max}": statistics.fmean(means) if means else math.nan,
        f"avg@{k_max}_stderr": spread / math.sqrt(max(1, len(means))),
        "response_len": statistics.fmean(sample.num_generated for sample in samples),
        "truncated": sum(s.finish_reason == "length" for s in samples) / len(samples),
        "unscored": float(len(samples) - sum(map(len, scored))),
    }
    threshold = torch.tensor(eval_set.config.pass_threshold).item()  # in f32, as rewards are
    for k in _powers(k_max):
        each = [
            pass_at_k(len(rewards), sum(r >= threshold for r in rewards), k)
            for rewards in scored
            if len(rewards) >= k
        ]
        metrics[f"pass@{k}"] = statistics.fmean(each) if each else math.nan
    metrics |= part_means(groups)
    return {prefix + key: value for key, value in metrics.items()}


def pass_at_k(n: int, c: int, k: int) -> float:
    """Return `1 - C(n - c, k) / C(n, k)`: the probability that at least one of k samples passes, if
    they are drawn from n samples of which c pass."""
    return 1.0 - math.comb(n - c, k) / math.comb(n, k)


def _powers(k_max: int) -> list[int]:
    """Return the powers of 2 below `k_max`, and `k_max` itself."""
    powers = [1 << i for i in range(k_max.bit_length()) if 1 << i < k_max]
    return [*powers, k_max]


def _lines(eval_set: EvalSet, group: SampleGroup, texts: Sequence[str]) -> bytes:
    """Return a group's lines for `evals/step_*.jsonl`, one per sample; empty if it has no
    rewards."""
    if group.rewards is None:
        return b""
    rows = (
        {
            "set": eval_set.config.name,
            "prompt_id": group.prompt.prompt_id,
            "source": group.prompt.source,
            "prompt": group.prompt.content,
            "completion": text,
            "reward": reward,
            **parts_of_sample(group, index),
            "response_len": sample.num_generated,
            "finish_reason": sample.finish_reason,
        }
        for index, (sample, text, reward) in enumerate(
            zip(group.samples, texts, group.rewards.tolist(), strict=True)
        )
    )
    return b"".join(as_lines(rows))

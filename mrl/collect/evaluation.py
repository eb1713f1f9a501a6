"""Evaluation is done on the rollout engine: several sets of prompts, several samples a prompt.

Sampling seeds depend on the recipe's seed and the prompt alone, so two evaluations differ by the
weights and by nothing else.

n scored samples of a prompt, c of them pass.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

import torch

from mrl.algorithms.signal import part_means
from mrl.collect.base import Collector
from mrl.collect.scoring import Scoring
from mrl.collect.single_turn import start_groups
from mrl.collect.task import Scored, Task, make_task, share_scored
from mrl.data.completions import completions
from mrl.data.eval_sets import EvalSet
from mrl.exchange.sharing import gather_lines
from mrl.preflight import Plan
from mrl.rewards.budget import Budget
from mrl.run.folder import RunFolder, as_lines, parts_of_sample
from mrl.run.rollouts import is_held
from mrl.system.clock import Clock
from mrl.system.heartbeat import phase
from mrl.system.worker_user import WorkerUser
from mrl.types import SampleGroup
from parallel.mesh import Mesh
from parallel.policy import Policy


class EvalTasks:
    """Makes the tasks of one engine, one for each evaluation set, again and again."""

    def __init__(
        self,
        plan: Plan,
        engine_number: int,
        budget: Budget | None = None,
        user: WorkerUser | None = None,
    ) -> None:
        """`budget` and `user`: see `Scoring`."""
        self._plan, self._number, self._budget, self._user = plan, engine_number, budget, user
        self._scorings: dict[str, Scoring] = {}

    def begin(self) -> list[Task]:
        """Return new tasks, in the order of the sets."""
        return [self._task(each) for each in self._plan.eval_sets]

    def _task(self, eval_set: EvalSet) -> Task:
        name, recipe = eval_set.config.name, eval_set.recipe
        if name not in self._scorings:
            self._scorings[name] = Scoring(recipe, self._plan.tokenizer, self._budget, self._user)
        started = start_groups(eval_set.prompts, recipe.rollout.samples_per_prompt)
        local = started[self._number :: self._plan.num_engines]
        return make_task(
            recipe.rollout,
            self._scorings[name],
            local,
            [recipe.seed] * len(local),
            tokenizer=self._plan.tokenizer,
            context_len=self._plan.context_len,
            clock_name="eval",
            keeps_routes=False,
            template_kwargs=recipe.data.chat_template_kwargs,
        )

    def close(self) -> None:
        """Leave no process behind. Harmless when repeated."""
        for scoring in self._scorings.values():
            scoring.close()


class Evaluation:
    """Evaluates one version of the weights: run all `tasks` on the engine, then call `finish`."""

    def __init__(
        self,
        plan: Plan,
        mesh: Mesh,
        folder: RunFolder,
        version: int,
        scored: Sequence[Scored | None],
    ) -> None:
        """`scored` has what this rank gives to each set, None where that is nothing."""
        self._plan, self._mesh, self._folder = plan, mesh, folder
        self._version, self._scored = version, scored

    @property
    def tasks(self) -> list[Task]:
        """The tasks of this rank's engine; none where it leads none."""
        return [each for each in self._scored if isinstance(each, Task)]

    def finish(self) -> dict[str, float]:
        """Return `eval/NAME/...` on every rank; rank 0 writes the samples. A collective.

        Raises RunFailed where more than 5% of a set's rewards failed.
        """
        metrics: dict[str, float] = {}
        lines: list[bytes] = []
        for eval_set, scored in zip(self._plan.eval_sets, self._scored, strict=True):
            groups = share_scored(scored, eval_set.recipe, self._mesh)
            metrics |= eval_metrics(eval_set, groups)
            local = {i: group for i, group in enumerate(groups) if is_held(group)}
            texts = completions(list(local.values()), self._plan.tokenizer)
            parts = [_lines(eval_set, g, t) for g, t in zip(local.values(), texts, strict=True)]
            of_set = gather_lines(dict(zip(local, parts, strict=True)), len(groups))
            lines += of_set or []
        if self._mesh.rank == 0:
            self._folder.write_evaluation(self._version, metrics, lines)
        return metrics


def eval_metrics(eval_set: EvalSet, groups: Sequence[SampleGroup]) -> dict[str, float]:
    """Return the metrics of a set.

    `avg@k` is the mean over prompts of the mean reward of their samples, with its standard error.
    `pass@k` (arXiv 2107.03374 eq. 1, unbiased) is over the prompts with at least k scored samples.
    `unscored` counts samples without a reward, which are left out of both. `truncated` is the share of
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
    """Return 1 - C(n - c, k) / C(n, k), the chance that k of n samples hold one of the c that pass."""
    return 1.0 - math.comb(n - c, k) / math.comb(n, k)


def _powers(k_max: int) -> list[int]:
    """Return 1, 2, 4 ... and k_max itself."""
    powers = [1 << i for i in range(k_max.bit_length()) if 1 << i < k_max]
    return [*powers, k_max]


def _lines(eval_set: EvalSet, group: SampleGroup, texts: Sequence[str]) -> bytes:
    """Return a group's lines of `evals/step_*.jsonl`, one a sample; none where it has no rewards."""
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


@phase("evaluate")
def evaluate(policy: Policy, collector: Collector, version: int) -> dict[str, float]:
    """Return `eval/*` of the policy's weights on the recipe's evaluation sets. A collective."""
    clock = Clock()
    collector.begin_evaluation(version)
    while not collector.is_over:
        collector.sync(policy, version)
        collector.rollout(clock)
        collector.score(clock)
    return collector.evaluation

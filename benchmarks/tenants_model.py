"""This module computes what sharing a base model should bring at the article's sizes, with mrl's own
scheduler: `python -m benchmarks.tenants_model`. Nothing of it has run on GPUs.

The seed, "Sharing is Scaling: Efficient RL Fine-tuning with Multi-tenancy", trains Qwen3-4B with LoRA
on 32 prompts x 8 answers of up to 32k tokens a step, on nodes of 4 GH200. Its synchronous experiment
compares one tenant that has all GPUs for rollout and training in turn (`colocated`) with 2 and 3
tenants whose rollout has one half of the GPUs and whose training has the other (`split`). Its
asynchronous experiment compares tenants that are all split.

The simulation goes from event to event. An engine, one on each rollout GPU, decodes its batch token by
token in a time that a roofline gives. `Admission` decides what it starts, `TrainingQueue` whose turn it
is to be trained, and `Phase` who shares a phase (mrl/service/schedule.py). The figures of `Assumptions`
are all that goes in. None was fitted to the article's results.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import json
import math
import random
import statistics
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from benchmarks.tenants_engine import ASYNC, COLOCATED, SPLIT, Assumptions, Engine, Request
from mrl.service.schedule import Phase, TrainingQueue

SIZES = (4, 8, 16, 32)
"""GPUs: the first three are 1, 2 and 4 nodes of 4 (the article's), the last three 1, 2 and 4 of 8."""
ARTICLE = {
    SPLIT: "parity or less at few nodes, +45% at many",
    ASYNC: "0%, +20%, +48% at 1, 2, 4 nodes",
}
"""What the article reports of 2 or 3 tenants against one."""


@dataclass
class Tenant:
    """Holds the groups that one tenant has in flight and complete."""

    name: str
    lengths: random.Random
    flying: dict[int, list[int]] = field(default_factory=dict)
    complete: list[list[int]] = field(default_factory=list)
    """The lengths of the samples of each complete group that is not trained on."""
    num_groups: int = 0
    num_steps: int = 0


class Simulation:
    """Runs one arrangement of GPUs and tenants."""

    def __init__(
        self, mode: str, num_gpus: int, num_tenants: int, assumptions: Assumptions
    ) -> None:
        self.mode, self.num_gpus, self.a = mode, num_gpus, assumptions
        num = num_gpus if mode == COLOCATED else num_gpus // 2
        self.engines = [Engine(assumptions, mode) for _ in range(num)]
        self.num_trainers = num_gpus if mode == COLOCATED else num_gpus - num
        self.queue, self.phase = TrainingQueue(3600.0), Phase(num_tenants)
        self.tenants = {
            f"t{n}": Tenant(f"t{n}", random.Random(1000 * assumptions.seed + n))
            for n in range(num_tenants)
        }
        self.members: list[str] = []
        self.events: list[tuple[float, int, str, str]] = []
        self.numbers, self.deal = itertools.count(), itertools.count()
        self.now = 0.0
        self.ended: list[float] = []
        self.took = self.training_s = self.phase_end = self.longest_wait_s = 0.0
        for name in self.tenants:
            self.queue.join(name)
            if mode != COLOCATED:
                self.submit(name)
        self.decide()

    def at(self, seconds: float, what: str, tenant: str = "") -> None:
        heapq.heappush(self.events, (self.now + seconds, next(self.numbers), what, tenant))

    def submit(self, name: str) -> None:
        """Give the engines the requests of a tenant's next round, a group to an engine in turn."""
        tenant, a = self.tenants[name], self.a
        num = a.groups_a_step
        if self.mode == ASYNC:
            num = a.groups_async - len(tenant.flying) - len(tenant.complete)
        sigma = a.sigma * math.sqrt(0.5)
        for _ in range(num):
            engine = self.engines[next(self.deal) % len(self.engines)]
            engine.wait_until(self.now)
            tenant.num_groups += 1
            tenant.flying[tenant.num_groups] = []
            shared = math.log(a.median) + tenant.lengths.gauss(0, sigma)
            for _ in range(a.samples):
                length = min(a.longest, int(math.exp(shared + tenant.lengths.gauss(0, sigma))) + 1)
                line = engine.waiting.setdefault(name, deque())
                line.append(Request(name, tenant.num_groups, length))
        for engine in self.engines:
            engine.wait_until(self.now)
            engine.admit()

    def finish(self, request: Request) -> None:
        tenant = self.tenants[request.tenant]
        samples = tenant.flying[request.group]
        samples.append(request.length)
        if len(samples) == self.a.samples:
            tenant.complete.append(tenant.flying.pop(request.group))
            self.look(tenant)

    def look(self, tenant: Tenant) -> None:
        if len(tenant.complete) >= self.a.groups_a_step and self.mode != COLOCATED:
            self.queue.ready(tenant.name, self.now)

    def decide(self) -> None:
        """Start an update, or a phase, where one may start."""
        if self.queue.running is not None or any(each[2] == "phase" for each in self.events):
            return
        switch = 0.0
        if self.members:  # a phase is under way
            if any(self.tenants[name].flying for name in self.members):
                return
            for name in self.members:
                self.queue.ready(name, self.now)
            self.members, switch, self.phase_end = [], self.a.switch_s, self.now
        self.longest_wait_s = max([self.longest_wait_s, *self.queue.ages_s(self.now).values()])
        name = self.queue.take(self.now)
        if name is not None:
            tenant, num = self.tenants[name], self.a.groups_a_step
            lengths = [self.a.prompt_tokens + n for group in tenant.complete[:num] for n in group]
            del tenant.complete[:num]
            swap = self.a.swap_s if len(self.tenants) > 1 else 0.0
            self.took = swap + self.a.update_s(lengths, self.num_trainers)
            self.at(switch + self.took, "trained", name)
        elif self.mode == COLOCATED:
            self.at(self.a.switch_s + self.a.publish_s, "phase")

    def start_phase(self) -> None:
        self.training_s += self.now - self.phase_end
        each = self.engines[0].admission.tokens_each("t0", self.a.longest)
        in_turn = sorted(self.tenants.values(), key=lambda tenant: tenant.num_steps)
        num = self.a.groups_a_step * self.a.samples
        wanting = {tenant.name: num * each for tenant in in_turn}
        capacity = self.engines[0].capacity * len(self.engines)
        self.members = self.phase.start(capacity, wanting)
        for name in self.members:
            self.submit(name)

    def run(self, num_updates: int) -> None:
        """Go on until so many updates have ended."""
        while len(self.ended) < num_updates:
            self.next()

    def next(self) -> None:
        """Go to the next event."""
        times = [engine.next_time() for engine in self.engines]
        first = min(range(len(times)), key=times.__getitem__)
        if self.events and self.events[0][0] <= times[first]:
            before = self.now
            self.now, _, what, name = heapq.heappop(self.events)
            assert self.now >= before
            if what == "trained":
                self.trained(name)
            elif what == "publish":
                self.submit(name)
            else:
                self.start_phase()
        else:
            self.now = max(self.now, times[first])
            for request in self.engines[first].event():
                self.finish(request)
        self.decide()

    def trained(self, name: str) -> None:
        tenant = self.tenants[name]
        tenant.num_steps += 1
        self.ended.append(self.now)
        self.queue.done(self.took)
        self.look(tenant)
        if self.mode == SPLIT or (
            self.mode == ASYNC and tenant.num_steps % self.a.steps_a_sync == 0
        ):
            self.at(self.a.publish_s, "publish", name)


@dataclass(frozen=True)
class Row:
    """Holds the figures of one arrangement."""

    mode: str
    num_gpus: int
    num_tenants: int
    steps_per_gpu_hour: float
    step_s: float
    """The time from one update to the next, of whichever tenant."""
    batch: float
    """Requests that an engine decodes at a time, mean over the whole time."""
    occupancy: float
    """The share of the KV memory that is in use, mean over the time in which the GPU is an engine's."""
    idle: float
    """The share of that time in which the engine has nothing to decode."""
    retracted: int
    longest_wait_s: float


def simulate(
    mode: str, num_gpus: int, num_tenants: int, num_steps: int, assumptions: Assumptions
) -> Row:
    """Return the figures of `num_steps` updates of each tenant; two before them are left out."""
    run = Simulation(mode, num_gpus, num_tenants, assumptions)
    run.run(2 * num_tenants)
    start, before = run.ended[-1], [engine.totals() for engine in run.engines]
    switched = run.training_s
    run.run((2 + num_steps) * num_tenants)
    took = run.ended[-1] - start
    sums = [
        sum(engine.totals()[n] - old[n] for engine, old in zip(run.engines, before, strict=True))
        for n in range(4)
    ]
    batch_s, held_s, busy_s, retracted = sums
    away = run.training_s - switched if mode == COLOCATED else 0.0
    own = len(run.engines) * (took - away)
    return Row(
        mode, num_gpus, num_tenants,
        num_steps * num_tenants / (num_gpus * took / 3600), took / (num_steps * num_tenants),
        batch_s / (len(run.engines) * took), held_s / own / run.engines[0].capacity,
        max(0.0, 1 - busy_s / own), int(retracted), run.longest_wait_s,
    )  # fmt: skip


def tenants_model(
    sizes: Sequence[int] = SIZES,
    num_steps: int = 6,
    seeds: Sequence[int] = (0, 1, 2),
    assumptions: Assumptions | None = None,
) -> dict[str, Any]:
    """Return {"assumptions", "rows"}: all arrangements of 1, 2 and 3 tenants, means over the seeds.

    The `ratio` of a row (mean, `low` and `high` over the seeds) compares its steps per GPU-hour with
    those of one tenant on as many GPUs: an asynchronous one, or a synchronous one that is colocated.
    """
    assumptions = assumptions or Assumptions()
    seeded = [replace(assumptions, seed=seed) for seed in seeds]
    rows, one = [], {}
    for mode, size, tenants in itertools.product((COLOCATED, SPLIT, ASYNC), sizes, (1, 2, 3)):
        runs = [simulate(mode, size, tenants, num_steps, each) for each in seeded]
        rates = [run.steps_per_gpu_hour for run in runs]
        if tenants == 1:
            one[mode, size] = rates
        before = one[mode if mode == ASYNC else COLOCATED, size]
        ratios = [rate / old for rate, old in zip(rates, before, strict=True)]
        numbers = {
            name: statistics.mean(getattr(run, name) for run in runs)
            for name in Row.__dataclass_fields__
            if name != "mode"
        }
        ratio = {"ratio": statistics.mean(ratios), "low": min(ratios), "high": max(ratios)}
        rows.append({"mode": mode, **numbers, **ratio})
    sizes_of = {
        "kv_bytes_per_token": assumptions.kv_bytes,
        "kv_tokens": {mode: assumptions.capacity(mode) for mode in (COLOCATED, SPLIT)},
    }
    return {"assumptions": asdict(assumptions) | sizes_of, "rows": rows}


def table(figures: dict[str, Any]) -> str:
    """Return the figures as a Markdown table."""
    heads = (
        "arrangement", "GPUs", "tenants", "steps per GPU-hour", "against one", "range", "s per step",
        "requests an engine", "KV memory used", "engine idle", "retracted", "longest wait",
    )  # fmt: skip
    lines = ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
    for row in figures["rows"]:
        cells = (
            row["mode"], f"{row['num_gpus']}", f"{row['num_tenants']}",
            f"{row['steps_per_gpu_hour']:.2f}", f"{row['ratio'] - 1:+.0%}",
            f"{row['low'] - 1:+.0%} to {row['high'] - 1:+.0%}", f"{row['step_s']:.0f}",
            f"{row['batch']:.0f}", f"{row['occupancy']:.0%}", f"{row['idle']:.0%}",
            f"{row['retracted']:.0f}", f"{row['longest_wait_s']:.0f} s",
        )  # fmt: skip
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Print the assumptions and the table; return the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", type=int, nargs="+", default=list(SIZES), help="GPUs")
    parser.add_argument("--steps", type=int, default=6, help="updates of a tenant, after 2")
    parser.add_argument("--seeds", type=int, default=3, help="how many sets of answers")
    options = parser.parse_args(arguments)
    began = time.monotonic()
    figures = tenants_model(options.sizes, options.steps, range(options.seeds))
    print(json.dumps(figures["assumptions"], indent=1))
    print(table(figures))
    for mode, said in ARTICLE.items():
        print(f"the article reports for {mode}: {said}")
    print(f"simulated in {time.monotonic() - began:.0f} s; nothing of it has run on GPUs")
    return figures


if __name__ == "__main__":
    main()

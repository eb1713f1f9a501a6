"""This module runs one load of `benchmarks.tenants` on a service of its own, in a process of its own:
`python -m benchmarks.tenants_load MODEL FOLDER LOAD REPEATS STEPS`, which writes FOLDER/LOAD.json.

Service, engine and base stay for all variants: nothing of their start is in a figure, and a tenant that
nobody counts has used them before. A variant puts tenants into the queue and runs the service's own
rounds until they are done.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from mrl.config import ServiceConfig
from mrl.config.load import load_service
from mrl.preflight.roles import roles_of_engines
from mrl.service.build import service_dims, share_local
from mrl.service.colocated import ColocatedService
from mrl.service.local_engine import SharedLocalEngine
from mrl.service.registry import Registry
from mrl.service.shared import SharedResources
from mrl.system.files import write_whole
from parallel import prepare
from parallel.checkpoint.saved_tensors import SavedTensors
from parallel.mesh import destroy_mesh, init_mesh

ROOT = Path(__file__).parents[1]
SEEDS = {"ann": 1, "bob": 2, "cec": 3}
"""The tenants, which differ in their seeds: prompts, samples and initial adapters."""
PROMPT_TOKENS = 7
"""Tokens of a prompt of repeat.jsonl at most."""


@dataclass(frozen=True)
class Load:
    """A load says what a step of each tenant asks of the engine, and how large the engine is."""

    tells: str
    prompts: int
    samples: int
    min_response_len: int
    max_response_len: int
    max_running_requests: int
    max_total_tokens: int
    variants: dict[str, tuple[tuple[str, ...], ...]]
    """The tenants that are there at once, one group after another."""

    @property
    def room(self) -> int:
        """The requests that the engine can run at once if all grow to their full length."""
        each = PROMPT_TOKENS + self.max_response_len
        return min(self.max_running_requests, self.max_total_tokens // each)


_ALONE = tuple((name,) for name in SEEDS)
LOADS = {
    "long_tail": Load(
        "long-tailed answers: half below 12 tokens, some of up to 192", 8, 4, 0, 192, 64, 65536,
        {"one": _ALONE, "two": (("ann", "bob"),), "three": (tuple(SEEDS),)},
    ),
    "saturated": Load(
        "KV-saturated: 16 answers of 48 tokens, and a KV cache for 16", 4, 4, 48, 48, 64, 16 * 55,
        {"one": _ALONE, "three": (tuple(SEEDS),)},
    ),
}  # fmt: skip


def service_tree(load: Load, model: Path, folder: Path) -> dict[str, Any]:
    """Return the keys of a service with the engine of a load."""
    engine = {
        "batch_invariant": True,
        "context_len": PROMPT_TOKENS + load.max_response_len + 8,
        "max_total_tokens": load.max_total_tokens,
        "max_running_requests": load.max_running_requests,
    }
    return {
        "model": {"path": str(model), "dtype": "float32"},
        "rollout": engine,
        "lora": {"max_rank": 8},
        "output_dir": str(folder),
    }


def recipe_tree(load: Load, name: str, num_steps: int, output: Path) -> dict[str, Any]:
    """Return the keys of a tenant's recipe: those of launch/recipes/long_tail.yaml, and an adapter."""
    return {
        "train": {"num_steps": num_steps, "micro_batch_tokens": 4096},
        "optimizer": {"lr": 1e-3},
        "rollout": {
            "prompts_per_step": load.prompts, "samples_per_prompt": load.samples,
            "min_response_len": load.min_response_len, "max_response_len": load.max_response_len,
        },
        "algorithm": {"name": "gspo"},
        "lora": {"rank": 8, "alpha": 16},
        "moe": {"routing_replay": "r3"},
        "reward": "repeat",
        "data": {"path": str(ROOT / "launch/recipes/data/repeat.jsonl")},
        "checkpoint": {"save_every": 0},
        "seed": SEEDS[name],
        "output_dir": str(output),
    }  # fmt: skip


@dataclass
class Measured:
    """Holds a service and what it says of its rounds."""

    config: ServiceConfig
    load: Load
    registry: Registry
    shared: SharedResources[SharedLocalEngine]
    rounds: list[dict[str, float]] = field(default_factory=list)
    places: dict[str, dict[str, Any]] = field(default_factory=dict)
    """What the ledger said at the end of a round of three tenants, by kind."""

    def __post_init__(self) -> None:
        self.service = ColocatedService(self.shared, self.registry, self.rounds.append)

    def run(self, label: str, groups: Sequence[Sequence[str]], num_steps: int) -> dict[str, Any]:
        """Run these groups of tenants one after another; return what their rounds took, and digests of
        what came out of them."""
        self.rounds.clear()
        tenants = {}
        for group in groups:
            first = len(self.rounds)
            self._run_group(label, group, num_steps)
            seconds = sum(row["time/round_s"] for row in self.rounds[first:])
            for name in group:
                run = Path(self.registry.get(f"{name}-{label}").output_dir)
                tenants[name] = {"group_s": seconds, "digest": digest_of(run), **answers_of(run)}
        return {**self._figures(), "tenants": tenants, "num_steps": num_steps * len(tenants)}

    def _run_group(self, label: str, group: Sequence[str], num_steps: int) -> None:
        for name in group:
            output = self.registry.root / "runs" / f"{name}-{label}"
            self.registry.add(f"{name}-{label}", recipe_tree(self.load, name, num_steps, output))
        while self.service.follow_registry():
            self.service.run_turn()
            if len(group) == len(SEEDS) and len(self.shared.base.names) == len(group):
                found = self.shared.base.ledger.where()
                self.places = {kind: each._asdict() for kind, each in found.items()}
        for name in group:
            tenant = self.registry.get(f"{name}-{label}")
            if tenant.state != "done":
                raise RuntimeError(f"tenant {tenant.name} is {tenant.state}: {tenant.reason}")

    def _figures(self) -> dict[str, Any]:
        def total(key: str) -> float:
            return sum(row.get(f"time/{key}_s", 0.0) for row in self.rounds)

        def each(key: str) -> list[float]:
            return [v for row in self.rounds for k, v in row.items() if k.endswith(key)]

        whole = self.load.room
        request_s = sum(
            row.get("service/running_requests", 0.0) * row.get("time/rollout_s", 0.0)
            for row in self.rounds
        )
        return {
            "wall_s": total("round"),
            **{f"{key}_s": total(key) for key in ("rollout", "train", "sync", "score")},
            "running": request_s / total("rollout"),
            "occupancy": request_s / total("rollout") / whole,
            "occupancy_of_wall": request_s / total("round") / whole,
            "swap_s": each("/swap_s"),
            "swap_bytes": each("/swap_bytes"),
        }


def digest_of(run: Path) -> str:
    """Return a digest of a tenant's samples and of its final adapter and optimizer state."""
    digest = hashlib.sha256()
    for file in sorted((run / "rollouts").glob("*.jsonl")):
        digest.update(file.read_bytes())
    saved = SavedTensors(max((run / "checkpoints").glob("iter_*")))
    for key in sorted(k for k in saved if not k.startswith("random.")):
        digest.update(key.encode() + saved[key].contiguous().numpy().tobytes())
    return digest.hexdigest()


def answers_of(run: Path) -> dict[str, Any]:
    """Return the median, the mean and the longest of a tenant's answers in tokens."""
    lengths = sorted(
        json.loads(line)["response_len"]
        for file in (run / "rollouts").glob("*.jsonl")
        for line in file.read_text().splitlines()
    )
    return {
        "median_len": lengths[len(lengths) // 2],
        "mean_len": sum(lengths) / len(lengths),
        "max_len": lengths[-1],
    }


def measure(model: Path, folder: Path, name: str, repeats: int, num_steps: int) -> dict[str, Any]:
    """Run all variants of a load `repeats` times, each time in another order; return what each took."""
    load = LOADS[name]
    file = folder / f"{name}.yaml"
    write_whole(file, yaml.safe_dump(service_tree(load, model, folder / name)))
    config = load_service(file)
    prepare()
    found: list[dict[str, Any]] = []
    with Registry(config) as registry:
        roles = roles_of_engines(config.rollout_config(), 1)
        mesh = init_mesh(service_dims(config, roles), seed=0)
        shared = share_local(config, mesh)
        measured = Measured(config, load, registry, shared)
        shared.engines.start(shared.base)
        try:
            measured.run("warm", (("ann",),), 2)
            variants = list(load.variants)
            for repeat in range(repeats):
                turn = repeat % len(variants)
                for variant in variants[turn:] + variants[:turn]:
                    label = f"{variant}-{repeat}"
                    row = measured.run(label, load.variants[variant], num_steps)
                    found.append({"variant": variant, "repeat": repeat, **row})
                    print(f"{name} {label}: {row['wall_s']:.1f} s", flush=True)
        finally:
            measured.service.close()
    destroy_mesh()
    return {"runs": found, "places": measured.places}


if __name__ == "__main__":
    place = Path(sys.argv[2])
    result = measure(Path(sys.argv[1]), place, sys.argv[3], int(sys.argv[4]), int(sys.argv[5]))
    write_whole(place / f"{sys.argv[3]}.json", json.dumps(result))

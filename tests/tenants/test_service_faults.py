"""Faults planted in tenants of a service: each pauses its own tenant, and no other notices."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mrl.config.load import load_service
from mrl.errors import InputError
from mrl.service.registry import Registry
from mrl.toy_model import write_toy_model
from tests.tenants.serving import ROOT, Service, require_same_bits, rows_of

pytestmark = [pytest.mark.timeout(1200), pytest.mark.release]

REWARDS = {
    "raises": "raise ValueError('no reward today')",
    "hangs": "time.sleep(1000)",
    "nan": "return [float('nan')] * len(completions)",
    "slow": "time.sleep(6)\n    return [0.0] * len(completions)",
}
LOSSES = {
    "late": "if next(CALLS) == 2: raise ValueError('no loss today')",
    "loss": "logprobs = logprobs * float('inf')",
}
"""What a plug-in does before it computes the loss of GRPO; `late` in its third step."""


@pytest.fixture(scope="session")
def model(made_once: Callable[..., Path]) -> Path:
    return made_once("toy", write_toy_model)


def written(file: Path, text: str) -> Path:
    file.write_text(text)
    return file


def reward(folder: Path, name: str) -> str:
    text = f"import time\n\ndef reward(prompts, completions, **_):\n    {REWARDS[name]}\n"
    return f"{written(folder / f'{name}_reward.py', text)}:reward"


def algorithm(folder: Path, name: str, before: str) -> dict[str, Any]:
    text = (
        "import itertools, os\nfrom mrl.algorithms import grpo\nfrom mrl.algorithms.grpo import *\n"
        "READS, CLIP_LOW, CLIP_HIGH = grpo.READS, 0.2, 0.2\nCALLS = itertools.count()\n\n"
        f"def loss(logprobs, batch, config):\n    {before}\n"
        "    return grpo.loss(logprobs, batch, config)\n"
    )
    return {"algorithm": {"name": str(written(folder / f"{name}_algorithm.py", text))}}


def test_faults_of_some_tenants_change_nothing_of_another(model: Path, tmp_path: Path) -> None:
    service = Service(tmp_path / "service", model)
    rollout = {"batch_invariant": True, "context_len": 64, "max_total_tokens": 8192}
    lora = {"max_rank": 8, "experts": ["none", "per_expert"], "slots": 12}
    limit = {"tenants": {"max_disk_bytes": 50_000_000, "max_reward_s": 20}}
    service.write(rollout=rollout, lora=lora, **limit)
    good = ROOT / "launch/recipes/data/first_char.jsonl"
    gone = Path(shutil.copy(good, tmp_path / "gone.jsonl"))
    bad = written(tmp_path / "bad.jsonl", good.read_text() + '{"prompt": 7, "answer"\n')
    for name in REWARDS:
        limit_s = 1 if name == "hangs" else 10
        service.add(name, num_steps=4, reward=reward(tmp_path, name), reward_timeout_s=limit_s)
    quick = {"reward_timeout_s": 10}
    for name, text in LOSSES.items():
        guards = {"guards": {"max_nonfinite_steps": 1}}
        service.add(name, num_steps=4, **algorithm(tmp_path, name, text), **guards, **quick)
    service.add("explodes", num_steps=4, optimizer={"lr": 1e30, "clip_grad": 1e30}, **quick)
    service.add("disk", num_steps=4, data={"path": str(gone)}, **quick)
    with pytest.raises(InputError, match="max_rank"):
        service.add("large", num_steps=4, lora={"rank": 16, "alpha": 16}, **quick)
    service.add("data", num_steps=4, data={"path": str(bad)}, **quick)
    service.add("bob", num_steps=5, **quick)
    service.run_of("disk").mkdir(parents=True)
    with (service.run_of("disk") / "notes").open("wb") as file:
        file.truncate(60_000_000)
    service.run()
    states = service.states()
    print(json.dumps(states, indent=1))  # what each reason says
    assert states.pop("bob") == ("done", "")
    said = {
        "raises": "no reward today",
        "hangs": "no answer within 1 s",
        "slow": "max_reward_s",
        "nan": "nan, expected a finite number",
        "late": "no loss today",
        "loss": "not finite",
        "explodes": "not finite",
        "disk": "max_disk_bytes=50000000",
        "data": "bad.jsonl:",
    }
    assert states.keys() == said.keys()
    for name, (state, reason) in states.items():
        assert state == "paused", name
        assert said[name] in reason, name
        assert "\n" not in reason
    assert len(rows_of(service.run_of("late"))) == 2
    gone.unlink()
    (service.run_of("disk") / "notes").unlink()
    algorithm(tmp_path, "late", "pass")
    with Registry(load_service(service.config)) as registry:
        for name in ("disk", "late"):
            registry.move(name, "queued")
    service.run()
    states = service.states()
    assert states["disk"][0] == "paused"
    assert "gone.jsonl" in states["disk"][1]
    assert states["late"] == ("done", "")
    for name in ("bob", "late"):
        service.train_alone(name, tmp_path / name)
        require_same_bits(service.run_of(name), tmp_path / name)

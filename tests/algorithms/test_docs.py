"""docs/algorithms.md names every algorithm, and its example is one."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from mrl.algorithms import list_algorithms, load_algorithm
from mrl.config import AlgorithmConfig
from tests.algorithms.cases import draw, pack, sequence_weights

ROOT = Path(__file__).parents[2]
DOCS = (ROOT / "docs/algorithms.md").read_text()
README = (ROOT / "README.md").read_text()


def test_every_algorithm_has_its_row() -> None:
    rows = re.findall(r"^\| `(\w+)` \|", DOCS.split("## Aggregation")[0], re.MULTILINE)
    assert sorted(rows) == list_algorithms()


def example_of(text: str) -> str:
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    (found,) = [block for block in blocks if "sequence_weights =" in block]
    return found


@pytest.mark.parametrize("text", [DOCS, README], ids=["docs", "readme"])
def test_the_example_is_an_algorithm(text, tmp_path, monkeypatch) -> None:
    package = tmp_path / f"package_{len(text)}"
    package.mkdir()
    (package / "mine.py").write_text(example_of(text))
    monkeypatch.syspath_prepend(tmp_path)
    name = f"{package.name}.mine"
    algorithm, config = load_algorithm(name), AlgorithmConfig(name=name)
    rewards = torch.tensor([1.0, 0.0, torch.nan, 0.0])
    (got,) = algorithm.advantages([rewards], config)
    assert got[0] > 0
    assert got[2] == 0
    rng = torch.Generator().manual_seed(0)
    drawn = [draw(n, rng) for n in (5, 9)]
    logprobs, batch = pack("grpo", drawn, sequence_weights(name, drawn, config))
    loss = algorithm.loss(logprobs, batch, config).loss_sum
    assert bool(loss.isfinite())

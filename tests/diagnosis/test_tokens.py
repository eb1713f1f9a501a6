"""The file of a token record: every field comes back, and other files are refused in one line."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from mrl.diagnosis.tokens import TokenRecord, load_tokens, save_tokens
from mrl.errors import InputError


def make_record(*, routes: bool = True) -> TokenRecord:
    """Two samples, 3 and 2 tokens; 2 MoE layers of 4 experts, 2 a token."""
    generator = torch.Generator().manual_seed(0)

    def rows(*shape: int) -> torch.Tensor:
        return torch.rand(5, *shape, generator=generator)

    ids = torch.randint(-1, 4, (5, 2, 2), generator=generator).short()
    routed = {"expert_ids": ids, "native_ids": ids.flip(2), "margins": rows(2)} if routes else {}
    return TokenRecord(
        step=12,
        version=11,
        temperature=0.8,
        routing_replay="r3",
        layer_numbers=(2, 4) if routes else (),
        num_experts=4 if routes else 0,
        num_samples_of_step=9,
        sample_ids=torch.tensor([3, 8]),
        cu_seqlens=torch.tensor([0, 3, 5]),
        token_ids=torch.tensor([7, 1, 2, 7, 5]),
        loss_mask=torch.tensor([False, True, True, False, True]),
        rollout_logprobs=-rows(),
        old_logprobs=-rows(),
        entropy=rows(),
        advantages=rows(),
        weight_versions=torch.tensor([-1, 11, 11, -1, 10], dtype=torch.int32),
        pieces={7: "</s>", 1: "a", 2: " \n", 5: "é"},
        **routed,
    )


@pytest.mark.parametrize("routes", [True, False])
def test_a_record_comes_back(routes: bool, tmp_path: Path) -> None:
    record = make_record(routes=routes)
    save_tokens(tmp_path / "step.safetensors", record)
    assert [f.name for f in tmp_path.iterdir()] == ["step.safetensors"]
    loaded = load_tokens(tmp_path / "step.safetensors")
    for field in dataclasses.fields(TokenRecord):
        ours, theirs = getattr(loaded, field.name), getattr(record, field.name)
        if isinstance(theirs, torch.Tensor):
            assert ours.dtype == theirs.dtype
            assert torch.equal(ours, theirs)
        else:
            assert ours == theirs
    assert loaded.num_samples == 2
    assert loaded.num_tokens == 5
    assert loaded.token_ids[loaded.sample(1)].tolist() == [7, 5]


def test_other_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    with pytest.raises(InputError, match="No such file"):
        load_tokens(path)
    path.write_bytes(b"no")
    with pytest.raises(InputError, match="not a safetensors file"):
        load_tokens(path)
    save_file({"a": torch.zeros(1)}, path, {"format": "mrl-rollouts-2"})
    with pytest.raises(InputError, match="expected 'mrl-tokens-1'"):
        load_tokens(path)
    save_file({"token_ids": torch.zeros(1)}, path, {"format": "mrl-tokens-1", "record": "{}"})
    with pytest.raises(InputError, match="lacks advantages"):
        load_tokens(path)


@pytest.mark.parametrize(("tensor", "number", "word"),
                         [("later", None, "has later, which this version"),
                         (None, "beta", "has beta, which this version"),
                         (None, None, "lacks temperature")])  # fmt: skip
def test_a_record_of_another_version_is_refused_in_a_line(
    tensor: str | None, number: str | None, word: str, tmp_path: Path
) -> None:
    path = tmp_path / "step.safetensors"
    save_tokens(path, make_record(routes=False))
    with safe_open(path, framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        plain = json.loads(file.metadata()["record"])
    if tensor:
        tensors[tensor] = torch.zeros(1)
    elif number:
        plain[number] = 1.0
    else:
        del plain["temperature"]
    save_file(tensors, path, {"format": "mrl-tokens-1", "record": json.dumps(plain)})
    with pytest.raises(InputError, match=word):
        load_tokens(path)

"""Round trips of rollouts through bytes and files, bit for bit."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from mrl.errors import InputError
from mrl.rollout.saved import decode_groups, encode_groups, load_groups, save_groups
from mrl.types import Prompt, RoutingTrace, Sample, SampleGroup, VersionSpan


def make_sample(group_id: int, num_tokens: int, *, wide: bool = False, routed: bool = True):
    trace = RoutingTrace(
        expert_ids=torch.stack([torch.randperm(300 if wide else 8)[:2] for _ in range(3)])
        .expand(num_tokens - 1, 3, 2)
        .to(torch.uint16 if wide else torch.uint8),
        layer_numbers=(1, 3, 4),
        num_experts=300 if wide else 8,
        row_versions=(VersionSpan(7, 0, 1), VersionSpan(8, 1, num_tokens - 1)),
        num_cached_rows=1,
    )
    return Sample(
        group_id=group_id,
        token_ids=torch.randint(0, 100, (num_tokens,)),
        prompt_len=3,
        loss_mask=torch.arange(num_tokens) >= 3,
        rollout_logprobs=-torch.rand(num_tokens),
        weight_versions=(VersionSpan(7, 3, 5), VersionSpan(8, 5, num_tokens)),
        finish_reason="stop",
        routing=trace if routed else None,
    )


def make_groups(*, wide: bool) -> list[SampleGroup]:
    chat = [{"role": "user", "content": "é\n\u2028"}]
    prompts = [
        Prompt("a", torch.tensor([1, 2, 3]), chat, {"answer": 3, "info": {"x": [1.5]}}, "f:1"),
        Prompt("b", torch.tensor([4, 5, 6]), "text", {}, "f:2"),
    ]
    first = [make_sample(4, 9, wide=wide), make_sample(4, 6, routed=False)]
    nan = torch.tensor([0.25, float("nan")])
    return [
        SampleGroup(prompts[0], first, rewards=nan, advantages=torch.tensor([1.0, 0.0])),
        SampleGroup(prompts[1], [make_sample(5, 4, wide=wide)]),
        SampleGroup(prompts[1], []),
    ]


def assert_equal(left: object, right: object) -> None:
    """Equal in every field, tensors in type and bits."""
    assert type(left) is type(right)
    if isinstance(left, Tensor):
        assert left.dtype == right.dtype
        assert left.shape == right.shape
        assert left.contiguous().numpy().tobytes() == right.contiguous().numpy().tobytes()
    elif dataclasses.is_dataclass(left):
        for field in dataclasses.fields(left):
            assert_equal(getattr(left, field.name), getattr(right, field.name))
    elif isinstance(left, list | tuple):
        assert len(left) == len(right)
        for a, b in zip(left, right, strict=True):
            assert_equal(a, b)
    else:
        assert left == right


@pytest.mark.parametrize("wide", [False, True])
def test_round_trip(tmp_path, wide):
    groups = make_groups(wide=wide)
    assert_equal(decode_groups(encode_groups(groups)), groups)
    save_groups(tmp_path / "step.safetensors", groups)
    assert_equal(load_groups(tmp_path / "step.safetensors"), groups)
    assert [file.name for file in tmp_path.iterdir()] == ["step.safetensors"]


def test_no_groups():
    assert decode_groups(encode_groups([])) == []


def test_foreign_and_damaged_files(tmp_path):
    from safetensors.torch import save

    path = tmp_path / "x"
    for data, message in (
        (b"", "not a safetensors blob"),
        (b"\x80\x04pickle", "not a safetensors blob"),
        (encode_groups(make_groups(wide=False))[:-1], "not a safetensors blob"),
        (save({"a": torch.zeros(1)}), "format is None, expected 'mrl-rollouts-2'"),
    ):
        path.write_bytes(data)
        with pytest.raises(InputError, match=message):
            load_groups(path)
    with pytest.raises(InputError, match="No such file"):
        load_groups(tmp_path / "absent")


def test_mixed_models_are_refused():
    groups = make_groups(wide=False)
    groups[1] = make_groups(wide=True)[1]
    with pytest.raises(ValueError, match="one shape of routes"):
        encode_groups(groups)

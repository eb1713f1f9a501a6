"""Round trips of rollouts through bytes and files, bit for bit."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from mrl.errors import InputError
from mrl.run.rollouts import (
    decode_groups,
    encode_groups,
    is_held,
    load_groups,
    outline,
    save_groups,
)
from mrl.sampling_mask import SamplingMask
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
        expert_weights=torch.rand(num_tokens - 1, 3, 2) if wide else None,
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
        turn_rewards=((5, 1 / 3), (num_tokens, -2.0)) if wide else (),
        sampling_mask=SamplingMask.of([[], [], [], *[range(i, 9) for i in range(num_tokens - 3)]])
        if wide and routed
        else None,
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


def test_without_routes_everything_but_the_ids_comes_back():
    groups = make_groups(wide=True)
    data = encode_groups(groups, with_routes=False)
    num_ids = sum(
        s.routing.expert_ids.numel() for g in groups for s in g.samples if s.routing is not None
    )
    assert len(data) <= len(encode_groups(groups)) - 2 * num_ids
    bare = decode_groups(data)
    with pytest.raises(ValueError, match="another rank holds some"):
        encode_groups(bare)
    for group, whole in zip(bare, groups, strict=True):
        for i, (sample, full) in enumerate(zip(group.samples, whole.samples, strict=True)):
            if full.routing is None:
                continue
            assert sample.routing.expert_ids.is_meta
            assert sample.routing.expert_ids.shape == full.routing.expert_ids.shape
            assert sample.routing.expert_ids.dtype == full.routing.expert_ids.dtype
            group.samples[i] = dataclasses.replace(sample, routing=full.routing)
            assert sample.routing.expert_weights.is_meta
            trace = dataclasses.replace(
                sample.routing,
                expert_ids=full.routing.expert_ids,
                expert_weights=full.routing.expert_weights,
            )
            assert_equal(trace, full.routing)
    assert_equal(bare, groups)


def test_outlines_hold_all_but_the_ids_and_log_probs():
    """A mask that is not all that the policy chose travels; every other one is made anew."""
    groups = make_groups(wide=True)
    masked = groups[0].samples[1]
    groups[0].samples[1] = dataclasses.replace(masked, loss_mask=torch.zeros(6, dtype=torch.bool))
    outlines = [outline(group) for group in groups]
    assert_equal(
        [g.samples[0].loss_mask for g in outlines[:2]], [g.samples[0].loss_mask for g in groups[:2]]
    )
    data = encode_groups(groups, with_routes=False, with_tokens=False)
    header = int.from_bytes(data[:8], "little")
    # prompts of 3 i64, two f32 rewards and two advantages, the one mask
    assert len(data) - 8 - header == 3 * 3 * 8 + 2 * 4 + 2 * 4 + 6
    for made in (
        decode_groups(data),
        decode_groups(encode_groups(outlines, with_routes=False, with_tokens=False)),
    ):
        assert [is_held(group) for group in made] == [False, False, True]  # the last has no samples
        for group, expected in zip(made, outlines, strict=True):
            assert_equal(described(group), described(expected))


def described(group: SampleGroup) -> SampleGroup:
    """Put shapes in place of tensors on the meta device."""

    def of(record):
        tensors = {
            field.name: tuple(value.shape)
            for field in dataclasses.fields(record)
            if isinstance(value := getattr(record, field.name), Tensor) and value.is_meta
        }
        for name, shape in tensors.items():
            object.__setattr__(record, name, shape)
        return record

    for sample in group.samples:
        for record in (sample.routing, sample.sampling_mask):
            if record is not None:
                of(record)
        of(sample)
    return group


@pytest.mark.parametrize("with_routes", [True, False])
def test_unfinished_samples(with_routes):
    """What a partial rollout leaves: no generated token, no routes, a version that changed."""
    cut = dataclasses.replace(make_sample(4, 9), finish_reason="abort")
    nothing = dataclasses.replace(
        make_sample(4, 3, routed=False),
        loss_mask=torch.zeros(3, dtype=torch.bool),
        weight_versions=(),
        finish_reason="abort",
    )
    groups = [SampleGroup(make_groups(wide=False)[0].prompt, [nothing, cut])]
    (back,) = decode_groups(encode_groups(groups, with_routes=with_routes))
    assert_equal(back.samples[0], nothing)
    if with_routes:
        assert_equal(back.samples[1], cut)
    assert [sample.finish_reason for sample in back.samples] == ["abort", "abort"]
    assert back.rewards is None


def test_no_groups():
    assert decode_groups(encode_groups([])) == []


def test_a_sample_without_a_prompt_is_refused(tmp_path):
    path = tmp_path / "x"
    data = encode_groups(make_groups(wide=False))
    for wrong in (b"0", b"9" * 4):
        old = b'\\"prompt_len\\": 3'
        new = b'\\"prompt_len\\":' + wrong.rjust(len(old) - len(b'\\"prompt_len\\":'))
        assert data.count(old) > 0
        path.write_bytes(data.replace(old, new) if len(new) == len(old) else longer(data, old, new))
        with pytest.raises(InputError, match=f"a prompt of {wrong.decode()} of"):
            load_groups(path)


def longer(data, old, new):
    """The file with a longer header, whose size it begins with."""
    size = int.from_bytes(data[:8], "little")
    header = data[8 : 8 + size].replace(old, new)
    return len(header).to_bytes(8, "little") + header + data[8 + size :]


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


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b'\\"prompt_id\\"', b'\\"other_id\\"'),  # a missing key
        (b'\\"layer_numbers\\": [', b'\\"layer_numbers\\": 5, \\"x\\": ['),  # of another type
        (b'\\"prompt_len\\": 3', b'\\"prompt_len\\": []'),
        (b'\\"weight_versions\\": [[', b'\\"weight_versions\\": [[7, 7, 7, '),
        (b'\\"groups\\": [', b'\\"groups\\": [3, '),
        (b'"record"', b'"absent"'),
    ],
)
def test_a_damaged_record_is_refused(tmp_path, old, new):
    data = encode_groups(make_groups(wide=False))
    damaged = longer(data, old, new)
    assert damaged != data
    with pytest.raises(ValueError, match="not what save_groups writes"):
        decode_groups(damaged)
    (tmp_path / "x").write_bytes(damaged)
    with pytest.raises(InputError, match="x: not what save_groups writes"):
        load_groups(tmp_path / "x")


def test_mixed_models_are_refused():
    groups = make_groups(wide=False)
    groups[1] = make_groups(wide=True)[1]
    with pytest.raises(ValueError, match="one shape of routes"):
        encode_groups(groups)

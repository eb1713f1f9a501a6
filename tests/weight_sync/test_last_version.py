"""Single deltas: their checksum, and the version that a trainer rank keeps to make them."""

from __future__ import annotations

import pytest
import torch

from mrl.weight_sync.delta import LastVersion, Traffic, apply_delta
from tests.weight_sync.test_deltas import one_bucket


@pytest.mark.parametrize("place", [0, 8, -1])
def test_a_delta_that_was_damaged_on_its_way_is_refused_by_its_checksum(place: int) -> None:
    """In its counts, its values or its positions; before anything is written."""
    last, traffic = LastVersion(), Traffic()
    versions = [one_bucket(number, torch.arange(500.0) + number // 2) for number in (0, 3)]
    versions[1].tensors[0][1][7:] -= 1.0
    for version, bucket in enumerate(versions):
        last.begin(version)
        delta = last.replace(bucket, traffic, wants_delta=version > 0)
        last.finish()
    assert delta is not None
    flat = versions[0].tensors[0][1].view(torch.uint8)
    before, header = flat.clone(), delta.header()
    delta.payload[place] ^= 8
    with pytest.raises(ValueError, match="delta: got checksum"):
        apply_delta(flat, header, delta.payload, base=0, bucket=1)
    assert torch.equal(flat, before)
    delta.payload[place] ^= 8
    apply_delta(flat, header, delta.payload, base=0, bucket=1)
    assert torch.equal(flat.view(torch.float32), versions[1].tensors[0][1])


def test_a_version_whose_export_ended_in_an_error_is_no_base() -> None:
    """Its first buckets are those of the new version, and the others those of the old one."""
    last, traffic = LastVersion(), Traffic()
    last.begin(0)
    last.replace(one_bucket(0, torch.ones(500)), traffic, wants_delta=False)
    last.finish()
    assert last.version == 0
    last.begin(1)
    assert last.replace(one_bucket(1, torch.ones(500)), traffic, wants_delta=True) is not None
    assert last.version is None
    last.begin(2)
    assert last.replace(one_bucket(2, torch.ones(500)), traffic, wants_delta=True) is None
    last.finish()
    last.begin(3)
    assert last.replace(one_bucket(3, torch.ones(500)), traffic, wants_delta=True) is not None

"""Tensors out of a checkpoint one by one, each at a cost that does not grow with their number."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from parallel.checkpoint.saved_tensors import SavedTensors


@pytest.mark.filterwarnings("ignore:torch.distributed is")
def test_torch_is_shown_only_the_tensor_that_is_read(tmp_path: Path) -> None:
    tensors = {f"model.layers.{n}.weight": torch.full((n + 1, 2), float(n)) for n in range(7)}
    dcp.save(dict(tensors), checkpoint_id=tmp_path, no_dist=True)
    torch.save({}, tmp_path / "common.pt")
    saved = SavedTensors(tmp_path)
    assert set(saved) == tensors.keys()
    for key in [*tensors, *reversed(tensors)]:
        assert torch.equal(saved[key], tensors[key])
        assert saved.shape(key) == tuple(tensors[key].shape)
        assert list(saved._reader.read_metadata().state_dict_metadata) == [key]
    with pytest.raises(KeyError, match="other"):
        saved["model.other"]

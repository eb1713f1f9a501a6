"""State below fp32, against a double of TransformerEngine's FusedAdam with its three methods."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from parallel.optimizer import scaled_state


class FusedAdamDouble:
    """How fused_adam.py of TransformerEngine 2.x keeps state: bf16 as it is, fp16 with a scale by the
    largest value, and of fp32 main parameters the 16 bits that the bf16 weight lacks."""

    def __init__(self, remainders: bool, main: torch.dtype, moment: torch.dtype) -> None:
        self.master_weights = True
        self.store_param_remainders = remainders
        self._dtypes = {"exp_avg": moment, "exp_avg_sq": moment, "master_param": main}
        self._scales: dict[str, Tensor] = {}
        self.state: dict[Tensor, dict[str, Tensor]] = {}

    def initialize_state(self, weight: Tensor, remainders: bool) -> None:
        for name, dtype in self._dtypes.items():
            kept = torch.int16 if remainders and name == "master_param" else dtype
            self.state[weight][name] = torch.zeros(weight.shape, dtype=kept)
            self._scales[name] = torch.ones(())
        if not remainders:
            self.set_scaled_state(weight, "master_param", weight.detach().float())

    def get_unscaled_state(self, weight: Tensor, name: str) -> Tensor:
        value = self.state[weight][name]
        return value.float() * self._scales[name] if value.dtype == torch.float16 else value.float()

    def set_scaled_state(self, weight: Tensor, name: str, value: Tensor) -> None:
        kept = self.state[weight][name]
        assert value.dtype == (torch.int16 if kept.dtype == torch.int16 else torch.float32)
        if kept.dtype == torch.float16:
            self._scales[name] = value.abs().max() / (torch.finfo(torch.float16).max / 2)
            value = value / self._scales[name].clamp(min=1e-30)
        kept.copy_(value)


def adam_with(weight: Tensor, **kinds: Any) -> FusedAdamDouble:
    adam = FusedAdamDouble(**kinds)
    adam.state[weight] = {}
    return adam


def test_remainders_join_and_split_to_the_bit() -> None:
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(-(2**31), 2**31, (100_000,), generator=generator).to(torch.int32)
    values = bits.view(torch.float32)
    values = values[values.isfinite() & (values.abs() < 3e38)]
    weight, low = scaled_state.split_remainder(values)
    assert torch.equal(scaled_state.join_remainder(weight, low), values)
    # The weight is the nearest bf16: at most half a unit in the last place away.
    nearest = values.to(torch.bfloat16)
    assert (weight.view(torch.int16) - nearest.view(torch.int16)).abs().max() <= 1
    assert (weight != nearest).float().mean() < 1e-3  # ties, which torch rounds to even
    exact = torch.tensor([1.0, -2.5, 0.0])
    assert torch.equal(scaled_state.split_remainder(exact)[1], torch.zeros(3, dtype=torch.int16))


@pytest.mark.parametrize(
    ("kinds", "tolerance"),
    [
        ({"remainders": True, "main": torch.float32, "moment": torch.bfloat16}, 0.0),
        ({"remainders": False, "main": torch.float32, "moment": torch.float32}, 0.0),
        ({"remainders": False, "main": torch.float16, "moment": torch.float16}, 1e-3),
    ],
    ids=["remainders and bf16", "fp32", "fp16"],
)
def test_state_is_read_as_fp32_and_put_back(kinds: dict[str, Any], tolerance: float) -> None:
    generator = torch.Generator().manual_seed(1)
    values = {name: torch.randn(64, generator=generator) for name in scaled_state.NAMES}
    if kinds["moment"] == torch.bfloat16:
        values |= {n: values[n].to(torch.bfloat16).float() for n in ("exp_avg", "exp_avg_sq")}
    weight = torch.zeros(64, dtype=torch.bfloat16)
    adam = adam_with(weight, **kinds)
    assert scaled_state.is_kept_by(adam)
    tensors, put_back = scaled_state.read(adam, weight)
    assert all(tensor.dtype == torch.float32 for tensor in tensors.values())
    for name, tensor in tensors.items():
        tensor.copy_(values[name])
    put_back()
    again, _ = scaled_state.read(adam, weight)
    for name, tensor in again.items():
        torch.testing.assert_close(tensor, values[name], rtol=tolerance, atol=tolerance)
    if kinds["remainders"]:
        torch.testing.assert_close(weight.float(), values["main"], rtol=2**-8, atol=0.0)


def test_fresh_state_has_the_weights_as_main_parameters() -> None:
    weight = torch.randn(8).to(torch.bfloat16)
    for remainders in (True, False):
        kinds = {"remainders": remainders, "main": torch.float32, "moment": torch.float32}
        tensors, _ = scaled_state.read(adam_with(weight, **kinds), weight)
        assert torch.equal(tensors["main"], weight.float())
        assert not tensors["exp_avg"].any()

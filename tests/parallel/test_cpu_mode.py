"""Names that megatron-core leaves undefined without TransformerEngine, whatever the device."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from megatron.core.transformer import multi_latent_attention
from megatron.core.transformer.moe import moe_utils

from parallel import cpu_mode, prepare


def test_the_router_runs_without_transformer_engine_where_there_is_cuda(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert not moe_utils.HAVE_TE  # these tests run without it
    monkeypatch.delattr(moe_utils, "te_general_gemm")
    monkeypatch.setattr(multi_latent_attention, "HAVE_TE", True)
    rows, weight = torch.randn(3, 8), torch.randn(4, 8)
    with pytest.raises(NameError, match="te_general_gemm"):
        moe_utils.router_gating_linear(rows, weight, None, torch.float32)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    prepare()
    logits = moe_utils.router_gating_linear(rows, weight, None, torch.float32)
    assert torch.equal(logits, rows @ weight.T)
    # Latent attention tests its layers against TransformerEngine's classes where this is true.
    assert multi_latent_attention.HAVE_TE is False
    assert cpu_mode.enable() is False


def test_what_names_cuda_is_made_on_the_cpu_in_every_thread() -> None:
    """A torch mode would hold in one thread only."""
    prepare()

    def devices() -> list[str]:
        made = (
            torch.zeros(2, device="cuda"),
            torch.tensor([1.0], dtype=torch.float, device=torch.device("cuda")),
            torch.empty(3, device="cpu", pin_memory=True),
            torch.ones_like(torch.ones(2), device="cuda:0"),
            torch.ones(2).cuda(non_blocking=True),
        )
        return [each.device.type for each in made]

    with ThreadPoolExecutor(1) as pool:
        assert devices() == pool.submit(devices).result() == ["cpu"] * 5
    assert torch.zeros(1).type() == "torch.cuda.FloatTensor"
    assert torch.zeros(1).type(torch.int64).dtype == torch.int64
    assert torch.zeros(2, device="meta").is_meta
    with torch.device("meta"):
        assert torch.empty(2).is_meta  # transformers loads models like this
    zeros = torch.zeros
    assert cpu_mode.enable() is True
    assert torch.zeros is zeros  # a second call replaces nothing

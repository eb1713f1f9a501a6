"""The CPU plug-in's layers beside SGLang's own, and what it leaves to SGLang."""

from __future__ import annotations

from collections import namedtuple
from itertools import product
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from cpu_kernel_cases import (
    GPT_OSS,
    LENGTHS,
    SILU,
    make_call,
    make_layer,
    make_norm,
    make_rope,
    make_tokens,
)
from test_adapter_plugins import plugin_of
from torch import Tensor

from mrl.engines.sglang.compat import path_of
from mrl.engines.sglang.process import ServerProcess
from mrl.engines.sglang.settings import server_environment
from mrl.kernels import oracle
from tests.engine_starts import run_program

Route = namedtuple("Route", "topk_weights topk_ids router_logits")


@pytest.fixture(scope="module")
def plugin() -> ModuleType:
    return plugin_of("cpu", "mrl_cpu_layers")


def of_sglang(calls: list[Any], folder: Path) -> list[Tensor]:
    """Return what SGLang's own functions return."""
    torch.save(calls, folder / "calls.pt")
    script = str(Path(__file__).with_name("sglang_on_cpu.py"))
    words = [script, str(folder / "calls.pt"), str(folder / "results.pt")]
    program = (
        f"import runpy, sys; sys.argv = {words}; runpy.run_path({script!r}, run_name='__main__')"
    )
    server = ServerProcess({}, server_environment((), 1), folder / "log")
    env = server._child_environment(folder)
    code = run_program(program, env, folder / "log", with_plugins=False)
    assert code == 0, (folder / "log").read_text()
    return torch.load(folder / "results.pt")


Computed = tuple[list[Any], list[Tensor]]
"""The calls, and what the plug-in returned for each."""


def loop(*_: Any, **__: Any) -> None:
    pytest.fail("SGLang's loop was called")


def attention(plugin: ModuleType) -> Computed:
    calls, got = [], []
    for extends, dtype, window in product(
        (False, True), (torch.float32, torch.bfloat16), (None, 20)
    ):
        query, output, *cache = make_call(extends, dtype)
        options = {"scaling": 0.3, "enable_gqa": True, "causal": extends, "is_cross_attn": False}
        options["sliding_window_size"] = window
        name = "extend" if extends else "decode"
        tensors = (query[:-2], output[:-2].clone(), *cache)
        calls.append((f"_run_sdpa_forward_{name}", tensors, options))
        ours = getattr(plugin, f"attend_{name}")
        assert ours(loop, None, query, output, *cache, None, **options) is output
        assert not output[-2:].any()
        got.append(output[:-2])
    return calls, got


def test_kernel_and_experts_compute_what_sglang_computes(
    plugin: ModuleType, tmp_path: Path
) -> None:
    """One test, so that SGLang is imported once."""
    made = (attention(plugin), experts(plugin), norms(plugin), rotations(plugin))
    calls, got = ([each for part in parts for each in part] for parts in zip(*made, strict=True))
    for output, expected, call in zip(got, of_sglang(calls, tmp_path), calls, strict=True):
        half = 2e-2 if call[0].startswith("_run_sdpa") else 3e-2
        error = 1e-5 if output.dtype == torch.float32 else half
        message = f"{call[0]} {call[2]}"
        torch.testing.assert_close(output, expected, atol=error, rtol=error, msg=message)


@pytest.mark.parametrize(
    ("extends", "why"),
    [*product((False, True), ("encoder", "head size", "dtype of the cache")), (True, "mask")],
)
def test_other_calls_stay_with_sglang(plugin: ModuleType, extends: bool, why: str) -> None:
    ours = plugin.attend_extend if extends else plugin.attend_decode
    call = list(make_call(extends, torch.float32, size=12 if why == "head size" else 16))
    if why == "dtype of the cache":
        call[2:4] = call[2].bfloat16(), call[3].bfloat16()
    encoder_lens = torch.ones(len(LENGTHS)) if why == "encoder" else None
    options = {"scaling": 0.3, "causal": extends and why != "mask", "sliding_window_size": None}
    got = ours(lambda *given, **named: (given, named), "backend", *call, encoder_lens, **options)
    given, named = got
    assert given[0] == "backend"
    assert all(a is b for a, b in zip(given[1:], [*call, encoder_lens], strict=True))
    assert named == options


@pytest.mark.parametrize("is_on_policy", [False, True])
def test_invariant_modes_keep_their_layers(
    plugin: ModuleType, is_on_policy: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hook around the function would wrap the one that plugins/on_policy puts in its place."""
    hooked = {}
    monkeypatch.setattr(plugin, "hook", lambda name, function, _: hooked.update({name: function}))
    monkeypatch.setattr(plugin, "find_spec", lambda name: object() if is_on_policy else None)
    plugin.register()
    names = {"_run_sdpa_forward_decode", "_run_sdpa_forward_extend", "RMSNorm.forward_native"}
    names |= {"apply_qk_norm", "RotaryEmbedding.forward_native"}
    assert names & set(hooked) == (set() if is_on_policy else names)
    experts = plugin.without_other_ranks_experts if is_on_policy else plugin.run_experts
    assert hooked["moe_forward_native"] is experts
    assert all(path_of(name) for name in names)


def experts(plugin: ModuleType) -> Computed:
    calls, got = [], []
    for dtype, config, biased in product(
        (torch.float32, torch.bfloat16), (SILU, GPT_OSS), (False, True)
    ):
        layer = make_layer(dtype, biased=biased)
        x, ids, weights = make_tokens(dtype)
        calls.append(("moe_forward_native", (x, ids, weights), {**layer, "config": config}))
        route = (weights, ids, None)
        ours = plugin.run_experts(
            loop, SimpleNamespace(**layer), x, route, SimpleNamespace(**config)
        )
        assert ours.dtype == dtype
        got.append(ours)
    return calls, got


def norms(plugin: ModuleType) -> Computed:
    calls, got = [], []
    torch.manual_seed(2)
    for dtype, adds in product((torch.float32, torch.bfloat16), (False, True)):
        layer = make_norm(dtype)
        tensors = tuple(torch.randn(11, 40).to(dtype) for _ in range(1 + adds))
        calls.append(("RMSNorm.forward_native", tensors, layer))
        out = plugin.normalise(loop, SimpleNamespace(**layer), *tensors)
        got.append(torch.cat(out) if adds else out)
    return calls, got


def rotations(plugin: ModuleType) -> Computed:
    calls, got = [], []
    torch.manual_seed(3)
    for dtype, halves in product((torch.float32, torch.bfloat16), (False, True)):
        rope = make_rope(halves=halves)
        query, key = torch.randn(13, 6 * 24).to(dtype).split([96, 48], dim=-1)
        tensors = (torch.randint(0, 60, (13,)), query.clone(), key.clone())
        calls.append(("RotaryEmbedding.forward_native", tensors, rope))
        rotated = plugin.rotate_heads(loop, SimpleNamespace(**rope), tensors[0], query, key)
        got.append(torch.cat(rotated, dim=-1))
    return calls, got


def test_heads_are_normalised_one_by_one(plugin: ModuleType) -> None:
    query, key, _ = torch.randn(7, 6 * 40).split([120, 80, 40], dim=-1)
    q_norm, k_norm = (SimpleNamespace(**make_norm(torch.float32)) for _ in range(2))
    got = plugin.normalise_heads(loop, query, key, q_norm, k_norm, 40, None)
    for ours, x, norm in zip(got, (query, key), (q_norm, k_norm), strict=True):
        exact, _ = oracle.rms_norm(x.unflatten(1, (-1, 40)), norm.weight, 1e-5)
        torch.testing.assert_close(ours.double(), exact.flatten(1), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    "option",
    [
        {"variance_size_override": 8},
        {"cast_x_before_out_mul": True},
        {"fp32_residual": True},
        {"override_orig_dtype": torch.float32},
        {"weight": torch.ones(40, dtype=torch.float64)},
    ],
    ids=str,
)
def test_other_norms_stay_with_sglang(plugin: ModuleType, option: dict[str, Any]) -> None:
    norm, x = SimpleNamespace(**make_norm(torch.float32, **option)), torch.randn(3, 40)
    left = plugin.normalise(lambda *given: given, norm, x, None)
    assert left[0] is norm
    assert left[1] is x
    heads = plugin.normalise_heads(lambda *given: given, x, x, norm, norm, 40)
    assert heads[0] is x


def test_heads_with_norms_of_other_classes_stay_with_sglang(plugin: ModuleType) -> None:
    """The heads of DFlash may have GemmaRMSNorm."""
    gemma = SimpleNamespace(weight=torch.zeros(40), variance_epsilon=1e-5)
    plain, x = SimpleNamespace(**make_norm(torch.float32)), torch.randn(3, 40)
    for norms_of_heads in ((gemma, gemma), (plain, gemma)):
        left = plugin.normalise_heads(
            lambda *given, **more: (given, more), x, x, *norms_of_heads, 40, allow_inplace=False
        )
        assert left[0][0] is x
        assert left[1] == {"allow_inplace": False}


def test_other_rotations_stay_with_sglang(plugin: ModuleType) -> None:
    positions, query = torch.arange(3), torch.randn(3, 48)
    for option, more in (
        ({"cos_sin_cache": torch.ones(60, 16, dtype=torch.bfloat16)}, ()),
        ({"sin_cos_cache": torch.ones(3, 16)}, ()),
        ({}, (torch.ones(3, dtype=torch.int64),)),
        ({}, (None, object())),
    ):
        rope = SimpleNamespace(**{**make_rope(), **option})
        left = plugin.rotate_heads(lambda *given: given, rope, positions, query, query, *more)
        assert left[0] is rope
        assert left[2] is query


def loop_like_sglang(layer: Any, x: Tensor, route: Any, config: Any) -> Tensor:
    """Compute experts as SGLang's loop does: it refuses id -1, a repeated id and no tokens."""
    weights, ids, _ = route
    assert len(x)
    assert (ids >= 0).all()
    assert all(len(row.unique()) == len(row) for row in ids)
    return oracle.fused_experts(x, layer.w13_weight, layer.w2_weight, ids, weights).to(x.dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("num_local", "topk", "num_tokens"), [(1, 2, 5), (2, 4, 9), (3, 4, 20), (8, 2, 30), (2, 2, 0)]
)
def test_experts_of_other_ranks_in_the_loop(
    plugin: ModuleType, num_local: int, topk: int, num_tokens: int, dtype: torch.dtype
) -> None:
    """Under expert parallelism a token may choose more experts than this rank has."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.rand(num_tokens, 2 * num_local + topk, generator=generator).topk(topk).indices
    ids = ids.masked_fill(ids >= num_local, -1)
    weights = torch.rand(num_tokens, topk, generator=generator)
    layer = SimpleNamespace(
        w13_weight=(torch.randn(num_local, 40, 40, generator=generator) / 6).to(dtype),
        w2_weight=(torch.randn(num_local, 40, 20, generator=generator) / 5).to(dtype),
    )
    layer.w2_weight[0] = torch.finfo(dtype).max  # it must not reach tokens that have not chosen it
    ids = ids.masked_fill(ids == 0, -1)
    x = torch.randn(num_tokens, 40, generator=generator).to(dtype)
    route = Route(weights, ids, None)
    result = plugin.without_other_ranks_experts(loop_like_sglang, layer, x, route, None)
    expected = oracle.fused_experts(x, layer.w13_weight, layer.w2_weight, ids, weights)
    error = 1e-5 if dtype == torch.float32 else 3e-2
    assert result.dtype == dtype
    torch.testing.assert_close(result.double(), expected.double(), atol=error, rtol=error)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_shared_expert_has_the_same_bits_in_any_batch(
    plugin: ModuleType, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    hidden, shared, routed = (torch.randn(513, 40).to(dtype) for _ in range(3))
    gate = torch.randn(40).to(dtype)
    together = routed.clone()
    plugin.add_shared_expert(hidden, gate, shared, together)
    expected = routed + (hidden @ gate).sigmoid()[:, None] * shared
    error = 1e-5 if dtype == torch.float32 else 3e-2
    torch.testing.assert_close(together, expected, atol=error, rtol=error)
    for i in range(len(hidden)):
        alone = routed[i : i + 1].clone()
        plugin.add_shared_expert(hidden[i : i + 1], gate, shared[i : i + 1], alone)
        assert torch.equal(alone[0], together[i])


@pytest.mark.parametrize(
    ("dtype", "size", "config"),
    [
        (torch.float32, 20, SILU),  # no multiple of 8
        (torch.bfloat16, 2048, SILU),  # large products in bf16 are oneDNN's
        (torch.float32, 24, {**SILU, "activation": "gelu"}),
        (torch.float32, 24, {**SILU, "apply_router_weight_on_input": True}),
        (torch.float32, 24, {**SILU, "gemm1_alpha": 1.0}),
    ],
)
def test_other_experts_stay_with_sglang(
    plugin: ModuleType, dtype: torch.dtype, size: int, config: dict[str, Any]
) -> None:
    layer = SimpleNamespace(**make_layer(dtype, biased=False, size=size))
    x, ids, weights = make_tokens(dtype)
    left = plugin.run_experts(
        lambda *arguments: arguments, layer, x, (weights, ids, None), SimpleNamespace(**config)
    )
    assert left[1] is x
    assert left[2][1] is ids

"""The plugins of an engine that serves an adapter, without SGLang."""

from __future__ import annotations

import asyncio
import importlib.util
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

import mrl.engines


def plugin_of(folder: str, name: str) -> ModuleType:
    path = Path(mrl.engines.__file__).parent / f"sglang/plugins/{folder}/{name}.py"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def on_cpus() -> ModuleType:
    return plugin_of("cpu_adapter", "mrl_cpu_adapter")


@pytest.fixture
def plugin() -> ModuleType:
    return plugin_of("adapter", "mrl_adapter")


def experts_info(generator, *, shared: bool, slots: int, ranks: list[int], mapping: list[int]):
    """What SGLang gives to the layer; slot 0 is the base's."""
    hidden, inside, rank = 6, 4, 2

    def draw(num, *shape):
        return torch.randn(slots, num, *shape, generator=generator)

    outer = 1 if shared else 3
    return SimpleNamespace(
        gate_up_lora_a_weights=draw(outer, 2 * rank, hidden),
        gate_up_lora_b_weights=draw(3, 2 * inside, rank),
        down_lora_a_weights=draw(3, rank, inside),
        down_lora_b_weights=draw(outer, hidden, rank),
        lora_ranks=torch.tensor(ranks),
        token_lora_mapping=torch.tensor(mapping, dtype=torch.int32),
    )


@pytest.mark.parametrize("shared", [False, True])
def test_experts_on_a_cpu_follow_the_formula(on_cpus, shared):
    generator = torch.Generator().manual_seed(0)
    info = experts_info(generator, shared=shared, slots=3, ranks=[0, 2, 2], mapping=[1, 0, 2, 1, 2])
    x = torch.randn(5, 6, generator=generator)
    w13, w2 = torch.randn(3, 8, 6, generator=generator), torch.randn(3, 6, 4, generator=generator)
    ids = torch.tensor([[0, 1], [2, 0], [1, 2], [-1, 2], [0, -1]])
    weights = torch.rand(5, 2, generator=generator)
    got = on_cpus.run_experts(x, ids, weights, w13, w2, info)
    for token in range(5):
        slot, expected = int(info.token_lora_mapping[token]), torch.zeros(6)
        for place, expert in enumerate(ids[token].tolist()):
            if expert < 0:
                continue
            outer = 0 if shared else expert
            full13, full2 = w13[expert].clone(), w2[expert].clone()
            if slot:
                a, b = (
                    info.gate_up_lora_a_weights[slot, outer],
                    info.gate_up_lora_b_weights[slot, expert],
                )
                full13 += torch.cat([b[:4] @ a[:2], b[4:] @ a[2:]])
                full2 += (
                    info.down_lora_b_weights[slot, outer] @ info.down_lora_a_weights[slot, expert]
                )
            gate, up = (full13 @ x[token]).chunk(2)
            expected += weights[token, place] * (full2 @ (torch.nn.functional.silu(gate) * up))
        torch.testing.assert_close(got[token], expected, rtol=1e-4, atol=1e-5)


def test_pinned_memory_is_usual_memory_inside_only(on_cpus):
    def lay_out():
        return torch.tensor([1, 2], pin_memory=True), torch.zeros(2, pin_memory=True).pin_memory()

    numbers, zeros = on_cpus.without_pinning(lay_out)
    assert numbers.tolist() == [1, 2]
    assert zeros.tolist() == [0, 0]
    if not torch.cuda.is_available():
        with pytest.raises(RuntimeError):
            lay_out()


def test_the_slot_of_each_token(on_cpus):
    starts, slots = torch.tensor([0, 300, 301, 301]), torch.tensor([2, 0, 1])
    enabled, of_tokens = on_cpus.slots_of_tokens(
        303, starts, torch.tensor([0, 4, 4]), slots, None, None, max_len=150
    )
    assert enabled.tolist() == [0, 1, 1]
    assert of_tokens.tolist() == [2] * 300 + [0, -1, -1]


def test_experts_that_a_cpu_pads_are_cut_alike(on_cpus):
    """Two ranks of 4 for an inside of 6: the second has 2 of it, and 2 of zeros."""
    layer = SimpleNamespace(tp_size=2, intermediate_size_per_partition=4)
    a, b = torch.randn(1, 3, 6), torch.randn(12, 3)

    def cut_a(layer, a, rank, target):
        return {n: one[..., 4 * rank : 4 * rank + 4] for n, one in a.items()}

    def cut_b(layer, b, rank, target):
        return torch.cat([part[4 * rank : 4 * rank + 4] for part in b.chunk(2)])

    down, gate_up = "down_proj_moe", "gate_up_proj_moe"
    cut = [on_cpus.with_padded_inputs(cut_a, layer, {7: a}, rank, down)[7] for rank in (0, 1)]
    assert torch.equal(torch.cat(cut, -1), torch.cat([a, torch.zeros(1, 3, 2)], -1))
    second = on_cpus.with_padded_outputs(cut_b, layer, b, 1, gate_up)
    zeros = torch.zeros(2, 3)
    assert torch.equal(second, torch.cat([b[4:6], zeros, b[10:12], zeros]))

    def whole(layer, matrices, rank, target):
        return matrices

    layer.tp_size = 1  # a rank has the whole of its experts, which are padded all the same
    layer.intermediate_size_per_partition = 8
    assert on_cpus.with_padded_inputs(whole, layer, a, 0, down).shape == (1, 3, 8)
    assert on_cpus.with_padded_inputs(whole, layer, a, 0, gate_up) is a
    stacked = on_cpus.with_padded_outputs(whole, layer, b.expand(2, 12, 3), 0, gate_up)
    assert torch.equal(stacked[1, 8:14], b[6:])
    assert stacked.shape == (2, 16, 3)


def test_what_a_rank_says_of_fused_and_stacked_matrices(plugin):
    parts = {
        name: torch.randn(rows, 3) for name, rows in (("q_proj", 4), ("k_proj", 2), ("v_proj", 2))
    }
    key = "base_model.model.model.layers.0.self_attn.qkv_proj.lora_B.weight"
    rows = {key.replace("qkv_proj", name): len(part) for name, part in parts.items()}
    held = list(plugin.matrices(key, torch.cat(list(parts.values())), rows))
    assert [names for names, _ in held] == [[name] for name in rows]
    assert all(torch.equal(got, part) for (_, got), part in zip(held, parts.values(), strict=True))
    key = "base_model.model.model.layers.0.mlp.experts.gate_up_proj.lora_B.weight"
    gate = key.replace("gate_up_proj", "gate_proj")
    up = key.replace("gate_up_proj", "up_proj")
    stacked = torch.randn(2, 10, 3)
    held = list(plugin.matrices(key, stacked, {gate: 5, up: 5}))
    assert [names for names, _ in held] == [
        [name.replace(".experts.", f".experts.{number}.") for number in (0, 1)]
        for name in (gate, up)
    ]
    assert torch.equal(held[1][1], stacked[:, 5:])
    shared = key.replace("gate_up_proj", "down_proj")
    assert [names for names, _ in plugin.matrices(shared, torch.randn(1, 4, 2), {})] == [[shared]]


def test_a_request_that_is_aborted_in_the_queue_lets_go(plugin):
    released = []

    async def release(lora_id):
        released.append(lora_id)

    def manager(*, keeps: bool):
        states = {"r": SimpleNamespace(obj=SimpleNamespace(lora_path="mrl@1", lora_id="x"))}
        registry = SimpleNamespace(release=release)
        found = SimpleNamespace(rid_to_state=states, enable_lora=True, lora_registry=registry)
        return found, (lambda *_: None) if keeps else (
            lambda m, abort: m.rid_to_state.pop(abort.rid)
        )

    async def abort(*, keeps: bool):
        found, original = manager(keeps=keeps)
        plugin.release(original, found, SimpleNamespace(rid="r"))
        plugin.release(original, found, SimpleNamespace(rid="unknown")) if keeps else None
        await asyncio.sleep(0)

    asyncio.run(abort(keeps=True))
    assert not released
    asyncio.run(abort(keeps=False))
    assert released == ["x"]

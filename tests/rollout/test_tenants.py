"""Tenants of one engine, without SGLang: limits, names, forms, and what batches must not change."""

from __future__ import annotations

from collections import namedtuple
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from adapter_helpers import ATTENTION, EXPERT, KINDS, manifest_of, matrices_of
from tenant_helpers import LIMITS, TENANTS, make_tenants
from test_adapter import filled
from test_adapter_plugins import experts_info, plugin_of

from mrl.config.adapter import Adapter, AdapterLimits
from mrl.engines.sglang.adapter.layout import AdapterLayout
from mrl.engines.sglang.settings import adapter_settings, server_environment
from mrl.errors import InputError
from mrl.kernels import invariant


def test_limits_hold_every_adapter():
    assert LIMITS.rank == 8
    assert set(LIMITS.target_modules) == {*ATTENTION, *EXPERT}
    assert LIMITS.experts == "per_expert"  # takes those that share, too
    for adapter in TENANTS.values():
        LIMITS.check(adapter)
    assert adapter_settings(LIMITS, on_gpu=True)["experts_shared_outer_loras"] is False
    alone = AdapterLimits.around([TENANTS["bob"]])
    assert alone.experts == "shared_outer"
    assert AdapterLimits.around([TENANTS["ada"]]).experts == "none"
    for adapter, message in (
        (Adapter(3, 3.0, ("q_proj",)), "lora.rank=3: the engine was started for ranks up to 2"),
        (Adapter(2, 3.0, ("o_proj",)), "lora.targets: the engine was started without o_proj"),
        (Adapter(2, 3.0, (), "per_expert", EXPERT), "for adapters that share their outer"),
    ):
        with pytest.raises(InputError, match=message):
            alone.check(adapter)
    with pytest.raises(InputError, match=r"lora\.experts: .* without down_proj.*for none"):
        AdapterLimits.around([TENANTS["ada"]]).check(Adapter(2, 2.0, (), "shared_outer", EXPERT))


def test_tenants_have_names_and_only_the_whole_engine_stops(toy_folder, tmp_path):
    engine = make_tenants(toy_folder, tmp_path / "engine.log")
    endpoint = engine.add_endpoint("ada", TENANTS["ada"])
    assert engine.endpoints == [endpoint]
    for name in ("ada", "", "../ada", "Ada", "a" * 64, "ada@7", "-a"):
        with pytest.raises(ValueError, match="endpoint: "):
            engine.add_endpoint(name, TENANTS["ada"])
    for name in ("start", "sleep", "stop", "pause", "resume"):
        assert hasattr(engine, name)
        assert not hasattr(endpoint, name)
    with pytest.raises(RuntimeError, match="the engine is stopped"):
        engine.wake()
    assert endpoint.weight_version is None
    with pytest.raises(ValueError, match="'bob' does not exist, expected one of ada"):
        engine.remove_endpoint("bob")
    engine.remove_endpoint("ada")
    assert engine.endpoints == []
    with pytest.raises(ValueError, match="expected one of none"):
        engine.remove_endpoint("ada")


def test_what_experts_share_goes_to_each_where_others_share_nothing(toy_folder):
    """One copy in memory under the names of all experts, so the digests are PEFT's."""
    adapter = KINDS["shared_outer"]
    matrices = matrices_of(toy_folder, adapter, 1)
    form = AdapterLayout(manifest_of(toy_folder, adapter).required, adapter, stacks=False)
    laid_out, sent = filled(form, matrices)
    assert laid_out.num_bytes == sum(m.nbytes for m in matrices.values())
    assert not any(m.dim() == 3 for m in sent.values())
    assert sent.keys() == {wire for name in matrices for wire in form.sent_names(name)}
    for name, matrix in matrices.items():
        wires = form.sent_names(name)
        is_shared = ".experts." in name and name.split(".experts.")[1][0].isalpha()
        assert len(wires) == (8 if is_shared else 1)
        for wire in wires:
            assert torch.equal(sent[wire], matrix)
    with pytest.raises(ValueError, match="got stacks=True for per_expert"):
        AdapterLayout({}, KINDS["per_expert"], stacks=True)


@pytest.fixture
def on_cpus(monkeypatch):
    plugin = plugin_of("cpu_adapter", "mrl_cpu_adapter")
    monkeypatch.setattr(plugin, "linear", invariant.linear)
    monkeypatch.setattr(plugin, "silu", invariant.silu)
    return plugin


def test_updates_of_experts_have_the_bits_of_each_token_alone(on_cpus):
    """Whatever tokens are beside it, and however large the rank that the slots have room for."""
    generator = torch.Generator().manual_seed(0)
    slots = [1, 2, 1, 0, 2, 1, 1, 2]
    info = experts_info(generator, shared=False, slots=3, ranks=[0, 2, 2], mapping=slots)
    x = torch.randn(8, 6, generator=generator)
    w13, w2 = torch.randn(3, 8, 6, generator=generator), torch.randn(3, 6, 4, generator=generator)
    ids = torch.stack([torch.randperm(3, generator=generator)[:2] for _ in slots])
    weights = torch.rand(8, 2, generator=generator)
    together = on_cpus.run_experts(x, ids, weights, w13, w2, info)
    room = SimpleNamespace(**vars(info))
    room.gate_up_lora_a_weights = torch.cat(
        [widened(part, 2) for part in info.gate_up_lora_a_weights.chunk(2, 2)], 2
    )
    room.down_lora_a_weights = widened(info.down_lora_a_weights, 2)
    room.gate_up_lora_b_weights = widened(info.gate_up_lora_b_weights, 3)
    room.down_lora_b_weights = widened(info.down_lora_b_weights, 3)
    assert torch.equal(on_cpus.run_experts(x, ids, weights, w13, w2, room), together)
    for token in range(8):
        info.token_lora_mapping = torch.tensor([slots[token]], dtype=torch.int32)
        row = slice(token, token + 1)
        alone = on_cpus.run_experts(x[row], ids[row], weights[row], w13, w2, info)
        assert torch.equal(alone, together[row])


def widened(matrices, dim):
    """Room for a larger rank, with what an earlier adapter has left there."""
    size = list(matrices.shape)
    size[dim] = 5
    return torch.cat([matrices, torch.full(size, 7.0)], dim)


def test_updates_of_dense_layers_have_the_bits_of_each_token_alone(on_cpus):
    generator = torch.Generator().manual_seed(0)
    num_inputs, num_outputs, room = 48, 20, 7
    a = torch.randn(3, 2 * room, num_inputs, generator=generator)
    b = torch.randn(3, num_outputs, room, generator=generator)
    ranks, scales = torch.tensor([0, 2, 7]), torch.tensor([0.0, 0.5, 3.0])
    x = torch.randn(9, num_inputs, generator=generator)
    base = torch.randn(9, num_outputs, generator=generator)
    offsets = torch.tensor([0, 8, 20])

    def run(x, base, slots, lengths):
        info: Any = SimpleNamespace(
            weight_indices_cpu=torch.tensor(slots),
            seg_lens_cpu=torch.tensor(lengths),
            lora_ranks_cpu=ranks,
            scalings_cpu=scales,
        )
        inner = on_cpus.multiply_a(x, a, info, 2)
        return on_cpus.multiply_b(inner, b, info, offsets, base.clone())

    together = run(x, base, [1, 0, 2, 1], [3, 2, 3, 1])
    for token, slot in enumerate([1, 1, 1, 0, 0, 2, 2, 2, 1]):
        row = slice(token, token + 1)
        assert torch.equal(run(x[row], base[row], [slot], [1]), together[row])
        rank, expected = int(ranks[slot]), base[token].clone()
        for number, (start, end) in enumerate(((0, 8), (8, 20))):
            part = a[slot, number * rank : (number + 1) * rank]
            expected[start:end] += scales[slot] * b[slot, start:end, :rank] @ (part @ x[token])
        torch.testing.assert_close(together[token], expected, rtol=1e-4, atol=1e-4)


def test_the_plugin_of_invariant_products_comes_with_the_key():
    for on in (False, True):
        path = server_environment((), 1, batch_invariant=on, serves_adapter=True)["PYTHONPATH"]
        assert ("plugins/on_policy" in path) == on
        assert "plugins/cpu_adapter" in path


def test_a_request_that_truncates_changes_nobodys_token():
    """SGLang draws all of such a batch from sorted probabilities, so seeds mean other tokens."""
    plugin = plugin_of("cpu", "mrl_sglang_cpu")
    generator = torch.Generator().manual_seed(0)
    probs = torch.softmax(torch.randn(40, 50, generator=generator), -1)
    info = SimpleNamespace(
        top_ks=torch.tensor([50, 1 << 30, 1, 8] * 10, dtype=torch.int32),
        top_ps=torch.tensor([1.0, 1.0, 1.0, 0.8] * 10),
        min_ps=torch.zeros(40),
        sampling_seed=torch.arange(40),
    )
    positions = torch.arange(40) % 7

    def as_sglang(_, probs, info, positions, is_simple):
        """SGLang's, without the truncation."""
        drawn = probs if is_simple else probs.sort(-1, descending=True).values
        places = plugin.multinomial_with_seed(torch.log(drawn), info.sampling_seed, positions)
        tokens = probs.argsort(-1, descending=True)
        return (places if is_simple else tokens.gather(1, places)).view(-1), None

    alone, _ = plugin.sample_by_kind(as_sglang, None, probs, info, positions, True)
    mixed, _ = as_sglang(None, probs, info, positions, False)
    ids, _ = plugin.sample_by_kind(as_sglang, None, probs, info, positions, False)
    plain = torch.arange(40) % 4 < 2
    assert not torch.equal(mixed[plain], alone[plain])  # what SGLang does
    assert torch.equal(ids[plain], alone[plain])
    assert torch.equal(ids[2::4], probs.argmax(-1)[2::4])
    assert torch.equal(ids[3::4], mixed[3::4])


def test_a_mask_has_the_log_prob_of_the_token_that_is_returned():
    """With top_k equal to the vocabulary, the token that SGLang drew is replaced by another."""
    plugin = plugin_of("cpu", "mrl_sglang_cpu")
    capture = namedtuple("Capture", "weights selected_weight")(torch.rand(1, 8), torch.rand(1))
    info = SimpleNamespace(
        top_ks=torch.tensor([8], dtype=torch.int32),
        top_ps=torch.ones(1),
        min_ps=torch.zeros(1),
        sampling_seed=torch.tensor([3]),
    )
    arguments = (None, capture.weights, info, torch.tensor([7]))
    _, found = plugin.sample_by_kind(lambda *_: (torch.tensor([0]), capture), *arguments, False)
    assert found.selected_weight is None  # SGLang then looks it up by the token
    assert found.weights is capture.weights
    _, kept = plugin.sample_by_kind(lambda *_: (torch.tensor([0]), capture), *arguments, True)
    assert kept is capture

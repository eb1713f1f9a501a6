"""What an engine of an adapter expects, sends and compares, without a server."""

from __future__ import annotations

import pytest
import torch
from adapter_helpers import ATTENTION, EXPERT, KINDS, manifest_of, matrices_of
from torch import Tensor

from mrl.config.adapter import Adapter, AdapterLimits, lora_name
from mrl.engines.sglang.adapter.digests import check_adapter_held, check_exported
from mrl.engines.sglang.adapter.layout import AdapterLayout, AdapterMemory
from mrl.engines.sglang.adapter.manifest import AdapterManifest
from mrl.engines.sglang.settings import adapter_settings, server_environment
from mrl.errors import InputError
from mrl.kernels.digest import add_digests, digest_place, weight_digest
from mrl.types import WeightBucket

LAYERS, EXPERTS = 4, 8


@pytest.mark.parametrize(
    ("kind", "num_in_a_layer"),
    [
        ("attention", 8),
        ("per_expert", 8 + EXPERTS * 6),
        ("shared_outer", 8 + 3 + EXPERTS * 3),
    ],
)
def test_the_matrices_that_an_adapter_has(toy_folder, kind, num_in_a_layer):
    manifest = manifest_of(toy_folder, KINDS[kind])
    shapes = manifest.required
    assert len(shapes) == LAYERS * num_in_a_layer
    assert not manifest.zeros
    layer = "base_model.model.model.layers.3"
    assert shapes[f"{layer}.self_attn.k_proj.lora_A.weight"] == (4, 64)
    assert shapes[f"{layer}.self_attn.k_proj.lora_B.weight"] == (32, 4)
    shared = f"{layer}.mlp.experts"
    if kind == "shared_outer":
        assert shapes[f"{shared}.up_proj.lora_A.weight"] == (4, 64)
        assert shapes[f"{shared}.down_proj.lora_B.weight"] == (64, 4)
        assert f"{shared}.7.up_proj.lora_A.weight" not in shapes
    if kind != "attention":
        assert shapes[f"{shared}.7.down_proj.lora_A.weight"] == (4, 32)
        assert shapes[f"{shared}.7.up_proj.lora_B.weight"] == (32, 4)


def test_modules_that_sglang_takes_together_only(toy_folder):
    manifest = manifest_of(toy_folder, Adapter(4, 8.0, ("v_proj",), "shared_outer", ("up_proj",)))
    modules = {name.split(".")[-3] for name in manifest.required}
    assert modules == {"v_proj", "up_proj"}
    assert {name.split(".")[-3] for name in manifest.zeros} == {"q_proj", "k_proj", "gate_proj"}


@pytest.mark.parametrize(
    ("adapter", "message"),
    [
        (Adapter(4, 8.0, ("q_proj", "gate")), "serves no adapter of 'gate'"),
        (Adapter(4, 8.0, ("q_b_proj",)), "the checkpoint has no 'q_b_proj'"),
        (Adapter(4, 8.0, ATTENTION, "per_expert", ("w2",)), "the checkpoint has no 'w2'"),
    ],
)
def test_adapters_that_are_refused(toy_folder, adapter, message):
    with pytest.raises(InputError, match=message):
        manifest_of(toy_folder, adapter)


def test_latent_attention_without_its_own_query_projection():
    weight = "model.layers.0.self_attn.q_proj.weight"
    with pytest.raises(InputError, match="'q_proj' only with 'k_proj'"):
        AdapterManifest({weight: (8, 8)}, Adapter(2, 2.0, ("q_proj",)))


def arrive(manifest: AdapterManifest, matrices: dict[str, Tensor]) -> None:
    list(manifest.arriving([WeightBucket(sorted(matrices.items()), 1, is_last=True)], 1))


def test_faults_that_names_and_shapes_show(toy_folder):
    adapter = KINDS["per_expert"]
    good = matrices_of(toy_folder, adapter, 1)
    manifest = manifest_of(toy_folder, adapter)
    names = sorted(good)
    first, second = (lora_name("model.layers.1.self_attn.o_proj.weight", m) for m in ("A", "B"))
    absent = lora_name("model.layers.2.mlp.experts.5.up_proj.weight", "A")
    plants = {
        f"'{first}': got shape .64, 4., expected .4, 64.": {
            **good,
            first: good[second],
            second: good[first],
        },
        "which the adapter does not have": {**good, absent.replace(".5.", ".8."): good[absent]},
        f"expected 1 more: {absent}": {n: good[n] for n in names if n != absent},
    }
    for message, matrices in plants.items():
        with pytest.raises(ValueError, match=message):
            arrive(manifest, matrices)


def filled(
    form: AdapterLayout, matrices: dict[str, Tensor]
) -> tuple[AdapterMemory, dict[str, Tensor]]:
    """What SGLang reads of the memory."""
    laid_out = form.allocate(torch.float32)
    for name, matrix in matrices.items():
        laid_out.views[name].copy_(matrix)
    flat = laid_out.buffer.tensor
    return laid_out, {
        place.name: flat[place.start_idx : place.end_idx].view(place.dtype).view(place.shape)
        for place in laid_out.places
    }


def test_experts_that_share_are_stacked(toy_folder):
    adapter = KINDS["shared_outer"]
    matrices = matrices_of(toy_folder, adapter, 1)
    laid_out, sent = filled(
        AdapterLayout(manifest_of(toy_folder, adapter).required, adapter), matrices
    )
    assert laid_out.num_bytes == sum(m.nbytes for m in matrices.values())
    layer = "base_model.model.model.layers.2.mlp.experts"
    for module in EXPERT:
        for matrix in ("A", "B"):
            got = sent[f"{layer}.{module}.lora_{matrix}.weight"]
            own = [
                matrices.get(f"{layer}.{number}.{module}.lora_{matrix}.weight")
                for number in range(EXPERTS)
            ]
            is_shared = matrix == ("B" if module == "down_proj" else "A")
            assert all((one is None) == is_shared for one in own)
            one = matrices.get(f"{layer}.{module}.lora_{matrix}.weight")
            expected = [one] if is_shared else own
            assert torch.equal(got, torch.stack(expected))  # pyright: ignore[reportArgumentType]
    assert not any(".experts.0." in name for name in sent)


def test_other_adapters_are_sent_as_they_are(toy_folder):
    adapter = KINDS["per_expert"]
    matrices = matrices_of(toy_folder, adapter, 1)
    form = AdapterLayout(manifest_of(toy_folder, adapter).required, adapter)
    _, sent = filled(form, matrices)
    assert sent.keys() == matrices.keys()
    assert all(torch.equal(sent[name], matrices[name]) for name in sent)
    mixtral = lora_name("model.layers.0.block_sparse_moe.experts.1.w3.weight", "B")
    assert form.sent_names(mixtral) == [mixtral.replace(".w3.", ".up_proj.")]


def answer_of(matrices: dict[str, Tensor], scale: float = 2.0, slot: str = "") -> dict:
    lines = {name: f"{weight_digest(matrix)[0]:x}" for name, matrix in matrices.items()}
    return answer_of_one({**lines, "scale": repr(scale), "slot": slot})


def answer_of_one(lines: dict[str, str]) -> dict:
    return {"ranks": [{"checksums": lines, "parallelism_info": {"tp_rank": 0}}]}


def test_another_adapter_is_named_by_what_differs(toy_folder):
    good, other = (matrices_of(toy_folder, KINDS["attention"], seed) for seed in (1, 2))
    sent = {name: weight_digest(matrix)[0] for name, matrix in good.items()}
    check_adapter_held(answer_of(good), sent, 2.0, 1)
    twice = answer_of(good)["ranks"] * 2  # as each of two DP-attention replicas says it
    check_adapter_held({"ranks": twice}, sent, 2.0, 1)
    with pytest.raises(RuntimeError, match="expected 2 ranks"):
        check_adapter_held({"ranks": twice}, sent, 2.0, 2)
    name = lora_name("model.layers.1.self_attn.o_proj.weight", "A")
    for answer, message in (
        (answer_of({**good, name: other[name]}), f"{name}: sent .*, the engine holds"),
        (answer_of({n: m for n, m in good.items() if n != name}), f"{name}: .* holds nothing"),
        (answer_of({**good, "more": good[name]}), "more: sent nothing"),
        (answer_of(other), "and 29 more"),
        (answer_of(good, scale=1.0), "the scale alpha / rank: sent 2, the engine holds 1"),
        (answer_of(good, slot="a.qkv_proj.lora_A"), "a.qkv_proj.lora_A: the slot from which"),
        (answer_of_one({"error": "ValueError: no"}), "ValueError: no"),
        ({"ranks": []}, r"the ranks \[\] reported their adapter"),
    ):
        with pytest.raises(RuntimeError, match=message):
            check_adapter_held(answer, sent, 2.0, 1)


def test_the_exporters_digests_by_place_and_by_name(toy_folder):
    good, other = (matrices_of(toy_folder, KINDS["per_expert"], seed) for seed in (1, 2))
    came = {name: weight_digest(matrix)[0] for name, matrix in good.items()}
    places = add_digests((digest_place(name), digest) for name, digest in came.items())
    check_exported(places.items(), came)
    check_exported(came.items(), came)
    name = lora_name("model.layers.1.mlp.experts.3.up_proj.weight", "B")
    came[name] = weight_digest(other[name])[0]
    with pytest.raises(
        RuntimeError, match=r"layers\.1\.experts\.3: the trainer has \w{16}, \w{16} came"
    ):
        check_exported(places.items(), came)
    with pytest.raises(RuntimeError, match="another adapter came"):
        check_exported({name: 1}.items(), came)


def test_without_an_adapter_the_server_is_as_before():
    adapter = KINDS["shared_outer"]
    plain, with_adapter = (
        server_environment((), 1, serves_adapter=serves)["PYTHONPATH"] for serves in (False, True)
    )
    assert "adapter" not in plain
    assert with_adapter.count("plugins/adapter") == with_adapter.count("plugins/cpu_adapter") == 1
    on_gpu = server_environment((0,), 1, serves_adapter=True)["PYTHONPATH"]
    assert "plugins/adapter" in on_gpu
    assert "cpu" not in on_gpu
    settings = adapter_settings(AdapterLimits.around([adapter]), on_gpu=True)
    assert settings["experts_shared_outer_loras"]
    assert "lora_backend" not in settings
    assert settings["lora_target_modules"] == [*ATTENTION, *EXPERT]
    attention = adapter_settings(AdapterLimits.around([KINDS["attention"]]), on_gpu=False)
    assert attention["lora_backend"] == "torch_native"
    assert "experts_shared_outer_loras" not in attention

"""What each rank of an engine says that it holds, and how the trainer adds it up.

Shards are cut here as SGLang 0.5.20 cuts them, under its attributes' names. The same with a real
SGLang of two ranks is in test_weight_sync.py; on CPUs that pads key and value heads to the ranks.
"""

from __future__ import annotations

import importlib.util
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import mrl.engines
from mrl.engines.sglang.digests import held_digests
from mrl.kernels.digest import add_digests, digests_of

HIDDEN, HEAD = 12, 4
QUERY_HEADS, KV_HEADS, EXPERTS, FFN, VOCAB = 8, 2, 8, 16, 24


@pytest.fixture
def plugin() -> ModuleType:
    path = Path(mrl.engines.__file__).parent / "sglang/plugins/server" / "mrl_weight_digest.py"
    spec = importlib.util.spec_from_file_location("mrl_weight_digest", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    place_experts(module, None)
    return module


def place_experts(plugin: Any, physical_to_logical: Tensor | None) -> None:
    """Let the plug-in find this placement where it would ask SGLang."""
    placement = SimpleNamespace(physical_to_logical_map_cpu=physical_to_logical)
    answer = None if physical_to_logical is None else placement
    plugin.take = {"get_global_expert_location_metadata": lambda: answer}.__getitem__


def whole_model() -> dict[str, Tensor]:
    """Weights by the checkpoint's names; constants: equal digests say nothing of replicas."""
    generator = torch.Generator().manual_seed(0)
    prefix = "model.layers.0."
    shapes = {
        "model.embed_tokens.weight": (VOCAB, HIDDEN),
        "lm_head.weight": (VOCAB, HIDDEN),
        prefix + "self_attn.q_proj.weight": (QUERY_HEADS * HEAD, HIDDEN),
        prefix + "self_attn.k_proj.weight": (KV_HEADS * HEAD, HIDDEN),
        prefix + "self_attn.v_proj.weight": (KV_HEADS * HEAD, HIDDEN),
        prefix + "self_attn.o_proj.weight": (HIDDEN, QUERY_HEADS * HEAD),
        prefix + "self_attn.o_proj.bias": (HIDDEN,),
        prefix + "mlp.gate.weight": (EXPERTS, HIDDEN),
    }
    for expert in range(EXPERTS):
        shapes |= {
            f"{prefix}mlp.experts.{expert}.gate_proj.weight": (FFN, HIDDEN),
            f"{prefix}mlp.experts.{expert}.up_proj.weight": (FFN, HIDDEN),
            f"{prefix}mlp.experts.{expert}.down_proj.weight": (HIDDEN, FFN),
        }
    model = {n: torch.randn(shape, generator=generator) for n, shape in shapes.items()}
    model["lm_head.weight"] = torch.ones(VOCAB, HIDDEN)
    return model


def module_of(**attributes: Any) -> torch.nn.Module:
    module = torch.nn.Module()
    for name, value in attributes.items():
        is_weight = isinstance(value, Tensor)
        setattr(module, name, torch.nn.Parameter(value.clone()) if is_weight else value)
    return module


def cut(model: dict[str, Tensor], rank: int, world: int, *, ep: int, attention_dp: int) -> Any:
    """Rank `rank` of an engine with tp_size=world, ep_size=ep, dp_size=attention_dp."""
    attn_size = world // attention_dp
    attn_rank = rank % attn_size
    moe_tp = world // ep
    ep_rank, moe_tp_rank = divmod(rank, moe_tp)
    prefix = "model.layers.0."
    replicas = max(1, attn_size // KV_HEADS)
    q, k, v = (model[f"{prefix}self_attn.{name}_proj.weight"] for name in "qkv")
    kv_rank, kv_size = attn_rank // replicas, attn_size // replicas
    qkv = [q.chunk(attn_size)[attn_rank], k.chunk(kv_size)[kv_rank], v.chunk(kv_size)[kv_rank]]
    out = model[prefix + "self_attn.o_proj.weight"].chunk(attn_size, 1)[attn_rank]

    def vocabulary(name: str, part: int, size: int) -> torch.nn.Module:
        rows = SimpleNamespace(org_vocab_start_index=part * VOCAB // size)
        return module_of(weight=model[name].chunk(size)[part], tp_size=size, shard_indices=rows)

    num_local = EXPERTS // ep
    own = range(ep_rank * num_local, (ep_rank + 1) * num_local)

    def experts(name: str, dim: int) -> Tensor:
        whole = [model[f"{prefix}mlp.experts.{expert}.{name}.weight"] for expert in own]
        return torch.stack([weight.chunk(moe_tp, dim)[moe_tp_rank] for weight in whole])

    layer = module_of(
        self_attn=module_of(
            qkv_proj=module_of(
                weight=torch.cat(qkv), tp_rank=attn_rank, tp_size=attn_size, kv_tp_rank=attn_rank,
                num_kv_head_replicas=replicas, num_heads=QUERY_HEADS // attn_size, head_size=HEAD,
            ),
            o_proj=module_of(
                weight=out, bias=model[prefix + "self_attn.o_proj.bias"], tp_rank=attn_rank,
                tp_size=attn_size, input_is_parallel=True,
            ),
        ),
        mlp=module_of(
            gate=module_of(weight=model[prefix + "mlp.gate.weight"]),
            experts=module_of(
                w13_weight=torch.cat([experts("gate_proj", 0), experts("up_proj", 0)], 1),
                w2_weight=experts("down_proj", 1), layer_id=0, moe_ep_rank=ep_rank,
                moe_tp_rank=moe_tp_rank, _num_local_routed=num_local, _num_global_routed=EXPERTS,
            ),
        ),
    )  # fmt: skip
    layers = torch.nn.Module()
    layers.add_module("0", layer)
    return module_of(
        model=module_of(
            embed_tokens=vocabulary("model.embed_tokens.weight", attn_rank, attn_size),
            layers=layers,
        ),
        lm_head=vocabulary("lm_head.weight", rank, world),
    )


def answer_of(plugin: ModuleType, ranks: list[Any]) -> dict[str, Any]:
    lines = [plugin.digests(rank) for rank in ranks]
    texts = {f"{i} {name}": text for i, own in enumerate(lines) for name, text in own.items()}
    return {"ranks": [{"checksums": texts}, {"checksums": {}}]}


@pytest.mark.parametrize(
    ("world", "ep", "attention_dp"),
    [(1, 1, 1), (2, 1, 1), (2, 2, 1), (4, 1, 1), (4, 2, 1), (8, 4, 1), (4, 4, 4), (8, 4, 2)],
    ids=str,
)
def test_any_cut_adds_up_to_the_whole(plugin, world, ep, attention_dp):
    """Four and eight ranks have more ranks than key and value heads, too."""
    model = whole_model()
    ranks = [cut(model, r, world, ep=ep, attention_dp=attention_dp) for r in range(world)]
    held, dtypes = held_digests(answer_of(plugin, ranks), world)
    assert held == add_digests(digests_of(model.items()))
    assert dtypes == {"float32"}
    # Whatever single rank holds one other value, it is seen: as a replica that differs, or in the sum.
    for number, rank in enumerate(ranks):
        for name, parameter in rank.named_parameters():
            before = parameter.detach().clone()
            with torch.no_grad():
                parameter[(-1,) * parameter.dim()] += 1
            assert differs(answer_of(plugin, ranks), world, held), (number, name)
            with torch.no_grad():
                parameter.copy_(before)


def differs(answer: dict[str, Any], world: int, held: dict[str, int]) -> bool:
    try:
        return held_digests(answer, world)[0] != held
    except RuntimeError as error:
        return "should be the same in" in str(error)


def test_a_fused_shared_expert_comes_after_the_routed_ones(plugin):
    experts = SimpleNamespace(
        layer_id=0, moe_ep_rank=1, _num_local_routed=3, _num_global_routed=6, _has_fused_shared=True
    )
    assert plugin.experts_of(experts, 4) == [3, 4, 5, 6]


def test_experts_in_another_order_are_refused(plugin):
    ranks = [cut(whole_model(), rank, 2, ep=2, attention_dp=1) for rank in range(2)]
    place_experts(plugin, torch.arange(EXPERTS).unsqueeze(0))
    held_digests(answer_of(plugin, ranks), 2)
    place_experts(plugin, torch.tensor([[0, 1, 2, 3, 4, 5, 7, 6]]))
    with pytest.raises(RuntimeError, match=r"layer 0 holds the experts .* leave out .*enable_eplb"):
        plugin.digests(ranks[0])


def test_digests_of_ranks_add_up():
    """Equal digests of modules that do not say what they hold are replicas."""
    answer = {"a.weight": "1 2", "b.weight": "5 5", "c.experts.w13": "1,2 3,4"}
    lines = {
        f"{rank} {name}": f"float32 ? {text.split()[rank]}" + " 0,1" * (name[0] == "c")
        for name, text in answer.items()
        for rank in (0, 1)
    }
    got, dtypes = held_digests({"ranks": [{"checksums": lines}, {"checksums": {}}]}, 2)
    assert got == {"a": 3, "b": 5, "c.experts.0": 4, "c.experts.1": 6}
    assert dtypes == {"float32"}
    with pytest.raises(RuntimeError, match=r"from ranks \[0, 1\], expected 4 ranks"):
        held_digests({"ranks": [{"checksums": lines}]}, 4)
    with pytest.raises(RuntimeError, match="plugin mrl_weight_digest"):
        held_digests({"ranks": []}, 1)


def test_replicas_must_agree_and_equal_shards_are_no_replicas():
    def lines(*pieces):
        text = {f"{rank} a.weight#kv": f"bfloat16 {p}" for rank, p in enumerate(pieces)}
        return {"ranks": [{"checksums": text}]}

    assert held_digests(lines("0 1", "0 1", "1 a", "1 a"), 4)[0] == {"a": 11}
    assert held_digests(lines("0 3", "1 3"), 2)[0] == {"a": 6}
    with pytest.raises(RuntimeError, match=r"the same in a on the engine's ranks \[2, 3\]"):
        held_digests(lines("0 1", "0 1", "1 a", "1 b"), 4)


def test_a_rank_that_cannot_answer_leaves_no_other_waiting(plugin):
    """Two threads are the ranks. One that never comes would break the barrier of the other."""
    barrier, ranks = threading.Barrier(2), [None, None]

    def answer(rank: int, dtype: torch.dtype):
        def all_gather(own):
            ranks[rank] = own
            barrier.wait(timeout=60)
            return list(ranks)

        model = torch.nn.Linear(2, 2, bias=False)
        model.weight = torch.nn.Parameter(torch.ones(2, 2).to(dtype), requires_grad=False)
        return plugin.of_all_ranks(model, all_gather)

    with ThreadPoolExecutor(2) as pool:
        good = list(pool.map(answer, (0, 1), [torch.float32] * 2))
        assert good[0] == good[1] == [{"weight": good[0][0]["weight"]}] * 2
        for failed in [pool.submit(answer, 0, torch.float32), pool.submit(answer, 1, torch.int16)]:
            with pytest.raises(RuntimeError, match=r"^rank 1: ValueError: .*got torch\.int16"):
                failed.result()


@pytest.mark.parametrize("has_cuda", [False, True])
def test_a_bucket_is_loaded_when_the_device_has_read_it(plugin, monkeypatch, has_cuda):
    order = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_cuda)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: order.append("synchronised"))
    load = plugin.synchronised(
        lambda worker, request: order.append(request) or "done", None, "load"
    )
    assert load == "done"
    assert order == ["load"] + ["synchronised"] * has_cuda


def test_the_whole_answer_is_one_copy_from_the_device(plugin, monkeypatch):
    """A copy for each parameter would wait for the device thousands of times."""
    copies = []
    tolist = Tensor.tolist
    monkeypatch.setattr(Tensor, "tolist", lambda self: copies.append(self) or tolist(self))
    plugin.digests(cut(whole_model(), 0, 2, ep=2, attention_dp=1))
    # Where a test before this one has turned parallel.cpu_mode on, torch calls the method once more.
    assert len({id(copied) for copied in copies}) == 1


def test_scales_of_blocks_of_rows_are_cut_as_the_rows_are(plugin):
    """Two key and value heads on four ranks: each rank has 256 rows of queries, 128 of keys and 128 of
    values, with a scale for each 128 rows."""
    scales = {part: torch.rand(rows, 3) for part, rows in (("q", 8), ("k", 2), ("v", 2))}
    parts: list[tuple[str, int]] = []
    seen = set()
    for rank in range(4):
        head = rank // 2
        own = [
            scales["q"][2 * rank : 2 * rank + 2],
            scales["k"][head, None],
            scales["v"][head, None],
        ]
        module = module_of(
            weight=torch.zeros(512, 8), weight_scale_inv=torch.cat(own), tp_rank=rank, kv_tp_rank=rank,
            num_kv_head_replicas=2, num_heads=2, head_size=128,
        )  # fmt: skip
        found = plugin.parts_of(module, "qkv_proj.weight_scale_inv", module.weight_scale_inv)
        for name, values, piece, _ in found:
            if (name, piece) not in seen:  # pieces of replicas count once
                seen.add((name, piece))
                parts += digests_of([("scales", values)])
    assert add_digests(parts) == add_digests(digests_of(("scales", s) for s in scales.values()))


@pytest.mark.parametrize("value", [-1.0, 0.5])
def test_scales_of_the_kv_cache_are_not_the_trainers(plugin: Any, value: float) -> None:
    """SGLang adds them to the attention of Llama, Mixtral and Qwen2 with quantised weights."""
    source = (Path(sglang_folder()) / "srt/layers/quantization/kv_cache.py").read_text()
    for name in ("k_scale", "v_scale"):
        assert f"layer.{name}._skip_weight_check = True" in source  # in 0.5.12 and 0.5.23
    model = torch.nn.Module()
    model.proj = module_of(weight=torch.randn(4, 3))
    before = plugin.digests(model)
    attention: Any = module_of(k_scale=torch.tensor(1.0), v_scale=torch.tensor(value))
    model.attn = attention
    for parameter in attention.parameters():
        parameter._skip_weight_check = True
    with pytest.raises(RuntimeError, match=r"1 of 2 scales .* for example attn\.v_scale"):
        plugin.digests(model)
    attention.v_scale.data.fill_(1.0)
    assert plugin.digests(model) == before


def sglang_folder() -> str:
    spec = importlib.util.find_spec("sglang")
    assert spec is not None
    assert spec.submodule_search_locations
    return next(iter(spec.submodule_search_locations))

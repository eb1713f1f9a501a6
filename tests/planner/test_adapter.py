"""The plan's count of an adapter, against the trainer's own, SGLang's, and by hand."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.scaling import published
from mrl.config import LoraConfig
from mrl.config.adapter import Adapter, Experts
from mrl.engines.sglang.settings import CPU_STUBS
from mrl.errors import InputError
from mrl.planner import flops, memory
from mrl.planner.adapter import adapted_shape, count_adapter
from mrl.planner.engine import engine_host_rows, kv_capacity_tokens
from mrl.planner.engine_adapter import pool_bytes
from mrl.planner.host import saved_bytes, trainer_host_rows
from mrl.planner.shape import ModelShape
from mrl.planner.stages import stages
from mrl.planner.workload import Workload
from parallel.dims import ParallelDims
from parallel.hf_config import HfModel
from parallel.lora.rules import adapter_shapes, read_adapter
from tests.parallel.layouts import adapter_of
from tests.parallel.models import write_tiny

WORK = Workload(prompts=8, samples=1, prompt_len=32, response_len=32, micro_batch_tokens=64,
                lora="adapter", native=True)  # fmt: skip
ONE = ParallelDims(world=1, tp=1, pp=1, vpp=1, cp=1, ep=1, etp=1)
EXPERTS: tuple[Experts, ...] = ("none", "shared_outer", "per_expert")


def adapted(name: str, experts: Experts, **changes: object) -> ModelShape:
    model = published(name)
    lora = LoraConfig(experts=experts, **changes)  # pyright: ignore[reportArgumentType]
    return adapted_shape(model, read_adapter(lora, model))


def num_trained(shape: ModelShape) -> int:
    assert shape.adapter is not None
    return shape.adapter.num_parameters


@pytest.mark.parametrize("experts", EXPERTS)
@pytest.mark.parametrize(
    "kind",
    [
        *("qwen3_moe", "qwen2_moe", "mixtral", "olmoe", "glm4_moe", "gpt_oss", "qwen3_next"),
        *("deepseek_v3", "deepseek_v32"),
    ],
)
def test_the_count_is_that_of_the_matrices(kind: str, experts: Experts, tmp_path: Path) -> None:
    model = HfModel.read(write_tiny(kind, tmp_path / "model"))
    adapter = adapter_of(model, experts)
    shapes, found = adapter_shapes(model, adapter), count_adapter(model, adapter)
    assert found.num_parameters == sum(math.prod(shape) for shape in shapes.values())
    assert found.num_tensors == len(shapes)


def test_qwen3_30b_a3b_by_hand() -> None:
    rank, hidden, ffn, layers, num_experts = 32, 2048, 768, 48, 128
    query, key = 32 * 128, 4 * 128
    attention = layers * rank * (2 * (hidden + query) + 2 * (hidden + key))
    assert num_trained(adapted("qwen3_30b_a3b", "none")) == attention == 26_738_688
    own = layers * rank * 3 * num_experts * ffn
    shared = layers * rank * 3 * hidden + own
    assert (
        num_trained(adapted("qwen3_30b_a3b", "shared_outer")) - attention == shared == 462_422_016
    )
    each = layers * rank * 3 * num_experts * hidden + own
    assert num_trained(adapted("qwen3_30b_a3b", "per_expert")) - attention == each == 1_660_944_384


def test_modules_that_no_layer_has_are_refused() -> None:
    with pytest.raises(InputError, match="no layer of this model has gate_proj; name others"):
        count_adapter(published("qwen3_30b_a3b"), Adapter(8, 8.0, ("gate_proj",)))


def test_matrices_are_cut_as_the_trainer_cuts_them() -> None:
    shape = adapted("qwen3_30b_a3b", "per_expert", targets=("q_proj", "o_proj"))
    dims = dataclasses.replace(ONE, world=16, tp=4, ep=8, etp=2)
    (stage,) = stages(shape, dims)
    rank, hidden, ffn, layers, experts = 32, 2048, 768, 48, 128 // 8
    width = 32 * 128
    # A of q_proj and B of o_proj are whole; the others have a quarter.
    whole = layers * rank * 2 * hidden
    assert stage.whole == whole
    assert stage.dense == whole + layers * rank * 2 * width // 4
    # Of an expert: A of gate and up, B of down are whole on both ranks that share its columns.
    assert stage.expert_whole == layers * rank * experts * 3 * hidden
    assert stage.expert == stage.expert_whole + layers * rank * experts * 3 * ffn // 2
    (full,) = stages(dataclasses.replace(shape, adapter=None), dims)
    assert stage.frozen == full.num_local == full.num_trained
    assert memory.gradient_bytes(stage, WORK) == 4 * (stage.dense + stage.expert)
    assert memory.weight_bytes(shape, stage, dims, WORK) == 2 * (full.num_local + stage.num_trained)


def test_flops_of_a_frozen_base_by_hand() -> None:
    base = adapted_shape(published("qwen3_30b_a3b"), None)
    shape = adapted("qwen3_30b_a3b", "none")
    matrices = base.num_active - base.count()["embedding"] - base.count()["norms"]
    adapter = num_trained(shape)
    assert flops.training_flops(base, 0) == 6 * matrices
    assert flops.training_flops(shape, 0) == 4 * matrices + 6 * adapter
    scores = 48 * 4 * 1000 * 4096
    assert flops.training_flops(shape, 1000) == 4 * matrices + 6 * adapter + 3 * scores
    dims = dataclasses.replace(ONE, world=4, pp=4, ep=1)
    parts = sum(flops.stage_training_flops(shape, stage, 1000) for stage in stages(shape, dims))
    assert parts == flops.training_flops(shape, 1000)


def test_host_holds_the_adapter_the_sleeping_base_and_no_reference() -> None:
    shape = adapted("qwen3_30b_a3b", "shared_outer")
    num = num_trained(shape)
    (stage,) = stages(shape, ONE)
    assert saved_bytes(stage, ONE, WORK) == (2 + 12) * num
    work = dataclasses.replace(WORK, reference=True)
    rows = {row.name: row.num_bytes for row in trainer_host_rows(shape, stage, ONE, work)}
    assert rows["reference, pinned"] == 0
    engine = {row.name: row.num_bytes for row in engine_host_rows(shape, WORK, 1, 80 << 30)}
    assert engine["engine: copy of the base, pinned"] == 2 * shape.num_parameters
    assert engine["engine: adapters"] == 3 * 2 * num
    apart = dataclasses.replace(WORK, rollout_ranks=1)
    engine = {row.name: row.num_bytes for row in engine_host_rows(shape, apart, 1, 80 << 30)}
    assert engine["engine: copy of the base, pinned"] == 0
    merged = dataclasses.replace(WORK, lora="merged")
    names = {row.name for row in engine_host_rows(shape, merged, 1, 80 << 30)}
    assert not names & {"engine: copy of the base, pinned", "engine: adapters"}
    assert (WORK.sent_bytes(shape), merged.sent_bytes(shape)) == (2 * num, 2 * shape.num_parameters)
    # The adapters' room is taken from that of the KV cache.
    lost = kv_capacity_tokens(shape, merged, 130 << 30) - kv_capacity_tokens(shape, WORK, 130 << 30)
    assert lost == pytest.approx(pool_bytes(shape, WORK) / (2 * 48 * 2 * 4 * 128), abs=1)


@pytest.mark.release
def test_slots_are_as_large_as_sglangs() -> None:
    cases, planned = [], []
    layouts = ((1, 1), (4, 1), (8, 4))
    for name, experts, (ranks, ep) in itertools.product(
        ("qwen3_30b_a3b", "deepseek_v3"), EXPERTS, layouts
    ):
        shape = adapted(name, experts)
        assert shape.adapter is not None
        adapter = shape.adapter.adapter
        # `attention` names whole queries too, which DeepSeek-V3 does not have.
        modules = [m for m in adapter.target_modules if not (shape.mla and m == "q_proj")]
        cases.append(
            {"config": published(name).config, "ranks": ranks, "ep": ep, "experts": experts,
             "modules": modules, "rank": adapter.rank, "slots": WORK.adapter_slots}
        )  # fmt: skip
        work = dataclasses.replace(WORK, engine_tp=ranks, engine_ep=ep)
        planned.append(pool_bytes(shape, work) // WORK.weight_bytes)
    ours = {"PYTHONPATH": os.pathsep.join((str(CPU_STUBS), os.environ.get("PYTHONPATH", "")))}
    done = subprocess.run(
        [sys.executable, str(Path(__file__).parent / "sglang_slots.py")],
        input=json.dumps(cases), capture_output=True, text=True, check=False, timeout=600,
        env={**os.environ, **ours, "SGLANG_USE_CPU_ENGINE": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert planned == json.loads(done.stdout)

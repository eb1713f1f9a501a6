"""The parts that need no server: routes, names, requests, the CPU sampler, the toy model."""

from __future__ import annotations

import base64
import importlib.util
import string
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from rollout_helpers import make_engine
from transformers import AutoTokenizer

import mrl.engines
from moe.trace import decode_base64, decode_routes
from mrl.config import ModelConfig, RolloutConfig
from mrl.engines import engine_names, load_engine
from mrl.engines.base import EngineConfig, Request, SamplingParams, sample_seed
from mrl.engines.sglang.decode import (
    Expected,
    RouteShape,
    decode_completion,
    route_shape,
)
from mrl.engines.sglang.engine import Engine
from mrl.engines.sglang.route_memory import RouteReader
from mrl.errors import InputError
from mrl.toy_model import build_tokenizer, write_toy_model
from mrl.types import UNKNOWN_VERSION, VersionSpan

ROUTES = {
    "num_hidden_layers": 3,
    "moe_layer_numbers": (2, 3),
    "topk": 2,
    "row_versions": [VersionSpan(3, 0, 2), VersionSpan(4, 2, 5)],
}


def encode(ids: np.ndarray) -> str:
    return base64.b64encode(ids.astype("<i4").tobytes()).decode()


def numbers(ids: np.ndarray) -> np.ndarray:
    return decode_base64(encode(ids))


@pytest.mark.parametrize(("num_experts", "dtype"), [(256, torch.uint8), (257, torch.uint16)])
def test_routes_drop_dense_layers_and_narrow(num_experts, dtype):
    ids = np.stack([np.full((5, 2), -1), np.tile([3, 255], (5, 1)), np.tile([1, 0], (5, 1))], 1)
    trace = decode_routes(
        numbers(ids), num_tokens=6, num_experts=num_experts, num_cached_rows=2, **ROUTES
    )
    assert trace.expert_ids.dtype == dtype
    assert trace.expert_ids.tolist() == [[[3, 255], [1, 0]]] * 5
    assert (trace.layer_numbers, trace.num_cached_rows) == ((2, 3), 2)
    assert trace.row_versions == (VersionSpan(3, 0, 2), VersionSpan(4, 2, 5))


def test_routes_that_do_not_fit():
    ids = np.tile([0, 1], (5, 3, 1))

    def decode(ids, *, num_cached_rows=0, **changed):
        arguments = {**ROUTES, "num_tokens": 6, "num_experts": 8, **changed}
        return decode_routes(numbers(ids), num_cached_rows=num_cached_rows, **arguments)

    with pytest.raises(ValueError, match=r"got 30 numbers \(5 rows\), expected 36: 7 tokens"):
        decode(ids, num_tokens=7)
    with pytest.raises(ValueError, match="got 119 bytes, expected 4 for each number"):
        decode_base64(base64.b64encode(base64.b64decode(encode(ids))[:-1]).decode())
    with pytest.raises(ValueError, match="not base64"):
        decode_base64("no base64!")
    with pytest.raises(ValueError, match="got 6 cached rows, expected 0 to 5"):
        decode(ids, num_cached_rows=6)
    with pytest.raises(InputError, match=r"\[2, 4\] given"):
        decode(ids, moe_layer_numbers=(2, 4))
    for wrong in (-1, 8, 256):
        ids[3, 2] = [0, wrong]
        with pytest.raises(ValueError, match=rf"token 3 in MoE layer 3 has experts \[0, {wrong}\]"):
            decode(ids)
    ids[3, 2] = [5, 5]
    with pytest.raises(ValueError, match=r"token 3 repeats an expert in MoE layer 3: \[5, 5\]"):
        decode(ids)


def test_route_shape_of_architectures():
    qwen = {"num_hidden_layers": 4, "num_experts": 8, "num_experts_per_tok": 2, "model_type": "q"}
    config = SimpleNamespace(**qwen, mlp_only_layers=[0], decoder_sparse_step=2)
    assert route_shape(config) == RouteShape(4, (2, 4), 8, 2)
    deepseek = {"num_hidden_layers": 3, "n_routed_experts": 16, "num_experts_per_tok": 4}
    config = SimpleNamespace(**deepseek, first_k_dense_replace=1)
    assert route_shape(config) == RouteShape(3, (2, 3), 16, 4)
    with pytest.raises(InputError, match="routing_replay=off"):
        route_shape(SimpleNamespace(num_hidden_layers=2, model_type="llama"))


def spans(*spans):
    """Return spans as SGLang writes them."""
    return [{"version": str(v), "start": start, "end": end} for v, start, end in spans]


def make_answer(**changed):
    meta = {
        "finish_reason": {"type": "length"},
        "prompt_tokens": 2,
        "completion_tokens": 2,
        "cached_tokens": 0,
        "output_token_logprobs": [[-1.0, 7, None], [-2.0, 8, None]],
        "weight_version": "3",
        "weight_versions": [{"version": "3", "start": 0, "end": 2}],
    }
    return {"output_ids": [7, 8], "meta_info": {**meta, **changed}}


def decode(answer, *, versions=(3,), cache_version=3, retracted=False, shape=None):
    request = Request("r6", torch.tensor([1, 2]), 0, SamplingParams(2))
    return decode_completion(
        answer, request, Expected(versions, (cache_version,), shape, retracted, RouteReader())
    )


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"finish_reason": {"type": "cut"}}, "'cut', expected stop, length or abort"),
        ({"completion_tokens": 3}, "completion_tokens: got 3, expected 2"),
        ({"prompt_tokens": 1}, "prompt_tokens: got 1, expected 2"),
        ({"output_token_logprobs": [[-1.0, 7, None]]}, "output_token_logprobs: got 1, expected 2"),
        ({"output_token_logprobs": [[-1.0, 7, None], [-2.0, 9, None]]}, "other tokens"),
        ({"weight_versions": None, "weight_version": "2"}, "weight version 2, expected 3"),
        ({"weight_versions": spans((2, 0, 1), (3, 1, 2))}, "weight version 2, expected 3"),
        ({"weight_versions": spans((3, 0, 1))}, "expected all of 2 tokens"),
        ({"routed_experts": None}, "no routed_experts"),
        ({"routed_experts": encode(np.zeros((2, 1, 1)))}, "got 2 numbers .* expected 3"),
    ],
)
def test_answers_that_do_not_fit(changed, message):
    shape = RouteShape(1, (1,), 4, 1) if "routed_experts" in changed else None
    assert decode(make_answer()).output_ids.tolist() == [7, 8]
    with pytest.raises(RuntimeError, match=f"r6: .*{message}"):
        decode(make_answer(**changed), shape=shape)


def test_versions_of_tokens_and_rows():
    shape = RouteShape(1, (1,), 4, 1)
    routes = {"routed_experts": encode(np.zeros((3, 1, 1))), "cached_tokens": 1}

    def rows(*versions, **expected):
        changed = {"weight_versions": spans(*versions), **routes}
        trace = decode(make_answer(**changed), shape=shape, **expected).routing
        return [(s.version, s.start, s.end) for s in trace.row_versions]

    assert rows((3, 0, 2)) == [(3, 0, 3)]
    assert rows((3, 0, 2), cache_version=1) == [(1, 0, 1), (3, 1, 3)]
    assert rows((3, 0, 1), (4, 1, 2), versions=(3, 4)) == [(3, 0, 2), (4, 2, 3)]
    assert rows((3, 0, 2), retracted=True) == [(3, 0, 3)]
    split = rows((3, 0, 1), (4, 1, 2), versions=(3, 4), retracted=True)
    assert split == [(UNKNOWN_VERSION, 0, 2), (4, 2, 3)]
    old = make_answer(weight_versions=None)  # before 0.5.20: the last version alone
    assert decode(old).weight_versions == (VersionSpan(3, 2, 4),)
    with pytest.raises(RuntimeError, match="does not report the version of each token"):
        decode(old, versions=(2, 3))


def test_aborted_answers():
    """The last token is left out: after an abort nobody knows whether it was the end."""
    shape = RouteShape(1, (1,), 4, 1)
    routes = {"routed_experts": encode(np.arange(3).reshape(3, 1, 1)), "cached_tokens": 0}
    abort = {"finish_reason": {"type": "abort"}, **routes}
    cut = decode(make_answer(**abort), shape=shape)
    assert (cut.output_ids.tolist(), cut.logprobs.tolist()) == ([7], [-1.0])
    assert cut.weight_versions == (VersionSpan(3, 2, 3),)
    assert cut.routing.expert_ids.flatten().tolist() == [0, 1]
    assert cut.routing.row_versions == (VersionSpan(3, 0, 2),)
    one = {"output_token_logprobs": [[-1.0, 7, None]], "completion_tokens": 1}
    one |= {"weight_versions": spans((3, 0, 1)), "routed_experts": encode(np.zeros((2, 1, 1)))}
    nothing = decode({**make_answer(**{**abort, **one}), "output_ids": [7]}, shape=shape)
    assert (nothing.output_ids.numel(), nothing.weight_versions, nothing.routing) == (0, (), None)
    queued = {"output_ids": [], "meta_info": {"finish_reason": {"type": "abort"}}}
    assert decode(queued, shape=shape).output_ids.numel() == 0


@pytest.fixture(scope="module")
def cpu_plugin():
    path = Path(mrl.engines.__file__).parent / "sglang/plugins/cpu" / "mrl_sglang_cpu.py"
    spec = importlib.util.spec_from_file_location("mrl_sglang_cpu", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_seeded_sampler_follows_the_distribution(cpu_plugin):
    probs = torch.tensor([0.5, 0.3, 0.15, 0.05, 0.0])
    num = 20_000
    seeds = torch.tensor([sample_seed(0, str(i), 0) for i in range(num)])
    rows = probs.log().expand(num, 5).clone()
    drawn = cpu_plugin.multinomial_with_seed(rows, seeds, torch.full((num,), 17))
    share = torch.bincount(drawn.flatten(), minlength=5) / num
    # Four standard errors of the largest share.
    assert (share - probs).abs().max() < 4 * (0.25 / num) ** 0.5
    assert share[4] == 0


def test_sample_seeds_are_stable_and_distinct():
    assert sample_seed(1, "a", 0) == 4060931855409350013
    seeds = {sample_seed(s, p, i) for s in range(9) for p in ("1", "11", "") for i in range(12)}
    assert len(seeds) == 9 * 3 * 12
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_sampling_params_are_checked():
    for given in (
        {"max_new_tokens": 0},
        {"max_new_tokens": 4, "min_new_tokens": 5},
        {"max_new_tokens": 4, "temperature": -1.0},
        {"max_new_tokens": 4, "top_p": 0.0},
        {"max_new_tokens": 4, "top_k": 0},
        {"max_new_tokens": 4, "stop": ("a", "")},
        {"max_new_tokens": 4, "stop": tuple("abcdefghijklmnopqrstuvwxyzABCDEFG")},
    ):
        with pytest.raises(ValueError, match=r"expected|got an empty"):
            SamplingParams(**given)


def test_engines_are_found_by_name(tmp_path, monkeypatch):
    assert engine_names() == ["sglang"]
    assert load_engine("sglang") is Engine
    with pytest.raises(InputError, match=r"'sglan'.*did you mean 'sglang'"):
        load_engine("sglan")
    for hidden in ("base", "handles"):
        with pytest.raises(InputError, match="expected one of sglang"):
            load_engine(hidden)
    (tmp_path / "outside_engines").mkdir()
    (tmp_path / "outside_engines" / "mine.py").write_text(
        "def build_engine(config): return 'mine'\n"
    )
    (tmp_path / "outside_engines" / "none.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    config = EngineConfig(
        ModelConfig(path="m"), RolloutConfig(max_response_len=8), tmp_path / "log"
    )
    assert load_engine("outside_engines.mine")(config) == "mine"
    with pytest.raises(InputError, match="no class or function 'Engine' or 'build_engine' in it"):
        load_engine("outside_engines.none")
    for absent in ("outside_engines.absent", "absent_package.mine"):
        with pytest.raises(InputError, match="is not in mrl/engines/: expected one of sglang"):
            load_engine(absent)


def test_models_that_the_engine_refuses(toy_folder, tmp_path):
    with pytest.raises(InputError, match=r"no config\.json"):
        make_engine(tmp_path, tmp_path / "log")
    write_toy_model(tmp_path / "dense", mlp_only_layers=(1,))
    with pytest.raises(InputError, match=r"mlp_only_layers=\[1\].*every layer as MoE"):
        make_engine(tmp_path / "dense", tmp_path / "log")
    write_toy_model(tmp_path / "cut")
    weights = tmp_path / "cut" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    with pytest.raises(InputError, match=r"model\.safetensors is damaged"):
        make_engine(tmp_path / "cut", tmp_path / "log")
    weights.unlink()
    with pytest.raises(InputError, match=r"no \*\.safetensors"):
        make_engine(tmp_path / "cut", tmp_path / "log")
    with pytest.raises(InputError, match=r"tensor_parallel_size=1.* 2 GPUs"):
        Engine(
            EngineConfig(
                model=ModelConfig(path=str(toy_folder)),
                rollout=RolloutConfig(max_response_len=8),
                log_path=tmp_path / "log",
                gpu_ids=(0, 1),
            )
        )


def test_toy_model_is_the_same_for_a_seed(toy_folder, tmp_path):
    write_toy_model(tmp_path / "again")
    write_toy_model(tmp_path / "again")
    write_toy_model(tmp_path / "other", seed=1)
    for file in toy_folder.iterdir():
        assert (tmp_path / "again" / file.name).read_bytes() == file.read_bytes(), file.name
    weights = "model.safetensors"
    assert (tmp_path / "other" / weights).read_bytes() != (toy_folder / weights).read_bytes()


def test_toy_model_spares_foreign_folders(tmp_path):
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(InputError, match="not empty"):
        write_toy_model(tmp_path)
    with pytest.raises(InputError, match="is a file"):
        write_toy_model(tmp_path / "thesis.txt")
    assert [file.name for file in tmp_path.iterdir()] == ["thesis.txt"]
    with pytest.raises(InputError, match="vocab_size 99 is too small, expected at least 100"):
        build_tokenizer(99)


def test_toy_tokenizer_round_trips(toy_folder):
    tokenizer = AutoTokenizer.from_pretrained(toy_folder)
    printable = "".join(c for c in string.printable if c.isprintable()) + "\n"
    text = f"{printable}  two  spaces , don 't\n\n 3+4= "
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert len(ids) == len(text)
    assert tokenizer.decode(ids) == text
    assert len(tokenizer) == 128
    assert tokenizer.decode(tokenizer.encode("é")) == "<|unk|>"
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], add_generation_prompt=True, tokenize=False
    )
    assert chat == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.eos_token == "<|im_end|>"

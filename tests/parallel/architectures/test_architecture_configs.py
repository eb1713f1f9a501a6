"""What each architecture makes of a config.json, and what it refuses. No process is started."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from mrl.errors import InputError
from parallel.architectures import architectures, load_architecture
from parallel.architectures.qwen3_next import layer_types
from parallel.expected_tensors import check_tensors, expected_shapes
from parallel.hf_config import HfModel
from parallel.hf_tensors import HfTensors, check_finite_tensors, check_names
from parallel.weights import canonical_name
from tests.parallel.models import GPT_OSS_YARN, LLAMA3, SETTINGS, YARN, write_tiny

OLD_ROPE = {"rope_parameters": None, "rope_theta": 10000.0}
EVERY: list[tuple[dict[str, Any], str]] = [
    ({"attention_bias": True}, "attention_bias"),
    ({"use_sliding_window": True}, "sliding-window"),
    ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding-window"),
    ({**OLD_ROPE, "rope_scaling": {"type": "linear", "factor": 2.0}}, "RoPE type 'linear'"),
    ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
    ({"attention_dropout": 0.1}, "attention_dropout 0.1"),
]
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    *(
        (name, changes, text)
        for name in SETTINGS
        for changes, text in EVERY
        if not (name == "glm4_moe" and changes.keys() & {"attention_bias", "partial_rotary_factor"})
        and not (name == "gpt_oss" and changes.keys() & {"attention_bias", "layer_types"})
        and not (name == "qwen3_next" and "partial_rotary_factor" in changes)
    ),
    ("qwen3", {"rope_parameters": YARN}, "only default and llama3"),
    ("llama", {"rope_parameters": YARN}, "only default and llama3"),
    ("llama", {"mlp_bias": True}, "mlp_bias"),
    ("mixtral", {"rope_parameters": LLAMA3}, "SGLang's Mixtral ignores it"),
    ("mixtral", {"rope_parameters": {"rope_theta": 10000.5}}, "SGLang's Mixtral rounds it down"),
    ("deepseek_v3", {"rope_parameters": LLAMA3}, "only default and yarn"),
    ("qwen3_moe", {"num_experts_per_tok": 1}, "no gradient; set norm_topk_prob to false"),
    ("qwen2_moe", {"num_experts_per_tok": 1, "norm_topk_prob": True}, "no gradient"),
    ("mixtral", {"num_experts_per_tok": 1}, "no gradient; set num_experts_per_tok to 2"),
    ("mixtral", {"sliding_window": 64}, "sliding_window 64 is shorter"),
    ("mixtral", {"router_jitter_noise": 0.1}, "router_jitter_noise"),
    ("olmoe", {"num_experts_per_tok": 1, "norm_topk_prob": True}, "no gradient"),
    ("olmoe", {"clip_qkv": 8.0}, "clip_qkv 8.0 is not supported"),
    ("olmoe", {"head_dim": 16}, "4 heads of 16 are 64 columns, but"),
    ("gpt_oss", {"num_experts_per_tok": 1}, "no gradient; set num_experts_per_tok to 2"),
    ("gpt_oss", {"attention_bias": False}, "biases in all linear layers or in none"),
    ("gpt_oss", {"layer_types": ["full_attention"] * 3}, "layer_types has 3 entries"),
    ("gpt_oss", {"layer_types": ["chunked_attention"] * 4}, "['chunked_attention']; expected 4 of"),
    ("gpt_oss", {"sliding_window": None}, "sliding_window None with layers of sliding_attention"),
    ("gpt_oss", {"swiglu_alpha": 1.0}, "swiglu_alpha 1.0"),
    ("gpt_oss", {"swiglu_limit": 0.0}, "swiglu_limit 0.0"),
    ("gpt_oss", {"tie_word_embeddings": True}, "tie_word_embeddings"),
    ("gpt_oss", {"rope_parameters": LLAMA3}, "only default and yarn"),
    ("gpt_oss", {"rope_parameters": {"rope_theta": 1e4}}, "would take YaRN with a factor of 32"),
    ("gpt_oss", {"rope_parameters": YARN}, "YaRN with mscale"),
    ("gpt_oss", {"rope_parameters": {**GPT_OSS_YARN, "factor": None}}, "needs its factor"),
    ("qwen3_next", {"num_experts_per_tok": 1}, "no gradient"),
    (
        "qwen3_next",
        {**OLD_ROPE, "partial_rotary_factor": None},
        "there is no partial_rotary_factor; write it, 0.25",
    ),
    ("qwen3_next", {"head_dim": 12}, "of head_dim 12 rotates 3 dimensions"),
    ("qwen3_next", {"layer_types": ["linear_attention"] * 3}, "layer_types has 3 entries"),
    ("qwen3_next", {"linear_num_value_heads": 3}, "3 is not a multiple of linear_num_key_heads 2"),
    ("qwen3_next", {"output_gate_type": "sigmoid"}, "output_gate_type 'sigmoid'"),
    ("qwen3_next", {"attn_output_gate": False}, "attn_output_gate false"),
    ("qwen3_next", {"mlp_only_layers": [0, 1, 2, 3]}, "models without experts"),
    ("deepseek_v3", {"rms_norm_eps": 1e-5}, "one epsilon"),
    ("deepseek_v3", {"rope_interleave": False}, "rope_interleave"),
    ("deepseek_v3", {"num_key_value_heads": 2}, "must equal num_attention_heads 4"),
    ("deepseek_v32", {"index_topk": 0}, "index_topk is 0, expected a positive whole number"),
    ("deepseek_v32", {"index_n_heads": True}, "index_n_heads is True, expected a positive"),
    ("deepseek_v32", {"index_head_dim": 4}, "index_head_dim 4 is less than qk_rope_head_dim 8"),
    ("deepseek_v32", {"q_lora_rank": None}, "the indexer reads the queries' latent"),
    (
        "deepseek_v32",
        {"mlp_layer_types": ["sparse"] * 4},
        "expected 1 dense layers, and then sparse",
    ),
    ("deepseek_v32", {"layer_types": ["sliding_attention"] * 4}, "only full attention"),
    ("deepseek_v32", {"indexer_rope_interleave": True}, "the indexer's RoPE is not interleaved"),
    ("deepseek_v32", {"rope_parameters": LLAMA3}, "only default and yarn"),
    *(
        (name, changes, text)
        for name in ("deepseek_v3", "glm4_moe")
        for changes, text in (
            ({"moe_layer_freq": 2}, "moe_layer_freq"),
            ({"n_shared_experts": 0}, "n_shared_experts"),
            ({"first_k_dense_replace": 4}, "no MoE layer"),
            ({"scoring_func": "softmax"}, "scoring_func 'softmax'"),
            ({"topk_method": "greedy"}, "topk_method 'greedy'"),
            ({"norm_topk_prob": False}, "normalises exactly when"),
            ({"num_experts_per_tok": 1}, "normalises exactly when"),
            ({"routed_scaling_factor": 0}, "routed_scaling_factor"),
            ({"n_group": 3}, "n_group 3"),
            ({"num_experts_per_tok": 4}, "4 // 1 = 4 experts, the model by its best 2"),
        )
    ),
    (
        "glm4_moe",
        {"rope_parameters": {"rope_theta": 1e4}, "partial_rotary_factor": None},
        "there is no partial_rotary_factor",
    ),
    *(
        (
            "glm4_moe",
            {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": number}},
            text,
        )
        for number, text in ((0.2, "of head_dim 16 rotates 3 dim"), (1.5, "rotates 24 dimensions"))
    ),
    ("deepseek_v3", {"rope_parameters": {**YARN, "mscale": None}}, "both or none"),
    ("deepseek_v3", {"rope_parameters": {**YARN, "attention_factor": 1.0}}, "attention_factor"),
    ("deepseek_v3", {"rope_parameters": {**YARN, "truncate": False}}, "truncate"),
    ("deepseek_v3", {"rope_parameters": {**YARN, "factor": None}}, "needs its factor"),
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("configs")
    return {name: write_tiny(name, root / name) for name in SETTINGS}


def settings_of(folder: Path, **changes: Any) -> dict[str, Any]:
    config = {**json.loads((folder / "config.json").read_text()), **changes}
    return load_architecture(config["model_type"]).transformer_config(config)


def test_every_architecture_of_the_folder_is_in_these_tests() -> None:
    assert architectures() == sorted(SETTINGS)


@pytest.mark.parametrize(("model_type", "changes", "text"), REFUSED)
def test_what_megatron_would_compute_otherwise_is_refused(
    model_type: str, changes: dict[str, Any], text: str, folders: dict[str, Path]
) -> None:
    with pytest.raises(InputError) as error:
        settings_of(folders[model_type], **changes)
    message = str(error.value)
    assert text in message
    assert model_type in message
    assert "\n" not in message


@pytest.mark.parametrize("model_type", SETTINGS)
def test_configs_of_transformers_4_mean_the_same(model_type: str, folders: dict[str, Path]) -> None:
    """There, theta stands beside rope_scaling, whose kind is called `type`."""
    new = json.loads((folders[model_type] / "config.json").read_text())["rope_parameters"]
    outside = {k: v for k, v in new.items() if k in ("rope_theta", "partial_rotary_factor")}
    yarn = {k: v for k, v in new.items() if k not in (*outside, "rope_type")}
    old = {
        "rope_parameters": None,
        **outside,
        "rope_scaling": {"type": "yarn", **yarn} if yarn else None,
    }
    assert settings_of(folders[model_type], **old) == settings_of(folders[model_type])


@pytest.mark.parametrize("key", ["low_freq_factor", "original_max_position_embeddings"])
def test_a_llama3_rope_that_megatron_cannot_compute_is_refused(key: str, tmp_path: Path) -> None:
    folder = write_tiny("llama", tmp_path / "model", rope_parameters={**LLAMA3, key: 2.0})
    with pytest.raises(InputError, match=rf"{key} 2.0 is not supported, only"):
        HfModel.read(folder)


@pytest.mark.parametrize("factor", [0, -8.0, float("nan"), float("inf"), "8", True, None])
def test_a_llama3_factor_is_a_positive_number(factor: object, tmp_path: Path) -> None:
    folder = write_tiny("llama", tmp_path / "model")
    file = folder / "config.json"
    config = json.loads(file.read_text()) | {"rope_parameters": {**LLAMA3, "factor": factor}}
    file.write_text(json.dumps(config))
    with pytest.raises(InputError, match="RoPE type llama3 with factor"):
        HfModel.read(folder)


def test_sizes_for_the_layout_checks(folders: dict[str, Path]) -> None:
    sizes = {name: HfModel.read(folder).sizes for name, folder in folders.items()}
    numbers = {
        name: (s.dense_ffn_size, s.num_experts, s.moe_ffn_size, s.shared_expert_ffn_size)
        for name, s in sizes.items()
    }
    assert numbers == {
        "qwen3": (48, 0, 0, 0),
        "qwen2": (48, 0, 0, 0),
        "llama": (48, 0, 0, 0),
        "qwen3_moe": (48, 4, 16, 0),
        "qwen2_moe": (48, 4, 16, 24),
        "mixtral": (0, 4, 48, 0),
        "olmoe": (0, 8, 48, 0),
        "glm4_moe": (48, 8, 16, 32),
        "gpt_oss": (0, 4, 16, 0),
        "qwen3_next": (0, 8, 16, 24),
        "deepseek_v3": (48, 8, 16, 32),
        "deepseek_v32": (48, 8, 16, 32),
    }
    layers = {name: HfModel.read(folder).moe_layer_numbers for name, folder in folders.items()}
    assert layers == {
        "qwen3": (),
        "qwen2": (),
        "llama": (),
        "qwen3_moe": (1, 3, 4),
        "qwen2_moe": (2, 4),
        "mixtral": (1, 2, 3, 4),
        "olmoe": (1, 2, 3, 4),
        "glm4_moe": (2, 3, 4),
        "gpt_oss": (1, 2, 3, 4),
        "qwen3_next": (1, 2, 3, 4),
        "deepseek_v3": (2, 3, 4),
        "deepseek_v32": (2, 3, 4),
    }
    assert sizes["deepseek_v3"].num_query_groups == 4


def test_the_plan_names_the_model(folders: dict[str, Path]) -> None:
    lines = {name: HfModel.read(folder).describe() for name, folder in folders.items()}
    assert lines["qwen3"] == "qwen3, dense, 4 layers"
    assert lines["llama"] == "llama, dense, 4 layers"
    assert lines["qwen2_moe"] == "qwen2_moe, 4 experts in 2 of 4 layers"
    assert lines["deepseek_v3"] == "deepseek_v3, 8 experts in 3 of 4 layers"


def test_every_fourth_layer_has_full_attention(folders: dict[str, Path]) -> None:
    """transformers 5 writes the kind of each layer, and older folders have the interval or nothing."""
    config = json.loads((folders["qwen3_next"] / "config.json").read_text())
    kinds = [*["linear_attention"] * 3, "full_attention"]
    assert config["layer_types"] == kinds
    del config["layer_types"]
    assert layer_types(config) == kinds
    assert layer_types(config | {"full_attention_interval": 2}) == kinds[2:] * 2
    model = HfModel.read(folders["qwen3_next"])
    for name in ("0.self_attn.q_proj.weight", "3.linear_attn.A_log"):
        with pytest.raises(InputError, match="1 weight"):
            check_names(model, {f"model.layers.{name}"})
    assert check_names(model, {"mtp.layers.0.self_attn.q_proj.weight"}) is None
    assert "(mtp.*) is not trained, and exported as it is" in model.describe()


def test_weights_that_the_model_would_not_have_are_refused(folders: dict[str, Path]) -> None:
    model = HfModel.read(folders["deepseek_v3"])
    with HfTensors(model) as tensors:
        names = tensors.names
    check_names(model, names | {"model.layers.0.self_attn.rotary_emb.inv_freq"})
    for extra in (
        "model.layers.1.mlp.experts.0.up_proj.weight_scale_inv",
        "model.layers.1.mlp.experts.8.up_proj.weight",
        "model.layers.4.eh_proj.weight",
        "model.layers.4.input_layernorm.weight",
    ):
        with pytest.raises(InputError, match="1 weight"):
            check_names(model, names | {extra})


def test_config_json_says_which_tensors_there_are_and_how_large(folders: dict[str, Path]) -> None:
    """Exactly those that transformers wrote, of every architecture."""
    for folder in folders.values():
        model = HfModel.read(folder)
        expected = list(expected_shapes(model))
        with HfTensors(model) as tensors:
            assert sorted(expected) == sorted((n, tensors.shape(n)) for n in tensors.names)
            check_tensors(model, tensors)
            check_finite_tensors(model, tensors, whole=True)


def test_only_the_files_of_the_index_are_read(folders: dict[str, Path], tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(folders["mixtral"], folder)
    model = HfModel.read(folder)
    save_file({"layers.0.attention.wq.weight": torch.zeros(1)}, folder / "consolidated.safetensors")
    with HfTensors(model) as tensors, pytest.raises(InputError, match=r"layers\.0\.attention"):
        check_names(model, tensors.names)
    index = {"weight_map": {"lm_head.weight": "model.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with HfTensors(model) as tensors:
        check_names(model, tensors.names)
    (folder / "model.safetensors").unlink()
    with pytest.raises(InputError, match=r"lists model\.safetensors, which is not there"):
        HfTensors(model)


@pytest.mark.parametrize("model_type", ["deepseek_v3", "deepseek_v32", "glm4_moe"])
def test_layers_of_multi_token_prediction_are_not_read_and_said_so(
    model_type: str, folders: dict[str, Path]
) -> None:
    model = HfModel.read(folders[model_type])
    model.config["num_nextn_predict_layers"] = 1
    assert model.describe() == (
        f"{model_type}, 8 experts in 3 of 4 layers, a multi-token-prediction layer is not trained, and "
        "exported as it is"
    )
    check_names(model, {"model.layers.4.eh_proj.weight"})
    with pytest.raises(InputError, match=r"model\.layers\.5"):
        check_names(model, {"model.layers.5.eh_proj.weight"})


@pytest.mark.parametrize("count", ["one", 1.5, 10**9])
def test_a_wrong_number_of_multi_token_prediction_layers_is_refused(
    count: object, tmp_path: Path, folders: dict[str, Path]
) -> None:
    config = json.loads((folders["glm4_moe"] / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": count}))
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(InputError, match=r"num_nextn_predict_layers|wrong type or size"):
        HfModel.read(tmp_path)


@pytest.mark.parametrize(
    ("engine", "local"),
    [
        ("self_attention.linear_qkv.layer_norm_weight", "input_layernorm.weight"),
        ("mlp.linear_fc1.layer_norm_weight", "pre_mlp_layernorm.weight"),
        (
            "self_attention.linear_q_up_proj.layer_norm_weight",
            "self_attention.q_layernorm.weight",
        ),
        (
            "self_attention.linear_kv_up_proj.layer_norm_weight",
            "self_attention.kv_layernorm.weight",
        ),
        ("mlp.experts.linear_fc1.weight3", "mlp.experts.local_experts.3.linear_fc1.weight"),
        ("mlp.shared_experts.linear_fc1.weight", "mlp.shared_experts.linear_fc1.weight"),
    ],
)
def test_names_of_transformer_engine(engine: str, local: str) -> None:
    """Read from Megatron's source; nothing here has TransformerEngine."""
    assert canonical_name(f"decoder.layers.2.{engine}") == f"decoder.layers.2.{local}"

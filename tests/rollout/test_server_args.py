"""`rollout.server_args`: passed through to SGLang, refused where mrl answers for the field itself."""

from __future__ import annotations

import ast
import importlib.util
import json
from contextlib import nullcontext
from pathlib import Path

import pytest

from mrl.config import ModelConfig, RolloutConfig
from mrl.engines.base import EngineConfig
from mrl.engines.sglang import arguments
from mrl.engines.sglang.limits import check_limits
from mrl.engines.sglang.settings import server_settings
from mrl.errors import InputError


def settings(
    *, on_gpu: bool = True, trainer: str = "auto", engine: str = "auto", **server_args: object
) -> dict[str, object]:
    rollout = {"max_response_len": 8, "dtype": engine, "server_args": dict(server_args)}
    config = EngineConfig(
        ModelConfig.model_validate({"path": "somewhere", "dtype": trainer}),
        RolloutConfig.model_validate(rollout),
        Path("engine.log"),
        gpu_ids=(0,) * on_gpu,
    )
    return server_settings(config, context_len=64)


def test_a_field_of_the_recipe_is_set_and_wins() -> None:
    plain = settings()
    asked = settings(attention_backend="triton", sampling_backend="flashinfer")
    assert "attention_backend" not in plain
    assert asked == {**plain, "attention_backend": "triton", "sampling_backend": "flashinfer"}
    assert settings(on_gpu=False)["attention_backend"] == "torch_native"


def test_the_engine_computes_in_the_trainers_dtype_unless_told() -> None:
    assert [settings(on_gpu=gpu)["dtype"] for gpu in (True, False)] == ["bfloat16", "float32"]
    assert settings(trainer="float32")["dtype"] == "float32"
    assert settings(trainer="float32", engine="bfloat16")["dtype"] == "bfloat16"
    assert settings(engine="float32")["dtype"] == "float32"


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("tp_size", 2, "use rollout.tensor_parallel_size"),
        ("dtype", "bfloat16", "use rollout.dtype"),
        ("host", "0.0.0.0", "child process on loopback"),
        ("log_level", "info", "would print the key"),
        ("preferred_sampling_params", '{"min_p": 0.1}', "log-probs and masks rely on it"),
        ("attention_backnd", "triton", "did you mean 'attention_backend'?"),
        ("moe_runner_backend", "tritn", "SGLang expects one of auto, deep_gemm, triton"),
        ("moe_a2a_backend", "deep_ep", "SGLang expects one of none, deepep"),
        ("chunked_prefill_size", "4096", "SGLang expects int or null"),
        ("schedule_conservativeness", True, "SGLang expects float"),
        ("enable_fp32_lm_head", "true", "SGLang expects bool"),
    ],
)
def test_a_field_that_may_not_be_set_is_refused_in_one_line(name, value, expected) -> None:
    with pytest.raises(InputError) as refusal:
        settings(**{name: value})
    assert expected in str(refusal.value)
    assert str(refusal.value).startswith(f"rollout.server_args.{name}: got ")
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("rope", "is_refused"),
    [
        ({"rope_scaling": {"type": "llama3"}, "rope_theta": 1e4}, True),
        ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4}}, True),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}, False),
        ({"rope_theta": 1e4, "rope_scaling": None}, False),
    ],
)
def test_a_kernel_that_rotates_by_other_angles_is_refused(
    rope: dict[str, object], is_refused: bool, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3_moe", **rope}))
    for fused in (True, False):
        rollout = RolloutConfig(
            max_response_len=8, server_args={"enable_fused_qk_norm_rope": fused}
        )
        expected = pytest.raises(InputError, match="llama3, which SGLang's fused kernel")
        with expected if fused and is_refused else nullcontext():
            check_limits(tmp_path, rollout, on_gpu=True, return_routes=True)


def test_every_name_here_is_a_field_of_the_installed_sglang() -> None:
    names = {*arguments.OWNED, *(name for names in arguments.FIXED.values() for name in names)}
    assert names - arguments.field_names() == set()
    assert set(settings()) | set(settings(on_gpu=False)) <= arguments.field_names()


def test_the_defaults_of_the_installed_sglang_fit_what_was_read() -> None:
    found = arguments.fields()
    assert sum(bool(field.types) for field in found.values()) > 0.8 * len(found)
    assert sum(bool(field.choices) for field in found.values()) > 50
    spec = importlib.util.find_spec("sglang")
    assert spec is not None
    assert spec.origin is not None
    wrong, num_read = {}, 0
    for file in (Path(spec.origin).parent / "srt/arg_groups/fields").glob("*.py"):
        for line in ast.walk(ast.parse(file.read_bytes())):
            if isinstance(line, ast.AnnAssign) and isinstance(line.value, ast.Constant):
                assert isinstance(line.target, ast.Name)
                num_read += 1
                if expected := found[line.target.id].problem(line.value.value):
                    wrong[line.target.id] = (line.value.value, expected)
    assert num_read > 300
    assert wrong == {}


def test_names_are_also_read_from_one_class(tmp_path, monkeypatch) -> None:
    """SGLang 0.5.12 has all of them in server_args.py, beside classes of other fields."""
    (tmp_path / "sglang" / "srt").mkdir(parents=True)
    (tmp_path / "sglang" / "__init__.py").write_text("")
    (tmp_path / "sglang" / "srt" / "server_args.py").write_text(
        "class ServerArgs:\n    model_path: str\n    ep_size: int = 1\n"
        "class PortArgs:\n    x: int = 0\n"
    )
    monkeypatch.setattr(arguments.importlib.util, "find_spec", lambda name: _Spec(tmp_path))
    arguments.fields.cache_clear()
    try:
        assert arguments.field_names() == {"model_path", "ep_size"}
    finally:
        arguments.fields.cache_clear()


class _Spec:
    def __init__(self, folder) -> None:
        self.submodule_search_locations = [str(folder / "sglang")]

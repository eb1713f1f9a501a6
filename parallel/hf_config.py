"""Read a model folder's config.json and find its architecture, without Megatron or weights."""

from __future__ import annotations

import dataclasses
import difflib
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mrl.errors import InputError
from mrl.system.json_text import parse_json
from parallel.architectures import find_architecture
from parallel.architectures.base import Architecture, HfConfig
from parallel.architectures.common import rope_scaling_factor, rope_settings, rotary_fraction
from parallel.architectures.mtp import training_mtp
from parallel.dims import ModelSizes

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
"""The form of a model's id on the Hugging Face hub: ORGANISATION/NAME."""

COUNTS = frozenset(
    {
        *("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size"),
        *("max_position_embeddings", "num_experts_per_tok", "intermediate_size"),
        *("num_key_value_heads", "head_dim"),
    }
)
"""Keys of config.json whose value, if present, must be a positive integer."""
MAY_BE_NULL = frozenset({"num_key_value_heads", "head_dim"})
"""Keys of COUNTS that may be null. Their values then follow from other keys."""

LARGEST_COUNT = 2**31 - 1
LARGEST_COUNTS = {
    **dict.fromkeys(("num_hidden_layers", "num_nextn_predict_layers"), 10_000),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 1 << 16),
}
"""The largest allowed values of some keys of config.json. They are lower than LARGEST_COUNT, the limit
of all other keys, because mrl makes lists with one entry for each layer or expert."""
TWO_NAMES = (
    (("num_experts",), ("num_local_experts",)),
    (("rope_theta",), ("rope_parameters", "rope_theta")),
)
"""Pairs of keys in config.json with the same meaning, each key as its path from the top level.
transformers 4 writes the first key of a pair, and transformers 5 the second."""


def read_config(folder: Path) -> HfConfig:
    """Read config.json of a model folder, which need not have weights. Raises InputError if the
    folder or its config.json is missing, or if config.json is invalid."""
    if folder.is_file():
        raise InputError(f"model.path: {folder} is a file; give the folder of a checkpoint")
    if not folder.is_dir():
        names = [each.name for each in folder.parent.glob("*/")] if folder.parent.is_dir() else []
        near = difflib.get_close_matches(folder.name, names, n=1)
        hint = f"; did you mean {folder.with_name(near[0])}?" if near else ""
        if HUB_ID.fullmatch(str(folder)) and folder.parts[0] != "toy":
            raise InputError(
                f"model.path: no folder {folder}, and mrl downloads nothing. If it is a model of the "
                f"Hugging Face hub, run `hf download {folder} --local-dir models/{folder.name}` (or "
                f"huggingface-cli download) and give model.path=models/{folder.name}{hint}"
            )
        raise InputError(
            f"model.path: no folder {folder}; give a Hugging Face checkpoint (for `mrl check --plan` "
            f"its config.json alone is enough), or make a toy one with `mrl toy-model {folder}`{hint}"
        )
    file = folder / "config.json"
    try:
        config = parse_json(file.read_text(), f"model.path: {file}")
    except OSError:
        raise InputError(
            f"model.path: {folder} has no config.json; give the folder of a Hugging Face checkpoint"
        ) from None
    except InputError:
        raise
    except (ValueError, RecursionError) as error:
        raise InputError(f"model.path: {file} is not valid JSON: {error}") from None
    if not isinstance(config, dict):
        raise InputError(f"model.path: {file}: expected an object, got {type(config).__name__}")
    for key in COUNTS & config.keys():
        count = config[key]
        if count is None and key in MAY_BE_NULL:
            continue
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise InputError(f"model.path: {file}: {key} is {count!r}, expected a positive number")
    for key in (COUNTS | LARGEST_COUNTS.keys()) & config.keys():
        count, most = config[key], LARGEST_COUNTS.get(key, LARGEST_COUNT)
        if isinstance(count, int | float) and not count <= most:
            raise InputError(
                f"model.path: {file}: {key} is {count!r:.30}, expected at most {most}; download it "
                "again"
            )
    _check_two_names(config, file)
    return config


def _check_two_names(config: HfConfig, file: Path) -> None:
    """Raise InputError if two keys with the same meaning have different values, because mrl may
    read one of the keys and the engine the other."""
    for old, new in TWO_NAMES:
        one, other = _at(config, old), _at(config, new)
        if None not in (one, other) and one != other:
            raise InputError(
                f"model.path: {file}: {'.'.join(old)} is {one!r:.30} and {'.'.join(new)} is "
                f"{other!r:.30}, which mean the same; remove the wrong one"
            )


def _at(config: HfConfig, place: tuple[str, ...]) -> Any:
    found: Any = config
    for key in place:
        found = found.get(key) if isinstance(found, dict) else None
    return found


def _check_positive(config: HfConfig, theta: float, file: Path) -> None:
    """Raise InputError if `rms_norm_eps` or `theta` (RoPE theta) is not a positive finite number."""
    for key, number in (("rms_norm_eps", config.get("rms_norm_eps")), ("rope_theta", theta)):
        if number is not None and not 0 < float(number) < float("inf"):
            raise InputError(
                f"model.path: {file}: {key} is {number!r:.30}, expected a positive finite number; "
                "download it again"
            )


def stored_quantization(config: HfConfig, path: str) -> HfConfig | None:
    """Return the `quantization_config` of a config.json whose weights are stored in fp8 blocks of 128 x
    128; None if the weights are not quantised. Raises InputError for any other format. `path` is the
    model folder."""
    found = config.get("quantization_config")
    if found is None:
        return None
    method, block = found.get("quant_method"), found.get("weight_block_size")
    if method == "mxfp4":
        raise InputError(
            f"model.path: {path}/config.json has weights quantised by 'mxfp4', which mrl does not "
            "read; load it with Mxfp4Config(dequantize=True) of transformers and dtype=bfloat16, save "
            "it with save_pretrained, and give that folder"
        )
    if method != "fp8" or block != [128, 128]:
        raise InputError(
            f"model.path: {path}/config.json has weights quantised by {method!r} with "
            f"weight_block_size {block}, expected none, or 'fp8' with [128, 128]; give the folder of "
            "the weights in bfloat16"
        )
    return found


def has_weights(folder: Path) -> bool:
    """Return whether a model folder has weights, and not only a config.json."""
    return any(folder.glob("*.safetensors"))


@dataclass(frozen=True)
class HfModel:
    """A model folder whose config.json has been checked."""

    path: Path
    config: HfConfig
    architecture: Architecture
    named: str | None = None
    """The recipe's `model.architecture`; None if the `model_type` in config.json decides."""

    @classmethod
    def read(cls, path: str | Path, named: str | None = None) -> HfModel:
        """Read a folder. The architecture of the model is the one `named` in the recipe, or else
        the one for the `model_type` in config.json.

        Raises InputError for a missing folder, file or key, a wrong value, or an unsupported
        architecture.
        """
        folder = Path(path)
        config = read_config(folder)
        if not has_weights(folder):
            raise InputError(
                f"model.path: {folder} has no *.safetensors weights; download them, or, where they "
                "are *.bin files, load the model with transformers and save it with save_pretrained"
            )
        model = cls(folder, config, find_architecture(config, named), named)
        try:
            _ = model.sizes, model.context_len
            stored_quantization(config, str(folder))
            _check_positive(config, model.rotary_base, folder / "config.json")
            _ = model.rope_scaling_factor, model.rotary_fraction
            settings = model.architecture.transformer_config(config)
            model.architecture.unread(config)
        except KeyError as error:
            raise InputError(f"model.path: {folder}/config.json lacks the key {error}") from None
        except (TypeError, ValueError, AttributeError, ArithmeticError, IndexError) as error:
            if isinstance(error, InputError):
                raise
            raise InputError(
                f"model.path: {folder}/config.json has a value of a wrong type or size "
                f"({type(error).__name__}: {error}); download it again"
            ) from None
        topk, experts = settings.get("moe_router_topk", 0), model.sizes.num_experts
        if model.moe_layer_numbers and topk > experts:
            raise InputError(
                f"model.path: {folder}/config.json routes a token to {topk} experts, but has {experts}"
            )
        return model

    def read_like(self, path: str | Path) -> HfModel:
        """Read another folder. If it has the same `model_type`, the recipe's `model.architecture`
        applies to it as well.

        Raises InputError as `read` does.
        """
        is_alike = read_config(Path(path)).get("model_type") == self.config.get("model_type")
        return HfModel.read(path, self.named if is_alike else None)

    @property
    def sizes(self) -> ModelSizes:
        return self.architecture.sizes(self.config)

    @property
    def moe_layer_numbers(self) -> tuple[int, ...]:
        """Megatron's 1-based numbers of the MoE layers."""
        return self.architecture.moe_layer_numbers(self.config)

    def differences(self, other: HfModel) -> list[str]:
        """List the settings that differ between this model and `other`, and that would change the
        log-probs of the same weights.

        Equal sizes are not enough, because RoPE theta and routing matter too. In the returned
        strings "there" means `other`, and "here" means this model.
        """
        here, there = self._settings(), other._settings()
        return [
            f"{key} {there.get(key)} there, {here.get(key)} here"
            for key in here | there
            if here.get(key) != there.get(key)
        ]

    def _settings(self) -> dict[str, Any]:
        return {
            "model_type": self.architecture.model_type,
            **dataclasses.asdict(self.sizes),
            "rope_theta": self.rotary_base,
            "rope_scaling_factor": self.rope_scaling_factor,
            "partial_rotary_factor": self.rotary_fraction,
            "tie_word_embeddings": self.tied_embeddings,
            **self.architecture.transformer_config(self.config),
        }

    def describe(self) -> str:
        """Return one line for the plan, including the parts of the checkpoint that mrl leaves out."""
        layers, moe_layers = f"{self.sizes.num_layers} layers", len(self.moe_layer_numbers)
        experts = (
            f"{self.sizes.num_experts} experts in {moe_layers} of " if moe_layers else "dense, "
        )
        parts = [self.architecture.model_type, experts + layers]
        if num_mtp := self.architecture.num_trained_mtp:
            parts.append(f"{num_mtp} multi-token-prediction layer(s), trained")
        return ", ".join([*parts, *dict.fromkeys(self.architecture.unread(self.config).values())])

    def training_mtp(self) -> HfModel:
        """Return the model with its multi-token-prediction layers, which must exist, among the layers
        that are read and trained."""
        architecture = training_mtp(self.architecture, self.config)
        return dataclasses.replace(self, architecture=architecture)

    @property
    def context_len(self) -> int:
        """The maximum length of a sequence in tokens."""
        return self.config["max_position_embeddings"]

    @property
    def rotary_base(self) -> float:
        """RoPE theta, from the key of transformers 4 or 5."""
        return rope_settings(self.config)["rope_theta"]

    @property
    def rotary_fraction(self) -> float:
        """The fraction of a head's dimensions that RoPE rotates."""
        return rotary_fraction(self.config)

    @property
    def rope_scaling_factor(self) -> float | None:
        """The factor by which RoPE type llama3 divides low frequencies; None for other types."""
        return rope_scaling_factor(self.config)

    @property
    def tied_embeddings(self) -> bool:
        return bool(self.config.get("tie_word_embeddings"))

"""Read PEFT's adapter_config.json. Any adapter that does not compute
`W x + (alpha / rank) B (A x)` is refused."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mrl.config.adapter import Adapter
from mrl.errors import InputError
from mrl.system.json_text import parse_json

CONFIG = "adapter_config.json"
NEUTRAL = frozenset(
    {
        *("peft_type", "task_type", "auto_mapping", "peft_version", "base_model_name_or_path"),
        *("revision", "inference_mode", "runtime_config", "megatron_config", "megatron_core"),
        *("r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_rslora", "init_lora_weights"),
        *("target_modules", "exclude_modules", "target_parameters", "layers_to_transform"),
        *("layers_pattern", "lora_dropout", "fan_in_fan_out", "qalora_group_size"),
        *("loftq_config", "eva_config", "corda_config", "lora_ga_config", "ensure_weight_tying"),
    }
)
"""Keys of adapter_config.json that may have any value here; all other keys must be false, 0 or empty.
Some of these keys are checked separately. The others do not change the formula `W x + (alpha / rank) B
(A x)`: for example, `target_modules` only repeats which modules the tensors belong to, `fan_in_fan_out`
has no meaning for linear layers, and mrl uses no dropout."""
PLAIN_STARTS = (True, False, "gaussian", "orthogonal", "eva")
"""Values of `init_lora_weights` that leave the base weights unchanged."""


@dataclass(frozen=True)
class PeftConfig:
    """The rank and the scale of each module of a PEFT folder."""

    rank: int
    alpha: float
    ranks: Mapping[str, int]
    """The ranks that replace `rank` in some modules, keyed by a regular expression that matches the end
    of the module's name."""
    alphas: Mapping[str, float]
    """The alphas that replace `alpha` in some modules, keyed as in `ranks`."""

    def rank_of(self, module: str) -> int:
        """Return the rank of a module, such as `model.layers.0.self_attn.q_proj`."""
        return self.ranks.get(_pattern(self.ranks, module), self.rank)

    def scale_of(self, module: str) -> float:
        """Return alpha / rank of a module, the factor by which its `B A` is multiplied."""
        return self.alphas.get(_pattern(self.alphas, module), self.alpha) / self.rank_of(module)


def _pattern(patterns: Mapping[str, Any], module: str) -> str:
    """Return the first pattern that matches the end of a module's name, as in PEFT; the name itself
    if no pattern matches."""
    fits = (key for key in patterns if re.match(rf"(.*\.)?({key})$", module))
    return next(fits, module)


def read_peft_config(folder: Path, adapter: Adapter) -> PeftConfig:
    """Read adapter_config.json of a folder that should hold `adapter`.

    Raises InputError if the file is missing or invalid, or has another rank, alpha or formula than
    `adapter`.
    """
    file = folder / CONFIG
    where = f"lora.path: {file}"
    config = _read(file, where)
    if config.get("peft_type") != "LORA":
        raise InputError(
            f"{where}: peft_type is {config.get('peft_type')!r}, expected 'LORA'; give the folder of a "
            "LoRA adapter"
        )
    for key, name, ours in (
        ("r", "rank", adapter.rank),
        ("lora_alpha", "alpha", adapter.alpha),
    ):
        if not _is_positive(config.get(key)):
            raise InputError(
                f"{where}: {key} is {config.get(key)!r}, expected a positive number; save the adapter "
                "again"
            )
        if config[key] != ours:
            raise InputError(
                f"{where}: {key} is {config[key]}, but lora.{name} is {ours:g}; give "
                f"lora.{name}={config[key]}"
            )
    _check_formula(config, where)
    ranks, alphas = (_patterns(config, key, where) for key in ("rank_pattern", "alpha_pattern"))
    return PeftConfig(adapter.rank, adapter.alpha, ranks, alphas)


def _read(file: Path, where: str) -> dict[str, Any]:
    try:
        config = parse_json(file.read_text(), where)
    except OSError as error:
        raise InputError(
            f"{where}: {error.strerror}; give the folder that PEFT's save_pretrained or `mrl export` "
            "wrote"
        ) from None
    except InputError:
        raise
    except (ValueError, RecursionError) as error:
        raise InputError(f"{where} is not valid JSON: {error}; save the adapter again") from None
    if not isinstance(config, dict):
        raise InputError(f"{where}: expected an object, got {type(config).__name__}")
    return config


def _check_formula(config: dict[str, Any], where: str) -> None:
    """Raise InputError for a setting that changes the formula `W x + (alpha / rank) B (A x)`."""
    if config.get("use_rslora"):
        same = config["lora_alpha"] * math.sqrt(config["r"])
        raise InputError(
            f"{where}: use_rslora is true, which scales by lora_alpha / sqrt(r), expected false; the "
            f"same adapter has use_rslora false and lora_alpha {same!r} (lora.alpha={same!r})"
        )
    start = config.get("init_lora_weights", True)
    if start not in PLAIN_STARTS:
        raise InputError(
            f"{where}: init_lora_weights is {start!r}, which changes the base weights too, expected "
            "true; convert it to plain LoRA (path_initial_model_for_weight_conversion of PEFT's "
            "save_pretrained)"
        )
    if config.get("bias", "none") != "none":
        raise InputError(
            f"{where}: bias is {config['bias']!r}, expected 'none': mrl trains A and B alone; train "
            "the adapter without biases, or merge it into the model"
        )
    for key in sorted(config.keys() - NEUTRAL - {"bias"}):
        if config[key]:
            raise InputError(
                f"{where}: {key} is {config[key]!r:.60}, expected none: mrl computes W x + (alpha / "
                "rank) B (A x) and nothing else; train the adapter without it, or merge it into the "
                "model"
            )


def _patterns(config: dict[str, Any], key: str, where: str) -> dict[str, Any]:
    """Return the value of `key` (rank_pattern or alpha_pattern); empty if it is missing. Raises
    InputError if it is invalid."""
    found = config.get(key) or {}
    try:
        if all(_is_positive(value) and re.compile(name) for name, value in found.items()):
            return found
    except (AttributeError, TypeError, re.error):
        pass
    raise InputError(
        f"{where}: {key} is {found!r:.60}, expected regular expressions with a positive number each; "
        "save the adapter again"
    )


def _is_positive(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf

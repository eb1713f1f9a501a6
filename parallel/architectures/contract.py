"""Check that a user's own architecture fulfils the contract of `base`, before anything uses it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any, get_args

from mrl.errors import InputError
from parallel.architectures.base import Architecture, HfConfig, Rule, Split
from parallel.dims import ModelSizes

FUNCTIONS = ("sizes", "transformer_config", "rules", "moe_layer_numbers", "unread")
SETTINGS = (
    *("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "kv_channels"),
    "moe_layer_freq",
)
"""Keys that the result of `transformer_config` must have, because the memory plan reads them."""
ALIKE = {
    "num_layers": "num_layers",
    "num_attention_heads": "num_attention_heads",
    "num_moe_experts": "num_experts",
}
"""Maps keys of `transformer_config` to the fields of `sizes` that must have the same value."""
PARTS = {"gated": 2, "qkv": 3, "gated_qkv": 3}
"""Maps the kind of a parameter's split to the number of HF tensors that form the parameter. A parameter
of any other kind consists of one HF tensor."""


def check_object(spec: str, found: Any) -> Architecture:
    """Return `found` if it is an Architecture with functions in its fields. Raises InputError
    otherwise. `spec` is the recipe's `model.architecture`, for the message."""
    if not isinstance(found, Architecture):
        raise InputError(
            f"model.architecture {spec!r} is a {type(found).__name__}, expected an object of "
            "parallel.architectures.base.Architecture (docs/architecture.md has an example)"
        )
    for name in FUNCTIONS:
        if not callable(getattr(found, name)):
            raise InputError(
                f"model.architecture {spec!r}: {name} is {getattr(found, name)!r}, expected a function "
                "of the parsed config.json"
            )
    return found


def check_contract(spec: str, architecture: Architecture, config: HfConfig) -> None:
    """Call the functions of an architecture with a parsed config.json, and check what they return.

    Raises an InputError that names the function, what it returned and what was expected.
    """
    sizes = _call(spec, "sizes", architecture.sizes, config)
    _expect(spec, "sizes", sizes, isinstance(sizes, ModelSizes), "a parallel.dims.ModelSizes")
    settings = _call(spec, "transformer_config", architecture.transformer_config, config)
    lost = [key for key in SETTINGS if not isinstance(settings, dict) or key not in settings]
    _expect(spec, "transformer_config", settings, not lost, f"a dict with {', '.join(lost)}")
    _check_settings(spec, settings, sizes)
    layers = _call(spec, "moe_layer_numbers", architecture.moe_layer_numbers, config)
    numbers = tuple(n + 1 for n, is_moe in enumerate(settings["moe_layer_freq"]) if is_moe)
    wanted = f"{numbers}, the 1-based layers that are 1 in its moe_layer_freq"
    _expect(spec, "moe_layer_numbers", layers, layers == numbers, wanted)
    unread = _call(spec, "unread", architecture.unread, config)
    _expect(spec, "unread", unread, isinstance(unread, dict), "a dict of prefixes and texts")
    rules = _call(spec, "rules", architecture.rules, config)
    are_rules = isinstance(rules, list) and rules and all(isinstance(r, Rule) for r in rules)
    _expect(spec, "rules", rules, bool(are_rules), "a list of parallel.architectures.base.Rule")
    _check_rules(spec, rules)


def _check_settings(spec: str, settings: dict[str, Any], sizes: ModelSizes) -> None:
    """Raise InputError unless `moe_layer_freq` is a list with a 0 or a 1 for each layer.

    Also raise InputError if a setting differs from the field of `sizes` that must be equal to it
    (ALIKE).
    """
    pattern, num_layers = settings["moe_layer_freq"], settings["num_layers"]
    is_pattern = isinstance(pattern, list | tuple) and all(each in (0, 1) for each in pattern)
    if not is_pattern or len(pattern) != num_layers:
        raise InputError(
            f"model.architecture {spec!r}: transformer_config has moe_layer_freq {pattern!r}, expected "
            f"a list with a 0 or a 1 for each of its {num_layers} layers"
        )
    for key, field in ALIKE.items():
        here, there = settings.get(key) or 0, getattr(sizes, field)
        if here != there:
            raise InputError(
                f"model.architecture {spec!r}: transformer_config has {key} {here}, but sizes has "
                f"{field} {there}; expected the same"
            )


def _check_rules(spec: str, rules: list[Rule]) -> None:
    """Raise InputError for an unknown split, a wrong number of HF tensors, or a name that is in two
    rules."""
    for rule in rules:
        if not isinstance(rule.hf, tuple):
            raise InputError(
                f"model.architecture {spec!r}: the rule of {rule.megatron} has hf {rule.hf!r}, "
                'expected a tuple of names, such as ("model.norm.weight",) with its comma'
            )
        if rule.split not in get_args(Split):
            raise InputError(
                f"model.architecture {spec!r}: the rule of {rule.megatron} has split {rule.split!r}, "
                f"expected one of {', '.join(get_args(Split))}"
            )
        got, wanted = len(rule.hf), PARTS.get(rule.split, 1)
        if got != wanted:
            raise InputError(
                f"model.architecture {spec!r}: the rule of {rule.megatron} has {got} name(s) of "
                f"tensors, expected {wanted} for split {rule.split!r}"
            )
    names = Counter(name for rule in rules for name in (rule.megatron, *rule.hf))
    if twice := [name for name, count in names.items() if count > 1]:
        raise InputError(
            f"model.architecture {spec!r}: {twice[0]} is in {names[twice[0]]} rules, expected one"
        )


def _call(spec: str, name: str, function: Callable[[HfConfig], Any], config: HfConfig) -> Any:
    try:
        return function(config)
    except InputError:  # the architecture's own refusal
        raise
    except KeyError as error:
        raise InputError(
            f"model.architecture {spec!r}: {name} reads the key {error}, which config.json lacks"
        ) from None
    except Exception as error:  # user code
        message = " ".join(str(error).split())
        raise InputError(
            f"model.architecture {spec!r}: {name} raised {type(error).__name__}: {message}"
        ) from None


def _expect(spec: str, name: str, got: Any, is_right: bool, wanted: str) -> None:
    if not is_right:
        text = repr(got)
        short = text if len(text) < 100 else f"{text[:97]}..."
        raise InputError(f"model.architecture {spec!r}: {name} returned {short}, expected {wanted}")

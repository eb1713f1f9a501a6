"""Translate command lines of TRL, verl, slime and torchrun into mrl commands, for error messages."""

from __future__ import annotations

from collections.abc import Sequence

LAUNCHERS = (
    "nproc_per_node", "nnodes", "node_rank", "master_addr", "master_port", "rdzv_endpoint",
    "gpus", "num_gpus", "ngpus", "world_size",
    "num_processes", "num_machines", "actor_num_nodes", "actor_num_gpus_per_node", "n_gpus_per_node",
)  # fmt: skip
"""Options of torchrun, accelerate and slime that set the number of ranks or where they run."""
FILES = ("config", "config_name", "config_path", "config_file", "recipe")
COMMANDS = {
    **dict.fromkeys(
        ("grpo", "rloo", "ppo", "gspo", "dapo", "rl", "run", "start"),
        "mrl train RECIPE algorithm.name=NAME",
    ),
    "sft": "mrl train RECIPE with the section sft, whose steps come before the RL",
    **dict.fromkeys(
        ("dpo", "kto", "reward_train"), "not supported: mrl trains by RL on what the policy samples"
    ),
    "evaluate": "mrl eval RECIPE",
    "launch": "python -m mrl.launch --nproc-per-node N -m mrl train RECIPE",
    "vllm-serve": "not needed: mrl train starts its engine; mrl serve is a service for tenants",
    "env": "mrl check RECIPE --versions",
    "init": "mrl recipe > my.yaml",
    "convert": "mrl export RUN_OR_CKPT DIR",
    "merge": "mrl export RUN_OR_CKPT DIR",
    "resume": "mrl train RUN",
}
"""Commands of other frameworks. The value is the equivalent command of mrl, or says why there is
none."""


def hint_for(words: Sequence[str]) -> str:
    """Return a hint that says what to type instead of a command line that mrl does not accept.

    `words` are the words after `mrl`, or only those of them that are not recognized. The result is
    empty if there is no hint. There are hints for commands of other frameworks, options of launchers,
    configuration files, and recipe keys that are given as options.
    """
    if words and words[0] in COMMANDS:
        return f"; in mrl: {COMMANDS[words[0]]}"
    options = [word for word in words if word.startswith("-") and word.strip("-")]
    found = [text for option in options if (text := _of_option(option))]
    return f"; {found[0]}" if found else ""


def _of_option(option: str) -> str:
    name, _, value = option.lstrip("-").partition("=")
    plain = name.replace("-", "_")
    if plain in LAUNCHERS:
        return (
            "ranks are started by python -m mrl.launch --nproc-per-node N -m mrl train RECIPE, or by "
            "torchrun"
        )
    if plain in FILES:
        return "give the recipe without an option: mrl train RECIPE.yaml"
    from mrl.config.suggest import all_keys, suggest

    if plain in all_keys():
        return f"keys of the recipe are written {plain}={value or 'VALUE'}, without dashes"
    if meant := suggest(plain).removeprefix("; did you mean ").removesuffix("?"):
        return f"keys of the recipe are written key=value, without dashes: {meant}"
    return ""

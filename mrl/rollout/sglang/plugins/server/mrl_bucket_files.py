"""SGLang plugin: its unpickler may call the functions that open a file with a bucket of weights.

The unpickler refuses what is not on its list: of exact names since 0.5.21, of prefixes before.
"""

from mrl.rollout.sglang.compat import path_of, take

MODULE, FUNCTIONS = "mrl.system.mapped_file", ("map_file", "map_registered_file")


def register():
    is_exact = path_of("allowed_globals").endswith("GLOBALS")
    names = [(MODULE, name) for name in FUNCTIONS] if is_exact else [f"{MODULE}."]
    take("allowed_globals").update(names)

"""SGLang plugin: its unpickler may call `map_file`, which opens a file that holds a bucket of weights.

The unpickler refuses what is not on its list: of exact names since 0.5.21, of prefixes before.
"""

from mrl.rollout.sglang.compat import path_of, take

MODULE, FUNCTION = "mrl.system.mapped_file", "map_file"


def register():
    is_exact = path_of("allowed_globals").endswith("GLOBALS")
    take("allowed_globals").add((MODULE, FUNCTION) if is_exact else f"{MODULE}.")

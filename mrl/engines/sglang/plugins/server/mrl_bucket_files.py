"""SGLang plugin: let SGLang's unpickler call the functions that open a file with a weight bucket.

The unpickler refuses names that are not on its list. Since SGLang 0.5.21 the list has exact names; in
earlier releases it has prefixes of names.
"""

from mrl.engines.sglang.compat import path_of, take

MODULE, FUNCTIONS = "mrl.system.mapped_file", ("map_file", "map_registered_file")


def register():
    is_exact = path_of("allowed_globals").endswith("GLOBALS")
    names = [(MODULE, name) for name in FUNCTIONS] if is_exact else [f"{MODULE}."]
    take("allowed_globals").update(names)

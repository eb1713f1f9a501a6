"""Stand-in for `torchvision`: SGLang imports it for image models at module level; mrl runs text.

Every class that SGLang or transformers asks for is an empty one.
"""

__version__ = "0.28.0"


def empty_class(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return type(name, (), {})


from . import io, ops, transforms  # noqa: E402, F401

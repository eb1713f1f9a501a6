"""Stand-in for `torchvision`, which SGLang imports at module level for image models.

mrl runs text models only. Every class that SGLang or transformers imports from this package is empty.
"""

__version__ = "0.28.0"


def empty_class(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return type(name, (), {})


from . import io, ops, transforms  # noqa: E402, F401

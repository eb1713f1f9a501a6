"""Stand-in for `sgl_kernel`, SGLang's CUDA kernels, which has no CPU wheel.

SGLang imports names from it at module level on every device. Any name of any submodule resolves
here, and raises when called: on the CPU path none is.
"""

import importlib.abc
import importlib.machinery
import sys
import types

__version__ = "0.4.10"


class _Missing:
    def __init__(self, name):
        self.__name__ = name

    def __call__(self, *args, **kwargs):
        raise RuntimeError(f"{self.__name__} needs CUDA; this is mrl's CPU stand-in of sgl_kernel")

    def __getattr__(self, name):
        return _resolve(self.__name__, name)


class _Submodule(types.ModuleType):
    def __getattr__(self, name):
        return _resolve(self.__name__, name)


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, fullname, path, target=None):
        if fullname.startswith("sgl_kernel."):
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec):
        return _Submodule(spec.name)

    def exec_module(self, module):
        """Nothing to run: names resolve on access."""


def _resolve(owner, name):
    if name.startswith("__"):
        raise AttributeError(name)
    return _Missing(f"{owner}.{name}")


def __getattr__(name):
    return _resolve("sgl_kernel", name)


sys.meta_path.append(_Finder())

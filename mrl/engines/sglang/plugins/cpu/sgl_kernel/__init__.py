"""Stand-in for `sgl_kernel`, the package of SGLang's CUDA kernels, which has no CPU wheel.

SGLang imports names from this package at module level on every device. Here every name of every
submodule exists. Calling one raises RuntimeError, but SGLang's code for CPUs calls none.
"""

import importlib.abc
import importlib.machinery
import sys
import types

__version__ = "0.4.10"


class _Missing(types.ModuleType):
    """Stands for any submodule, class or function: it has every attribute, and raises when called."""

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return _Missing(f"{self.__name__}.{name}")

    def __call__(self, *args, **kwargs):
        raise RuntimeError(f"{self.__name__} needs CUDA; this is mrl's CPU stand-in of sgl_kernel")


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, fullname, path, target=None):
        if fullname.startswith("sgl_kernel."):
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec):
        return _Missing(spec.name)

    def exec_module(self, module):
        """Do nothing: names are resolved when they are accessed."""


__getattr__ = _Missing(__name__).__getattr__
sys.meta_path.append(_Finder())

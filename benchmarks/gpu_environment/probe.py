"""Runs inside the installed environment, without the checkout: `python probe.py imports` or `names`.

Prints a JSON object {"passed": n, "extras": [name], "failed": {name: error}}; `extras` are modules that
need a package of the extra `tasks`, which is not part of the GPU stack.
"""

from __future__ import annotations

import importlib
import json
import pkgutil
import sys
from collections.abc import Callable, Iterator
from functools import partial

PACKAGES = ("mrl", "moe", "parallel")
EXTRA = "mrl[tasks]"


def imports() -> Iterator[tuple[str, Callable[[], object]]]:
    """Yield every module of mrl; those that start a program at their import are left out."""
    for package in PACKAGES:
        root = importlib.import_module(package)
        for found in pkgutil.walk_packages(root.__path__, f"{package}."):
            if not found.name.endswith("__main__") and ".plugins" not in found.name:
                yield found.name, partial(importlib.import_module, found.name)


def names() -> Iterator[tuple[str, Callable[[], object]]]:
    """Yield every name of `mrl.engines.sglang.names` and `parallel.megatron_names` that the installed
    releases should have, with what looks it up in the imported library."""
    from mrl.engines.sglang.names import NAMES as SGLANG
    from mrl.system.releases import locate
    from parallel.megatron_names import NAMES as MEGATRON
    from parallel.versions import installed_version

    for package, table in (("sglang", SGLANG), ("megatron-core", MEGATRON)):
        release = installed_version(package)
        assert release is not None, f"{package} is not installed"
        for name, each in table.items():
            if path := each.path(release):
                yield f"{package}: {name}", partial(_look_up, locate, path)


def _look_up(locate: Callable[[str], tuple[object, str]], path: str) -> object:
    owner, last = locate(path)
    # An attribute that only instances have is not in the class; the source is searched for it, too.
    return getattr(owner, last, None) if isinstance(owner, type) else getattr(owner, last)


def main() -> None:
    failed: dict[str, str] = {}
    extras: list[str] = []
    passed = 0
    for name, try_it in {"imports": imports, "names": names}[sys.argv[1]]():
        try:
            try_it()
            passed += 1
        except Exception as error:
            if EXTRA in str(error):
                extras.append(name)
                continue
            failed[name] = f"{type(error).__name__}: {error}"
    print(json.dumps({"passed": passed, "extras": extras, "failed": failed}))


if __name__ == "__main__":
    main()

"""Check the installed releases of the libraries whose internals mrl relies on."""

from __future__ import annotations

from mrl.errors import InputError
from mrl.system.releases import ADAPTERS_SINCE, SUPPORTED, newest, numbers, refusal
from parallel.versions import installed_version


def check_releases() -> None:
    """Raise InputError if the installed release of a library does not work with mrl.

    A library that is not installed is not an error here; the code that needs it raises the error.
    """
    for package in SUPPORTED:
        release = installed_version(package)
        if release is not None and (text := refusal(package, release)):
            raise InputError(text)


def check_serves_adapters() -> None:
    """Raise InputError if the installed SGLang is too old to serve mrl's adapters.

    A missing SGLang is not an error here.
    """
    release = installed_version("sglang")
    if release is not None and numbers(release) < numbers(ADAPTERS_SINCE):
        raise InputError(
            f"lora.rollout=adapter: SGLang {release} is installed, and adapters need "
            f"{ADAPTERS_SINCE} or later: pip install 'sglang=={newest('sglang')}', or set "
            "lora.rollout=merged"
        )

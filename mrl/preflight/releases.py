"""Checks the installed releases of the libraries whose inside mrl relies on."""

from __future__ import annotations

from mrl.errors import InputError
from mrl.system.releases import ADAPTERS_SINCE, SUPPORTED, newest, numbers, refusal
from parallel.versions import installed_version


def check_releases() -> None:
    """Raise InputError for an installed release that mrl does not work with. One that is not installed
    is missed by what needs it."""
    for package in SUPPORTED:
        release = installed_version(package)
        if release is not None and (text := refusal(package, release)):
            raise InputError(text)


def check_serves_adapters() -> None:
    """Raise InputError if the installed SGLang cannot serve mrl's adapters."""
    release = installed_version("sglang")
    if release is not None and numbers(release) < numbers(ADAPTERS_SINCE):
        raise InputError(
            f"lora.rollout=adapter: SGLang {release} is installed, and adapters need "
            f"{ADAPTERS_SINCE} or later: pip install 'sglang=={newest('sglang')}', or set "
            "lora.rollout=merged"
        )

"""Checks the installed releases of the libraries whose inside mrl relies on."""

from __future__ import annotations

from mrl.errors import InputError
from mrl.system.releases import SUPPORTED, refusal
from parallel.versions import installed_version


def check_releases() -> None:
    """Raise InputError for an installed release that mrl does not work with. One that is not installed
    is missed by what needs it."""
    for package in SUPPORTED:
        release = installed_version(package)
        if release is not None and (text := refusal(package, release)):
            raise InputError(text)

"""Models that SGLang gets from a package of the user: SGLANG_EXTERNAL_MODEL_PACKAGE names it.

The variable is SGLang's own. The package registers the config of a new `model_type` with transformers
when it is imported, and each of its modules has the class of a model as `EntryClass`.
"""

from __future__ import annotations

import importlib
import os

from mrl.errors import InputError

VARIABLE = "SGLANG_EXTERNAL_MODEL_PACKAGE"


def import_external_models() -> None:
    """Import the user's package, if there is one. Raises InputError where it does not import."""
    package = os.environ.get(VARIABLE)
    if not package:
        return
    try:
        importlib.import_module(package)
    except Exception as error:  # user code at import: anything can happen
        message = " ".join(str(error).split())
        raise InputError(
            f"{VARIABLE}={package} does not import: {type(error).__name__}: {message}; give a package "
            "on PYTHONPATH, or unset it"
        ) from None


def refuse_unknown(model_type: str) -> None:
    """Raise InputError for a `model_type` whose config neither transformers nor the user has."""
    import_external_models()
    # Slow to import, and only a start and its check need it.
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    if model_type not in CONFIG_MAPPING:
        raise InputError(
            f"model.path: SGLang cannot run a model_type {model_type!r}, which transformers does not "
            f"know; set {VARIABLE} to a package with its config and its model "
            "(docs/architecture.md has an example)"
        )

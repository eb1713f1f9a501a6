"""The user's own models, from the package named in SGLang's variable SGLANG_EXTERNAL_MODEL_PACKAGE.

When the package is imported, it registers the config of a new `model_type` with transformers. Each
of its modules has the class of a model as `EntryClass`. SGLang imports the package only when it
looks for that class. By then, transformers has already refused the unknown `model_type`. Therefore
SGLang's processes run `import_external_models` as a plugin (plugins/server).
"""

from __future__ import annotations

import importlib
import os

from mrl.errors import InputError

VARIABLE = "SGLANG_EXTERNAL_MODEL_PACKAGE"


def import_external_models() -> None:
    """Import the user's package, if there is one. Raises InputError if the import fails."""
    package = os.environ.get(VARIABLE)
    if not package:
        return
    try:
        importlib.import_module(package)
    except Exception as error:  # user code at import: anything can happen
        message = " ".join(str(error).split())
        raise InputError(
            f"{VARIABLE}={package} cannot be imported: {type(error).__name__}: {message}; give a "
            "package on PYTHONPATH, or unset it"
        ) from None


def refuse_unknown(model_type: str) -> None:
    """Raise InputError for a `model_type` that neither transformers nor the user's package knows."""
    import_external_models()
    # Slow to import, and needed only here.
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    if model_type not in CONFIG_MAPPING:
        raise InputError(
            f"model.path: SGLang cannot run a model_type {model_type!r}, which transformers does not "
            f"know; set {VARIABLE} to a package with its config and its model "
            "(docs/architecture.md has an example)"
        )

"""SGLang plugin: imports the package of SGLANG_EXTERNAL_MODEL_PACKAGE before config.json is read.

SGLang itself imports it when it looks for the model's class, which is after transformers has refused a
`model_type` that it does not know. The package registers that with `AutoConfig.register`.
"""

import importlib
import os


def register():
    if package := os.environ.get("SGLANG_EXTERNAL_MODEL_PACKAGE"):
        importlib.import_module(package)

"""The toy model under a `model_type` that nobody knows, with the files of docs/architecture.md."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from tests.docs.pages import pages


def block_with(text: str) -> str:
    """Return the Python block of docs/architecture.md that has `text`."""
    (page,) = [page for page in pages() if page.name == "docs/architecture.md"]
    (found,) = [b.text for b in page.blocks if b.language == "python" and text in b.text]
    return found


def write_my_moe(toy: Path, folder: Path) -> Path:
    """Write FOLDER/model, FOLDER/my/my_moe.py and the package FOLDER/my_models; return the model."""
    model = folder / "model"
    shutil.copytree(toy, model)
    config = json.loads((model / "config.json").read_text())
    config |= {"model_type": "my_moe", "architectures": ["MyMoeForCausalLM"]}
    (model / "config.json").write_text(json.dumps(config))
    files = {
        "my/my_moe.py": "ARCHITECTURE =",
        "my_models/__init__.py": "AutoConfig.register",
        "my_models/my_moe.py": "EntryClass =",
    }
    for name, text in files.items():
        file = folder / name
        file.parent.mkdir(exist_ok=True)
        file.write_text(block_with(text))
    return model

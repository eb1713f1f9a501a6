"""Scores with a reward model, `reward_model:FOLDER`: a Hugging Face sequence classifier with one label.

Options follow as `?name=value&name=value`: `device` (`cpu`; `cuda` is this rank's GPU, `cuda:3` that
one), `dtype` (the checkpoint's; `float32`, `bfloat16`, `float16`), `batch_size` (8).

It is loaded in the worker process, not in the trainer. What it reads is the prompt and the completion:
messages through its own chat template, with the completion as the assistant's turn; plain text as one
text, with the special tokens its tokenizer adds. Too long a text fails: a shortened one would get the
score of another.

Dimensions: G samples, B of a batch, T tokens of the longest of them.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

from mrl.errors import InputError
from mrl.rewards.answers import END_OF_TEXT
from mrl.system.worker_user import check_open

DTYPES = ("auto", "float32", "bfloat16", "float16")
MAX_SANE_LEN = 10_000_000
"""Lengths from which on a tokenizer's limit means that there is none (they say 1e30)."""


class RewardModel:
    """Raises InputError for options it does not know, and a folder that is no reward model."""

    def __init__(self, spec: str) -> None:
        folder, _, query = spec.partition(":")[2].partition("?")
        options = dict(parse_qsl(query, keep_blank_values=True))
        self._spec, self._folder = spec, Path(folder)
        self._device = options.pop("device", "cpu")
        self._dtype = options.pop("dtype", "auto")
        batch_size = options.pop("batch_size", "8")
        if options:
            names = "device, dtype, batch_size"
            raise InputError(
                f"reward {spec!r}: no option {next(iter(options))!r}; there are {names}"
            )
        if self._dtype not in DTYPES:
            raise InputError(
                f"reward {spec!r}: dtype {self._dtype!r}, expected {', '.join(DTYPES)}"
            )
        if not batch_size.isdecimal() or int(batch_size) < 1:
            raise InputError(f"reward {spec!r}: batch_size {batch_size!r}, expected 1 or more")
        self._batch_size = int(batch_size)
        _check_folder(spec, self._folder)

    def start_worker(self) -> None:
        """Load model and tokenizer. Raises InputError where weights are missing."""
        import torch
        from transformers import AutoModelForSequenceClassification, AutoTokenizer
        from transformers.utils.logging import disable_progress_bar

        disable_progress_bar()
        device = _device(self._device)
        if device.startswith("cuda") and not torch.cuda.is_available():
            raise InputError(f"reward {self._spec!r}: there is no GPU for device={self._device}")
        self._tokenizer = AutoTokenizer.from_pretrained(self._folder, local_files_only=True)
        model, info = AutoModelForSequenceClassification.from_pretrained(
            self._folder, dtype=self._dtype, local_files_only=True, output_loading_info=True
        )
        if info["missing_keys"]:  # transformers would continue with random ones
            some = ", ".join(sorted(info["missing_keys"])[:3])
            raise InputError(
                f"reward {self._spec!r}: the checkpoint lacks {some}; expected one saved from "
                "AutoModelForSequenceClassification"
            )
        self._model = model.to(device).eval()
        config = model.config.get_text_config()
        self._pad_id: int | None = config.pad_token_id
        lens = (config.max_position_embeddings, self._tokenizer.model_max_length)
        self._max_len = min(length for length in (*lens, MAX_SANE_LEN) if length)

    def __call__(
        self, prompts: list[Any], completions: list[str], /, **columns: list[Any]
    ) -> list[float | None]:
        """Return the model's only logit for each completion. Raises ValueError on too long a text."""
        ids = [self._encode(*pair) for pair in zip(prompts, completions, strict=True)]
        # Without a padding token in its config the model cannot tell where a shorter text ends.
        size = 1 if self._pad_id is None else self._batch_size
        scores: list[float | None] = []
        for start in range(0, len(ids), size):
            scores += self._scores(ids[start : start + size])
        return scores

    def _encode(self, prompt: Any, completion: str) -> list[int]:
        text = END_OF_TEXT.split(completion, maxsplit=1)[0]
        if isinstance(prompt, str):
            ids = self._tokenizer.encode(prompt + text)
        else:
            messages = [*prompt, {"role": "assistant", "content": text}]
            chat = self._tokenizer.apply_chat_template(messages, tokenize=False)
            ids = self._tokenizer.encode(chat, add_special_tokens=False)
        if not 0 < len(ids) <= self._max_len:
            raise ValueError(
                f"prompt and completion have {len(ids)} tokens, the reward model reads 1 to "
                f"{self._max_len}"
            )
        return ids

    def _scores(self, ids: list[list[int]]) -> list[float]:
        """Pad on the right; return ids i64[B, T] and their mask."""
        import torch

        longest = max(map(len, ids))
        input_ids = torch.full((len(ids), longest), self._pad_id or 0)
        mask = torch.zeros_like(input_ids)
        for row, tokens in enumerate(ids):
            input_ids[row, : len(tokens)] = torch.tensor(tokens)
            mask[row, : len(tokens)] = 1
        device = self._model.device
        with torch.inference_mode():
            logits = self._model(input_ids.to(device), attention_mask=mask.to(device)).logits
        return logits[:, 0].float().tolist()


def _device(name: str) -> str:
    """Ranks of a node see all of its GPUs; a worker inherits its rank's number."""
    return f"cuda:{os.environ.get('LOCAL_RANK', '0')}" if name == "cuda" else name


def _check_folder(spec: str, folder: Path) -> None:
    """Check what can be known without loading the model."""
    check_open(folder, f"reward {spec!r}")
    for file in sorted(folder.glob("*")):
        check_open(file, f"reward {spec!r}")
    try:
        config = json.loads((folder / "config.json").read_bytes())
    except (OSError, ValueError) as error:
        raise InputError(
            f"reward {spec!r}: {folder} is no Hugging Face model folder: {error}"
        ) from None
    name = (config.get("architectures") or ["no architecture"])[0]
    if not name.endswith("ForSequenceClassification"):
        raise InputError(
            f"reward {spec!r}: {folder} is a {name}, expected a ...ForSequenceClassification"
        )
    num_labels = len(config.get("id2label", ())) or config.get("num_labels", 2)
    if num_labels != 1:
        raise InputError(f"reward {spec!r}: {folder} has {num_labels} labels, expected 1")

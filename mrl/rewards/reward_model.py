"""A reward model (`reward_model:FOLDER`), which is a Hugging Face sequence classifier with one label.

Options may follow the folder, as `?name=value&name=value`:

- `device`: `cpu` (the default), `cuda` (this rank's GPU), or a GPU such as `cuda:3`.
- `dtype`: `float32`, `bfloat16` or `float16`; by default the checkpoint's dtype.
- `batch_size`: 8 by default.

The model is loaded in the worker process, not in the trainer. If the prompt is a list of messages,
the completion is appended as the assistant's turn, and the model's chat template is applied. If the
prompt is a string, prompt and completion are joined, and the tokenizer adds its special tokens. If
prompt and completion together have more tokens than the model accepts, ValueError is raised,
because the score of a truncated text would not be the score of the completion.

Dimensions: G samples, B samples in a batch, T tokens in the batch's longest sample.
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
"""Largest plausible length limit of a tokenizer, in tokens. A tokenizer without a limit reports a
larger number, such as 1e30."""


class RewardModel:
    """Scores completions with a reward model.

    Raises InputError for invalid options, or if the folder is not a reward model.
    """

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
                f"reward {spec!r}: unknown option {next(iter(options))!r}; the options are {names}"
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
        """Load the model and its tokenizer. Raises InputError if weights or the GPU are missing."""
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
        if info["missing_keys"]:  # transformers would initialise them randomly
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
        """Return the model's single logit for each of the G completions.

        Raises ValueError if a prompt and its completion have more tokens than the model accepts.
        """
        ids = [self._encode(*pair) for pair in zip(prompts, completions, strict=True)]
        # Without a padding token in its config the model cannot find the end of a shorter text.
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
                f"prompt and completion have {len(ids)} tokens, the reward model accepts 1 to "
                f"{self._max_len}"
            )
        return ids

    def _scores(self, ids: list[list[int]]) -> list[float]:
        """Return the logits of B samples, whose ids are padded to [B, T] on the right and masked."""
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
    """Return the torch device that the option `device` names; `cuda` is the GPU of the worker's rank.

    Every rank sees all GPUs of its node, and a worker inherits its rank's LOCAL_RANK.
    """
    return f"cuda:{os.environ.get('LOCAL_RANK', '0')}" if name == "cuda" else name


def _check_folder(spec: str, folder: Path) -> None:
    """Raise InputError if the folder is not a readable reward model, without loading the model."""
    check_open(folder, f"reward {spec!r}")
    for file in sorted(folder.glob("*")):
        check_open(file, f"reward {spec!r}")
    try:
        config = json.loads((folder / "config.json").read_bytes())
    except (OSError, ValueError) as error:
        raise InputError(
            f"reward {spec!r}: {folder} is not a Hugging Face model folder: {error}"
        ) from None
    name = (config.get("architectures") or ["no architecture"])[0]
    if not name.endswith("ForSequenceClassification"):
        raise InputError(
            f"reward {spec!r}: {folder} is a {name}, expected a ...ForSequenceClassification"
        )
    num_labels = len(config.get("id2label", ())) or config.get("num_labels", 2)
    if num_labels != 1:
        raise InputError(f"reward {spec!r}: {folder} has {num_labels} labels, expected 1")

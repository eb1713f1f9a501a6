"""Write a tiny Qwen3-MoE checkpoint with a character tokenizer, small enough to train on one CPU
core.

The model has every part of the Qwen3-MoE architecture (GQA, qk-norm, top-k router, per-expert MLPs)
and about 0.3 M parameters in float32. Megatron and SGLang can both run it, so their log-probs can
be compared at float32 precision.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast, Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.utils.logging import disable_progress_bar

from mrl.errors import InputError

MARKER = "mrl_toy_model.json"
"""Name of the file in which `write_toy_model` records its arguments. `write_toy_model` overwrites
a non-empty folder only if it contains this file."""

CHARACTERS = "\n" + "".join(chr(code) for code in range(32, 127))
PAD, IM_START, EOS, UNKNOWN = "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|unk|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write_toy_model(
    folder: Path,
    *,
    seed: int = 0,
    vocab_size: int = 128,
    num_layers: int = 4,
    hidden_size: int = 64,
    intermediate_size: int = 128,
    num_attention_heads: int = 4,
    num_key_value_heads: int = 2,
    head_dim: int = 16,
    num_experts: int = 8,
    num_experts_per_tok: int = 2,
    moe_intermediate_size: int = 32,
    mlp_only_layers: tuple[int, ...] = (),
    max_position_embeddings: int = 512,
    init_std: float = 0.1,
) -> None:
    """Write config.json, model.safetensors (float32) and the tokenizer. Calls with the same
    arguments write the same bytes.

    `mlp_only_layers` are the 0-based numbers of dense layers. Every id below `vocab_size` has a
    token. The ids that are left after the characters and the four special tokens get reserved
    tokens.

    Raises InputError if `folder` is a file, or a non-empty folder that no earlier call wrote, or if
    the vocabulary is too small for printable ASCII.
    """
    folder = Path(folder)
    _refuse_foreign_folder(folder)
    knobs = {name: value for name, value in locals().items() if name != "folder"}
    tokenizer = build_tokenizer(vocab_size)
    config = _config(knobs, tokenizer)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3MoeForCausalLM(config).float()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / MARKER).write_text(json.dumps(knobs, indent=2) + "\n")
    disable_progress_bar()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


SAME_NAMES = (
    "vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads",
    "head_dim", "num_experts", "num_experts_per_tok", "moe_intermediate_size",
    "max_position_embeddings",
)  # fmt: skip
"""Arguments of `write_toy_model` that have the same name in the transformers config."""


def _config(knobs: dict[str, Any], tokenizer: PreTrainedTokenizerFast) -> Qwen3MoeConfig:
    shape = {name: knobs[name] for name in SAME_NAMES} | dict[str, Any](
        num_hidden_layers=knobs["num_layers"],
        mlp_only_layers=list(knobs["mlp_only_layers"]),
        initializer_range=knobs["init_std"],
        decoder_sparse_step=1,
        norm_topk_prob=True,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        # Not the tokenizer's pad id: transformers would initialise that embedding row to 0, and the
        # norm after it would multiply the first gradient of a sampled pad token by a thousand.
        pad_token_id=None,
        dtype=torch.float32,
    )
    return Qwen3MoeConfig(**shape)  # as a dict: transformers' signature lacks `head_dim`


def build_tokenizer(vocab_size: int = 128) -> PreTrainedTokenizerFast:
    """Make a tokenizer with one token per character, for newline and printable ASCII, plus four
    special tokens and reserved tokens up to `vocab_size`.

    Any other character becomes `<|unk|>`. Raises InputError if `vocab_size` is too small for the
    characters and the special tokens.
    """
    special = [PAD, IM_START, EOS, UNKNOWN]
    num_reserved = vocab_size - len(CHARACTERS) - len(special)
    if num_reserved < 0:
        raise InputError(
            f"toy model: vocab_size {vocab_size} is too small, expected at least "
            f"{vocab_size - num_reserved}: newline, printable ASCII and {len(special)} special "
            "tokens"
        )
    special += [f"<|reserved_{i}|>" for i in range(num_reserved)]
    vocab = {token: i for i, token in enumerate([*CHARACTERS, *special])}
    core = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token=UNKNOWN, fuse_unk=False))
    core.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token=EOS,
        pad_token=PAD,
        unk_token=UNKNOWN,
        additional_special_tokens=[IM_START, *special[4:]],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=1_000_000,
    )


def _refuse_foreign_folder(folder: Path) -> None:
    if folder.exists() and not folder.is_dir():
        raise InputError(f"toy model: {folder} is a file; give a folder")
    if folder.is_dir() and any(folder.iterdir()) and not (folder / MARKER).is_file():
        raise InputError(
            f"toy model: {folder} is not empty and holds no {MARKER}, so it is not a toy model "
            "written earlier; give a new or empty folder"
        )

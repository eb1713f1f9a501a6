"""The text of single tokens reads well for byte-level BPE and for SentencePiece vocabularies."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from mrl.cli import main
from mrl.diagnosis.detectors.extremes import text_of
from mrl.diagnosis.pieces import byte_alphabet, join_pieces, token_pieces
from mrl.diagnosis.tokens import load_tokens, save_tokens
from mrl.run.folder import RunFolder
from tests.diagnosis.tiny_moe import Model, S, make_record

END = "<|im_end|>"
TEXT = f"Eight minus\nseven \u2014 \U0001f600caf\u00e9, one .{END}"


def bpe(alphabet: list[str], words: tuple[str, ...], **more: Any) -> Tokenizer:
    """A BPE of single characters and of `words`, each merged from its left to its right."""
    merges, vocab = [], dict.fromkeys(alphabet)
    for word in words:
        for end in range(1, len(word)):
            merges.append((word[:end], word[end]))
            vocab[word[: end + 1]] = None
    numbered = {name: number for number, name in enumerate(vocab)}
    return Tokenizer(models.BPE(vocab=numbered, merges=list(dict.fromkeys(merges)), **more))


def byte_level() -> PreTrainedTokenizerFast:
    """Like that of SmolLM2 and Qwen; one token is a space and the first byte of a dash."""
    core = bpe(sorted(byte_alphabet()), ("\u0120minus", "seven", "\u0120\u00e2"))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    return fast(core)


def sentence_piece() -> PreTrainedTokenizerFast:
    """Like that of Llama 2 and Mixtral."""
    names = [*(f"<0x{byte:02X}>" for byte in range(256)), *"Eightmnusev\u2581,.caf<unk>o"]
    core = bpe(names, ("\u2581minus", "seven"), byte_fallback=True)
    core.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    core.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)])
    return fast(core)


def fast(core: Tokenizer) -> PreTrainedTokenizerFast:
    made = PreTrainedTokenizerFast(tokenizer_object=core, clean_up_tokenization_spaces=True)
    made.add_special_tokens({"eos_token": END})
    return made


def pieces_of(tokenizer: PreTrainedTokenizerFast, text: str) -> list[str]:
    ids = tokenizer.encode(text, add_special_tokens=False)
    pieces = token_pieces(tokenizer, sorted(set(ids)))
    return [pieces[token] for token in ids]


def test_the_alphabet_is_that_of_the_library() -> None:
    assert sorted(byte_alphabet()) == sorted(pre_tokenizers.ByteLevel.alphabet())
    assert sorted(byte_alphabet().values()) == list(range(256))
    inner = byte_level().backend_tokenizer
    for char in ("\u00e9", "\u2014", "\U0001f600", " ", "\n", "\xa0"):
        tokens = inner.encode(char).tokens
        assert bytes(byte_alphabet()[each] for each in "".join(tokens)).decode() == char


def test_byte_level_tokens_keep_their_spaces_and_show_their_bytes() -> None:
    pieces = pieces_of(byte_level(), TEXT)
    assert join_pieces(pieces) == TEXT
    assert pieces[5:9] == [" minus", "\n", "seven", " <0xE2>"]
    assert pieces[-1] == END
    assert [each for each in pieces if "<0x" in each] == [
        *(" <0xE2>", "<0x80>", "<0x94>"),
        *("<0xF0>", "<0x9F>", "<0x98>", "<0x80>"),
        *("<0xC3>", "<0xA9>"),
    ]
    start = pieces.index("<0xF0>")
    assert join_pieces(pieces[start - 1 : start + 2]) == " <0xF0><0x9F>"  # a part of a character


def test_sentence_piece_tokens_keep_their_spaces() -> None:
    pieces = pieces_of(sentence_piece(), TEXT)
    assert join_pieces(pieces) == f" {TEXT}"
    assert pieces[0] == " "
    assert pieces[6:9] == [" minus", "\n", "seven"]
    assert pieces.count("<0x80>") == 2
    assert pieces[-1] == END


def test_special_tokens_keep_the_mark_of_a_space() -> None:
    """DeepSeek's vocabulary is one of byte-level BPE, and has the mark in its special tokens."""
    tokenizer, name = byte_level(), "<|end\u2581of\u2581sentence|>"
    tokenizer.add_special_tokens({"bos_token": name})
    assert pieces_of(tokenizer, f"seven{name}") == ["seven", name]


def test_a_text_before_a_token_has_whole_characters() -> None:
    pieces = {0: "a", 1: "<0xC3>", 2: "<0xA9>", 3: " b"}
    assert text_of(torch.tensor([0, 1, 2, 3, 9]), pieces) == "a\u00e9 b"
    assert text_of(torch.tensor([2, 3]), pieces) == "<0xA9> b"


def test_ids_without_a_token_are_named() -> None:
    tokenizer = byte_level()
    assert token_pieces(tokenizer, [len(tokenizer) + 5]) == {
        len(tokenizer) + 5: f"<token {len(tokenizer) + 5}>"
    }
    assert token_pieces(tokenizer, []) == {}


def test_why_shows_words(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A token after its text, and of a chat the question and the answer."""
    folder = RunFolder(tmp_path)
    folder.config.write_text("see tests/config/test_config.py")
    folder.add_metrics({"step": 0, "mismatch/k3": 0.5})
    model = Model.make()
    record = make_record(model, model, engine_temperature=1.2)
    names = ["<0xF0>", "<0x9F>", "<0x98>", "<0x80>", " minus", "\n"]
    shown = {token: names[token % len(names)] for token in record.pieces}
    folder.token_file(0).parent.mkdir()
    save_tokens(folder.token_file(0), dataclasses.replace(record, pieces=shown))
    assert load_tokens(folder.token_file(0)).pieces == shown
    messages = [
        {"role": "system", "content": "You are a helpful assistant. " * 9},
        {"role": "user", "content": f"{'Think first. ' * 9}What is eight minus seven?"},
    ]
    row = {"prompt": messages, "completion": f"It is one.\n{'So there. ' * 9}", "reward": 1.0}
    folder.rollout_file(0).parent.mkdir()
    folder.rollout_file(0).write_text(f"{json.dumps(row)}\n" * S)

    main(["why", str(tmp_path), "0"])
    lines = capsys.readouterr().out.splitlines()
    samples = lines[lines.index("Worst samples (d = old - rollout log-prob)") + 2 :]
    assert (
        samples[0]
        .rstrip()
        .endswith(
            "...ink first. What is eight minus seven? -> It is one.\\nSo there. So there. So the..."
        )
    )
    tokens = lines[lines.index("Worst tokens") + 2 :][:8]
    ends = [f"[{piece}]".replace("\n", "\\n") for piece in names]
    assert all(line.rstrip().endswith(tuple(ends)) for line in tokens), tokens
    assert not any("] [" in line or " [ " in line for line in tokens)

"""The text of single tokens, such that the texts of consecutive tokens can be joined and read.

A tokenizer decodes a token alone less well than a sequence: SentencePiece drops the space before a
word, and a token that holds a part of a UTF-8 character becomes U+FFFD. Here the space stays, and a
byte that is not valid UTF-8 by itself is written as in SentencePiece's vocabularies: `<0xE2>`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any

REPLACEMENT = "\ufffd"
"""What tokenizers decode bytes to that are not valid UTF-8."""
SPACE = "\u2581"
"""SentencePiece's mark for a space in the names of tokens."""
BYTE_TOKEN = re.compile("<0x[0-9A-F]{2}>")
HIGH_BYTES = re.compile("(?:<0x[89A-F][0-9A-F]>)+")
"""Consecutive bytes of characters outside of ASCII."""


def token_pieces(tokenizer: Any, token_ids: Sequence[int]) -> dict[int, str]:
    """Return the text of each token id. An id for which the tokenizer has no token, such as one that
    only fills up the vocabulary, has the text `<token ID>`."""
    if not token_ids:  # transformers decodes an empty list to one empty string
        return {}
    names = tokenizer.convert_ids_to_tokens(list(token_ids))
    one_by_one = [[token] for token in token_ids]
    texts = tokenizer.batch_decode(one_by_one, clean_up_tokenization_spaces=False)
    return {
        token: _piece(token, name, text)
        for token, name, text in zip(token_ids, names, texts, strict=True)
    }


def join_pieces(pieces: Iterable[str]) -> str:
    """Return the text of consecutive tokens. Bytes that form a character together become it."""

    def decoded(found: re.Match[str]) -> str:
        return readable(bytes.fromhex(re.sub("[<>]|0x", "", found[0])))

    return HIGH_BYTES.sub(decoded, "".join(pieces))


def readable(data: bytes) -> str:
    """Decode UTF-8, and write each byte that is not valid there as `<0xE2>`."""
    return "".join(
        f"<0x{ord(char) - 0xDC00:02X}>" if "\udc80" <= char <= "\udcff" else char
        for char in data.decode("utf-8", "surrogateescape")
    )


def _piece(token: int, name: str | None, text: str) -> str:
    """Return the text of a token, given its name in the vocabulary and what the tokenizer decodes it
    to."""
    if name is None:
        return f"<token {token}>"
    if SPACE in name and SPACE not in text:  # names of special tokens may have the mark itself
        return name.replace(SPACE, " ")
    if REPLACEMENT not in text:
        return text
    if BYTE_TOKEN.fullmatch(name):
        return name
    known = byte_alphabet()
    return readable(bytes(known[char] for char in name)) if known.keys() >= set(name) else text


@cache
def byte_alphabet() -> dict[str, int]:
    """Return the byte that each character stands for in the names of byte-level BPE tokens.

    Source: `bytes_to_unicode` in GPT-2's encoder.py. Printable bytes of Latin-1 stand for themselves,
    and the others, in order, have the characters from U+0100 on.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {
        chr(256 + number): byte for number, byte in enumerate(others)
    }

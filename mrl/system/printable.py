"""Makes text from outside harmless before it is printed on a terminal or written to a file."""

from __future__ import annotations

import unicodedata


def escape(text: str) -> str:
    """Make untrusted text harmless in a terminal by making control and bidi characters visible."""
    return "".join(_visible(char) for char in text)


def encodable(text: str) -> str:
    """Return a text with unpaired surrogates as escapes, because UTF-8 files cannot have them."""
    return text.encode(errors="backslashreplace").decode()


def _visible(char: str) -> str:
    if char == "\n":
        return "\\n"
    if char == "\t":
        return "\\t"
    # Cc, Cf, Cs, Co, Cn: ESC and C1 codes, bidi overrides, lone surrogates, unassigned.
    if unicodedata.category(char)[0] == "C" or unicodedata.category(char) in ("Zl", "Zp"):
        code = ord(char)
        return f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}"
    return char

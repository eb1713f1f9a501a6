"""Renders the page: one template, its styles and scripts in line, its data as JSON.

What a model wrote is on this page, so nothing of the data is ever markup. Jinja2 escapes it. In the
JSON block `<` is written as an escape, so that no text can end the block. The scripts make text nodes
only, which `require-trusted-types-for` enforces. The Content-Security-Policy allows the page's own
style and script by their hashes, and no request at all.
"""

from __future__ import annotations

import base64
import hashlib
import json
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

PAGE = Path(__file__).parent / "page"
SCRIPTS = (
    "base",
    "chart",
    "heatmap",
    "curves",
    "timeline",
    "mismatch",
    "tokens",
    "samples",
    "main",
)
"""The scripts, which run in this order and in one scope."""


def render(data: dict[str, Any]) -> str:
    """Render the data of `collect` as HTML."""
    style = "\n".join((PAGE / f"{name}.css").read_text() for name in ("page", "parts"))
    parts = "\n".join((PAGE / f"{name}.js").read_text() for name in SCRIPTS)
    script = f'(() => {{\n"use strict";\n{parts}\n}})();\n'
    assert "</" not in script
    assert "<!--" not in script
    assert "</" not in style
    environment = Environment(
        loader=FileSystemLoader(PAGE), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    drawn = {key: data[key] for key in ("metrics", "timeline", "diagnosis", "steps")}
    return environment.get_template("page.html.j2").render(
        **data,
        policy=policy(script, style),
        style=Markup(style),
        script=Markup(script),
        json=Markup(json_block(drawn)),
    )


def policy(script: str, style: str) -> str:
    """Return the Content-Security-Policy, which allows these two texts to run and style and no more."""
    rules = (
        "default-src 'none'",
        f"script-src '{_hash(script)}'",
        f"style-src '{_hash(style)}'",
        "img-src data:",
        "base-uri 'none'",
        "form-action 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
    return "; ".join(rules)


def json_block(value: Any) -> str:
    """Return ASCII JSON without `<`, `>` and `&` (they occur in strings only): nothing ends its
    element."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _hash(text: str) -> str:
    digest = hashlib.sha256(text.encode()).digest()
    return f"sha256-{base64.b64encode(digest).decode()}"

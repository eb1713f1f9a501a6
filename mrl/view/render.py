"""Renders a page: one template, its styles and scripts in line, its data as JSON.

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
from typing import Any, NamedTuple

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

PAGE = Path(__file__).parent / "page"


class Kind(NamedTuple):
    """Says what a kind of page is made of."""

    template: str
    scripts: tuple[str, ...]
    """The scripts, which run in this order and in one scope."""
    drawn: tuple[str, ...]
    """What the scripts read of the data."""


RUN = Kind(
    "page.html.j2",
    ("base", "chart", "heatmap", "curves", "timeline", "mismatch", "tokens", "samples", "main"),
    ("metrics", "timeline", "diagnosis", "steps"),
)
SERVICE = Kind("service.html.j2", ("base", "chart", "curves", "service"), ("metrics",))


def render(data: dict[str, Any], kind: Kind = RUN) -> str:
    """Render the data of `collect`, or for SERVICE that of `collect_service`, as HTML."""
    style = "\n".join((PAGE / f"{name}.css").read_text() for name in ("page", "parts"))
    parts = "\n".join((PAGE / f"{name}.js").read_text() for name in kind.scripts)
    script = f'(() => {{\n"use strict";\n{parts}\n}})();\n'
    assert "</" not in script
    assert "<!--" not in script
    assert "</" not in style
    environment = Environment(
        loader=FileSystemLoader(PAGE), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    drawn = {key: data[key] for key in kind.drawn}
    return environment.get_template(kind.template).render(
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

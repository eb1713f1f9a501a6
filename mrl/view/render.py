"""Renders a page from a template, with inline styles and scripts and with its data as JSON.

The page shows text that a model wrote, so its data must never be interpreted as markup. Jinja2 escapes
the data. In the JSON block `<` is written as an escape, so that no text can end the block. The scripts
create only text nodes, which `require-trusted-types-for` enforces. The Content-Security-Policy allows
only the page's own style and script, identified by their hashes, and forbids all requests.
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
    """The template, the scripts and the data of a type of page."""

    template: str
    scripts: tuple[str, ...]
    """The names of the scripts, which run in this order and in one scope."""
    drawn: tuple[str, ...]
    """The keys of the page's data that the scripts read."""
    styles: tuple[str, ...] = ("page", "parts")
    """The names of the stylesheets."""
    connects: bool = False
    """Whether the scripts may request more from where the page comes from."""


RUN = Kind(
    "page.html.j2",
    (
        "base",
        "chart",
        "heatmap",
        "curves",
        "timeline",
        "mismatch",
        "tokens",
        "samples",
        "outcome",
        "main",
    ),
    ("metrics", "timeline", "diagnosis", "steps"),
)
COMPARISON = Kind("compare.html.j2", ("base", "chart", "curves", "compare"), ("metrics", "charts"))
SERVICE = Kind(
    "service.html.j2", ("base", "chart", "curves", "service_charts", "service"), ("metrics",)
)
LIVE = Kind(
    "live.html.j2",
    (
        "base",
        "chart",
        "curves",
        "timeline",
        "service_charts",
        "live_charts",
        "live_phase",
        "live_samples",
        "live_parts",
        "live",
    ),
    ("metrics", "live"),
    styles=("page", "parts", "live"),
    connects=True,
)


def render(data: dict[str, Any], kind: Kind = RUN) -> str:
    """Return the page that shows `data`, as HTML.

    data: the result of `collect`, of `collect_service` for the kind SERVICE, of `collect_comparison`
    for the kind COMPARISON, or what mrl/view/live/server.py makes of a live page for the kind LIVE.
    """
    style = "\n".join((PAGE / f"{name}.css").read_text() for name in kind.styles)
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
        policy=policy(script, style, connects=kind.connects),
        style=Markup(style),
        script=Markup(script),
        json=Markup(json_block(drawn)),
    )


def policy(script: str, style: str, *, connects: bool = False) -> str:
    """Return a Content-Security-Policy that permits only this script and this stylesheet.

    The script and the stylesheet are identified by their hashes. Images may come from data: URLs. With
    `connects`, the script may send requests to where the page comes from.
    """
    rules = (
        "default-src 'none'",
        f"script-src '{_hash(script)}'",
        f"style-src '{_hash(style)}'",
        "img-src data:",
        *(("connect-src 'self'",) if connects else ()),
        "base-uri 'none'",
        "form-action 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
    return "; ".join(rules)


def json_block(value: Any) -> str:
    """Return `value` as ASCII JSON that cannot end the HTML element that contains it.

    The characters `<`, `>` and `&`, which occur only in strings, are escaped. Raises ValueError for NaN
    and infinity.
    """
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _hash(text: str) -> str:
    digest = hashlib.sha256(text.encode()).digest()
    return f"sha256-{base64.b64encode(digest).decode()}"

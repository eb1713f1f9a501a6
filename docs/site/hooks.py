"""This module fits the pages, written for GitHub, to mkdocs: two more pages, links, lists."""

from __future__ import annotations

import re
from pathlib import Path

from mkdocs.structure.files import File

ROOT = Path(__file__).parents[2]
FROM_ROOT = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
}
"""Pages that stand in the root of the checkout, and their names on the site."""
FETCHED, OWN = "https://unpkg.com/iframe-worker/shim", "site/iframe-worker.js"
"""The script that mkdocs-material would fetch for the search, and where the site has it."""
ITEM = re.compile(r"( *)((?:[-*]|\d+\.) +)(.*)")
FENCE = re.compile(r" *(?:```|~~~)")


def on_files(files, config):
    """Add README.md as the front page, CONTRIBUTING.md and CHANGELOG.md."""
    for source, target in FROM_ROOT.items():
        text = re.sub(r"\]\(docs/", "](", (ROOT / source).read_text())
        files.append(File.generated(config, target, content=text))
    return files


def on_page_markdown(markdown, **_):
    """Rewrite a page of GitHub's Markdown for Python-Markdown, and the links to README.md."""
    for source, target in FROM_ROOT.items():
        markdown = re.sub(rf"\]\((?:\.\./)?{source}", f"]({target}", markdown)
    return indent_lists(markdown)


def on_post_page(output, **_):
    """Take the script of the search from the site: a reader may have no network."""
    return output.replace(FETCHED, OWN)


def indent_lists(markdown: str) -> str:
    """Give what is inside a list item four spaces a level, and a list an empty line before it.

    GitHub takes the width of the item's marker as its indentation and lets a list follow a
    paragraph directly; Python-Markdown does neither.
    """
    lines: list[str] = []
    open_items: list[int] = []  # columns where the text of the items begins
    is_code = is_list = False  # is_list: the lines since the last empty one began with an item
    for line in markdown.splitlines():
        column = len(line) - len(line.lstrip())
        item = None if is_code else ITEM.fullmatch(line)
        if line.strip() and not is_code:
            is_lazy = not item and lines and lines[-1].strip()  # a paragraph that continues
            while open_items and column < open_items[-1] and not (is_lazy and column):
                open_items.pop()
        depth = len(open_items)
        if not lines or not lines[-1].strip():
            is_list = item is not None
        if item:
            if not is_list:
                lines.append("")
                is_list = True
            open_items.append(column + len(item[2]))
            lines.append(" " * 4 * depth + item[2] + item[3])
        else:
            rest = line[min(column, open_items[-1]) :] if open_items else line
            lines.append((" " * 4 * depth + rest) if line.strip() else "")
        if FENCE.match(line):
            is_code = not is_code
    return "\n".join(lines) + "\n"

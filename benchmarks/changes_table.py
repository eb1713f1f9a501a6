"""The table of docs/checkpoints.md, what may change in a run: `python -m benchmarks.changes_table`.

It is made of `RULES` in mrl/run/changes.py.
"""

from __future__ import annotations

from pathlib import Path

from mrl.run.changes import RULES, Kind

PAGE = Path(__file__).parents[1] / "docs/checkpoints.md"
BEGIN, END = "<!-- table: python -m benchmarks.changes_table -->\n", "<!-- end of table -->\n"
WORDS = {
    Kind.FREE: "freely",
    Kind.ALLOW: "with `--allow`",
    Kind.NEVER: "never",
}


def page(text: str) -> str:
    """Return the page `text` with the table of the code."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    assert after, f"{PAGE}: the marks of the table are missing"
    return before + BEGIN + table() + END + after


def table() -> str:
    """Return the rows of `RULES`, those of one class together."""
    rows = [
        f"| {WORDS[rule.kind]} | {rule.what}{'*' * rule.by_contents} | "
        f"{', '.join(f'`{key}`' for key in rule.keys)} |"
        for kind in Kind
        for rule in RULES
        if rule.kind is kind
    ]
    return "\n".join(["", "| changes | what | keys |", "|---|---|---|", *rows, "", ""])


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
    print(f"wrote the table of {PAGE}")

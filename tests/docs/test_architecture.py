"""The table of the rooms in docs/architecture.md is the table of tests/house/test_rooms.py."""

from __future__ import annotations

import re

from tests.docs.pages import ROOT
from tests.house.test_rooms import BASE, ROOMS

TABLE = (ROOT / "docs/architecture.md").read_text().split("\n\n**The rule")[0]


def rows() -> list[tuple[list[str], set[str]]]:
    """(rooms, what they may import), dotted, of each row."""
    found = []
    for line in TABLE.splitlines():
        if line.startswith("| `"):
            room, _, imports = (cell.strip() for cell in line.strip("|").split("|"))
            found.append(
                (_dotted(room), {_room(name) for name in re.findall(r"`([^`]+)`", imports)})
            )
    return found


def _dotted(cell: str) -> list[str]:
    names = (name.removesuffix(".py").strip("/") for name in re.findall(r"`([^`]+)`", cell))
    return [name.replace("/", ".") for name in names if name != "csrc"]


def _room(name: str) -> str:
    dotted = name.removesuffix(".py").strip("/").replace("/", ".")
    return dotted if dotted.split(".")[0] in ("moe", "parallel", "mrl") else f"mrl.{dotted}"


def test_every_room_has_its_row_in_order() -> None:
    named = [name for rooms, _ in rows() for name in rooms]
    assert sorted(named) == sorted(set(ROOMS) - {"mrl.__main__"})
    place = {name: i for i, (rooms, _) in enumerate(rows()) for name in rooms}
    for rooms, imports in rows():
        for target in imports:
            room = next(
                known for known in place if target == known or target.startswith(f"{known}.")
            )
            assert place[room] <= min(place[name] for name in rooms), f"{rooms} stand above {room}"


def test_the_imports_are_those_that_the_house_allows() -> None:
    for rooms, imports in rows():
        if set(rooms) <= BASE or {"mrl.trainer", "mrl.commands"} & set(rooms):
            continue
        assert imports == set().union(*(ROOMS[name] for name in rooms)) - {"mrl._C"}, rooms

"""Looks, before a long run, at what faults do to it: `mrl drill`."""

from __future__ import annotations

import json

from tests.users.things import User, thing


def drilled(user: User, *words: str, code: int = 0) -> tuple[str, dict[str, dict]]:
    """Drill the toy recipe; return what was printed, and the rows by the names of their faults."""
    printed = user.mrl("drill", *user.recipe("mine"), *words, code=code)
    file = user.folder / "mine_drill/drill.json"
    rows = json.loads(file.read_text()) if file.exists() else []
    return printed, {row["fault"]: row for row in rows}


@thing(
    "I ask which faults a drill provokes, in my recipe or without one, and which not, and why.",
    is_long=False,
)
def listed(user: User) -> str:
    of_mine, _ = drilled(user, "--list")
    without = user.mrl("drill", "--list")
    for text in ("kill-rank-train", "damaged-checkpoint", "loss of a node", "runs on one node"):
        assert text in of_mine
        assert text in without
    assert "depends on the recipe" in without
    assert "depends on the recipe" not in of_mine
    return "a list of faults, each with what is done or why not"


@thing("I misspell a fault, or a drill's folder is there already.", is_long=False)
def refused(user: User) -> str:
    line, _ = drilled(user, "--only", "kill-rank-trian", code=2)
    assert "expected some of kill-rank-start" in line
    user.write("mine_drill/notes.txt", "mine")
    taken, _ = drilled(user, code=2)
    assert "is not empty; remove it, or choose another folder with --folder" in taken
    assert (user.folder / "mine_drill/notes.txt").read_text() == "mine"
    return line.strip()


@thing("I drill my recipe for the kill of a rank and a damaged checkpoint before a long run.")
def two_faults(user: User) -> str:
    printed, rows = drilled(user, "--only", "kill-rank-train", "damaged-checkpoint")
    assert "3 passed, 0 failed" in printed
    assert rows["kill-rank-train"]["exit_code"] == 71
    assert "the same bits" in rows["damaged-checkpoint"]["happened"]
    assert not (user.folder / "mine").exists()
    return "both recovered to the bit; output_dir was not touched"


@thing("I let a script read what a drill found, for SIGTERM and a reward that raises.")
def as_json(user: User) -> str:
    printed, rows = drilled(user, "--json", "--only", "sigterm", "reward-raises")
    lines = [json.loads(line) for line in printed.splitlines() if line.startswith("{")]
    assert {line["fault"] for line in lines} == rows.keys()
    assert all(line["passed"] for line in lines)
    assert rows["sigterm"]["exit_code"] in (75, 143)
    assert rows["reward-raises"]["verdict"] == "refused"
    return f"{len(lines)} lines of JSON"

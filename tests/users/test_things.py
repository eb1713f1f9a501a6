"""Every thing that a user does ends as it should."""

from __future__ import annotations

import pytest

from tests.release import release
from tests.users import load
from tests.users.things import THINGS, Thing, User

load()


@pytest.mark.parametrize(
    "thing",
    [
        release(one, id=one.text) if one.is_long else pytest.param(one, id=one.text)
        for one in THINGS
    ],
)
def test_what_a_user_does(thing: Thing, tmp_path, toy) -> None:
    assert thing.do(User(tmp_path, toy))


def test_every_wall_of_new_users_has_a_thing_that_shows_it_gone() -> None:
    """The walls are those that a user of TRL, verl and slime met after a first run."""
    walls = [one.wall for one in THINGS if one.wall is not None]
    words = ("less memory", "form of data", "logged", "Step numbers", "copied run folder", "README")
    assert len(walls) >= len(words)
    assert [word for word in words if not any(word in wall for wall in walls)] == []

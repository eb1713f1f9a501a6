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

"""Ids of models and samplers, and paths of checkpoints, in the forms that the SDK builds and parses."""

from __future__ import annotations

import re
from typing import Literal, NamedTuple

from mrl.web.limits import Refused

Kind = Literal["training", "sampler", "external"]
"""What a checkpoint contains, by the SDK's names: everything that training needs, the adapter alone, or
the adapter as a PEFT folder."""
SEGMENTS: dict[Kind, str] = {
    "training": "weights",
    "sampler": "sampler_weights",
    "external": "external_weights",
}
"""The part of a path that says what the checkpoint contains."""
NAME = "[A-Za-z0-9][A-Za-z0-9._-]{0,79}"
PATH = re.compile(rf"tinker://([^/]{{1,200}})/(weights|sampler_weights|external_weights)/({NAME})")


class Path(NamedTuple):
    run: str
    """The id of the model that was saved."""
    kind: Kind
    name: str

    @property
    def checkpoint_id(self) -> str:
        """The SDK's id of the checkpoint within its run."""
        return f"{SEGMENTS[self.kind]}/{self.name}"

    def __str__(self) -> str:
        return f"tinker://{self.run}/{self.checkpoint_id}"


def parse(path: str) -> Path:
    """Return the parts of a path. Raises Refused."""
    if (found := PATH.fullmatch(path)) is None:
        raise Refused(
            400,
            f"the path is {path[:200]!r}; expected tinker://RUN/weights/NAME, "
            "tinker://RUN/sampler_weights/NAME or tinker://RUN/external_weights/NAME",
        )
    kinds: list[Kind] = [kind for kind, segment in SEGMENTS.items() if segment == found[2]]
    return Path(found[1], kinds[0], found[3])


def model_id(session: str, number: int) -> str:
    """Return the id of a session's model, as the SDK builds it too."""
    return f"{session}:train:{number}"


def sampler_id(session: str, number: int) -> str:
    """Return the id of a session's sampler."""
    return f"{session}:sample:{number}"


def tenant_name(session: str, number: int) -> str:
    """Return the name of the service's session that stands behind a model."""
    return f"tk-{session.replace('-', '')}-{number}"

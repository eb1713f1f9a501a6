"""This module holds the records that the trainer and the workers of rollout ranks exchange."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from mrl.collect.backlog import Started
from mrl.run.rollouts import decode_groups, encode_groups
from mrl.types import SampleGroup


@dataclass(frozen=True)
class Work:
    """Says what one engine is to generate: its share of a batch, or of the evaluation sets."""

    work_id: int
    """Never used twice by a server."""
    engine: int
    kind: Literal["batch", "evaluation"]
    version: int
    """The weights that generate it."""
    num_wanted: int = 0
    """The work is over when so many groups are whole."""
    started: tuple[Started, ...] = ()
    """The groups to begin, or to continue; an evaluation has its own prompts."""

    def frame(self) -> tuple[dict[str, Any], bytes]:
        """Return the message and the body that carry it."""
        message = {
            "type": "work",
            "work_id": self.work_id,
            "engine": self.engine,
            "kind": self.kind,
            "version": self.version,
            "num_wanted": self.num_wanted,
            "seeds": [one.seed for one in self.started],
        }
        return message, encode_groups([one.group for one in self.started])

    @classmethod
    def of_frame(cls, message: Mapping[str, Any], body: bytes) -> Work:
        """Return the work of a frame. Raises ValueError, KeyError or TypeError for another one."""
        groups = decode_groups(body)
        started = [Started(g, int(seed)) for g, seed in zip(groups, message["seeds"], strict=True)]
        return cls(
            int(message["work_id"]),
            int(message["engine"]),
            message["kind"],
            int(message["version"]),
            int(message["num_wanted"]),
            tuple(started),
        )

    def by(self, version: int) -> Work:
        """Return the work for other weights."""
        return dataclasses.replace(self, version=version)


@dataclass
class Delivered:
    """Holds what workers have generated and scored: a `mrl.collect.task.Scored`."""

    groups: list[SampleGroup] = field(default_factory=list)
    num_failed: int = 0
    partial: list[SampleGroup] = field(default_factory=list)

    def add(self, other: Delivered) -> None:
        """Take in what another engine has delivered."""
        self.groups += other.groups
        self.partial += other.partial
        self.num_failed += other.num_failed

    def finish(self) -> tuple[list[SampleGroup], int]:
        """Return the groups in the order of their ids, and how many samples failed."""
        return sorted(self.groups, key=lambda group: group.samples[0].group_id), self.num_failed

    def frame(self, work_id: int, part: int) -> tuple[dict[str, Any], bytes]:
        """Return the message and the body that carry part `part` of a result."""
        message = {
            "type": "part",
            "work_id": work_id,
            "part": part,
            "num_failed": self.num_failed,
            "num_whole": len(self.groups),
        }
        return message, encode_groups([*self.groups, *self.partial])

    @classmethod
    def of_frame(cls, message: Mapping[str, Any], body: bytes) -> Delivered:
        """Return the part of a frame. Raises ValueError, KeyError or TypeError for another one."""
        groups, num_whole = decode_groups(body), int(message["num_whole"])
        return cls(groups[:num_whole], int(message["num_failed"]), groups[num_whole:])


@dataclass
class Result:
    """Holds all that a worker has sent for one work."""

    parts: dict[int, Delivered] = field(default_factory=dict)
    """One for a batch, one for each evaluation set."""

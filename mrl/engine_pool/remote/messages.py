"""Encodes the work items, groups and errors that the trainer and the workers exchange.

Each class has a method `frame`, which returns a message and its body, and a class method
`of_frame`, which decodes them and raises ValueError, KeyError or TypeError if they are invalid.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, Self

from mrl.collect.backlog import Started
from mrl.errors import EngineGone, InputError, RunFailed
from mrl.run.rollouts import decode_groups, encode_groups
from mrl.types import SampleGroup

Frame = tuple[dict[str, Any], bytes]


def _with_object(message: dict[str, Any], given: Mapping[str, Any], body: bytes) -> Frame:
    """Return a frame whose body begins with the JSON object `given`, unless that is empty. A message
    has little room."""
    text = json.dumps(given).encode() if given else b""
    return ({**message, "object_bytes": len(text)} if text else message), text + body


def _without_object(message: Mapping[str, Any], body: bytes) -> tuple[dict[str, Any], bytes]:
    """Return the object and the body that were given to `_with_object`."""
    size = int(message.get("object_bytes", 0))
    found = json.loads(body[:size]) if size else {}
    if not isinstance(found, dict):
        raise TypeError(f"got {type(found).__name__}, expected a JSON object")
    return found, body[size:]


@dataclass(frozen=True)
class Work:
    """A work item: it asks one engine to generate the engine's part of a batch, of the evaluation
    sets, or of the samples that a client has asked for."""

    work_id: int
    """Unique within a coordinator."""
    engine: int
    kind: Literal["batch", "evaluation", "samples"]
    version: int
    """The version of the weights to generate with."""
    num_wanted: int = 0
    """The work item is done when this many groups are complete."""
    started: tuple[Started, ...] = ()
    """The groups to begin or to continue; empty for an evaluation, whose prompts the worker
    knows."""
    details: Mapping[str, Any] = field(default_factory=dict)
    """How `samples` are drawn, as a JSON object; empty for the other kinds."""
    part: int = 0
    num_parts: int = 1
    """For an evaluation: the work item has every `num_parts`-th prompt of each set, from prompt
    `part` on."""

    def frame(self) -> Frame:
        apart = ("started", "details")
        rest = {key: value for key, value in vars(self).items() if key not in apart}
        seeds = [one.seed for one in self.started]
        given = {"seeds": seeds, "details": self.details} if seeds or self.details else {}
        groups = encode_groups([one.group for one in self.started])
        return _with_object({"type": "work", **rest}, given, groups)

    @classmethod
    def of_frame(cls, message: Mapping[str, Any], body: bytes) -> Work:
        given, body = _without_object(message, body)
        groups, seeds = decode_groups(body), given.get("seeds", [])
        started = [Started(g, int(seed)) for g, seed in zip(groups, seeds, strict=True)]
        return cls(
            int(message["work_id"]),
            int(message["engine"]),
            message["kind"],
            int(message["version"]),
            int(message["num_wanted"]),
            tuple(started),
            given.get("details", {}),
            int(message["part"]),
            int(message["num_parts"]),
        )


@dataclass
class Delivered:
    """Groups that were generated and scored, as they are sent to the trainer. It implements
    `mrl.collect.task.Scored`.

    A batch is delivered in one part, and an evaluation in one part per evaluation set.
    """

    groups: list[SampleGroup] = field(default_factory=list)
    """Complete groups, with rewards."""
    num_failed: int = 0
    """Number of samples in `groups` that could not be scored."""
    partial: list[SampleGroup] = field(default_factory=list)
    """Incomplete groups."""
    notes: Mapping[str, Any] = field(default_factory=dict)
    """What else belongs to the samples that a client has asked for, as a JSON object; empty for the
    other kinds of work."""

    def add(self, other: Delivered) -> None:
        """Add the groups and the number of failed samples that another engine has delivered."""
        self.groups += other.groups
        self.partial += other.partial
        self.num_failed += other.num_failed

    def finish(self) -> tuple[list[SampleGroup], int]:
        """Return the groups in the order of their ids, and the number of samples that failed."""
        return sorted(self.groups, key=lambda group: group.samples[0].group_id), self.num_failed

    def frame(self, work_id: int, part: int) -> Frame:
        message = {
            "type": "part",
            "work_id": work_id,
            "part": part,
            "num_failed": self.num_failed,
            "num_whole": len(self.groups),
        }
        return _with_object(message, self.notes, encode_groups([*self.groups, *self.partial]))

    @classmethod
    def of_frame(cls, message: Mapping[str, Any], body: bytes) -> Delivered:
        notes, body = _without_object(message, body)
        groups, num_whole = decode_groups(body), int(message["num_whole"])
        return cls(groups[:num_whole], int(message["num_failed"]), groups[num_whole:], notes)


@dataclass(frozen=True)
class _OfLease:
    """Base of the messages about a lease, which lets one worker generate the group of one prompt.
    Each subclass has one further field, an int."""

    kind: ClassVar[str]
    """The value of the message's key `type`."""
    lease_id: str
    group: SampleGroup

    def frame(self) -> Frame:
        rest = {key: value for key, value in vars(self).items() if key != "group"}
        return {"type": self.kind, **rest}, encode_groups([self.group])

    @classmethod
    def of_frame(cls, message: Mapping[str, Any], body: bytes) -> Self:
        (group,) = decode_groups(body)
        number = dataclasses.fields(cls)[-1].name
        return cls(message["lease_id"], group, **{number: int(message[number])})


@dataclass(frozen=True)
class LeasedGroup(_OfLease):
    """A message to a worker: generate this group under a lease."""

    kind = "lease"
    seed: int


@dataclass(frozen=True)
class FinishedGroup(_OfLease):
    """A message from a worker: the group of a lease is generated and scored."""

    kind = "group"
    num_failed: int
    """Number of samples of the group that could not be scored."""


@dataclass(frozen=True)
class FinishedSample(_OfLease):
    """A message from a worker: one sample of an unfinished group is complete.

    `group` holds only this sample. If the worker is lost, the next worker need not generate the
    sample again.
    """

    kind = "sample"
    place: int
    """The index of the sample in its group."""


def failed_message(error: Exception) -> dict[str, str]:
    """Return the message by which a worker reports an error that ends the run."""
    for kind in (EngineGone, InputError):
        if isinstance(error, kind):
            return {"type": "failed", "error": kind.__name__, "text": str(error)}
    text = str(error) if isinstance(error, RunFailed) else f"{type(error).__name__}: {error}"
    return {"type": "failed", "error": "RunFailed", "text": " ".join(text.split())}


def dying_message(error: Exception) -> dict[str, str]:
    """Return the last message of a worker that ends because of an error. Another worker takes its
    place."""
    return {"type": "dies", "text": " ".join(f"{type(error).__name__}: {error}".split())}


def reported_error(message: Mapping[str, Any], engine: int) -> Exception:
    """Return the error that the worker of engine `engine` has reported with a `failed_message`."""
    kinds = {kind.__name__: kind for kind in (EngineGone, InputError)}
    kind = kinds.get(str(message["error"]), RunFailed)
    return kind(f"rollout engine {engine}: {message['text']}")

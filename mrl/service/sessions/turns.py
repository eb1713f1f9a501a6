"""Which operations of a session's queue run in its next turn.

A *plain* operation runs after those that were posted before it. A `sample` that names a sampler is
*frozen*: its weights do not depend on the operations before it, so it does not wait for them, except
for a `save_sampler` of that name. A `save_sampler` that was posted after it, which may overwrite these
weights, waits for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol, TypeVar

from mrl.service.sessions.bodies import Body, SampleBody, SaveSamplerBody, num_tokens

MAX_TURN_TOKENS = 1 << 20
"""Maximum number of tokens of the frozen samples of a turn, unless it is a single one. Each of the
likeliest tokens that a sample wants in the place of a prompt's token counts, too: all answers of a turn
are there at once, and fit into those that are kept (`answers.MAX_KEPT_BYTES`)."""


class Waiting(Protocol):
    """An operation in the queue."""

    @property
    def body(self) -> Body: ...


Item = TypeVar("Item", bound=Waiting)


def is_frozen(body: Body) -> bool:
    """Return whether an operation samples with a sampler rather than with the present weights."""
    return isinstance(body, SampleBody) and body.sampler is not None


def next_turn(waiting: Sequence[Item]) -> list[Item]:
    """Return the operations of the next turn, in the order in which they are carried out; empty if none
    waits.

    All samples of a turn have the same weights: the present ones or one sampler's, whichever was asked
    for first among those that can run. The other operations are those that follow the plain samples
    at the front of the queue, up to the next plain sample, or to a `save_sampler` that waits for frozen
    samples of a later turn. If plain samples at the front are left for a later turn, there are none.
    """
    plain = [each for each in waiting if not is_frozen(each.body)]
    front = _leading(plain)
    ready = list(_ready(waiting))
    first = min([*front[:1], *ready[:1]], key=waiting.index, default=None)
    samples: list[Item] = []
    if front and first is front[0]:
        samples, front = front, []
    elif first is not None:
        samples = _within_limit(each for each in ready if _sampler(each) == _sampler(first))
    if front:
        return samples
    done = [each for each in samples if not is_frozen(each.body)]
    return [*samples, *_until_it_waits(plain[len(done) :], _first_left(waiting, samples), waiting)]


def _first_left(waiting: Sequence[Item], samples: Sequence[Item]) -> dict[str | None, int]:
    """Return, by sampler, the place in the queue of the first frozen sample not in `samples`."""
    now, found = {id(each) for each in samples}, dict[str | None, int]()
    for place, each in enumerate(waiting):
        if is_frozen(each.body) and id(each) not in now:
            found.setdefault(_sampler(each), place)
    return found


def _until_it_waits(
    plain: Sequence[Item], left: Mapping[str | None, int], waiting: Sequence[Item]
) -> Iterable[Item]:
    """Yield the operations of `plain` before the next sample, and before a `save_sampler` that waits
    for frozen samples of a later turn. `left`: the result of `_first_left`."""
    places = {id(each): place for place, each in enumerate(waiting)}
    for each in plain:
        if each.body.kind == "sample":
            return
        name = each.body.name if isinstance(each.body, SaveSamplerBody) else None
        if name is not None and left.get(name, len(waiting)) < places[id(each)]:
            return
        yield each


def _leading(plain: Sequence[Item]) -> list[Item]:
    """Return the samples at the front."""
    end = next((i for i, each in enumerate(plain) if each.body.kind != "sample"), len(plain))
    return list(plain[:end])


def _ready(waiting: Sequence[Item]) -> Iterable[Item]:
    """Yield the frozen samples that wait for no `save_sampler`."""
    saves: set[str | None] = set()
    for each in waiting:
        if isinstance(each.body, SaveSamplerBody):
            saves.add(each.body.name)
        elif is_frozen(each.body) and _sampler(each) not in saves:
            yield each


def _sampler(item: Waiting) -> str | None:
    return item.body.sampler if isinstance(item.body, SampleBody) else None


def _num_top(body: Body) -> int:
    """Return how many likeliest tokens the answer to a sample has."""
    if not isinstance(body, SampleBody):
        return 0
    return body.top_prompt_logprobs * sum(map(len, body.prompts))


def _within_limit(samples: Iterable[Item]) -> list[Item]:
    found: list[Item] = []
    total = 0
    for each in samples:
        total += num_tokens(each.body) + _num_top(each.body)
        if found and total > MAX_TURN_TOKENS:
            break
        found.append(each)
    return found

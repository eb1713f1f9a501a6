"""This module says which weights made each token of a completion and chose each row of its routes.

P tokens of a request, C tokens of its completion, T = P + C. Row r was computed together with token
r + 1 for r >= P - 1; the other rows, of the prompt, when it was read or the prefix cache was filled.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from mrl.errors import WrongWeights
from mrl.types import UNKNOWN_VERSION, VersionSpan


def version_spans(
    meta: dict[str, Any], prompt_len: int, num_output: int, versions: Sequence[int], where: str
) -> tuple[VersionSpan, ...]:
    """Return the weights that made the C tokens: spans over [P, P + C).

    `weight_versions` of the answer's `meta` (0.5.20 and later) says who made which output token;
    before, only the last. `versions` were in force since the request was sent, oldest first. Raises
    WrongWeights for another version, or one that comes before an older one, and RuntimeError for an
    answer that does not say.
    """
    seen = [
        (str(span["version"]), span["start"], span["end"])
        for span in meta.get("weight_versions") or ()
    ]
    if not seen and num_output:
        if len(versions) > 1:
            raise RuntimeError(
                f"{where}: sampled while the weights changed, and this SGLang does not say which "
                "weights made which token; expected SGLang 0.5.20 or later"
            )
        seen = [(str(meta.get("weight_version")), 0, num_output)]
    allowed = [str(version) for version in versions]
    if strange := {version for version, _, _ in seen} - set(allowed):
        raise WrongWeights(
            f"{where}: sampled with weight version {', '.join(sorted(strange))}, expected "
            f"{' or '.join(sorted(set(allowed)))}, what was pushed"
        )
    order = iter(allowed)
    if not all(version in order for version, _, _ in seen):
        raise WrongWeights(
            f"{where}: weight versions {seen}, expected the order in which they were pushed: "
            f"{', '.join(allowed)}"
        )
    ends = [0, *(end for _, _, end in seen)]
    if [start for _, start, _ in seen] != ends[:-1] or ends[-1] != num_output:
        raise RuntimeError(f"{where}: weight versions {seen}, expected all of {num_output} tokens")
    return tuple(VersionSpan(int(v), prompt_len + i, prompt_len + j) for v, i, j in seen)


def row_versions(
    spans: Sequence[VersionSpan],
    prompt_len: int,
    num_cached: int,
    versions: Sequence[int],
    cached_versions: Sequence[int],
    *,
    retracted: bool,
    aborted: bool = False,
) -> tuple[VersionSpan, ...]:
    """Return the weights that chose the routes of each of the T - 1 rows; UNKNOWN_VERSION where nobody
    knows (SGLang 0.5.20 does not say).

    `spans` are those of the C tokens, `versions` as in `version_spans`, and `cached_versions` those
    that the prefix cache held something of when the request was sent; a cached row is of one of them.

    - Where the first token is of newer weights than those in force when the request was sent, an update
      fell between: it may have found the request in the queue or between two chunks of its prefill.
      The rows before the first token's own are of either.
    - After a retraction rows were computed anew, or read from the cache, when the request ran again.
      Under one version that is the same. Under several, the rows of the last span are of its version,
      whenever that was, and those before are unknown. A request that was aborted may have been
      computed anew without another token, by weights that came after its last token: then all rows are
      unknown.
    """
    first, last = spans[0].version, spans[-1]
    num_cached = min(num_cached, prompt_len - 1)
    cached = set(cached_versions)
    cache_version = cached.pop() if len(cached) == 1 else UNKNOWN_VERSION
    if first != versions[0]:
        rows = [(UNKNOWN_VERSION, prompt_len - 1)]
    else:
        rows = [(cache_version, num_cached), (first, prompt_len - 1)]
    rows += [(span.version, span.end - 1) for span in spans]
    computing = versions if aborted else versions[: list(versions).index(last.version) + 1]
    if retracted and {*computing, *cached_versions} != {first}:
        is_known = last.version == computing[-1]
        rows = [(UNKNOWN_VERSION, (last.start if is_known else last.end) - 1), rows[-1]]
    joined: list[VersionSpan] = []
    start = 0
    for version, end in rows:
        if end <= start:
            continue
        if joined and joined[-1].version == version:
            joined[-1] = VersionSpan(version, joined[-1].start, end)
        else:
            joined.append(VersionSpan(version, start, end))
        start = end
    return tuple(joined) or (VersionSpan(first, 0, 0),)


def cut_spans(spans: Sequence[VersionSpan], end: int) -> tuple[VersionSpan, ...]:
    """Return the spans up to `end`."""
    return tuple(
        dataclasses.replace(span, end=min(span.end, end)) for span in spans if span.start < end
    )

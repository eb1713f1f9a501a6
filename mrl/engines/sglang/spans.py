"""Determines which weights sampled each token of a completion, and which weights computed each row of
its routes.

Dimensions: P tokens of a request, C tokens of its completion, T = P + C. Row r >= P - 1 of the
routes was computed when token r + 1 was sampled. Lower rows were computed in the prefill of the
prompt, or before it if they were read from the prefix cache.
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
    """Return the versions of the weights that sampled the C tokens, as spans over [P, P + C).

    Since SGLang 0.5.20, `weight_versions` in the answer's `meta` has the version of each output token;
    older releases report only the last version. `versions` are the versions that have been in force
    since the request was sent, the oldest first. `where` begins each error message. Raises WrongWeights
    if the answer has a version that is not among them, or has versions in another order. Raises
    RuntimeError if the versions of some tokens are missing.
    """
    seen = [
        (str(span["version"]), span["start"], span["end"])
        for span in meta.get("weight_versions") or ()
    ]
    if not seen and num_output:
        if len(versions) > 1:
            raise RuntimeError(
                f"{where}: sampled while the weights changed, and this SGLang does not report the "
                "version of each token; expected SGLang 0.5.20 or later"
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
    """Return the versions of the weights that computed the T - 1 rows of routes. SGLang 0.5.20 does not
    report them; rows whose version cannot be inferred have UNKNOWN_VERSION.

    `spans` has the versions of the C tokens (`version_spans`). `versions` are the versions that have
    been in force since the request was sent, the oldest first. The first `num_cached` rows were read
    from the cache, and each of them has one of the `cached_versions`.

    - The first token may have been sampled by newer weights than those in force when the request
      was sent. In that case, an update came while the request was in the queue or between two
      chunks of its prefill. It is then unknown which weights computed the rows before the first
      token's row.
    - After a retraction, rows are computed again or read from the cache. If only one version was in
      force, this makes no difference. If there were several, the rows of the last span have this span's
      version, and the version of all earlier rows is unknown. An aborted request may have been
      recomputed with weights newer than those of its last token, without sampling another token; then
      the version of all rows is unknown.
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
    """Return the parts of the spans that lie before position `end`."""
    return tuple(
        dataclasses.replace(span, end=min(span.end, end)) for span in spans if span.start < end
    )

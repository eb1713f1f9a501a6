"""What an engine holds, against what was sent: digests by place, summed over tensor-parallel ranks.

The engine's side is mrl/rollout/server_plugin. R ranks, E fused experts of a parameter.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from mrl.kernels.digest import add_digests, digest_place

ACTION = "mrl_digest"
FUSED_EXPERTS = re.compile(r"\.experts\.[^.]+$")
SHOWN = 3
ADVICE = "this ends the run: start it again, it goes on from its last checkpoint, and report this"


def held_digests(answer: Mapping[str, Any], num_ranks: int) -> tuple[dict[str, int], set[str]]:
    """Digest of each place, and the dtypes, from the answer of POST /weights_checker.

    A parameter whose digests are equal on all ranks is replicated and counts once, else the ranks
    hold shards of it and add up. Raises RuntimeError where a rank is missing, or replicas differ.
    """
    lines: dict[str, dict[int, str]] = {}
    for rank in answer.get("ranks") or []:
        for key, text in rank["checksums"].items():
            number, name = key.split(" ", 1)
            lines.setdefault(name, {})[int(number)] = text
    parts: list[tuple[str, int]] = []
    dtypes: set[str] = set()
    for name, by_rank in lines.items():
        if sorted(by_rank) != list(range(num_ranks)):
            raise RuntimeError(
                f"update_weights: digests of {name!r} came from ranks {sorted(by_rank)}, expected "
                f"{num_ranks} ranks; this version of SGLang cannot be checked"
            )
        fields = [by_rank[rank].split() for rank in range(num_ranks)]
        dtypes.add(fields[0][0])
        columns = zip(*([int(d, 16) for d in field[3].split(",")] for field in fields), strict=True)
        digests = [_of_all_ranks(name, column, int(fields[0][2])) for column in columns]
        parts += zip(_places(name, len(digests)), digests, strict=True)
    if not parts:
        raise RuntimeError(
            "update_weights: SGLang answered /weights_checker without digests; expected its plugin "
            "mrl_weight_digest to be loaded"
        )
    return add_digests(parts), dtypes


def _of_all_ranks(name: str, digests: Sequence[int], replicas: int) -> int:
    """Of one parameter, from the digest of each rank's part [R]."""
    if len(set(digests)) == 1:
        return digests[0]
    for start in range(0, len(digests), replicas):
        if len(set(digests[start : start + replicas])) != 1:
            raise RuntimeError(
                f"update_weights: {name!r} should be the same on {replicas} neighbouring ranks, and "
                f"the digests are {[f'{digest:016x}' for digest in digests]}; {ADVICE}"
            )
    return sum(digests[::replicas])


def _places(name: str, num_digests: int) -> Iterator[str]:
    """`num_digests` is E for fused experts, else 1."""
    if num_digests == 1 and not FUSED_EXPERTS.search(name):
        yield digest_place(name)
        return
    before, _, after = name.rpartition(".")
    for expert in range(num_digests):
        yield digest_place(f"{before}.{expert}.{after}")


def check_held(
    sent: Mapping[str, int],
    held: Mapping[str, int],
    optional: frozenset[str] | set[str],
    hint: str,
) -> None:
    """Raise RuntimeError where the engine holds other weights than were sent.

    `optional` places may be absent from the engine. `hint` goes into the message.
    """
    expected, got = _fold(sent, held), _fold(held, sent)
    wrong = [
        place
        for place in sorted(expected.keys() | got.keys())
        if expected.get(place) != got.get(place) and not (place in optional and place not in got)
    ]
    if not wrong:
        return
    shown = "; ".join(
        f"{place}: sent {_hex(expected.get(place))}, the engine holds {_hex(got.get(place))}"
        for place in wrong[:SHOWN]
    )
    more = f"; and {len(wrong) - SHOWN} more" if len(wrong) > SHOWN else ""
    raise RuntimeError(
        f"update_weights: the engine holds other weights than were sent, by their digests: {shown}"
        f"{more}{hint}; {ADVICE}"
    )


def _fold(digests: Mapping[str, int], other: Mapping[str, int]) -> dict[str, int]:
    """Experts that the other side does not tell apart count in their layer (fused shared experts)."""
    return add_digests(
        (place if place in other else place.partition(".experts.")[0], digest)
        for place, digest in digests.items()
    )


def _hex(digest: int | None) -> str:
    return "nothing" if digest is None else f"{digest:016x}"

"""What an engine holds, against what was sent: digests by place, summed over the engine's R ranks.

The engine's side is mrl/rollout/sglang/plugins/server, where each rank says what it holds: tensor
parallelism (also above the number of key and value heads), expert parallelism and DP
attention all look alike here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from mrl.kernels.digest import add_digests, digest_place

ACTION = "mrl_digest"
UNKNOWN = "?"
"""The piece of a parameter whose module does not say what it holds."""
SHOWN = 3
ADVICE = "this ends the run: start it again, it goes on from its last checkpoint, and report this"


def held_digests(answer: Mapping[str, Any], num_ranks: int) -> tuple[dict[str, int], set[str]]:
    """Digest of each place, and the dtypes, from the answer of POST /weights_checker.

    Each rank says which piece of a parameter it holds: those of one piece must agree and count once,
    other pieces add up, and experts count where they are, whoever holds them. Where a rank does not
    know its piece, digests that are equal on all ranks are taken for replicas. Raises RuntimeError
    where a rank is missing, or replicas differ.
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
        dtypes.add(by_rank[0].split()[0])
        parts += _of_all_ranks(name, [by_rank[rank] for rank in range(num_ranks)])
    if not parts:
        raise RuntimeError(
            "update_weights: SGLang answered /weights_checker without digests; expected its plugin "
            "mrl_weight_digest to be loaded"
        )
    return add_digests(parts), dtypes


def _of_all_ranks(name: str, texts: Sequence[str]) -> Iterator[tuple[str, int]]:
    """(place, digest) of one parameter, from what each rank says of its part [R]."""
    by_place: dict[str, dict[str, dict[int, int]]] = {}  # place, piece, rank
    for rank, text in enumerate(texts):
        _, _, piece, digests, *experts = text.split()
        numbers = [int(digest, 16) for digest in digests.split(",")]
        places = _places(name, experts[0] if experts else "")
        for place, number in zip(places, numbers, strict=True):
            by_place.setdefault(place, {}).setdefault(piece, {})[rank] = number
    for place, pieces in by_place.items():
        for piece, by_rank in pieces.items():
            yield place, _of_one_piece(name, place, piece, by_rank)


def _of_one_piece(name: str, place: str, piece: str, by_rank: Mapping[int, int]) -> int:
    digests = list(by_rank.values())
    if len(set(digests)) == 1:
        return digests[0]
    if piece == UNKNOWN:
        return sum(digests)
    raise RuntimeError(
        f"update_weights: {name!r} should be the same in {place} on the engine's ranks "
        f"{list(by_rank)}, and the digests are {[_hex(digest) for digest in digests]}; {ADVICE}"
    )


def _places(name: str, experts: str) -> list[str]:
    """`experts` are the numbers of a fused layer's experts; there are none in other parameters."""
    if not experts:
        return [digest_place(name)]
    before, _, after = name.rpartition(".")
    return [digest_place(f"{before}.{expert}.{after}") for expert in experts.split(",")]


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

"""Compares digests of the engine's weights with digests of the weights that were sent.

A *place* is a module of the model, such as an expert or the rest of a layer
(`mrl.kernels.digest.digest_place`). Each place has one digest, summed over the engine's R ranks.

The engine's side is mrl/engines/sglang/plugins/server, where each rank reports digests of the weights
that it holds. Tensor parallelism (also with more ranks than key and value heads), expert parallelism
and DP attention need no special cases here.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from mrl.kernels.digest import add_digests, digest_place

ACTION = "mrl_digest"
QUANTIZED = "quantized:"
"""In a rank's report, the prefix of the name of a module that computes with quantised weights."""
UNKNOWN = "?"
"""In a rank's report, stands for the piece of a parameter that the rank holds, if the parameter's
module does not know which piece this is."""
SHOWN = 3
ADVICE = "this ends the run: start it again, it continues from its last checkpoint, and report this"


def held_digests(answer: Mapping[str, Any], num_ranks: int) -> tuple[dict[str, int], set[str]]:
    """Return (digest of each place, dtypes of the weights) from the answer to POST /weights_checker. A
    place is a module, such as one expert or the rest of a layer.

    Each rank reports which piece of a parameter it holds. Ranks with the same piece must report the
    same digest, which is counted once; digests of different pieces are added. If ranks do not know
    their pieces, they count as replicas if their digests are all equal, and as different pieces
    otherwise. Each expert has a place of its own, whichever rank holds it. Raises RuntimeError if a
    rank is missing, or replicas differ.
    """
    lines = {
        name: texts for name, texts in _lines(answer).items() if not name.startswith(QUANTIZED)
    }
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


def quantized_modules(answer: Mapping[str, Any]) -> set[str]:
    """Return the names of the modules that compute with quantised weights, from the answer to POST
    /weights_checker."""
    return {name.removeprefix(QUANTIZED) for name in _lines(answer) if name.startswith(QUANTIZED)}


def check_quantized(expected: Collection[str], found: Collection[str]) -> None:
    """Raise RuntimeError unless the engine computes exactly the `expected` modules with quantised
    weights."""
    missing, extra = sorted(set(expected) - set(found)), sorted(set(found) - set(expected))
    if missing or extra:
        raise RuntimeError(
            f"update_weights: the engine has {len(found)} modules with quantised weights, expected "
            f"{len(expected)}: not quantised there: {listed(missing) or 'none'}; quantised there "
            f"alone: {listed(extra) or 'none'}; {ADVICE}"
        )


def _lines(answer: Mapping[str, Any]) -> dict[str, dict[int, str]]:
    """Return the texts in the answer to POST /weights_checker as {name: {rank: text}}. The name is that
    of a parameter, or QUANTIZED followed by that of a module."""
    lines: dict[str, dict[int, str]] = {}
    for rank in answer.get("ranks") or []:
        for key, text in rank["checksums"].items():
            number, name = key.split(" ", 1)
            lines.setdefault(name, {})[int(number)] = text
    return lines


def _of_all_ranks(name: str, texts: Sequence[str]) -> Iterator[tuple[str, int]]:
    """Yield (place, digest) for each place and piece of the parameter `name`. `texts` [R] has the line
    about this parameter from the report of each rank."""
    by_place: dict[str, dict[str, dict[int, int]]] = {}  # place, piece, rank
    for rank, text in enumerate(texts):
        _, piece, digests, *experts = text.split()
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
        f"{list(by_rank)}, and the digests are {[in_hex(digest) for digest in digests]}; {ADVICE}"
    )


def _places(name: str, experts: str) -> list[str]:
    """Return the places (modules) to which the digests of a parameter belong. `experts` has the indices
    of the experts in a fused parameter, separated by commas; it is empty for other parameters."""
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
    """Raise RuntimeError if the engine holds weights other than those sent.

    `sent` and `held` are digests by place (module). The places in `optional` may be absent from the
    engine. `hint` is added to the message.
    """
    expected, got = _fold(sent, held), _fold(held, sent)
    wrong = [
        f"{place}: sent {in_hex(expected.get(place))}, the engine holds {in_hex(got.get(place))}"
        for place in sorted(expected.keys() | got.keys())
        if expected.get(place) != got.get(place) and not (place in optional and place not in got)
    ]
    if wrong:
        raise RuntimeError(
            "update_weights: the engine holds other weights than were sent, by their digests: "
            f"{listed(wrong)}{hint}; {ADVICE}"
        )


def _fold(digests: Mapping[str, int], other: Mapping[str, int]) -> dict[str, int]:
    """Return `digests` by place (module). The digest of an expert that has no place in `other`, such as
    a fused shared expert, is added to the place of the expert's layer."""
    return add_digests(
        (place if place in other else place.partition(".experts.")[0], digest)
        for place, digest in digests.items()
    )


def in_hex(digest: int | None) -> str:
    return "nothing" if digest is None else f"{digest:016x}"


def listed(wrong: Sequence[str]) -> str:
    """Join the first `SHOWN` of these descriptions into one text, which also says how many more there
    are."""
    more = f"; and {len(wrong) - SHOWN} more" if len(wrong) > SHOWN else ""
    return "; ".join(wrong[:SHOWN]) + more

"""Compares the adapter in an engine with the adapter that was sent, by a digest of each matrix.

The engine's side is mrl/engines/sglang/plugins/adapter. Each of its R ranks holds the whole adapter.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from mrl.engines.sglang.digests import ADVICE, in_hex, listed
from mrl.kernels.digest import add_digests, digest_place

ACTION = "mrl_adapter "
"""The prefix of the `action` that POST /weights_checker gets; the name of the adapter follows."""


def check_exported(exported: Iterable[tuple[str, int]], came: Mapping[str, int]) -> None:
    """Raise RuntimeError if the received matrices differ from those that the trainer exported.

    `exported` has the exporter's digests as pairs (name, digest). The name is either PEFT's name of
    a matrix, or the name of a module (`digest_place`). The digest of a module is the sum over its
    matrices. `came` has the digests of the received matrices, by PEFT's name.
    """
    expected = add_digests(exported)
    places = add_digests((digest_place(name), digest) for name, digest in came.items())
    got = {name: came[name] if name in came else places.get(name, 0) for name in expected}
    wrong = [
        f"{name}: the trainer has {expected[name]:016x}, {got[name]:016x} came"
        for name in sorted(expected)
        if expected[name] != got[name]
    ]
    if wrong:
        raise RuntimeError(
            "update_weights: another adapter came than the trainer exported, by the digests: "
            f"{listed(wrong)}; {ADVICE}"
        )


def check_adapter_held(
    answer: Mapping[str, Any], sent: Mapping[str, int], scale: float, num_ranks: int
) -> None:
    """Raise RuntimeError if a rank of the engine holds an adapter other than the one sent.

    `answer` is the answer to POST /weights_checker. `sent` has the digest of each matrix, by the
    engine's name of the matrix. `scale` is alpha / rank, by which the product B A is multiplied.
    `num_ranks` is the number of the engine's ranks.
    """
    reports = answer.get("ranks") or []
    numbers = {_rank_of(report) for report in reports}
    if numbers != set(range(num_ranks)):  # with DP attention, every replica answers for all ranks
        raise RuntimeError(
            f"update_weights: the ranks {sorted(numbers)} reported their adapter, expected {num_ranks} "
            "ranks; this version of SGLang cannot be checked"
        )
    for report in reports:
        rank = _rank_of(report)
        wrong = list(_differences(dict(report["checksums"]), sent, scale))
        if wrong:
            raise RuntimeError(
                f"update_weights: rank {rank} of the engine holds another adapter than was sent: "
                f"{listed(wrong)}; {ADVICE}"
            )


def _rank_of(report: Mapping[str, Any]) -> int:
    info = report["parallelism_info"]
    return (info[0] if isinstance(info, list) else info)["tp_rank"]  # a list since 0.5.21


def _differences(held: dict[str, str], sent: Mapping[str, int], scale: float) -> Iterable[str]:
    if "error" in held:
        yield held["error"]
        return
    held_scale, slot = float(held.pop("scale")), held.pop("slot")
    if held_scale != scale:
        yield f"the scale alpha / rank: sent {scale:g}, the engine holds {held_scale:g}"
    got = {name: int(digest, 16) for name, digest in held.items()}
    for name in sorted(sent.keys() | got.keys()):
        if sent.get(name) != got.get(name):
            yield f"{name}: sent {in_hex(sent.get(name))}, the engine holds {in_hex(got.get(name))}"
    for name in slot.split():
        yield f"{name}: the slot from which batches read it differs from the adapter that is loaded"

"""What an engine holds of an adapter, against what was sent: one digest for each matrix.

The engine's side is mrl/rollout/sglang/plugins/adapter. Each of its R ranks holds an adapter whole.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from mrl.kernels.digest import add_digests, digest_place
from mrl.rollout.sglang.held import ADVICE, SHOWN

ACTION = "mrl_adapter "
"""Before the name of the adapter that is asked for."""


def check_exported(exported: Iterable[tuple[str, int]], came: Mapping[str, int]) -> None:
    """Raise RuntimeError where other matrices came than the trainer's exporter read.

    `exported` are its digests, by PEFT's name or by place (`digest_place`); `came` are those of the
    matrices that came, by name.
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
            f"{_shown(wrong)}; {ADVICE}"
        )


def check_adapter_held(
    answer: Mapping[str, Any], sent: Mapping[str, int], scale: float, num_ranks: int
) -> None:
    """Raise RuntimeError where a rank of the engine holds another adapter than was sent.

    `answer` is that of POST /weights_checker, `sent` has the digest of each matrix by the name under
    which the engine holds it. `scale` is the factor of B A.
    """
    ranks = answer.get("ranks") or []
    numbers = {_rank_of(said) for said in ranks}
    if numbers != set(range(num_ranks)):  # with DP attention, every replica answers for all ranks
        raise RuntimeError(
            f"update_weights: the ranks {sorted(numbers)} said what they hold of the adapter, expected "
            f"{num_ranks} ranks; this version of SGLang cannot be checked"
        )
    for said in ranks:
        rank = _rank_of(said)
        wrong = list(_differences(dict(said["checksums"]), sent, scale))
        if wrong:
            raise RuntimeError(
                f"update_weights: rank {rank} of the engine holds another adapter than was sent: "
                f"{_shown(wrong)}; {ADVICE}"
            )


def _rank_of(said: Mapping[str, Any]) -> int:
    info = said["parallelism_info"]
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
            yield f"{name}: sent {_hex(sent.get(name))}, the engine holds {_hex(got.get(name))}"
    for name in slot.split():
        yield f"{name}: the slot from which batches read it differs from the adapter that is loaded"


def _hex(digest: int | None) -> str:
    return "nothing" if digest is None else f"{digest:016x}"


def _shown(wrong: list[str]) -> str:
    more = f"; and {len(wrong) - SHOWN} more" if len(wrong) > SHOWN else ""
    return "; ".join(wrong[:SHOWN]) + more

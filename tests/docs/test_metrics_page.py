"""docs/metrics.md documents every metric key that the code writes, and no other.

The keys of real runs are compared in tests/loop/test_run.py.
"""

from __future__ import annotations

from tests.docs.metric_keys import (
    PAGE,
    arguments_of,
    documented,
    is_written,
    undocumented,
    undocumented_forms,
)


def test_every_key_of_the_code_is_documented() -> None:
    missing = [f"{form} ({at})" for form, at in sorted(undocumented_forms().items())]
    assert not missing, (
        "add to docs/metrics.md, or to NOT_METRICS in tests/docs/metric_keys.py where it is no "
        "metric:\n" + "\n".join(missing)
    )


def test_every_documented_key_is_written_by_the_code() -> None:
    stale = sorted(key for key in documented() if not is_written(key))
    assert not stale, "docs/metrics.md documents keys that nothing writes:\n" + "\n".join(stale)


def test_the_kinds_of_memory_are_named() -> None:
    """The calls of `own` name the ledger's kinds."""
    kinds = arguments_of("own")
    assert kinds
    text = PAGE.read_text().split("## Memory")[1]
    assert [kind for kind in sorted(kinds) if f"`{kind}`" not in text] == []


def test_a_key_of_a_run_is_found_by_its_pattern() -> None:
    known = [
        "eval/aime/avg@32",
        "moe/load_max/layer_01",
        "memory/train/critic_optimizer_host_bytes",
    ]
    assert undocumented(known) == []
    assert undocumented(["moe/load_min", "eval/aime/best", "step"]) == [
        "eval/aime/best",
        "moe/load_min",
    ]

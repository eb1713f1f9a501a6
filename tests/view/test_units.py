"""The axes of the page have the units that docs/metrics.md gives."""

from __future__ import annotations

import re

from mrl.view.units import unit_of
from tests.docs.metric_keys import PAGE


def test_every_documented_metric_has_its_unit() -> None:
    rows = re.findall(r"^\| `([^`]+)` \| ([^|]+) \|", PAGE.read_text(), re.MULTILINE)
    assert len(rows) > 100
    wrong = []
    for key, unit in rows:
        example = re.sub(r"<\w+>", "x", key.replace("<NN>", "01").replace("<k>", "4"))
        if unit_of(example) != unit:
            wrong.append(f"{key}: the page of the run says {unit_of(example)}, the docs {unit}")
    assert not wrong, "\n".join(wrong)


def test_a_key_that_is_not_ours_is_a_value() -> None:
    assert unit_of("</script>\nrewards") == "value"
    assert unit_of("__proto__") == "value"

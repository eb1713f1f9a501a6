"""The parts of the gap between engine and trainer: they add up, and nothing is made up."""

from __future__ import annotations

from pathlib import Path

import pytest

from mrl.run.gap_parts import LEVELS, Levels, parts_of_gap, quantization_in_words

PAGE = Path(__file__).parents[2] / "mrl/view/page/mismatch.js"


def levels(**gaps: float | None) -> Levels:
    return {level: {"logprob_abs_mean": gap, "k3": 0.5} for level, gap in gaps.items()}


def test_a_quantised_moe_has_three_parts() -> None:
    found = levels(none=0.100, ids=0.066, weights=0.060, quantized=0.036)
    parts = parts_of_gap(found, "logprob_abs_mean")
    assert list(parts) == ["total", "routes", "quantization", "rest"]
    assert parts == pytest.approx(
        {"total": 0.100, "routes": 0.034, "quantization": 0.030, "rest": 0.036}
    )
    assert parts["total"] == pytest.approx(sum(parts.values()) - parts["total"])
    assert quantization_in_words(found) == (
        "of the mean |d| of 0.1: 0.034 from other routes, 0.03 from the engine's quantised weights "
        "(quantization), 0.036 from its quantised inputs and rounding (rest)"
    )


def test_a_dense_model_has_no_routes() -> None:
    found = levels(none=0.1, quantized=0.04)
    assert list(parts_of_gap(found, "logprob_abs_mean")) == ["total", "quantization", "rest"]
    assert "routes" not in quantization_in_words(found)


def test_a_gap_that_grows_is_a_negative_part() -> None:
    parts = parts_of_gap(levels(none=0.1, ids=0.15, quantized=0.02), "logprob_abs_mean")
    assert parts["routes"] == pytest.approx(-0.05)
    assert sum(parts.values()) == pytest.approx(2 * parts["total"])


@pytest.mark.parametrize(
    "found",
    [
        levels(none=0.1),
        levels(none=None, ids=0.1, quantized=0.1),
        levels(none=0.1, ids=None, quantized=0.1),
        levels(none=0.1, ids=0.1, quantized=None),
        levels(ids=0.1, quantized=0.05),
        {"none": {"k3": 0.1}, "quantized": {"k3": 0.1}},
        {},
    ],
)
def test_nothing_is_said_where_a_number_is_missing(found: Levels) -> None:
    assert parts_of_gap(found, "logprob_abs_mean") == {}
    assert quantization_in_words(found) == ""


def test_without_quantised_weights_there_is_no_such_part() -> None:
    found = levels(none=0.1, ids=0.02)
    assert list(parts_of_gap(found, "logprob_abs_mean")) == ["total", "routes", "rest"]
    assert quantization_in_words(found) == ""


def test_the_page_names_the_levels_in_the_same_words() -> None:
    for level, words in LEVELS.items():
        assert f'{level}: "{words}"' in PAGE.read_text()

"""Which samples of a step are in its token record."""

from __future__ import annotations

import pytest

from mrl.diagnosis.gather import choose_samples


@pytest.mark.parametrize("worst", [10, 40, 60, 70])
def test_the_worst_sample_is_in_the_record_wherever_it_fits(worst: int) -> None:
    lengths, gaps = [20, 20, worst, 20, 20, 20], {0: 0.1, 1: 0.2, 2: 9.0, 3: 0.3, 4: 0.1, 5: 0.4}
    chosen = choose_samples(lengths, gaps, 70)
    assert 2 in chosen
    assert sum(lengths[i] for i in chosen) <= 70
    assert chosen == sorted(set(chosen))


def test_half_goes_to_the_largest_gaps_and_half_is_spread() -> None:
    gaps = {i: float(i in (7, 8)) for i in range(20)}
    chosen = choose_samples([10] * 20, gaps, 80)
    assert {7, 8} <= set(chosen)
    assert len(chosen) == 8
    assert max(chosen) >= 15  # from all over the step


def test_all_samples_where_they_fit_and_none_where_none_does() -> None:
    assert choose_samples([10, 20], {}, 30) == [0, 1]
    assert choose_samples([90, 80], {0: 1.0, 1: 2.0}, 70) == []

"""Writes a toy task with long-tailed response lengths: `python -m mrl.data.repeat --out FILE`.

The prompt `b*034=` asks for the letter b 34 times. The requested numbers are log-normal: half are
below 12, and one in twenty is above 60. Demonstrations teach the format but not the task: their
lengths scatter around the requested number, and more than half of their letters are wrong.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

LETTERS = "abcd"
SHORTEST, MEDIAN, LONGEST, SIGMA = 3, 12, 128, 1.0
SPREAD = 0.4
"""Standard deviation of `log(length / requested number)`, where `length` is the length of a
demonstration before it is rounded and clamped."""
RIGHT = 0.25
"""Probability that a letter of a demonstration is set to the requested letter. Any other letter is
drawn at random, and may also be the requested letter."""


def repeat_rows(num: int, seed: int, *, demonstrations: bool = False) -> list[dict[str, str]]:
    """Return `num` rows with a `prompt`, and with `demonstrations` also a `completion`. `seed`
    determines the random numbers."""
    rng = random.Random(f"repeat/{seed}")
    rows: list[dict[str, str]] = []
    for i in range(num):
        letter, times = LETTERS[i % len(LETTERS)], _log_normal(rng, MEDIAN, SIGMA)
        prompt = f"{letter}*{times:03d}="
        if demonstrations:
            rows.append({"prompt": prompt, "completion": _scattered(rng, letter, times)})
        else:
            rows.append({"prompt": prompt})
    return rows


def _log_normal(rng: random.Random, median: float, sigma: float) -> int:
    return min(LONGEST, max(SHORTEST, round(rng.lognormvariate(0, sigma) * median)))


def _scattered(rng: random.Random, letter: str, times: int) -> str:
    length = _log_normal(rng, times, SPREAD)
    return "".join(letter if rng.random() < RIGHT else rng.choice(LETTERS) for _ in range(length))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--num", type=int, default=256)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--demonstrations", action="store_true", help="prompt + completion rows")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    rows = repeat_rows(args.num, args.seed, demonstrations=args.demonstrations)
    args.out.write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    main()

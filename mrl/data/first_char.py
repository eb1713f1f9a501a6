"""Writes prompts of the toy task: `python -m mrl.data.first_char --num 512 --seed 0 --out FILE`.

A prompt has 16 letters, and the first letter is a, b, c or d. A completion is rewarded for
repeating the first letter.
"""

from __future__ import annotations

import argparse
import json
import random
import string
from pathlib import Path


def first_char_rows(num: int, seed: int, num_letters: int = 16) -> list[dict[str, str]]:
    """Return rows with `num` distinct prompts of `num_letters` letters each. The first letters a, b, c
    and d take turns."""
    rng = random.Random(seed)
    prompts: dict[str, None] = {}  # a dict keeps the order, unlike a set
    while len(prompts) < num:
        tail = "".join(rng.choices(string.ascii_lowercase, k=num_letters - 1))
        prompts["abcd"[len(prompts) % 4] + tail] = None
    return [{"prompt": prompt} for prompt in prompts]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--num", type=int, default=512)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    rows = first_char_rows(args.num, args.seed)
    args.out.write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    main()

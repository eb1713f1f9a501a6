"""Refuses a split of data that has no splits, and a subset of data that is not on the hub."""

from __future__ import annotations

from mrl.errors import InputError

DEFAULT = "train"
"""The split that is read if a recipe gives none. Of data without splits, it is all rows."""


def check_split(path: str, split: str, what: str) -> None:
    """Raise InputError if `split` is not DEFAULT, because the data of `path` has no splits. `what`
    begins the reason, such as `a file has`."""
    if split != DEFAULT:
        raise InputError(
            f"{path}: got the split {split!r}, but {what} no splits; leave `split` out or write "
            f"`split: {DEFAULT}` for all rows, or give the path of the rows that you want"
        )


def check_no_subset(path: str, subset: str | None) -> None:
    """Raise InputError if there is a `subset`, because the data of `path` is not a hub id."""
    if subset:
        raise InputError(
            f"{path}: got the subset {subset!r}, but only a data set on the Hugging Face hub has "
            "subsets; leave `subset` out, or give the path of the rows that you want"
        )

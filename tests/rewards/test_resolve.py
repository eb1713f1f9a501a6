import pytest

from mrl.errors import InputError
from mrl.rewards import resolve_reward, reward_names


@pytest.mark.parametrize("name", reward_names())
def test_every_builtin_loads(name):
    assert callable(resolve_reward(name))


def test_file_with_a_neighbour_and_module(tmp_path, monkeypatch):
    (tmp_path / "neighbour_of_reward.py").write_text("VALUE = 2.0")
    (tmp_path / "mine.py").write_text(
        "import neighbour_of_reward as n\n"
        "def score(prompts, completions, **columns): return [n.VALUE] * len(prompts)\n"
    )
    assert resolve_reward(f"{tmp_path}/mine.py:score")(["p"], ["c"]) == [2.0]
    monkeypatch.syspath_prepend(tmp_path)
    assert resolve_reward("mine:score")(["p"], ["c"]) == [2.0]


BROKEN = """
import os
def no_columns(prompts, completions): return []
def reward(prompts, completions, **columns): return []
constant = 3
"""


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        ("first_chr", "did you mean 'first_char'?"),
        ("zzz", "is not in mrl/rewards/: expected one of exact_match, first_char"),
        ("runner", "is not in mrl/rewards/"),
        ("{}/gone.py:f", "no file {}/gone.py"),
        ("{0}/goood.py:f", "no file {0}/goood.py; did you mean {0}/good.py?"),
        ("nowhere/x.py:f", "no file nowhere/x.py; give its path from the current directory"),
        ("{}/good.py:", "expected NAME, path/file.py:func or package.module:func"),
        ("{}/good.py:rewrd", "no function 'rewrd' in it; did you mean 'reward'?"),
        ("{}/good.py:constant", "is of type int; give the name of a function"),
        ("{}/good.py:no_columns", "must accept the columns: def no_columns(prompts, completions,"),
        (
            "{}/several.py",
            "no function 'reward' in it; it has close, exact; write {}/several.py:func",
        ),
        ("{}/several.py:nope", "no function 'nope' in it; it has close, exact"),
        ("{}/one.py", "no function 'reward' in it; it has exact; write {}/one.py:exact"),
        ("{}/raises.py:f", "cannot be imported: ZeroDivisionError: division by zero"),
        ("{}/syntax.py:f", "cannot be imported: SyntaxError"),
        ("{}/exits.py:f", "cannot be imported: SystemExit: 3"),
        ("no_such_package_x.y:f", "cannot be imported: ModuleNotFoundError: No module named"),
    ],
)
def test_one_clear_line(tmp_path, spec, reason):
    (tmp_path / "good.py").write_text(BROKEN)
    one = "from os.path import join\ndef exact(prompts, completions, **columns): return []\n"
    (tmp_path / "one.py").write_text(one)
    (tmp_path / "several.py").write_text(one + one.replace("exact", "close"))
    (tmp_path / "raises.py").write_text("1 / 0")
    (tmp_path / "syntax.py").write_text("def f(:")
    (tmp_path / "exits.py").write_text("import sys; sys.exit(3)")
    with pytest.raises(InputError) as caught:
        resolve_reward(spec.format(tmp_path))
    assert reason.format(tmp_path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_file_is_read_again_when_it_was_edited(tmp_path):
    """A notebook edits its reward between two runs; equal sizes in one second are no excuse."""
    file = tmp_path / "edited.py"
    for value in ("1", "2", "2", "3"):
        file.write_text(f"def score(prompts, completions, **columns): return [{value}.0]\n")
        assert resolve_reward(f"{file}:score")(["p"], ["c"]) == [float(value)]
    assert resolve_reward(f"{file}:score") is resolve_reward(f"{file}:score")

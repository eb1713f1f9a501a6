import subprocess
import sys
import time

import pytest

from mrl.rewards.math_verify import MAX_ANSWER_CHARS, last_part
from mrl.rewards.math_verify import reward as math_verify
from mrl.rewards.runner import RewardRunner
from tests.rewards.test_runner import group


def score(completion, answer):
    (value,) = math_verify(["p"], [completion], answer=[answer])
    return value


@pytest.mark.parametrize(
    ("completion", "answer"),
    [
        ("so it is $0.5$", r"\frac{1}{2}"),
        (r"\boxed{1/2}", r"\frac{1}{2}"),
        ("The answer is 1/2.", "0.5"),
        (r"\boxed{(1, 2)}", "(1,2)"),
        (r"\boxed{x=5}", "5"),
        (r"\boxed{2x+1}", "1+2x"),
        (r"$\{2, 1\}$", r"\{1, 2\}"),
        ("50%", "0.5"),
        ("1234", "1,234"),
        (r"<answer>\boxed{7}</answer> or \boxed{8}", "7"),
        ("12<|im_end|> 13", "3 * 4 = 12\n#### 12"),
        ("<think>no: 6</think>7", 7),
    ],
)
def test_equal(completion, answer):
    assert score(completion, answer) == 1


@pytest.mark.parametrize(
    ("completion", "answer"),
    [
        ("", "3"),
        ("no idea", "3"),
        (r"\boxed{1/2} or \boxed{1}", r"\frac{1}{2}"),  # the last one counts
        (r"\boxed{1}\boxed{2}", "2"),
        ("<think>3", "3"),
        ("__import__('os').abort()", "3"),
        ("$__import__('os').abort()$", "3"),
        (r"\boxed{x^3}", "x^2"),
    ],
)
def test_not_equal(completion, answer):
    assert score(completion, answer) == 0


def test_no_reward_where_the_row_has_no_mathematics():
    assert math_verify(["p"] * 3, ["3"] * 3, answer=[None, "", "3"]) == [None, None, 1]


def test_a_long_completion_is_read_from_its_end():
    babble = "so 1 2 (3 $4$ " * 5000
    start = time.process_time()
    assert score(f"{babble}\n\\boxed{{7}}", "7") == 1
    assert score(f"\\boxed{{7}} {babble}", "7") == 1  # the box is looked for in all of it
    assert score(babble, "7") == 0
    assert time.process_time() - start < 5  # the first alone took minutes without the limit
    assert last_part("x = 12345 \n" * 500).startswith("x = 12345")
    assert len(last_part("7" * 5000)) == MAX_ANSWER_CHARS


def test_the_first_call_has_nothing_left_to_load():
    """After a hang the next worker's first call has the same short limit as any other."""
    code = """
import sys
from mrl.rewards import resolve_reward
function = resolve_reward("math_verify")
function.start_worker()
before = set(sys.modules)
function(["p"], ["so $y^3$"], answer=["3"])
sys.exit(str(set(sys.modules) - before) if set(sys.modules) - before else 0)
"""
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, check=False, timeout=100, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.release  # test_runner.py has functions that hang
def test_an_expression_without_end_costs_its_own_sample_only():
    """Not by math-verify's signals, which would score it 0, but by the worker's time limit."""
    texts = [["\\boxed{1/2}", "$9^{9^{9^{9}}}$", "3"]] + [["0.5"] * 3] * 9
    groups = [group(3, answer="0.5") for _ in texts]
    with RewardRunner("math_verify", 2.0) as runner:
        first, *others = runner.score(groups, texts)
    assert first[[0, 2]].tolist() == [1, 0]
    assert bool(first[1].isnan())
    assert [other.tolist() for other in others] == [[1] * 3] * 9
    assert (runner.report.num_failed, runner.report.num_repeated) == (1, 1)
    assert "no answer within 2 s, killed" in runner.report.first_error

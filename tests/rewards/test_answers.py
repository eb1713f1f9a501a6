from decimal import Decimal

import pytest

from mrl.rewards.answers import answer_of, boxed, final_answer, gold_answer, without_thinking
from mrl.rewards.exact_match import comparable
from mrl.rewards.exact_match import reward as exact_match


def match(completion, answer):
    (value,) = exact_match(["p"], [completion], answer=[answer])
    return value


def test_answer_of():
    assert answer_of(" 12 <|endoftext|>junk") == "12"
    assert answer_of("so <answer> 7 </answer> done") == "7"
    assert answer_of("<answer>1</answer> no: <answer>2\n</answer>") == "2"
    assert answer_of("3</s>4") == "3"


def test_thoughts_are_not_said():
    assert without_thinking("<think>it is \\boxed{5}</think>\n7") == "7"
    assert without_thinking("it is 5</think>7") == "7"  # the prompt opened the tag
    assert without_thinking("<think>is it \\boxed{5}?") == ""  # cut off by the end of the context
    assert match("<think>is it \\boxed{5}?", "5") == 0
    assert match("<think>is it \\boxed{6}?</think>5", "5") == 1


def test_boxed_counts_braces():
    assert boxed(r"a \boxed{1} b \boxed{\frac{1}{2}} c}") == r"\frac{1}{2}"
    assert boxed(r"\boxed{\frac{1}{2}") is None
    assert boxed("none") is None


@pytest.mark.parametrize(
    ("completion", "answer"),
    [
        (r"\boxed{1}, no: \boxed{2}. Or 3", "2"),
        ("<answer>2</answer>\n3", "2"),
        ("2 + 2\n#### 4", "4"),
        ("1\n\nThe final answer is: 4\n", "4"),
        ("thinking\nAnswer: Paris", "Paris"),
        ("", ""),
        ("\n \n", ""),
    ],
)
def test_final_answer(completion, answer):
    assert final_answer(completion) == answer


def test_gold_answer_of_a_whole_solution():
    assert gold_answer("3 * 4 = <<3*4=12>>\n#### 12") == "12"
    assert gold_answer("so \\boxed{x}") == "x"
    assert gold_answer("two\nlines") == "two\nlines"
    assert gold_answer(0.5) == "0.5"
    with pytest.raises(ValueError, match="answer is a list, expected text or a number"):
        gold_answer(["1"])  # pyright: ignore


@pytest.mark.parametrize(
    ("one", "two"),
    [
        ("1,234.50", "1234.5"),
        ("+7", "7.0"),
        ("\u22123", "-3"),
        ("$12$", "12"),
        ("12.", "12"),
        (".5", "0.50"),
        ("**Blue  whale.**", "blue whale"),
        (r"\text{Monday}", "monday"),
    ],
)
def test_the_same(one, two):
    assert comparable(one) == comparable(two)


@pytest.mark.parametrize(
    ("one", "two"),
    [("1,23", "123"), ("1/2", "0.5"), ("12", "1 2"), ("-3", "3"), ("ab", "a b"), ("5%", "5")],
)
def test_not_the_same(one, two):
    assert comparable(one) != comparable(two)


def test_numbers_are_exact():
    assert comparable("0.1000000000000000000000000000000001") != comparable("0.1")
    assert comparable("12") == Decimal(12)
    assert comparable("-") == "-"
    assert comparable(",") == ","


def test_exact_match_of_a_group():
    completions = ["It is\n\\boxed{42}", "42", "43", "", "The answer is 42."]
    got = exact_match(["p"] * 5, completions, answer=["42"] * 5, completion_ids=[[1]] * 5)
    assert got == [1, 1, 0, 0, 1]
    assert exact_match(["p"] * 2, ["", "None"], answer=[None, ""]) == [None, None]
    assert match("", "0") == 0

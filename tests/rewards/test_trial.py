"""`mrl reward test` as its user sees it, over functions with one fault each."""

import json
import re
from pathlib import Path

import pytest

from mrl.cli import main
from mrl.errors import InputError
from mrl.rewards.trial_cases import make_cases
from mrl.toy_model import build_tokenizer
from tests.release import release
from tests.rewards.test_remote import scripted
from tests.waiting import only_bad_hurries

__all__ = ["only_bad_hurries"]

ZOO = Path(__file__).parent / "zoo.py"
QUESTIONS = [{"prompt": f"{n}+{n}?", "answer": str(2 * n)} for n in range(11, 15)]
TEXTS = [{"prompt": "p", "completion": text} for text in ("a", "bcd", ["ef", "bad"], "ghijk")]


@pytest.fixture
def reward_test(tmp_path, capsys):
    """Run it; (exit code, what it printed to both)."""

    def run(spec, rows, *options):
        data = tmp_path / "data.jsonl"
        data.write_text("".join(json.dumps(row) + "\n" for row in rows))
        try:
            main(["reward", "test", str(spec), str(data), *options])
            code = 0
        except SystemExit as end:
            code = end.code
        shown = capsys.readouterr()
        return code, shown.out + shown.err

    return run


def test_nothing_wrong(reward_test):
    code, shown = reward_test(f"{ZOO}:right", QUESTIONS)
    assert code == 0
    assert shown.endswith("ok: no problem in 4 rows\n")
    assert "of 4 rows, written plain 4, boxed 4, tagged 4" in shown
    assert "24 from 0 to 1, mean 0.5" in shown
    assert re.search(r"4 with whole rows, \d+ per second", shown)
    assert re.search(r"p50 \d+\.\d\d, p90 \d+\.\d\d, p99 \d+\.\d\d, max \d+\.\d\d", shown)
    code, shown = reward_test(f"{ZOO}:right", QUESTIONS, "--limit", "2")
    assert shown.endswith("in 2 rows\n")


@pytest.mark.parametrize(
    ("name", "rows", "kinds", "detail"),
    [
        ("wrong_way_round", QUESTIONS, "gold", "data.jsonl:1: gold '22' scores 0, 0, 0; wrong ''"),
        ("always_half", QUESTIONS, "gold, constant", "all 24 values are 0.5"),
        release("always_half", TEXTS, "constant", "all 5 values are 0.5"),
        ("of_the_prompt", QUESTIONS, "gold, constant", "in each of 4 rows all completions have"),
        release("silent", QUESTIONS, "gold, constant", "it returned None for all completions"),
        ("counts_calls", TEXTS, "changes", "data.jsonl:1: 1.01, then 1.02; completion 'a'"),
        ("normalises", TEXTS, "depends on the group", ":3: 0.5, then 0.666667; completion 'ef'"),
        ("forks", TEXTS * 8, "forks", "a child of os.fork() must end with os._exit()"),
        ("raises", TEXTS, "exception", ":3: ZeroDivisionError: division by zero; completion 'bad'"),
        ("dies", TEXTS, "exception", ":3: worker process (exit code 7); completion 'bad'"),
        ("hangs", TEXTS, "hang", ":3: no answer within 0.5 s, killed; completion 'bad'"),
        release("nan", TEXTS, "NaN or infinite", ":3: NotFinite: reward 0 is nan"),
        ("text", TEXTS, "not a number", ":3: NotANumber: reward 0 is '1.0'"),
        ("too_few", TEXTS, "wrong type or length", ":3: BrokenReward: returned 1 rewards for 2"),
    ],
)
@pytest.mark.usefixtures("only_bad_hurries")
def test_one_fault(reward_test, name, rows, kinds, detail):
    code, shown = reward_test(f"{ZOO}:{name}", rows, "--timeout", "0.5")
    assert code == 1
    assert shown.endswith(f"\nproblems: {kinds}\n")
    assert detail in shown


def test_a_server_that_refuses(reward_test):
    with scripted((404, b"no such path")) as (url, _):
        code, shown = reward_test(url, TEXTS)
    assert code == 1
    assert shown.endswith("\nproblems: refused\n")
    assert "ServerRefused: " in shown
    assert "HTTP 404: 'no such path'" in shown


def test_many_hangs_end_it_early(reward_test):
    rows = [{"prompt": "p", "completion": "bad"}] * 6
    code, shown = reward_test(f"{ZOO}:hangs", rows, "--timeout", "0.2")
    assert code == 1
    assert "3 of 6: stopped after too many hangs" in shown
    assert "data.jsonl:4" not in shown


def test_only_some_of_a_kind_are_shown(reward_test):
    code, shown = reward_test(f"{ZOO}:wrong_way_round", QUESTIONS * 3)
    assert code == 1
    assert "and 9 more" in shown


@pytest.mark.parametrize(
    ("spec", "rows", "options", "reason"),
    [
        ("nobody", QUESTIONS, (), "is not in mrl/rewards/"),
        ("first_char", [], (), "no rows; one row with `prompt`"),
        ("first_char", [{"answer": 1}], (), "data.jsonl:1: no `prompt`; this row has answer"),
        ("first_char", [{"prompt": "p", "completion": [1]}], (), "`completion` must be a string"),
        ("first_char", [{"prompt": "p", "completions": 1}], (), "column 'completions' is the name"),
        ("first_char", QUESTIONS, ("--limit", "0"), "'0' is not a whole number of at least 1"),
        ("first_char", QUESTIONS, ("--timeout", "nan"), "'nan' is not seconds above 0"),
        ("first_char", QUESTIONS, ("--model", "/nowhere"), "--model /nowhere: no tokenizer"),
    ],
)
def test_bad_input(reward_test, spec, rows, options, reason):
    code, shown = reward_test(spec, rows, *options)
    assert code == 2
    assert reason in shown
    assert shown.startswith("mrl: ")
    assert shown.count("\n") == 1


def test_a_tokenizer_makes_the_completion_ids(reward_test, tmp_path):
    build_tokenizer().save_pretrained(tmp_path)
    rows = [{"prompt": "b", "completion": text} for text in ("bb", "\u00e9b")]
    _, shown = reward_test("first_char", rows, "--model", str(tmp_path))
    assert "2 from 0.3333 to 0.6667" in shown  # of 3 tokens, the last is the end
    _, shown = reward_test("first_char", rows)
    assert "2 from 0.25 to 0.6667" in shown  # of bytes


def test_what_is_scored():
    rows = [("f:1", {"prompt": [{"role": "user", "content": "q"}], "answer": 7, "info": {"x": 1}}),
            ("f:2", {"prompt": "r", "answer": "8"}), ("f:3", {"prompt": "s", "answer": [1]}),
            ("f:4", {"prompt": "t", "completion": "own", "answer": "9"})]  # fmt: skip
    number, text, neither, own = make_cases(rows)
    gold = ("7", "\\boxed{7}", "<answer>7</answer>")
    assert number.texts == (*gold, "", "I do not know.", "8")
    assert (number.num_gold, number.columns) == (3, {"answer": 7, "info": {"x": 1}})
    assert text.texts[-1] == "7"
    assert (neither.texts, neither.num_gold) == (("", "I do not know.", "7"), 0)
    assert (own.texts, own.num_gold, own.columns) == (("own",), 0, {"answer": "9"})
    request = number.request(lambda text: [len(text)], only=1)
    assert request["completions"] == [gold[1]]
    assert request["columns"] == {"answer": [7], "info": [{"x": 1}], "completion_ids": [[9]]}
    with pytest.raises(InputError, match="f:5: `prompt`"):
        make_cases([("f:5", {})])


def test_columns_of_other_names(reward_test):
    rows = [{"question": row["prompt"], "solution": row["answer"]} for row in QUESTIONS]
    options = ("--prompt-key", "question", "--columns", "answer=solution")
    code, shown = reward_test(f"{ZOO}:right", rows, *options)
    assert (code, shown.endswith("ok: no problem in 4 rows\n")) == (0, True), shown
    code, shown = reward_test(f"{ZOO}:right", rows, "--columns", "answer")
    assert (code, "'answer' is not NAME=COLUMN, such as answer=solution" in shown) == (2, True)

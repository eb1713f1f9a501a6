import contextlib
import os
import random
import runpy
import signal
import string
import time
from pathlib import Path

import psutil
import pytest
import torch

from mrl.collect.endpoint.messages import parse_answer
from mrl.config import EnvironmentConfig
from mrl.data.reasoning_gym import task_rows
from mrl.environments import StepResult, environment_names, resolve_environment
from mrl.environments.episodes import EpisodeFailed, Start
from mrl.environments.hosted.spec import PROGRAMS
from mrl.environments.openai_chat import tool_calls
from mrl.environments.runner import EnvironmentRunner, check_columns
from mrl.errors import InputError, RunFailed
from mrl.types import Prompt
from tests.environments.playing import Playing
from tests.release import only_in_release
from tests.waiting import only_bad_hurries, wait_until

__all__ = ["only_bad_hurries"]

ZOO = Path(__file__).parent / "zoo.py"


def prompt(content="p", **columns):
    return Prompt("0", torch.tensor([1]), content, columns, "f:1")


def start(number=0, **columns):
    return Start(prompt(**columns), number)


def config_of(name, **settings):
    return EnvironmentConfig.model_validate({"name": name, "time_limit_s": 60, **settings})


def runner(name, **settings):
    return EnvironmentRunner(config_of(name, **settings))


@contextlib.contextmanager
def playing(name, *, step_samples=1000, **settings):
    with runner(name, **settings) as environments:
        yield Playing(environments, step_samples=step_samples)


@pytest.fixture(autouse=True)
def _no_process_is_left():
    def children():
        return [p for p in psutil.Process().children(recursive=True) if p.status() != "zombie"]

    before = set(children())
    yield
    wait_until(lambda: set(children()) <= before, "the end of all processes")


def test_episodes_keep_their_own_state_and_end():
    with playing(f"{ZOO}:Echo", arguments={"factor": 2.0}, num_workers=2) as episodes:
        begun = episodes.begin({3: start(30, answer=1), 4: start(40)})
        assert begun == {3: "p 30 {'answer': 1}", 4: None}
        assert episodes.step({3: "a"}) == {3: StepResult("1:a", 2.0)}
        assert episodes.step({4: "x", 3: "done"}) == {
            4: StepResult("1:x", 2.0),
            3: StepResult(None, 2.0, done=True),
        }
        assert episodes.begin({4: start(1)}) == {4: None}  # the old 4 is forgotten
        assert episodes.step({4: "y"}) == {4: StepResult("1:y", 2.0)}
        assert episodes.runner.num_failed == 0


FAULTS = {
    "Raises": "KeyError: 'bad'",
    "Exits": "SystemExit: 7",
    "Nonsense": "step() returned str, expected a StepResult",
    "Nan": "reward is nan, expected a finite number",
    "Silent": "observation is None and done is False",
    "Roleless": "expected `role` and `content` as text",
    "Halves": "observation contains \\ud83d, half of a surrogate pair",
    "Unprintable": r"ValueError: got \ud83d",
    "Textless": "Error: its str() raises KeyError",
    "Dies": "worker process (exit code 7)",
    "Hangs": "no answer within 0.3 s, killed",
    "Huge": "the answer has more than 0 MiB, which is the maximum",
    "SpeaksOutOfTurn": "got the answer b'no json', expected a JSON object, killed",
}
LOSE_THEIR_PROCESS = ("Dies", "Hangs", "Huge", "SpeaksOutOfTurn")


ALIKE = ("Exits", "Roleless", "Halves", "Unprintable", "Textless")
"""Faults that reach the runner in the same way as others; what is said of them differs."""


@pytest.mark.usefixtures("only_bad_hurries")
@pytest.mark.parametrize("name", only_in_release(FAULTS, lambda name: name in ALIKE))
def test_only_the_culprit_fails(name, monkeypatch):
    """A lost process takes other episodes with it; they are played again to where they were."""
    monkeypatch.setattr("mrl.system.worker_process.MAX_REPLY_BYTES", 50_000)
    with playing(f"{ZOO}:{name}", time_limit_s=0.3 if name == "Hangs" else 60) as episodes:
        episodes.begin({n: start(n) for n in range(3)})
        episodes.step(dict.fromkeys(range(3), "a"))
        results = episodes.step({0: "b", 1: "bad", 2: "c"})
        assert isinstance(results[1], EpisodeFailed)
        assert FAULTS[name] in results[1].reason
        assert (results[0], results[2]) == (StepResult("2:b", 1.0), StepResult("2:c", 1.0))
        assert episodes.step({0: "d"}) == {0: StepResult("3:d", 1.0)}
        assert (episodes.runner.num_failed, episodes.runner.first_error) == (1, results[1].reason)
        assert episodes.runner.num_replayed == (2 if name in LOSE_THEIR_PROCESS else 0)
        episodes.runner.reset_counts()
        assert (episodes.runner.num_failed, episodes.runner.num_replayed) == (0, 0)


def test_a_forked_child_that_comes_back_answers_nothing():
    with playing(f"{ZOO}:Forks") as episodes:
        episodes.begin({0: start()})
        for number in range(4):
            answer = episodes.step({0: f"{number}"})
            assert answer == {0: StepResult(f"{number + 1}:{number}", 1.0)}
            time.sleep(0.1)  # the child comes back meanwhile
        assert episodes.runner.num_failed == 0


def test_above_five_percent_the_run_stops():
    with playing(f"{ZOO}:Raises", step_samples=40) as episodes:
        episodes.begin({n: start(n) for n in range(3)})
        episodes.step({0: "bad", 1: "bad"})
        with pytest.raises(
            RunFailed, match=r"zoo.py:Raises' failed on 3 of 40 samples .* KeyError"
        ):
            episodes.step({2: "bad"})


@pytest.mark.usefixtures("only_bad_hurries")
def test_an_episode_that_cannot_be_played_again_fails():
    with playing(f"{ZOO}:Forgetful", time_limit_s=0.3) as episodes:
        episodes.begin({0: start(), 1: start()})
        episodes.step({0: "a", 1: "a"})
        results = episodes.step({0: "bad", 1: "b"})
        assert "its answers differed when it was replayed" in results[1].reason
        assert episodes.runner.num_failed == 2


def test_async_steps():
    with playing(f"{ZOO}:Later") as episodes:
        episodes.begin({0: start()})
        assert episodes.step({0: "a"}) == {0: StepResult("a", 1.0)}


def closing(name, folder, **settings):
    """And a function: the seeds of the episodes that were closed."""
    folder.mkdir()
    name = name if ":" in name else f"{ZOO}:{name}"
    episodes = playing(name, arguments={"folder": str(folder)}, **settings)
    return episodes, lambda: {int(file.name) for file in folder.iterdir()}


@pytest.mark.parametrize("name", ["Closes", "ClosesBadly"])
def test_close_is_called_when_an_episode_is_over(name, tmp_path, capfd):
    """One that raises is told, and changes nothing."""
    playing_them, closed = closing(name, tmp_path / "closed", num_workers=2)
    with playing_them as episodes:
        episodes.begin({n: start(n) for n in range(6)})
        results = episodes.step({1: "done", 2: "bad"})
        assert results[1] == StepResult(None, 1.0, done=True)
        assert results[2].reason == "KeyError: 'bad'"
        episodes.end([0, 1, 2, 3])
        assert closed() == {0, 1, 2, 3}
        assert episodes.step({4: "a"}) == {4: StepResult("1:a", 1.0)}
        episodes.begin({0: start(9), 1: start(10)})
        assert closed() == {0, 1, 2, 3}
        assert episodes.runner.num_failed == 1
    assert closed() == {0, 1, 2, 3, 4, 5, 9, 10}  # those that were given up, too
    told = capfd.readouterr().err.count("close() failed: SystemExit: no, not closed")
    assert told == (4 if name == "ClosesBadly" else 0)


def test_many_close_within_their_time(tmp_path):
    """Each has the time of an answer, and they close at one time."""
    playing_them, closed = closing("ClosesSlowly", tmp_path / "closed", time_limit_s=60)
    with playing_them as episodes:
        episodes.begin({n: start(n) for n in range(40)})
        began = time.monotonic()
        episodes.end(range(39))
        assert closed() == set(range(39))
        assert time.monotonic() - began < 39 * 0.2  # what they take one after another
    assert closed() == set(range(40))


@pytest.mark.usefixtures("only_bad_hurries")
def test_runner_and_worker_agree_on_what_lives(tmp_path):
    playing_them, closed = closing("Unsendable", tmp_path / "unsendable")
    with playing_them as episodes:
        episodes.begin({0: start()})
        assert "not JSON serializable" in episodes.step({0: "bad"})[0].reason
        episodes.end([0])
        assert closed() == {0}
    playing_them, closed = closing("ForgetfulCloses", tmp_path / "forgetful", time_limit_s=0.5)
    with playing_them as episodes:
        episodes.begin({0: start(0), 1: start(1)})
        episodes.step({0: "a", 1: "a"})
        assert "answers differed" in episodes.step({0: "bad", 1: "b"})[1].reason
        episodes.end([0, 1])
        assert closed() == {1}  # 0 hung


def test_a_worker_that_cannot_start_again_is_a_failure_of_its_episodes(tmp_path):
    file = tmp_path / "once.py"
    file.write_text(f"import sys\nsys.path.append({str(ZOO.parent)!r})\nfrom zoo import Dies\n")
    with playing(f"{file}:Dies") as episodes:
        episodes.begin({n: start(n) for n in range(3)})
        file.write_text("raise OSError('disk is gone')")
        results = episodes.step({0: "bad", 1: "a"})
        assert "exit code 7" in results[0].reason
        assert "could not be started again: environment" in results[1].reason
        assert "OSError: disk is gone" in results[1].reason
        file.write_text(f"import sys\nsys.path.append({str(ZOO.parent)!r})\nfrom zoo import Dies\n")
        assert episodes.step({2: "a"}) == {2: StepResult("1:a", 1.0)}  # later it can
        assert episodes.runner.num_failed == 2


def test_closing_ends_a_worker_that_is_stopped():
    before = set(psutil.Process().children())  # engines of other tests, maybe
    environments = runner(f"{ZOO}:Echo", time_limit_s=60)
    (worker,) = set(psutil.Process().children()) - before
    os.kill(worker.pid, signal.SIGSTOP)
    environments.close()
    environments.close()


@pytest.mark.parametrize(
    ("spec", "arguments", "reason"),
    [
        ("guess_leter", {}, "did you mean 'guess_letter'?"),
        ("runner", {}, "is not in mrl/environments/"),
        (f"{ZOO}:Ech", {}, "no class 'Ech' in it; did you mean 'Echo'?"),
        (f"{ZOO}:NoStep", {}, "has no method step()"),
        (f"{ZOO}:constant", {}, "is a int, not a class"),
        ("guess_letter", {"turn": 3}, 'cannot be created with arguments {"turn": 3}: TypeError'),
        ("openai_chat", {"target": "zoo"}, "expected file.py:NAME or module:NAME"),
    ],
)
def test_one_clear_line_at_the_start(spec, arguments, reason):
    with pytest.raises(InputError) as caught:
        runner(spec, arguments=arguments)
    assert reason in str(caught.value)
    assert "\n" not in str(caught.value)


def test_every_builtin_loads_and_columns_are_checked():
    assert environment_names() == ["guess_letter", "openai_chat", "reasoning_gym"]
    for name in environment_names():
        resolve_environment(name)
    with pytest.raises(InputError, match="f:1: column 'seed'"):
        check_columns(prompt(seed=1))


def test_guess_letter():
    letter = random.Random(7).choice(string.ascii_lowercase)
    with playing("guess_letter", arguments={"turns": 2}) as episodes:
        episodes.begin({0: start(7)})
        assert episodes.step({0: ""}) == {0: StepResult(letter, 0.0)}
        assert episodes.step({0: f"{letter}?"}) == {0: StepResult(None, 0.25, done=True)}


def test_reasoning_gym_gives_another_try():
    (row,) = task_rows("chain_sum", 1, 3, {})
    environment = resolve_environment("reasoning_gym")(retry_factor=0.5)
    assert environment.reset(row["prompt"], 0, answer=row["answer"], info=row["info"]) is None
    wrong = environment.step("no idea")
    assert (wrong.observation, wrong.done) == ("That is not right. Try again.", False)
    right = environment.step(f"<answer>{row['answer']}</answer>")
    assert right.done
    assert wrong.reward + right.reward == 0.5


def test_openai_chat():
    call = '<tool_call>\n{"name": "find", "arguments": {"q": "x"}}\n</tool_call>'
    with playing("openai_chat", arguments={"target": f"{ZOO}:search"}) as episodes:
        episodes.begin({0: Start(prompt([{"role": "user", "content": "hi"}], n=4), 0)})
        tool = episodes.step({0: f"let me see {call}"})[0]
        assert tool.observation == [{"role": "tool", "content": str(tool_calls(call))}]
        said = episodes.step({0: "here"})[0]
        assert said == StepResult([{"role": "user", "content": "4 messages"}], 4.0)
    with playing("openai_chat", arguments={"target": f"{ZOO}:Talker", "word": "go"}) as episodes:
        assert episodes.begin({0: start()}) == {0: [{"role": "user", "content": "go1"}]}
        assert episodes.step({0: "x"}) == {0: StepResult(None, 1.0, done=True)}


def test_openai_chat_runs_a_file_once_and_gives_no_id_twice(tmp_path):
    file = tmp_path / "counts.py"
    file.write_text(
        "import sys\n"
        "sys.counts = getattr(sys, 'counts', 0) + 1\n"
        "def talk(messages, **columns):\n"
        "    ids = [c['id'] for m in messages for c in m.get('tool_calls', [])]\n"
        "    said = f'{sys.counts} {sys.path.count(columns[\"folder\"])} {ids}'\n"
        "    return [{'role': 'tool', 'content': said}], 0.0, False\n"
    )
    call = '<tool_call>{"name": "f"}</tool_call>'
    content = [{"role": "assistant", "content": "", "tool_calls": [{"id": "call_1"}]}]
    with playing("openai_chat", arguments={"target": f"{file}:talk"}) as episodes:
        first = Start(prompt(content, folder=str(tmp_path)), 0)
        episodes.begin({0: first, 1: first})
        for ids in (["call_0", "call_2"], ["call_0", "call_2", "call_3", "call_4"]):
            results = episodes.step({0: call * 2, 1: call * 2})
            for result in results.values():
                assert result.observation[0]["content"] == f"1 1 {['call_1', *ids]}"


def test_a_policy_that_begins_tool_calls_without_end_is_read_at_once(monkeypatch):
    """A token that a policy repeats until its context is used up."""
    monkeypatch.syspath_prepend(PROGRAMS)
    program = runpy.run_path(str(PROGRAMS / "mcp_program.py"))
    call = '<tool_call>{"name": "f"}</tool_call>'
    start = time.process_time()
    for text in ("<tool_call>" * 20_000, call + "<tool_call>" * 20_000):
        found = len(tool_calls(text))
        assert found == text.startswith(call)
        assert len(parse_answer(text, with_tools=True, taken=()).calls) == found
        rest, calls = program["_calls"]({"content": text}, is_parsed=False)
        assert (rest, len(calls)) == ("<tool_call>" * 20_000, found)
    assert time.process_time() - start < 3


def test_tool_calls_that_are_malformed_stay_text():
    good = '<tool_call>{"name": "f"}</tool_call>'
    assert [c["function"] for c in tool_calls(f"{good}<tool_call>{{</tool_call>")] == [
        {"name": "f", "arguments": "{}"}
    ]
    assert tool_calls("<tool_call>[1]</tool_call><tool_call>{}</tool_call> none") == []

"""Environments of the real verifiers 0.4, whose policy says what the tests want."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from mrl.collect.endpoint.server import EndpointServer
from mrl.config import EnvironmentConfig
from mrl.environments.command import AgentCommand
from mrl.environments.hosted.spec import tasks_of
from mrl.errors import InputError
from tests.endpoint.speaking import Speaking, make_record, tokenizer
from tests.hosted.talking import VERIFIERS, needs_verifiers, stage, text_of
from tests.waiting import wait_until

pytestmark = [needs_verifiers, pytest.mark.timeout(600)]
ROOT = Path(__file__).parents[2]
GAME = ROOT / "launch/recipes/agents/guess_letters"
ODD = Path(__file__).parent / "odd_tasks"


def make_config(folder: Path = ODD, **settings) -> EnvironmentConfig:
    return EnvironmentConfig(
        verifiers=str(folder), python=str(VERIFIERS), **{"episode_limit_s": 200, **settings}
    )


def odd(kind: str, **more) -> dict:
    return {"task": {"kind": kind, "prompt": f"{kind} train", "system_prompt": "odd", **more}}


@pytest.fixture(scope="module")
def odd_stage():
    with stage(make_config()) as found:
        yield found


def test_the_game_is_one_conversation():
    """Three turns, whose tokens are those that were sampled; connections end with their episode."""
    config = make_config(GAME, num_agents=8)
    rows = tasks_of(config, {"taskset": {"letters": "ab", "rounds": 1}})
    assert [row["task"]["letter"] for row in rows] == ["a", "b"]
    with stage(config) as game:
        game.engine.say = lambda request: "ab"
        (pid,) = [worker._process.pid for worker in game.workers._workers]
        for outcome, record in game.play_all(rows * 4):
            assert (outcome.reward, outcome.error) == (0.5, "")
            assert outcome.parts == {"num_guesses": 3}
            letter = text_of(record).partition("user\nguess")[2].partition("user\n")[2][0]
            turn = (
                f"<|im_start|>assistant\nab<|im_end|>\n<|im_start|>user\n{letter * 4}<|im_end|>\n"
            )
            assert text_of(record) == (
                f"<|im_start|>user\nguess<|im_end|>\n{turn}{turn}<|im_start|>assistant\nab<|im_end|>"
            )
            (sample,) = record.samples(3)
            assert len(sample.weight_versions) == 3
            assert int(sample.loss_mask.sum()) == 9
        game.play_all(rows * 8)
        wait_until(lambda: len(os.listdir(f"/proc/{pid}/fd")) < 16)


def test_rewards_have_weights_and_metrics_are_kept(odd_stage):
    odd_stage.engine.say = lambda request: "hello"
    outcome, record = odd_stage.play(odd("good"))
    assert outcome.reward == 2 * 5 + 0.5
    assert outcome.parts == {"turns": 1, "length": 5, "bonus": 0.5}
    assert text_of(record).startswith(
        "<|im_start|>system\nodd<|im_end|>\n<|im_start|>user\ngood train"
    )


def test_the_client_for_training_renders_itself(tmp_path):
    """It sends and gets token ids, which are one branch too."""
    folder = tmp_path / "toy"
    tokenizer().save_pretrained(folder)
    script = Path(__file__).parent / "train_client.py"
    config = EnvironmentConfig(
        command=(str(VERIFIERS), str(script), str(folder)), episode_limit_s=200
    )
    engine = Speaking(tokenizer(), lambda request: "ab")
    record = make_record(engine)
    with EndpointServer() as server, AgentCommand(config) as command:
        server.app.add("key", record)
        variables = {"OPENAI_BASE_URL": server.address, "OPENAI_API_KEY": "key"}
        row = {"task": {"prompt": "guess", "letter": "a"}}
        outcome = command.run(row, {**variables, "OPENAI_MODEL": "policy"})
    assert (outcome.reward, outcome.error) == (0.5, "")
    assert text_of(record).count("<|im_start|>user\naaaa<|im_end|>") == 2


@pytest.mark.parametrize(
    ("row", "error"),
    [
        (odd("breaks"), "TaskError: task setup: RuntimeError: on purpose"),
        (odd("misjudges"), "TaskError: task OddTask scoring: ValueError: no reward"),
        (odd("lies"), "reward"),
        ({"prompt": "x"}, "the row has no column `task`"),
        ({"task": {"prompt": "x"}}, "kind"),
    ],
)
def test_failures_have_no_reward(odd_stage, row, error):
    outcome, _ = odd_stage.play(row)
    assert outcome.reward is None
    assert error in outcome.error
    assert "\n" not in outcome.error


def test_what_the_endpoint_refuses_fails_and_what_is_used_up_does_not(odd_stage):
    outcome, record = odd_stage.play(odd("good"), context_len=20)
    assert outcome.reward is None
    assert "no room" in record.cut_off
    with stage(make_config(GAME)) as game:
        row = {"task": {"prompt": "guess", "letter": "h"}}
        outcome, record = game.play(row, max_turns=2)
        assert outcome.reward == pytest.approx(1 / 5)
        assert outcome.parts == {"num_guesses": 2}
        assert record.samples(3)[0].finish_reason == "length"
        whole = game.play(row)[1].leaves[0].conversation
        for context_len in range(whole.prompt_len + 1, len(whole.token_ids) + 1, 5):
            outcome, record = game.play(row, context_len=context_len)
            (sample,) = record.samples(3)
            assert outcome.reward is not None
            assert len(sample.token_ids) <= context_len
            assert sample.token_ids.tolist() == whole.token_ids[: len(sample.token_ids)].tolist()
    odd_stage.engine.say = lambda request: "hello"
    warmer = make_config(arguments={"agent": {"sampling": {"temperature": 0.3}}})
    with stage(warmer) as warm:
        outcome, _ = warm.play(odd("good"))
    assert outcome.reward is None
    assert "temperature is 0.3" in outcome.error


def test_tools_are_called_and_their_results_read():
    config = make_config(arguments={"taskset": {"task": {"with_tools": True}}})
    call = '<tool_call>{"name": "add", "arguments": {"a": 2, "b": 3}}</tool_call>'
    with stage(config) as found:
        tokens = found.engine.tokenizer
        found.engine.say = lambda r: "five" if "tool\n" in tokens.decode(r.token_ids) else call
        outcome, record = found.play(odd("good"))
    assert outcome.error == ""
    assert outcome.parts["turns"] == 2
    assert text_of(record).endswith(
        f"{call}<|im_end|>\n<|im_start|>tool\n5<|im_end|>\n<|im_start|>assistant\nfive<|im_end|>"
    )


def test_an_episode_that_hangs_and_one_that_takes_the_worker_with_it():
    with stage(make_config(episode_limit_s=3, time_limit_s=3)) as found:
        outcome, _ = found.play(odd("hangs"))
        assert "no end within environment.episode_limit_s=3 s" in outcome.error
        outcome, _ = found.play(odd("dies"))
        assert "its worker exited with code 7" in outcome.error
    with stage(make_config(time_limit_s=3)) as found:
        found.engine.say = lambda request: "hello"
        outcome, _ = found.play(odd("blocks"))
        assert "did not answer within environment.time_limit_s=3 s" in outcome.error
        assert found.play(odd("good"))[0].reward == 10.5


def test_tasks_are_rows():
    config = make_config(arguments={"taskset": {"kinds": ["a", "b", "c"]}, "select": {"limit": 2}})
    rows = tasks_of(config, {"taskset": {"split": "test"}})
    assert [row["prompt"] for row in rows] == [
        [{"role": "system", "content": "odd"}, {"role": "user", "content": f"{kind} test"}]
        for kind in "ab"
    ]
    assert rows[1]["task"]["kind"] == "b"
    assert json.dumps(rows)
    shuffled = tasks_of(config, {"select": {"limit": 3, "shuffle": True, "seed": 2}})
    assert sorted(row["task"]["idx"] for row in shuffled) == [0, 1, 2]
    endless = {"taskset": {"endless": True, "kinds": []}}
    with pytest.raises(InputError, match="this taskset has no end"):
        tasks_of(make_config(arguments=endless), {})
    rows = tasks_of(make_config(arguments=endless), {"select": {"limit": 1}})
    assert rows[0]["prompt"] == [{"role": "user", "content": "more"}]


@pytest.mark.parametrize(
    ("folder", "arguments", "match"),
    [
        (ROOT / "docs", {}, "taskset 'docs' not found|defines no `__all__`|docs"),
        (ODD, {"nonsense": 1}, "nonsense"),
        (
            ODD,
            {"agent": {"retries": {"max_retries": 2}}},
            "agent.retries is set, but an episode is",
        ),
        (ODD, {"agent": {"client": {"type": "eval"}}}, "the policy would play no role"),
        (ODD, {"id": "best_of_n", "agent": {}}, ""),
    ],
)
def test_what_cannot_be_played_is_said_in_one_line(folder, arguments, match):
    if not match:  # several runs of one role have several rewards
        with stage(make_config(folder, arguments=arguments)) as found:
            found.engine.say = lambda request: "hello"
            assert "expected once, because" in found.play(odd("good"))[0].error
        return
    with (
        pytest.raises(InputError, match=match) as caught,
        stage(make_config(folder, arguments=arguments)),
    ):
        pass
    assert "\n" not in str(caught.value)

"""Several rewards, parts of one, and the forms of TRL, verl and slime, in the real worker."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import pytest
import torch

from mrl.config import RewardConfig
from mrl.errors import InputError, RunFailed
from mrl.learn.rollout_metrics import rollout_metrics
from mrl.rewards import resolve_reward
from mrl.rewards.base import NotFinite
from mrl.rewards.runner import RewardRunner, check_failures
from mrl.rewards.worker import call_reward
from mrl.run.folder import rollout_lines
from mrl.run.rollouts import decode_groups, encode_groups, outline
from mrl.types import Prompt, SampleGroup, VersionSpan
from tests.rewards.test_runner import group

ZOO = Path(__file__).parent / "zoo.py"


def terms(*rewards: dict) -> list[RewardConfig]:
    return [RewardConfig(**reward) for reward in rewards]


def scored(rewards, texts, prompt="p", **columns):
    one = group(len(texts), **columns)
    newer = dataclasses.replace(one.samples[0], weight_versions=(VersionSpan(1, 1, 3),))
    one.samples = [newer] * len(texts)
    one.prompt = Prompt("0", one.prompt.token_ids, prompt, columns, "f.jsonl:7")
    with RewardRunner(rewards, 10) as runner:
        one.rewards = runner.score_group(one, texts, step_samples=100)
        return one, runner.report


def values(tensor):
    return [None if math.isnan(value) else value for value in tensor.tolist()]


def parts_of(one: SampleGroup) -> dict:
    return {name: values(part) for name, part in (one.reward_parts or {}).items()}


def test_the_weighted_sum_leaves_out_what_is_none():
    rewards = terms(
        {"path": f"{ZOO}:half", "weight": 2.0},
        {"name": "len", "path": f"{ZOO}:lengths", "weight": 0.1},
        {"name": "watched", "path": f"{ZOO}:half", "weight": 0},
    )
    one, report = scored(rewards, ["abc", "none"])
    assert values(one.rewards) == pytest.approx([2 * 0.5 + 0.1 * 3, 0.1 * 4])
    assert parts_of(one) == {"half": [0.5, None], "len": [3, 4], "watched": [0.5, None]}
    assert (report.num_failed, report.num_unscored) == (0, 0)
    one, report = scored(rewards[:1] + rewards[2:], ["none", "x"])
    assert values(one.rewards) == [None, 1]
    assert (report.num_failed, report.num_unscored) == (0, 1)


def test_parts_are_summed_unless_there_is_a_total():
    one, report = scored(f"{ZOO}:parts", ["right", "bare", "none", "x"])
    assert values(one.rewards) == [1.5, 0, None, 0.5]
    assert parts_of(one) == {"accuracy": [1, 0, None, 0], "format": [0.5, None, None, 0.5]}
    assert report.num_unscored == 1
    one, _ = scored(f"{ZOO}:with_total", ["abc"])
    assert values(one.rewards) == [0.25]
    assert parts_of(one) == {"length": [3]}
    one, _ = scored(terms({"path": f"{ZOO}:parts"}, {"path": f"{ZOO}:lengths"}), ["right"])
    assert values(one.rewards) == [6.5]
    assert list(parts_of(one)) == ["lengths", "parts", "parts/accuracy", "parts/format"]
    one, _ = scored(f"{ZOO}:lengths", ["a"])
    assert one.reward_parts is None


def test_a_sample_on_which_one_reward_fails_has_none_and_its_row_is_named():
    rewards = terms({"path": f"{ZOO}:lengths"}, {"path": f"{ZOO}:raises"})
    one, report = scored(rewards, ["abc", "bad", "a"])
    assert values(one.rewards) == [6, None, 2]
    assert parts_of(one)["lengths"] == [3, 3, 1]
    assert (report.num_failed, report.num_unscored) == (1, 0)
    assert report.rows == ("f.jsonl:7",)
    assert report.first_error == "f.jsonl:7: raises: ZeroDivisionError: division by zero"
    one, report = scored(f"{ZOO}:bad_part", ["bad", "a"])
    assert values(one.rewards) == [None, 1]
    assert "reward 0 has a part 'a b'" in report.first_error


def test_the_error_that_ends_a_run_names_the_rows():
    groups = [group(2) for _ in range(8)]
    for number, one in enumerate(groups):
        one.prompt = Prompt("0", one.prompt.token_ids, "p", {}, f"f.jsonl:{number}")
    with RewardRunner(f"{ZOO}:raises", 10) as runner, pytest.raises(RunFailed) as caught:
        runner.score(groups, [["bad", "a"]] * 8, step_samples=139)
    rows = ", ".join(f"f.jsonl:{n}" for n in range(5))
    assert str(caught.value).endswith(
        f"first error: f.jsonl:0: ZeroDivisionError: division by zero; rows {rows} and 2 more"
    )
    with pytest.raises(RunFailed, match=r"first error: f\.jsonl:3: no$"):  # names the only row
        check_failures("reward 'r'", 2, 16, "f.jsonl:3: no", ["f.jsonl:3"])


MESSAGES = [{"role": "user", "content": "hi"}]
ROW = {
    "data_source": "x",
    "reward_model": {"ground_truth": "b", "style": "rule"},
    "extra_info": {"split": "train"},
}


@pytest.mark.parametrize("prompt", ["p", MESSAGES])
def test_trl(prompt):
    one, _ = scored(f"{ZOO}:trl_form", ["abc", ""], prompt=prompt)
    assert values(one.rewards) == [103, 100]  # the weights of step 1 sampled it
    of_mrl, _ = scored(f"{ZOO}:both_forms", ["abc"], prompt=prompt)
    of_trl, _ = scored(f"trl:{ZOO}:both_forms", ["abc"], prompt=prompt)
    assert values(of_mrl.rewards) == [0]
    assert values(of_trl.rewards) == [float(prompt is MESSAGES)]


def test_verl_and_slime():
    one, report = scored(f"{ZOO}:compute_score", ["a", "b"], **ROW)
    assert values(one.rewards) == [0, 1], report
    assert parts_of(one) == {"acc": [1, 1]}
    _, report = scored(f"{ZOO}:compute_score", ["a", "b"], other=1)
    assert "the row has no ground truth" in report.first_error
    assert "its columns are completion_ids, other" in report.first_error
    assert report.num_failed == 2
    one, _ = scored(f"{ZOO}:custom_rm", ["a", "b"], label="b")
    assert values(one.rewards) == [2, 3]
    with pytest.raises(InputError, match=r"or as in TRL \(completions, \*\*kwargs\)"):
        resolve_reward("tests.rewards.test_parts:values")


def test_parts_travel_to_files_other_ranks_and_metrics():
    one, _ = scored(f"{ZOO}:parts", ["right", "none"])
    other, _ = scored(f"{ZOO}:parts", ["x", "bare"])
    (back,) = decode_groups(encode_groups([outline(one)], with_routes=False, with_tokens=False))
    assert parts_of(back) == parts_of(one)
    assert decode_groups(encode_groups([group(1)]))[0].reward_parts is None
    metrics = rollout_metrics([back, other])
    assert metrics["rewards/accuracy/mean"] == pytest.approx(1 / 3)
    assert metrics["rewards/format/mean"] == 0.5
    assert not [key for key in rollout_metrics([_plain()]) if key.startswith("rewards/")]
    lines = rollout_lines(1, one, ["right", "none"]).decode().splitlines()
    assert '"reward": 1.5, "reward_parts": {"accuracy": 1.0, "format": 0.5}' in lines[0]
    assert '"reward": null, "reward_parts": {"accuracy": null, "format": null}' in lines[1]


def _plain() -> SampleGroup:
    one = group(2)
    one.rewards = torch.tensor([1.0, 0.0])
    return one


def test_parts_whose_sum_is_no_f32_are_refused():
    """They were an infinite reward, at which the step ended."""
    request = {"prompts": ["p"], "completions": ["a"], "columns": {}}
    with pytest.raises(
        NotFinite, match=r"the sum of the parts of reward 0 is 6e\+38, expected a fin"
    ):
        call_reward(lambda prompts, completions, **columns: [{"a": 3e38, "b": 3e38}], request)

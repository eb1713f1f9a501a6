"""Which operations of a session run together: samples of saved samplers do not wait for training."""

from __future__ import annotations

from typing import Any

import pytest

from mrl.errors import InputError
from mrl.service.sessions import answers, operations, turns
from mrl.service.sessions.bodies import Bounds, read_body
from mrl.service.sessions.operations import Operations

ANN = "1-0-ann"
BOUNDS = Bounds(128, 1 << 20)


def body(kind: str, **keys: Any) -> Any:
    return read_body({"kind": kind, **keys}, BOUNDS)


def sample(sampler: str | None = None, tokens: int = 2) -> Any:
    return body("sample", prompts=[[5] * tokens], max_tokens=1, sampler=sampler)


def taken(queue: Operations) -> list[str]:
    """Take a turn and end its operations; return its kinds, with the samplers of samples."""
    turn = queue.take(ANN)
    for each in turn:
        queue.answer(ANN, each.id, result={}, version=0)
    return [getattr(each.body, "sampler", None) or each.body.kind for each in turn]


@pytest.fixture
def queue() -> Operations:
    return Operations()


def test_samples_of_a_sampler_do_not_wait(queue: Operations) -> None:
    for each in (
        *(body("optim_step"), sample("one"), sample(), body("save"), sample("two")),
        *(sample("one"), sample()),
    ):
        queue.post(ANN, each)
    assert taken(queue) == ["one", "one", "optim_step"]
    assert taken(queue) == ["sample", "save"]
    assert taken(queue) == ["two"]
    assert taken(queue) == ["sample"]
    assert taken(queue) == []


def test_the_first_that_can_run_chooses_the_weights(queue: Operations) -> None:
    for each in (sample(), sample("one"), body("optim_step"), sample()):
        queue.post(ANN, each)
    assert taken(queue) == ["sample", "optim_step"]
    for each in (sample("@base"), sample("one")):
        queue.post(ANN, each)
    assert taken(queue) == ["one", "one"]  # and no training: a plain sample is before it
    assert taken(queue) == ["sample"]
    assert taken(queue) == ["@base"]


def test_a_sample_waits_for_the_save_of_its_sampler(queue: Operations) -> None:
    for each in (
        *(body("forward", sequences=[{"tokens": [1, 2]}]), body("save_sampler", name="one")),
        *(sample("one"), sample("two")),
    ):
        queue.post(ANN, each)
    assert taken(queue) == ["two", "forward", "save_sampler"]
    assert taken(queue) == ["one"]


def test_a_sampler_is_not_overwritten_before_its_samples(
    queue: Operations, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither where samples of another sampler run first, nor where a turn has no room for all."""
    monkeypatch.setattr(turns, "MAX_TURN_TOKENS", 10)
    again = body("save_sampler", name="one", overwrite=True)
    for each in (sample("two"), sample("one", 9), sample("one", 9), body("save"), again, again):
        queue.post(ANN, each)
    queue.post(ANN, sample("one"))
    assert taken(queue) == ["two", "save"]
    assert taken(queue) == ["one"]
    assert taken(queue) == ["one", "save_sampler", "save_sampler"]
    assert taken(queue) == ["one"]
    assert taken(queue) == []


def test_a_turn_of_a_sampler_has_a_limit(
    queue: Operations, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(turns, "MAX_TURN_TOKENS", 10)
    for size in (20, 4, 4, 4):
        queue.post(ANN, sample("one", size))
    assert taken(queue) == ["one"]
    assert taken(queue) == ["one", "one"]
    assert taken(queue) == ["one"]


def test_limits_of_both_kinds_are_apart(queue: Operations, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operations, "MAX_FROZEN", 40)
    for _ in range(40):
        queue.post(ANN, sample("one"))
    with pytest.raises(InputError, match="has 40 samples of samplers in its queue, at most 40"):
        queue.post(ANN, sample("two"))
    for _ in range(operations.MAX_QUEUED):
        queue.post(ANN, sample())
    with pytest.raises(InputError, match="has 32 operations in its queue"):
        queue.post(ANN, sample())


def test_what_waits_can_be_cancelled(queue: Operations) -> None:
    first, second = queue.post(ANN, body("save")), queue.post(ANN, sample())
    assert [each.id for each in queue.take(ANN)] == [first]
    assert not queue.cancel(ANN, first)  # it is under way
    assert queue.cancel(ANN, second)
    assert not queue.cancel(ANN, second)
    assert queue.look("ann", second) == {"id": second, "state": "failed", "reason": "cancelled"}
    assert taken(queue) == ["save"]


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ({"kind": "load"}, "expected one of version, name and folder, got none"),
        ({"kind": "load", "version": 1, "name": "x"}, "got version, name"),
        ({"kind": "load", "folder": "x/y"}, "folder"),
        ({"kind": "save", "name": "../x"}, "name"),
        ({"kind": "save_sampler", "name": ".x"}, "name"),
        ({"kind": "save_sampler"}, "name"),
        ({"kind": "optim_step", "beta1": 1.0}, "beta1"),
        ({"kind": "optim_step", "clip_grad": -1.0}, "clip_grad"),
        ({"kind": "optim_step", "eps": 1e-46}, "eps"),  # 0 in float32
        ({"kind": "sample", "prompts": [[1]], "max_tokens": 1, "sampler": "@other"}, "sampler"),
        (
            {"kind": "sample", "prompts": [[1]], "max_tokens": 1, "top_prompt_logprobs": 21},
            "top_prompt_logprobs",
        ),
        (
            {"kind": "forward", "sequences": [{"tokens": [1, 2], "targets": [1]}]},
            "targets has 1 numbers for 2 tokens",
        ),
        (
            {"kind": "forward", "sequences": [{"tokens": [1, 2], "targets": [1, 128]}]},
            "targets of sequence 0: token 128 is not below 128",
        ),
        (
            {
                "kind": "forward_backward", "loss": "dro", "kl_coeff": 0.1, "sequences": [
                    {"tokens": [1, 2], "advantages": [0, 1], "logprobs": [0, 0]}
                ],
            },
            "kl_coeff is not read by the loss dro",
        ),
        (
            {
                "kind": "forward_backward", "loss": "ppo", "sequences": [
                    {
                        "tokens": [1, 2], "advantages": [0, 1], "logprobs": [0, 0],
                        "ratio_mask": [0, 1],
                    }
                ],
            },
            "ratio_mask is not read by ppo",
        ),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused(keys: dict[str, Any], says: str) -> None:
    with pytest.raises(InputError) as error:
        read_body(keys, BOUNDS)
    assert says in str(error.value)


def test_the_likeliest_tokens_count_in_a_turn(
    queue: Operations, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All answers of a turn are there at once, and none may push out another."""
    monkeypatch.setattr(turns, "MAX_TURN_TOKENS", 30)
    asked = {"prompts": [[5, 6]], "max_tokens": 1, "sampler": "one"}
    for top in (0, 5, 5, 0, 20, 0):  # 3, 13, 13, 3, 43 and 3
        queue.post(ANN, body("sample", **asked, top_prompt_logprobs=top))
    assert [len(taken(queue)) for _ in range(4)] == [3, 1, 1, 1]


def test_answers_that_nobody_has_got_are_kept_longest(
    queue: Operations, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(answers, "MAX_KEPT_BYTES", 400)
    names = [queue.post(ANN, body("save")) for _ in range(5)]
    for number, each in enumerate(queue.take(ANN)):
        queue.answer(ANN, each.id, result={"text": "x" * 100}, version=0)
        if number in (1, 2):
            assert queue.look("ann", each.id)["state"] == "done"
    left = [name for name in names if queue._lives[ANN].answers.read(name) is not None]
    assert left == [names[0], names[3], names[4]]

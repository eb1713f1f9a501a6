"""Ends that an environment does not know of. An engine in turns: rollout/test_multi_turn."""

import pytest
import torch

from mrl.collect.multi_turn import GroupEnvironments, MultiTurnRollout
from mrl.collect.single_turn import start_groups
from mrl.config import EnvironmentConfig
from mrl.engines.base import Completion, SamplingParams
from mrl.environments.runner import EnvironmentRunner
from mrl.toy_model import build_tokenizer
from mrl.types import Prompt, VersionSpan
from tests.environments.test_runner import ZOO, playing, start


class Spelling:
    """An engine without a model: each turn is `a` and the end. Sample 1 may be aborted."""

    weight_version = 0

    def __init__(self, tokenizer, aborts):
        self.ids = torch.tensor([*tokenizer.encode("a"), tokenizer.eos_token_id])
        self.aborts = aborts

    def generate(self, requests, *, concurrent):
        assert concurrent
        for request in requests:
            start = len(request.token_ids)
            span = (VersionSpan(0, start, start + 2),)
            cut = self.aborts and "sample 1" in request.request_id
            reason = "abort" if cut else "stop"
            yield Completion(request.request_id, self.ids, torch.zeros(2), reason, span, None)


@pytest.mark.parametrize(
    ("name", "settings", "reasons"),
    [
        ("Closes", {"max_turns": 2}, ["length", "length"]),
        ("Closes", {"context_len": 8}, ["length", "length"]),
        ("Closes", {"aborts": True, "max_turns": 2}, ["length", "abort"]),
        ("SpeaksInMessages", {}, ["stop", "stop"]),
    ],
)
def test_every_end_closes_the_environment(name, settings, reasons, tmp_path):
    settings = {"max_turns": 9, "context_len": 100, **settings}
    tokenizer = build_tokenizer()
    engine = Spelling(tokenizer, settings.pop("aborts", False))
    prompt = Prompt("0", torch.tensor([1]), "p", {}, "f:1")
    config = EnvironmentConfig(name=f"{ZOO}:{name}", arguments={"folder": str(tmp_path)})
    with EnvironmentRunner(config) as environments:
        episodes = MultiTurnRollout(
            start_groups([prompt], 2),
            GroupEnvironments(environments),
            tokenizer,
            sampling=SamplingParams(2),
            seeds=[1],
            step_samples=1000,
            **settings,
        )
        (group,) = episodes.finished(engine)
        assert [sample.finish_reason for sample in group.samples] == reasons
        # All samples of a prompt have one seed, and the files are named by it.
        (file,) = tmp_path.iterdir()
        assert file.read_text() == "closed" * 2


def test_a_request_of_an_episode_that_the_run_has_ended_fails(tmp_path):
    name, folder = f"{ZOO}:ClosesSlowly", str(tmp_path)
    with playing(name, arguments={"folder": folder}) as them:
        them.begin({0: start(0)})
        (worker,) = them.runner._workers
        worker.finish(60)
        them.ask(0, "a")
        number, answer = them.next()
        assert (number, answer.reason) == (0, "the run is ending")

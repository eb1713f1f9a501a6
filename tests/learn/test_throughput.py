"""Rates of a step."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from mrl.learn.rollout_metrics import rollout_metrics
from mrl.learn.throughput import Throughput
from mrl.planner.peak_flops import training_flops
from mrl.planner.shape import read_shape
from mrl.toy_model import write_toy_model
from parallel.hf_config import HfModel
from tests.sample_groups import group, sample

ROW = {
    "tokens/rollout": 100.0,
    "tokens/train": 300.0,
    "time/rollout_s": 4.0,
    "time/train_s": 2.0,
    "time/step_s": 10.0,
}


def test_rates_count_the_tokens_of_their_part():
    assert Throughput(0).metrics(ROW, []) == {
        "throughput/rollout_tokens_per_s": 25.0,
        "throughput/train_tokens_per_s": 150.0,
        "throughput/step_tokens_per_s": 30.0,
    }
    trained = {key: value for key, value in ROW.items() if key != "time/rollout_s"}
    assert "throughput/rollout_tokens_per_s" not in Throughput(0).metrics(trained, [])


def test_gpus_have_rates_of_their_own_and_an_mfu(tmp_path):
    write_toy_model(tmp_path / "model")
    model = HfModel.read(tmp_path / "model")
    groups = [group([0.0, 1.0], 0, sample(6), sample(9))]
    lengths = [len(one.token_ids) for one in groups[0].samples]
    fast = Throughput(4, 1e9, (read_shape(model.config),) * 2)
    found = fast.metrics(ROW, groups)
    assert found["throughput/train_tokens_per_gpu_s"] == 37.5
    expected = 2 * training_flops(read_shape(model.config), lengths) / (2.0 * 4 * 1e9)
    assert found["throughput/mfu"] == pytest.approx(expected)
    unknown = dataclasses.replace(fast, peak_flops=None)
    assert "throughput/mfu" not in unknown.metrics(ROW, groups)
    assert Throughput.of_device(torch.device("cpu"), 4, [model]) == Throughput(0)


def test_lengths_and_the_share_that_was_cut_off():
    cut = dataclasses.replace(sample(9), finish_reason="length")
    found = rollout_metrics([group([0.0, 1.0], 0, sample(6), cut), group([0.0], 1, sample(3))])
    lengths = [6, 9, 3]
    assert found["response_len/max"] == max(lengths)
    assert found["response_len/truncated"] == 1 / 3

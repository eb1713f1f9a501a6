"""What a weight sync asks of a server and in which order, and how it judges the answers.

The server here is a small real HTTP server that records what it is asked and answers as SGLang does,
with and without the update session of 0.5.23. What SGLang makes of the requests is tested against a
real one, in test_weight_sync.py.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from recording_server import Client, Recorder
from rollout_helpers import make_buckets
from safetensors.torch import load_file, save_file

from mrl.engines.sglang.digests import check_held
from mrl.engines.sglang.manifest import Manifest
from mrl.engines.sglang.settings import server_environment
from mrl.engines.sglang.weights.disk import DiskPush
from mrl.engines.sglang.weights.update import WeightUpdater
from mrl.kernels.digest import weight_digest
from mrl.types import WeightBucket

SESSION = ("/begin_weight_update", "/end_weight_update")


@pytest.fixture
def recorder() -> Iterator[Recorder]:
    with Recorder() as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield server
        server.shutdown()


WEIGHTS = [(f"model.layers.{i}.a.weight", torch.full((3,), float(i + 1))) for i in range(5)]


@pytest.fixture
def manifest(tmp_path) -> Manifest:
    save_file(dict(WEIGHTS), tmp_path / "model.safetensors")
    return Manifest(tmp_path, SimpleNamespace(num_hidden_layers=5, tie_word_embeddings=False))


def held(weights=WEIGHTS, ranks: int = 1) -> dict[str, str]:
    return {
        f"{rank} {name}": f"float32 ? {weight_digest(tensor)[0]:x}"
        for name, tensor in weights
        for rank in range(ranks)
    }


def paths(recorder: Recorder) -> list[str]:
    return [path for path, _ in recorder.calls]


@pytest.mark.parametrize("offered", [(), SESSION])
def test_order_in_both_generations(recorder, manifest, offered):
    recorder.offered, recorder.held = offered, held()
    sync = WeightUpdater(Client(recorder.server_port), manifest, num_ranks=1)
    report = sync.update(make_buckets(WEIGHTS, 7, size=2), 7)
    pushes = ["/update_weights_from_tensor"] * 3
    begin, end = ([path] if path in offered else [] for path in SESSION)
    assert paths(recorder) == [*begin, *pushes, *end, "/weights_checker"]
    bodies = [body for path, body in recorder.calls if path == pushes[0]]
    assert [body.get("weight_version") for body in bodies] == [None, None, "7"]
    assert [body["flush_cache"] for body in bodies] == [False] * 3
    assert report.num_bytes == 60
    if offered:
        assert recorder.calls[0][1] == {"selector": "all"}


@pytest.mark.parametrize("failing", ["/update_weights_from_tensor", "/weights_checker"])
def test_failures_close_the_session_and_leave_the_buckets(recorder, manifest, failing):
    recorder.offered, recorder.held, recorder.failing = SESSION, held(), failing
    sync = WeightUpdater(Client(recorder.server_port), manifest, num_ranks=1)
    buckets = make_buckets(WEIGHTS, 7, size=2)
    with pytest.raises(RuntimeError, match="not today"):
        sync.update(buckets, 7)
    assert paths(recorder).count(SESSION[0]) == paths(recorder).count(SESSION[1]) == 1
    # It learns of the first answer when it has the second bucket.
    assert len(list(buckets)) == (1 if failing == "/update_weights_from_tensor" else 0)
    recorder.failing = ""
    sync.update(make_buckets(WEIGHTS, 8), 8)


def test_disk_writes_whole_files_and_takes_them_away(recorder, manifest, tmp_path):
    recorder.offered, recorder.held = SESSION, held()
    seen, present = {}, []

    class Reader(Client):
        def post(self, path, body, *, timeout_s=10):
            if path == "/weights_checker":
                present.append(len(list(tmp_path.glob("mrl-weights-*/*.safetensors"))))
            if path == "/update_weights_from_disk":
                folder = tmp_path / body["model_path"]
                assert folder.stat().st_mode & 0o777 == 0o700
                for file in sorted(folder.iterdir()):
                    seen.update(load_file(file))
            return super().post(path, body)

    sync = WeightUpdater(
        Reader(recorder.server_port), manifest, num_ranks=1, push=DiskPush, folder=tmp_path
    )
    sync.update(make_buckets(WEIGHTS, 7, size=2), 7)
    assert paths(recorder) == ["/update_weights_from_disk", "/weights_checker"]
    assert present == [2 + 1]  # other ranks than the one that answered may read until the check
    assert not list(tmp_path.glob("mrl-weights-*"))
    assert {name: t.tolist() for name, t in seen.items()} == {n: t.tolist() for n, t in WEIGHTS}
    with pytest.raises(ValueError, match="got 2 weights, expected 3 more"):
        sync.update([WeightBucket(WEIGHTS[:2], 8), WeightBucket([], 8, is_last=True)], 8)
    assert not list(tmp_path.glob("mrl-weights-*"))
    recorder.held = held(WEIGHTS[:4])
    with pytest.raises(RuntimeError, match=r"model\.layers\.4: sent \w+, the engine holds nothing"):
        sync.update(make_buckets(WEIGHTS, 9), 9)
    assert present == [3, 1]
    assert not list(tmp_path.glob("mrl-weights-*"))


def test_a_disk_that_cannot_be_written(recorder, manifest, tmp_path):
    (tmp_path / "no").write_text("a file where the folder should be")
    sync = WeightUpdater(
        Client(recorder.server_port), manifest, num_ranks=1, push=DiskPush, folder=tmp_path / "no"
    )
    with pytest.raises(RuntimeError, match=r"/no cannot be written: .*weight_sync=tensor"):
        sync.update(make_buckets(WEIGHTS, 7), 7)


def test_time_of_the_exporters_digests_is_reported(recorder, manifest):
    recorder.held = held()
    sync = WeightUpdater(Client(recorder.server_port), manifest, num_ranks=1)
    plain = list(make_buckets(WEIGHTS, 7, size=2))
    timed = [replace(bucket, digest_s=100.0) for bucket in plain]
    assert sync.update(plain, 7).digest_s < 100
    assert 300 < sync.update(timed, 7).digest_s < 400


def test_a_digest_of_the_exporter_is_believed_and_not_the_buffer(recorder, manifest):
    recorder.held = held()
    sync = WeightUpdater(Client(recorder.server_port), manifest, num_ranks=1)
    digest = {name.removesuffix(".a.weight"): weight_digest(t)[0] for name, t in WEIGHTS}
    spoiled = [(name, tensor + 1) for name, tensor in WEIGHTS]
    sync.update([WeightBucket(spoiled, 7, is_last=True, digest=digest)], 7)
    recorder.held = held(spoiled)
    with pytest.raises(RuntimeError, match=r"model\.layers\.0: sent [0-9a-f]{16}, the engine"):
        sync.update([WeightBucket(spoiled, 7, is_last=True, digest=digest)], 7)


@pytest.mark.parametrize("gpu_ids", [(), (0, 1)])
def test_every_server_gets_the_plugin(gpu_ids):
    """That SGLang loads it from there is what the tests with a real one show."""
    folders = server_environment(gpu_ids, 2)["PYTHONPATH"].split(os.pathsep)
    assert [f for f in folders if list(Path(f).glob("mrl_server-*.dist-info"))]


def test_comparison_of_places():
    sent = {"lm_head": 1, "model.layers.0": 2, "model.layers.0.experts.0": 3}
    check_held(sent, dict(sent), set(), "")
    check_held(sent, {"lm_head": 1, "model.layers.0": 5}, set(), "")  # experts not told apart
    check_held({**sent, "model.layers.9": 4}, sent, {"model.layers.9"}, "")
    shared = {**sent, "model.layers.0": 1, "model.layers.0.experts.1": 1}  # a fused shared expert
    check_held(sent, shared, set(), "")
    for wrong in (
        {**sent, "lm_head": 2},
        {**sent, "more": 2},
        {"lm_head": 1, "model.layers.0": 2},
        {**sent, "model.layers.0": 3, "model.layers.0.experts.0": 2},
    ):
        with pytest.raises(RuntimeError, match=r"digests: .*; this ends the run: start it again, "):
            check_held(sent, wrong, set(), "")
    with pytest.raises(RuntimeError, match=r"lm_head: sent 0{15}1, the engine holds nothing"):
        check_held({"lm_head": 1}, {}, set(), "")


def test_tied_output_must_equal_the_embedding(tmp_path):
    weights = {"model.embed_tokens.weight": torch.ones(2), "model.norm.weight": torch.ones(1)}
    save_file(weights, tmp_path / "model.safetensors")
    config = SimpleNamespace(num_hidden_layers=1, tie_word_embeddings=True)
    manifest = Manifest(tmp_path, config)
    sent = {"model.embed_tokens": 5, "model.norm": 6}
    assert manifest.with_tied_output(sent, sent) == sent
    assert manifest.with_tied_output(sent, {**sent, "lm_head": 1}) == {**sent, "lm_head": 5}
    assert manifest.optional_places == {"lm_head"}


def test_mtp_layers_are_not_expected(tmp_path):
    names = ("model.layers.0.a.weight", "model.layers.1.a.weight", "mtp.fc.weight")
    save_file({name: torch.ones(1) for name in names}, tmp_path / "model.safetensors")
    config = SimpleNamespace(num_hidden_layers=1, tie_word_embeddings=False)
    assert Manifest(tmp_path, config).required == {"model.layers.0.a.weight": (1,)}


def test_another_dtype_is_named(recorder, manifest):
    coarse = [(name, (tensor + 0.001)) for name, tensor in WEIGHTS]
    recorder.held = {
        f"0 {name}": f"bfloat16 ? {weight_digest(tensor.bfloat16())[0]:x}"
        for name, tensor in coarse
    }
    sync = WeightUpdater(Client(recorder.server_port), manifest, num_ranks=1)
    with pytest.raises(RuntimeError, match=r"sent as float32, held as bfloat16: .*rollout\.dtype"):
        sync.update(make_buckets(coarse, 1), 1)
    exact = [(name, tensor.bfloat16()) for name, tensor in WEIGHTS]
    recorder.held = held()
    sync.update(make_buckets(exact, 2), 2)  # widened without loss

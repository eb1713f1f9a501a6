"""The GPU lane's packing: what is left out, and that what was packed comes out whole or not at all."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from benchmarks.gpu_lane import assemble, run, unpack


@pytest.mark.parametrize(
    ("path", "dropped"),
    [
        ("sgl_kernel/sm90/common_ops.abi3.so", False),
        ("sgl_kernel/sm100/common_ops.abi3.so", True),
        ("sgl_kernel/flash_ops.abi3.so", True),
        ("sglang/jit_kernel/csrc/elementwise/rope.cuh", False),
        ("sglang/multimodal_gen/runtime/server.py", True),
        ("flashinfer/sampling.py", False),
        ("flashinfer/data/cutlass/include/cute/tensor.hpp", True),
        ("torch_memory_saver_hook_mode_preload_cu13.abi3.so", False),
        ("torch_memory_saver_hook_mode_preload_cu12.abi3.so", True),
        ("megatron/core/tests/a.py", True),
        ("tvm_ffi/include/tvm/ffi/c_api.h", False),
    ],
)
def test_what_is_left_out(path, dropped) -> None:
    assert assemble.is_dropped(path) is dropped


@pytest.fixture
def packed(tmp_path, monkeypatch) -> Path:
    site = tmp_path / "site"
    (site / "one").mkdir(parents=True)
    (site / "one" / "a.py").write_text("A = 1\n")
    (site / "big.bin").write_bytes(os.urandom(3000))
    monkeypatch.setattr(assemble, "PIECE_BYTES", 1000)
    manifest = assemble.pack(site, tmp_path / "pieces")
    assert len(manifest["pieces"]) >= 4
    assert manifest["num_files"] == 2
    return tmp_path


def test_pieces_come_out_whole(packed) -> None:
    assert unpack.unpack(unpack.read_pieces(packed / "pieces"), packed / "out") == 2
    assert (packed / "out" / "one" / "a.py").read_text() == "A = 1\n"
    assert (packed / "out" / "big.bin").read_bytes() == (packed / "site" / "big.bin").read_bytes()


@pytest.mark.parametrize("harm", ["lost", "short"])
def test_a_harmed_piece_is_named(packed, harm) -> None:
    name = json.loads((packed / "pieces" / "pieces.json").read_text())["pieces"][1]["name"]
    file = packed / "pieces" / name
    file.unlink() if harm == "lost" else file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(SystemExit, match=f"{name} is missing or damaged"):
        unpack.read_pieces(packed / "pieces")
    with pytest.raises(SystemExit, match=r"no .*pieces\.json: run"):
        unpack.read_pieces(packed)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--device", "cpu", "nothing"], "unknown part 'nothing'; expected sleep_wake, sync"),
        ([], "no CUDA device; --device cpu runs the same code"),
    ],
)
def test_the_lane_says_what_it_was_not_given(arguments, expected, monkeypatch, capsys) -> None:
    """And never falls back to the CPU by itself."""
    monkeypatch.setattr(run.torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(run.sys, "argv", ["run", *arguments])
    with pytest.raises(SystemExit) as left:
        run.main()
    assert left.value.code == 2
    assert expected in capsys.readouterr().err


def test_a_part_that_fails_or_hangs_is_named_and_ends(tmp_path, capfd) -> None:
    """Its model is not there; and one that may take no time at all."""
    done = run.run_part("sync", "cpu", tmp_path, 120)
    assert done["failed"] == "exit code 1"
    assert "model.path" in capfd.readouterr().out
    assert run.run_part("sync", "cpu", tmp_path, 0.01)["failed"] == "over its limit of 0.01 s"

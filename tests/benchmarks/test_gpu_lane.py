"""The GPU lane's packing: what is left out, and that what was packed comes out whole or not at all."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from benchmarks.gpu_lane import assemble, run, unpack
from benchmarks.gpu_lane.state import State, code_digest
from tests.waiting import wait_until

ROOT = Path(__file__).parents[2]


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
        *(
            (
                f"sglang/srt/layers/moe/configs/triton_3_5_1/E=64,N=320,device_name=NVIDIA_{name}",
                drop,
            )
            for name, drop in (
                ("H200.json", False),
                ("H200,dtype=fp8_w8a8.json", False),
                ("H100_80GB_HBM3.json", False),
                ("H100_80GB_HBM3_down.json", False),
                ("H20.json", True),
                ("GH200_480GB.json", True),
                ("A100-SXM4-80GB.json", True),
            )
        ),
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
        (["--device", "cpu", "nothing"], "unknown part 'nothing'; expected some of build, engine,"),
        (
            ["--device", "cpu", "--resume", "/nowhere.json"],
            "--resume: there is no file /nowhere.json",
        ),
        ([], "torch sees no CUDA device; --device cpu runs the same code"),
        (["--caches", "/nowhere.gz"], "--caches: there is no file /nowhere.gz"),
        (
            ["--dry-run", "--device", "cpu"],
            "--dry-run rehearses a GPU; --device cpu has no use for it",
        ),
    ],
)
def test_the_check_says_what_it_was_not_given(arguments, expected, monkeypatch, capsys) -> None:
    """And never falls back to the CPU by itself."""
    monkeypatch.setattr(run, "has_gpu", lambda: False)
    with pytest.raises(SystemExit) as left:
        run.main(arguments)
    assert left.value.code == 2
    assert expected in capsys.readouterr().err


class Lane:
    """`drive` of tests/lane_parts.py with its files in one folder."""

    def __init__(self, folder: Path) -> None:
        self.out, self.seen = folder / "out", folder / "seen"
        self.environment = {
            **os.environ, "LANE_PARTS_SEEN": str(self.seen), "PYTHONPATH": str(ROOT), "OUT": ""
        }  # fmt: skip

    def command(self, *arguments: str) -> list[str]:
        drive = ["-m", "tests.lane_parts", "drive", "--device", "cpu", "--out", str(self.out)]
        return [sys.executable, *drive, *arguments]

    def call(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        self.seen.unlink(missing_ok=True)
        return subprocess.run(
            self.command(*arguments), cwd=ROOT, env=self.environment, capture_output=True, text=True,
            check=False, timeout=250,
        )  # fmt: skip

    def ran(self) -> list[str]:
        return self.seen.read_text().split()

    def parts(self) -> dict[str, dict]:
        return json.loads((self.out / "gpu_check.json").read_text())["parts"]


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.release  # `make gpu-check` is started by hand
def test_parts_that_hang_or_fail_hide_no_other_and_a_second_call_goes_on(tmp_path) -> None:
    lane = Lane(tmp_path)
    done = lane.call()
    assert done.returncode == 1, done.stderr
    assert lane.ran() == ["first", "hangs", "fails", "last"]
    lines = done.stdout.splitlines()
    assert lines[-1] == "2 passed, 2 failed, 1 skipped"
    assert "these need a GPU: needs_gpu" in lines
    found = lane.parts()
    assert found["hangs"]["why"] == "killed at its limit of 5 s"
    assert found["hangs"]["figures"]["reached"] == 1  # what it said before it was killed
    for name in ("part", "child"):  # a child in a session of its own, too
        pid = found["hangs"]["figures"][name]
        wait_until(lambda pid=pid: not is_alive(pid), f"the end of {name}")
    assert found["fails"]["figures"] == {"reached": 2}
    tail = found["fails"]["log_tail"]
    assert tail[-1] == "RuntimeError: as it should"
    assert any("ROOT/" in line for line in tail)
    assert not any(str(ROOT) in line for line in tail)
    start = lines.index("-- fails: the end of its log:")
    end = next(n for n, line in enumerate(lines) if "fails: failed after" in line)
    assert end - start - 1 == run.TAIL_LINES
    assert any("first: passed after" in line and "first is well" in line for line in lines)
    events = [json.loads(line) for line in (lane.out / "gpu_check.jsonl").read_text().splitlines()]
    assert [event["status"] for event in events] == ["running", "passed", *["running", "failed"] * 2,
                                                     "running", "passed"]  # fmt: skip
    assert "line 99" in (lane.out / "gpu_check.log").read_text()

    again = lane.call("fails", "last", "first")
    assert lane.ran() == ["fails"]  # the others have passed with this code
    assert "passed in an earlier call, with the same code: last, first" in again.stdout
    assert again.stdout.splitlines()[-1] == "2 passed, 1 failed, 2 skipped"
    lane.call("--afresh", "first")
    assert lane.ran() == ["first"]


@pytest.mark.release
def test_a_call_that_is_killed_leaves_its_results_and_the_next_goes_on(tmp_path) -> None:
    lane = Lane(tmp_path)
    patient = lane.environment | {"LANE_PARTS_LIMIT_S": "600"}
    with subprocess.Popen(lane.command(), cwd=ROOT, env=patient) as call:
        wait_until(lambda: lane.seen.exists() and "hangs" in lane.ran())
        wait_until(lambda: "child" in (tail_of_hang(lane.out, call) or ""))
        call.kill()
    found = lane.parts()
    assert found["first"]["status"] == "passed"
    assert found["hangs"]["status"] == "running"
    carried = tmp_path / "carried.json"  # as to another machine
    (lane.out / "gpu_check.json").replace(carried)
    done = lane.call("--resume", str(carried))
    assert lane.ran() == ["fails", "last", "hangs"]  # what killed a call comes last
    assert "passed in an earlier call, with the same code: first" in done.stdout
    assert done.stdout.splitlines()[-1] == "2 passed, 2 failed, 1 skipped"


def tail_of_hang(out: Path, call: subprocess.Popen) -> str | None:
    """The command line of the part's own child, once it runs."""
    for process in psutil.Process(call.pid).children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if "time.sleep(300)" in " ".join(process.cmdline()):
                return "child"
    return None


@pytest.mark.release
def test_a_call_ends_in_time_and_keeps_what_it_cut(tmp_path) -> None:
    lane = Lane(tmp_path)
    done = lane.call("--total-s", "8", "hangs", "last")  # `last` may take 20 s: no time for it
    assert lane.ran() == ["hangs"]
    assert lane.parts()["hangs"]["status"] == "cut"
    assert f"not reached: hangs, last; a call that finds {lane.out}" in done.stdout
    assert done.stdout.splitlines()[-1] == "0 passed, 0 failed, 5 skipped"
    assert done.returncode == 0


def test_other_code_runs_what_failed_first_and_what_passed_again(tmp_path) -> None:
    state = State("cpu", [tmp_path], None)
    for name, status in (("a", "passed"), ("b", "failed"), ("c", "cut")):
        state.record(name, status=status)
    state = State("cpu", [], tmp_path / "gpu_check.json")
    assert state.order("abcd") == ["c", "d", "b"]
    assert state.order("abcd", {"a"}) == ["a", "c", "d", "b"]  # of another machine: made anew
    assert state.order("abcd", {"d"}) == ["d", "c", "b"]
    found = json.loads((tmp_path / "gpu_check.json").read_text())
    for record in found["parts"].values():
        record["key"] = "of other code"
    (tmp_path / "gpu_check.json").write_text(json.dumps(found))
    assert State("cpu", [], tmp_path / "gpu_check.json").order("abcd") == ["b", "c", "d", "a"]
    found["fingerprint"]["device"] = "another"
    (tmp_path / "gpu_check.json").write_text(json.dumps(found))
    other = State("cpu", [], tmp_path / "gpu_check.json")
    assert "is of another, not of cpu" in other.note
    assert other.order("abcd") == list("abcd")
    (tmp_path / "gpu_check.json").write_text("{")
    assert "is no state of an earlier call" in State("cpu", [], tmp_path / "gpu_check.json").note


def test_the_key_follows_the_code(tmp_path) -> None:
    (tmp_path / "mrl").mkdir()
    (tmp_path / "benchmarks" / "results").mkdir(parents=True)
    (tmp_path / "setup.py").write_text("A")
    digests = [code_digest(tmp_path)]
    for name in ("benchmarks/results/gpu_check.json", "mrl/_C.so", "mrl/a.py", "setup.py"):
        (tmp_path / name).write_text("B")
        digests.append(code_digest(tmp_path))
    assert digests[0] == digests[1] == digests[2]  # neither results nor built files count
    assert len(set(digests[2:])) == 3

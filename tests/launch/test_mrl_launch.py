"""`python -m mrl.launch` over ranks that are shell scripts: how it reports what ended them."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from torch.distributed.run import parse_args

from mrl.errors import InputError
from mrl.launch import FORWARDED, _check_flags, main
from tests.waiting import wait_until

ROOT = Path(__file__).parents[2]
RELEASE = pytest.mark.release
# torchrun takes $$ in its arguments for $
RANK = 'echo "start $RANK" >> "$SEEN/starts"; printf %s "$SEEN" > "$MRL_LAUNCH_FOLDER/run_folder"; '


def start(script: str, seen: Path, *more: str) -> subprocess.Popen[str]:
    words = [sys.executable, "-m", "mrl.launch", "--standalone", "--nproc-per-node", "2", *more]
    return subprocess.Popen(
        [*words, "--no-python", "sh", "-c", RANK + script],
        env=os.environ | {"PYTHONPATH": str(ROOT), "SEEN": str(seen)},
        stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def launched(script: str, seen: Path, *more: str) -> tuple[int, list[str]]:
    launcher = start(script, seen, *more)
    _, said = launcher.communicate(timeout=300)
    return launcher.returncode, said.splitlines()


@pytest.mark.release
def test_a_killed_rank_is_one_block_and_starts_again(tmp_path: Path) -> None:
    script = 'if [ "$RANK" = 1 ]; then kill -9 $$$$; fi; exec sleep 300'
    code, lines = launched(script, tmp_path, "--max-restarts", "1")
    assert code == 71
    assert len((tmp_path / "starts").read_text().splitlines()) == 4
    assert "mrl: starting the ranks again, restart 1 of 1" in lines
    assert lines.count("mrl: rank 1 was killed by SIGKILL") == 2
    assert not any("Traceback" in line for line in lines)
    assert json.loads((tmp_path / "failure.json").read_text())["rank"] == 1


@pytest.mark.release
@pytest.mark.parametrize("code", [2, 75])
def test_what_another_start_cannot_mend_keeps_its_code(code: int, tmp_path: Path) -> None:
    found, lines = launched(f"exit {code}", tmp_path, "--max-restarts", "3")
    assert found == code
    assert len((tmp_path / "starts").read_text().splitlines()) == 2
    assert not any("mrl:" in line or "Traceback" in line for line in lines)


@pytest.mark.release
def test_a_run_that_saved_and_left_has_code_75_whoever_dies_then(tmp_path: Path) -> None:
    script = 'touch "$MRL_LAUNCH_FOLDER/saved"; kill -TERM $$$$'
    assert launched(script, tmp_path) == (75, [])


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ([], "the following arguments are required: training_script"),
        (
            ["--nproc", "x", "--no-such", "1"],
            "expected python -m mrl.launch --nproc-per-node N -m mrl",
        ),
        (
            ["a/b.yaml", "seed=1"],
            "got the recipe a/b.yaml in .* write -m mrl train a/b.yaml seed=1 ",
        ),
        (["mrl", "train", "b.yaml"], "got 'mrl' in .* write -m mrl train b.yaml there"),
        (["train", "b.yaml"], "got 'train' in .* write -m mrl train b.yaml there"),
    ],
)
def test_a_command_without_a_program_is_one_line(
    words: list[str], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    before = {each: signal.getsignal(each) for each in FORWARDED}
    try:
        with pytest.raises(SystemExit) as caught:
            main(words)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert caught.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert re.search(reason, line), line


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGHUP, marks=RELEASE)])
def test_ranks_have_time_to_save_and_then_the_code_is_75(number: int, tmp_path: Path) -> None:
    """torch would end the ranks, and all below them, at once."""
    name = signal.Signals(number).name.removeprefix("SIG")
    save = 'touch "$SEEN/saved_$RANK" "$MRL_LAUNCH_FOLDER/saved"; exit 75'
    script = (
        f"(trap '' {name}; sleep 2) & trap 'wait; {save}' {name}; touch $SEEN/ready_$RANK; wait"
    )
    launcher = start(script, tmp_path)
    wait_until(lambda: len(list(tmp_path.glob("ready_*"))) == 2, "two ranks")
    launcher.send_signal(number)
    assert launcher.wait(60) == 75
    assert len(list(tmp_path.glob("saved_*"))) == 2


@pytest.mark.parametrize(
    "flag",
    [
        *("--nnodes=two", "--nproc-per-node=many", "--rdzv-endpoint=node1:port"),
        *("--rdzv-conf=timeout", "--rdzv-conf==9", "--rdzv-conf=timeout=9,"),
        *(
            "--rdzv-conf=timeout=abc",
            "--rdzv-conf=is_host=1,join_timeout=-1",
            "--rdzv-conf=is_host=maybe",
        ),
    ],
)
def test_a_flag_that_torch_cannot_read_is_one_line(flag: str) -> None:
    name, _, given = flag.partition("=")
    with pytest.raises(InputError, match=f"^{name}: got '{given}', expected "):
        _check_flags(parse_args([flag, "script.py"]))
    _check_flags(parse_args(["--nnodes=1:4", "--rdzv-endpoint=node1", "script.py"]))
    _check_flags(parse_args(["--rdzv-conf=timeout=9, is_host=1", "script.py"]))


@pytest.mark.parametrize(
    "flag",
    [
        *("--max-restarts=-1", "--nproc-per-node=0", "--nproc-per-node=-2", "--nnodes=0"),
        *("--nnodes=3:1", "--monitor-interval=0"),
    ],
)
def test_a_number_with_which_no_rank_starts_is_one_line(flag: str) -> None:
    """With -1 restarts the launcher would end with code 0 at once; torch refuses the others late."""
    name, _, given = flag.partition("=")
    with pytest.raises(InputError, match=f"^{name}: got '?{given}'?(\\.0)?, expected "):
        _check_flags(parse_args([flag, "script.py"]))
    _check_flags(parse_args(["--max-restarts=0", "--nproc-per-node=1", "script.py"]))


@pytest.mark.release
@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    "flags",
    ["--rdzv-backend=c10d --rdzv-endpoint={}", "--master-port={port}"],
    ids=["c10d", "static"],
)
def test_a_rendezvous_whose_port_is_mute_is_one_line(flags: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        words = flags.format(f"127.0.0.1:{port}", port=port).split()
        done = subprocess.run(
            [sys.executable, "-m", "mrl.launch", "--nnodes=2", *words, "--no-python", "true"],
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            capture_output=True, text=True, check=False,
        )  # fmt: skip
    assert done.returncode == 2
    lines = done.stderr.splitlines()
    assert [line for line in lines if "mrl:" in line] == lines
    assert f"127.0.0.1:{port}: another program listens there (no answer for 30 s)" in lines[0]


@pytest.mark.release
@pytest.mark.timeout(120)
def test_a_rank_without_a_launcher_does_not_wait_for_a_mute_port(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(server.getsockname()[1])}
        code = "from parallel.mesh import _empty_store; _empty_store()"
        done = subprocess.run(
            [sys.executable, "-c", code],
            env=os.environ | {"PYTHONPATH": str(ROOT), "RANK": "1", "WORLD_SIZE": "2"} | where,
            capture_output=True, text=True, check=False,
        )  # fmt: skip
    assert "InputError: the ranks cannot meet at 127.0.0.1" in done.stderr

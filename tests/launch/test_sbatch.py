"""launch/slurm/train.sbatch, run for real with stand-ins for SLURM and torchrun.

tests/slurm runs it on a real SLURM.
"""

import re
import signal
import subprocess
from pathlib import Path

import pytest

from mrl.errors import ExitCode
from tests.launch.conftest import torchrun_saw
from tests.release import release
from tests.waiting import LIMIT_S, wait_until

ROOT = Path(__file__).parents[2]
SBATCH = ROOT / "launch/slurm/train.sbatch"
LATEST = "checkpoints/latest_checkpointed_iteration.txt"


def submit(out, environ, **variables):
    """Run the script as SLURM does -> its exit code and what it wrote into its log."""
    command = ["bash", SBATCH, "r.yaml", out, "seed=3"]
    run = subprocess.run(command, env=environ | variables, check=False)
    return run.returncode, (out / "logs/slurm_42.log").read_text()


def test_usage(cluster):
    run = subprocess.run(
        ["bash", SBATCH], env=cluster[0], capture_output=True, text=True, check=False
    )
    assert run.returncode == 2
    assert run.stderr.startswith("usage: ")


@pytest.mark.parametrize("missing", ["SLURM_JOB_ID", "SLURM_JOB_NODELIST"])
def test_a_script_outside_of_a_job_says_so_and_writes_nothing(missing, cluster, tmp_path):
    environ, _ = cluster
    del environ[missing]
    run = subprocess.run(
        ["bash", SBATCH, "r.yaml", tmp_path / "out"],
        env=environ, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert run.returncode == 2
    assert run.stderr.startswith(f"mrl: {SBATCH} is not in a job of SLURM; submit it: sbatch ")
    assert len(run.stderr.splitlines()) == 1
    assert not (tmp_path / "out").exists()


def test_sbatch_forms_the_multi_node_command(cluster, tmp_path):
    environ, seen = cluster
    out = tmp_path / "run folder"
    environ |= {"NPROC_PER_NODE": "4", "PORT": "1234"}
    assert submit(out, environ)[0] == 0
    assert torchrun_saw(seen)[0] == [
        "--nnodes", "2", "--nproc-per-node", "4",
        "--rdzv-id", "42_1", "--rdzv-backend", "c10d", "--rdzv-endpoint", "node7:1234",
        "-m", "mrl", "train", "r.yaml", f"output_dir={out}", "seed=3",
    ]  # fmt: skip
    srun = (seen / "srun").read_text().splitlines()
    assert not [word for word in srun if word.startswith(("--gpus", "--het"))]
    assert "--kill-on-bad-exit=1" in srun
    assert (out / "train.sbatch").read_bytes() == SBATCH.read_bytes()
    assert "nodes node[7-8]" in (out / "logs/slurm_42.log").read_text()
    assert "requeue" not in (seen / "scontrol").read_text()


@pytest.mark.parametrize(
    ("variables", "threads"),
    [
        ({"SLURM_GPUS_ON_NODE": "8", "SLURM_CPUS_PER_TASK": "64"}, "8"),
        ({"SLURM_GPUS_ON_NODE": "8", "SLURM_CPUS_ON_NODE": "96", "NPROC_PER_NODE": "4"}, "24"),
        release({"SLURM_GPUS_ON_NODE": "8", "SLURM_CPUS_PER_TASK": "4"}, "1"),
        ({"SLURM_GPUS_ON_NODE": "8", "SLURM_CPUS_PER_TASK": "64", "OMP_NUM_THREADS": "3"}, "3"),
        ({"SLURM_CPUS_PER_TASK": "64"}, None),  # no GPUs: torchrun gives one
    ],
)
def test_sbatch_shares_the_cores_out(variables, threads, cluster, tmp_path):
    environ, seen = cluster
    command = ["bash", SBATCH, "r.yaml", tmp_path / "out"]
    subprocess.run(command, env=environ | variables, check=True)
    assert torchrun_saw(seen)[1] == threads


def test_sbatch_fails_as_the_job_does_without_requeue(cluster, tmp_path):
    environ, seen = cluster
    run = subprocess.run(
        ["bash", SBATCH, "r.yaml", tmp_path / "out"], env=environ | {"RANK_CODE": "2"}, check=False
    )
    assert run.returncode == 2
    assert "requeue" not in (seen / "scontrol").read_text()


def test_usr1_reaches_the_ranks_and_the_job_requeues(cluster, tmp_path):
    environ, seen = cluster
    command = ["bash", str(SBATCH), "r.yaml", str(tmp_path / "out")]
    with subprocess.Popen(command, env=environ | {"RANK_SECONDS": str(LIMIT_S)}) as job:
        wait_until(lambda: (seen / "rank_started").exists() or job.poll() is not None)
        assert job.poll() is None
        job.send_signal(signal.SIGUSR1)
        assert job.wait(timeout=LIMIT_S) == 3
    assert (seen / "rank_saved").exists()
    assert (seen / "scontrol").read_text().splitlines()[-1] == "requeue 42"


def test_sbatch_asks_for_the_signal_and_requeue():
    text = SBATCH.read_text()
    assert re.search(r"^#SBATCH --signal=B:USR1@\d+$", text, re.M)
    assert re.search(r"^#SBATCH --requeue$", text, re.M)


def test_one_process_per_gpu_and_the_step_gets_all_gpus_and_cores(cluster, tmp_path):
    environ, seen = cluster
    given = {"SLURM_GPUS_ON_NODE": "4", "SLURM_CPUS_PER_TASK": "32", "SLURM_CPUS_ON_NODE": "32"}
    assert submit(tmp_path / "out", environ, **given)[0] == 0
    words, threads = torchrun_saw(seen)
    assert words[words.index("--nproc-per-node") + 1] == "4"
    assert threads == "8"
    srun = (seen / "srun").read_text().splitlines()
    assert {"--gpus-per-node=4", "--cpus-per-task=32"} <= set(srun)


def test_a_heterogeneous_job_is_one_run_over_all_its_components(cluster, tmp_path):
    environ, seen = cluster
    code, log = submit(tmp_path / "out", environ, **COMPONENTS)
    assert code == 0
    words = torchrun_saw(seen)[0]
    assert words[:4] == ["--nnodes", "4", "--nproc-per-node", "8"]
    assert "node7:29500" in words
    assert words[words.index("--rdzv-backend") + 1] == "static"  # c10d sorts the nodes by name
    parts = parts_of(seen)
    assert [part[0] for part in parts] == ["--het-group=0", "--het-group=1", "--het-group=2"]
    assert all("--kill-on-bad-exit=1" in part for part in parts)
    gpus = [[word for word in part if "gpus-per-node" in word] for part in parts]
    assert gpus == [["--gpus-per-node=8"], ["--gpus-per-node=4"], []]
    assert [part[part.index("--nproc-per-node") + 1] for part in parts] == ["8", "4", "1"]
    assert [part[part.index("mrl") + 3 :][:2] for part in parts] == [
        ["24", "8"], ["16", "4"], ["", ""],
    ]  # fmt: skip
    assert "component 0: 2 node(s), ranks 0 to 15\n" in log
    assert "component 1: 1 node(s), ranks 16 to 19\n" in log
    assert "component 2: 1 node(s), ranks 20 to 20\n" in log


def test_each_component_may_have_a_number_of_processes(cluster, tmp_path):
    environ, seen = cluster
    first = {"SLURM_RESTART_COUNT": "0", "NPROC_PER_NODE": "2:3:5"}
    assert submit(tmp_path / "out", environ, **first, **COMPONENTS)[0] == 0
    parts = parts_of(seen)
    assert [part[part.index("--nproc-per-node") + 1] for part in parts] == ["2", "3", "5"]
    assert (seen / "check").read_text().startswith("12 -m mrl check ")


def parts_of(seen):
    """The words of srun for each component, without those of the task's own script."""
    words = (seen / "srun").read_text().splitlines()
    at = [i for i, word in enumerate(words) if word.startswith("--het-group=")]
    return [words[i:j] for i, j in zip(at, [*at[1:], len(words)], strict=True)]


COMPONENTS = {"SLURM_HET_SIZE": "3"} | {
    f"SLURM_JOB_{name}_HET_GROUP_{i}": value
    for name, values in {
        "NODELIST": ["n[7-8]", "m1", "m2"], "CPUS_PER_NODE": ["192(x2)", "64", "32"],
    }.items()
    for i, value in enumerate(values)
}  # fmt: skip


def test_bad_input_ends_the_first_start_before_any_rank(cluster, tmp_path):
    environ, seen = cluster
    first = {"SLURM_RESTART_COUNT": "0", "NPROC_PER_NODE": "4"}
    assert submit(tmp_path / "out", environ, CHECK_CODE="2", **first)[0] == 2
    out = f"output_dir={tmp_path / 'out'}"
    assert (seen / "check").read_text() == f"8 -m mrl check r.yaml {out} seed=3\n"
    assert not (seen / "torchrun.json").exists()
    assert "requeue" not in (seen / "scontrol").read_text()


@pytest.mark.parametrize(
    ("name", "value"),
    [release("NPROC_PER_NODE", "0"), ("NPROC_PER_NODE", "x"), release("NPROC_PER_NODE", "8:4"),
     ("MAX_RESTARTS_WITHOUT_STEP", "-1")],
)  # fmt: skip
def test_a_bad_variable_is_named(name, value, cluster, tmp_path):
    environ, seen = cluster
    code, log = submit(tmp_path / "out", environ, **{name: value})
    assert code == 2
    assert f"mrl: {name}: got '{value}', expected a number" in log, log
    assert not (seen / "torchrun.json").exists()


def test_the_file_of_setup_is_run_first(cluster, tmp_path):
    environ, seen = cluster
    setup = tmp_path / "setup.sh"
    setup.write_text('echo "$NOT_SET"; export OMP_NUM_THREADS=7\n')
    assert submit(tmp_path / "out", environ, SETUP=str(setup))[0] == 0
    assert torchrun_saw(seen)[1] == "7"


def test_a_run_that_a_callback_stopped_is_not_requeued(cluster, tmp_path):
    """It would stop again, one step later."""
    environ, seen = cluster
    code, log = submit(tmp_path / "out", environ, RANK_CODE="75")
    assert code == 75
    assert "mrl: a callback stopped the run: not requeued" in log
    assert "requeue" not in (seen / "scontrol").read_text()


def test_every_code_that_ends_a_job_is_one_of_those_of_mrl() -> None:
    """`make test-all` tries each in a job."""
    run = {
        ExitCode.BAD_INPUT, ExitCode.FAILED, ExitCode.DISK, ExitCode.NOT_FINITE,
        ExitCode.OUT_OF_MEMORY, ExitCode.INTERRUPTED,
    }  # fmt: skip
    text = SBATCH.read_text()
    final = [set(map(int, codes.split())) for codes in re.findall(r'final="([\d ]+)"', text)]
    assert final == [run, run - {ExitCode.OUT_OF_MEMORY}]
    (meant,) = re.findall(r"for meant in (.*); do", text)
    others = {ExitCode.SAVED, ExitCode.HUNG_RANK, ExitCode.LOST_ENGINE, ExitCode.LOST_RANK}
    assert set(map(int, re.sub(r'"[^"]*"', "", meant).split())) == run | others


@pytest.mark.parametrize("code", [release(1), 71, release(72), release(73), 137])
def test_a_start_that_may_help_is_requeued(code, cluster, tmp_path):
    environ, seen = cluster
    assert submit(tmp_path / "out", environ, RANK_CODE=str(code))[0] == code
    assert (seen / "scontrol").read_text().splitlines()[-1] == "requeue 42"


@pytest.mark.parametrize("code", [2, *map(release, (70, 74, 76, 77)), 130])
def test_a_start_that_would_end_in_the_same_way_is_not_requeued(code, cluster, tmp_path):
    environ, seen = cluster
    found, log = submit(tmp_path / "out", environ, RANK_CODE=str(code))
    assert found == code
    assert f"mrl: exit code {code}: not requeued, as another start would" in log
    assert "requeue" not in (seen / "scontrol").read_text()


def test_a_service_is_started_and_requeued_where_a_run_would_not_be(cluster, tmp_path):
    environ, seen = cluster
    environ |= {"SERVE": "1", "SLURM_RESTART_COUNT": "0", "CHECK_CODE": "2"}
    code, log = submit(tmp_path / "out", environ, RANK_CODE="77")  # its tenant is paused at last
    assert (code, log.splitlines()[-1]) == (77, "mrl: exit code 77: requeue")
    assert torchrun_saw(seen)[0][-5:-2] == ["mrl", "serve", "r.yaml"]
    assert not (seen / "check").exists()  # mrl check is for recipes
    code, log = submit(tmp_path / "out", environ, RANK_CODE="2")
    assert (code, "not requeued, as another start" in log) == (2, True)


def test_an_idle_service_may_be_requeued_for_ever(cluster, tmp_path):
    environ, seen = cluster
    out = tmp_path / "out"
    environ |= {"SERVE": "1", "MAX_RESTARTS_WITHOUT_STEP": "1", "RANK_SECONDS": str(LIMIT_S)}
    for number in range(2):
        command = ["bash", str(SBATCH), "r.yaml", str(out)]
        (seen / "rank_started").unlink(missing_ok=True)
        with subprocess.Popen(command, env=environ | {"SLURM_RESTART_COUNT": str(number)}) as job:
            wait_until((seen / "rank_started").exists)
            job.send_signal(signal.SIGUSR1)
            job.wait(timeout=LIMIT_S)
        assert (seen / "scontrol").read_text().count("requeue 42") == number + 1
    for number in range(2, 4):  # one that is lost again and again without a round is not
        given = {"RANK_SECONDS": "0", "RANK_CODE": "71", "SLURM_RESTART_COUNT": str(number)}
        _, log = submit(out, environ, **given)
    assert "1 restarts in a row kept no round after round 0; to continue with round 0" in log


def test_restarts_are_bounded_unless_a_checkpoint_is_newer(cluster, tmp_path):
    environ, seen = cluster
    out, starts = tmp_path / "out", 0
    (out / LATEST).parent.mkdir(parents=True)

    def requeued():
        nonlocal starts
        number = (seen / "scontrol").read_text().count("requeue") if starts else 0
        given = {"SLURM_RESTART_COUNT": str(starts), "RANK_CODE": "71"}
        code, log = submit(out, environ, MAX_RESTARTS_WITHOUT_STEP="2", **given)
        assert code == 71
        starts += 1
        return (seen / "scontrol").read_text().count("requeue") > number, log

    assert [requeued()[0] for _ in range(2)] == [True, True]
    (out / LATEST).write_text("5\n")
    assert [requeued()[0] for _ in range(2)] == [True, True]
    again, log = requeued()
    assert not again
    assert "2 restarts in a row kept no step after step 5; to continue with step 5" in log
    assert requeued()[0]  # whoever requeues it by hand begins to count anew


def test_restarts_by_slurm_itself_are_bounded_too(cluster, tmp_path):
    """SLURM requeues without asking the script where the first node dies with it."""
    environ, seen = cluster
    out = tmp_path / "out"
    (out / "logs").mkdir(parents=True)
    (out / "logs/restarts_42").write_text("0 8\n")
    given = {"SLURM_RESTART_COUNT": "4", "MAX_RESTARTS_WITHOUT_STEP": "08"}
    code, log = submit(out, environ, **given)
    assert code == 70
    assert "mrl: not started, as 9 restarts in a row kept no step after step 0" in log
    assert not (seen / "torchrun.json").exists()


@pytest.mark.parametrize("torn", ["", "0", "0 x\n"])
def test_a_count_of_restarts_that_was_cut_short_starts_anew(torn, cluster, tmp_path):
    """The node that wrote it may have died; the job must not end without a word for that."""
    environ, seen = cluster
    out = tmp_path / "out"
    (out / "logs").mkdir(parents=True)
    (out / "logs/restarts_42").write_text(torn)
    code, _ = submit(out, environ)
    assert code == 0
    assert (seen / "torchrun.json").exists()


def test_a_slurm_that_does_not_requeue_is_asked_again(cluster, tmp_path):
    environ, seen = cluster
    sleep = tmp_path / "shims/sleep"
    sleep.write_text("#!/bin/sh\nexit 0\n")
    sleep.chmod(0o755)
    code, log = submit(tmp_path / "out", environ, RANK_CODE="71", REQUEUE_CODE="1")
    assert code == 71
    assert (seen / "scontrol").read_text().count("requeue 42") == 6
    assert "mrl: SLURM did not requeue the job; to continue with step 0" in log

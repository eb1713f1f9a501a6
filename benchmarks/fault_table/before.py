"""This table says what once became of each fault, what becomes of it now, and what proves that.

`python -m benchmarks.fault_table.before` writes it into docs/faults.md.
tests/benchmarks/test_faults.py asserts that the page has it, and that every proof exists.
"""

from __future__ import annotations

from typing import NamedTuple

from benchmarks.fault_table.base import ROOT

PAGE = ROOT / "docs" / "faults.md"
START, END = "<!-- table of what was before -->", "<!-- /table of what was before -->"


class Before(NamedTuple):
    """A row of the measurements, with what becomes of the fault now."""

    fault: str
    before: str
    now: str
    proofs: tuple[str, ...]
    """Rows of the table of faults, `slurm: ROW`, or FILE.py::TEST."""


CHECKPOINT = "tests/parallel/checkpoint/test_checkpoint.py"
CHECK_ROWS = "tests/preflight/test_rows.py"
DISK = "tests/loop/test_disk.py"
MODELS = "tests/loop/test_broken_models.py"
REWARDS = "tests/rewards/test_runner.py"
SERVER = "tests/rollout/test_rollout_server.py"
SLURM_BITS = "tests/slurm/test_training.py"
USERS = "tests/users"

SLURM = (
    Before("two nodes with a rank each", "worked", "trains",
           ("slurm: two nodes train, with nothing edited",)),
    Before("the warning before the time limit, `proctrack/cgroup`", "worked", "recovered, same bits",
           ("slurm: the warning before the time limit",
            f"{SLURM_BITS}::test_a_run_through_signals_ends_with_the_same_bits")),
    Before("the same under `proctrack/linuxproc`", "livelock: 20 restarts, no step kept", "recovered",
           ("slurm: the warning before the time limit",
            "slurm: SIGUSR1 to all tasks of the job (scancel --signal=USR1)",
            "slurm: SIGUSR1 to all tasks while the ranks start")),
    Before("`scontrol requeue`", "worked", "recovered", ("slurm: scontrol requeue",)),
    Before("`scancel`", "worked", "all gone", ("slurm: scancel",)),
    Before("kill -9 of a rank on the second node", "no requeue", "recovered, same bits",
           ("slurm: kill -9 of a rank on the second node",
            f"{SLURM_BITS}::test_a_run_through_losses_ends_with_the_same_bits")),
    Before("the second node dies, `SlurmdTimeout` 30", "worked", "recovered, same bits",
           ("slurm: the second node dies whole",
            f"{SLURM_BITS}::test_a_run_through_losses_ends_with_the_same_bits")),
    Before("the second node dies, `SlurmdTimeout` 200 or 300", "no requeue", "recovered",
           ("slurm: the second node dies whole",)),
    Before("the script without editing on a cluster without GPUs", "refused by SLURM", "trains",
           ("slurm: two nodes train, with nothing edited",)),
)  # fmt: skip
RANKS = (
    Before("kill -9 of a rank in the rollout", "noisy, no next command", "recovered, one block",
           ("kill-rank-rollout",)),
    Before("kill -9 of a rank in log-probs or training", "noisy, no next command",
           "recovered, one block", ("kill-rank-train",)),
    Before("kill -9 of a rank in a save", "noisy, no next command", "recovered, one block",
           ("kill-rank-save",)),
    Before("SIGSTOP of a rank in training", "hung", "recovered, code 72", ("stop-rank-train",)),
    Before("SIGSTOP of a rank in the rollout", "hung", "recovered, code 72", ("stop-rank-rollout",)),
    Before("SIGTERM", "silent, nothing saved", "saved, code 75", ("sigterm",)),
    Before("SIGHUP", "silent, nothing saved", "saved, code 75", ("sighup",)),
    Before("SIGUSR1 twice, or to one rank of two", "worked", "saved, code 75",
           ("sigusr1", "tests/loop/test_torchrun.py::test_a_signal_to_one_rank_stops_both")),
    Before("Ctrl-C", "worked", "recovered, code 130", (f"{USERS}/ends.py::ctrl_c",)),
    Before("a mute program holds the port of the rendezvous", "hung", "refused after 30 s",
           ("mute-rendezvous",)),
)  # fmt: skip
FILES = (
    Before("a full disk in `tokens/`", "unclear, no file named", "refused, file and bytes named",
           (f"{DISK}::test_a_disk_that_is_full_for_token_records_is_named",)),
    Before("a full disk in an asynchronous checkpoint", "unclear, 85 s", "refused, within 10 s",
           ("full-disk", f"{DISK}::test_a_full_disk_is_named_at_once_and_the_checkpoint_before_stays")),
    Before("a full disk in a synchronous checkpoint", "unclear, no disk named",
           "refused, within 10 s",
           (f"{DISK}::test_a_full_disk_is_named_at_once_and_the_checkpoint_before_stays",)),
    Before("a flipped byte in each file of a checkpoint", "worked", "recovered",
           ("damaged-bytes", "damaged-checkpoint")),
    Before("the file that names the newest checkpoint is lost", "worked", "recovered",
           (f"{CHECKPOINT}::test_latest_sets_a_run_back_and_its_loss_does_not_lose_the_run",)),
    Before("`metrics.jsonl` cut short", "silent loss", "recovered from the checkpoint's copy",
           ("cut-metrics",)),
    Before("a damaged row in `metrics.jsonl`", "unclear, late",
           "recovered from the checkpoint's copy", ("damaged-metrics",)),
    Before("the weights of the model replaced under a run", "silent",
           "refused before the engine starts", ("other-weights",)),
    Before("data shorter or reordered under a run", "late", "refused before the engine starts",
           ("shorter-data", "reordered-data")),
    Before("another recipe for a folder in use", "worked", "refused", ("other-recipe",)),
)  # fmt: skip
INPUTS = (
    Before("rewards that raise, hang, exit, fork or return nonsense", "worked",
           "masked, or refused where all do", ("reward-of-one", "reward-raises", "reward-hangs")),
    Before("rewards that eat memory", "worked", "the worker goes first",
           (f"{REWARDS}::test_where_memory_runs_out_the_worker_goes_first",)),
    Before("half of a surrogate pair in a prompt", "unclear, no row named", "refused, row named",
           ("surrogate",)),
    Before("`exact_match` on rows without an answer", "late, no row named", "refused, row named",
           ("no-answer",)),
    Before("rows that are there twice", "silent", "named in a warning",
           (f"{CHECK_ROWS}::test_copies_and_numbers_that_are_not_finite_are_named",
            f"{USERS}/check.py::odd_rows")),
    Before("a JSON key that is there twice", "silent", "refused, row named", ("key-twice",)),
    Before("a column with NaN", "silent", "named in a warning; refused where the reward reads it",
           (f"{CHECK_ROWS}::test_copies_and_numbers_that_are_not_finite_are_named",
            f"{CHECK_ROWS}::test_a_column_that_the_reward_needs_must_be_finite")),
    Before("weights that are cut short", "unclear", "refused", ("cut-weights",)),
    Before("weights whose header is cut short", "unclear", "refused", ("cut-header",)),
    Before("weights that are a link to nothing", "unclear", "refused", ("dangling-link",)),
    Before("a file of junk beside the weights", "unclear", "refused", ("junk-weights",)),
    Before("a tensor that is missing", "late", "refused", ("missing-tensor",)),
    Before("a tensor of another shape", "late", "refused", ("tensor-shape",)),
    Before("other sizes in `config.json`", "late", "refused",
           ("vocabulary", f"{MODELS}::test_sizes_of_another_model")),
    Before("more experts per token than there are", "late, unclear", "refused",
           ("experts-per-token",)),
    Before("weights with NaN", "unclear, others blamed", "refused", ("nan-weights",)),
    Before("a model without a tokenizer", "unclear", "refused", ("no-tokenizer",)),
    Before("a limit of 64 open files", "unclear", "refused", ("few-open-files",)),
    Before("a machine without loopback", "unclear", "refused", ("no-loopback",)),
)  # fmt: skip
SECURITY = (
    Before("ports of an engine", "loopback only", "loopback only",
           (f"{SERVER}::test_all_sockets_are_loopback", f"{USERS}/security.py::what_others_reach")),
    Before("`/health` and `/health_generate` without the key", "answered", "refused",
           (f"{SERVER}::test_every_endpoint_wants_the_key",)),
    Before("the key in a command line, environment or log", "not there", "not there",
           (f"{SERVER}::test_key_is_nowhere_to_be_read",)),
    Before("markup and terminal codes in a completion", "held", "held",
           (f"{USERS}/security.py::what_the_model_writes",)),
    Before("a pickle in a checkpoint, with digests that fit", "held", "refused",
           (f"{USERS}/security.py::planted_pickle",
            f"{CHECKPOINT}::test_a_planted_pickle_is_refused_unopened")),
    Before("code in a model folder (`auto_map`)", "held", "held",
           (f"{USERS}/security.py::pickled_weights_and_code",)),
    Before("a reward server for other machines without a token", "refused", "refused",
           (f"{USERS}/security.py::reward_server_for_others",)),
    Before("files that a killed tree leaves", "left for ever", "removed by the next start",
           ("kill-tree", "tests/system/test_scratch.py::test_a_killed_owner_is_swept_once_its_child_"
            "is_gone_too")),
    Before("the warning of a memory leak in healthy runs of 16 steps", "a false alarm",
           "no alarm", ("none",)),
)  # fmt: skip
SECTIONS = {
    "SLURM": SLURM,
    "ranks and signals": RANKS,
    "files": FILES,
    "inputs": INPUTS,
    "security": SECURITY,
}
"""All rows, by the sections of the measurements."""


def table() -> str:
    """Return the table of docs/faults.md, with its marks."""
    lines = ["| | what was done | before | now | proof |", "|---|---|---|---|---|"]
    for section, rows in SECTIONS.items():
        for row in rows:
            proofs = ", ".join(_in_words(proof) for proof in row.proofs)
            lines.append(f"| {section} | {row.fault} | {row.before} | {row.now} | {proofs} |")
    return "\n".join([START, *lines, END])


def _in_words(proof: str) -> str:
    if proof.startswith("slurm: "):
        return f"[slurm.md](slurm.md): {proof.removeprefix('slurm: ')}"
    return f"`{proof}`"


def main() -> None:
    """Write the table into docs/faults.md, between its marks."""
    page = PAGE.read_text()
    before, start, rest = page.partition(START)
    _, end, after = rest.partition(END)
    if not (start and end):
        raise SystemExit(f"{PAGE}: expected the marks {START} and {END}")
    PAGE.write_text(f"{before}{table()}{after}")


if __name__ == "__main__":
    main()

"""A mixture of three sources: killed and resumed, it trains on the rows of an uninterrupted run."""

from __future__ import annotations

import gzip
import json
import signal
import time
from pathlib import Path
from typing import Any

from mrl.data.first_char import first_char_rows
from mrl.run.folder import RunFolder
from tests.loop.conftest import COMMAND_TIMEOUT_S
from tests.users.things import User, thing

NUM_STEPS, NUM_KILLED = 6, 3


@thing(
    "A mixture of parquet, gz and CSV, with weights and a reward of its own, is killed.",
    wall="Only one form of data is read.",
)
def killed_mixture(user: User) -> str:
    data = f"data={json.dumps({'sources': _sources(user)})}"
    more = (data, f"train.num_steps={NUM_STEPS}", "checkpoint.save_every=1")
    user.train("whole", *more)
    killed = user.start("train", *user.recipe("killed", *more))
    deadline = time.monotonic() + COMMAND_TIMEOUT_S
    while not (user.folder / f"killed/checkpoints/iter_{NUM_KILLED:07d}").exists():
        assert killed.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.02)
    killed.send_signal(signal.SIGKILL)
    killed.finish(60)
    num_done = len((user.folder / "killed/metrics.jsonl").read_text().splitlines())
    assert num_done < NUM_STEPS
    printed = " ".join(user.train("killed", *more).split())
    assert "continu" in printed, printed
    whole, resumed = (_rows(user.folder / name) for name in ("whole", "killed"))
    assert resumed == whole
    names = [
        Path(source.split(":")[0].split(" row")[0]).name for step in whole for source, _ in step
    ]
    shares = {name: names.count(name) for name in sorted(set(names))}
    assert shares == {"one.parquet": 12, "three.csv": 6, "two.jsonl.gz": 6}
    assert all(reward == 1 for step in whole for source, reward in step if "three" in source)
    return f"killed after {num_done} of {NUM_STEPS} steps; the same rows in each step: {shares}"


@thing("Each source of a mixture has its reward, one of them two, and I see how each of them does.")
def numbers_of_each_source(user: User) -> str:
    functions = """
def long(completions, **kwargs):
    return [float(len(text)) for text in completions]


def never(completions, **kwargs):
    return [0.0] * len(completions)
"""
    file = user.write("mine.py", functions)
    rows = "".join(json.dumps(row) + "\n" for row in first_char_rows(16, 0))
    two = [{"path": f"{file}:long"}, {"path": f"{file}:never", "weight": 3}]
    sources = [
        {"path": str(user.write("a.jsonl", rows)), "name": "sums", "reward": two, "weight": 3},
        {"path": str(user.write("b.jsonl", rows)), "reward": f"{file}:never", "weight": 1},
    ]
    data = f"data={json.dumps({'sources': sources})}"
    user.train("run", data, "reward=null", "train.num_steps=2")
    metrics = [json.loads(x) for x in (user.folder / "run/metrics.jsonl").read_text().splitlines()]
    for step, row in enumerate(metrics):
        lines = list(RunFolder(user.folder / "run").read_rollouts(step))
        for name, source in (("sums", "a.jsonl"), ("b.jsonl", "b.jsonl")):
            own = [line for line in lines if source in line["source"]]
            found = {key: row[f"source/{name}/{key}"] for key in ("samples", "reward_mean")}
            mean = sum(line["reward"] for line in own) / len(own)
            assert found == {"samples": len(own), "reward_mean": mean}, (found, mean)
        assert row["source/b.jsonl/zero_variance_share"] == 1
        assert row["rewards/long/mean"] == row["source/sums/reward_mean"] > 0
    user.mrl("view", user.folder / "run")
    assert "Reward of each source" in (user.folder / "run/view.html").read_text()
    printed = user.mrl("check", *user.recipe("other", data, "reward=null"))
    assert "1 " + f"{file}:long (long) + 3" in " ".join(printed.split())
    return f"reward of sums {metrics[0]['source/sums/reward_mean']:.3f}, of b.jsonl 0"


def _sources(user: User) -> list[dict[str, Any]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = [row["prompt"] for row in first_char_rows(21, 0)]
    one, two = user.folder / "one.parquet", user.folder / "two.jsonl.gz"
    pq.write_table(pa.table({"prompt": rows[:9]}), one)
    lines = "".join(json.dumps({"text": row, "more": 1}) + "\n" for row in rows[9:16])
    two.write_bytes(gzip.compress(lines.encode()))
    three = user.write("three.csv", "question\n" + "".join(row + "\n" for row in rows[16:]))
    ones = user.write(
        "ones.py", "def f(prompts, completions, **c):\n    return [1.0] * len(prompts)\n"
    )
    return [
        {"path": str(one), "weight": 2},
        {"path": str(two), "weight": 1, "prompt_key": "text"},
        {"path": str(three), "weight": 1, "prompt_key": "question", "reward": f"{ones}:f"},
    ]


def _rows(run: Path) -> list[list[tuple[str, float | None]]]:
    """Return each step's rows in order, with a reward for those of the third source, which is always
    1."""
    steps = []
    for step in range(NUM_STEPS):
        found: dict[str, float | None] = {}
        for line in RunFolder(run).read_rollouts(step):
            source = line["source"]
            found.setdefault(source, line["reward"] if "three" in source else None)
        steps.append(list(found.items()))
    return steps

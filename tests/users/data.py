"""Data: files of many forms, mixtures, long prompts, rows that lack what the reward needs."""

from __future__ import annotations

import gzip
import json
from typing import Any

from mrl.data.first_char import first_char_rows
from tests.users.things import User, thing


@thing("I train on verl rows in parquet.", is_long=False)
def verl_parquet(user: User) -> str:
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows: list[dict[str, Any]] = [
        {
            "data_source": "toy",
            "prompt": [{"role": "user", "content": row["prompt"]}],
            "reward_model": {"style": "rule", "ground_truth": row["prompt"][0]},
            "extra_info": {"index": index},
        }
        for index, row in enumerate(first_char_rows(16, 0))
    ]
    file = user.folder / "train.parquet"
    pq.write_table(pa.Table.from_pylist(rows), file)
    printed = user.mrl("check", *user.recipe("run"), f"data.path={file}", "reward=exact_match")
    assert "16 prompts from verl rows, `prompt`" in " ".join(printed.split())
    return "16 prompts from verl rows; the ground truth is the reward's `answer`"


@thing("My rows call the answer something else than the reward does.", is_long=False)
def missing_column(user: User) -> str:
    file = user.write("rows.csv", "question,solution\n" + "".join(f"q{i},{i}\n" for i in range(16)))
    more = [*user.recipe("run"), f"data.path={file}", "data.prompt_key=question"]
    printed = user.mrl("check", *more, "reward=exact_match", code=2)
    assert f"{file}:2: no column `answer`" in " ".join(printed.split())
    assert "16 of 16 rows" in " ".join(printed.split())
    user.mrl("check", *more, "reward=exact_match", "data.columns={answer: solution}")
    return " ".join(printed.split())


@thing("I bring TRL's messages and ShareGPT in one list of files, compressed.")
def trl_and_sharegpt(user: User) -> str:
    def talk(who: str, text: str) -> list[dict[str, str]]:
        return [{who: "user" if who == "role" else "human", text: "hello"},
                {who: "assistant" if who == "role" else "gpt", text: "ho"}]  # fmt: skip

    one, two = user.folder / "trl.jsonl.gz", user.folder / "share.json"
    row = json.dumps({"messages": talk("role", "content")}) + "\n"
    one.write_bytes(gzip.compress(row.encode() * 8))
    two.write_text(json.dumps([{"conversations": talk("from", "value")}] * 8))
    printed = " ".join(user.mrl("check", *user.recipe("run"), f"data.path=[{one}, {two}]").split())
    assert "16 prompts from `messages` and ShareGPT, `conversations`" in printed
    return "16 prompts from `messages` and ShareGPT"


@thing("Some of my prompts are too long.")
def overlong(user: User) -> str:
    rows = [*first_char_rows(16, 0), {"prompt": "a" * 5000}]
    file = user.write("rows.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    more = [*user.recipe("run"), f"data.path={file}"]
    refused = " ".join(user.mrl("check", *more, code=2).split())
    assert f"{file}:17: prompt has" in refused
    assert "data.overlong" in refused
    left_out = " ".join(user.mrl("check", *more, "data.overlong=filter").split())
    assert "16 prompts from `prompt` (string), 1 too long and left out" in left_out
    cut = " ".join(user.mrl("check", *more, "data.overlong=truncate_left").split())
    assert "17 prompts from `prompt` (string), 1 cut at the beginning" in cut
    return "refused by row; filter leaves 1 out; truncate_left cuts 1"


@thing("I give a hub id on a machine without a network.")
def hub_offline(user: User) -> str:
    more = [*user.recipe("run"), "data.path=nobody/has-this"]
    printed = " ".join(user.mrl("check", *more, code=2, HF_HUB_OFFLINE="1").split())
    assert "as a data set of the Hugging Face hub it" in printed
    return printed

"""Every form of file gives the same rows, and a bad one is named by file and row."""

import csv
import gzip
import importlib.util
import json
import os
import socket
import sys

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mrl.config import DataConfig, SourceConfig
from mrl.data.files import read_all_rows
from mrl.data.reader import read_prompts, read_sources
from mrl.errors import InputError
from mrl.toy_model import build_tokenizer

ROWS = [{"prompt": f"p{i}", "answer": str(i)} for i in range(5)]


def write_lines(path, rows=ROWS):
    data = "".join(json.dumps(row) + "\n" for row in rows).encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


def write_csv(path, rows=ROWS, delimiter=","):
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), delimiter=delimiter)
        writer.writeheader()
        writer.writerows(rows)
    return path


def write_parquet(path, rows=ROWS):
    pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=2)
    return path


def write_saved(folder, rows=ROWS):
    """Write what `save_to_disk` of `datasets` writes; test_a_folder_of_datasets has the real one."""
    folder.mkdir(parents=True)
    table = pa.Table.from_pylist(rows)
    names = []
    for number, part in enumerate((table.slice(0, 2), table.slice(2))):
        names.append(f"data-{number:05}-of-00002.arrow")
        with pa.ipc.new_stream(str(folder / names[-1]), table.schema) as stream:
            stream.write_table(part)
    (folder / "state.json").write_text(
        json.dumps({"_data_files": [{"filename": name} for name in names], "_split": "train"})
    )
    (folder / "dataset_info.json").write_text("{}")
    return folder


def write_all(tmp_path):
    array = tmp_path / "rows.json"
    array.write_text(json.dumps(ROWS, indent=1))
    return {
        "jsonl": write_lines(tmp_path / "rows.jsonl"),
        "gz": write_lines(tmp_path / "more.jsonl.gz"),
        "array": array,
        "json lines": write_lines(tmp_path / "lines.json"),
        "csv": write_csv(tmp_path / "rows.csv"),
        "tsv": write_csv(tmp_path / "rows.tsv", delimiter="\t"),
        "parquet": write_parquet(tmp_path / "rows.parquet"),
        "saved": write_saved(tmp_path / "saved"),
    }


def rows_of(*paths, **more):
    return [row for _, row in read_all_rows(paths, **more)]


def test_every_form_gives_the_same_rows(tmp_path):
    for name, path in write_all(tmp_path).items():
        assert rows_of(path) == ROWS, name


def test_sources_tell_where_a_row_is(tmp_path):
    files = write_all(tmp_path)
    last = {name: list(read_all_rows([path]))[-1][0] for name, path in files.items()}
    assert last["jsonl"] == f"{files['jsonl']}:5"
    assert last["csv"] == f"{files['csv']}:6"  # the header is line 1
    for name in ("array", "parquet", "saved"):
        assert last[name] == f"{files[name]} row 5"


def test_globs_and_lists_are_read_in_order(tmp_path):
    for number in (2, 0, 1):
        write_lines(tmp_path / f"part{number}.jsonl", [{"prompt": f"{number}"}])
    first = [{"prompt": "0"}, {"prompt": "1"}, {"prompt": "2"}]
    assert rows_of(tmp_path / "part*.jsonl") == first
    assert rows_of(tmp_path / "part2.jsonl", tmp_path / "part*.jsonl") == [first[2], *first]
    with pytest.raises(InputError, match=r"gone\*\.jsonl: no file has such a name"):
        rows_of(tmp_path / "gone*.jsonl")


def test_a_folder_with_splits(tmp_path):
    write_saved(tmp_path / "all" / "train")
    write_saved(tmp_path / "all" / "test", ROWS[:3])
    (tmp_path / "all" / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    assert rows_of(tmp_path / "all") == ROWS
    assert rows_of(tmp_path / "all", split="test") == ROWS[:3]
    with pytest.raises(InputError, match="no split 'dev', it has train, test"):
        rows_of(tmp_path / "all", split="dev")
    with pytest.raises(InputError, match="not a folder written by save_to_disk"):
        rows_of(tmp_path)


def test_a_split_of_data_without_splits_is_refused(tmp_path):
    write_lines(tmp_path / "a.jsonl")
    write_saved(tmp_path / "plain")
    for path in (tmp_path / "a.jsonl", tmp_path / "*.jsonl", tmp_path / "plain"):
        assert rows_of(path) == ROWS
        with pytest.raises(InputError, match=r"got the split 'test', but .* no splits; leave"):
            rows_of(path, split="test")
    with pytest.raises(InputError, match="tasks of an environment have no splits"):
        list(read_all_rows(["environment:tasks"], split="test", tasks=lambda: ROWS))
    state = tmp_path / "plain/state.json"
    state.write_text(json.dumps({**json.loads(state.read_text()), "_split": "test"}))
    assert rows_of(tmp_path / "plain", split="test") == ROWS  # it was saved from this split


def test_a_subset_of_data_that_is_not_on_the_hub_is_refused(tmp_path):
    write_lines(tmp_path / "a.jsonl")
    write_saved(tmp_path / "plain")
    for path in (tmp_path / "a.jsonl", tmp_path / "*.jsonl", tmp_path / "plain"):
        with pytest.raises(InputError, match=r"got the subset 'main', but only .* hub has subsets"):
            rows_of(path, subset="main")
    with pytest.raises(InputError, match="environment:tasks: got the subset 'main'"):
        list(read_all_rows(["environment:tasks"], subset="main", tasks=lambda: ROWS))


def test_csv_keeps_text_as_it_is(tmp_path):
    rows = [
        {"prompt": 'two\nlines, "quoted"', "answer": ""},
        {"prompt": "x" * 200_000, "answer": "é"},
    ]
    path = write_csv(tmp_path / "rows.csv", rows)
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())  # as Excel writes it
    assert rows_of(path) == rows
    assert [source for source, _ in read_all_rows([path])] == [f"{path}:2", f"{path}:4"]


def test_values_of_parquet_become_what_json_holds(tmp_path):
    import datetime
    import decimal

    row = {
        "prompt": [{"role": "user", "content": "hi", "tool_calls": None}],
        "when": datetime.date(2026, 1, 2),
        "price": decimal.Decimal("1.50"),
        "image": b"\x00\xff",
        "__index_level_0__": 7,
        "nested": {"ids": [1, 2]},
    }
    (got,) = rows_of(write_parquet(tmp_path / "rows.parquet", [row]))
    assert json.loads(json.dumps(got)) == got
    assert (got["when"], got["price"], got["image"]) == ("2026-01-02", "1.50", "AP8=")
    assert got["nested"] == {"ids": [1, 2]}
    assert "__index_level_0__" not in got


CUT_GZIP = gzip.compress(b'{"prompt": "a"}\n' * 99, mtime=0)[:-12]
"""No time is written into it, because the ids of the cases below must be the same in every worker."""


@pytest.mark.parametrize(
    ("name", "data", "reason"),
    [
        ("a.jsonl.gz", CUT_GZIP, "not a whole gzip file"),
        ("a.jsonl.gz", b'{"prompt": "a"}\n', "not a whole gzip file"),
        ("a.json", b'[{"prompt": "a"}, 3]', "row 2: expected a JSON object, got a number"),
        ("a.json", b'[{"prompt": "a"}, ', "not valid JSON"),
        ("a.json", b"[]", "no rows"),
        ("a.csv", b"prompt,answer\na,1\nb\n", ":3: 1 cells, the header has 2: prompt, answer"),
        (
            "a.csv",
            b"prompt,prompt\na,1\n",
            ":1: got the columns prompt, prompt, expected each once",
        ),
        ("a.csv", b"prompt\n\xff\n", "not UTF-8"),
        ("a.jsonl", b'{"prompt": "\xed\xbb\xbf"}\n', "not UTF-8"),  # half of a surrogate pair
        ("a.csv", b"prompt\n", "no rows"),
        ("a.parquet", b"PAR1 no", "not readable as parquet"),
    ],
)
def test_a_bad_file_is_one_line(tmp_path, name, data, reason):
    path = tmp_path / name
    path.write_bytes(data)
    with pytest.raises(InputError) as caught:
        rows_of(path)
    assert str(caught.value).startswith(str(path))
    assert reason in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_column_that_is_twice_in_a_parquet_file_is_refused(tmp_path):
    """Python would keep the last one of each."""
    path = tmp_path / "rows.parquet"
    texts = pa.array(["a"])
    for names, said in ((["prompt", "prompt"], "the columns prompt, prompt"),
                        (["prompt", "info"], "in element the keys x, x")):  # fmt: skip
        pair = pa.struct([("x", pa.int32()), ("x", pa.int32())])
        second = texts if names[1] == "prompt" else pa.array([None], pa.list_(pair))
        pq.write_table(pa.table([texts, second], names=names), path)
        with pytest.raises(InputError) as caught:
            rows_of(path)
        assert str(caught.value) == f"{path}: got {said}, expected each once"


def test_what_is_no_file_is_refused_before_it_is_opened(tmp_path):
    """A FIFO would be waited for until somebody writes."""
    os.mkfifo(tmp_path / "fifo.jsonl")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "socket"))
    for path, kind in (("fifo.jsonl", "a FIFO"), ("socket", "a socket"), ("/dev/zero", "a device")):
        with pytest.raises(InputError) as caught:
            rows_of(tmp_path / path)
        assert str(caught.value).startswith(f"{tmp_path / path}: got {kind}, expected a file")


def test_a_missing_package_names_the_extra(tmp_path, monkeypatch):
    path = write_parquet(tmp_path / "rows.parquet")
    for name in ("pyarrow", "datasets"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(InputError, match=r"package pyarrow; pip install 'mrl\[data\]'"):
        rows_of(path)
    with pytest.raises(InputError, match=r"gone/away: .* needs the package datasets; pip install"):
        rows_of("gone/away")


def test_a_path_that_is_nowhere(tokenizer):
    with pytest.raises(InputError, match=r"gone/a\.jsonl: No such file"):
        read_prompts("gone/a.jsonl", tokenizer, max_prompt_len=9)


@pytest.mark.release
@pytest.mark.skipif(
    importlib.util.find_spec("datasets") is None, reason="datasets is not installed"
)
def test_a_folder_of_datasets_and_a_hub_id_without_a_network(tmp_path, monkeypatch):
    """Folders as the package itself writes them, in pieces, with splits and chosen rows."""
    import datasets

    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    lines = write_lines(tmp_path / "rows.jsonl")
    whole = datasets.Dataset.from_json(str(lines), cache_dir=str(tmp_path / "cache"))
    whole.save_to_disk(str(tmp_path / "one"), num_shards=2)
    odd = whole.select([1, 3])
    datasets.DatasetDict({"train": whole, "test": odd}).save_to_disk(str(tmp_path / "both"))
    assert rows_of(tmp_path / "one") == ROWS
    assert rows_of(tmp_path / "both", split="test") == ROWS[1::2]
    with pytest.raises(InputError, match="cannot be loaded") as caught:
        rows_of("nobody/has-this")
    assert "\n" not in str(caught.value)


def test_sources_without_names_take_none_that_is_given(tmp_path) -> None:
    paths = [tmp_path / name / "train.jsonl" for name in "abc"]
    for path in paths:
        path.parent.mkdir()
        path.write_text('{"prompt": "a"}\n')
    names = (None, None, "train.jsonl_2")
    sources = tuple(
        SourceConfig(path=str(path), name=name) for path, name in zip(paths, names, strict=True)
    )
    config = DataConfig(sources=sources)
    found = read_sources(config, build_tokenizer(), max_prompt_len=10, max_response_len=0)
    assert [source.name for source in found] == ["train.jsonl", "train.jsonl_3", "train.jsonl_2"]


def test_a_quote_that_is_never_closed_hides_no_rows(tmp_path) -> None:
    file = tmp_path / "rows.csv"
    file.write_text('prompt,answer\na,1\nb,"2\nc,3\nd,4\n')
    with pytest.raises(InputError, match=r"rows.csv:3: not valid CSV: unexpected end of data"):
        list(read_all_rows([file]))
    (tmp_path / "rows.tsv").write_text('prompt\tanswer\n"Yes" she said\t1\n')
    with pytest.raises(InputError, match=r"rows.tsv:2: not valid CSV: .*double the quotes in it"):
        list(read_all_rows([tmp_path / "rows.tsv"]))


@pytest.mark.parametrize(
    ("values", "of_type"),
    [
        ([0, 10**18], pa.timestamp("us")),
        ([0, 10**8], pa.date32()),
        ([0, 1], pa.timestamp("us", tz="Mars/Phobos")),
    ],
)
def test_a_date_that_python_lacks_is_refused_with_its_row(values, of_type, tmp_path) -> None:
    width = pa.int32() if of_type == pa.date32() else pa.int64()
    column = pa.array(values, width).cast(of_type)
    pq.write_table(pa.table({"prompt": ["a", "b"], "day": column}), tmp_path / "rows.parquet")
    row = 1 if of_type == pa.timestamp("us", tz="Mars/Phobos") else 2
    with pytest.raises(
        InputError, match=f"row {row}: column 'day' has a value that cannot be read"
    ):
        list(read_all_rows([tmp_path / "rows.parquet"]))


@pytest.mark.parametrize(
    "text", ["{}", "[]", '{"_data_files": null}', '{"_data_files": [{}]}', "3", '{"splits": 1}']
)
def test_a_damaged_folder_of_datasets_is_named(text, tmp_path) -> None:
    for name in ("state.json", "dataset_dict.json"):
        (tmp_path / name).write_text(text)
        with pytest.raises(InputError, match=f"{name}: not what save_to_disk writes"):
            list(read_all_rows([tmp_path]))


def test_the_suffix_decides_in_any_case_and_a_part_of_a_folder_is_no_file(tmp_path) -> None:
    assert [row for _, row in read_all_rows([write_csv(tmp_path / "rows.CSV")])] == ROWS
    (tmp_path / "part.arrow").write_bytes(b"\xff\xff\xff\xff")
    with pytest.raises(InputError, match="give the folder that save_to_disk wrote"):
        list(read_all_rows([tmp_path / "part.arrow"]))

"""A file is there whole, or as it was before."""

from pathlib import Path

import pytest

from mrl.system.files import replaced, write_whole


@pytest.mark.parametrize(
    "content", ["söme text\n", "söme text\n".encode(), ["söme ".encode(), b"text\n"]]
)
@pytest.mark.parametrize("durable", [False, True])
def test_text_bytes_and_lines(tmp_path: Path, content, durable) -> None:
    file = tmp_path / "step_000001.jsonl"
    file.write_text("before")
    write_whole(file, content, durable=durable)
    assert file.read_text() == "söme text\n"
    assert list(tmp_path.iterdir()) == [file]


def test_a_reader_never_sees_a_part_of_it(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    file.write_text("before")

    def lines():
        yield b"first\n"
        assert file.read_text() == "before"
        yield b"second\n"

    write_whole(file, lines())
    assert file.read_text() == "first\nsecond\n"


def test_a_failure_keeps_what_was_there_and_leaves_no_partial_output(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    file.write_text("before")

    def lines():
        yield b"first\n"
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_whole(file, lines())
    with pytest.raises(ZeroDivisionError), replaced(file) as partial:
        print(1 / partial.write_text(""))
    assert [(f.name, f.read_text()) for f in tmp_path.iterdir()] == [("metrics.jsonl", "before")]


def test_leftovers_of_a_killed_write_are_not_taken_for_files_of_a_step(tmp_path: Path) -> None:
    file = tmp_path / "step_000001.jsonl"
    with replaced(file) as partial:
        partial.write_text("half")
        assert not list(tmp_path.glob("step_*"))


def test_durable_content_is_on_the_disk_before_the_name(tmp_path: Path, monkeypatch) -> None:
    events: list[tuple[str, bool]] = []
    file = tmp_path / "latest"
    monkeypatch.setattr(
        "mrl.system.files.sync", lambda path: events.append((path.name, file.exists()))
    )
    write_whole(file, "7\n", durable=True)
    assert events == [(".latest.partial", False), (tmp_path.name, True)]
    write_whole(file, "8\n")
    assert len(events) == 2

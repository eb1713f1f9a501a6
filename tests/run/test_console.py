import io
import math
import os
import re

import pytest
from rich.console import Console

from mrl.run import console

HOSTILE = "\x1b[2J\x1b]0;owned\x07\r\x9b31m\u202egnp\u2028[red]a\nb\tc\ud800"


def capture(**options):
    return Console(file=io.StringIO(), width=80, markup=False, highlight=False, **options)


def text_of(terminal):
    return terminal.file.getvalue()


def test_escape_leaves_nothing_that_steers_a_terminal():
    safe = console.escape(HOSTILE)
    assert safe == ("\\x1b[2J\\x1b]0;owned\\x07\\x0d\\x9b31m\\u202egnp\\u2028[red]a\\nb\\tc\\ud800")
    assert console.escape("é 漢字 🙂 [x]") == "é 漢字 🙂 [x]"


METRICS = {
    "step": 0,
    "reward/mean": 0.25,
    "response_len/mean": 32.0,
    "loss/total": -1.5e-3,
    "grad_norm": 0.75,
    "mismatch/logprob_abs_max": 1.25e-5,
    "routing/disagreement": 0.01,
    "time/step_s": 1.5,
}


def test_logs_are_plain_and_escaped():
    log = capture()
    sample = {"prompt": HOSTILE, "completion": HOSTILE * 99, "reward": 0.5}
    console.pairs([("model", HOSTILE), ("ranks", "2")], console=log)
    console.step_line(METRICS, num_steps=110, console=log)
    console.warning(HOSTILE, console=log)
    with console.progress("load the model", console=log):
        pass
    console.summary([0.1, 0.2], sample, sample, "runs/x", "mrl eval runs/x", console=log)
    shown = text_of(log)
    assert all(char == "\n" or char.isprintable() for char in shown)
    for part in ("ranks", "1/110", "0.2500", "best sample, reward 0.5000", "runs/x", "[red]a\\nb"):
        assert part in shown


def test_a_session_without_a_router_loss_shows_its_loss():
    log = capture()
    console.step_line({"step": 3, "loss/policy": 2.5, "grad_norm": 0.75}, console=log)
    assert "2.500e+00" in text_of(log)


def test_a_terminal_gets_no_code_of_the_sample():
    terminal = capture(force_terminal=True)
    console.summary([0.5], {"completion": HOSTILE, "reward": 1}, {}, "r", "n", console=terminal)
    assert "\x1b" in text_of(terminal)  # rich's own bold
    for code in ("\x1b[2J", "\x1b]0", "\x9b", "\u202e", "\r"):
        assert code not in text_of(terminal)


def test_step_lines_align_and_say_what_is_off():
    log = capture()
    console.step_line(METRICS, num_steps=110, console=log)
    off = {"step": 99, "reward/mean": math.nan, "response_len/mean": 1024.0}
    console.step_line(off, num_steps=110, console=log)
    head, first, second = text_of(log).splitlines()
    assert len(head) == len(first) == len(second)
    assert head.split()[:3] == ["step", "done", "reward"]
    assert second.split() == ["99", "100/110", "nan", "1024.0", "-", "-", "-", "-", "-"]


def test_the_last_step_says_that_all_are_done():
    log = capture()
    for step in range(5):
        console.step_line(METRICS | {"step": step}, num_steps=5, console=log)
    counted = [line.split()[:2] for line in text_of(log).splitlines()[1:]]
    assert counted == [[str(step), f"{step + 1}/5"] for step in range(5)]


def test_the_first_line_of_a_start_has_the_heading_above_it():
    log = capture()
    for step in (7, 8):
        step_metrics = METRICS | {"step": step}
        console.step_line(step_metrics, num_steps=9, is_first=step == 7, console=log)
    assert [line.split()[0] for line in text_of(log).splitlines()] == ["step", "7", "8"]


def test_numbers_of_any_size_stay_in_their_columns():
    """A reward of 1e38 has 39 digits before the point."""
    rows = []
    for value in (0.5, 1e38, -3.4e38, 12345678.0, -1e308, 1e-300):
        log = Console(file=io.StringIO(), width=console.LOG_WIDTH)
        metrics = {key: value for key, _, _ in console.COLUMNS if key != "time/timestamp"}
        console.step_line({"step": 1, **metrics}, num_steps=9, console=log)
        rows.append(text_of(log).rstrip("\n"))
    assert len(set(map(len, rows))) == 1, rows
    assert "1e+38" in rows[1]


def test_a_log_has_the_columns_that_a_narrow_terminal_has_no_room_for():
    log = Console(file=io.StringIO(), width=console.LOG_WIDTH)
    more = {
        "response_len/max": 64.0,
        "response_len/truncated": 0.125,
        "throughput/step_tokens_per_s": 1234.5,
        "throughput/mfu": 0.41,
        "time/timestamp": 0.0,
    }
    console.step_line(METRICS | more, num_steps=110, console=log)
    console.step_line(METRICS | {"step": 1}, num_steps=110, console=log)
    head, full, off = text_of(log).splitlines()
    assert len(head) == len(full) == len(off)
    assert head.split()[-4:] == ["tokens/s", "MFU", "s/step", "time"]
    assert {"64", "0.1250", "1234.5", "0.4100"} <= set(full.split())
    assert re.search(r" \d\d:\d\d:00$", full)
    narrow = capture()
    console.step_line(METRICS | more, num_steps=110, console=narrow)
    assert max(map(len, text_of(narrow).splitlines())) <= 80


def test_progress_without_a_terminal_is_two_lines_and_one_on_failure():
    log = capture()
    with console.progress("start", console=log):
        pass
    with pytest.raises(KeyError), console.progress("fail", console=log):
        raise KeyError
    first, second, third = text_of(log).splitlines()
    assert (first, third) == ("start ...", "fail ...")
    assert second.startswith("start: 0.")


def test_the_progress_of_a_tenant_has_its_name():
    log = capture()
    with console.progress("loading the model", name="ann", console=log):
        pass
    first, second = text_of(log).splitlines()
    assert first == "ann: loading the model ..."
    assert second.startswith("ann: loading the model: 0.")


@pytest.mark.parametrize("unicode", [True, False])
@pytest.mark.parametrize("width", [12, 40, 100])
def test_curve_rises_and_fits(width, unicode):
    lines = console.curve([i / 300 for i in range(300)], width=width, unicode=unicode)
    assert len(lines) == console.PLOT_HEIGHT + 1
    assert max(map(len, lines)) <= width
    filled = [len(line.split("┤" if unicode else "|")[1].strip()) for line in lines[:-1]]
    assert filled == sorted(filled)
    assert all(ord(c) < 128 for line in lines for c in line) or unicode


def test_curve_of_little():
    assert console.curve([], width=40) == []
    assert console.curve([math.nan, math.inf], width=40) == []
    (bar,) = {line.split("┤")[1] for line in console.curve([0.5], width=40)[4:8]}
    assert bar == "█"
    flat = console.curve([2.0] * 5, width=40)
    assert flat[7].endswith("┤█████")
    assert [line.split("┤")[0].strip() for line in flat[:8]] == [""] * 4 + ["2"] + [""] * 3
    gap = console.curve([1.0, math.nan, 2.0], width=40)
    assert gap[7].split("┤")[1][1] == " "


def test_an_ascii_terminal_gets_ascii():
    raw = io.BytesIO()
    file = io.TextIOWrapper(raw, encoding="ascii")
    log = Console(file=file, width=80, markup=False)
    console.summary([0.1, 0.9], {"prompt": "漢", "reward": 1}, {}, "r", "n", console=log)
    file.flush()
    assert b"\\u6f22" in raw.getvalue()
    assert b"#" in raw.getvalue()


@pytest.mark.parametrize(("width", "lines"), [(80, 3), (1000, 2)])
def test_a_disaggregated_run_says_who_waits(width, lines):
    waits = {
        "time/batch_wait_s": 0.6, "async/rollout_idle_share": 0.124, "async/queued_groups": 3.0,
        "async/trainer_idle_share": 0.4, "time/engine_bound_s": 0.2, "time/engine_weights_s": 0.1,
    }  # fmt: skip
    log = capture()
    log.width = width
    console.step_line(METRICS | waits, num_steps=110, console=log)
    shown = text_of(log)
    assert len(shown.splitlines()) == lines
    assert "  rollout idle 12% (bound), trainer waits 40%, queue 3\n" in shown
    assert all(len(line) <= width for line in shown.splitlines())
    nothing = waits | {"async/rollout_idle_share": math.nan, "time/engine_bound_s": 0.0}
    assert console.who_waits(nothing | {"time/engine_weights_s": 0.0}).startswith(
        "rollout idle -, trainer waits 40%"
    )


def test_a_prompt_of_messages_is_printed_as_a_conversation() -> None:
    log = Console(file=io.StringIO(), width=100)
    prompt = [
        {"role": role, "content": f"text {i}"}
        for i, role in enumerate(("system", "user", "assistant", "user"))
    ]
    sample = {"prompt": prompt, "completion": "=\n5", "reward": 1.0}
    console.summary([0.5], sample, sample, "r", "n", console=log)
    assert isinstance(log.file, io.StringIO)
    lines = log.file.getvalue().splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("best sample"))
    assert [line.split() for line in lines[start + 1 : start + 6]] == [
        ["(1", "earlier", "turns)"],
        ["user", "text", "1"],
        ["assistant", "text", "2"],
        ["user", "text", "3"],
        ["assistant", "=\\n5"],
    ]


@pytest.mark.parametrize("is_quantized", [True, False])
def test_a_step_says_what_its_quantised_engine_adds_to_the_gap(is_quantized) -> None:
    """A dim line after that of the step; a step without a decomposition has none."""
    gaps = {"none": 0.1, "ids": 0.066, **({"quantized": 0.036} if is_quantized else {})}
    measured = {f"decompose/{level}/logprob_abs_mean": gap for level, gap in gaps.items()}
    log = capture()
    console.step_line(METRICS | measured | {"step": 1}, console=log)
    console.step_line(METRICS | {"step": 2}, console=log)
    lines = text_of(log).splitlines()
    assert len(lines) == 2 + is_quantized
    assert ("0.03 from the engine's quantised weights (quantization)" in lines[1]) == is_quantized


def test_a_gap_that_is_not_finite_is_not_split() -> None:
    levels = {"none": 0.1, "ids": math.nan, "quantized": 0.03}
    assert (
        console.gap_by_cause({f"decompose/{k}/logprob_abs_mean": v for k, v in levels.items()})
        == ""
    )


@pytest.mark.parametrize("width", [20, 80, 120, 1000])
def test_a_table_is_never_cut_off(width) -> None:
    """A number without its last digits or its exponent would be read as another number."""
    header = ("layer", "reroute", "margin", "at reroute", "worst expert", "its z", "its mean |d|",
              "median expert", "hidden diff", "gap without")  # fmt: skip
    row = (
        "12",
        "12.34%",
        "0.123",
        "1.23e-05",
        "103",
        "12.3",
        "3.21e-05",
        "0.00123",
        "1e-07",
        "4e-6",
    )
    log = Console(file=io.StringIO(), width=width)
    console.table("Layers", header, [row], console=log)
    shown = text_of(log)
    assert all(cell in shown for cell in (*header, *row))
    assert len(shown.splitlines()) == 4


def test_only_a_long_last_cell_wraps() -> None:
    log = capture()
    console.table("Findings", ("finding", "text"), [("noise", "words " * 40)], console=log)
    assert max(map(len, text_of(log).splitlines())) <= 80
    assert text_of(log).count("words") == 40


def test_a_reader_that_leaves_a_table_ends_the_command_as_one_that_leaves_a_line(
    monkeypatch,
) -> None:
    """rich itself would exit with code 1, without a message."""
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w") as pipe:
        monkeypatch.setattr("sys.stdout", pipe)
        with pytest.raises(BrokenPipeError):
            console.table("Layers", ("layer",), [("1",)])
        os.dup2(os.open(os.devnull, os.O_WRONLY), write)

"""The outcome at the top of a run's page, and the page of several runs."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from mrl.cli import main
from mrl.errors import InputError
from mrl.run.rollout_rows import conversation
from mrl.view.compare import collect_comparison
from mrl.view.outcome import Totals, best_and_worst, figures, read_evaluations, with_evaluations
from tests.view.invented import HOSTILE, write_run

SCORE = "eval/sums/avg@4"


def evaluation(step: int, score: float | None, error: float | None) -> str:
    row = {"step": step, SCORE: score, f"{SCORE}_stderr": error, "eval/sums/pass@1": 0.9}
    return json.dumps(row)


def write_evaluations(run: Path) -> None:
    (run / "evals").mkdir()
    (run / "evals/step_000000.json").write_text(evaluation(0, 0.25, 0.05))
    (run / "evals/step_000005.json").write_text(evaluation(5, 0.75, 0.1))


def test_figures_are_of_the_ends_and_of_each_set(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    write_evaluations(run)
    notes: list[str] = []
    evaluations = read_evaluations(run, notes)
    rows = [
        {"step": i, "reward/mean": float(i), "mismatch/logprob_abs_mean": 1e-3 * i,
         "mismatch/logprob_abs_max": 1e-2 * i}
        for i in range(12)
    ]  # fmt: skip
    reward, score, mismatch = figures(Totals(rows), evaluations)
    assert reward == ("mean reward of the last 5 steps", "9", "2 of the first 5 steps")
    assert score.name == "sums, avg@4, 95% interval"
    assert score.value == "0.75 \u00b1 0.196"
    assert score.detail == "after 5 steps; 0.25 \u00b1 0.098 before the first step"
    assert mismatch.value == "5.5e-03"
    assert mismatch.detail == "mean of all steps; 1.1e-01 at most"
    assert notes == []


def test_the_evaluation_of_the_final_weights_has_a_row_of_its_own() -> None:
    rows = [{"step": 0, "loss": 1.0}, {"step": 1, "loss": 0.5}]
    evaluations = [{"step": 0, SCORE: 0.1}, {"step": 2, SCORE: 0.3}]
    assert with_evaluations(rows, evaluations) == [*rows, {"step": 2, SCORE: 0.3}]
    assert with_evaluations([], evaluations) == evaluations


@pytest.mark.parametrize(
    "text", ["{", "[]", "{}", '{"step": "x"}', '{"step": 1.5}', '{"step": Infinity}',
             '{"step": NaN}', '{"step": 1e300}'],
)  # fmt: skip
def test_a_damaged_evaluation_is_left_out_and_named(text: str, tmp_path: Path) -> None:
    (tmp_path / "evals").mkdir()
    (tmp_path / "evals/step_000003.json").write_text(text)
    notes: list[str] = []
    assert read_evaluations(tmp_path, notes) == []
    assert notes[0].startswith("The evaluation step_000003.json is left out: it ")


def test_scores_that_are_not_numbers_are_dashes() -> None:
    (figure,) = figures(Totals([{"step": 0}]), [{"step": 0, SCORE: None}])
    assert (figure.value, figure.detail) == ("\u2013", "no finite score")
    assert figures(Totals(), []) == []
    assert figures(Totals([{"step": 0, "reward/mean": float("nan")}]), []) == []


def test_best_and_worst_are_of_the_newest_step_with_rewards(tmp_path: Path) -> None:
    folder = tmp_path / "rollouts"
    folder.mkdir()

    def write(step: int, rewards: list[float | None]) -> None:
        rows = [
            {"prompt": f"p{i}", "completion": "x" * 4000, "reward": reward}
            for i, reward in enumerate(rewards)
        ]
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / f"step_{step:06d}.jsonl").write_text(text)

    assert best_and_worst(tmp_path) == []
    write(1, [0.0, 1.0, 0.5, 0.25])
    write(2, [None, None])
    found = best_and_worst(tmp_path)
    names = [(each["name"], each["reward"], each["turns"][0]) for each in found]
    assert names == [
        ("best", "1", ("prompt", "p1")),
        ("best", "0.5", ("prompt", "p2")),
        ("worst", "0", ("prompt", "p0")),
        ("worst", "0.25", ("prompt", "p3")),
    ]
    assert all(len(each["turns"][1][1]) < 1600 for each in found)
    write(3, [0.5, 0.5])  # nothing is better than anything else
    assert [each["name"] for each in best_and_worst(tmp_path)] == ["worst", "worst"]
    (folder / "step_000004.jsonl").write_text("{\n")
    assert best_and_worst(tmp_path) == []


def write_rewards(run: Path, name: str, rewards: list[tuple[str, float]]) -> None:
    rows = [{"prompt": prompt, "completion": "", "reward": reward} for prompt, reward in rewards]
    (run / "rollouts").mkdir(exist_ok=True)
    (run / "rollouts" / name).write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_the_newest_step_has_the_largest_number(tmp_path: Path) -> None:
    write_rewards(tmp_path, "step_999999.jsonl", [("p", 0.0)])
    write_rewards(tmp_path, "step_1000000.jsonl", [("p", 0.0)])
    write_rewards(tmp_path, "step_old.jsonl", [("p", 0.0)])
    assert [each["step"] for each in best_and_worst(tmp_path)] == [1_000_000]


@pytest.mark.parametrize(
    ("rewards", "best", "worst"),
    [
        ([("a", 0.0), ("a", 1.0), ("b", 1.0)], ["1", "1"], ["0"]),
        ([("a", 0.0), ("b", 1.0)], ["1"], ["0"]),
        ([("a", 0.0), ("b", 0.5), ("c", 1.0)], ["1"], ["0", "0.5"]),
        ([("a", math.nan), ("b", 1.0), ("c", -math.inf), ("d", 0.0)], ["1"], ["0"]),
    ],
)
def test_the_best_sample_is_never_among_the_worst(
    rewards: list[tuple[str, float]], best: list[str], worst: list[str], tmp_path: Path
) -> None:
    write_rewards(tmp_path, "step_000000.jsonl", rewards)
    found = best_and_worst(tmp_path)
    assert [each["reward"] for each in found if each["name"] == "best"] == best
    assert [each["reward"] for each in found if each["name"] == "worst"] == worst


def test_conversations_keep_every_part_of_a_message() -> None:
    call = {"id": "1", "function": {"name": "add"}}
    prompt = [
        {"role": "system", "content": "be short"},
        {"role": "user", "content": [{"type": "text", "text": "two"}, {"type": "image"}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        "no message",
    ]
    turns = conversation(prompt, "five")
    assert turns[0] == ("system", "be short")
    assert turns[1] == ("user", 'two\n{"type": "image"}')
    assert json.loads(turns[2][1]) == [call]
    assert turns[3:] == [("", ""), ("assistant", "five")]
    assert conversation("ask", "tell") == [("prompt", "ask"), ("completion", "tell")]


def test_runs_are_compared(tmp_path: Path) -> None:
    first, second = write_run(tmp_path / "a/one"), write_run(tmp_path / "b/two", num_steps=3)
    write_evaluations(first)
    data = collect_comparison([first, second])
    assert data["names"] == ["one", "two"]
    charts = {chart["title"]: chart for chart in data["charts"]}
    assert charts["reward/mean"]["labels"] == ["one", "two"]
    assert charts[SCORE]["labels"] == ["one"]
    series = data["metrics"]["series"]
    assert len(series["reward/mean#0"]["v"]) == 5
    assert len(series["reward/mean#1"]["v"]) == 3
    assert data["metrics"]["units"]["reward/mean#1"] == "reward"
    assert ("train.num_steps", ["5", "3"]) in data["differences"]
    outcomes = dict(data["outcomes"])
    assert outcomes["sums, avg@4, 95% interval"][1] == "\u2013"
    assert any(note.startswith("one: ") for note in data["notes"])
    same_name = write_run(tmp_path / "b/one")
    assert collect_comparison([first, same_name])["names"] == [str(first), str(same_name)]


def test_odd_recipes_are_compared(tmp_path: Path) -> None:
    texts = ("1: 2\nrollout: {3: 4, null: 5}\n", "rollout: &all\n  all: *all\n", "1: 6\n")
    runs = [tmp_path / str(i) for i in range(len(texts))]
    for run, text in zip(runs, texts, strict=True):
        run.mkdir()
        (run / "config.yaml").write_text(text)
    data = collect_comparison(runs)
    assert ("1", ["2", "\u2013", "6"]) in data["differences"]
    assert ("rollout.3", ["4", "\u2013", "\u2013"]) in data["differences"]
    assert data["notes"] == ["1: config.yaml is nested too deeply."]


def test_steps_without_numbers_of_the_outcome_are_not_denied(tmp_path: Path) -> None:
    run, other, page = (
        write_run(tmp_path / "run"),
        write_run(tmp_path / "other"),
        tmp_path / "page.html",
    )
    for folder in (run, other):
        (folder / "metrics.jsonl").write_text('{"step": 0, "loss": 1.0}\n')
    for words in ([run], [run, other]):
        main(["view", *map(str, words), "--output", str(page)])
        outcome = page.read_text().split('id="outcome"')[1].split("</section>")[0]
        assert "No reward, evaluation or mismatch yet." in outcome


def test_notes_with_half_characters_are_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run\udcff"
    run.mkdir()
    (run / "metrics.jsonl").write_text('{"step": 0, "\\ud800": 1e200}\n')
    main(["view", str(run)])
    printed = capsys.readouterr().out
    assert "drawn as 1e+100: \\ud800" in printed
    assert "run\\udcff/view.html" in printed


def test_the_middle_of_a_long_conversation_is_left_out(tmp_path: Path) -> None:
    prompt = [{"role": "user", "content": f"turn {i}"} for i in range(5000)]
    (tmp_path / "rollouts").mkdir()
    row = {"prompt": prompt, "completion": "end", "reward": 1.0}
    (tmp_path / "rollouts/step_000000.jsonl").write_text(json.dumps(row) + "\n")
    (sample,) = best_and_worst(tmp_path)
    texts = [text for _, text in sample["turns"]]
    assert len(texts) == 21
    assert texts[0] == "turn 0"
    assert texts[10] == "[... 4981 turns ...]"
    assert texts[-2:] == ["turn 4999", "end"]


def test_an_error_that_is_not_finite_is_no_interval() -> None:
    (figure,) = figures(Totals(), [{"step": 0, SCORE: 0.5, f"{SCORE}_stderr": math.nan}])
    assert (figure.name, figure.value) == ("sums, avg@4", "0.5")
    (figure,) = figures(Totals(), [{"step": 0, SCORE: 0.5}, {"step": 1, SCORE: math.inf}])
    assert (figure.value, figure.detail) == ("0.5", "before the first step")


def test_what_cannot_be_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write_run(tmp_path / "run")
    with pytest.raises(InputError, match="given twice"):
        collect_comparison([run, tmp_path / "x" / ".." / "run"])
    with pytest.raises(InputError, match="is not a folder"):
        collect_comparison([run, tmp_path / "none"])
    (tmp_path / "service/tenants").mkdir(parents=True)
    (tmp_path / "service/service.yaml").touch()
    with pytest.raises(InputError, match="is the folder of a service; give the folders of its"):
        collect_comparison([run, tmp_path / "service"])
    with pytest.raises(InputError, match="9 runs: expected at most 8"):
        collect_comparison([run / str(i) for i in range(9)])
    with pytest.raises(SystemExit):
        main(["view", str(run), str(tmp_path), "--max-samples", "3"])
    assert "a comparison shows none" in capsys.readouterr().err


def test_hostile_names_and_texts_stay_texts(tmp_path: Path) -> None:
    run, other = write_run(tmp_path / "<script>alert(1)"), write_run(tmp_path / "other")
    for words in ([str(run)], [str(run), str(other)]):
        main(["view", *words, "--output", str(tmp_path / "page.html")])
        page = (tmp_path / "page.html").read_text()
        assert "<script>alert" not in page
        assert HOSTILE[0] not in page

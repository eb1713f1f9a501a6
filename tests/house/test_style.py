"""The counts of style.py are zero, and its rules catch what they are for."""

import pytest

from tests.house import style


def test_house_rules() -> None:
    broken = [line for lines in style.violations().values() for line in lines]
    assert not broken, "\n".join(broken)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("Return the rows of a rank.", True),
        ("A mesh is this rank's process groups.", True),
        ("The engine exits when its trainer dies.", True),
        ("Samples of the groups.", True),  # the first word may be a verb
        ("What each token is credited with.", True),
        ("Parts of samples on their way between ranks.", False),
        ("The scored groups of a plan, both on every rank.", False),
        ("Bytes to shared memory.", False),
    ],
)
def test_which_docstrings_have_a_verb(text, sentence) -> None:
    assert style.has_verb(text) == sentence


def test_prepositions() -> None:
    assert style.opens_with_preposition("Of two sides that compute in these.")
    assert style.opens_with_preposition("Where the bytes of the trainer are.")
    assert not style.opens_with_preposition("Offsets of the packed sequences.")


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("def f(groups: Mesh): ...", "process groups are a mesh"),
        ("class StepPlan: ...", "a plan is what preflight found"),
        ("warm_start = 1", "say sft"),
    ],
)
def test_names_that_the_glossary_replaced(tmp_path, monkeypatch, code, said) -> None:
    monkeypatch.setattr(style, "ROOT", tmp_path)
    (tmp_path / "file.py").write_text(code)
    assert [line for line in style.broken_names(tmp_path / "file.py") if said in line]

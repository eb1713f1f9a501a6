"""The names that mrl takes from inside SGLang and Megatron are there, in every supported release."""

from __future__ import annotations

import importlib.metadata
import re
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks.compat import __main__ as command
from benchmarks.compat.__main__ import MODULES, ROOT, lacks, unpacked
from benchmarks.compat.check import missing
from benchmarks.compat.imports import imported
from benchmarks.compat.source import Source
from mrl.engines.sglang import compat
from mrl.engines.sglang.names import NAMES
from mrl.errors import InputError
from mrl.preflight import releases as preflight
from mrl.system import releases
from mrl.system.releases import NEEDS_PYTHON, SUPPORTED, Name, newest, refusal
from parallel.versions import installed_version
from tests.release import release


def site_of(package: str) -> Path:
    """Return the folder in which the installed package is."""
    distribution = importlib.metadata.distribution(package)
    return Path(str(distribution.locate_file("")))


@pytest.mark.parametrize("package", SUPPORTED)
def test_the_installed_release_is_the_newest_supported_one_and_has_all_names(package: str) -> None:
    version = installed_version(package)
    assert version == newest(package)
    assert list(lacks(package, version, site_of(package))) == []


@release
@pytest.mark.parametrize(
    ("package", "version"), [(name, each) for name, known in SUPPORTED.items() for each in known]
)
def test_every_supported_release_has_all_names(package: str, version: str, tmp_path: Path) -> None:
    assert list(lacks(package, version, unpacked(package, version, tmp_path))) == []


def test_only_the_table_names_the_inside_of_sglang() -> None:
    files = [path for path in (ROOT / "mrl").rglob("*.py") if path.name != "names.py"]
    assert list(imported(files, MODULES["sglang"])) == []
    assert [path for path in files if "sglang.srt." in path.read_text()] == []


@pytest.mark.parametrize(
    ("name", "before", "after", "says"),
    [
        ("multinomial_with_seed", "", "s", "there is no sglang.srt.layers.sampler."),
        ("multinomial_with_seed", "logprobs", "logits", r"takes \(logits, seed, positions\)"),
        ("Sampler.forward", "class Sampler", "class Drawer", "there is no"),
    ],
)
def test_what_a_release_renames_is_named(
    name: str, before: str, after: str, says: str, tmp_path: Path
) -> None:
    path = "sglang/srt/layers/sampler.py"
    text = (site_of("sglang") / path).read_text()
    changed = text.replace(before, after) if before else text.replace(f"def {name}", f"def {name}s")
    for content, expected in ((text, 0), (changed, 1)):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(content)
        found = list(missing({name: NAMES[name]}, newest("sglang"), Source(tmp_path)))
        assert len(found) == expected
        for line in found:
            assert re.search(says, line)


def test_names_are_followed_through_imports_and_bases(tmp_path: Path) -> None:
    package = tmp_path / "lib" / "inner"
    package.mkdir(parents=True)
    (tmp_path / "lib/__init__.py").write_text(
        "from lib.inner import *\nfrom . import inner as other\n"
    )
    (package / "__init__.py").write_text(
        "from .parts import Base as Parent\nimport lib.inner.parts\n"
    )
    (package / "parts.py").write_text(
        "class Base:\n"
        "    kind: int = 0\n"
        "    def __init__(self, a, *, b=1, **rest):\n        self.a, self.b = a, b\n"
        "try:\n    from lib.gone import Thing\n"
        "except ImportError:\n    class Thing(Base):\n        pass\n"
    )
    source = Source(tmp_path)
    for path in ("lib.Parent.a", "lib.Parent.kind", "lib.other.Parent.b", "lib.inner.parts.Base"):
        assert source.find(path) is not None, path
    for path in (
        "lib.Parent.c",
        "lib.Nothing",
        "lib.gone.Thing",
        "other",
        "lib.inner.parts.Base.a.b",
    ):
        assert source.find(path) is None, path
    found = source.find("lib.Parent.__init__")
    assert found is not None
    assert found.arguments() == ["self", "a", "b", "**rest"]


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("def f(a): ...\ndef f(b): ...\n", ["b"]),  # the last definition counts
        ("def f(a): ...\ndel f\n", None),
        ("try:\n    from gone import f\nexcept ImportError:\n    def f(c): ...\n", ["c"]),
        ("def f(a): ...\nf = None\n", []),
    ],
)
def test_the_last_binding_of_a_name_counts(
    source: str, found: list[str] | None, tmp_path: Path
) -> None:
    (tmp_path / "lib.py").write_text(source)
    definition = Source(tmp_path).find("lib.f")
    assert (definition is None) == (found is None)
    assert definition is None or (definition.arguments() or []) == found
    (line,) = missing({"f": Name({"1": "lib.f"}, ("z",))}, "1", Source(tmp_path))
    assert ("no function" in line) == (found == [])


def test_a_name_has_the_path_of_the_newest_release_that_is_not_newer() -> None:
    name = Name({"0.5.12": "a.b", "0.5.20": "a.c", "0.5.22": ""})
    paths = {
        each: name.path(each) for each in ("0.5.9", "0.5.12.post1", "0.5.19", "0.5.20", "0.6.0")
    }
    assert list(paths.values()) == ["", "a.b", "a.b", "a.c", ""]


def test_other_releases_are_refused_with_the_one_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert not refusal("sglang", "0.5.23.post1")
    preflight.check_releases()
    for package, version in (
        ("sglang", "0.5.24"),
        ("sglang", "0.5.19"),
        ("megatron-core", "0.18.0"),
        ("megatron-core", "0.19.3"),
    ):
        monkeypatch.setattr(preflight, "installed_version", {package: version}.get)
        named = newest(package)
        expected = f"^{package} {version} is installed, .*: pip install '{package}=={named}'"
        with pytest.raises(InputError, match=expected):
            preflight.check_releases()
    monkeypatch.setattr(preflight, "installed_version", lambda package: None)
    preflight.check_releases()
    preflight.check_serves_adapters()
    monkeypatch.setattr(preflight, "installed_version", {"sglang": "0.5.12"}.get)
    with pytest.raises(InputError, match=r"lora.rollout=adapter: SGLang 0.5.12 is .* need 0.5.20"):
        preflight.check_serves_adapters()


def test_each_python_is_named_a_release_that_it_can_install() -> None:
    """pip finds no megatron-core above 0.16 for Python 3.11."""
    assert [newest("megatron-core", (3, minor)) for minor in (11, 12, 13)] == [
        "0.16.1", "0.19.2", "0.19.2",
    ]  # fmt: skip
    assert newest("sglang", (3, 11)) == SUPPORTED["sglang"][-1]
    assert all(release in SUPPORTED[package] for package, release in NEEDS_PYTHON)
    assert not any(refusal("megatron-core", each) for each in SUPPORTED["megatron-core"])


def test_the_installed_release_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The scheduler asks for names with every request, and reading metadata takes a millisecond."""
    compat.path_of("get_serving")
    monkeypatch.setattr(releases.importlib.metadata, "version", pytest.fail)
    assert compat.path_of("get_serving").endswith(".get_serving")


def test_a_download_that_died_and_one_beside_it_leave_the_release_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []

    def download(command: list[str], **_: object) -> SimpleNamespace:
        wheels = Path(command[command.index("--dest") + 1])
        wheels.mkdir()
        calls.append(command[-1])
        with zipfile.ZipFile(wheels / f"x-{len(calls)}.whl", "w") as archive:
            archive.writestr(f"sglang/only_{len(calls)}.py", "")
        if len(calls) == 1:
            raise KeyboardInterrupt
        if len(calls) == 2:  # another call is faster
            unpacked("sglang", "0.5.24", tmp_path)
        return SimpleNamespace(returncode=0, stderr="")

    monkeypatch.setattr(command.subprocess, "run", download)
    with pytest.raises(KeyboardInterrupt):
        unpacked("sglang", "0.5.12", tmp_path)
    folder = unpacked("sglang", "0.5.24", tmp_path)
    assert [each.name for each in folder.rglob("*.py")] == ["only_3.py"]
    assert [each.name for each in tmp_path.iterdir()] == ["sglang-0.5.24"]
    assert len(calls) == 3


def test_a_hook_on_a_name_that_the_release_lacks_is_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """SGLang logs it, and the engine's start fails with that line."""
    monkeypatch.setattr(releases, "_installed", lambda package: "0.5.12")
    with pytest.raises(ImportError, match=r"SGLang 0.5.12 has no _unload_lora_adapter; mrl works"):
        compat.hook("_unload_lora_adapter", print, "BEFORE")

"""The promises of the house: what the README and docs say, the packaging, and CI agree with the code."""

from __future__ import annotations

import os
import re
import tomllib
from pathlib import Path

import attrs
import pytest

from codalang.cli import main
from codalang.ir.types import Dtype
from codalang.parser import parse, read_source

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
README = (ROOT / "README.md").read_text()
LIBRARY = sorted((ROOT / "stdlib").glob("*.coda"))


def canonical(requirement: str) -> str:
    """A requirement's distribution name, as indexes compare names."""
    return re.sub(r"[-_.]+", "-", re.split(r"[<>=!~\[ ;]", requirement)[0]).lower()


def blocks(language: str, page: str = README) -> list[str]:
    """A page's fenced blocks of a language."""
    fenced = re.findall(r"^```(\w*)\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    return [text for name, text in fenced if name == language]


def test_every_package_is_packaged() -> None:
    folders = {path.parent for path in (ROOT / "codalang").rglob("*.py")}
    packages = {str(folder.relative_to(ROOT)).replace("/", ".") for folder in folders}
    assert set(PROJECT["tool"]["setuptools"]["packages"]) == packages | {"codalang.stdlib"}


def test_every_data_file_is_packaged() -> None:
    data = PROJECT["tool"]["setuptools"]["package-data"]
    for path in (ROOT / "codalang").rglob("*"):
        if path.is_file() and path.suffix not in (".py", ".pyc"):
            package = str(path.parent.relative_to(ROOT)).replace("/", ".")
            assert any(path.match(pattern) for pattern in data.get(package, [])), path


def test_every_dependency_is_pinned() -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = {canonical(line) for line in lines if "==" in line}
    wanted = PROJECT["project"]["dependencies"] + PROJECT["project"]["optional-dependencies"]["test"]
    assert {canonical(requirement) for requirement in wanted} <= pinned


def test_ci_runs_the_readme_s_test_command() -> None:
    commands = [line for line in (ROOT / ".ci/run").read_text().splitlines() if line.startswith("make")]
    assert commands == ["make test"]
    assert blocks("")[1].splitlines() == ["make demo", "make test"]


def test_the_readme_shows_the_example_and_its_real_backward(capsys: pytest.CaptureFixture[str]) -> None:
    example = ROOT / "examples/mlp.coda"
    assert main(["grad", str(example)]) == 0
    assert blocks("coda") == [example.read_text(), capsys.readouterr().out]


def test_the_readme_shows_the_example_s_real_picture(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["T=8192", "D=4096", "H=4096", "F=14336"]
    assert main(["graph", str(ROOT / "examples/mlp.coda"), "--backward", "--dims", *sizes]) == 0
    assert (ROOT / "docs/mlp.svg").read_text() == capsys.readouterr().out
    assert "](docs/mlp.svg)" in README


def test_the_readme_s_python_runs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(ROOT)
    (code,) = blocks("python")
    exec(compile(code, "README.md", "exec"), {})
    assert "program mlp_backward(" in capsys.readouterr().out


def test_the_readme_lists_the_commands_and_the_library(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    commands = re.findall(r"^    (\w+) ", capsys.readouterr().out, re.MULTILINE)
    assert commands == re.findall(r"^\| `codalang (\w+)", README, re.MULTILINE)
    assert sorted(re.findall(r"^\| \[`(\w+)`\]", README, re.MULTILINE)) == [path.stem for path in LIBRARY]


def test_the_language_s_page_has_the_library_s_signatures() -> None:
    """`GOLDEN=write` writes the table anew."""
    page = ROOT / "docs/language.md"
    head = "| `import` | epilogue | results |\n|---|---|---|\n"
    rows = [row for path in LIBRARY for row in _signatures(path)]
    before, _, after = page.read_text().partition(head)
    written, blank, rest = after.partition("\n\n")
    if os.environ.get("GOLDEN") == "write":
        page.write_text(before + head + "\n".join(rows) + blank + rest)
        return
    assert written.split("\n") == rows


def _signatures(path: Path) -> list[str]:
    """A row for each epilogue of a file."""
    rows = []
    for epilogue in parse(read_source(path)).epilogues.values():
        params, results = (
            ", ".join(
                f"{v.name}: {attrs.evolve(v.type, dtype=Dtype.F32).show(epilogue.dims)}"
                + (f": {v.dtype}" if v.dtype else "")
                for v in values
            )
            for values in (epilogue.params, epilogue.outputs)
        )
        rows.append(f"| `{path.stem}` | `{epilogue.name}({params})` | `{results}` |")
    return rows


def test_links_lead_somewhere() -> None:
    for page in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")):
        for target in re.findall(r"\]\(([^)#\s]+)\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name}: {target}"


@pytest.mark.parametrize("path", [p for p in LIBRARY if "\nepilogue " in p.read_text()], ids=lambda path: path.stem)
def test_the_standard_library_states_its_maths(path: Path) -> None:
    """A file opens with a comment that has a formula, and defines an epilogue of its own name."""
    comment = re.match(r"(#[^\n]*\n)+", path.read_text())
    assert comment is not None and " = " in comment[0]
    assert f"epilogue {path.stem}(" in path.read_text()


def test_architecture_names_every_file() -> None:
    """docs/architecture.md speaks of each module of the package, and of none that is not there."""
    text = (ROOT / "docs/architecture.md").read_text()
    package = ROOT / "codalang"
    files = {str(path.relative_to(package)) for path in package.rglob("*.py") if path.name != "__init__.py"}
    assert {path for path in files if f"`{path}`" not in text} == set()
    named = set(re.findall(r"`([a-z0-9_/]+\.py)`", text))
    assert {path for path in named if not (package / path).exists() and not (ROOT / path).exists()} == set()

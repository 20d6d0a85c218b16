"""The promises of the house: what the README and docs say, the packaging, and CI agree with the code."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
LIBRARY = sorted((ROOT / "stdlib").glob("*.coda"))


def canonical(requirement: str) -> str:
    """A requirement's distribution name, as indexes compare names."""
    return re.sub(r"[-_.]+", "-", re.split(r"[<>=!~\[ ;]", requirement)[0]).lower()


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
    assert re.search(r"^ *make test\b", (ROOT / "README.md").read_text(), re.MULTILINE)


@pytest.mark.parametrize("path", LIBRARY, ids=lambda path: path.stem)
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

"""The demo, on a narrower layer so that it takes seconds; `make demo` runs it at the real width."""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
import torch

ROOT = Path(__file__).parents[1]


@pytest.fixture
def demo(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("swiglu_layer", ROOT / "examples/swiglu_layer.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for name, value in {"TOKENS": 3, "FEATURES": 40, "HIDDEN": 104, "BUILD": tmp_path}.items():
        monkeypatch.setattr(module, name, value)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.chdir(ROOT)  # the demo changes to it; this restores the test's own
    return module


def test_the_demo_runs(demo: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert demo.main() == 0
    printed = capsys.readouterr().out
    assert "store d_acc: tile[M, N] = join(d_gate, d_up)" in printed
    assert "0 bytes spilled" in printed
    assert {path.name for path in tmp_path.glob("*.o")} == {"swiglu.o", "swiglu_backward.o"}
    assert all(path.read_bytes().startswith(b"\x7fELF") for path in tmp_path.glob("*.o"))
    ast.parse((tmp_path / "swiglu_kernels.py").read_text())


def test_the_demo_fails_where_a_gradient_is_off(demo: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "TOLERANCE", 0.0)
    monkeypatch.setattr(demo, "shell", lambda *words, into=None: True)
    assert demo.main() == 1

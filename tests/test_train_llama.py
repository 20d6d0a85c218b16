"""The training example: both models are one function of their weights, and a short run ends as it must."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from xml.etree import ElementTree

import attrs
import pytest
import torch

ROOT = Path(__file__).parents[1]
TOLERANCE = 1e-10  # of gradients through the whole model, in float64


@pytest.fixture(scope="module")
def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("train_llama", ROOT / "examples/train_llama.py")
    assert spec is not None and spec.loader is not None
    module = sys.modules["train_llama"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_both_models_are_one_function(example: ModuleType) -> None:
    """Loss and the gradient of every weight, in float64."""
    size = attrs.evolve(example.SIZES["test"], dtype=torch.float64)
    tokens, targets = next(example.batches(example.corpus(), size, 0))
    losses, gradients = [], []
    for kind in (example.Programs, example.Plain):
        model = kind(size, 0).double()
        loss = model(tokens, targets)
        loss.backward()
        losses.append(loss.item())
        gradients.append({name: value.grad for name, value in model.named_parameters()})
    assert abs(losses[0] - losses[1]) <= TOLERANCE * losses[1]
    assert len(gradients[0]) == 3 + 8 * size.layers
    for name, want in gradients[1].items():
        assert (gradients[0][name] - want).norm() <= TOLERANCE * want.norm(), name


def test_a_short_run(example: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plot = tmp_path / "plots" / "curves.svg"
    assert example.main(["--size", "test", "-o", str(plot)]) == 0
    out = capsys.readouterr().out
    assert "the curves agree within the spread of two seeds" in out
    texts = ["".join(text.itertext()) for text in ElementTree.parse(plot).iter("{http://www.w3.org/2000/svg}text")]
    assert {"codalang, seed 0", "PyTorch, seed 0", "PyTorch, seed 1"} <= set(texts)


def test_curves_that_differ_do_not_agree(
    example: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A model with a mistake: its loss is off by more than two seeds are."""

    class Wrong(example.Plain):
        def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            return super().forward(tokens, targets) * 1.5

    monkeypatch.setattr(example, "Programs", Wrong)
    assert example.main(["--size", "test", "-o", str(tmp_path / "curves.svg")]) == 1
    assert "DO NOT agree" in capsys.readouterr().out


def test_smoothing_and_distance(example: ModuleType) -> None:
    assert example.smoothed([1.0, 3.0, 5.0, 7.0], share=2) == [1.0, 2.0, 4.0, 6.0]
    assert example.distance([1.0, 2.0], [2.0, 4.0]) == 1.5

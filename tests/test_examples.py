"""The programs of examples/ against plain torch in float64: results, and gradients of everything that has one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import attrs
import example_formulas as formulas
import pytest
import torch
from torch import Tensor

import codalang
from codalang.ir import program_reference
from codalang.ir.program import Program
from codalang.parser import format_source, parse

EXAMPLES = Path(__file__).parents[1] / "examples"
# Both sides compute in float64 and differ in the order of operations; h and the row factor of llama_last are of
# different sizes, hence relative by tensor.
TOLERANCE = 1e-11

# No two are equal, so that a dimension taken for another is seen; T is no multiple of a tile.
SIZES = {"T": 13, "D": 24, "H": 20, "F": 10, "Q": 4, "KV": 2, "P": 3, "R": 7, "V": 17, "B": 3, "S": 5, "E": 14}


@attrs.frozen
class Case:
    """A program of a file, the formula that it must equal, and arguments that are not just random."""

    file: str
    program: str
    formula: Callable[..., tuple[Tensor, ...]]
    special: Mapping[str, object] = attrs.Factory(dict)
    label: str = ""

    @property
    def ir(self) -> Program:
        """The parsed program."""
        return parse(codalang.Source(self.file, (EXAMPLES / self.file).read_text())).programs[self.program]

    def __str__(self) -> str:
        return f"{self.program}{self.label}"


def _targets(ignored: int) -> Tensor:
    """Targets of SIZES["T"] tokens, a third of them `ignored`."""
    target = torch.randint(0, SIZES["V"], (SIZES["T"],), generator=torch.Generator().manual_seed(5))
    target[1::3] = ignored
    return target


def _cross_entropy_cases() -> list[Case]:
    cases = []
    for reduction in ("none", "sum", "mean"):
        formula = formulas.cross_entropy(reduction)
        for name in (f"cross_entropy_{reduction}", f"cross_entropy_{reduction}_saved"):
            for label, special in {
                "": {"target": _targets(-100)},
                "-smoothed": {"target": _targets(-100), "smoothing": 0.1},
                "-padded": {"target": _targets(3), "ignore_index": 3.0},
            }.items():
                cases.append(Case("lm_head_cross_entropy.coda", name, formula, special, label))
    return cases


CASES = [
    Case("mlp.coda", "mlp", formulas.mlp),
    Case("mlp.coda", "mlp", formulas.mlp, {"eps": 0.1}, "-eps"),
    Case("mlp_gelu.coda", "mlp_gelu", formulas.mlp_gelu),
    Case("mlp_gelu.coda", "mlp_gelu_tanh", formulas.mlp_gelu_tanh),
    Case("llama_block.coda", "llama_first", formulas.llama_first),
    Case("llama_block.coda", "llama_block", formulas.llama_block),
    Case("llama_block.coda", "llama_block", formulas.llama_block, {"eps": 0.1}, "-eps"),
    Case("llama_block.coda", "llama_block_fused", formulas.llama_block_fused),
    Case("llama_block.coda", "llama_last", formulas.llama_last),
    Case("adaln_block.coda", "adaln_block", formulas.adaln_block),
    *_cross_entropy_cases(),
]
EACH = pytest.mark.parametrize("case", CASES, ids=str)


def arguments(case: Case) -> dict[str, object]:
    """A tensor for each parameter; a scalar with a default is left out, unless the case says what it is."""
    generator = torch.Generator().manual_seed(2)
    values: dict[str, object] = {}
    for param in case.ir.params:
        shape = [int(extent.evaluate(SIZES)) for extent in param.type.shape]
        if param.name in case.special:
            values[param.name] = case.special[param.name]
        elif param.dtype == "i64":
            values[param.name] = torch.randint(0, 40, shape, generator=generator)
        elif shape:
            value = torch.randn(shape, generator=generator, dtype=torch.float64)
            scale = shape[-1] ** -0.5 if len(shape) > 1 and param.name.startswith("w") else 1.0
            values[param.name] = value.abs() + 0.5 if param.name == "r" else value * scale
    return values


def leaves(values: Mapping[str, object]) -> dict[str, object]:
    """Fresh copies, of which those of floats want a gradient."""
    return {
        name: value.clone().requires_grad_(value.is_floating_point()) if isinstance(value, Tensor) else value
        for name, value in values.items()
    }


def assert_close(got: Tensor, want: Tensor, name: str) -> None:
    """Equal by relative 2-norm."""
    assert got.shape == want.shape, (name, got.shape, want.shape)
    assert bool(want.isfinite().all()), name
    error = float((got - want).detach().norm() / want.detach().norm().clamp(min=1e-300))
    assert error <= TOLERANCE, (name, error)


def tuple_of(results: object) -> tuple[Tensor, ...]:
    """One tensor or several."""
    return (results,) if isinstance(results, Tensor) else tuple(results)


@EACH
def test_the_reference_computes_the_formula(case: Case) -> None:
    values = arguments(case)
    for name, got, want in zip(
        case.ir.results, program_reference.run(case.ir, values).values(), case.formula(**values), strict=True
    ):
        assert_close(got, want.reshape(got.shape), name)


@EACH
def test_a_call_has_the_results_and_gradients_of_the_formula(case: Case) -> None:
    values = arguments(case)
    function = getattr(codalang.load(EXAMPLES / case.file), case.program)
    ours, theirs = leaves(values), leaves(values)
    got, want = tuple_of(function(**ours)), tuple_of(case.formula(**theirs))
    for name, mine, other in zip(case.ir.results, got, want, strict=True):
        assert_close(mine, other, name)
    generator = torch.Generator().manual_seed(3)
    cotangents = [torch.randn(r.shape, generator=generator, dtype=torch.float64) for r in want]
    names = [name for name, value in ours.items() if isinstance(value, Tensor) and value.requires_grad]
    gradients = [
        torch.autograd.grad(results, [inputs[name] for name in names], cotangents)
        for results, inputs in ((got, ours), (want, theirs))
    ]
    for name, mine, other in zip(names, *gradients, strict=True):
        assert_close(mine, other, f"gradient of {name}")


def test_all_targets_ignored() -> None:
    """As torch: the mean of no loss is NaN, the sum 0, and its gradients are 0."""
    case = Case("lm_head_cross_entropy.coda", "cross_entropy_sum", formulas.cross_entropy("sum"))
    values = arguments(attrs.evolve(case, special={"target": torch.full((SIZES["T"],), -100)}))
    module = codalang.load(EXAMPLES / case.file)
    given = leaves(values)
    loss = module.cross_entropy_sum(**given)
    assert loss.item() == 0
    assert all((g == 0).all() for g in torch.autograd.grad(loss, [given["h"], given["w"], given["r"]]))
    assert module.cross_entropy_mean(**values).isnan()


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.coda")), ids=lambda path: path.stem)
def test_an_example_states_its_maths_and_is_laid_out(path: Path) -> None:
    text = path.read_text()
    assert format_source(text) == text
    comment = text[: text.index("\n\n")]
    assert comment.startswith("# ") and " = " in comment


def test_every_example_is_tested() -> None:
    tested = {(case.file, case.program) for case in CASES}
    parts = {"feed_forward", "queries_keys_values"}
    for path in EXAMPLES.glob("*.coda"):
        for name in parse(codalang.Source(path.name, path.read_text())).programs:
            assert name in parts or (path.name, name) in tested, name

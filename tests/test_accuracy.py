"""Fast and precise transcendental functions: what is generated, what is documented, and what our part of it costs.

The hardware's approximations are not to be had here, so they are taken to be exact: what is checked is the error of
what is computed around them, in f32 as kernels do.  tests/gpu/test_gpu_accuracy.py checks all of it.
"""

from __future__ import annotations

import math
import types
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from accuracy_cases import allowed, arguments_of, cases, exactly, finite

import codalang
from codalang.builder import M, N, exp, store, tile
from codalang.ir.evaluate import OP_FUNCTIONS
from codalang.ir.ops import OPS
from codalang.ir.printer import print_epilogue
from codalang.ir.simplify import simplify
from codalang.lower import device, split
from codalang.lower.accuracy import ACCURACY
from codalang.lower.codegen import generate
from codalang.lower.compile import Report, compile_object
from codalang.lower.load import key_of
from codalang.lower.spec import Config, KernelSpec, Operand, merge_spec
from codalang.parser import format_source, parse

ROOT = Path(__file__).parents[1]


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    """The functions of `device` on f32 tensors; what the hardware or the library does is exact but for rounding."""

    def rounded(function: Any) -> Any:
        return lambda x, fastmath=False: function(x.double()).float()

    names = "exp exp2 log log2 sqrt rsqrt tanh erf".split()
    calls = {name: rounded(OP_FUNCTIONS[name]) for name in names}
    calls |= {"abs": torch.abs, "roundeven": torch.round}
    calls["fma"] = lambda a, b, c: (a.double() * b.double() + c.double()).float()
    calls["pow"] = lambda a, b: (a.double() ** b.double()).float()
    arch = types.SimpleNamespace(rcp_approx=lambda x: 1 / x, fmin=lambda a, b, nan: torch.minimum(a, b))
    monkeypatch.setattr(device, "cute", types.SimpleNamespace(math=types.SimpleNamespace(**calls), arch=arch))
    monkeypatch.setattr(device, "Float32", lambda value: torch.as_tensor(value, dtype=torch.float32))
    monkeypatch.setattr(device, "Int32", torch.int32)
    monkeypatch.setattr(device, "choose", torch.where)
    monkeypatch.setattr(device, "_approximate", lambda name, x: rounded(OP_FUNCTIONS[name])(x))
    monkeypatch.setattr(device, "_divide", torch.div)


@pytest.mark.parametrize("mode", ["fast", "precise"])
@pytest.mark.parametrize(("op", "exponent"), cases())
def test_what_we_compute_is_within_the_bounds(emulated: None, op: str, exponent: float | None, mode: str) -> None:
    x = arguments_of(op)
    function = (device.DEVICE_OPS if mode == "fast" else device.PRECISE_OPS)[op]
    if op == "div":
        function = (lambda v: torch.div(1.0, v)) if mode == "fast" else (lambda v: device._precise_divide(1.0, v))
    truth = exactly(op, x, exponent)
    normal = finite(op, truth)
    got = (function(x) if exponent is None else function(x, exponent)).double()
    error = ((got - truth).abs() / allowed(getattr(ACCURACY[op], mode), x.double(), truth))[normal]
    worst = int(error.argmax())
    assert normal.sum() > 1000 and error.max() <= 1, (
        f"{op}({x[normal][worst]}): {error.max():.3g} times what is allowed"
    )


def test_precise_sines_are_more_precise(emulated: None) -> None:
    """Where they are small: next to multiples of pi, up to 131072 radians, where f32 has steps of 1/64."""
    x = (torch.arange(1, 41722, dtype=torch.float64) * math.pi).float()
    truth = x.double().sin()
    fast, precise = (
        ((table["sin"](x).double() - truth) / truth).abs().max() for table in (device.DEVICE_OPS, device.PRECISE_OPS)
    )
    assert precise <= 2.0**-22 and fast > 100 * precise


def test_both_tables_have_the_same_operations() -> None:
    assert set(device.PRECISE_OPS) == set(ACCURACY) <= set(device.DEVICE_OPS)
    approximated = {"add", "sub", "mul", "neg", "min", "max", "abs", "where", "cast", "float", "stop_gradient"}
    rest = set(device.DEVICE_OPS) - set(ACCURACY) - approximated
    assert all(OPS[op].infix or op in ("and", "or", "not") for op in rest), rest


def test_every_bound_is_documented() -> None:
    page = (ROOT / "docs" / "language.md").read_text()
    for op, accuracy in ACCURACY.items():
        shown = {"div": "/"}.get(op, op)
        assert f"| `{shown}` | {accuracy.fast} | {accuracy.precise} |" in page, op


# ---- the flag --------------------------------------------------------------------------------------------------------

SOURCE = """precise epilogue softmax(acc: tile[M, N], lse: col[M]) {
    store p: tile[M, N] = exp(acc - lse) * (1 + erf(acc))
    state total: col[M] = online_logsumexp(acc)
}
"""


def _spec(precise: bool) -> KernelSpec:
    epilogue = attrs.evolve(simplify(parse(SOURCE).epilogues["softmax"]), precise=precise)
    return KernelSpec(epilogue, None, ("bf16", "f32"), ("bf16",), None)


def test_generated_code_says_which() -> None:
    fast, precise = (generate(_spec(flag)) for flag in (False, True))
    assert "apply_precise" not in fast and "device.one_plus_erf" in fast
    assert all(f'{op} = device.apply_precise("{op}")' in precise for op in ("exp", "erf", "log"))
    assert 'mul = device.apply_op("mul")' in precise and "one_plus_erf" not in precise
    assert key_of(_spec(False)) != key_of(_spec(True)) and _spec(False) != _spec(True)


def test_a_merge_is_as_precise_as_what_it_merges() -> None:
    (state,) = _spec(True).epilogue.states
    assert 'apply_precise("log")' in generate(merge_spec(state, True))
    assert "apply_precise" not in generate(merge_spec(state))


def test_it_is_written_parsed_printed_and_derived() -> None:
    module = parse(SOURCE)
    epilogue = module.epilogues["softmax"]
    assert epilogue.precise and print_epilogue(epilogue) == SOURCE == format_source(SOURCE)
    assert simplify(epilogue).precise
    function = codalang.load(SOURCE).softmax
    assert function.source == SOURCE and function.backward.source.startswith("precise epilogue softmax_backward(")
    assert not parse(SOURCE.removeprefix("precise ")).epilogues["softmax"].precise


def test_it_is_asked_for_from_python() -> None:
    plain, precise = codalang.load("swiglu"), codalang.load("swiglu", precise=True)
    assert precise.swiglu.epilogue.precise and not plain.swiglu.epilogue.precise
    assert precise is codalang.load("swiglu", precise=True) is not plain

    @codalang.epilogue(precise=True)
    def softmax(acc: tile[M, N]) -> None:
        store("p", exp(acc))

    assert softmax.source.startswith("precise epilogue softmax(")


def test_every_epilogue_of_a_program_is_precise() -> None:
    module = codalang.load(str(ROOT / "examples" / "mlp.coda"), precise=True)
    assert module.mlp.source.count("precise epilogue") == module.mlp.source.count("epilogue ") > 0


@pytest.mark.parametrize("op", ["sin", "pow", "tanh", "rsqrt"])
def test_precise_kernels_compile(op: str, tmp_path: Path) -> None:
    """None needs local memory."""
    call = f"{op}(x, 1.7)" if op == "pow" else f"{op}(x)"
    epilogue = parse(f"precise epilogue f(x: tile[M, N]) {{ store y: tile[M, N] = {call} }}").epilogues["f"]
    spec = KernelSpec(epilogue, None, ("f32",), ("f32",), None)
    report = compile_object(spec, tmp_path / "kernel.o", keep_ptx=True)
    assert report.spill_bytes == 0 and ".local" not in (report.ptx or "")


@pytest.mark.parametrize("extents", [(8192, 4096, 14336), (8, 4096, 14336), (128, 4096, 14336)], ids=str)
def test_the_mainloop_of_a_precise_epilogue_has_room_for_a_second_accumulator(
    extents: tuple[int, int, int], tmp_path: Path
) -> None:
    epilogue = simplify(codalang.load("residual_rms", precise=True).residual_rms.epilogue)
    dtypes = ("bf16", "f32"), ("bf16", "bf16")
    spec = KernelSpec(epilogue, Operand("bf16", "k", "k"), *dtypes, None)
    config = split.choose(spec, *extents)
    report = compile_object(attrs.evolve(spec, config=config), tmp_path / "kernel.o", keep_ptx=True)
    assert report.spill_bytes == 0 and not report.serialized
    once = attrs.evolve(spec, epilogue=attrs.evolve(epilogue, precise=False), config=config)
    assert count_adds(report) >= count_adds(compile_object(once, tmp_path / "once.o", keep_ptx=True)) + accumulators(
        config
    )


def test_a_precise_kernel_is_another_also_where_its_epilogue_reads_the_same() -> None:
    epilogue = parse("epilogue matmul(acc: tile[M, N]) { store y: tile[M, N] = acc }").epilogues["matmul"]
    specs = [
        KernelSpec(attrs.evolve(epilogue, precise=precise), Operand("bf16", "k", "k"), (), ("bf16",), None)
        for precise in (False, True)
    ]
    assert generate(specs[0]) == generate(specs[1])
    assert key_of(specs[0]) != key_of(specs[1])


def count_adds(report: Report) -> int:
    return (report.ptx or "").count("add.f32") + (report.ptx or "").count("add.rn.f32")


def accumulators(config: Config) -> int:
    """Registers of one thread."""
    return config.tile[0] * config.tile[1] // (128 if config.ping_pong else 256)

"""The language in Python: the same IR as from text, and messages that point at the user's line."""

from __future__ import annotations

import builtins
import copy
import functools
import linecache
import math
import operator
import pickle
import re
import subprocess
import sys
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from decimal import Decimal
from fractions import Fraction
from pathlib import Path

import builder_states
import golden_cases
import pytest
import torch
from builder_programs import EPILOGUES
from hypothesis import given
from strategies import epilogues
from user_states import USER_STATES

import codalang
from codalang import builder as coda
from codalang.builder import M, N, tile
from codalang.builder.states import Transform
from codalang.builder.value import constant_of
from codalang.errors import CodaCallError, CodaError, CodaTypeError
from codalang.ir.builtin_states import BUILTIN_STATES
from codalang.ir.epilogue import Epilogue, Node, Output, Param, Reduce, State, Store
from codalang.ir.ops import OPS
from codalang.ir.printer import print_epilogue
from codalang.ir.types import STORAGE_DTYPES, Dtype, show_shape
from codalang.ir.verify import verify
from codalang.lower.codegen import generate
from codalang.lower.load import key_of
from codalang.lower.spec import KernelSpec, Operand
from codalang.parser import parse, read_source
from codalang.parser.names import BUILTINS, PAIRS

# What the programs of the tests may use: all of the builder but what hides a function of Python's.
SCOPE = {
    **{name: getattr(coda, name) for name in coda.__all__ if not hasattr(builtins, name)},
    "codalang": codalang,
    "coda": coda,
    "inf": math.inf,
}


def run(text: str, name: str = "program.py") -> dict[str, object]:
    """The names that a Python program defines; its text is known, as a file's is."""
    linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
    scope = dict(SCOPE)
    exec(compile(text, name, "exec", dont_inherit=True), scope)
    return scope


def message(text: str) -> str:
    """The error of a wrong program, with its class."""
    with pytest.raises(CodaError) as caught:
        run(text)
    return re.sub(r"0x[0-9a-f]+", "0x...", f"{type(caught.value).__name__}: {caught.value}\n")


@pytest.mark.parametrize("name", golden_cases.load("builder.txt"))
def test_message(name: str) -> None:
    golden_cases.check("builder.txt", name, message)


LIBRARY = {
    name: epilogue
    for path in sorted((Path(__file__).parents[1] / "stdlib").glob("*.coda"))
    for name, epilogue in parse(read_source(path)).epilogues.items()
}


def round_trip(epilogue: Epilogue) -> None:
    """An epilogue is well formed, and reads back as itself."""
    verify(epilogue)
    assert parse(print_epilogue(epilogue)).epilogues[epilogue.name] == epilogue


@pytest.mark.parametrize("name", EPILOGUES)
def test_the_standard_library_in_python(name: str) -> None:
    made = coda.build(EPILOGUES[name])
    assert made == LIBRARY[name]
    round_trip(made)


@pytest.mark.parametrize("name", parse(builder_states.TEXT).states)
def test_states_in_python(name: str) -> None:
    assert getattr(builder_states, name).definition == parse(builder_states.TEXT).states[name]


def test_built_in_states_have_their_names() -> None:
    assert {name: getattr(coda, name).definition for name in BUILTIN_STATES} == BUILTIN_STATES


# An epilogue, written out as Python

_OPERATORS = {"and": "&", "or": "|", "not": "~", "neg": "-"}


def python_of(e: Epilogue) -> str:
    """A Python function, one line for each node, that means an epilogue."""
    params = (f"{p.name}: {quoted(p, e)}" for p in e.params)
    lines = [f"def {e.name}({', '.join(params)}):"]
    for index, node in enumerate(e.nodes):
        if node.op == "param":
            lines.append(f"    v{index} = {node.attr}")
        elif node.op != "const":
            lines.append(f"    v{index} = {expression(e, node)}")
    lines += [f"    {k.how}({operand(e, k.value)})" for k in e.keeps]
    outputs = list(e.outputs)
    while outputs:
        lines.append("    " + statement(e, outputs))
    return "\n".join(lines) + "\n"


def quoted(what: Param | Output, e: Epilogue) -> str:
    """A shape as text, or as a Python expression."""
    text = show_shape(what.type.kind, what.type.width, e.dims)
    if what.dtype is None and what.type.width in (None, 1) and e.dims == ("M", "N"):
        return text
    return repr(text + (f": {what.dtype}" if what.dtype else ""))


def operand(e: Epilogue, index: int, literal: bool = False) -> str:
    """A node as an operand; a constant as a number where a `literal` can stand."""
    node = e.nodes[index]
    if node.op != "const":
        return f"v{index}"
    text = repr(node.attr)
    if literal:
        return f"({text})"
    return f"i32({text})" if node.type.dtype is Dtype.I32 else f"constant({text})"


def expression(e: Epilogue, node: Node) -> str:
    """An op, by Python's operator where there is one."""
    dtypes = {e.nodes[a].type.dtype for a in node.args if e.nodes[a].op != "const"}
    info = OPS[node.op]
    # The right operand may be a number, unless it is the only one or would be read as an f32 where it is an index.
    args = [
        operand(e, a, i > 0 and e.nodes[node.args[0]].op != "const" and (e.nodes[a].type.dtype in dtypes))
        for i, a in enumerate(node.args)
    ]
    if node.op in ("even", "odd"):
        return f"split({args[0]})[{int(node.op == 'odd')}]"
    if info.infix is not None:
        symbol = _OPERATORS.get(node.op, info.infix)
        return f"{symbol}{args[0]}" if len(args) == 1 else f"{args[0]} {symbol} {args[1]}"
    attr = [repr(node.attr)] if node.attr is not None else []
    return f"coda.{node.op}({', '.join(args + attr)})"


def statement(e: Epilogue, outputs: list[Output]) -> str:
    """The statement of the first outputs, which are taken off the list."""
    first = outputs.pop(0)
    shape = quoted(first, e)
    if isinstance(first, Store):
        return f"store({first.name!r}, {operand(e, first.value)}, {shape})"
    if isinstance(first, Reduce):
        return f"reduce({first.name!r}, coda.{first.how}({operand(e, first.value)}), {shape})"
    names = ["_"] * first.result + [first.name]
    if first.dtype is None:
        while outputs and same_transform(first, outputs[0]) and outputs[0].result >= len(names):
            following = outputs.pop(0)
            names += ["_"] * (following.result - len(names)) + [following.name]
    values = ", ".join(operand(e, v) for v in first.values)
    return f"state({tuple(names)!r}, transforms[{first.definition.name!r}]({values}), {shape})"


def same_transform(a: State, b: Output) -> bool:
    return isinstance(b, State) and b.dtype is None and same(a) == same(b)


def same(output: State) -> tuple[object, ...]:
    return output.values, output.definition, output.type.kind, output.type.width


def transcribed(e: Epilogue) -> Epilogue:
    """The epilogue that its Python makes; each node knows its line and its name."""
    linecache.cache["transcript.py"] = (1, None, (text := python_of(e)).splitlines(keepends=True), "transcript.py")
    transforms = {o.definition.name: Transform(o.definition) for o in e.states}
    scope = {**SCOPE, "constant": constant_of, "transforms": transforms, "nan": math.nan}
    exec(compile(text, "transcript.py", "exec", dont_inherit=True), scope)
    made = coda.build(scope[e.name], dims=e.dims)
    for index, node in enumerate(made.nodes):
        assert node.loc is not None
        line = node.loc.source.line(node.loc.line)
        if node.op not in ("param", "const", "even", "odd"):
            assert line.strip().startswith(f"v{index} = ")
            assert node.hint == f"v{index}"
    return made


@given(epilogues(states=USER_STATES))
def test_random_epilogues_are_built_in_python(e: Epilogue) -> None:
    assert transcribed(e) == e


@pytest.mark.parametrize("name", LIBRARY)
def test_the_standard_library_transcribed(name: str) -> None:
    assert transcribed(LIBRARY[name]) == LIBRARY[name]


def test_every_op_and_function_is_there() -> None:
    methods = {"and": "__and__", "or": "__or__", "not": "__invert__", "div": "__truediv__"}
    for name, info in OPS.items():
        if info.infix is not None:
            assert hasattr(coda.Value, methods.get(name, f"__{name}__"))
        elif info.resize != "halve":
            assert name in coda.__all__
    assert {*BUILTINS, *PAIRS} <= set(coda.__all__)
    assert all(
        callable(getattr(coda, name)) or name in ("B", "M", "N", *STORAGE_DTYPES, "scalar", "row", "col", "tile")
        for name in coda.__all__
    )
    with pytest.raises(AttributeError, match="did you mean `sigmoid`"):
        coda.sigmod  # noqa: B018


# Names, shapes and annotations


def test_variables_name_values() -> None:
    """By assignment, through returns, for both halves of a split, in place; but no reserved word does."""
    scope = run(
        """
def scaled(x):
    factor = x + 1
    return x * factor

def both(x):
    return scaled(scaled(x))

@codalang.epilogue
def f(acc: tile[M, N], r: col[M]):
    gate, up = split(acc)
    y = both(gate)
    y += r
    z: object = (y * up)
    if (w := z - r) is not None:
        store("out", w * w)
    let = w * 2
    store("last", let)
"""
    )
    assert scope["f"].source == (  # type: ignore[attr-defined]
        "epilogue f(acc: tile[M, N], r: col[M]) {\n"
        "    let (gate, up) = split(acc)\n"
        "    let factor = gate + 1\n"
        "    let t1 = gate * factor\n"
        "    let factor_2 = t1 + 1\n"
        "    let y = t1 * factor_2\n"
        "    let y_2 = y + r\n"
        "    let z = y_2 * up\n"
        "    let w = z - r\n"
        "    store out: tile[M, N/2] = w * w\n"
        "    store last: tile[M, N/2] = w * 2\n"
        "}\n"
    )


@pytest.mark.parametrize(
    ("written", "shape"),
    [
        ("tile[M, N]", "tile[M, N]"),
        ("tile[M, N / 2]", "tile[M, N/2]"),
        ("tile[M, N // 2].bf16", "tile[M, N/2]: bf16"),
        ("tile[M, 2 * N]", "tile[M, 2*N]"),
        ("tile[M, N * 2 / 2]", "tile[M, N]"),
        ('tile["M", "N"]', "tile[M, N]"),
        ('tile["M", "N/2"]', "tile[M, N/2]"),
        ('tile[M, " 2 * N "].f32', "tile[M, 2*N]: f32"),
        ('tile["Tokens", "Features // 2"]', "tile[Tokens, Features/2]"),
        ("row[N]", "row[N]"),
        ("col[M].i64", "col[M]: i64"),
        ("scalar", "scalar"),
        ("scalar.f16", "scalar: f16"),
        ('"tile[M, N/2]: bf16"', "tile[M, N/2]: bf16"),
        ('" col [ M ] : i32 "', "col[M]: i32"),
        ('"scalar"', "scalar"),
        ('row[Dim("T") / 2]', "row[T/2]"),
    ],
)
@pytest.mark.parametrize("future", ["", "from __future__ import annotations\n"])
def test_shapes(written: str, shape: str, future: str) -> None:
    e = coda.build(run(f'{future}def f(x: {written}):\n    store("y", 1.0, scalar)\n')["f"])
    assert e.params == parse(f"epilogue f(x: {shape}) {{\n    store y: scalar = 1.0\n}}").epilogues["f"].params


def test_annotations_kept_as_text_see_local_names() -> None:
    scope = run(
        "from __future__ import annotations\n"
        "def make(Width):\n"
        "    T, F = Dim('T'), Dim(Width)\n"
        "    Matrix = tile[T, F]\n"
        "    def f(acc: Matrix, half: tile[T, F / 2], other: 'tile[T, 2*Hidden]'):\n"
        "        store('y', acc)\n"
        "    return coda.build(f)\n"
    )
    assert (
        scope["make"]("Hidden")
        == parse(  # type: ignore[operator]
            "epilogue f(acc: tile[T, Hidden], half: tile[T, Hidden/2], other: tile[T, 2*Hidden]) {\n"
            "    store y: tile[T, Hidden] = acc\n}"
        ).epilogues["f"]
    )


def test_a_name_that_means_nothing_in_an_annotation_kept_as_text_is_a_dimension() -> None:
    """Tools that modernize Python take the quotes off `tile["T", "F"]` there."""
    program = "from __future__ import annotations\ndef f(acc: tile[T, F / 2].bf16, r: {}):\n    store('y', acc)\n"
    e = coda.build(run(program.format("coda.col[T]"))["f"])
    text = "epilogue f(acc: tile[T, F/2]: bf16, r: col[T]) {\n    store y: tile[T, F/2] = acc\n}"
    assert e == parse(text).epilogues["f"]
    for wrong, said in (
        ("cot[T]", "the annotation `cot[T]` cannot be evaluated: name 'cot' is not defined"),
        ("coda.cot[T]", "the annotation `coda.cot[T]` cannot be evaluated: codalang.builder has no `cot`"),
        ("col[T].bf61", "`col[T]` has no dtype `bf61`"),
        ("col[T / 3.5]", "`T / 3.5` is no dimension"),
        ("Trow[M]", "the annotation `Trow[M]` cannot be evaluated: name 'Trow' is not defined"),
    ):
        with pytest.raises(CodaTypeError) as caught:
            coda.build(run(program.format(wrong))["f"])
        assert str(caught.value).startswith(f"program.py:2:33: {said}")


def test_dims_and_name_can_be_given() -> None:
    def f(r: tile[T, H]):  # noqa: F821
        coda.store("y", r)

    def g(r: coda.scalar):
        coda.store("y", r)

    assert coda.build(f, name="other", dims=("T", "H")).name == "other"
    assert coda.build(g).dims == ("M", "N")
    assert coda.build(g, dims=(coda.Dim("T"), "H")).dims == ("T", "H")
    assert codalang.epilogue(name="other", dims=("T", "H"))(f).source.startswith("epilogue other(r: tile[T, H])")
    with pytest.raises(CodaTypeError, match="the columns of this tile are `H`, expected `K`"):
        coda.build(f, dims=("T", "K"))


def test_dimensions_are_known_by_the_first_shape_that_has_them() -> None:
    def f(r: coda.col[T]):  # noqa: F821
        coda.store("y", r, coda.tile["T", "F"])
        coda.reduce("s", coda.sum(r), coda.row["F / 2"])

    text = "epilogue f(r: col[T]) {\n    store y: tile[T, F] = r\n    reduce s: row[F/2] = sum(r)\n}"
    assert coda.build(f) == parse(text).epilogues["f"]


# Numbers


def test_numbers_are_read_as_the_language_reads_them() -> None:
    def f(acc: coda.tile[M, N], target: coda.col[M].i64):
        mask = coda.col_index() - 1 == target
        index = coda.where(mask, coda.max(coda.row_index(), 3), 4)
        coda.store("a", 2 * acc + 1 - acc / 3)
        coda.store("b", coda.where(mask, 1, 0) + coda.float(index) + coda.float(7) + coda.float(mask))
        coda.store("c", coda.where(index != coda.i32(2), acc**2, acc**-1.5))
        coda.store("d", coda.where(mask & True | (False | ~mask), -acc, +acc))
        coda.store("e", 1 / acc + coda.exp(0.5) + coda.max(1, 2))

    text = """
epilogue f(acc: tile[M, N], target: col[M]: i64) {
    let mask = col_index() - 1 == target
    let index = where(mask, max(row_index(), 3), 4)
    store a: tile[M, N] = 2 * acc + 1 - acc / 3
    store b: tile[M, N] = where(mask, 1, 0) + float(index) + float(7) + float(mask)
    store c: tile[M, N] = where(index != 2, pow(acc, 2), pow(acc, -1.5))
    store d: tile[M, N] = where(mask and true or (false or not mask), -acc, acc)
    store e: tile[M, N] = 1 / acc + exp(0.5) + max(1, 2)
}
"""
    assert coda.build(f) == parse(text).epilogues["f"]


def test_numbers_of_numpy_and_of_fractions() -> None:
    numpy = pytest.importorskip("numpy")

    def f(acc: coda.tile[M, N]):
        x = numpy.float64(2) * acc + numpy.float32(3)
        y = numpy.int64(4) - x / numpy.float32(0.5) + Fraction(1, 4)
        coda.store("y", coda.where(numpy.float64(1) > y, y, 0) + numpy.sqrt(16.0))
        coda.store("z", coda.where(numpy.bool_(True), y, 0))

    text = """
epilogue f(acc: tile[M, N]) {
    let y = 4 - (2 * acc + 3) / 0.5 + 0.25
    store y: tile[M, N] = where(1 > y, y, 0) + 4
    store z: tile[M, N] = where(true, y, 0)
}
"""
    assert coda.build(f) == parse(text).epilogues["f"]
    for wrong, said in (
        ("numpy.exp(acc)", "numpy's `exp` cannot take a value of an epilogue"),
        ("acc + numpy.zeros(3)", "a numpy.ndarray cannot be part of an epilogue"),
        ("numpy.zeros(3) * acc", "a numpy.ndarray cannot be part of an epilogue"),
        ("numpy.asarray(acc)", "is no array"),
        ("numpy.add.reduce(acc)", "numpy's `add` cannot take a value"),
    ):
        with pytest.raises(CodaTypeError, match=re.escape(said)):
            run(f'import numpy\n@codalang.epilogue\ndef f(acc: tile[M, N]):\n    store("y", {wrong})\n')


def test_dtypes_of_torch() -> None:
    def f(acc: coda.tile[M, N]):
        coda.store("y", coda.cast(acc, torch.float16), dtype=torch.bfloat16)
        coda.reduce("s", coda.sum(coda.cast(acc, coda.bf16)), coda.col[M], dtype=torch.float32)
        coda.state(("v", "i"), coda.argmax(acc, coda.col_index()), coda.col[M])
        coda.state(("_", "j"), coda.argmax(acc, 0), coda.col[M])

    text = """
epilogue f(acc: tile[M, N]) {
    store y: tile[M, N]: bf16 = cast(acc, f16)
    reduce s: col[M]: f32 = sum(cast(acc, bf16))
    state (v, i): col[M] = argmax(acc, col_index())
    state (_, j): col[M] = argmax(acc, 0)
}
"""
    assert coda.build(f) == parse(text).epilogues["f"]


def test_save_and_recompute() -> None:
    def f(acc: coda.tile[M, N], r: coda.col[M]):
        x, y = acc * r, acc + r
        coda.save(x, acc)
        coda.recompute(y)
        coda.store("z", x * y)

    text = "epilogue f(acc: tile[M, N], r: col[M]) {\n    let x = acc * r\n    let y = acc + r\n"
    text += "    save x, acc\n    recompute y\n    store z: tile[M, N] = x * y\n}"
    assert coda.build(f) == parse(text).epilogues["f"]


def test_a_state_of_the_user_s_own() -> None:
    @codalang.state
    class power_mean:
        total: float = 0
        n: float = 0

        def update(self, x, w):
            return self.total + w * x**2, self.n + w

        def merge(self, other):
            return self.total + other.total, self.n + other.n

        def finalize(self):
            return {"mean": coda.sqrt(self.total / self.n), "weight": self.n}

        def vjp(x, w, mean, weight, d_mean):
            share = d_mean / (2 * mean * weight)
            return share * 2 * w * x, share * (x**2 - mean * mean)

    def f(acc: coda.tile[M, N], w: coda.row[N]):
        coda.state(("mean", "weight"), power_mean(acc, w), coda.col[M])

    e = coda.build(f)
    round_trip(e)
    function = codalang.epilogue(f)
    acc, w = torch.randn(3, 4, dtype=torch.float64), torch.rand(4, dtype=torch.float64)
    mean, weight = function.hosted(acc.requires_grad_(), w.requires_grad_())
    want = ((acc**2 * w).sum(1) / w.sum()).sqrt()
    torch.testing.assert_close(mean, want)
    torch.testing.assert_close(weight, w.sum().expand(3))
    got = torch.autograd.grad(mean.sum(), (acc, w))
    for have, expected in zip(got, torch.autograd.grad(want.sum(), (acc, w)), strict=True):
        torch.testing.assert_close(have, expected)
    assert repr(power_mean) == "<codalang state power_mean>"


# Calling


def test_an_epilogue_of_python_is_called_as_a_loaded_one() -> None:
    made = codalang.epilogue(EPILOGUES["residual_rms"])
    loaded = codalang.load("residual_rms").residual_rms
    torch.manual_seed(0)
    a, w, res, gamma = (torch.randn(shape, requires_grad=True) for shape in ((2, 3, 5), (4, 5), (2, 3, 4), (4,)))
    for have, want in zip(made(a, w, res, gamma=gamma), loaded(a, w, res, gamma), strict=True):
        assert torch.equal(have, want)
    assert made(a, w, res, gamma)._fields == ("x", "h", "ss")
    acc = a @ w.T
    for have, want in zip(made.hosted(acc, res, gamma), loaded.hosted(acc, res, gamma), strict=True):
        assert torch.equal(have, want)
    assert made.source == print_epilogue(made.epilogue)
    assert made.epilogue == loaded.epilogue
    assert made.backward.epilogue == loaded.backward.epilogue
    assert made.derivative({"acc"}).backward == loaded.derivative({"acc"}).backward
    assert pickle.loads(pickle.dumps(made)).epilogue == made.epilogue
    assert copy.deepcopy(made) is made
    gradients = torch.autograd.grad(sum(o.sum() for o in made(a, w, res, gamma)), (a, w, res, gamma))
    for have, want in zip(
        gradients, torch.autograd.grad(sum(o.sum() for o in loaded(a, w, res, gamma)), (a, w, res, gamma)), strict=True
    ):
        torch.testing.assert_close(have, want)
    with pytest.raises(CodaCallError, match="is missing `gamma`"):
        made(a, w, res)


def test_an_epilogue_keeps_what_is_said_of_its_function() -> None:
    @codalang.epilogue
    def scaled(acc: coda.tile[M, N]):
        """Twice."""
        coda.store("y", acc * 2)

    assert scaled.__doc__ == "Twice."
    assert scaled.__module__ == __name__
    assert scaled.name == "scaled"


# Recording


def test_python_runs_as_usual() -> None:
    """Loops, closures, comprehensions and recursion that ends are Python's."""

    def power(x, n):
        return x if n == 1 else x * power(x, n - 1)

    def f(acc: coda.tile[M, N], r: coda.col[M]):
        for scale in (1.0, 2.0):
            acc = acc * scale
        total = functools.reduce(lambda a, b: a + b, [acc * k for k in range(3)])
        coda.store("y", total + power(r, 3))

    text = "epilogue f(acc: tile[M, N], r: col[M]) {\n    let x = acc * 1 * 2\n"
    text += "    store y: tile[M, N] = x * 0 + x * 1 + x * 2 + r * (r * r)\n}"
    assert coda.build(f) == parse(text).epilogues["f"]


def test_recordings_nest_and_threads_do_not_meet() -> None:
    def inner(acc: coda.tile[M, N]):
        coda.store("y", acc + 1)

    def outer(acc: coda.tile[M, N]):
        x = acc * 2
        made.append(coda.build(inner))
        with ThreadPoolExecutor(1) as pool:
            made.append(pool.submit(coda.build, inner).result())
        coda.store("y", x)

    made: list[Epilogue] = []
    text = "epilogue outer(acc: tile[M, N]) {\n    store y: tile[M, N] = acc * 2\n}"
    assert coda.build(outer) == parse(text).epilogues["outer"]
    assert made[0] == made[1] == coda.build(inner)


def test_an_error_ends_the_recording() -> None:
    def broken(acc: coda.tile[M, N]):
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        coda.build(broken)
    with pytest.raises(CodaTypeError, match="outside of an epilogue"):
        coda.exp(1.0)


def test_long_programs_take_linear_time() -> None:
    def f(acc: coda.tile[M, N], r: coda.col[M]):
        x = acc
        for _ in range(count):
            x = x + r
        coda.store("y", x)

    times = []
    for count in (5_000, 25_000):
        start = time.process_time()
        assert len(coda.build(f).nodes) == count + 2
        times.append(time.process_time() - start)
    assert times[1] < 15 * times[0]


def test_errors_without_source_have_a_line() -> None:
    with pytest.raises(CodaTypeError) as caught:
        exec("@codalang.epilogue\ndef f(acc: tile[M, N]):\n    store('y', acc\n        + (acc > 0))\n", dict(SCOPE))
    assert str(caught.value).splitlines()[0] == (
        "<string>:3:1: operand 2 of `+` must be f32 or i32, got tile[M, N] of bool"
    )
    assert len(str(caught.value).splitlines()) == 2
    with pytest.raises(CodaTypeError, match="^<string>:1:1: epilogue `f` has no output$"):
        try:
            exec("@codalang.epilogue\ndef f(acc: tile[M, N]): pass\n", dict(SCOPE))
        except CodaTypeError as error:
            raise CodaTypeError(error.message, error.loc) from None


def test_an_error_shows_no_frame_of_codalang() -> None:
    with pytest.raises(CodaTypeError) as caught:
        run('@codalang.epilogue\ndef f(acc: tile[M, N]):\n    store("y", acc + (acc > 0))\n')
    frames = [f.filename for f in traceback.extract_tb(caught.value.__traceback__)]
    assert not any("builder/value.py" in name for name in frames)
    assert caught.value.__cause__ is None and caught.value.__suppress_context__


def test_decorated_functions_are_looked_through() -> None:
    def logged(function):
        @functools.wraps(function)
        def call(*args):
            return function(*args)

        return call

    @logged
    def f(acc: coda.tile[M, N]):
        x = acc * 2
        coda.store("y", x + acc)

    e = coda.build(f)
    loc = e.nodes[e.outputs[0].value].loc
    assert loc is not None and loc.source.line(loc.line).strip() == 'coda.store("y", x + acc)'
    assert e.name == "f" and any(n.hint == "x" for n in e.nodes)


def spec_of(epilogue: Epilogue) -> KernelSpec:
    """A kernel of an epilogue that has one parameter and one output."""
    return KernelSpec(epilogue, Operand("bf16", "k", "k"), (), ("bf16",), None)


def test_generated_code_shows_the_line_of_python_but_does_not_depend_on_it() -> None:
    program = 'def f(acc: tile[M, N]):\n    y = acc * {}\n    store("y", y)\n'
    here, below, other = (
        coda.build(run(text)["f"])  # type: ignore[arg-type]
        for text in (program.format(2.0), "\n# further down\n" + program.format(2.0), program.format(3.0))
    )
    assert "# program.py:2: y = acc * 2.0" in generate(spec_of(here))
    assert "# program.py:4: y = acc * 2.0" in generate(spec_of(below))
    assert key_of(spec_of(here)) == key_of(spec_of(below)) != key_of(spec_of(other))


def test_without_columns_and_without_torch() -> None:
    """Python can be told to forget columns; an epilogue is built without importing torch."""
    program = """
import sys
import codalang.builder as coda
def f(acc: coda.tile[coda.M, coda.N]):
    y = coda.exp(acc)
    coda.store("y", y & acc)
try:
    coda.build(f)
except coda.build.__globals__["CodaError"] as error:
    print(error)
assert "torch" not in sys.modules
"""
    command = [sys.executable, "-X", "no_debug_ranges", "-c", program]
    result = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[1])
    assert result.stdout == (
        "<string>:6:1: `&` combines masks, got <tile[M, N]>\n"
        "hint: Python's `&` binds more tightly than comparisons: write `(a > 0) & (b > 0)`\n"
    ), result.stderr


def test_a_state_can_be_given_a_name() -> None:
    def scaled(factor):
        @codalang.state(name=f"total_{factor}")
        class total:
            s: float = 0

            def update(self, x):
                return self.s + factor * x

            def merge(self, other):
                return self.s + other.s

            def finalize(self):
                return {"total": self.s}

        return total

    def f(acc: coda.tile[M, N]):
        coda.state("a", scaled(1)(acc), coda.col[M])
        coda.state("b", scaled(2)(acc), coda.col[M])

    round_trip(coda.build(f))


STRANGERS = [None, "text", b"bytes", (1.0, 2.0), [1.0], {}, {1}, 1j, object(), print, int, ..., range(3), Decimal(1), M]
BINARY = "add sub mul truediv floordiv mod pow matmul lshift rshift and_ or_ xor lt le gt ge eq ne".split()


@pytest.mark.parametrize("name", BINARY)
def test_an_operator_of_python_gives_a_value_or_a_typed_error(name: str) -> None:
    """Also with the stranger on the left, but for `"text" % x`, which makes text."""
    operation = getattr(operator, name)

    def f(acc: coda.tile[M, N]):
        for stranger in STRANGERS:
            for value in (acc, acc > 0, coda.col_index(), coda.sum(acc)):
                with pytest.raises(CodaTypeError):
                    operation(value, stranger)
                if name != "mod" or not isinstance(stranger, str | bytes):
                    with pytest.raises(CodaTypeError):
                        operation(stranger, value)
        coda.store("y", acc)

    assert coda.build(f).outputs


@pytest.mark.parametrize("function", [len, iter, list, int, float, complex, bool, round, hash, repr, str, math.exp])
def test_a_function_of_python_gives_something_or_a_typed_error(function) -> None:
    def f(acc: coda.tile[M, N]):
        for value in (acc, acc > 0, coda.col_index(), coda.sum(acc)):
            if function in (hash, repr, str):
                function(value)
            else:
                with pytest.raises(CodaTypeError):
                    function(value)
        coda.store("y", acc)

    assert coda.build(f).outputs


def test_star_import() -> None:
    e = run("from codalang.builder import *\ndef f(acc: tile[M, N]):\n    reduce('y', sum(abs(acc)), col[M])\n")["f"]
    assert (
        coda.build(e) == parse("epilogue f(acc: tile[M, N]) {\n    reduce y: col[M] = sum(abs(acc))\n}").epilogues["f"]
    )

"""The IR of programs: random ones, and what is derived of them, print, parse back equal, verify, and simplify."""

from __future__ import annotations

from pathlib import Path

import attrs
import pytest
import torch
from effort import examples
from hypothesis import given
from hypothesis import strategies as st
from program_strategies import inputs_for, programs

from codalang.autodiff import derive_program
from codalang.errors import CodaError, CodaNameError, CodaTypeError
from codalang.ir import program_reference as reference
from codalang.ir.build import EpilogueBuilder
from codalang.ir.build_program import ExpressionBuilder, ProgramBuilder
from codalang.ir.dims import Dim
from codalang.ir.printer import print_module, print_program
from codalang.ir.program import Apply, Matmul, Program, ProgramParam, TensorType
from codalang.ir.simplify_program import simplify_program
from codalang.ir.types import COL, SCALAR, row, tile
from codalang.ir.verify_program import verify_program
from codalang.parser import format_source, parse, read_source

EXAMPLES = sorted((Path(__file__).parent.parent / "examples").glob("*.coda"))
T, D, F = Dim.of("T"), Dim.of("D"), Dim.of("F")


def round_trip(program: Program) -> str:
    """Print, parse, compare; the text."""
    text = print_program(program)
    if program.results:
        back = parse(text).programs[program.name]
        assert back == program
        assert print_program(back) == text
        assert format_source(text) == text
    return text


@given(programs())
@examples(30)
def test_random_programs_verify_and_round_trip(program: Program) -> None:
    verify_program(program)
    round_trip(program)


@given(programs())
@examples(30)
def test_derived_programs_verify_and_round_trip(program: Program) -> None:
    derivative = derive_program(program)
    for derived in (derivative.forward, derivative.backward):
        verify_program(derived)
        round_trip(derived)


@given(programs(), st.integers(0, 2**20))
@examples(30)
def test_simplified_programs_compute_the_same(program: Program, seed: int) -> None:
    simple = simplify_program(program)
    verify_program(simple)
    round_trip(simple)
    assert simplify_program(simple) == simple
    assert (simple.params, simple.results) == (program.params, program.results)
    inputs = inputs_for(program, seed)
    wanted, got = reference.run(program, inputs), reference.run(simple, inputs)
    for name, value in wanted.items():
        torch.testing.assert_close(got[name], value, rtol=1e-12, atol=1e-12, equal_nan=True)


@given(programs(), st.integers(0, 2**20))
@examples(15)
def test_simplified_derivatives_compute_the_same(program: Program, seed: int) -> None:
    backward = derive_program(program).backward
    simple = simplify_program(backward)
    verify_program(simple)
    round_trip(simple)
    inputs = inputs_for(backward, seed)
    wanted, got = reference.run(backward, inputs), reference.run(simple, inputs)
    assert wanted.keys() == got.keys()
    for name, value in wanted.items():
        torch.testing.assert_close(got[name], value, rtol=1e-12, atol=1e-12, equal_nan=True)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda p: p.stem)
def test_examples_round_trip(path: Path) -> None:
    module = parse(read_source(path))
    text = print_module(module)
    assert parse(text).programs == module.programs
    assert format_source(text) == text
    for program in module.programs.values():
        verify_program(program)
        round_trip(program)


# What is printed


def scale() -> EpilogueBuilder:
    b = EpilogueBuilder("scale", ("M", "N"))
    acc, r, s = b.param("acc", tile()), b.param("r", COL), b.param("s", SCALAR)
    b.store("y", b.op("mul", b.op("mul", acc, r), s), tile())
    b.reduce("total", acc, COL)
    return b


def chain(**scalars: object) -> Program:
    """x @ w.T, scaled; `scalars` replace its scalar."""
    b = ProgramBuilder("chain")
    b.param("x", (T, D))
    b.param("w", (F, D))
    b.param("r", (T,))
    inputs = {"r": "r", "s": 0.5} | scalars
    b.apply(scale().finish(), Matmul("x", "w", b_transposed=True), inputs, ("y", None))
    return b.finish(("y",))


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (2, "2"),
        (0.1, "0.1"),
        (-0.0, "-0"),
        (float("inf"), "inf"),
        (float("nan"), "nan"),
        (D, "D"),
        (D / 2, "D / 2"),
        (D * 3 / 2, "3 * D / 2"),
        (T * D - F * 2 + 1, "D * T - 2 * F + 1"),
        (F * -1, "-F"),
        (Dim.of(3), "3"),
    ],
)
def test_scalar_arguments(value: float | Dim, shown: str) -> None:
    program = chain(s=value)
    verify_program(program)
    assert f"(y, _) = scale(x @ w.T, r = r, s = {shown})\n" in round_trip(program)


def test_numbers_are_compared_as_written() -> None:
    assert chain(s=0.0) != chain(s=-0.0)
    assert chain(s=float("nan")) == chain(s=float("nan"))
    assert hash(chain(s=2)) == hash(chain(s=2.0))


def test_extents_that_no_operand_gives_are_written() -> None:
    e = EpilogueBuilder("outer", ("M", "N"))
    e.store("y", e.op("exp", e.param("r", COL)), tile())
    b = ProgramBuilder("f")
    b.param("r", (T,))
    b.param("g", (D,))
    b.apply(e.finish(), None, {"r": "r"}, ("y",), extents=(T, D * 2))
    assert "y = outer[T, 2*D](r = r)\n" in round_trip(b.finish(("y",)))


def test_a_value_used_twice_is_named_in_a_function() -> None:
    e = ExpressionBuilder()
    r = e.op("rsqrt", e.value("ss", TensorType((T,))))
    for _ in range(100):
        r = e.op("mul", r, r)
    b = ProgramBuilder("f")
    b.param("ss", (T,))
    b.vector("r", e.result("r", r))
    text = round_trip(b.finish(("r",)))
    assert "fn f_r(ss) {\n    let t1 = rsqrt(ss)\n    let t2 = t1 * t1\n" in text
    assert "    r = f_r(ss)\n" in text


def test_a_function_has_a_name_of_its_own() -> None:
    """Not that of an epilogue, and none of the language."""
    e = ExpressionBuilder()
    r = e.op("exp", e.value("x", TensorType((T,))))
    b = ProgramBuilder("row")
    b.param("x", (T,))
    b.vector("index", e.result("index", e.op("mul", r, r)))
    assert "fn row_index_2(x) {" in round_trip(b.finish(("index",)))


def test_a_program_that_returns_nothing_is_a_comment() -> None:
    b = ProgramBuilder("f")
    assert print_program(b.finish(())) == "# `f` computes nothing: every gradient is zero\n"


def test_epilogues_of_one_name_are_told_apart() -> None:
    other = EpilogueBuilder("scale", ("M", "N"))
    other.store("y", other.op("exp", other.param("acc", tile())), tile())
    b = ProgramBuilder("chain")
    b.param("x", (T, D))
    b.param("r", (T,))
    b.apply(scale().finish(), "x", {"r": "r", "s": 1.0}, ("y", "total"))
    b.apply(other.finish(), "y", {}, ("z",))
    b.apply(scale().finish(), "z", {"r": "r", "s": 1.0}, ("u", None))
    program = b.finish(("u",))
    assert [e.name for e in program.epilogues()] == ["scale", "scale_2"]
    verify_program(program)
    round_trip(program)


def test_an_accumulator_among_the_inputs_is_the_host() -> None:
    b = ProgramBuilder("f")
    b.param("x", (T, D))
    b.param("r", (T,))
    b.apply(scale().finish(), None, {"acc": "x", "r": "r", "s": 1}, ("y", None))
    (statement,) = b.finish(("y",)).statements
    assert isinstance(statement, Apply)
    assert (statement.host, dict(statement.inputs)) == ("x", {"r": "r", "s": 1.0})


# Simplification


def program(text: str) -> Program:
    """The last program of a text."""
    return list(parse(text).programs.values())[-1]


RMS = """
import residual_rms

program f(y: [T, D], w: [D, D], x: [T, D], g: [D]) {
"""


def statements(text: str) -> list[str]:
    """The lines of a simplified program, which must be canonical."""
    simple = simplify_program(program(text))
    verify_program(simple)
    return print_program(simple).split("{\n")[-1].replace("    ", "").splitlines()[:-1]


def test_equal_statements_are_one() -> None:
    assert statements(
        RMS
        + """
        (a, _, s) = residual_rms(y @ w.T, res = x, gamma = g)
        (_, h, t) = residual_rms(y @ w.T, res = x, gamma = g)
        r = rsqrt(s + 1)
        q = rsqrt(t + 1)
        k = a @ w
        l = a @ w
        m = k.T @ l
        return (m, q, h)
        }
        """
    ) == [
        "(a, h, s) = residual_rms(y @ w.T, res = x, gamma = g)",
        "q = rsqrt(s + 1)",
        "k = a @ w",
        "m = k.T @ k",
        "return (m, q, h)",
    ]


def test_two_results_stay_two() -> None:
    assert statements("program f(x: [T]) {\n a = exp(x)\n b = exp(x)\n c = a + b\n return (a, b, c)\n}") == [
        "a = exp(x)",
        "b = exp(x)",
        "c = a + b",
        "return (a, b, c)",
    ]


def test_copies_are_what_they_copy() -> None:
    assert statements("program f(x: [T]) {\n a = x\n b = a\n c = exp(b)\n d = c * 1\n return (c, d)\n}") == [
        "c = exp(x)",
        "d = c",
        "return (c, d)",
    ]


def test_outputs_that_nobody_reads_are_not_computed() -> None:
    simple = simplify_program(program(RMS + "(a, _, _) = residual_rms(y @ w.T, res = x, gamma = g)\nreturn a\n}"))
    (statement,) = simple.statements
    assert isinstance(statement, Apply)
    assert statement.inputs == (("res", "x"),)
    assert [o.name for o in statement.epilogue.outputs] == ["x"]


def test_a_matmul_that_nobody_reads_is_not_computed() -> None:
    text = """
    epilogue e(acc: tile[M, N], r: col[M], x: tile[M, N]) {
        store y: tile[M, N] = acc
        store z: tile[M, N] = r + 1
        store u: tile[M, N] = x + r
    }

    program f(x: [T, D], w: [F, D], r: [T], z: [T, F]) {
        (_, a, _) = e(x @ w.T, r = r, x = z)
        (_, _, b) = e(x @ w.T, r = r, x = z)
        c = a.T @ b
        return c
    }
    """
    assert statements(text)[-1] == "return c"
    simple = simplify_program(program(text.replace("c = a.T @ b\n        return c", "return b")))
    (statement,) = simple.statements
    assert isinstance(statement, Apply)
    assert (statement.host, statement.inputs) == (None, (("r", "r"), ("x", "z")))
    simple = simplify_program(program(text.replace("c = a.T @ b\n        return c", "return a")))
    (statement,) = simple.statements
    assert isinstance(statement, Apply)
    assert (statement.host, statement.extents) == (None, (T, F))
    round_trip(simple)


# Verification


def changed(**changes: object) -> Program:
    """The chain with its statement changed."""
    base = chain()
    return attrs.evolve(base, statements=(attrs.evolve(base.statements[0], **changes),))


def exponential(**changes: object) -> Program:
    """An auxiliary step, changed."""
    e = ExpressionBuilder()
    made = e.result("y", e.op("exp", e.value("x", TensorType((T,)))))
    b = ProgramBuilder("f")
    b.param("x", (T,))
    b.vector("y", made)
    base = b.finish(("y",))
    return attrs.evolve(base, statements=(attrs.evolve(base.statements[0], **changes),))


def two_params(*params: ProgramParam) -> Program:
    return Program("f", params, (), (params[0].name,))


def _not_canonical() -> Program:
    e = EpilogueBuilder("vector", ("One", "Length"))
    e.param("unread", SCALAR)
    e.store("y", e.op("exp", e.param("x", row())), row())
    return exponential(expression=e.finish())


def _of_columns() -> Program:
    e = EpilogueBuilder("vector", ("One", "Length"))
    e.store("y", e.op("exp", e.param("x", COL)), COL)
    return exponential(expression=e.finish())


def _wide() -> Program:
    e = EpilogueBuilder("vector", ("One", "Length"))
    e.store("y", e.op("exp", e.param("x", row(2))), row(2))
    return exponential(expression=e.finish())


FAULTS = {
    "cannot name a program": lambda: attrs.evolve(chain(), name="let"),
    "`exp` is a function of the language": lambda: attrs.evolve(chain(), name="exp"),
    "`Z` is no dimension of `chain`, which has T, D, F": lambda: changed(inputs=(("r", "r"), ("s", Dim.of("Z")))),
    "`Y` is no dimension": lambda: changed(extents=(T, Dim.of("Y"))),
    "`T` is a dimension, hence a scalar": lambda: exponential(
        expression=attrs.evolve(
            exponential().statements[0].expression,  # type: ignore[union-attr]
            params=tuple(attrs.evolve(p, name="T") for p in exponential().statements[0].expression.params),  # type: ignore[union-attr]
            nodes=tuple(
                attrs.evolve(n, attr="T") if n.op == "param" else n
                for n in exponential().statements[0].expression.nodes  # type: ignore[union-attr]
            ),
        )
    ),
    "cannot name a parameter": lambda: two_params(ProgramParam("1", TensorType((T,)))),
    "cannot name a dimension": lambda: two_params(ProgramParam("x", TensorType((Dim.of("return"),)))),
    "cannot name a value": lambda: attrs.evolve(changed(results=("a b", None)), results=("a b",)),
    "has an axis of 0 elements": lambda: two_params(ProgramParam("x", TensorType((Dim(),)))),
    "has an axis of 1/2 elements": lambda: two_params(ProgramParam("x", TensorType((Dim.of(1) / 2,)))),
    "has no shape": lambda: two_params(ProgramParam("x", "T")),  # type: ignore[arg-type]
    "unknown dtype 'f8'": lambda: two_params(ProgramParam("x", TensorType((T,)), "f8")),
    "holds f32, but is declared i32": lambda: two_params(ProgramParam("x", TensorType((T,)), "i32")),
    "only a scalar has a default": lambda: two_params(ProgramParam("x", TensorType((T,)), None, 1.0)),
    "must be a float, got 1": lambda: two_params(ProgramParam("x", TensorType(()), None, 1)),
    "`x` names two values": lambda: two_params(*[ProgramParam("x", TensorType((T,)))] * 2),
    "`T` names a value and a dimension": lambda: two_params(
        ProgramParam("T", TensorType(())), ProgramParam("x", TensorType((T,)))
    ),
    "there is no value `z`": lambda: attrs.evolve(chain(), results=("z",)),
    "`y` is returned twice": lambda: attrs.evolve(chain(), results=("y", "y")),
    "must be a tuple": lambda: attrs.evolve(chain(), results=["y"]),  # type: ignore[arg-type]
    "contracts F elements of `w` with T of `x`": lambda: changed(host=Matmul("w", "x", a_transposed=True)),
    "a matrix is needed, and `r` is a vector": lambda: changed(host=Matmul("r", "w")),
    "cannot be the host": lambda: changed(host=3),
    "is no matmul": lambda: changed(host=Matmul("x", 3)),  # type: ignore[arg-type]
    "`z` here": lambda: changed(host="z"),
    "has 2 results \\(y, total\\), got 1 name": lambda: changed(results=("y",)),
    "`scale` needs `s`": lambda: changed(inputs=(("r", "r"),)),
    "has no parameter `q`": lambda: changed(inputs=(("r", "r"), ("s", 1.0), ("q", 1.0))),
    "is given twice": lambda: changed(inputs=(("r", "r"), ("s", 1.0), ("s", 1.0))),
    "cannot be None": lambda: changed(inputs=(("r", "r"), ("s", None))),
    "inputs in another order": lambda: changed(inputs=(("s", 0.5), ("r", "r"))),
    "a number that is no f32": lambda: changed(inputs=(("r", "r"), ("s", 1))),
    "must be a number, got True": lambda: changed(inputs=(("r", "r"), ("s", True))),
    "is scalar, and `r` is \\[T\\]": lambda: changed(inputs=(("r", "r"), ("s", "r"))),
    "got the number 1": lambda: changed(inputs=(("r", 1.0), ("s", 1.0))),
    "`w` has D\\*F rows where `scale` needs T": lambda: changed(inputs=(("r", "w"), ("s", 1.0))),
    "`x @ w.T` has T rows where `scale` needs F": lambda: changed(extents=(F, F)),
    "`x @ w.T` has F columns where `scale` needs D": lambda: changed(extents=(T, D)),
    "has extents \\[M, N\\], got 3": lambda: changed(extents=(T, F, T)),
    "`reduce total` cannot be tile\\[M, N\\]": lambda: changed(
        epilogue=attrs.evolve(
            scale().finish(), outputs=tuple(attrs.evolve(o, type=tile()) for o in scale().finish().outputs)
        )
    ),
    "applies an epilogue of its own name": lambda: attrs.evolve(chain(), name="scale"),
    "calls its result `y`": lambda: attrs.evolve(exponential(result="z"), results=("z",)),
    "not in canonical form": _not_canonical,
    "must be of rows of width 1": _wide,
    "rows of width 1 and scalars": _of_columns,
    "a length of D": lambda: exponential(length=D),
    "must store or reduce one value": lambda: exponential(expression=scale().finish()),
}


@pytest.mark.parametrize("message", FAULTS)
def test_faults(message: str) -> None:
    with pytest.raises((CodaNameError, CodaTypeError), match=message):
        verify_program(FAULTS[message]())


def test_two_epilogues_of_one_name_are_a_fault() -> None:
    first, second = scale().finish(), attrs.evolve(scale().finish(), dims=("A", "B"))
    base = chain()
    other = attrs.evolve(base.statements[0], epilogue=second, results=("z", None))
    assert first != second
    with pytest.raises(CodaError, match="two epilogues of program `chain` are called `scale`"):
        verify_program(attrs.evolve(base, statements=(*base.statements, other)))


@pytest.mark.parametrize("op", ["col_index", "group_sum", "join"])
def test_an_auxiliary_step_is_elementwise(op: str) -> None:
    e = ExpressionBuilder()
    x = e.value("x", TensorType((T,)))
    made = {
        "col_index": lambda: e.op("float", e.op("col_index")),
        "group_sum": lambda: e.op("group_sum", x, attr=2),
        "join": lambda: e.op("join", e.op("even", x), e.op("odd", x)),
    }[op]()
    with pytest.raises(CodaTypeError, match="is not elementwise"):
        e.result("y", made)


def weighted(b: ProgramBuilder, name: str) -> None:
    """An auxiliary step that reads the matrix w."""
    e = ExpressionBuilder()
    b.vector(name, e.total(name, e.op("exp", e.value("w", TensorType((F, D)))), "sum"))


def test_a_parameter_of_several_axes_is_a_matrix_or_a_vector() -> None:
    def builder() -> ProgramBuilder:
        b = ProgramBuilder("f")
        b.param("x", (F, D, T))
        b.param("w", (F, D))
        return b

    b = builder()
    weighted(b, "s")
    program = b.finish(("s",))
    verify_program(program)
    round_trip(program)
    assert program.statements[0].length == D * F  # type: ignore[union-attr]
    with pytest.raises(CodaTypeError, match="`w` is used as a matrix here, and as a vector"):
        b.matmul("y", Matmul("w", "w", b_transposed=True))
    b = builder()
    b.matmul("y", Matmul("w", "w", b_transposed=True))
    with pytest.raises(CodaTypeError, match="`w` is a matrix"):
        weighted(b, "s")

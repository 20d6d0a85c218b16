"""Text of programs -> IR: what is built, names, calls inlined, imports; any text is either a program or a CodaError."""

from __future__ import annotations

import time
from pathlib import Path

import golden_cases
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from test_program_errors import EPILOGUES

import codalang
from codalang.errors import CodaError, CodaNameError, CodaTypeError, CodaUnsupportedError, Source
from codalang.ir import program_reference as reference
from codalang.ir.build_program import ExpressionBuilder, ProgramBuilder
from codalang.ir.dims import Dim
from codalang.ir.module import Module
from codalang.ir.printer import print_module, print_program
from codalang.ir.program import Apply, Matmul, Product, Program, TensorType, Vector
from codalang.ir.simplify_program import simplify_program
from codalang.ir.types import Dtype
from codalang.ir.verify_program import check_determined, verify_program
from codalang.parser import format_source, parse, read_source

ROOT = Path(__file__).parent.parent
EXAMPLES = sorted((ROOT / "examples").glob("*.coda"))
T, D, F = Dim.of("T"), Dim.of("D"), Dim.of("F")
PARAMS = "x: [T, D], w: [F, D], v: [D, F], g: [D], r: [T], s: scalar, target: [T]: i64"


def program(body: str, params: str = PARAMS, name: str = "f") -> Program:
    """The program of some statements, which must be well-formed and round trip."""
    made = parse(f"program {name}({params}) {{\n{body}\n}}\n{EPILOGUES}").programs[name]
    verify_program(made)
    text = print_program(made)
    assert parse(text).programs[name] == made
    assert format_source(text) == text
    return made


def lines(body: str, params: str = PARAMS) -> list[str]:
    """The statements of a program as they are printed."""
    text = print_program(program(body, params)).split("\nprogram f(")[-1]
    return [line.strip() for line in text.split("{\n")[1].splitlines()[:-1]]


# What is built


def test_a_program_is_what_the_builder_makes() -> None:
    text = """
    program f(x: [T, D], w: [2, F, D], r: [T], n: scalar: i32 = 3, eps: scalar = 1e-5) {
        y = glu(x @ w.T, r = r)
        z = y.T @ x
        q = rsqrt(r / D + eps)
        total = sum(q * q)
        return (z, total)
    }
    """
    module = parse(text + EPILOGUES)
    b = ProgramBuilder("f")
    b.param("x", (T, D))
    b.param("w", (Dim.of(2), F, D))
    b.param("r", (T,))
    b.param("n", (), "i32", 3)
    b.param("eps", (), None, 1e-5)
    b.apply(module.epilogues["glu"], Matmul("x", "w", b_transposed=True), {"r": "r"}, ("y",))
    b.matmul("z", Matmul("y", "x", a_transposed=True))
    e = ExpressionBuilder()
    ratio = e.op("div", e.value("r", TensorType((T,))), e.extent(D))
    b.vector("q", e.result("q", e.op("rsqrt", e.op("add", ratio, e.value("eps", TensorType(()))))))
    e = ExpressionBuilder()
    q = e.value("q", TensorType((T,)))
    b.vector("total", e.total("total", e.op("mul", q, q), "sum"))
    assert module.programs["f"] == b.finish(("z", "total"))
    assert b.types["y"] == TensorType((T, F))
    assert b.types["z"] == TensorType((F, D))
    assert b.types["total"] == TensorType(())


@pytest.mark.parametrize(
    ("text", "extent"),
    [
        ("T", T),
        ("2*F", F * 2),
        ("F * 2", F * 2),
        ("F+F", F * 2),
        ("(T + 2*D)*F", T * F + D * F * 2),
        ("T*D - -F", T * D + F),
        ("4*T/2", T * 2),
        ("T/2", T / 2),
        ("(T + D)/2", T / 2 + D / 2),
        ("3", Dim.of(3)),
        ("2*3 - 1", Dim.of(5)),
    ],
)
def test_extents(text: str, extent: Dim) -> None:
    assert program("return x", f"x: [{text}], y: [T, D, F]").params[0].type.shape == (extent,)


def test_parameters() -> None:
    made = program("return x", "x: [2, F, D]: bf16, ids: [B, T]: i64, mask: [T]: bool, s: scalar, n: scalar: i32 = -3,")
    assert [(p.name, str(p.type), p.type.dtype, p.dtype, p.default) for p in made.params] == [
        ("x", "[2, F, D]", Dtype.F32, "bf16", None),
        ("ids", "[B, T]", Dtype.I32, "i64", None),
        ("mask", "[T]", Dtype.BOOL, "bool", None),
        ("s", "scalar", Dtype.F32, None, None),
        ("n", "scalar", Dtype.I32, "i32", -3),
    ]
    assert made.dims == ("F", "D", "B", "T")


@pytest.mark.parametrize(
    "call",
    [
        "norm(x @ w.T, q, b)",
        "norm(x @ w.T, q, g = b)",
        "norm(x @ w.T, res = q, g = b)",
        "norm(x @ w.T, g = b, res = q)",
        "norm(acc = x @ w.T, g = b, res = q)",
        "norm(\n    x @ w.T,\n    res = q,\n    g = b,\n)",
        "norm((x) @ (w.T), (q), b)",
    ],
)
def test_arguments_by_position_and_by_name(call: str) -> None:
    made = program(f"(y, _, ss) = {call}\nreturn (y, ss)", "x: [T, D], w: [F, D], q: [T, F], b: [F]")
    (statement,) = made.statements
    assert isinstance(statement, Apply)
    assert statement.host == Matmul("x", "w", b_transposed=True)
    assert statement.inputs == (("res", "q"), ("g", "b"))
    assert statement.results == ("y", None, "ss")
    assert statement.extents == (T, F)


@pytest.mark.parametrize(
    ("text", "matmul"),
    [
        ("x @ w.T", Matmul("x", "w", b_transposed=True)),
        ("x @ v", Matmul("x", "v")),
        ("x.T @ x", Matmul("x", "x", a_transposed=True)),
        ("v.T @ x.T", Matmul("v", "x", True, True)),
        ("x\n    @ w\n    .T", Matmul("x", "w", b_transposed=True)),
    ],
)
def test_matmuls(text: str, matmul: Matmul) -> None:
    (statement,) = program(f"y = {text}\nreturn y").statements
    assert statement == Product("y", matmul)


def test_a_host_is_a_matrix_or_nothing() -> None:
    made = program("y = scale(x, r = r)\nz = outer(r, g)\nu = spread[T, 2*D](a = s)\nreturn (y, z, u)")
    assert [s.host for s in made.statements if isinstance(s, Apply)] == ["x", None, None]
    assert [s.extents for s in made.statements if isinstance(s, Apply)] == [(T, D), (T, D), (T, D * 2)]


def test_samples() -> None:
    made = program("y = every(x, gate = gate)\nreturn y", "x: [B, S, D], gate: [B, D]")
    (statement,) = made.statements
    assert isinstance(statement, Apply)
    assert statement.extents == (Dim.of("B") * Dim.of("S"), D, Dim.of("B"))


# Arguments


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("0.5", 0.5),
        ("-1", -1.0),
        ("inf", float("inf")),
        ("D", D),
        ("2 * D", D * 2),
        ("(T + D) / 2", T / 2 + D / 2),
        ("-T", T * -1),
        ("2 - 3", -1.0),
        ("s", "s"),
    ],
)
def test_a_scalar_argument_may_be_a_number_or_an_extent(text: str, value: object) -> None:
    made = program(f"y = shift(x, by = {text}, count = 7, on = false, target = target)\nreturn y")
    (statement,) = made.statements
    assert isinstance(statement, Apply)
    assert statement.inputs == (("by", value), ("count", 7), ("on", False), ("target", "target"))


def test_an_argument_that_is_an_expression_is_a_step_of_its_own() -> None:
    assert lines("y = scale(x @ w.T, r = rsqrt(r / D + 1e-5))\nz = scale(y, r = 2 * r)\nreturn z") == [
        "r_2 = rsqrt(r / D + 1e-05)",
        "y = scale(x @ w.T, r = r_2)",
        "r_3 = 2 * r",
        "z = scale(y, r = r_3)",
        "return z",
    ]
    assert lines("by = 1 / D\ny = shift(x, by = 1 / D, count = 1, on = true, target = target)\nreturn (y, by)") == [
        "by = 1 / D",
        "by_2 = 1 / D",
        "y = shift(x, by = by_2, count = 1, on = true, target = target)",
        "return (y, by)",
    ]


def test_names_of_later_lines_are_not_taken() -> None:
    assert lines("y = scale(x, r = 2 * q)\nr = 3 * q\nreturn (y, r)", "x: [T, D], q: [T]")[0] == "r_2 = 2 * q"


# Auxiliary steps


def test_nested_reductions_are_steps_of_their_own() -> None:
    body = "loss = sum(r - max(r) * sum(exp(r - max(r)))) / T + min(g)\nreturn loss"
    assert lines(body) == [
        "loss_max = max(r)",
        "loss_max_2 = max(r)",
        "loss_sum = sum(exp(r - loss_max_2))",
        "loss_sum_2 = sum(r - loss_max * loss_sum)",
        "loss_min = min(g)",
        "loss = loss_sum_2 / T + loss_min",
        "return loss",
    ]


def test_min_and_max_of_two_are_elementwise() -> None:
    assert lines("y = max(r, min(r, s))\nm = max(y)\nreturn (y, m)") == [
        "y = max(r, min(r, s))",
        "m = max(y)",
        "return (y, m)",
    ]


def test_functions_are_inlined() -> None:
    made = program("y = half(half(r) + exp(r))\nreturn y")
    (statement,) = made.statements
    assert isinstance(statement, Vector)
    assert [n.op for n in statement.expression.nodes if n.op not in ("param", "const")] == ["div", "exp", "add", "div"]


def test_an_epilogue_may_have_the_name_of_a_function() -> None:
    made = program(
        "y = tanh(r)\nz = tanh(x)\nu = tanh(x @ w.T)\nv1 = 1 + tanh(r)\nt = tanh(s)\nreturn (y, z, u, v1, t)"
    )
    assert [type(s) for s in made.statements] == [Vector, Apply, Apply, Vector, Vector]


def test_values_are_read_in_the_order_of_their_first_use() -> None:
    (statement,) = program("y = r * s + r * D - float(target)\nreturn y").statements
    assert isinstance(statement, Vector)
    assert statement.reads == ("r", "s", "D", "target")
    assert statement.length == T


def test_values_may_have_names_of_functions_and_of_the_ir() -> None:
    body = ["exp = exp(One + Length)", "sum = sum(exp)", "return (exp, sum)"]
    assert lines("\n".join(body), "One: [T], Length: [T]") == body


def test_constants_and_copies() -> None:
    assert lines("a = 2\nb = D\nc = r\nd = s\nreturn (a, b, c, d)") == [
        "a = 2",
        "b = D",
        "c = r",
        "d = s",
        "return (a, b, c, d)",
    ]


# Programs that call programs

CALLED = """
program norm_of(x: [T, D], g: [D], eps: scalar = 1e-5) {
    (_, h, ss) = norm(x, res = x, g = g)
    r = rsqrt(ss / D + eps)
    return (h, r)
}

program layer(x: [T, D], w: [2, F, D], g: [D], eps: scalar) {
    (h, r) = norm_of(x, g, eps)
    y = glu(h @ w.T, r = r)
    return y
}

program twice(x: [T, D], w: [2, D, D], g: [D], h: [T]) {
    y = layer(x, w, g, 1e-6)
    z = layer(y, w, g = g, eps = 1 / D)
    return (z, h)
}
"""


def test_calls_are_inlined() -> None:
    module = parse(CALLED + EPILOGUES)
    text = print_program(module.programs["twice"])
    assert text.split("program twice")[1].split("{\n")[1] == (
        "    (_, h_2, ss) = norm(x, res = x, g = g)\n"
        "    r = rsqrt(ss / D + 1e-06)\n"
        "    y = glu(h_2 @ w.T, r = r)\n"
        "    eps = 1 / D\n"
        "    (_, h_3, ss_2) = norm(y, res = y, g = g)\n"
        "    r_2 = rsqrt(ss_2 / D + eps)\n"
        "    z = glu(h_3 @ w.T, r = r_2)\n"
        "    return (z, h)\n"
        "}\n"
    )
    assert parse(text).programs["twice"] == module.programs["twice"]


def test_a_called_program_computes_what_it_does_alone() -> None:
    module = parse(CALLED + EPILOGUES)
    generator = torch.Generator().manual_seed(0)
    x, w, g, h = (
        torch.randn(*shape, dtype=torch.float64, generator=generator) for shape in ((6, 4), (2, 4, 4), (4,), (6,))
    )
    both = reference.run(module.programs["twice"], {"x": x, "w": w, "g": g, "h": h})
    first = reference.run(module.programs["layer"], {"x": x, "w": w, "g": g, "eps": torch.tensor(1e-6)})["y"]
    second = reference.run(module.programs["layer"], {"x": first, "w": w, "g": g, "eps": torch.tensor(0.25)})["y"]
    torch.testing.assert_close(both["z"], second, rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    ("callee", "caller"),
    [
        ("x: [T, D]", "x: [A, B]"),
        ("x: [T, 2*D]", "x: [T, 2*B]"),
        ("x: [T, D + 1]", "x: [T, B]"),
        ("x: [T, (Q + 2*K)*P], p: [P], q: [Q]", "x: [T, (A + 2*B)*C], p: [C], q: [A]"),
        ("p: [P, D*P], q: [D]", "p: [2*C, 6*C], q: [3]"),
        ("x: [2, F, D], y: [F]", "x: [2, A, B], y: [A]"),
    ],
)
def test_dimensions_of_a_call_are_solved_for(callee: str, caller: str) -> None:
    names = [p.split(":")[0].strip() for p in callee.replace("],", "];").split(";")]
    text = f"program g({callee}) {{\n s = sum({names[-1]} * 1)\n return s\n}}\n" if len(names) > 1 else ""
    text = text or f"program g({callee}) {{\n s = 1 + T\n return s\n}}\n"
    made = parse(text + f"program f({caller}) {{\n made = g({', '.join(names)})\n return made\n}}\n").programs["f"]
    verify_program(made)
    assert len(made.statements) == 1


def test_what_a_statement_made_has_its_axes_flattened() -> None:
    text = """
    program g(x: [B, S, D], gate: [B, D], q: [B, S], w: [F, D]) {
        y = every(x, gate = gate)
        z = scale(y @ w.T, r = exp(q) / S)
        return z
    }

    program f(x: [N*L, D], e: [F, D], w: [D, F], gate: [N, F], ones: [F], res: [N, L, F]) {
        (y, _, ss) = norm(x @ e.T, res = res, g = ones)
        z = g(y, gate, ss, w)
        return z
    }
    """
    made = parse(text + EPILOGUES).programs["f"]
    verify_program(made)
    assert "r = exp(ss) / L\n" in print_program(made)


def test_extents_as_numbers_are_those_of_the_caller() -> None:
    text = "program g(x: [T, D], r: [T]) {\n y = r / D + T\n return y\n}\n"
    made = parse(text + "program f(x: [A + B, 3*C/2], r: [A + B]) {\n z = g(x, r)\n return z\n}\n").programs["f"]
    assert "    z = r / (3 * C / 2) + (A + B)\n" in print_program(made)


def test_a_result_that_is_an_argument_is_that_value() -> None:
    text = "program g(x: [T, D], s: scalar, k: scalar) {\n y = 2 * s\n return (x, y, s, k)\n}\n"
    made = parse(text + "program f(a: [T, D]) {\n (x, y, n, k) = g(a, 3, T)\n z = x.T @ x\n return (z, x, n, k)\n}\n")
    made_f = made.programs["f"]
    assert print_program(made_f).split("{\n")[1] == (
        "    y = 2 * 3\n    n = 3\n    k = T\n    z = a.T @ a\n    return (z, a, n, k)\n}\n"
    )
    verify_program(made_f)


def test_what_a_call_discards_gets_a_fresh_name() -> None:
    assert parse(
        CALLED + EPILOGUES + "program f(x: [T, D], g: [D]) {\n (h, _) = norm_of(x, g)\n return h\n}\n"
    ).programs["f"].statements[-1].makes == ("r",)


def test_calls_may_be_in_any_order_of_definitions() -> None:
    texts = CALLED.strip().split("\n\n")
    assert parse("\n".join(reversed(texts)) + EPILOGUES).programs == parse(CALLED + EPILOGUES).programs


def test_a_chain_of_calls_may_be_long() -> None:
    chain = "program p0(x: [T]) {\n y = exp(x)\n return y\n}\n" + "".join(
        f"program p{i}(x: [T]) {{\n y = p{i - 1}(x)\n return y\n}}\n" for i in range(1, 2000)
    )
    assert parse(chain).programs["p1999"].statements == parse(chain).programs["p0"].statements


@pytest.mark.parametrize(
    ("shape", "step"), [("[T]", "exp(x)"), ("[T]", " * ".join("x" * 500)), ("[T, T]", "x @ x.T"), ("[T, T]", "tanh(x)")]
)
def test_calls_that_double_are_an_error_in_time(shape: str, step: str) -> None:
    text = f"{EPILOGUES}\nprogram p0(x: {shape}) {{\n y = {step}\n return y\n}}\n" + "".join(
        f"program p{i}(x: {shape}) {{\n a = p{i - 1}(x)\n y = p{i - 1}(a)\n return y\n}}\n" for i in range(1, 60)
    )
    start = time.process_time()
    with pytest.raises(CodaUnsupportedError, match="takes more than 25,000 steps"):
        parse(text)
    assert time.process_time() - start < 20


# Dimensions


def test_dimensions_that_no_shape_gives_are_an_error_at_load() -> None:
    text = "program p(x: [T, A + B], w: [D, A + B]{}) {{\n    y = x @ w.T\n    return y\n}}\n"
    with pytest.raises(CodaTypeError, match="do not say what `A` and `B` of `p` are") as caught:
        codalang.load(text.format(""))
    assert caught.value.loc is not None and (caught.value.loc.line, caught.value.loc.column) == (1, 11)
    with pytest.raises(CodaTypeError, match="do not say what `A` and `B`"):
        check_determined(parse(text.format(", g: [A*A]")).programs["p"])
    loaded = codalang.load(text.format(", g: [A]"))
    assert loaded.p(torch.ones(2, 5), torch.ones(3, 5), torch.ones(4)).shape == (2, 3)
    # A derived program knows its sizes: it is checked at the call alone.
    x = torch.ones(2, 5, requires_grad=True)
    loaded.p(x, torch.ones(3, 5), torch.ones(4)).sum().backward()
    assert torch.equal(x.grad, torch.full((2, 5), 3.0))


# Files


def test_programs_and_epilogues_are_imported(tmp_path: Path) -> None:
    (tmp_path / "epilogues.coda").write_text(EPILOGUES.split("program mlp")[0])
    (tmp_path / "programs.coda").write_text('import "epilogues.coda"\n' + CALLED)
    main = tmp_path / "main.coda"
    main.write_text(
        'import "programs.coda"\nimport residual\n\n'
        "program f(x: [T, D], w: [2, F, D], g: [D], v: [D, F]) {\n"
        "    y = layer(x, w, g, eps = 0)\n    z = residual(y @ v.T, res = x)\n    return z\n}\n"
    )
    module = parse(read_source(main))
    assert set(module.programs) == {"norm_of", "layer", "twice", "f"}
    assert set(module.epilogues) == {"residual"}
    assert [e.name for e in module.programs["f"].epilogues()] == ["norm", "glu", "residual"]
    text = print_module(module)
    again = parse(text)
    assert again.programs == module.programs
    assert set(again.epilogues) == {"residual", "norm", "glu"}
    assert format_source(text) == text


def test_epilogues_of_one_name_in_two_files_are_told_apart(tmp_path: Path) -> None:
    (tmp_path / "a.coda").write_text(
        "epilogue e(x: tile[M, N]) {\n    store y: tile[M, N] = exp(x)\n}\n"
        "program p(x: [T, D]) {\n    y = e(x)\n    return y\n}\n"
    )
    main = tmp_path / "main.coda"
    main.write_text(
        'import "a.coda"\nepilogue e(x: tile[M, N]) {\n    store y: tile[M, N] = -x\n}\n'
        "program f(x: [T, D]) {\n    y = e(x)\n    z = p(y)\n    return z\n}\n"
    )
    module = parse(read_source(main))
    assert [e.name for e in module.programs["f"].epilogues()] == ["e", "e_2"]
    verify_program(module.programs["f"])
    assert parse(print_program(module.programs["f"])).programs == {"f": module.programs["f"]}


def test_two_imported_programs_of_one_name_are_an_error(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / f"{name}.coda").write_text("program p(x: [T]) {\n    return x\n}\n")
    main = tmp_path / "main.coda"
    main.write_text('import "a.coda"\nimport "b.coda"\n')
    with pytest.raises(CodaNameError, match="two imported files define a program `p`"):
        parse(read_source(main))


def test_a_program_wins_over_an_imported_one(tmp_path: Path) -> None:
    (tmp_path / "a.coda").write_text("program p(x: [T]) {\n    return x\n}\n")
    main = tmp_path / "main.coda"
    main.write_text('import "a.coda"\nepilogue p(x: tile[M, N]) {\n    store y: tile[M, N] = x\n}\n')
    module = parse(read_source(main))
    assert (set(module.epilogues), set(module.programs)) == ({"p"}, set())


# Formatting

UGLY = """
program   f( x :[T,2 * F],w:[(Q+2*KV) *HD , T]:bf16,s:scalar=1e-5){
(a,_,c)=norm(x@w . T,res=x,g=g) # the first

y=x.T@  w
z=spread [ T,2 * F ]( a=-s )
q=g(a,
b=c,
)
return(y,z)}
fn g(x)=x
"""


def test_format() -> None:
    pretty = """program f(x: [T, 2*F], w: [(Q + 2*KV)*HD, T]: bf16, s: scalar = 1e-5) {
    (a, _, c) = norm(x @ w.T, res = x, g = g)  # the first

    y = x.T @ w
    z = spread[T, 2*F](a = -s)
    q = g(a,
        b = c,
    )
    return (y, z)
}

fn g(x) = x
"""
    assert format_source(UGLY) == pretty
    assert format_source(pretty) == pretty


# Any text


def seconds(text: str) -> float:
    """How much processor time it takes to parse, print, simplify, verify and format a text."""
    start = time.process_time()
    try:
        module = parse(text)
        print_module(module)
        for made in module.programs.values():
            verify_program(simplify_program(made))
    except CodaError:
        pass
    format_source(text)
    return time.process_time() - start


HEAD = "program f(x: [T], y: [T, T], r: [T]) {\n"
LARGE = {
    "a long sum": lambda n: f"{HEAD} z = {'x + ' * n}x\n return z\n}}",
    "a long sum of dimensions": lambda n: f"{HEAD} z = {'T + ' * n}T\n return z\n}}",
    "a long extent": lambda n: f"program f(x: [{'T + ' * n}T]) {{\n return x\n}}",
    "deep parentheses": lambda n: f"{HEAD} z = {'(' * n}x{')' * n}\n return z\n}}",
    "deep calls": lambda n: f"{HEAD} z = {'exp(' * n}x{')' * n}\n return z\n}}",
    "deep sums": lambda n: f"{HEAD} z = {'sum(x * ' * (n // 8)}x{')' * (n // 8)}\n return z\n}}",
    "many statements": lambda n: (
        HEAD
        + "z0 = x + r\n"
        + "".join(f"z{i} = z{i - 1} + x\n" for i in range(1, n // 8))
        + f"return z{n // 8 - 1}\n}}"
    ),
    "many matmuls": lambda n: (
        HEAD
        + "z0 = y @ y\n"
        + "".join(f"z{i} = z{i - 1} @ y.T\n" for i in range(1, n // 8))
        + f"return z{n // 8 - 1}\n}}"
    ),
    "many epilogues": lambda n: (
        HEAD
        + "z0 = y @ y\n"
        + "".join(f"z{i} = e(z{i - 1} @ y.T, r = exp(r))\n" for i in range(1, n // 16))
        + f"return z{n // 16 - 1}\n}}\nepilogue e(acc: tile[M, N], r: col[M]) {{\n store y: tile[M, N] = acc * r\n}}"
    ),
    "many parameters": lambda n: (
        f"program f({', '.join(f'x{i}: [T, D{i}]' for i in range(n // 8))}) {{\n return x0\n}}"
    ),
    "many vectors": lambda n: (
        f"program f({', '.join(f'x{i}: [T]' for i in range(n // 8))}) {{\n"
        f" z = {' + '.join(f'x{i}' for i in range(n // 8))}\n return z\n}}"
    ),
    "many results": lambda n: (
        HEAD
        + "".join(f"z{i} = exp(x)\n" for i in range(n // 8))
        + f"return ({', '.join(f'z{i}' for i in range(n // 8))})\n}}"
    ),
    "a long cycle": lambda n: (
        HEAD + "".join(f"z{i} = exp(z{i + 1})\n" for i in range(n // 8)) + f"z{n // 8} = exp(z0)\nreturn z0\n}}"
    ),
    "many calls": lambda n: (
        "program g(x: [T]) {\n y = exp(x)\n return y\n}\n"
        + HEAD
        + "z0 = x\n"
        + "".join(f"z{i} = g(z{i - 1})\n" for i in range(1, n // 8))
        + f"return z{n // 8 - 1}\n}}"
    ),
    "many programs": lambda n: (
        HEAD
        + "return x\n}\n"
        + "".join(f"program p{i}(x: [T]) {{\n y = exp(x)\n return y\n}}\n" for i in range(n // 16))
    ),
    "attributes of attributes": lambda n: f"{HEAD} z = x{'.T' * n} @ y\n return z\n}}",
    "matmuls of matmuls": lambda n: f"{HEAD} z = y{' @ y' * n}\n return z\n}}",
}


@pytest.mark.parametrize("name", LARGE)
def test_large_programs_take_linear_time(name: str) -> None:
    # 8 times the program: a quadratic step would take 64 times as long.
    small = min(seconds(LARGE[name](2_000)) for _ in range(2))
    assert seconds(LARGE[name](16_000)) < 30 * small + 0.1


TOKENS = [
    *"program epilogue fn return let store import".split(),
    *"( ) [ ] { } , : = + - * / < == @ . .T ; # \n".split(" "),
    *"T D F 2 2*F D/2 scalar i32 bf16 sum max exp rsqrt where norm scale glu mlp half outer spread every".split(),
    *"x w v g r s y z _ 1 1e-5 true inf".split(),
    "\n",
    f"program f({PARAMS}) {{\n",
    "    y = x @ w.T\n",
    "    y = scale(x @ w.T, r = ",
    "    (y, z, _) = norm(",
    "    z = sum(",
    "    return y\n}\n",
    "    return (y, z)\n}\n",
]


def answers(text: str) -> None:
    """Nothing but a CodaError comes out; what parses is well-formed, prints and formats."""
    try:
        module: Module = parse(Source("<string>", text))
    except CodaError as error:
        assert str(error)
        assert error.loc is not None
        return
    for made in module.programs.values():
        verify_program(made)
        assert parse(print_program(made)).programs[made.name] == made
    assert parse(print_module(module)).programs == module.programs
    assert parse(format_source(text)).programs == module.programs


@given(st.lists(st.sampled_from(TOKENS), max_size=40), st.sampled_from(["", " "]))
@example([HEAD, " z = ", "(" * 30_000], "")
@example([HEAD, " z = x.T.T @ y\n return z\n}"], "")
def test_any_tokens(tokens: list[str], between: str) -> None:
    answers(between.join(tokens) + EPILOGUES)


SAMPLES = [text for text, _ in golden_cases.load("program_errors.txt").values()] + [CALLED]
STATEMENTS = sorted({line for text in SAMPLES for line in text.splitlines() if line.startswith("    ")})


@given(st.lists(st.sampled_from(STATEMENTS), max_size=12))
def test_any_statements(statements: list[str]) -> None:
    answers(f"program f({PARAMS}) {{\n" + "\n".join(statements) + "\n    return x\n}\n" + EPILOGUES)


@given(st.data())
def test_mutated_programs(data: st.DataObject) -> None:
    text = data.draw(st.sampled_from([CALLED + EPILOGUES, *[t + EPILOGUES for t in SAMPLES]]))
    start = data.draw(st.integers(0, len(text)))
    end = data.draw(st.integers(start, min(len(text), start + 12)))
    answers(text[:start] + data.draw(st.sampled_from(["", *TOKENS])) + text[end:])


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda p: p.stem)
def test_examples_are_formatted(path: Path) -> None:
    assert format_source(read_source(path)) == path.read_text()

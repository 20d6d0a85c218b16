"""Text -> IR: what is built, how names and line breaks work, and that any text is either a program or a CodaError."""

from __future__ import annotations

import time
from fractions import Fraction
from pathlib import Path

import golden_cases
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from strategies import epilogues

from codalang.errors import CodaError, CodaNameError, CodaUnsupportedError, Source
from codalang.ir.build import EpilogueBuilder
from codalang.ir.epilogue import Epilogue
from codalang.ir.ops import OPS
from codalang.ir.printer import print_epilogue
from codalang.ir.types import COL, SCALAR, Kind, row, tile
from codalang.ir.verify import verify
from codalang.parser import decode, format_source, parse, read_source

STDLIB = sorted((Path(__file__).parent.parent / "stdlib").glob("*.coda"))


def body(statements: str, params: str = "acc: tile[M, N], r: col[M]") -> Epilogue:
    """The epilogue of some statements."""
    return parse(f"epilogue e({params}) {{\n{statements}\n}}\n").epilogues["e"]


def expression(text: str) -> Epilogue:
    """The epilogue that stores one expression of the tile acc and the col r."""
    return body(f"store y: tile[M, N] = {text}")


# What is built


def test_residual_rms_is_what_the_builder_makes() -> None:
    b = EpilogueBuilder("residual_rms", ("M", "N"))
    acc, res, gamma = b.param("acc", tile()), b.param("res", tile()), b.param("gamma", row())
    x = b.op("add", acc, res)
    b.store("x", x, tile())
    b.store("h", b.op("mul", x, gamma), tile())
    b.reduce("ss", b.op("mul", x, x), COL)
    text = next(p for p in STDLIB if p.stem == "residual_rms")
    assert parse(read_source(text)).epilogues == {"residual_rms": b.finish()}


@pytest.mark.parametrize("path", STDLIB, ids=lambda p: p.stem)
def test_standard_library_defines_what_its_file_names_and_is_formatted(path: Path) -> None:
    source = read_source(path)
    module = parse(source)
    assert list(module.epilogues) == [path.stem]
    verify(module.epilogues[path.stem])
    assert source.text.startswith("# ")
    assert format_source(source) == source.text


def test_every_op_can_be_written() -> None:
    calls = {name for name, info in OPS.items() if info.infix is None} - {"even", "odd"}
    for name in sorted(calls):
        masks = ["acc > r" if dtype.value == "bool" else "acc" for dtype in OPS[name].operands]
        value = f"{name}({', '.join(masks)})"
        e = body(f"let x = {value}\nreduce s: col[M] = sum(x)")
        assert e.nodes[e.outputs[0].value].op == name
    infix = {info.infix: name for name, info in OPS.items() if info.infix and len(info.operands) == 2}
    for symbol, name in infix.items():
        left, right = ("acc > r", "acc < r") if name in ("and", "or") else ("acc", "r")
        e = expression(
            f"where(({left}) {symbol} ({right}), acc, r)" if OPS[name].result.value == "bool" else f"acc {symbol} r"
        )
        assert name in {n.op for n in e.nodes}
    assert {n.op for n in expression("where(not (-acc > 0), neg(acc), r)").nodes} >= {"not", "neg"}


@pytest.mark.parametrize(
    ("loose", "explicit"),
    [
        ("acc + r * acc - r", "(acc + (r * acc)) - r"),
        ("acc - r - acc / r / acc", "(acc - r) - ((acc / r) / acc)"),
        ("-acc * -r", "(-acc) * (-r)"),
        ("acc - -r", "acc - (-r)"),
        (
            "where(acc < r and acc > 0 or not acc == r, acc, r)",
            "where(((acc < r) and (acc > 0)) or (not (acc == r)), acc, r)",
        ),
        ("where(not acc < r and acc + 1 > r, acc, r)", "where((not (acc < r)) and ((acc + 1) > r), acc, r)"),
        ("where(acc > 0 or acc < 1 or acc > 2, acc, r)", "where((acc > 0 or acc < 1) or acc > 2, acc, r)"),
        ("neg(acc)", "-acc"),
        ("neg(1) + acc", "-(1) + acc"),
    ],
)
def test_precedence(loose: str, explicit: str) -> None:
    assert expression(loose) == expression(explicit)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1", 1.0),
        ("1.", 1.0),
        (".5", 0.5),
        ("1e-5", 1e-5),
        ("1.5E+3", 1500.0),
        ("123456789012345678901234567890", 123456789012345678901234567890.0),
        ("1" * 300, float("1" * 300)),
        ("5e-324", 5e-324),
        ("1e-400", 0.0),
        ("-1", -1.0),
        ("- 1", -1.0),
        ("-0", -0.0),
        ("-inf", float("-inf")),
        ("nan", float("nan")),
        ("-nan", float("nan")),
    ],
)
def test_constants(text: str, value: float) -> None:
    node = expression(text).nodes[0]
    assert (node.op, repr(node.attr), node.type) == ("const", repr(value), SCALAR)


def test_minus_is_folded_into_a_bare_number_only() -> None:
    for text in ("-(1)", "--1", "-(-1)", "-(inf)"):
        assert [n.op for n in expression(text).nodes] == ["const", "neg"]
    assert [n.op for n in expression("1 - 1").nodes] == ["const", "sub"]


def test_shapes_and_dtypes() -> None:
    e = body(
        "store a: tile[T, H/2]: f16 = h\nstore b: tile[T, 2*H] = w\n"
        "reduce c: row[H]: bf16 = sum(x)\nreduce d: scalar = sum(x)",
        "x: tile[T, H]: bf16, h: row[H/2]: f32, w: row[2*H], c: col[T]: f16, s: scalar: f32",
    )
    assert e.dims == ("T", "H")
    assert [(p.type.kind, p.type.width, p.dtype) for p in e.params] == [
        (Kind.TILE, Fraction(1), "bf16"),
        (Kind.ROW, Fraction(1, 2), "f32"),
        (Kind.ROW, Fraction(2), None),
        (Kind.COL, None, "f16"),
        (Kind.SCALAR, None, "f32"),
    ]
    assert [(o.type.kind, o.type.width, o.dtype) for o in e.outputs] == [
        (Kind.TILE, Fraction(1, 2), "f16"),
        (Kind.TILE, Fraction(2), None),
        (Kind.ROW, Fraction(1), "bf16"),
        (Kind.SCALAR, None, None),
    ]


def test_dimensions_are_declared_or_first_used() -> None:
    assert body("reduce s: scalar = sum(r)", "r: row[M]").dims == ("M_rows", "M")
    assert body("reduce s: scalar = sum(r)", "r: col[N]").dims == ("N", "N_columns")
    assert body("reduce s: scalar = sum(1)", "").dims == ("M", "N")
    declared = parse("epilogue e[T, H](r: row[H]) {\n reduce s: col[T] = sum(r)\n}").epilogues["e"]
    assert declared.dims == ("T", "H")
    with pytest.raises(CodaError, match="expected `T`"):
        parse("epilogue e[T, H](r: row[H]) {\n reduce s: col[M] = sum(r)\n}")


def test_names_of_values_functions_and_outputs_do_not_meet() -> None:
    e = parse(
        "fn f(exp) = exp(exp)\n"
        "epilogue e(max: tile[M, N], exp: col[M]) {\n"
        "    let f = max(max, exp)\n    store exp: tile[M, N] = f(f)\n    store tile: tile[M, N] = exp\n}\n"
    ).epilogues["e"]
    assert [n.op for n in e.nodes] == ["param", "param", "max", "exp"]
    assert [o.name for o in e.outputs] == ["exp", "tile"]


def test_store_does_not_change_what_later_lines_see() -> None:
    e = body(
        "store acc: tile[M, N] = acc * 2\nstore y: tile[M, N] = acc\n"
        "reduce r: col[M] = sum(acc)\nstore z: tile[M, N] = r"
    )
    assert [e.nodes[o.value].op for o in e.outputs] == ["mul", "param", "param", "param"]
    assert e.nodes[e.outputs[3].value].attr == "r"


# Functions


def test_functions_are_hygienic() -> None:
    e = parse(
        "fn f(acc) {\n let r = acc * 2\n let (a, _) = split(r)\n return join(a, r)\n}\n"
        "fn g(x) = x + x\n"
        "epilogue e(acc: tile[M, N], r: row[N/2]) {\n store y: tile[M, N] = join(r, g(r)) * acc\n}\n"
    ).epilogues["e"]
    assert e == body("store y: tile[M, N] = join(r, r + r) * acc", "acc: tile[M, N], r: row[N/2]")


def test_functions_may_be_used_before_they_are_defined() -> None:
    text = "epilogue e(x: tile[M, N]) {\n store y: tile[M, N] = f(x)\n}\nfn f(x) = g(x)\nfn g(x) = exp(x)\n"
    assert parse(text).epilogues["e"] == body("store y: tile[M, N] = exp(x)", "x: tile[M, N]")


def test_functions_that_nobody_calls_are_checked() -> None:
    with pytest.raises(CodaNameError, match="unknown name `z`"):
        parse("fn f(x) {\n let y = z\n return x\n}\n")
    with pytest.raises(CodaNameError, match="calls itself"):
        parse("fn f(x) = g(x)\nfn g(x) = h(x)\nfn h(x) = g(x)\n")


def test_nodes_of_a_function_are_located_at_the_call() -> None:
    e = parse("fn f(x) = exp(x * 2)\nepilogue e(x: tile[M, N]) {\n    store y: tile[M, N] = 1 + f(x)\n}\n").epilogues[
        "e"
    ]
    places = {n.op: (n.loc.line, n.loc.column, n.loc.end_column) for n in e.nodes if n.loc}
    assert places["exp"] == places["mul"] == (3, 31, 35)
    assert places["add"] == (3, 27, 35)


def test_names_of_the_epilogue_win_over_those_of_functions() -> None:
    e = parse(
        "fn f(x) {\n let inner = exp(x)\n let shown = inner * 2\n return inner\n}\n"
        "epilogue e(x: tile[M, N]) {\n let outer = f(x)\n store y: tile[M, N] = outer\n}\n"
    ).epilogues["e"]
    assert e.nodes[e.outputs[0].value].hint == "outer"


# Line breaks


def test_line_breaks_where_more_must_come_do_not_count() -> None:
    flat = body("let z = where(acc > 0, acc, r) * acc - r\nstore y: tile[M, N] = z")
    broken = parse(
        "epilogue e\t(acc\n:\ntile\n[\nM,\nN\n]\n,\nr: col[M],\n)\n\n{ # c\n\n\n"
        "let z\n=\n\nwhere(\nacc\n>\n0,\nacc,\nr,\n)\n*\nacc # c\n\n# c\n- r\n\n\nstore y\n:\ntile[M,\nN]\n=\nz }"
    ).epilogues["e"]
    assert broken == flat


def test_a_line_break_ends_a_statement() -> None:
    with pytest.raises(CodaError, match="expected an operator or the end of the line"):
        parse("epilogue e(acc: tile[M, N]) {\nlet x = acc store y: tile[M, N] = x\n}\n")
    with pytest.raises(CodaError, match="a statement cannot begin with `r`|expected"):
        body("store y: tile[M, N] = acc\n(r)")


@pytest.mark.parametrize("text", ["", "\n\n", "# nothing", "\ufeff", "\r\n \t\r", "fn f(x) = x"])
def test_files_without_epilogues(text: str) -> None:
    assert parse(text).epilogues == {}


# Size


def seconds(text: str) -> float:
    """How long it takes to parse and print."""
    start = time.perf_counter()
    for e in parse(text).epilogues.values():
        print_epilogue(e)
    return time.perf_counter() - start


PROGRAMS = {
    "a sum": lambda n: "epilogue e(x: tile[M, N]) {\nstore y: tile[M, N] = " + " + ".join(["x"] * n) + "\n}",
    "a sum grouped to the right": lambda n: (
        "epilogue e(x: tile[M, N]) {\nstore y: tile[M, N] = " + "x + (" * n + "x" + ")" * n + "\n}"
    ),
    "parentheses": lambda n: "epilogue e(x: tile[M, N]) {\nstore y: tile[M, N] = " + "(" * n + "x" + ")" * n + "\n}",
    "calls": lambda n: "epilogue e(x: tile[M, N]) {\nstore y: tile[M, N] = " + "exp(" * n + "x" + ")" * n + "\n}",
    "signs": lambda n: "epilogue e(x: tile[M, N]) {\nstore y: tile[M, N] = " + "-" * n + "x\n}",
    "negations": lambda n: "epilogue e(x: tile[M, N]) {\nstore y: tile[M, N] = where(" + "not " * n + "x > 0, x, 1)\n}",
    "lets": lambda n: (
        "epilogue e(x: tile[M, N]) {\nlet x0 = x\n"
        + "".join(f"let x{i} = x{i - 1} * x{i - 1} + x\n" for i in range(1, n))
        + f"store y: tile[M, N] = x{n - 1}\n}}"
    ),
    "a chain of functions": lambda n: (
        "fn f0(x) = x * x\n"
        + "".join(f"fn f{i}(x) = f{i - 1}(x) - f{i - 1}(x)\n" for i in range(1, n))
        + f"epilogue e(x: tile[M, N]) {{\nstore y: tile[M, N] = f{n - 1}(x)\n}}"
    ),
    "one function called often": lambda n: (
        "fn f(x) {\nlet s = exp(x)\nreturn s * s\n}\nepilogue e(x: tile[M, N]) {\n"
        + "let x0 = x\n"
        + "".join(f"let x{i} = f(x{i - 1})\n" for i in range(1, n))
        + f"store y: tile[M, N] = x{n - 1}\n}}"
    ),
    "epilogues": lambda n: "".join(
        f"epilogue e{i}(x: tile[M, N]) {{\nstore y: tile[M, N] = x\n}}\n" for i in range(n // 10)
    ),
    "comments": lambda n: "# c\n\n" * n + "fn f(x) = x\n",
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_large_programs_take_linear_time(name: str) -> None:
    # 8 times the program: a quadratic step would take 64 times as long.
    small = min(seconds(PROGRAMS[name](3_125)) for _ in range(2))
    assert seconds(PROGRAMS[name](25_000)) < 30 * small + 0.1


def test_inlining_that_doubles_with_every_level_is_an_error_in_time() -> None:
    text = "fn f0(x) = x + 1\n" + "".join(f"fn f{i}(x) = f{i - 1}(f{i - 1}(x))\n" for i in range(1, 100))
    with pytest.raises(CodaUnsupportedError, match="inlining"):
        parse(text + "epilogue e(x: tile[M, N]) {\nstore y: tile[M, N] = f99(x)\n}")


# Any text at all

TOKENS = [
    *"fn epilogue let store reduce return state program import and or not true false inf nan".split(),
    *"( ) [ ] { } , : = + - * / < <= == != > ** ; @ # \n \r \t".split(" "),
    *"tile row col scalar M N N/2 2*N f32 bf16 split join sum where max exp sigmoid".split(),
    *"acc r x y _ 1 2.5 1e5 1e999".split(),
    "\n",
    "epilogue e(acc: tile[M, N], r: col[M]) {\n",
    "    store y: tile[M, N] = ",
    "    reduce s: col[M] = sum(",
    "    let (x, y) = split(",
    "}\n",
    "\0",
    "\u00e9",
]


def parses_or_complains(source: str | Source) -> None:
    """Nothing but a CodaError comes out; what parses is well-formed and can be printed and formatted."""
    try:
        module = parse(source)
    except CodaError as error:
        assert str(error)
        assert error.loc is not None
        return
    for e in module.epilogues.values():
        verify(e)
        assert parse(print_epilogue(e)).epilogues == {e.name: e}
    assert parse(format_source(source)).epilogues == module.epilogues


@given(st.text())
@example("\ud800")
@example("fn f(x) = " + "(" * 30_000)
@example("epilogue e(" * 1000)
@example("}" * 1000)
def test_any_text(text: str) -> None:
    parses_or_complains(text)


@given(st.binary())
def test_any_bytes(data: bytes) -> None:
    try:
        source = decode(data)
    except CodaError as error:
        assert "not UTF-8" in str(error)
        return
    parses_or_complains(source)


@given(st.lists(st.sampled_from(TOKENS), max_size=40), st.sampled_from(["", " "]))
def test_any_tokens(tokens: list[str], between: str) -> None:
    parses_or_complains(between.join(tokens))


@given(st.data())
def test_mutated_programs(data: st.DataObject) -> None:
    programs = [p.read_text() for p in STDLIB] + [text for text, _ in golden_cases.load("print.txt").values()]
    text = data.draw(st.sampled_from(programs))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(text)))
        cut = data.draw(st.integers(0, 6))
        text = text[:at] + data.draw(st.sampled_from(["", "", *TOKENS])) + text[at + cut :]
    parses_or_complains(text)


@given(epilogues())
def test_mutated_random_programs_format(e: Epilogue) -> None:
    text = print_epilogue(e)
    assert format_source(text) == text
    squeezed = text.replace("\n    ", "\n").replace(" = ", "=").replace(" * ", "*").replace(", ", ",")
    assert format_source(squeezed) == text


# The formatter


@pytest.mark.parametrize("name", golden_cases.load("format.txt"))
def test_format(name: str) -> None:
    golden_cases.check("format.txt", name, format_source)


FORMATTED = [*golden_cases.load("format.txt").values(), *golden_cases.load("print.txt").values()]


@pytest.mark.parametrize("text", [text for text, _ in FORMATTED] + [p.read_text() for p in STDLIB])
def test_format_changes_no_meaning_keeps_comments_and_is_done_at_once(text: str) -> None:
    once = format_source(text)
    assert format_source(once) == once
    assert [line.split("#")[1].strip() for line in once.split("\n") if "#" in line] == [
        line.split("#")[1].strip() for line in text.split("\n") if "#" in line
    ]
    try:
        expected = parse(text).epilogues
    except CodaError:
        return  # a format needs no meaning, only grammar
    assert parse(once).epilogues == expected

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

from codalang.errors import CodaError, CodaNameError, CodaTypeError, CodaUnsupportedError, Source
from codalang.ir.build import EpilogueBuilder, function_of
from codalang.ir.builtin_states import BUILTIN_STATES
from codalang.ir.epilogue import Epilogue
from codalang.ir.ops import OPS
from codalang.ir.printer import print_epilogue, print_module
from codalang.ir.types import COL, SCALAR, Dtype, Kind, ValueType, row, tile
from codalang.ir.verify import verify
from codalang.ir.verify_state import verify_state
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
def test_standard_library_is_well_formed_and_formatted(path: Path) -> None:
    source = read_source(path)
    module = parse(source)
    assert module.epilogues or module.states or "fn " in source.text
    for e in module.epilogues.values():
        verify(e)
    for definition in module.states.values():
        verify_state(definition)
    assert source.text.startswith("# ")
    assert format_source(source) == source.text


OPERANDS = {Dtype.F32: "acc", Dtype.I32: "t", Dtype.BOOL: "keep"}
ATTRIBUTES = {None: "", "exponent": ", 1.5", "dtype": ", bf16", "group": ", 16"}
SHOWN = {Dtype.F32: "{}", Dtype.I32: "float({})", Dtype.BOOL: "where({}, 1, 2)"}


@pytest.mark.parametrize("op", sorted(set(OPS) - {"even", "odd"}))
def test_every_op_can_be_written_on_every_dtype(op: str) -> None:
    info = OPS[op]
    for operands, result in info.signatures:
        texts = [OPERANDS[d] for d in operands]
        if info.infix is None:
            text = f"{op}({', '.join(texts)}{ATTRIBUTES[info.attr]})"
        else:
            text = f" {info.infix} ".join(texts) if len(texts) == 2 else f"{info.infix} {texts[0]}"
        params = "acc: tile[M, N], t: tile[M, N]: i32, keep: tile[M, N]: bool"
        e = body(f"reduce s: col[M] = sum({SHOWN[result].format(text)})", params)
        (node,) = [n for n in e.nodes if n.op == op][:1]
        assert node.type.dtype is result
        assert [e.nodes[a].type.dtype for a in node.args] == list(operands)
        assert node.attr == {None: None, "exponent": 1.5, "dtype": "bf16", "group": 16}[info.attr]


def test_halves_can_be_written_on_every_dtype() -> None:
    for dtype, name in OPERANDS.items():
        params = "acc: tile[M, N], t: tile[M, N]: i32, keep: tile[M, N]: bool"
        shown = SHOWN[dtype]
        e = body(
            f"let (a, b) = split({name})\nstore y: tile[M, N/2] = {shown.format('a')} * {shown.format('b')}", params
        )
        assert [n.type.dtype for n in e.nodes if n.op in ("even", "odd")] == [dtype, dtype]


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


# Indices


def indices(text: str) -> list[int]:
    """The i32 constants of an expression of the col of indices t, in the order in which they are needed."""
    e = body(f"store y: tile[M, N] = acc * {text}", "acc: tile[M, N], t: col[M]: i32")
    return [n.attr for n in e.nodes if n.op == "const" and n.type.dtype is Dtype.I32]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("float(t + 1)", [1]),
        ("float(2 - t)", [2]),
        ("float(max(t, -3))", [-3]),
        ("where(t == 1, 2, 3)", [1]),
        ("float(where(acc > 0, t, 3))", [3]),
        ("float(7)", [7]),
        ("float(i32(7) + 1)", [7]),
        ("float(i32(7) * t)", [7]),
        ("float(t + 2147483647) * float(t + -2147483648)", [2**31 - 1, -(2**31)]),
        ("(1 + 2)", []),
        ("float(t + (1))", [1]),
        ("float(-t)", []),
    ],
)
def test_a_whole_number_is_an_index_beside_one(text: str, found: list[int]) -> None:
    assert indices(text) in (found, [*found, 1])


def test_a_whole_number_is_an_index_through_lets_and_functions() -> None:
    e = parse(
        "fn at(i, k) = where(i == k, i, k)\n"
        "epilogue e(acc: tile[M, N]) {\n    let third = 3\n    let same = third\n"
        "    store y: tile[M, N] = where(col_index() == same, acc, third)\n"
        "    store z: tile[M, N] = at(acc, third)\n    store w: row[N] = float(at(col_index(), third))\n}\n"
    ).epilogues["e"]
    constants = sorted(repr(n.attr) for n in e.nodes if n.op == "const")
    assert constants == ["3", "3.0"]


def test_a_number_with_a_point_or_an_exponent_is_no_index() -> None:
    for number in ("3.0", "3.", "3e0", "inf"):
        with pytest.raises(CodaTypeError, match="must agree in dtype"):
            indices(f"where(t == {number}, 1, 2)")


def test_parameters_of_integers_and_masks() -> None:
    e = body(
        "store y: tile[M, N] = where(keep and t == j, acc, float(k))",
        "acc: tile[M, N], t: col[M]: i64, j: row[N]: i32, keep: tile[M, N]: bool, k: scalar: i32",
    )
    assert [(p.type.dtype, p.dtype) for p in e.params] == [
        (Dtype.F32, None),
        (Dtype.I32, "i64"),
        (Dtype.I32, "i32"),
        (Dtype.BOOL, "bool"),
        (Dtype.I32, "i32"),
    ]


@pytest.mark.parametrize(
    ("text", "exponent"),
    [("2.5", 2.5), ("2", 2.0), ("-3", -3.0), ("1 / 4", 0.25), ("-(2 + 1)", -3.0), ("half", 0.5), ("-half * 3", -1.5)],
)
def test_exponents_are_constant_expressions(text: str, exponent: float) -> None:
    e = body(f"let half = 0.5\nstore y: tile[M, N] = pow(acc, {text})")
    assert [n.attr for n in e.nodes if n.op == "pow"] == [exponent]
    assert len(e.nodes) == 2


# Several results


def test_rotate_is_sugar() -> None:
    sugar = body("let (x, y) = rotate(a, acc, r)\nstore s: tile[M, N] = x\nstore t: tile[M, N] = y", ROTATED)
    plain = body(
        "let c = cos(r)\nlet d = sin(r)\nstore s: tile[M, N] = a * c - acc * d\nstore t: tile[M, N] = a * d + acc * c",
        ROTATED,
    )
    assert sugar == plain


ROTATED = "acc: tile[M, N], a: tile[M, N], r: col[M]"


def test_functions_of_several_values() -> None:
    e = parse(
        "fn halves(x) {\n    let (a, b) = split(x)\n    return (b, a, 2)\n}\n"
        "fn turned(x, angle) {\n    let (b, a, _) = halves(x)\n    let (c, d) = rotate(a, b, angle)\n"
        "    return (c, d)\n}\n"
        "epilogue e(acc: tile[M, N], r: col[M]) {\n    let (x, y) = turned(acc, r)\n"
        "    store z: tile[M, N] = join(x, y)\n}\n"
    ).epilogues["e"]
    assert e == body("let (a, b) = split(acc)\nlet (x, y) = rotate(a, b, r)\nstore z: tile[M, N] = join(x, y)")
    assert [n.hint for n in e.nodes if n.op in ("sub", "even")] == ["a", "x"]


def test_results_in_parentheses_may_end_with_a_comma() -> None:
    e = parse("fn f(x) = (x, x,)\nepilogue e(x: tile[M, N]) {\n let (a, b,) = f(x)\n store y: tile[M, N] = a * b\n}\n")
    assert e.epilogues["e"] == body("store y: tile[M, N] = x * x", "x: tile[M, N]")


# States

TOTAL = """state total(x, keep: bool, i: i32) {
    carry s = 0.0, n: i32 = 0
    update {
        let more = where(keep, x, 0)
        return (s + more, n + 1)
    }
    merge {
        return (a_s + b_s, a_n + b_n)
    }
    finalize (sum, count) = (s, n)
    vjp (x) {
        let zero = 0
        return where(keep, d_sum, zero)
    }
}
"""


def test_a_state_is_what_the_builder_makes() -> None:
    definition = parse(TOTAL).states["total"]
    verify_state(definition)
    assert definition.name == "total"
    assert definition.inputs == (("x", Dtype.F32), ("keep", Dtype.BOOL), ("i", Dtype.I32))
    assert definition.carried == (("s", Dtype.F32), ("n", Dtype.I32))
    assert repr(definition.initial) == "(0.0, 0)"
    assert definition.results == (("sum", Dtype.F32), ("count", Dtype.I32))
    b = EpilogueBuilder("update", ("M", "N"))
    s, n, x, keep = (
        b.param(name, ValueType(Kind.SCALAR, None, dtype))
        for name, dtype in (*definition.carried, *definition.inputs[:2])
    )
    results = (b.op("add", s, b.op("where", keep, x, b.const(0.0))), b.op("add", n, b.integer(1)))
    assert definition.update == function_of(b, definition.carried + definition.inputs, results)
    assert definition.vjp is not None
    assert [name for name, _ in definition.vjp.params] == ["x", "keep", "i", "sum", "count", "d_sum"]


@pytest.mark.parametrize("name", BUILTIN_STATES)
def test_built_in_states_are_those_of_the_standard_library(name: str) -> None:
    states = parse(read_source(next(p for p in STDLIB if p.stem == "states"))).states
    assert list(states) == list(BUILTIN_STATES)
    assert states[name] == BUILTIN_STATES[name]


def test_uses_of_states() -> None:
    e = parse(
        TOTAL + "epilogue e(acc: tile[M, 2*N], t: col[M]: i32, keep: row[2*N]: bool) {\n"
        "    state (_, count): col[M]: i64 = total(acc, keep, 3)\n"
        "    state (mean, var): row[2*N]: bf16 = welford(acc)\n"
        "    state lse: scalar = online_logsumexp(acc)\n}\n"
    ).epilogues["e"]
    shown = [(s.name, s.definition.name, s.result, s.type.show(e.dims), s.dtype) for s in e.states]
    assert shown == [
        ("count", "total", 1, "col[M] of i32", "i64"),
        ("mean", "welford", 0, "row[2*N]", "bf16"),
        ("var", "welford", 1, "row[2*N]", "bf16"),
        ("lse", "online_logsumexp", 0, "scalar", None),
    ]
    verify(e)


def test_a_definition_wins_over_a_built_in_state() -> None:
    text = (
        TOTAL.replace("total", "welford") + "epilogue e(x: tile[M, N]) {\n state n: col[M] = welford(x, true, 1)\n}\n"
    )
    e = parse(text).epilogues["e"]
    assert e.states[0].definition == parse(TOTAL).states["total"]


def test_states_are_compared_by_what_they_do() -> None:
    other = parse(TOTAL.replace("total", "all").replace("more", "m")).states["all"]
    assert other == parse(TOTAL).states["total"]
    assert hash(other) == hash(parse(TOTAL).states["total"])
    assert other != parse(TOTAL.replace("n + 1", "n + 2")).states["total"]


def test_functions_are_inlined_into_states() -> None:
    text = TOTAL.replace("where(keep, x, 0)", "masked(keep, x)") + "fn masked(keep, x) = where(keep, x, 0)\n"
    assert parse(text).states == parse(TOTAL).states


# What is kept


def test_save_and_recompute() -> None:
    e = body(
        "let (gate, up) = split(acc)\nlet s = sigmoid(gate)\nsave acc, gate\nrecompute s\n"
        "store y: tile[M, N/2] = gate * s * up\nrecompute y\nlet dead = exp(up)\nsave dead",
        "acc: tile[M, N]",
    )
    kept = [(e.nodes[k.value].op, k.how) for k in e.keeps]
    assert kept == [("param", "save"), ("even", "save"), ("sigmoid", "recompute"), ("mul", "recompute")]
    assert e.keeps[3].value == e.outputs[0].value
    verify(e)


def test_what_is_kept_may_be_said_twice_and_is_part_of_the_epilogue() -> None:
    once = body("let z = acc * r\nsave z\nstore y: tile[M, N] = z * z")
    assert body("let z = acc * r\nlet w = z\nsave z\nsave w\nstore y: tile[M, N] = z * z") == once
    assert body("let z = acc * r\nstore y: tile[M, N] = z * z") != once


# Dimensions


@pytest.mark.parametrize(
    ("extent", "width"),
    [("N*2", 2), ("4*N/2", 2), ("2*N/4", Fraction(1, 2)), ("2 * N / 2", 1), ("N/4*2", Fraction(1, 2)), ("1*N", 1)],
)
def test_widths_are_products(extent: str, width: Fraction) -> None:
    assert body("store y: row[N] = 1", f"x: tile[M, {extent}]").params[0].type.width == width


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


# Imports


def files(folder: Path, **texts: str) -> Source:
    """A folder of .coda files; the source of the one called main."""
    for name, text in texts.items():
        path = folder / f"{name.replace('__', '/')}.coda"
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    return read_source(folder / "main.coda")


USE = "epilogue e(x: tile[M, N]) {\n    store y: tile[M, N] = f(x)\n}\n"


def test_imports_bring_functions_states_and_epilogues(tmp_path: Path) -> None:
    source = files(
        tmp_path,
        lib__a=TOTAL
        + "fn g(x) = x + 1\nfn f(x) = g(x) * 2\nepilogue plain(x: tile[M, N]) {\n store x: tile[M, N]\n}\n",
        main='import "lib/a.coda"\nepilogue e(x: tile[M, N]) {\n    store y: tile[M, N] = f(x)\n'
        "    state n: col[M] = total(x, true, 1)\n}\n",
    )
    module = parse(source)
    assert list(module.epilogues) == ["plain", "e"]
    assert module.states == parse(TOTAL).states
    assert module.epilogues["e"].nodes[:4] == expression("(acc + 1) * 2").nodes[:4] or module.epilogues["e"].states
    assert module.epilogues["e"].nodes[0].loc.source.name == source.name


def test_a_function_of_another_file_is_located_at_the_call_and_in_its_file(tmp_path: Path) -> None:
    source = files(tmp_path, a="fn f(x) = where(x, 1, 0)\n", main='import "a.coda"\n' + USE)
    with pytest.raises(CodaTypeError) as caught:
        parse(source)
    assert str(caught.value.loc) == f"{tmp_path}/main.coda:3:27"
    assert [str(loc) for loc, _ in caught.value.notes] == [f"{tmp_path}/a.coda:1:11"]


def test_imports_are_relative_to_their_file_and_do_not_reach_through(tmp_path: Path) -> None:
    source = files(
        tmp_path,
        lib__a='import "../b.coda"\nfn f(x) = h(x)\n',
        b="fn h(x) = exp(x)\n",
        main='import "lib/a.coda"\n' + USE,
    )
    assert parse(source).epilogues["e"] == body("store y: tile[M, N] = exp(x)", "x: tile[M, N]")
    source = files(tmp_path, main='import "lib/a.coda"\n' + USE.replace("f(x)", "h(x)"))
    with pytest.raises(CodaNameError, match="unknown function `h`"):
        parse(source)


def test_a_file_imported_in_two_ways_is_one_file(tmp_path: Path) -> None:
    source = files(
        tmp_path,
        base="fn f(x) = x * 2\n" + TOTAL,
        a='import "base.coda"\nfn twice(x) = f(f(x))\n',
        main='import "base.coda"\nimport "a.coda"\n' + USE.replace("f(x)", "twice(f(x))"),
    )
    assert [n.op for n in parse(source).epilogues["e"].nodes].count("mul") == 3


def test_own_definitions_win_and_imported_ones_may_not_be_ambiguous(tmp_path: Path) -> None:
    two = 'import "a.coda"\nimport "b.coda"\n'
    source = files(tmp_path, a="fn f(x) = x + 1\n", b="fn f(x) = x + 2\n", main=two + "fn f(x) = x + 3\n" + USE)
    assert parse(source).epilogues["e"] == body("store y: tile[M, N] = x + 3", "x: tile[M, N]")
    parse(files(tmp_path, main=two + USE.replace("f(x)", "x")))
    with pytest.raises(CodaNameError) as caught:
        parse(files(tmp_path, main=two + USE))
    assert "`f` is ambiguous" in str(caught.value)
    assert [loc.source.name for loc, _ in caught.value.notes] == [f"{tmp_path}/a.coda", f"{tmp_path}/b.coda"]


def test_two_imported_epilogues_of_one_name_are_an_error(tmp_path: Path) -> None:
    epilogue = "epilogue e(x: tile[M, N]) {\n    store y: tile[M, N] = x\n}\n"
    two = 'import "a.coda"\nimport "b.coda"\n'
    with pytest.raises(CodaNameError, match="two imported files define an epilogue `e`"):
        parse(files(tmp_path, a=epilogue, b=epilogue, main=two))
    own = parse(files(tmp_path, main=two + epilogue.replace("= x", "= x * 2")))
    assert list(own.epilogues) == ["e"]
    assert len(own.epilogues["e"].nodes) == 3


@pytest.mark.parametrize("length", [1, 2, 3])
def test_imports_in_a_circle(tmp_path: Path, length: int) -> None:
    names = ["main", "b", "c"][:length]
    texts = {name: f'import "{names[(i + 1) % length]}.coda"\nfn {name}(x) = x\n' for i, name in enumerate(names)}
    with pytest.raises(CodaNameError) as caught:
        parse(files(tmp_path, **texts))
    assert "main.coda imports itself" in caught.value.message
    assert str(caught.value.loc) == f"{tmp_path}/{names[-1]}.coda:1:1"
    assert len(caught.value.notes) == length - 1


def test_a_circle_below_the_main_file(tmp_path: Path) -> None:
    with pytest.raises(CodaNameError, match="b.coda imports itself through other files"):
        parse(files(tmp_path, main='import "b.coda"\n', b='import "c.coda"\n', c='import "b.coda"\n'))


def test_errors_in_imported_files_are_located_there(tmp_path: Path) -> None:
    for text in ("fn f(x) = x +\n", "fn f(x) = z\n", "epilogue p(x: tile[M, N]) {\n store y: row[N] = x\n}\n", "\xe9"):
        with pytest.raises(CodaError) as caught:
            parse(files(tmp_path, a=text, main='import "a.coda"\n'))
        assert caught.value.loc.source.name == f"{tmp_path}/a.coda"
    (tmp_path / "a.coda").write_bytes(b"\xff")
    with pytest.raises(CodaError, match="not UTF-8"):
        parse(read_source(tmp_path / "main.coda"))


def test_what_cannot_be_imported(tmp_path: Path) -> None:
    for target in ("missing.coda", ".", "", "a.txt", "folder.coda", "nul\0.coda", "swiglu"):
        (tmp_path / "folder.coda").mkdir(exist_ok=True)
        with pytest.raises(CodaError) as caught:
            parse(Source(str(tmp_path / "main.coda"), f'import "{target}"\n'))
        assert caught.value.loc.line == 1


def test_the_standard_library_is_imported_by_name(tmp_path: Path) -> None:
    module = parse("import swiglu\nepilogue e(x: tile[M, N]) {\n store y: tile[M, N] = x\n}\n")
    assert list(module.epilogues) == ["swiglu", "e"]
    assert (
        module.epilogues["swiglu"]
        == parse(read_source(next(p for p in STDLIB if p.stem == "swiglu"))).epilogues["swiglu"]
    )


def test_long_chains_of_imports(tmp_path: Path) -> None:
    count = 2_000
    for i in range(count):
        (tmp_path / f"f{i}.coda").write_text(f'import "f{i + 1}.coda"\nfn f{i}(x) = f{i + 1}(x) + {i}\n')
    (tmp_path / f"f{count}.coda").write_text(f"fn f{count}(x) = x\n")
    source = files(tmp_path, main='import "f0.coda"\n' + USE.replace("f(x)", "f0(x)"))
    assert sum(n.op == "add" for n in parse(source).epilogues["e"].nodes) == count


# Size


def seconds(text: str) -> float:
    """How much processor time it takes to parse and print: others may be at work."""
    start = time.process_time()
    print_module(parse(text))
    return time.process_time() - start


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
    "powers of constant expressions": lambda n: (
        "epilogue e(x: tile[M, N]) {\nlet k0 = 1.5\n"
        + "".join(f"let k{i} = k{i - 1} * 1\n" for i in range(1, n // 4))
        + "store y: tile[M, N] = "
        + " + ".join(f"pow(x, k{i})" for i in range(n // 4))
        + "\n}"
    ),
    "indices": lambda n: (
        "epilogue e(x: tile[M, N]) {\nstore y: tile[M, N] = x * float("
        + " + ".join(["col_index()", *map(str, range(n // 2))])
        + ")\n}"
    ),
    "functions of several values": lambda n: (
        "fn f(a, b) = (a + b, a - b)\nepilogue e(x: tile[M, N]) {\nlet (a0, b0) = rotate(x, x, 1)\n"
        + "".join(f"let (a{i}, b{i}) = f(a{i - 1}, b{i - 1})\n" for i in range(1, n // 2))
        + f"store y: tile[M, N] = a{n // 2 - 1} * b{n // 2 - 1}\n}}"
    ),
    "outputs": lambda n: (
        "epilogue e(x: tile[M, N]) {\n"
        + "".join(f"store y{i}: tile[M, N] = x\nreduce z{i}: col[M] = max(x)\n" for i in range(n // 4))
        + "}"
    ),
    "parameters": lambda n: (
        f"epilogue e({', '.join(f'x{i}: tile[M, N]' for i in range(n // 4))}) {{\nstore y: tile[M, N] = "
        + " + ".join(f"x{i}" for i in range(n // 4))
        + "\n}"
    ),
    "states": lambda n: "".join(TOTAL.replace("total", f"total{i}") for i in range(n // 50)),
    "uses of states": lambda n: (
        TOTAL
        + "epilogue e(x: tile[M, N]) {\n"
        + "".join(
            f"state (m{i}, v{i}): col[M] = welford(x)\nstate n{i}: row[N] = total(x, true, {i})\n"
            for i in range(n // 8)
        )
        + "}"
    ),
    "a state that carries much": lambda n: (
        "state s(x) {\ncarry "
        + ", ".join(f"c{i} = {i}" for i in range(n // 8))
        + "\nupdate {\nreturn ("
        + ", ".join(f"c{i} + x" for i in range(n // 8))
        + ")\n}\nmerge {\nreturn ("
        + ", ".join(f"a_c{i} + b_c{i}" for i in range(n // 8))
        + ")\n}\nfinalize (r) = ("
        + " + ".join(f"c{i}" for i in range(n // 8))
        + ")\n}"
    ),
    "what is kept": lambda n: (
        "epilogue e(x: tile[M, N]) {\nlet x0 = x * x\n"
        + "".join(f"let x{i} = x{i - 1} * x\nsave x{i}\n" for i in range(1, n // 4))
        + f"store y: tile[M, N] = x{n // 4 - 1}\n}}"
    ),
    "products of dimensions": lambda n: f"epilogue e(x: tile[M, N{'*2/2' * (n // 8)}]) {{\nstore y: tile[M, N] = x\n}}",
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
    *"fn epilogue let store reduce return state program import save recompute and or not true false inf nan".split(),
    *"carry update merge finalize vjp rotate cast pow group_sum float i32 row_index() col_index() welford".split(),
    *"( ) [ ] { } , : = + - * / < <= == != > ** ; @ # \n \r \t".split(" "),
    *"tile row col scalar M N N/2 2*N f32 bf16 i32 i64 bool split join sum where max exp sigmoid swiglu".split(),
    *"acc r x y _ 1 2.5 1e5 1e999".split(),
    "\n",
    "epilogue e(acc: tile[M, N], r: col[M]) {\n",
    "    store y: tile[M, N] = ",
    "    reduce s: col[M] = sum(",
    "    let (x, y) = split(",
    "    let (x, y) = rotate(acc, r, ",
    "    state (x, y): col[M] = argmax(acc, ",
    "    state lse: row[N] = online_logsumexp(",
    "state s(x) {\n    carry m = 0\n    update {\n",
    "    finalize (y) = (",
    'import "a#.coda"',
    "import swiglu",
    '"',
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
    for definition in module.states.values():
        verify_state(definition)
    again = parse(print_module(module))
    assert (again.epilogues, again.states) == (module.epilogues, module.states)
    formatted = parse(format_source(source))
    assert (formatted.epilogues, formatted.states) == (module.epilogues, module.states)


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
    programs = [p.read_text() for p in STDLIB] + [text for text, _ in golden_cases.load("print.txt").values()] + [TOTAL]
    text = data.draw(st.sampled_from(programs))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(text)))
        cut = data.draw(st.integers(0, 6))
        text = text[:at] + data.draw(st.sampled_from(["", "", *TOKENS])) + text[at + cut :]
    parses_or_complains(text)


@given(epilogues(states=[parse(TOTAL).states["total"]]))
def test_mutated_random_programs_format(e: Epilogue) -> None:
    text = print_epilogue(e)
    assert format_source(text) == text
    squeezed = (
        text.replace("\n        ", "\n")
        .replace("\n    ", "\n")
        .replace(" = ", "=")
        .replace(" * ", "*")
        .replace(", ", ",")
    )
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
    assert [line.split("#")[-1].strip() for line in once.split("\n") if "#" in line] == [
        line.split("#")[-1].strip() for line in text.split("\n") if "#" in line
    ]
    try:
        expected = parse(text).epilogues
    except CodaError:
        return  # a format needs no meaning, only grammar
    assert parse(once).epilogues == expected

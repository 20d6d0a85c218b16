"""IR -> text: what is printed reads well, and reads back as the same IR."""

from __future__ import annotations

import math
from fractions import Fraction
from pathlib import Path
from random import Random

import attrs
import golden_cases
import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import epilogues

from codalang.ir.build import EpilogueBuilder, canonical, function_of
from codalang.ir.builtin_states import BUILTIN_STATES, WELFORD
from codalang.ir.epilogue import Epilogue, Keep
from codalang.ir.ops import OPS
from codalang.ir.printer import print_epilogue, print_module, print_number, print_state
from codalang.ir.states import Function, Named, StateDef
from codalang.ir.types import COL, SCALAR, Dtype, Kind, ValueType, row, tile
from codalang.ir.verify import verify
from codalang.ir.verify_state import verify_state
from codalang.parser import format_source, parse, read_source

MASS = parse(
    "state mass(x, keep: bool) {\n    carry s = 0, n: i32 = 0\n"
    "    update {\n        return (s + where(keep, x, 0), n + 1)\n    }\n"
    "    merge {\n        return (a_s + b_s, a_n + b_n)\n    }\n"
    "    finalize (sum, count) = (s, n)\n    vjp (x) = (where(keep, d_sum, 0))\n}\n"
).states["mass"]
STDLIB = sorted((Path(__file__).parent.parent / "stdlib").glob("*.coda"))


def round_trip(e: Epilogue) -> str:
    """The printed text; it reads back as the same epilogue, and that prints as the same text."""
    verify(e)
    text = print_epilogue(e)
    again = parse(text).epilogues
    assert again == {e.name: e}
    assert print_epilogue(again[e.name]) == text
    return text


@pytest.mark.parametrize("name", golden_cases.load("print.txt"))
def test_print(name: str) -> None:
    golden_cases.check("print.txt", name, lambda text: print_module(parse(text)))
    module = parse(golden_cases.load("print.txt")[name][0])
    for e in module.epilogues.values():
        round_trip(e)
    again = parse(print_module(module))
    assert (again.epilogues, again.states) == (module.epilogues, module.states)


@pytest.mark.parametrize("path", STDLIB, ids=lambda p: p.stem)
def test_standard_library(path: Path) -> None:
    module = parse(read_source(path))
    for e in module.epilogues.values():
        round_trip(e)
    for definition in module.states.values():
        assert parse(print_state(definition)).states == {definition.name: definition}


@given(epilogues(states=[MASS]), st.data())
def test_random_epilogues(e: Epilogue, data: st.DataObject) -> None:
    """Also where any of the values are saved or recomputed."""
    how = data.draw(st.lists(st.sampled_from([None, None, "save", "recompute"]), min_size=len(e.nodes)))
    keeps = [Keep(i, h) for i, (h, n) in enumerate(zip(how, e.nodes, strict=False)) if h and n.op != "const"]
    round_trip(attrs.evolve(e, keeps=tuple(keeps)))


@given(st.integers(0, 1 << 60))
def test_random_states(seed: int) -> None:
    """Functions of any scalars, with indices and masks, carried and not, values shared."""
    definition = random_state(Random(seed))
    verify_state(definition)
    text = print_state(definition)
    assert parse(text).states == {definition.name: definition}
    assert print_module(parse(text)) == text
    assert format_source(text) == text


def random_state(random: Random) -> StateDef:
    """A well-typed definition that computes anything."""
    dtypes = [Dtype.F32, Dtype.F32, Dtype.I32]

    def named(names: str, choices: list[Dtype]) -> Named:
        return tuple((name, random.choice(choices)) for name in random.sample(names.split(), random.randint(1, 3)))

    inputs = named("x y i", [*dtypes, Dtype.BOOL])
    carried = named("m s n", dtypes)
    results = named("value index m", dtypes)
    parts = tuple((f"{side}_{name}", dtype) for side in "ab" for name, dtype in carried)
    cotangents = tuple((f"d_{name}", dtype) for name, dtype in results if dtype is Dtype.F32)
    floats = tuple(i for i in inputs if i[1] is Dtype.F32)
    return StateDef(
        random.choice(["s", "welford", "state_of_x"]),
        inputs,
        carried,
        tuple(random.choice(STARTS) if d is Dtype.F32 else random.choice(INTEGERS) for _, d in carried),
        random_function(random, carried + inputs, carried),
        random_function(random, parts, carried),
        random_function(random, carried, results),
        results,
        random_function(random, inputs + results + cotangents, floats) if floats and random.random() < 0.7 else None,
    )


SCALAR_OPS = [op for op, info in OPS.items() if info.operands and not info.resize and info.attr != "group"]
STARTS = [-math.inf, math.inf, math.nan, 0.0, -0.0, 1.5, -1e-300]
INTEGERS = [0, 1, -1, 2**31 - 1, -(2**31)]
ATTRIBUTES = {None: None, "exponent": 2.5, "dtype": "f16"}


def random_function(random: Random, params: Named, results: Named) -> Function:
    """A few ops on the parameters and constants, and any of the values as results."""
    b = EpilogueBuilder("f", ("M", "N"))
    for name, dtype in params:
        b.param(name, ValueType(Kind.SCALAR, None, dtype))
    b.const(random.choice([0.0, -0.0, 2.0, math.nan, -math.inf]))
    b.const(random.random() < 0.5)
    b.integer(random.choice(INTEGERS))
    for op in random.choices(SCALAR_OPS, k=random.randint(0, 8)):
        operands = [random.choice(of_dtype(b, d)[-4:]) for d in random.choice(OPS[op].signatures)[0]]
        node = b.op(op, *operands, attr=ATTRIBUTES[OPS[op].attr])
        if random.random() < 0.3:
            b.hint(node, random.choice(["x", "m", "t1", "exp", "let"]))
    return function_of(b, params, [random.choice(of_dtype(b, dtype)[-3:]) for _, dtype in results])


def of_dtype(b: EpilogueBuilder, dtype: Dtype) -> list[int]:
    """The nodes of a dtype so far; there is a constant of each."""
    return [i for i, node in enumerate(b.nodes) if node.type.dtype is dtype]


def test_states_of_one_name_get_names_of_their_own() -> None:
    other = attrs.evolve(MASS, initial=(1.0, 2))
    own_welford = attrs.evolve(MASS, name="welford", initial=(2.0, 2))
    b = EpilogueBuilder("mass", ("M", "N"))
    x = b.param("x", tile())
    for position, definition in enumerate((MASS, other, own_welford, WELFORD, MASS)):
        values = [x] if definition is WELFORD else [x, b.const(True)]
        b.state([f"s{position}"], values, COL, definition)
    text = round_trip(b.finish())
    assert [line.split("(")[0] for line in text.split("\n") if line.startswith("state ")] == [
        "state mass_2",
        "state mass_3",
        "state welford_2",
    ]
    assert "state s3: col[M] = welford(x)\n" in text


def test_a_module_prints_each_of_its_states() -> None:
    text = print_state(MASS) + "\n" + print_state(MASS).replace("state mass(", "state same(")
    text += "\n" + print_state(attrs.evolve(MASS, name="welford"))
    text += "\nepilogue e(x: tile[M, N]) {\n    state s: col[M] = same(x, true)\n}\n"
    module = parse(text)
    e = module.epilogues["e"]
    foreign = attrs.evolve(
        e, name="f", outputs=(attrs.evolve(e.outputs[0], values=e.outputs[0].values[:1], definition=WELFORD),)
    )
    module.epilogues["f"] = canonical(foreign)
    again = parse(print_module(module))
    assert again.epilogues == module.epilogues
    assert again.states == module.states | {"welford_2": WELFORD}


def test_every_value_that_a_transform_folds_has_its_name_before() -> None:
    b = EpilogueBuilder("e", ("M", "N"))
    x = b.param("x", tile())
    b.state(("v", "i"), [x, b.op("col_index", hint="column")], COL, BUILTIN_STATES["argmax"])
    text = round_trip(b.finish())
    assert "    let column = col_index()\n    state (v, i): col[M] = argmax(x, column)\n" in text


def test_results_of_a_transform_are_one_statement_where_they_stand_together() -> None:
    b = EpilogueBuilder("e", ("M", "N"))
    x = b.op("exp", b.param("x", tile()))
    b.state(("mean", "_", "count"), [x], COL, WELFORD)
    b.state(("_", "var"), [x], COL, WELFORD)
    b.state(("m2", "v2"), [x], COL, WELFORD, "bf16")
    b.state(("m3", "v3"), [x], row(), WELFORD)
    e = b.finish()
    e = attrs.evolve(e, outputs=(*e.outputs, attrs.evolve(e.outputs[0], name="again")))
    assert round_trip(e).split("\n")[1:-2] == [
        "    let t1 = exp(x)",
        "    state (mean, _, count): col[M] = welford(t1)",
        "    state (_, var): col[M] = welford(t1)",
        "    state (m2, v2): col[M]: bf16 = welford(t1)",
        "    state (m3, v3): row[N] = welford(t1)",
        "    state again: col[M] = welford(t1)",
    ]


@given(st.floats())
def test_numbers(value: float) -> None:
    b = EpilogueBuilder("e", ("M", "N"))
    b.store("y", b.op("mul", b.param("x", tile()), b.const(value)), tile())
    b.store("z", b.op("neg", b.const(value)), tile())
    round_trip(b.finish())


@pytest.mark.parametrize(
    ("value", "text"),
    [(2.0, "2"), (-0.0, "-0"), (0.1, "0.1"), (1e-5, "1e-05"), (1e22, "1e+22"), (math.inf, "inf"), (True, "true")],
)
def test_number_text(value: float | bool, text: str) -> None:
    assert print_number(value) == text


def hinted(*hints: str) -> str:
    """The text of an epilogue whose values have these hints."""
    b = EpilogueBuilder("e", ("M", "N"))
    value = b.param("x", tile())
    for hint in hints:
        value = b.op("exp", value, hint=hint)
    b.store("y", value, tile())
    return round_trip(b.finish())


def test_names_are_unique_and_none_is_a_word_of_the_grammar() -> None:
    text = hinted("a", "a", "a_2", "let", "x", "y", "M", "1bad", "", "é", "_", "t1", "exp", "y")
    names = [line.split()[1] for line in text.split("\n") if line.strip().startswith("let ")]
    assert names == ["a", "a_2", "a_2_2", "let_2", "x_2", "y_2", "M_2", "t2", "t3", "t4", "__2", "t1", "exp", "y"]
    assert text.endswith("    store y: tile[M, N]\n}\n")


def test_unnamed_values_used_twice_avoid_names_that_are_taken() -> None:
    b = EpilogueBuilder("e", ("t3", "t4"))
    t1 = b.param("t1", tile())
    twice = b.op("exp", t1)
    b.store("t2", b.op("add", twice, twice), tile())
    assert "let t5 = exp(t1)\n" in round_trip(b.finish())


def test_a_value_stored_twice_and_one_stored_under_a_parameters_name() -> None:
    b = EpilogueBuilder("e", ("M", "N"))
    x, r = b.param("x", tile()), b.param("r", COL)
    value = b.op("mul", x, r)
    for name in ("p", "q", "x", "r"):
        b.store(name, value, tile())
    b.store("s", x, tile())
    assert round_trip(b.finish()).split("\n")[1:-2] == [
        "    let p = x * r",
        "    store p: tile[M, N]",
        "    store q: tile[M, N] = p",
        "    store x: tile[M, N] = p",
        "    store r: tile[M, N] = p",
        "    store s: tile[M, N] = x",
    ]


def test_equal_nodes_that_are_not_shared_stay_apart() -> None:
    b = EpilogueBuilder("e", ("M", "N"))
    x = b.param("x", tile())
    halves = [b.op(op, x) for op in ("odd", "even", "even", "odd", "odd")]
    total = b.op("exp", halves[0])
    for half in halves[1:]:
        total = b.op("add", total, b.op("exp", half))
    b.store("y", b.op("sub", total, b.op("add", b.op("exp", halves[0]), b.op("exp", halves[0]))), tile(Fraction(1, 2)))
    text = round_trip(b.finish())
    assert text.count("split(x)") == 3
    assert text.count("exp(") == 7


def test_an_epilogue_without_tiles_or_parameters() -> None:
    b = EpilogueBuilder("e", ("rows", "columns"))
    b.reduce("n", b.const(1.0), SCALAR)
    assert round_trip(b.finish()).startswith("epilogue e[rows, columns]() {\n")
    b = EpilogueBuilder("e", ("N", "K"))
    b.param("unused", row(2), "bf16")
    b.store("mask", b.op("where", b.const(False), b.const(math.nan), b.const(-math.inf)), tile(2), "f16")
    assert "where(false, nan, -inf)" in round_trip(b.finish())


@pytest.mark.parametrize(("op", "left"), [("add", True), ("sub", False), ("max", False)])
def test_deep_trees(op: str, left: bool) -> None:
    b = EpilogueBuilder("e", ("M", "N"))
    x = value = b.param("x", tile())
    for _ in range(20_000):
        value = b.op(op, *((value, x) if left else (x, value)))
    b.store("y", value, tile())
    round_trip(b.finish())


def test_locations_and_hints_take_no_part_in_equality_but_constants_do() -> None:
    def constant(value: float) -> Epilogue:
        b = EpilogueBuilder("e", ("M", "N"))
        b.store("y", b.const(value), tile())
        return b.finish()

    assert constant(0.0) != constant(-0.0)
    assert constant(math.nan) == constant(float("nan"))
    assert hash(constant(math.nan)) == hash(constant(float("nan")))
    e = constant(1.0)
    assert attrs.evolve(e, nodes=(attrs.evolve(e.nodes[0], hint="one"),)) == e

"""IR -> text: what is printed reads well, and reads back as the same IR."""

from __future__ import annotations

import math
from fractions import Fraction
from pathlib import Path

import attrs
import golden_cases
import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import epilogues

from codalang.ir.build import EpilogueBuilder
from codalang.ir.epilogue import Epilogue
from codalang.ir.printer import print_epilogue, print_module, print_number
from codalang.ir.types import COL, SCALAR, row, tile
from codalang.ir.verify import verify
from codalang.parser import parse, read_source

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
    for e in parse(golden_cases.load("print.txt")[name][0]).epilogues.values():
        round_trip(e)


@pytest.mark.parametrize("path", STDLIB, ids=lambda p: p.stem)
def test_standard_library(path: Path) -> None:
    for e in parse(read_source(path)).epilogues.values():
        round_trip(e)


@given(epilogues())
def test_random_epilogues(e: Epilogue) -> None:
    round_trip(e)


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

"""Sizes of dimensions on the command line: `--dims T=8192 D=4096`, also `--dims T=8192,D=4096`.

Where sizes are needed and not given, a dimension has a usual one: a small one where an axis is flattened with others
into rows (`[B, S, D]`, the heads and pairs of `[H, 2, P, D]`), a large one else.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

from codalang.errors import CodaCallError
from codalang.ir.program import Program

# What kernels are made for, and what a trial on a CPU takes moments for.
TYPICAL, TRIAL = (32, 4096), (3, 24)


class _Merge(argparse.Action):
    """Several lists of sizes as one."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option_string: Any = None
    ) -> None:
        sizes: dict[str, int] = dict(getattr(namespace, self.dest) or {})
        for part in values:
            for name, size in part.items():
                if name in sizes:
                    raise argparse.ArgumentError(self, f"{name} is given twice")
                sizes[name] = size
        setattr(namespace, self.dest, sizes)


def add_sizes(parser: argparse.ArgumentParser, *flags: str, help: str) -> None:
    """An option that takes sizes by name; `options.sizes` holds them."""
    parser.add_argument(
        *flags, dest="sizes", nargs="+", type=sizes_of, action=_Merge, default={}, metavar="NAME=SIZE", help=help
    )


def sizes_of(text: str) -> dict[str, int]:
    """`M=8192,N=4096` as numbers.  Raises argparse.ArgumentTypeError."""
    sizes: dict[str, int] = {}
    for part in text.split(","):
        name, equals, number = part.partition("=")
        name, number = name.strip(), number.strip()
        if not equals or not (number.isascii() and number.isdigit()):
            raise argparse.ArgumentTypeError(f"`{part}` is not NAME=NUMBER")
        if name in sizes:
            raise argparse.ArgumentTypeError(f"{name} is given twice")
        if len(number.lstrip("0")) > 10 or int(number) >= 2**31:
            raise argparse.ArgumentTypeError(f"{name} must be below 2**31")
        sizes[name] = int(number)
    return sizes


def check_sizes(program: Program, given: Mapping[str, int]) -> None:
    """Raises CodaCallError where a program has no dimension of a name."""
    for name in given:
        if name not in program.dims:
            have = ", ".join(program.dims) or "none"
            raise CodaCallError(
                f"`{program.name}` has no dimension `{name}`; its dimensions are {have}", argument="--dims"
            )


def all_sizes(program: Program, given: Mapping[str, int], usual: tuple[int, int]) -> dict[str, int]:
    """Every dimension's size: as given, or else the usual small or large one."""
    check_sizes(program, given)
    flattened: set[str] = set()
    for param in program.params:
        shape = param.type.shape
        if len(shape) > 2 and not (len(shape) == 3 and param.type.pair_axis is not None):
            flattened.update(name for extent in shape[:-1] for name in extent.names)
    return {name: given.get(name, usual[name not in flattened]) for name in program.dims}


def show_sizes(sizes: Mapping[str, int]) -> str:
    """`T = 8192, D = 4096`."""
    return ", ".join(f"{name} = {size}" for name, size in sizes.items())


def given_for(programs: Sequence[Program], given: Mapping[str, int]) -> list[dict[str, int]]:
    """The part of the sizes that is each program's.  Raises CodaCallError for a name that none has."""
    for name in given:
        if not any(name in program.dims for program in programs):
            check_sizes(programs[0], {name: given[name]})
    return [{n: size for n, size in given.items() if n in program.dims} for program in programs]

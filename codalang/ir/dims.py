"""Extents of tensors as polynomials of dimension names: `T`, `2*F`, `(Q + 2*KV)*HD`, `N/2`.

    Dim = sum over monomials of coefficient * product of names

A Dim is canonical: two that are equal as polynomials are equal, and hash alike, however they were written.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from fractions import Fraction

import attrs

Monomial = tuple[str, ...]  # names in alphabetical order, a power as a name repeated; () is the constant


@attrs.frozen(repr=False, cache_hash=True)
class Dim:
    """An extent.  `terms` are (monomial, coefficient) in the order of the monomials, without zero coefficients."""

    terms: tuple[tuple[Monomial, Fraction], ...] = ()

    @staticmethod
    def of(value: str | int | Fraction | Dim) -> Dim:
        """The extent of a name or of a number."""
        if isinstance(value, Dim):
            return value
        return _dim({(value,): Fraction(1)} if isinstance(value, str) else {(): Fraction(value)})

    @property
    def number(self) -> Fraction | None:
        """Its value where it has no names, else None."""
        if not self.terms:
            return Fraction(0)
        return self.terms[0][1] if len(self.terms) == 1 and self.terms[0][0] == () else None

    @property
    def names(self) -> frozenset[str]:
        """The dimension names in it."""
        return frozenset(name for monomial, _ in self.terms for name in monomial)

    def __add__(self, other: Dim | int) -> Dim:
        terms = dict(self.terms)
        for monomial, coefficient in Dim.of(other).terms:
            terms[monomial] = terms.get(monomial, Fraction(0)) + coefficient
        return _dim(terms)

    def __sub__(self, other: Dim | int) -> Dim:
        return self + Dim.of(other) * -1

    def __mul__(self, other: Dim | int | Fraction) -> Dim:
        terms: dict[Monomial, Fraction] = {}
        for first, one in self.terms:
            for second, two in Dim.of(other).terms:
                monomial = tuple(sorted(first + second))
                terms[monomial] = terms.get(monomial, Fraction(0)) + one * two
        return _dim(terms)

    def __truediv__(self, other: int | Fraction) -> Dim:
        return self * (Fraction(1) / Fraction(other))

    def evaluate(self, sizes: Mapping[str, int]) -> Fraction:
        """Its value where each name stands for a number.  Raises KeyError for a name without one."""
        total = Fraction(0)
        for monomial, coefficient in self.terms:
            for name in monomial:
                coefficient *= sizes[name]
            total += coefficient
        return total

    def substitute(self, extents: Mapping[str, Dim]) -> Dim:
        """The extent with each name replaced by its extent, where it has one."""
        total = Dim()
        for monomial, coefficient in self.terms:
            product = Dim.of(coefficient)
            for name in monomial:
                product = product * extents.get(name, Dim.of(name))
            total = total + product
        return total

    def divide(self, other: Dim) -> Dim | None:
        """The extent of which `other`, a single product, is a factor; None where it is none."""
        if len(other.terms) != 1:
            return ONE if self == other and self.terms else None
        ((divisor, factor),) = other.terms
        terms: dict[Monomial, Fraction] = {}
        for monomial, coefficient in self.terms:
            rest = list(monomial)
            for name in divisor:
                if name not in rest:
                    return None
                rest.remove(name)
            terms[tuple(rest)] = coefficient / factor
        return _dim(terms)

    def solve(self, value: int, sizes: Mapping[str, int]) -> tuple[str, Fraction] | None:
        """The one name that `sizes` lacks and what it must be for the extent to be `value`; None where that is not so:
        no such name, more than one, one that occurs to a power or with a factor of zero."""
        unknown = [name for name in self.names if name not in sizes]
        if len(unknown) != 1:
            return None
        rest, factor = Fraction(0), Fraction(0)
        for monomial, coefficient in self.terms:
            count = monomial.count(unknown[0])
            if count > 1:
                return None
            for name in monomial:
                coefficient *= sizes.get(name, 1)
            if count:
                factor += coefficient
            else:
                rest += coefficient
        return (unknown[0], (value - rest) / factor) if factor else None

    def __str__(self) -> str:
        """As written in the language, e.g. `2*F` or `HD*Q + 2*HD*KV`."""
        return "".join(self._parts()) or "0"

    def __repr__(self) -> str:
        return f"Dim({self})"

    def _parts(self) -> Iterator[str]:
        for index, (monomial, coefficient) in enumerate(self.terms):
            yield ("-" if coefficient < 0 else "") if index == 0 else (" - " if coefficient < 0 else " + ")
            factors = [str(abs(coefficient.numerator))] if abs(coefficient.numerator) != 1 or not monomial else []
            yield "*".join([*factors, *monomial])
            yield f"/{coefficient.denominator}" if coefficient.denominator != 1 else ""


ONE, TWO = Dim(((((), Fraction(1))),)), Dim(((((), Fraction(2))),))


def _dim(terms: Mapping[Monomial, Fraction]) -> Dim:
    # The constant last, then by name: `2*F + 1`.
    kept = [(monomial, coefficient) for monomial, coefficient in terms.items() if coefficient]
    return Dim(tuple(sorted(kept, key=lambda term: (not term[0], term[0]))))

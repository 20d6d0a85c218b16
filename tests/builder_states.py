"""Stateful transforms as text and as Python classes, in a module whose annotations Python keeps as text."""

from __future__ import annotations

from math import inf

import codalang
from codalang.builder import exp, log, where
from codalang.builder import max as larger

TEXT = """
state online_logsumexp(x) {
    carry m = -inf, s = 0
    update {
        let ratio = where(x == m, 1, exp(-abs(x - m)))
        return (max(m, x), where(x > m, s * ratio + 1, s + ratio))
    }
    merge {
        let ratio = where(a_m == b_m, 1, exp(-abs(a_m - b_m)))
        return (max(a_m, b_m), where(b_m > a_m, a_s * ratio + b_s, a_s + b_s * ratio))
    }
    finalize (lse) = (m + log(s))
    vjp (x) = (d_lse * exp(x - lse))
}

state argmax(x, i: i32) {
    carry top = -inf, at: i32 = 2147483647
    update {
        let ties = x == top or x != x and top != top
        let better = x > top or x != x and top == top or ties and i < at
        return (where(better, x, top), where(better, i, at))
    }
    merge {
        let ties = b_top == a_top or b_top != b_top and a_top != a_top
        let better = b_top > a_top or b_top != b_top and a_top == a_top or ties and b_at < a_at
        return (where(better, b_top, a_top), where(better, b_at, a_at))
    }
    finalize (value, index) = (top, at)
    vjp (x) = (where(i == index, d_value, 0))
}

state argmax2(x, i: i32, j: i32) {
    carry top = -inf, at: i32 = 2147483647, beside: i32 = 2147483647
    update {
        let ties = x == top or x != x and top != top
        let earlier = i < at or i == at and j < beside
        let better = x > top or x != x and top == top or ties and earlier
        return (where(better, x, top), where(better, i, at), where(better, j, beside))
    }
    merge {
        let ties = b_top == a_top or b_top != b_top and a_top != a_top
        let earlier = b_at < a_at or b_at == a_at and b_beside < a_beside
        let better = b_top > a_top or b_top != b_top and a_top == a_top or ties and earlier
        return (where(better, b_top, a_top), where(better, b_at, a_at), where(better, b_beside, a_beside))
    }
    finalize (value, row, column) = (top, at, beside)
    vjp (x) = (where(i == row and j == column, d_value, 0))
}

state welford(x) {
    carry n = 0, mean = 0, m2 = 0
    update {
        let count = n + 1
        let delta = x - mean
        let moved = mean + delta / count
        return (count, moved, m2 + delta * (x - moved))
    }
    merge {
        let count = a_n + b_n
        let share = b_n / max(count, 1)
        let delta = b_mean - a_mean
        return (count, a_mean + delta * share, a_m2 + b_m2 + delta * delta * a_n * share)
    }
    finalize (mean, var, count) = (mean, m2 / n, n)
    vjp (x) = ((d_mean + d_var * ((x - mean) * 2)) / count)
}
"""
NO_INDEX = 2**31 - 1


@codalang.state
class online_logsumexp:
    m: float = -inf
    s: float = 0

    def update(self, x):
        ratio = where(x == self.m, 1, exp(-abs(x - self.m)))
        return larger(self.m, x), where(x > self.m, self.s * ratio + 1, self.s + ratio)

    def merge(self, other):
        ratio = where(self.m == other.m, 1, exp(-abs(self.m - other.m)))
        return larger(self.m, other.m), where(other.m > self.m, self.s * ratio + other.s, self.s + other.s * ratio)

    def finalize(self):
        return {"lse": self.m + log(self.s)}

    def vjp(x, lse, d_lse):
        return d_lse * exp(x - lse)


def precedes(x, top, earlier):
    ties = (x == top) | ((x != x) & (top != top))
    return (x > top) | ((x != x) & (top == top)) | (ties & earlier)


@codalang.state
class argmax:
    top: float = -inf
    at: int = NO_INDEX

    def update(self, x, i: int):
        better = precedes(x, self.top, i < self.at)
        return where(better, x, self.top), where(better, i, self.at)

    def merge(self, other):
        better = precedes(other.top, self.top, other.at < self.at)
        return where(better, other.top, self.top), where(better, other.at, self.at)

    def finalize(self):
        return {"value": self.top, "index": self.at}

    @staticmethod
    def vjp(i, index, d_value):
        return where(i == index, d_value, 0)


@codalang.state
class argmin:
    low: float = inf
    at: int = NO_INDEX

    def update(self, x, i: int):
        ties = (x == self.low) | ((x != x) & (self.low != self.low))
        better = (x < self.low) | ((x != x) & (self.low == self.low)) | (ties & (i < self.at))
        return where(better, x, self.low), where(better, i, self.at)

    def merge(self, other):
        ties = (other.low == self.low) | ((other.low != other.low) & (self.low != self.low))
        better = (other.low < self.low) | ((other.low != other.low) & (self.low == self.low))
        better = better | (ties & (other.at < self.at))
        return where(better, other.low, self.low), where(better, other.at, self.at)

    def finalize(self):
        return {"value": self.low, "index": self.at}

    @staticmethod
    def vjp(i, index, d_value):
        return where(i == index, d_value, 0)


@codalang.state
class argmax2:
    top: f32 = -inf  # noqa: F821
    at: i32 = NO_INDEX  # noqa: F821
    beside: codalang.builder.i32 = NO_INDEX

    def update(self, x, i: i32, j: i32):  # noqa: F821
        better = precedes(x, self.top, (i < self.at) | ((i == self.at) & (j < self.beside)))
        return where(better, x, self.top), where(better, i, self.at), where(better, j, self.beside)

    def merge(self, other):
        earlier = (other.at < self.at) | ((other.at == self.at) & (other.beside < self.beside))
        better = precedes(other.top, self.top, earlier)
        return (
            where(better, other.top, self.top),
            where(better, other.at, self.at),
            where(better, other.beside, self.beside),
        )

    def finalize(self):
        return {"value": self.top, "row": self.at, "column": self.beside}

    def vjp(i, j, row, column, d_value):
        return where((i == row) & (j == column), d_value, 0)


@codalang.state
class welford:
    n: float = 0
    mean: float = 0
    m2: float = 0

    def update(self, x):
        count = self.n + 1
        delta = x - self.mean
        moved = self.mean + delta / count
        return count, moved, self.m2 + delta * (x - moved)

    def merge(self, other):
        count = self.n + other.n
        share = other.n / larger(count, 1)
        delta = other.mean - self.mean
        return count, self.mean + delta * share, self.m2 + other.m2 + delta * delta * self.n * share

    def finalize(self):
        return {"mean": self.mean, "var": self.m2 / self.n, "count": self.n}

    def vjp(x, mean, count, d_mean, d_var):
        return (d_mean + d_var * ((x - mean) * 2)) / count

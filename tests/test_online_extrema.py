"""`online_max` and `online_min`: as `reduce` has them, values and gradients, whole and tile by tile."""

from __future__ import annotations

import pytest
import torch
from oracles import derived

from codalang.autodiff import derive
from codalang.ir import reference
from codalang.parser import parse

TEXT = """
epilogue states(x: tile[M, N]) {{
    state c: col[M] = online_{how}(x)
    state r: row[N] = online_{how}(x)
    state s: scalar = online_{how}(x)
    state b: row[B, N] = online_{how}(x)
}}
epilogue reductions(x: tile[M, N]) {{
    reduce c: col[M] = {how}(x)
    reduce r: row[N] = {how}(x)
    reduce s: scalar = {how}(x)
    reduce b: row[B, N] = {how}(x)
}}
"""
EXTENTS = (6, 5, 3)


@pytest.mark.parametrize("how", ["max", "min"])
@pytest.mark.parametrize("kind", ["ties", "all NaN but one", "infinite"])
def test_an_extremum_is_a_reduction(how: str, kind: str) -> None:
    epilogues = parse(TEXT.format(how=how)).epilogues
    x = torch.randint(-2, 3, EXTENTS[:2], generator=torch.Generator().manual_seed(0)).double()
    if kind == "all NaN but one":
        x = torch.where(torch.arange(5) == 2, x, torch.nan)
    elif kind == "infinite":
        x = torch.where(x == 0, torch.inf, torch.where(x == 1, -torch.inf, x))
    inputs = {"x": x}
    wanted = reference.run(epilogues["reductions"], inputs, extents=EXTENTS)
    for tile in (EXTENTS[:2], (1, 1), (4, 3)):
        got = reference.run_tiled(epilogues["states"], inputs, tile=tile, extents=EXTENTS)
        assert all(torch.equal(got[name].nan_to_num(7.5), wanted[name].nan_to_num(7.5)) for name in wanted)
    cotangents = {name: torch.rand_like(value) + 0.5 for name, value in wanted.items()}
    gradients = [
        derived(derive(epilogues[name]), inputs, cotangents, EXTENTS)["x"] for name in ("states", "reductions")
    ]
    assert torch.equal(*gradients) and int(gradients[0].count_nonzero()) >= 5


def test_of_nothing() -> None:
    epilogue = parse(TEXT.format(how="max")).epilogues["states"]
    got = reference.run(epilogue, {"x": torch.zeros(0, 5)}, extents=(0, 5, 0))
    assert got["c"].shape == (0,) and bool((got["r"] == -torch.inf).all()) and got["s"] == -torch.inf

"""docs/performance.md: its figures are those of the kept files, and the script that writes them does so."""

from __future__ import annotations

import json
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import attrs
import pytest
from test_bench import example

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))

import update_performance as page  # noqa: E402

from codalang.bench import report  # noqa: E402

SEARCH = [
    {
        "job": "swiglu 8B 8192",
        "extents": "8192 x 28672 x 4096",
        "candidates": 14,
        "heuristic_ms": 2.4,
        "best_ms": 2.388,
        "heuristic": "128x256 co",
        "best": "192x128 pp",
    },
    {
        "job": "rope 8B 8192",
        "extents": "8192 x 6144 x 4096",
        "candidates": 9,
        "heuristic_ms": 0.5,
        "best_ms": 0.5,
        "heuristic": "192x128 pp",
        "best": "192x128 pp",
    },
]

BLOCK_RUN = {
    "device": "a GPU",
    "torch": "2.11",
    "codalang": "0.1.0",
    "tokens": 8192,
    "block 8B": [
        {
            "size": "8B",
            "work": "forward",
            "implementation": "codalang",
            "ms": 4.5428,
            "quartiles": "4.541-4.550",
            page.SHARE: 0.971,
            "peak GiB": 0.344,
        }
    ],
}

ENERGY_RUN = {
    "device": "a GPU",
    "torch": "2.11",
    "codalang": "0.1.0",
    "limit": 700.0,
    "prices": {"spin": {"ms": 1.0, "watts": 120.0, "mhz": 1980.0}, "joules_per_byte": 9e-11, "exponent": 1.0},
    "patterns": [
        {
            "name": "logsumexp 8B 8192",
            "title": "a logsumexp",
            "loads": {"codalang": {"ms": 2.0, "watts": 700.0, "mhz": 1400.0}},
            "shares": {
                "measured": 0.9,
                "clock": 0.95,
                "cycles": 0.947,
                "extra bytes": 0.08,
                "instructions": 0.01,
                "bound by bytes": 0.92,
                "bound": 0.91,
            },
        }
    ],
}


def test_the_page_shows_what_is_kept() -> None:
    text = page.PAGE.read_text()
    assert page.rendered(text, page.read()) == text


def test_the_page_has_every_block_once() -> None:
    names = [match["name"] for match in page.BLOCK.finditer(page.PAGE.read_text())]
    assert sorted(names) == sorted(page.FIGURES)


def test_no_figure_is_typed_between_the_blocks() -> None:
    """Ratios, times and speeds, that is: decimal fractions.  1.00 is what the scale is explained by."""
    prose = page.BLOCK.sub("", page.PAGE.read_text())
    assert [word for word in prose.split() if any(c.isdigit() for c in word) and "." in word.strip(".,:;")] == ["1.00"]


def test_the_script_keeps_runs_and_writes_figures(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    runs = []
    for name, found in (("a", example()), ("b", attrs.evolve(example(), command="codalang bench --again"))):
        runs.append(tmp_path / f"{name}.json")
        report.write(found, runs[-1])
    (tmp_path / "search.json").write_text(json.dumps(SEARCH))
    (tmp_path / "block.json").write_text(json.dumps(BLOCK_RUN))
    (tmp_path / "energy.json").write_text(json.dumps(ENERGY_RUN))
    others = {name: [tmp_path / f"{name}.json"] for name in ("block", "energy")}
    page.keep(runs, [tmp_path / "search.json"], others, kept)
    files = {f"{name}.json" for name in ("bench", "search", "block", "energy")}
    assert {p.name for p in kept.iterdir()} == {"bars.svg", "roofline.svg"} | files
    for plot in ("bars.svg", "roofline.svg"):
        ElementTree.parse(kept / plot)
    found = page.read(kept)
    text = page.rendered(page.PAGE.read_text(), found)
    for shown in (
        "codalang bench\ncodalang bench --again\n",
        "| swiglu | 8192 x 4096 x 4096 | 0.900 | 0.900 | 0.225 | 0.600 | 275 |",
        "| torch.mul | 7.2 |",
        "| swiglu | cold | 5.12 | 3.00 |",
        "- no time was left for: rope 8B 4096",
        "(bench/bars.svg)",
        "| swiglu 8B 8192 | 8192 x 28672 x 4096 | 14 | 2.400 | 2.388 | 0.995 | 192x128 pp |",
        "| rope 8B 8192 | 8192 x 6144 x 4096 | 9 | 0.500 | 0.500 | 1.000 | the heuristic's |",
        "| least of all |  |  |  |  | 0.995 |  |",
        "| 8B | forward | codalang | 4.543 | 0.971 | 0.34 |",
        "700 W allowed, 120 W awake and idle, 90 pJ for a byte",
        "| a logsumexp | 0.900 | 0.950 | 0.947 |  | 0.920 | 0.910 | 0.080 | 0.010 |",
        "| a logsumexp | codalang | 2.000 | 700 | 1400 | 1.400 |",
    ):
        assert shown in text
    assert page.rendered(text, found) == text


def test_a_block_of_another_name_is_an_error() -> None:
    with pytest.raises(KeyError):
        page.rendered("<!-- figures: nothing -->\n<!-- end -->", page.Kept())

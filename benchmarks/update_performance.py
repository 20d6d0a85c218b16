"""Writes the figures of docs/performance.md from the files that the measuring commands write: none is typed by hand.

    python benchmarks/update_performance.py [--bench BENCH.json ...] [--search SEARCH.json ...]
        [--block BLOCK.json ...] [--energy ENERGY.json]

`--bench` takes reports of `codalang bench --out DIR` (of a workload that several have, the last counts), `--search`
results of `benchmarks/search_config.py --out DIR`, `--block` those of `benchmarks/block.py --out DIR` (of a size that
several have, the last counts), `--energy` that of `benchmarks/energy.py --out DIR`.  They are kept in docs/bench/, with
the plots, and the page's blocks are made of what is kept there, without arguments again.  A block stands between two
comments:

    <!-- figures: NAME -->  ...  <!-- end -->
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from codalang.bench import plot, report  # noqa: E402
from codalang.bench.report import Report, Table  # noqa: E402

PAGE = ROOT / "docs/performance.md"
KEPT = ROOT / "docs/bench"
BLOCK = re.compile(r"(<!-- figures: (?P<name>[\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)

Rows = list[dict[str, Any]]


def machine(found: Report) -> str:
    """The command, and what it ran on."""
    facts = ", ".join(f"{key} {value}" for key, value in found.machine.items())
    return f"```\n{found.command}\n```\n\n{facts}; {found.seconds:.0f} s."


def tables(found: Report, *starts: str) -> str:
    """The tables whose titles begin so."""
    shown = [table.markdown() for table in report.tables(found) if table.title.startswith(starts)]
    return "\n\n".join(shown) or "Not measured in this run."


def plots(found: Report) -> str:
    """Links to the plots."""
    return "![time over the bare GEMM's](bench/bars.svg)\n\n![roofline](bench/roofline.svg)"


def remarks(found: Report) -> str:
    """What the tables leave out."""
    return "\n".join(f"- {line.replace('* ', '', 1)}" for line in report.remarks(found)) or "Nothing was left out."


BENCH: dict[str, Callable[[Report], str]] = {
    "run": machine,
    "epilogues": lambda found: tables(found, report.TITLES["epilogue"]),
    "gemms": lambda found: tables(found, report.TITLES["gemm"]),
    "hosted": lambda found: tables(found, report.TITLES["hosted"]),
    "means": lambda found: tables(found, "Geometric means"),
    "host": lambda found: tables(found, "The host's time"),
    "first-calls": lambda found: tables(found, "First calls"),
    "plots": plots,
    "remarks": remarks,
}


def search(rows: Rows) -> str:
    """Per job, the heuristic's configuration and the best that was found."""
    cells = [["work", "M x N x K", "tried", "heuristic ms", "best ms", "heuristic of best", "the best is"]]
    shares = [row["best_ms"] / row["heuristic_ms"] for row in rows]
    for row, share in zip(rows, shares, strict=True):
        best = row["best"] if row["best"] != row["heuristic"] else "the heuristic's"
        times = f"{row['heuristic_ms']:.3f}", f"{row['best_ms']:.3f}", f"{share:.3f}"
        cells.append([row["job"], row["extents"], str(row["candidates"]), *times, best])
    cells.append(["least of all", "", "", "", "", f"{min(shares):.3f}", ""])
    return Table("The heuristic's configuration beside the best found", cells).markdown()


SHARE = "of the GEMMs' speed"


def block(kept: dict[str, Any]) -> str:
    """A Transformer block: each implementation's time, its speed beside the GEMMs alone, and its memory."""
    cells = [["widths", "work", "", "ms", SHARE, "peak GiB"]]
    rows = [row for key, found in kept.items() if key.startswith("block ") for row in found]
    for row in rows:
        figures = f"{row['ms']:.3f}", f"{row[SHARE]:.3f}", f"{row['peak GiB']:.2f}"
        cells.append([row["size"], row["work"], row["implementation"], *figures])
    title = f"{kept['tokens']} tokens, {kept['device']}, torch {kept['torch']}, codalang {kept['codalang']}"
    return Table(title, cells).markdown()


# Columns of the table of bounds, and which of a pattern's shares each shows.
BOUNDS = {
    "measured": "measured",
    "of the clock": "clock",
    "of cycles": "cycles",
    "tiles moved, no maths": "moves",
    "bound by bytes": "bound by bytes",
    "and by instructions": "bound",
    "energy of bytes": "extra bytes",
    "of instructions": "instructions",
}


def energy(kept: dict[str, Any]) -> str:
    """What power allows each pattern, and the loads that say so."""
    price, patterns = kept["prices"], kept["patterns"]
    facts = (
        f"{kept['device']}, torch {kept['torch']}, codalang {kept['codalang']}: {kept['limit']:.0f} W allowed, "
        f"{price['spin']['watts']:.0f} W awake and idle, {1e12 * price['joules_per_byte']:.0f} pJ for a byte of "
        f"memory; a GEMM's energy goes with the clock to the power {price['exponent']:.2f}."
    )
    bounds = [["work", *BOUNDS]]
    loads = [["work", "steady load", "ms", "W", "MHz", "J"]]
    for row in patterns:
        shown = (row["shares"].get(key) for key in BOUNDS.values())
        bounds.append([row["title"], *("" if value is None else f"{value:.3f}" for value in shown)])
        for name, load in row["loads"].items():
            joules = load["watts"] * load["ms"] / 1e3
            cells = f"{load['ms']:.3f}", f"{load['watts']:.0f}", f"{load['mhz']:.0f}", f"{joules:.3f}"
            loads.append([row["title"], name, *cells])
    tables = (Table("The bare GEMM's time over each, and the bounds", bounds), Table("Steady loads, per call", loads))
    return "\n\n".join([facts, *(table.markdown() for table in tables)])


# A block's name -> the kept file that it is made of, and how.
FIGURES: dict[str, tuple[str, Callable[[Any], str]]] = {name: ("bench", make) for name, make in BENCH.items()}
FIGURES |= {"search": ("search", search), "block": ("block", block), "energy": ("energy", energy)}


@attrs.frozen
class Kept:
    """What the page is made of, None for what was not measured."""

    bench: Report | None = None
    search: Rows | None = None
    block: dict[str, Any] | None = None
    energy: dict[str, Any] | None = None


def rendered(page: str, kept: Kept) -> str:
    """The page with every block made anew.  Raises KeyError for a block of no such name."""

    def figures(match: re.Match[str]) -> str:
        file, make = FIGURES[match["name"]]
        found = getattr(kept, file)
        return f"{match[1]}\n{make(found) if found else 'Not measured yet.'}\n\n{match[3]}"

    return BLOCK.sub(figures, page)


def read(folder: Path = KEPT) -> Kept:
    """What is kept."""
    texts = {path.stem: path.read_text() for path in folder.glob("*.json")}
    bench = report.from_json(texts["bench"]) if "bench" in texts else None
    return Kept(bench, *(json.loads(texts[name]) if name in texts else None for name in ("search", "block", "energy")))


def keep(bench: list[Path], searches: list[Path], others: Mapping[str, Sequence[Path]], folder: Path = KEPT) -> None:
    """Keep the files of measuring commands, with the plots; `others` are objects by name, of which the last that has a
    key counts."""
    folder.mkdir(parents=True, exist_ok=True)
    if bench:
        found = report.merged([report.from_json(path.read_text()) for path in bench])
        report.write(found, folder / "bench.json")
        (folder / "bars.svg").write_text(plot.bars(found))
        (folder / "roofline.svg").write_text(plot.roofline(found))
    if searches:
        rows = {row["job"]: row for path in searches for row in json.loads(path.read_text())}
        (folder / "search.json").write_text(json.dumps(list(rows.values()), indent=1) + "\n")
    for name, paths in others.items():
        if paths:
            whole = {key: value for path in paths for key, value in json.loads(path.read_text()).items()}
            (folder / f"{name}.json").write_text(json.dumps(whole, indent=1) + "\n")


def main() -> None:
    """Keep what is given, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bench", nargs="+", type=Path, default=[])
    parser.add_argument("--search", nargs="+", type=Path, default=[])
    parser.add_argument("--block", nargs="+", type=Path, default=[])
    parser.add_argument("--energy", nargs=1, type=Path, default=[])
    options = parser.parse_args()
    keep(options.bench, options.search, {"block": options.block, "energy": options.energy})
    PAGE.write_text(rendered(PAGE.read_text(), read()))


if __name__ == "__main__":
    main()

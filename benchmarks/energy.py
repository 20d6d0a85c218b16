"""What power allows: joules, clock and cycles of each GEMM with an epilogue, and the bound that follows.

    python benchmarks/energy.py [--widths 8B] [--tokens 8192] [--only REGEX] [--seconds 0.5] [--rounds 15] --out DIR

Speed and clock are those of `codalang bench`: in turns, with a cold L2.  Power needs a steady state: such a load runs
back to back until the clock has settled, then for `--seconds` more, and is what NVML's energy counter says between two
of its ticks.  The clock is what the multiprocessors count over what the device's timer says.

| load      | is                                                                                       | seen   |
|-----------|------------------------------------------------------------------------------------------|--------|
| spin      | one thread that waits: the power of a GPU that is awake and does nothing                 | steady |
| copy      | a large copy: its energy above `spin`'s, for each byte read or written                   | steady |
| bare      | the longest bare GEMM                                                                    | steady |
| apart     | the same with pauses as long as itself: what it takes at a clock that is not limited     | steady |
| cublas    | the bare GEMM                                                                            | both   |
| plain     | our kernel that only stores the accumulator                                              | turns  |
| moves     | our kernel that loads and stores the epilogue's tiles, with next to no maths             | turns  |
| codalang  | our kernel                                                                               | turns  |
| hosted    | the epilogue on a plain tensor: its energy, less its bytes', is that of its instructions | steady |

A GEMM at the power limit gets slower by any energy that is spent beside it.  With A the bare GEMM's energy above
`spin`'s and e what the epilogue adds, the least time is x times the GEMM's where the energy of x times as long, at the
same power, pays for both:

    A x  =  A x^-g  +  e

For a lower clock needs a lower voltage, and the GEMM then takes less: its energy goes with the g-th power of the clock,
of which `apart` and `bare` are two points.  Neither the other limits, of L2 say, nor a better kernel enter: time
below the bound means that an epilogue takes less energy than assumed, time above it that something else is lost.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import statistics
import sys
import time
from collections.abc import Iterator, Mapping
from fractions import Fraction
from pathlib import Path
from typing import Any

import attrs

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch  # noqa: E402

import codalang  # noqa: E402
from codalang.bench.timing import Call, turns  # noqa: E402
from codalang.bench.workloads import PATTERNS, WIDTHS, Workload, make_operands  # noqa: E402
from codalang.ir.build import EpilogueBuilder  # noqa: E402
from codalang.ir.epilogue import Epilogue  # noqa: E402
from codalang.ir.types import Kind  # noqa: E402
from codalang.lower import ahead, run  # noqa: E402

SETTLE = 1.0  # seconds: less, and what ran before still decides the clock
COPIED = 2**30  # bytes
CYCLES = 2_000_000  # of a wait
CHUNK = 40.0  # milliseconds of calls that are enqueued at a time: reading the counter can take long
POLL = 0.002  # seconds between two readings

COUNTERS = """
extern "C" __global__ void counters(long long* found) {
    unsigned multiprocessor;
    long long cycles, nanoseconds;
    asm volatile("mov.u32 %0, %%smid;" : "=r"(multiprocessor));
    asm volatile("mov.u64 %0, %%clock64;" : "=l"(cycles));
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(nanoseconds));
    found[2 * multiprocessor] = cycles;
    found[2 * multiprocessor + 1] = nanoseconds;
}
"""
MOST_MULTIPROCESSORS = 256


@attrs.frozen
class Speed:
    """A call's time and clock."""

    ms: float
    mhz: float

    @property
    def cycles(self) -> float:
        """Of the multiprocessors' clock, in millions."""
        return self.ms * self.mhz / 1e3


@attrs.frozen
class Load(Speed):
    """A load in its steady state, per call."""

    watts: float

    @property
    def joules(self) -> float:
        """Per call."""
        return self.watts * self.ms / 1e3

    def above(self, other: Load) -> float:
        """Joules per call beyond what another load takes in that time."""
        return (self.watts - other.watts) * self.ms / 1e3


@attrs.frozen
class Prices:
    """What was found of the GPU: a load that does nothing, joules for a byte, and the power of the clock that a GEMM's
    energy goes with."""

    spin: Load
    joules_per_byte: float
    exponent: float


def moves(epilogue: Epilogue) -> Epilogue:
    """The tiles of an epilogue, loaded and stored with next to no maths; no vectors and no reductions."""
    builder = EpilogueBuilder(f"{epilogue.name}_moves", ("M", "N"))
    base = epilogue.params[0].type.width or Fraction(1)
    total = builder.param(epilogue.params[0].name, epilogue.params[0].type)
    for param in epilogue.params[1:]:
        if param.type.kind is Kind.TILE:
            value = builder.param(param.name, param.type, param.dtype)
            width = param.type.width or Fraction(1)
            if width > base:
                value = builder.op("add", builder.op("even", value), builder.op("odd", value))
            elif width < base:
                value = builder.op("join", value, value)
            total = builder.op("add", total, value)
    for store in epilogue.stores:
        width = store.type.width or Fraction(1)
        value = total if width == base else builder.op(*(("join", total, total) if width > base else ("even", total)))
        builder.store(store.name, value, store.type, store.dtype)
    return builder.finish()


def plain(epilogue: Epilogue) -> Epilogue:
    """The GEMM of an epilogue without it."""
    builder = EpilogueBuilder(f"{epilogue.name}_plain", ("M", "N"))
    accumulator = epilogue.params[0]
    builder.store("y", builder.param(accumulator.name, accumulator.type), accumulator.type)
    return builder.finish()


STEADY = ("cublas", "hosted")  # of what `calls` gives; and in turns all but the last


def calls(workload: Workload, device: str) -> Iterator[tuple[str, Call]]:
    """Our kernels of a workload: as it is, with less of its epilogue, and the epilogue alone."""
    epilogue, operands = workload.epilogue, make_operands(workload, device)
    a, b, inputs = operands.a, operands.b, operands.inputs
    assert a is not None and b is not None
    tiles = {p.name for p in epilogue.params if p.type.kind is Kind.TILE}
    loaded = {name: value for name, value in inputs.items() if name in tiles}
    (m, n, _), name = workload.extents, epilogue.params[0].name
    if device != "meta":
        yield "cublas", lambda: torch.matmul(a, b.t())
    yield "codalang", lambda: run.gemm(epilogue, a, b, inputs)
    bare = plain(epilogue)
    yield "plain", lambda: run.gemm(bare, a, b, {})
    if any(store.type.kind is Kind.TILE for store in epilogue.stores):
        moving = moves(epilogue)
        yield "moves", lambda: run.gemm(moving, a, b, loaded)
    hosted = {**inputs, name: torch.randn(m, n, device=device, dtype=torch.bfloat16)}
    yield "hosted", lambda: run.hosted(epilogue, hosted, extents=(m, workload.unit))


def compile_all(workloads: list[Workload]) -> None:
    """Every kernel, in parallel.  Needs no GPU."""
    with ahead.recorded() as specs:
        for workload in workloads:
            for _, call in calls(workload, "meta"):
                call()
    begin = time.perf_counter()
    outcome = ahead.compile_each(specs)
    print(f"{len(outcome)} kernels in {time.perf_counter() - begin:.0f} s", flush=True)
    for spec, compiled in outcome.items():
        if compiled.error:
            sys.exit(f"{spec.epilogue.name}: {compiled.error}")


class Meter:
    """NVML's energy counter, and the device's own of cycles and time."""

    def __init__(self) -> None:
        try:
            import pynvml
        except ModuleNotFoundError:
            sys.exit("energy.py reads NVML's energy counter: pip install nvidia-ml-py")
        self.nvml = pynvml
        self.gpu = torch.cuda._get_pynvml_handler()
        self.counters = torch.cuda._compile_kernel(COUNTERS, "counters")
        self.millijoules()

    def millijoules(self) -> int:
        """Since the driver was loaded; changes some ten times a second or more often."""
        return self.nvml.nvmlDeviceGetTotalEnergyConsumption(self.gpu)

    @property
    def limit(self) -> float:
        """Watts that the GPU may take."""
        return self.nvml.nvmlDeviceGetEnforcedPowerLimit(self.gpu) / 1e3

    def load(self, call: Call, seconds: float) -> Load:
        """Run a call back to back; what it takes once the clock has settled."""
        chunk = math.ceil(CHUNK / self._milliseconds(call))
        self._busy(call, chunk, SETTLE, [])
        ticks: list[tuple[float, int]] = []
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        counted = [torch.zeros(MOST_MULTIPROCESSORS, 2, dtype=torch.int64, device="cuda") for _ in range(2)]
        self._count(counted[0])
        begin.record()
        count = self._busy(call, chunk, seconds, ticks)
        end.record()
        self._count(counted[1])
        torch.cuda.synchronize()
        return Load(begin.elapsed_time(end) / count, megahertz(*(c.tolist() for c in counted)), watts(ticks))

    def in_turns(self, calls: Mapping[str, Call], rounds: int) -> dict[str, Speed]:
        """Each call once a round, as `codalang.bench.timing.interleaved` does; medians."""
        seen = {name: list[Speed]() for name in calls}
        for call in calls.values():
            call()
        for name in turns(list(calls), rounds):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            counted = [torch.zeros(MOST_MULTIPROCESSORS, 2, dtype=torch.int64, device="cuda") for _ in range(2)]
            self._count(counted[0])
            begin.record()
            calls[name]()
            end.record()
            self._count(counted[1])
            torch.cuda.synchronize()
            seen[name].append(Speed(begin.elapsed_time(end), megahertz(*(c.tolist() for c in counted))))
        return {
            name: Speed(statistics.median(s.ms for s in speeds), statistics.median(s.mhz for s in speeds))
            for name, speeds in seen.items()
        }

    def _milliseconds(self, call: Call) -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        call()
        begin.record()
        call()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end)

    def _busy(self, call: Call, chunk: int, seconds: float, ticks: list[tuple[float, int]]) -> int:
        """Keep the device busy with two chunks of calls at any time, noting ticks of the energy counter; the calls."""
        until, count, last = time.perf_counter() + seconds, 0, self.millijoules()
        pending: list[torch.cuda.Event] = []
        while time.perf_counter() < until:
            for _ in range(chunk):
                call()
            count += chunk
            pending.append(torch.cuda.Event())
            pending[-1].record()
            while len(pending) > 1:
                now = self.millijoules()
                if now != last:
                    ticks.append((time.perf_counter(), now))
                    last = now
                if pending[0].query():
                    pending.pop(0)
                time.sleep(POLL)
        return count

    def _count(self, found: torch.Tensor) -> None:
        self.counters(grid=(2 * MOST_MULTIPROCESSORS, 1, 1), block=(1, 1, 1), args=[found])


def watts(ticks: list[tuple[float, int]]) -> float:
    """Mean power between the first and the last tick (seconds, millijoules)."""
    if len(ticks) < 2:
        sys.exit("the energy counter ticked less than twice: more --seconds are needed")
    (first, least), (last, most) = ticks[0], ticks[-1]
    return (most - least) / 1e3 / (last - first)


def megahertz(begin: list[list[int]], end: list[list[int]]) -> float:
    """The mean clock: cycles over nanoseconds, the median of the multiprocessors that both counts saw."""
    pairs = [(a, b) for a, b in zip(begin, end, strict=True) if a[1] and b[1]]
    return statistics.median(1e3 * (b[0] - a[0]) / (b[1] - a[1]) for a, b in pairs)


def exponent(slow: tuple[float, float], fast: tuple[float, float]) -> float:
    """Of which power of the clock energy goes, by two points (energy, clock), between 0 and 2: voltage never falls as
    the clock rises, nor rises faster."""
    if fast[1] < 1.02 * slow[1]:
        return 0.0  # too near to say
    return min(2.0, max(0.0, math.log(fast[0] / slow[0]) / math.log(fast[1] / slow[1])))


def least_time(added: float, power: float) -> float:
    """x of x = x^-power + added, by bisection; `added` is energy, the GEMM's own being 1."""
    low, high = 0.25, 4.0
    while high - low > 1e-6:
        middle = (low + high) / 2
        low, high = (middle, high) if middle - middle**-power < added else (low, middle)
    return low


def prices(meter: Meter, workload: Workload, seconds: float) -> Prices:
    """Measure what the GPU charges; `workload` is a long GEMM."""
    operands = make_operands(workload, "cuda")
    a, b = operands.a, operands.b
    assert a is not None and b is not None
    source = torch.randn(COPIED // 4, device="cuda")
    target = torch.empty_like(source)
    spin = meter.load(lambda: torch.cuda._sleep(CYCLES), seconds)
    copy = meter.load(lambda: target.copy_(source), seconds)
    bare = meter.load(lambda: torch.matmul(a, b.t()), seconds)
    pause = int(1e6 * bare.cycles)

    def with_pause() -> None:
        torch.matmul(a, b.t())
        torch.cuda._sleep(pause)

    apart = meter.load(with_pause, seconds)
    for name, load in {"spin": spin, "copy": copy, "bare": bare, "apart": apart}.items():
        print(f"{name:10} {load.ms:.3f} ms  {load.watts:.0f} W  {load.mhz:.0f} MHz", flush=True)
    found = exponent((bare.above(spin), bare.mhz), (apart.above(spin), apart.mhz))
    return Prices(spin, copy.above(spin) / (2 * COPIED), found)


def shares(workload: Workload, turns: dict[str, Speed], steady: dict[str, Load], price: Prices) -> dict[str, float]:
    """What a pattern's calls in turns and its steady loads say of it; see the module's docstring.

    `extra bytes` are the epilogue's tiles beyond the one that a bare GEMM stores, in joules as a share of the GEMM's;
    `instructions` what the hosted epilogue takes beside its bytes, at the clock of the GEMM.
    """
    m, n, _ = workload.extents
    bare, hosted = steady["cublas"], steady["hosted"]
    own = bare.above(price.spin)
    moved = (workload.tile_bytes - 2 * m * n) * price.joules_per_byte / own
    work = hosted.above(price.spin) - (workload.tile_bytes + 2 * m * n) * price.joules_per_byte
    work = max(0.0, work) * (bare.mhz / hosted.mhz) ** price.exponent / own
    cublas, ours = turns["cublas"], turns["codalang"]
    found = {
        "measured": cublas.ms / ours.ms,
        "clock": ours.mhz / cublas.mhz,
        "cycles": cublas.cycles / ours.cycles,
        "extra bytes": moved,
        "instructions": work,
        "bound by bytes": 1 / least_time(moved, price.exponent),
        "bound": 1 / least_time(moved + work, price.exponent),
    }
    return found | {name: cublas.ms / turns[name].ms for name in ("plain", "moves") if name in turns}


def measured(workload: Workload, meter: Meter, price: Prices, options: argparse.Namespace) -> dict[str, Any]:
    """A row of the JSON."""
    every = dict(calls(workload, "cuda"))
    turns = meter.in_turns({name: call for name, call in every.items() if name != "hosted"}, options.rounds)
    steady = {name: meter.load(every[name], options.seconds) for name in STEADY}
    for name, speed in turns.items():
        print(f"   {name:10} {speed.ms:.3f} ms  {speed.mhz:.0f} MHz", flush=True)
    for name, load in steady.items():
        print(f"   steady {name:10} {load.ms:.3f} ms  {load.mhz:.0f} MHz  {load.watts:.0f} W", flush=True)
    found = shares(workload, turns, steady, price)
    print("   " + "  ".join(f"{name} {value:.3f}" for name, value in found.items()), flush=True)
    return {
        "name": workload.name,
        "title": workload.pattern.title,
        "turns": {name: attrs.asdict(speed) for name, speed in turns.items()},
        "loads": {name: attrs.asdict(load) for name, load in steady.items()},
        "shares": found,
    }


def main() -> None:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", type=re.compile, default=re.compile(""), help="workloads whose name matches")
    parser.add_argument("--widths", nargs="+", choices=list(WIDTHS), default=["8B"])
    parser.add_argument("--tokens", nargs="+", type=int, default=[8192])
    parser.add_argument("--seconds", type=float, default=0.5)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    patterns = [p for p in PATTERNS.values() if p.group == "epilogue"]
    every = [
        Workload(p, WIDTHS[width], count) for width in options.widths for count in options.tokens for p in patterns
    ]
    chosen = [w for w in every if options.only.search(w.name)]
    meter = Meter()
    compile_all(chosen)
    long = Workload(PATTERNS["gemm_gate_up_tn"], WIDTHS["8B"], 8192)
    with torch.no_grad():
        price = prices(meter, long, options.seconds)
        a_byte = f"{1e12 * price.joules_per_byte:.1f} pJ a byte"
        print(f"limit {meter.limit:.0f} W, {a_byte}, a GEMM's energy ~ clock^{price.exponent:.2f}")
        rows = []
        for workload in chosen:
            print(workload.name, flush=True)
            rows.append(measured(workload, meter, price, options))
            torch.cuda.empty_cache()
    if options.out:
        machine = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "codalang": codalang.__version__}
        facts = {"limit": meter.limit, "prices": attrs.asdict(price), "patterns": rows}
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "energy.json").write_text(json.dumps(machine | facts, indent=1) + "\n")


if __name__ == "__main__":
    main()

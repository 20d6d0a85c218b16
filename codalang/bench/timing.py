"""Device time of interleaved calls with a cold L2, and host time on its own.

Device time.  Clocks move with temperature and load, so what is compared runs in the same loop, in a new random order
each round.  Before each call the L2 is overwritten, then the device spins while the host enqueues event, call, event:
the host's launch cost passes during the spin and is not in the time between the events.

Host time.  The device spins, and calls are enqueued behind it: what passes on the host's clock is the cost of the
calls alone.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

import attrs
import torch

Call = Callable[[], object]

# Twice what a call of a few launches costs the host; at 2 GHz.
SPIN_CYCLES = 2_000_000
FLUSH_BYTES = 256 * 2**20


@attrs.frozen
class Timing:
    """Device milliseconds over the rounds."""

    median: float
    low: float
    high: float

    @staticmethod
    def of(milliseconds: Sequence[float]) -> Timing:
        """Median and quartiles of at least two."""
        low, median, high = statistics.quantiles(milliseconds, n=4)
        return Timing(median, low, high)


def interleaved(
    calls: Mapping[str, Call], *, rounds: int = 25, warm_up: int = 3, spin_cycles: int = SPIN_CYCLES
) -> dict[str, Timing]:
    """Time each call once a round.

    Args:
        rounds: at least 2.
        spin_cycles: that the device spins while the host enqueues a call; more than that takes.
    """
    for call in calls.values():
        for _ in range(warm_up):
            call()
    events: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {name: [] for name in calls}
    for name in turns(list(calls), rounds, spin_cycles):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        calls[name]()
        end.record()
        events[name].append((begin, end))
    return {name: Timing.of([b.elapsed_time(e) for b, e in pairs]) for name, pairs in events.items()}


def turns(names: Sequence[str], rounds: int, spin_cycles: int = SPIN_CYCLES) -> Iterator[str]:
    """Whose turn it is: each once a round, in a random order; the L2 was overwritten, and the device spins."""
    flush = torch.empty(FLUSH_BYTES, dtype=torch.int8, device="cuda")
    rng = random.Random(0)
    for _ in range(rounds):
        for name in rng.sample(names, len(names)):
            flush.zero_()
            torch.cuda._sleep(spin_cycles)
            yield name
        torch.cuda.synchronize()


def host_microseconds(call: Call, *, calls: int = 20, repeats: int = 21) -> float:
    """The host's time per call with the device out of the way; the median of `repeats` runs of `calls` calls.

    Few enough calls that they are over before the spin is, and that the launch queue never fills: the host would then
    wait for the device.
    """
    for _ in range(10):
        call()
    samples = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        torch.cuda._sleep(20 * SPIN_CYCLES)
        begin = time.perf_counter()
        for _ in range(calls):
            call()
        samples.append((time.perf_counter() - begin) / calls * 1e6)
    torch.cuda.synchronize()
    return statistics.median(samples)

"""Parts of a tile on the device: teams multiply ranges of K for one tile, and the last to arrive adds them up.

Each team leaves its accumulator in a workspace in global memory, as registers lie (so that both ways are 16-byte
accesses of neighbouring threads), and counts itself in at the tile's counter.  The one that finds all others there
reads the parts in their order, its own among them, and goes on to the epilogue: the sum is the same whoever is last.
Nobody waits, so the parts of a tile need not run at the same time.

Where the last wave is balanced, the first part of K is the last to be done as a rule.  Its team looks before it leaves
anything whether all others are there, and then adds them to what it holds: the same sums in the same order.

The counter is at 0 again when the kernel ends.  Memory order: every thread's writes, a fence, the team's barrier, the
atomic of one thread; there, that atomic, the team's barrier, a fence, every thread's reads.
"""

import cutlass
from cutlass import Boolean, Float32, Int32, Int64, cute

from codalang.lower.registers import load, load_shared, store, store_shared

WIDE = 4  # f32 of one access


@cute.jit
def gather(
    kernel: cutlass.Constexpr,
    acc: cute.Tensor,
    shares: tuple,
    flags: Int32,
    tile: Int32,
    part: Int32,
    parts: Int32,
    slots: Int32,
    team: Int32,
    thread: Int32,
) -> Boolean:
    """Leave this team's part of a tile; True where it is the last, whose `acc` is then the sum.

    shares: workspace f32 [1, tiles * slots * elements of a tile], counters i32 [1, tiles], zeros; part: its place of
    `parts`, no more than `slots`; flags: byte address in shared memory of two words per team; thread: within the team.
    """
    workspace, counters = shares
    threads, part_bytes = kernel.team_warps * 32, kernel.tile_m * kernel.tile_n * 4
    first = workspace.iterator.toint() + Int64(tile) * Int64(slots) * part_bytes + thread * (WIDE * 4)
    counter, flag = counters.iterator + tile, flags + team * 8
    sync_team = kernel.sync_team  # a function: the DSL would take the kernel for a value that branches change
    is_last = Boolean(False)
    if cutlass.const_expr(kernel.config.balanced):
        if part == 0:  # a team has at most one such part in a launch: nobody reads the flag of another
            arrive(kernel, counter, 0, flag + 4, team, thread)
            is_last = load_shared(Int32, flag + 4, 1)[0] == parts - 1
        if is_last:
            cute.arch.fence_acq_rel_gpu()
            if thread == 0:
                counters[0, tile] = Int32(0)
            for other in cutlass.range(1, parts, unroll=1):
                add(acc, first + Int64(other) * part_bytes, threads)
    if is_last == False:  # noqa: E712, a value of the device
        leave(acc, first + Int64(part) * part_bytes, threads)
        cute.arch.fence_acq_rel_gpu()
        sync_team(team)
        arrive(kernel, counter, 1, flag, team, thread)
        is_last = load_shared(Int32, flag, 1)[0] == parts - 1
        if is_last:
            cute.arch.fence_acq_rel_gpu()
            if thread == 0:
                counters[0, tile] = Int32(0)
            take(acc, first, threads)
            for other in cutlass.range(1, parts, unroll=1):
                add(acc, first + Int64(other) * part_bytes, threads)
    return is_last


@cute.jit
def arrive(
    kernel: cutlass.Constexpr, counter: cute.Pointer, count: cutlass.Constexpr, flag: Int32, team: Int32, thread: Int32
) -> None:
    """Add to a tile's counter; the team finds at `flag` what it was."""
    if thread == 0:
        before = cute.arch.atomic_add(counter, Int32(count), sem="acq_rel", scope="gpu")
        store_shared(Int32, flag, (Int32(before),))
    kernel.sync_team(team)


def leave(acc: cute.Tensor, address: Int64, threads: int) -> None:
    """Write a thread's values."""
    for i in range(cute.size(acc) // WIDE):
        values = tuple(acc[i * WIDE + j] for j in range(WIDE))
        store(Float32, address + i * (threads * WIDE * 4), values, cute.AddressSpace.gmem)


def take(acc: cute.Tensor, address: Int64, threads: int) -> None:
    """Read what a thread of another team wrote."""
    for i in range(cute.size(acc) // WIDE):
        for j, value in enumerate(load(Float32, address + i * (threads * WIDE * 4), WIDE, cute.AddressSpace.gmem)):
            acc[i * WIDE + j] = value


def add(acc: cute.Tensor, address: Int64, threads: int) -> None:
    """Add what a thread of another team wrote."""
    for i in range(cute.size(acc) // WIDE):
        for j, value in enumerate(load(Float32, address + i * (threads * WIDE * 4), WIDE, cute.AddressSpace.gmem)):
            acc[i * WIDE + j] = acc[i * WIDE + j] + value

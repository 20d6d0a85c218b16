"""Split-K on the device: several teams multiply a part of K each for one tile, and the last to arrive adds them up.

Each team leaves its accumulator in a workspace in global memory, as registers lie (so that both ways are 16-byte
accesses of neighbouring threads), and counts itself in at the tile's counter.  The one that finds all others there
reads the parts in their order, its own among them, and goes on to the epilogue: the sum is the same whoever is last.
Nobody waits, so the parts of a tile need not run at the same time.

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
    workspace: cute.Tensor,
    counters: cute.Tensor,
    flags: Int32,
    tile: Int32,
    part: Int32,
    team: Int32,
    thread: Int32,
) -> Boolean:
    """Leave this team's part of a tile; True where it is the last, whose `acc` is then the sum.

    workspace: f32 [1, tiles * parts * elements of a tile]; counters: i32 [1, tiles], zeros; flags: byte address in
    shared memory of a word per team; thread: within the team.
    """
    threads, parts = kernel.team_warps * 32, kernel.config.split
    part_bytes = kernel.tile_m * kernel.tile_n * 4
    first = workspace.iterator.toint() + Int64(tile * parts) * part_bytes + thread * (WIDE * 4)
    leave(acc, first + Int64(part) * part_bytes, threads)
    cute.arch.fence_acq_rel_gpu()
    kernel.sync_team(team)
    flag = flags + team * 4
    if thread == 0:
        before = cute.arch.atomic_add(counters.iterator + tile, Int32(1), sem="acq_rel", scope="gpu")
        store_shared(Int32, flag, (Int32(before),))
    kernel.sync_team(team)
    is_last = load_shared(Int32, flag, 1)[0] == parts - 1
    if is_last:
        cute.arch.fence_acq_rel_gpu()
        if thread == 0:
            counters[0, tile] = Int32(0)
        take(acc, first, threads)
        for other in cutlass.range(1, parts, unroll=1):
            add(acc, first + Int64(other) * part_bytes, threads)
    return is_last


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

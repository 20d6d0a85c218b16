"""Random programs on a Hopper GPU: `python benchmarks/random_programs.py [--count 100] [--seed S] [--out DIR]`.

Draws programs of the whole language (tests/strategies.py), derives their backwards, and checks every kernel that the
lowering makes of them as tests/gpu/gpu_checks.py does: against the reference in f64, with poisoned outputs, twice.

| program            | forward and derived backward, each on a GEMM and hosted, as far as the lowering covers it     |
| extents            | two, ragged in every axis; on a GEMM the tilings take turns                                   |
| compiled           | first, in parallel processes, through a disk cache of its own (or $CODALANG_CACHE_DIR)        |
| reported           | per program: kernels, worst error as a fraction of what is allowed, spilled and slow kernels  |

Exits with 1 where a result is wrong or a kernel does not compile.  `--compile-only` needs no GPU, and `--emulate` runs
on the CPU, with the reference in place of the kernels: everything else is as it is on a GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import attrs

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tests/gpu")]

import emulation  # noqa: E402
import gpu_cases  # noqa: E402
import gpu_checks  # noqa: E402
import gpu_compile  # noqa: E402
import hypothesis  # noqa: E402
import strategies  # noqa: E402
import torch  # noqa: E402

from codalang.ir.epilogue import Epilogue  # noqa: E402
from codalang.ir.printer import print_epilogue  # noqa: E402
from codalang.lower import call, run  # noqa: E402
from codalang.lower.plan import TILINGS  # noqa: E402
from codalang.lower.spec import KernelSpec  # noqa: E402

# (M, N, K): on a GEMM both; hosted, two of whose rows are aligned, or two of whose rows are not: one kernel for either.
EXTENTS = ((129, 200, 72), (330, 521, 40))
HOSTED_COLUMNS = ((200, 520), (203, 521))
LEAST_OPS = 4  # a program with fewer says little
DRAWN_AT_ONCE = 12  # of which the longest is taken: hypothesis draws variants of what it drew before
LINE = (
    "{name:22} {ops:>4} ops {outputs:>3} outputs {kernels:>3} kernels {cases:>3} cases  worst {worst:6.3f}  {verdict}"
)


Extents = tuple[int, int, int]


@attrs.frozen
class Program:
    """A random epilogue, under the name that its subjects go by, and the cases that check it."""

    name: str
    epilogue: Epilogue
    cases: tuple[gpu_cases.Case, ...]


def draw(count: int, seed: int, max_steps: int = 16, extents: Sequence[Extents] = EXTENTS) -> list[Program]:
    """That many different programs; the same for the same seed.  Those that no kernel covers are left out."""
    programs: list[Program] = []
    seen: set[Epilogue] = set()
    for batch in range(20 * count):
        drawn = [e for e in _drawn(seed + 1_000_003 * batch, max_steps) if e not in seen]
        for epilogue in sorted(drawn, key=_ops, reverse=True):
            program = _program(f"random_{seed}_{len(programs)}", epilogue, extents)
            if _ops(epilogue) >= LEAST_OPS and any(c.subject.on_gemm for c in program.cases):
                seen.add(epilogue)
                programs.append(program)
                break
        if len(programs) == count:
            break
    return programs


def _ops(epilogue: Epilogue) -> int:
    """Values that are computed."""
    return sum(node.op not in ("param", "const") for node in epilogue.nodes)


def _drawn(seed: int, max_steps: int) -> list[Epilogue]:
    """A batch of programs as hypothesis draws them, kept instead of tested."""
    found: list[Epilogue] = []

    @hypothesis.seed(seed)
    @hypothesis.settings(
        max_examples=DRAWN_AT_ONCE,
        database=None,
        deadline=None,
        phases=[hypothesis.Phase.generate],
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    @hypothesis.given(strategies.epilogues(max_steps=max_steps))
    def keep(epilogue: Epilogue) -> None:
        found.append(epilogue)

    keep()
    return found


def _program(name: str, epilogue: Epilogue, extents: Sequence[Extents]) -> Program:
    gpu_cases.add(name, epilogue)
    number = int(name.rsplit("_", 1)[1])
    cases = []
    for turn, subject in enumerate(gpu_cases.subjects([name])):
        hosted = HOSTED_COLUMNS[(number + subject.backward) % 2]
        for i, (m, n, k) in enumerate(extents):
            columns = n if subject.on_gemm else min(n, hosted[i])
            cases.append(
                gpu_cases.Case(
                    subject,
                    gpu_cases.DTYPES[(number + turn) % 2],
                    m,
                    gpu_cases.fitted(name, columns),
                    k,
                    vector_dtype=("f32", "same")[number // 2 % 2],
                    tiling=(number + turn) % len(TILINGS) if subject.on_gemm and i else None,
                    tame=True,
                )
            )
    return Program(name, epilogue, tuple(cases))


# ---- kernels ---------------------------------------------------------------------------------------------------------


def kernels_of(programs: Sequence[Program], device: str) -> dict[str, list[KernelSpec]]:
    """The kernels that each program needs, and that no program before it needs."""
    taken: set[KernelSpec] = set()
    found: dict[str, list[KernelSpec]] = {}
    for program in programs:
        specs = gpu_compile.kernels(program.cases, device)
        found[program.name] = [s for s in specs if s not in taken]
        taken.update(specs)
    return found


@attrs.frozen
class Row:
    """What is reported of a program; `faults` make it wrong, `remarks` do not."""

    name: str
    ops: int
    outputs: int
    kernels: int
    cases: int
    worst: float
    faults: tuple[str, ...]
    remarks: tuple[str, ...]
    source: str

    @property
    def verdict(self) -> str:
        """In a word."""
        slow = f"ok, {len(self.remarks)} slow kernels" if self.remarks else "ok"
        return "WRONG" if self.faults else slow


def checked(program: Program, compiled: dict[KernelSpec, gpu_compile.Compiled], device: str, runs: bool) -> Row:
    """Run a program's cases, unless its kernels did not compile."""
    faults = [f"{described(spec)}: {c.error}" for spec, c in compiled.items() if c.error]
    worst = 0.0
    if runs and not faults:
        findings = [f for case in program.cases for f in judged(case, device)]
        worst = max([0.0, *(f.error / f.allowed for f in findings if f.allowed)])
        faults = [str(f) for f in findings if not f.ok]
    return Row(
        program.name,
        _ops(program.epilogue),
        len(program.epilogue.outputs),
        len(compiled),
        len(program.cases),
        worst,
        tuple(faults),
        tuple(f"{described(spec)}: {remark.split(';')[0]}" for spec, c in compiled.items() for remark in c.remarks),
        print_epilogue(program.epilogue),
    )


def described(spec: KernelSpec) -> str:
    """A kernel in a few words."""
    if spec.merge is not None:
        return f"the merge of {spec.epilogue.outputs[spec.merge].name}"
    if spec.config is None:
        return f"{spec.epilogue.name} hosted, {'aligned' if spec.aligned else 'not aligned'}"
    schedule = "ping-pong" if spec.config.ping_pong else "cooperative"
    return f"{spec.epilogue.name} on {spec.operand.dtype} GEMM, {spec.config.tile[0]}x{spec.config.tile[1]} {schedule}"


def judged(case: gpu_cases.Case, device: str) -> list[gpu_checks.Finding]:
    """The findings of a case; an exception is one.  Ends the process where the device no longer answers."""
    try:
        return gpu_checks.check(case, run, device=device, allocator=call)
    except Exception as error:
        finding = gpu_checks.Finding(case, "*", fault=f"{type(error).__name__}: {error}")
    if device == "cuda":
        try:
            torch.cuda.synchronize()
        except RuntimeError:
            source = print_epilogue(case.subject.epilogue)
            sys.exit(f"FAILED {finding}\n{source}\nthe device is lost: nothing more can be checked in this process")
    return [finding]


# ---- the command -----------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _on(device: str) -> Iterator[None]:
    """On the CPU, kernels are emulated."""
    with emulation.emulated(torch.float32) if device == "cpu" else contextlib.nullcontext():
        yield


@contextlib.contextmanager
def _cache() -> Iterator[None]:
    """A cache of this run's own, unless one is chosen: what is found compiled gives no report of spills."""
    if os.environ.get("CODALANG_CACHE_DIR"):
        yield
        return
    with tempfile.TemporaryDirectory(prefix="codalang-random-") as folder:
        os.environ["CODALANG_CACHE_DIR"] = folder
        yield
        del os.environ["CODALANG_CACHE_DIR"]


def check_programs(
    programs: Sequence[Program],
    *,
    device: str,
    compiles: bool,
    runs: bool,
    processes: int | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> list[Row]:
    """Compile, run and judge.  `compiles`: kernels are compiled ahead; `runs`: cases are run."""
    with _on(device):
        needed = kernels_of(programs, device)
    every = [spec for specs in needed.values() for spec in specs]
    begin = time.perf_counter()
    compiled = (
        gpu_compile.compile_each(every, processes) if compiles else dict.fromkeys(every, gpu_compile.Compiled(0.0))
    )
    if compiles:
        tiles = Counter(
            "merge" if s.merge is not None else "{}x{}".format(*s.config.tile) if s.config else "hosted" for s in every
        )
        counts = ", ".join(f"{count} of {tile}" for tile, count in tiles.most_common())
        slowest = max((c.seconds for c in compiled.values()), default=0.0)
        say(f"{len(every)} kernels ({counts}) in {time.perf_counter() - begin:.0f} s, the slowest {slowest:.0f} s")
    rows = []
    with _on(device):
        for program in programs:
            say(f"checking {program.name}")  # the last line, should it hang
            row = checked(program, {s: compiled[s] for s in needed[program.name]}, device, runs)
            rows.append(row)
            say(f"    {row.verdict}, worst {row.worst:.3f}")
    return rows


def main() -> None:
    """Parse the command line, check, print and write the table; exits with 1 where something is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=100, help="programs (default: 100)")
    parser.add_argument(
        "--seed", type=int, default=int.from_bytes(os.urandom(4), "little"), help="default: a fresh one"
    )
    parser.add_argument("--steps", type=int, default=16, help="length of the programs (default: 16)")
    parser.add_argument("--only", type=int, help="the program of this number alone")
    parser.add_argument("--compile-only", action="store_true", help="compile, and run nothing")
    parser.add_argument("--emulate", action="store_true", help="on the CPU, with stand-ins for the kernels")
    parser.add_argument("--processes", type=int, help="that compile (default: as many as there are cores)")
    parser.add_argument("--out", type=Path, help="folder for random_programs.json and the programs that failed")
    options = parser.parse_args()
    hopper = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
    if not (hopper or options.compile_only or options.emulate):
        sys.exit("random_programs.py needs a Hopper GPU (compute capability 9.0), --compile-only or --emulate")
    device = "cuda" if hopper and not options.emulate else "cpu"
    print(f"seed {options.seed}", flush=True)
    programs = draw(options.count, options.seed, options.steps)
    if options.only is not None:
        programs = programs[options.only : options.only + 1]
    with _cache():
        rows = check_programs(
            programs,
            device=device,
            compiles=not options.emulate,
            runs=not options.compile_only,
            processes=options.processes,
            say=lambda text: print(text, file=sys.stderr, flush=True),
        )
    report(rows, options.seed, options.out)
    sys.exit(1 if any(row.faults for row in rows) else 0)


def report(rows: Sequence[Row], seed: int, out: Path | None) -> None:
    """Print the table and, where asked, write it and the programs that failed."""
    for row in rows:
        shown = attrs.asdict(row)
        print(LINE.format(**shown, verdict=row.verdict))
    for row in rows:
        if row.faults:
            print(f"\n{row.name} (--seed {seed} --only {row.name.rsplit('_', 1)[1]})\n{row.source}")
            print("\n".join(f"FAILED {fault}" for fault in row.faults[:5]), flush=True)
    for row in rows:
        for remark in row.remarks:
            print(f"SLOW {row.name}: {remark}")
    wrong, spilled = (sum(bool(x) for x in column) for column in ([r.faults for r in rows], [r.remarks for r in rows]))
    kernels, cases = (sum(column) for column in ([r.kernels for r in rows], [r.cases for r in rows]))
    worst = max([0.0, *(r.worst for r in rows)])
    print(f"seed {seed}: {len(rows)} programs, {kernels} kernels, {cases} cases, worst {worst:.3f} of what is allowed")
    print(f"{wrong} wrong, {spilled} with kernels that spill or serialize")
    if out:
        out.mkdir(parents=True, exist_ok=True)
        (out / "random_programs.json").write_text(json.dumps({"seed": seed, "rows": [attrs.asdict(r) for r in rows]}))
        for row in rows:
            if row.faults:
                (out / f"{row.name}.coda").write_text(row.source)


if __name__ == "__main__":
    main()

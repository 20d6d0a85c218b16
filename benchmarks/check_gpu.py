"""Correctness on a Hopper GPU: `python benchmarks/check_gpu.py [--sweep] [--out DIR]`.

Runs what `pytest -m gpu` runs: the cases of tests/gpu/gpu_cases.py, and the tests of tests/gpu/test_gpu_torch.py.
Prints a row as it is done, per subject and group: how many cases ran, how many failed, the worst error as a fraction of
what is allowed, and the seconds.  `--sweep` adds every combination of ragged extents and majors.  Kernels are compiled
first, in as many processes as there are cores; what takes time then is the host's, in float64's many small steps, so
that several processes share the GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests/gpu")]

import gpu_cases  # noqa: E402
import gpu_checks  # noqa: E402
import gpu_compile  # noqa: E402
import pytest  # noqa: E402
import torch  # noqa: E402

from codalang.lower import call, run  # noqa: E402

LINE = "{subject:44} {group:11} {cases:>6} cases {failed:>5} failed  worst {worst:5.3f}  {seconds:6.1f} s"
MOST_PROCESSES = 8  # of which each has a GPU context
LARGE = ("llama", "huge")  # one after the other: several at a time might not fit in the GPU's memory
GROUPS = ("ragged", "library", "samples", "empty", "near limit", "tilings", "parts", "llama", "huge")


def main() -> None:
    """Parse the command line, run the groups, print and write the table; exits with 1 where a case failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", nargs="+", choices=list(gpu_cases.GROUPS), default=list(GROUPS))
    parser.add_argument("--sweep", action="store_true", help="add every combination of ragged extents and majors")
    parser.add_argument("--subjects", nargs="+", choices=list(gpu_cases.SOURCES), default=list(gpu_cases.SOURCES))
    parser.add_argument("--no-torch", dest="torch", action="store_false", help="leave out the PyTorch-level tests")
    parser.add_argument("--show", type=int, default=5, help="failures to print in full, per row")
    parser.add_argument("--out", type=Path, help="folder for check_gpu.json")
    options = parser.parse_args()
    if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
        sys.exit("check_gpu.py needs a Hopper GPU (compute capability 9.0)")
    groups = options.groups + (["sweep"] if options.sweep else [])
    subjects = gpu_cases.subjects(options.subjects)
    compile_kernels([case for group in groups for subject in subjects for case in gpu_cases.GROUPS[group](subject)])
    rows = []
    try:
        for row in checked(subjects, groups, options.torch):
            rows.append(row)
            for failure in row["failures"][: options.show]:
                print(f"FAILED {failure}")
            print(LINE.format(**row), flush=True)
    except RuntimeError as error:
        sys.exit(str(error))
    failed = sum(row["failed"] for row in rows)
    print(f"{sum(row['cases'] for row in rows) - failed} passed, {failed} failed")
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "check_gpu.json").write_text(json.dumps(rows, indent=1))
    sys.exit(1 if failed else 0)


def compile_kernels(cases: list[gpu_cases.Case]) -> None:
    """Compile ahead what the cases need, and say how long it took."""
    begin = time.perf_counter()
    specs = gpu_compile.kernels(cases)
    tiles = Counter("{}x{}".format(*spec.config.tile) if spec.config else "hosted" for spec in specs)
    gpu_compile.compile_all(specs)
    counts = ", ".join(f"{count} of {tile}" for tile, count in tiles.most_common())
    print(f"{len(specs)} kernels ({counts}) in {time.perf_counter() - begin:.0f} s", flush=True)


def checked(subjects: list[gpu_cases.Subject], groups: list[str], with_torch: bool) -> Iterator[dict]:
    """The rows as they are done.  Raises RuntimeError where the device no longer answers."""
    every = [(subject, group) for group in groups for subject in subjects if gpu_cases.GROUPS[group](subject)]
    processes = min(MOST_PROCESSES, os.cpu_count() or 1)
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        rows = [pool.submit(check_row, *row) for row in every if row[1] not in LARGE]
        try:
            for row in as_completed(rows):
                yield row.result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
    for row in every:
        if row[1] in LARGE:
            yield check_row(*row)
    if with_torch:
        yield torch_row()


def check_row(subject: gpu_cases.Subject, group: str) -> dict:
    """Run one group of one subject."""
    begin = time.perf_counter()
    cases = gpu_cases.GROUPS[group](subject)
    failures: list[str] = []
    worst = 0.0
    for case in cases:
        findings = judged(case)
        worst = max([worst, *(f.error / f.allowed for f in findings if f.allowed)])
        if bad := [str(f) for f in findings if not f.ok]:
            failures.append("; ".join(bad))
    return {
        "subject": str(subject),
        "group": group,
        "cases": len(cases),
        "failed": len(failures),
        "worst": worst,
        "seconds": time.perf_counter() - begin,
        "failures": failures,
    }


def judged(case: gpu_cases.Case) -> list[gpu_checks.Finding]:
    """The findings of a case; an exception is one.  Raises RuntimeError where the device no longer answers."""
    try:
        return gpu_checks.check(case, run, allocator=call)
    except Exception as error:
        finding = gpu_checks.Finding(case, "*", fault=f"{type(error).__name__}: {error}")
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        raise RuntimeError(f"{finding}\nthe device is lost: nothing more can be checked") from None
    return [finding]


def torch_row() -> dict:
    """Run the PyTorch-level tests."""
    begin = time.perf_counter()
    counter = Counter()

    class Count:
        def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
            counter[report.outcome] += report.when == "call" or report.outcome == "failed"

    pytest.main(["-q", "--tb=short", "-p", "no:cacheprovider", str(ROOT / "tests/gpu/test_gpu_torch.py")], [Count()])
    row = {"subject": "PyTorch calls", "group": "torch", "cases": counter.total(), "failed": counter["failed"]}
    return row | {"worst": 0.0, "seconds": time.perf_counter() - begin, "failures": []}


if __name__ == "__main__":
    main()

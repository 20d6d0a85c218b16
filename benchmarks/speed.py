"""Speed on a Hopper GPU: `python benchmarks/speed.py [--out DIR] [--section gemm epilogue host first-call]`.

| section    | what is compared                                                                                  |
|------------|---------------------------------------------------------------------------------------------------|
| gemm       | the plain GEMM against cuBLAS, in the three major orders                                          |
| epilogue   | GEMM + epilogue against cuBLAS's GEMM alone, and against cuBLAS + torch.compile of the same maths |
| host       | the host's time per call                                                                          |
| first-call | the first call of a fresh process, with a cold and with a warm cache                              |

How it is measured: `timing`.  What is measured: `workloads`.  Ratios are from one run; absolute times move with the
card's clock.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import attrs

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

import torch  # noqa: E402
import workloads  # noqa: E402
from timing import host_microseconds, interleaved  # noqa: E402

import codalang  # noqa: E402
from codalang.lower import run  # noqa: E402

Row = dict[str, object]


def gemm_rows(options: argparse.Namespace) -> Iterator[Row]:
    """Plain GEMMs beside cuBLAS."""
    for name, majors in workloads.gemms():
        if options.only.search(f"{name} {majors}"):
            yield from _timed(workloads.gemm(name, majors), options)


def epilogue_rows(options: argparse.Namespace) -> Iterator[Row]:
    """Epilogues beside cuBLAS alone and torch.compile."""
    for name, form in workloads.epilogues():
        if options.only.search(f"{name} {form}"):
            yield from _timed(workloads.epilogue(name, form, compiled=options.torch_compile), options)


def _timed(workload: workloads.Workload, options: argparse.Namespace) -> Iterator[Row]:
    timings = interleaved(workload.calls, rounds=options.rounds)
    ours = timings["codalang"].median
    for implementation, timing in timings.items():
        yield {
            "workload": workload.name,
            "implementation": implementation,
            "ms": round(timing.median, 4),
            "quartiles": f"{timing.low:.3f}-{timing.high:.3f}",
            # How fast codalang is as a fraction of this implementation: above 1 it is faster.
            "codalang is": round(timing.median / ours, 3),
            "TFLOP/s": round(workload.flops / timing.median / 1e9) if workload.flops else "",
            "TB/s": "" if workload.flops else round(workload.bytes / timing.median / 1e9, 2),
        }


def host_rows(options: argparse.Namespace) -> Iterator[Row]:
    """Host microseconds per call on small tensors, beside calls of torch."""
    a = torch.randn(128, 256, device="cuda", dtype=torch.bfloat16)
    w = torch.randn(512, 256, device="cuda", dtype=torch.bfloat16)
    a_grad, w_grad = a.clone().requires_grad_(), w.clone().requires_grad_()
    cotangent = torch.randn(128, 256, device="cuda", dtype=torch.bfloat16)
    module = codalang.load("swiglu")
    forward = workloads.derived("swiglu").forward

    def differentiated(call: Callable[[], torch.Tensor]) -> Callable[[], object]:
        return lambda: torch.autograd.grad(call(), (a_grad, w_grad), cotangent)

    calls: dict[str, Callable[[], object]] = {
        "torch.mul": lambda: torch.mul(a, a),
        "torch.matmul": lambda: torch.matmul(a, w.t()),
        "lower.run.gemm": lambda: run.gemm(forward, a, w, {}),
        "module.swiglu, no gradient": lambda: module.swiglu(a, w),
        "module.swiglu, gradient recorded": lambda: module.swiglu(a_grad, w_grad),
        "module.swiglu, forward and backward": differentiated(lambda: module.swiglu(a_grad, w_grad)),
        "torch.matmul, forward and backward": differentiated(lambda: torch.matmul(a_grad, w_grad.t())[:, :256]),
    }
    for name, call in calls.items():
        yield {"call": name, "host us": round(host_microseconds(call), 1)}


FIRST_CALLS = ("scaled_swiglu", "residual_rms")
FIRST_CALL_TIMEOUT = 60.0  # seconds, for one process


def first_call_rows(options: argparse.Namespace) -> Iterator[Row]:
    """For each epilogue a fresh process with an empty cache folder of its own, then another with the same folder.

    The epilogues' processes run side by side, which takes no time from either as long as there are cores.
    """
    with tempfile.TemporaryDirectory() as root:
        for cache in ("cold", "warm"):
            processes = {name: _first_call(name, Path(root) / name) for name in FIRST_CALLS}
            for name, process in processes.items():
                steps = _steps(name, process)
                ours = sum(seconds for step, seconds in steps.items() if step != "torch")
                row: Row = {"epilogue": name, "cache": cache, "ours": round(ours, 3)}
                yield row | {step: round(seconds, 3) for step, seconds in steps.items()}


def _first_call(name: str, folder: Path) -> subprocess.Popen[str]:
    environment = os.environ | {"CODALANG_CACHE_DIR": str(folder)}
    environment["PYTHONPATH"] = os.pathsep.join([str(HERE.parent), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, str(HERE / "first_call.py"), name]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def _steps(name: str, process: subprocess.Popen[str]) -> dict[str, float]:
    """Seconds of each step.  Ends the benchmark where the process fails, or takes too long."""
    try:
        shown, errors = process.communicate(timeout=FIRST_CALL_TIMEOUT)
    except subprocess.TimeoutExpired:
        process.kill()
        sys.exit(f"the first call of {name} took longer than {FIRST_CALL_TIMEOUT:.0f} s")
    if process.returncode:
        sys.exit(f"the first call of {name} failed:\n{errors}")
    steps: dict[str, float] = json.loads(shown.splitlines()[-1])
    return steps


@attrs.frozen
class Section:
    """A table of the report."""

    title: str
    rows: Callable[[argparse.Namespace], Iterator[Row]]


SECTIONS = {
    "gemm": Section("Plain GEMM, bf16", gemm_rows),
    "epilogue": Section("GEMM + epilogue, bf16", epilogue_rows),
    "host": Section("Host time per call, microseconds", host_rows),
    "first-call": Section("First call of a process, seconds", first_call_rows),
}


def table(rows: list[Row]) -> str:
    """Rows as aligned text."""
    if not rows:
        return "(nothing)"
    cells = [list(rows[0])] + [[str(value) for value in row.values()] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return "\n".join("  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)).rstrip() for line in cells)


def main() -> None:
    """Parse the command line, run the sections, print and write the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--section", nargs="+", choices=SECTIONS, default=list(SECTIONS))
    parser.add_argument("--only", type=re.compile, default=re.compile(""), help="regular expression on workload names")
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--no-torch-compile", dest="torch_compile", action="store_false")
    parser.add_argument("--out", type=Path, help="folder for speed.json")
    options = parser.parse_args()
    if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
        sys.exit("speed.py needs a Hopper GPU (compute capability 9.0)")
    report: dict[str, object] = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "codalang": codalang.__version__,
    }
    print(" ".join(f"{key} {value}" for key, value in report.items()))
    for name in options.section:
        section = SECTIONS[name]
        rows = list(section.rows(options))
        report[name] = rows
        print(f"\n{section.title}\n{table(rows)}", flush=True)
        if options.out:
            options.out.mkdir(parents=True, exist_ok=True)
            (options.out / "speed.json").write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()

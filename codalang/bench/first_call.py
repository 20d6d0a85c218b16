"""The first calls of a fresh process, with a cold and with a warm cache of kernels.

As a program, `python -P first_call.py NAME`, it makes them and prints the seconds of each step as one line
of JSON.  Python's start, `import torch` and the CUDA context are not ours; they are measured apart.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

# name -> what a call takes beside `a` [256, 512] and `w` [1024, 512]: shapes of the further parameters
SHAPES: dict[str, dict[str, tuple[int, ...]]] = {
    "swiglu": {},
    "scaled_swiglu": {"r": (256,)},
    "residual_rms": {"res": (256, 1024), "gamma": (1024,)},
}
MEASURED = ("scaled_swiglu", "residual_rms")
TIMEOUT = 60.0  # seconds, for one process

Spawn = Callable[[str, Path], "subprocess.Popen[str]"]


def measured(names: tuple[str, ...] = MEASURED, spawn: Spawn | None = None) -> Iterator[dict[str, Any]]:
    """For each epilogue a fresh process with an empty cache folder of its own, then another with the same folder.

    The epilogues' processes run side by side, which takes no time from either as long as there are cores.  A process
    that fails or takes too long gives a row that says so.
    """
    with tempfile.TemporaryDirectory() as root:
        for cache in ("cold", "warm"):
            processes = {name: (spawn or _spawned)(name, Path(root) / name) for name in names}
            for name, process in processes.items():
                yield {"epilogue": name, "cache": cache, **_steps(process)}


def _spawned(name: str, folder: Path) -> subprocess.Popen[str]:
    package = str(Path(__file__).resolve().parents[2])
    environment = os.environ | {"CODALANG_CACHE_DIR": str(folder)}
    environment["PYTHONPATH"] = os.pathsep.join([package, *filter(None, [os.environ.get("PYTHONPATH")])])
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # an installed package has its bytecode
    # as a file, not as a module: that would import codalang before the clock runs
    command = [sys.executable, "-P", str(Path(__file__).resolve()), name]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def _steps(process: subprocess.Popen[str]) -> dict[str, Any]:
    """Seconds of each step, and `ours`, those that are not torch's."""
    try:
        shown, errors = process.communicate(timeout=TIMEOUT)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        return {"failed": f"took longer than {TIMEOUT:.0f} s"}
    if process.returncode:
        return {"failed": errors.strip().splitlines()[-1] if errors.strip() else f"exit code {process.returncode}"}
    steps: dict[str, float] = json.loads(shown.splitlines()[-1])
    return {"ours": sum(seconds for step, seconds in steps.items() if step != "torch"), **steps}


def main() -> None:
    """Seconds of each step, in order."""
    name = sys.argv[1]
    seconds = {}
    clock = time.perf_counter()

    def lap(step: str) -> None:
        nonlocal clock
        now = time.perf_counter()
        seconds[step] = now - clock
        clock = now

    import torch

    a = torch.randn(256, 512, device="cuda", dtype=torch.bfloat16).requires_grad_()
    w = torch.randn(1024, 512, device="cuda", dtype=torch.bfloat16).requires_grad_()
    more = {
        key: torch.randn(shape, device="cuda", dtype=torch.bfloat16 if len(shape) == 2 else torch.float32)
        for key, shape in SHAPES[name].items()
    }
    more = {key: tensor.requires_grad_() for key, tensor in more.items()}
    # with a cotangent that is given: torch then imports a good second's worth of modules, once
    torch.autograd.grad([torch.matmul(a, w.t())], [a, w], [torch.ones(256, 1024, device="cuda", dtype=torch.bfloat16)])
    torch.cuda.synchronize()
    lap("torch")
    import codalang

    call = codalang.load(name)[name]
    lap("import and load")

    def forward() -> list[torch.Tensor]:
        result = call(a, w, **more)
        torch.cuda.synchronize()
        return [result] if isinstance(result, torch.Tensor) else list(result)

    def backward(outputs: list[torch.Tensor]) -> None:
        torch.autograd.grad(outputs, [a, w, *more.values()], [torch.ones_like(y) for y in outputs])
        torch.cuda.synchronize()

    outputs = forward()
    lap("first forward")
    backward(outputs)
    lap("first backward")
    backward(forward())
    lap("second of both")
    print(json.dumps(seconds))


if __name__ == "__main__":
    main()

"""The whole path on one layer of a Llama-3-8B: SwiGLU on the gate/up projection, 4096 -> 28672 columns.

    1. the program, and the backward that codalang derives
    2. the derived gradients against torch's autograd, in float64, at the layer's real width
    3. the generated kernels, compiled for sm_90a with the compiler's report: no GPU is needed for it
    4. on a Hopper GPU: the kernels run, are checked, and are timed beside cuBLAS and torch.compile

Each shell command that is shown can be typed as it stands.  Exits with 1 where something is not as it must be.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from pathlib import Path

import torch
from torch import Tensor

import codalang
from codalang.cli import main as command

ROOT = Path(__file__).parents[1]
PROGRAM = "stdlib/swiglu.coda"
BUILD = Path("build/demo")
TOKENS, FEATURES, HIDDEN = 16, 4096, 28672
# Both sides compute in float64 and differ only in the order of operations.
TOLERANCE = 1e-12


def main() -> int:
    """Run the four steps."""
    os.chdir(ROOT)
    BUILD.mkdir(parents=True, exist_ok=True)
    heading("1. The program, and its derived backward")
    print((ROOT / PROGRAM).read_text())
    ok = shell("grad", PROGRAM)
    heading(f"2. The gradients against torch's autograd, float64, {TOKENS} tokens, {FEATURES} -> {HIDDEN}")
    ok &= gradients_agree()
    heading("3. The kernels, generated and compiled for sm_90a")
    ok &= shell("emit", PROGRAM, "--backward", into=BUILD / "swiglu_kernels.py")
    ok &= shell("compile", PROGRAM, "--backward", "-o", str(BUILD))
    heading("4. On the GPU")
    if torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0):
        ok &= shell("run", PROGRAM, "--backward", "--shape", f"M=8192,N={HIDDEN},K={FEATURES}")
    else:
        print("There is no Hopper GPU here, so nothing ran on one.")
    print("\nAll is as it must be." if ok else "\nFAILED: see above.")
    return 0 if ok else 1


def heading(text: str) -> None:
    """Start a step."""
    print(f"\n--- {text} ---\n", flush=True)


def shell(*words: str, into: Path | None = None) -> bool:
    """Run a `codalang` command in this process, as the shell would."""
    print(f"$ codalang {' '.join(words)}{f' > {into}' if into else ''}", flush=True)
    if into is None:
        return command(words) == 0
    with into.open("w") as file, contextlib.redirect_stdout(file):
        return command(words) == 0


def gradients_agree() -> bool:
    """Differentiate the layer twice, and compare."""
    begin = time.perf_counter()
    torch.manual_seed(0)
    a = torch.randn(TOKENS, FEATURES, dtype=torch.float64, requires_grad=True)
    w = torch.randn(HIDDEN, FEATURES, dtype=torch.float64, requires_grad=True)
    cotangent = torch.randn(TOKENS, HIDDEN // 2, dtype=torch.float64)
    with torch.no_grad():
        w /= FEATURES**0.5

    module = codalang.load(PROGRAM)
    y = module.swiglu(a, w)
    derived = torch.autograd.grad(y, (a, w), cotangent)

    z = torch.nn.functional.linear(a, w)
    y_torch = torch.nn.functional.silu(z[:, 0::2]) * z[:, 1::2]
    by_torch = torch.autograd.grad(y_torch, (a, w), cotangent)

    ok = True
    for name, got, want in zip(("y", "d_a", "d_w"), (y, *derived), (y_torch, *by_torch), strict=True):
        error = relative(got, want)
        ok &= error <= TOLERANCE
        shape = " x ".join(map(str, got.shape))
        print(f"{name:4} {shape:14} relative difference {error:.1e}{'' if error <= TOLERANCE else '  TOO LARGE'}")
    print(f"({time.perf_counter() - begin:.1f} s)")
    return ok


def relative(got: Tensor, want: Tensor) -> float:
    """|got - want| / |want| in 2-norms; infinite where something is not finite."""
    error = float((got - want).detach().norm() / want.detach().norm())
    return error if error == error else float("inf")


if __name__ == "__main__":
    sys.exit(main())

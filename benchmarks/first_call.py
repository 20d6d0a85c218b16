"""Times the first call in this process and prints one line of JSON; `speed.py` runs it with a cold and a warm cache.

Python's start, `import torch` and the CUDA context are not ours; they are measured apart.
"""

import json
import time


def main() -> None:
    """Seconds of each step, in order."""
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
    torch.matmul(a, w.t()).sum().backward()
    torch.cuda.synchronize()
    lap("torch")
    import codalang

    module = codalang.load("swiglu")
    lap("import and load")
    y = module.swiglu(a, w)
    torch.cuda.synchronize()
    lap("first forward")
    y.backward(torch.ones_like(y))
    torch.cuda.synchronize()
    lap("first backward")
    y = module.swiglu(a, w)
    y.backward(torch.ones_like(y))
    torch.cuda.synchronize()
    lap("second forward and backward")
    print(json.dumps(seconds))


if __name__ == "__main__":
    main()

"""Times the first calls in this process and prints one line of JSON; `speed.py` runs it with a cold and a warm cache.

    python first_call.py scaled_swiglu

Python's start, `import torch` and the CUDA context are not ours; they are measured apart.
"""

import json
import sys
import time

# name -> what a call takes beside `a` [256, 512] and `w` [1024, 512]: shapes of the further parameters
SHAPES = {
    "swiglu": {},
    "scaled_swiglu": {"r": (256,)},
    "residual_rms": {"res": (256, 1024), "gamma": (1024,)},
}


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

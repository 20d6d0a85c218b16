"""Kernels compiled beside the one that a call needs: what is foreseen, who compiles it, and what goes wrong."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path

import attrs
import pytest
import torch
from emulation import emulated
from torch import Tensor

import codalang
from codalang.errors import CodaCallError, CodaUnsupportedError
from codalang.ir.epilogue import Epilogue
from codalang.lower import beside, load, run, workers
from codalang.lower.ahead import compile_each
from codalang.lower.cache import Cache, Claim
from codalang.lower.load import CodaSlowKernelWarning, key_of
from codalang.lower.spec import KernelSpec
from codalang.lower.worker import Compiled
from codalang.lower.workers import WorkerError, Workers
from codalang.parser import parse
from codalang.torch import execute, program_plan

ROOT = Path(__file__).parents[1]


def doubled(name: str, factor: int) -> Epilogue:
    (epilogue,) = parse(f"epilogue {name}(x: row[N]) {{\n store y: row[N] = x * {factor}\n}}").epilogues.values()
    return epilogue


# Kernels of auxiliary steps, which compile in a third of a second.
SPECS = [KernelSpec(doubled(f"by{f}", f), None, ("f32",), (), None, False, parts=("",)) for f in (3, 5, 7)]
FIRST, *OTHERS = SPECS
WRONG = attrs.evolve(FIRST, input_dtypes=("f99",))


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cache]:
    """An empty cache, no kernel in memory, no worker running, and cores for them."""
    found = Cache(tmp_path / "cache")
    monkeypatch.setattr(load, "disk_cache", lambda: found)
    monkeypatch.setattr(load, "launcher", load.library)  # what is on disk; loading it is not tested here
    monkeypatch.setattr(workers, "cores", lambda: 3)
    monkeypatch.setattr(beside, "_helpers", beside._Helpers())
    beside.function.cache_clear()
    yield found
    beside.stop()
    beside.function.cache_clear()


def names(folder: Path) -> set[str]:
    """The keys of the kernels on disk."""
    return {path.stem for path in folder.rglob("*.so")}


def needs(*specs: KernelSpec) -> None:
    """A call that needs these kernels, in this order."""
    with beside.foreseen(lambda: [specs]):
        for spec in specs:
            beside.function(spec)


# ---- what is foreseen ---------------------------------------------------------------------------------------------


@contextlib.contextmanager
def on_kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[list[KernelSpec], list[list[KernelSpec]]]]:
    """Calls go through `codalang.lower.run`: the kernels that they launch, and those that are foreseen."""

    def takes(job, given, device):
        operands = [getattr(v, "tensor", v) for v in given[:2]] if job.on_gemm else []
        return all(t.dtype in (torch.bfloat16, torch.float16) for t in operands)

    told: list[list[KernelSpec]] = []

    @contextlib.contextmanager
    def foreseen(find):
        told.append([list(dict.fromkeys(specs)) for specs in find()])
        yield

    with monkeypatch.context() as patch, emulated(torch.float32) as specs:
        patch.setattr(execute, "_takes_kernel", takes)
        patch.setattr(program_plan, "launches_repeat", lambda device: device.type != "meta")
        patch.setattr(execute, "current_device", lambda: None)
        patch.setattr(program_plan, "foreseen", foreseen)
        yield specs, told


def odd(tensor: Tensor) -> Tensor:
    """The same at an address that no vector load takes, with a pitch that TMA does not."""
    wide = torch.empty(*tensor.shape[:-1], tensor.shape[-1] + 3, dtype=tensor.dtype)
    return wide[..., 1 : 1 + tensor.shape[-1]].copy_(tensor)


@pytest.mark.parametrize("form", ["plain", "odd", "transposed"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_what_is_foreseen_is_what_is_launched(monkeypatch, dtype, form):
    """Forward and backward of a block, before either has run."""
    program = codalang.load(ROOT / "examples/llama_block.coda").llama_block
    sizes = dict(zip(program.program.dims, (128, 8, 2, 64, 128, 1), strict=True))
    arguments = {}
    for param in program.program.params:
        shape = [int(extent.evaluate(sizes)) for extent in param.type.shape]
        if shape:
            kept = torch.int64 if param.name == "positions" else dtype if len(shape) > 1 else torch.float32
            value = torch.ones(shape, dtype=kept)
            if form == "transposed" and len(shape) == 2:
                value = value.T.contiguous().T
            value = odd(value) if form == "odd" else value
            arguments[param.name] = value.requires_grad_(kept.is_floating_point)
    with on_kernels(monkeypatch) as (launched, told):
        results = program(**arguments)
        forward = set(launched)
        launched.clear()
        wanted = [v for v in arguments.values() if v.requires_grad]
        torch.autograd.grad(list(results), wanted, [torch.ones_like(r) for r in results])
        backward = set(launched)
    (first, later), (second, nothing) = told
    assert len(forward) > 3 and len(backward) > 8
    assert set(first) == forward and set(second) == backward and not nothing
    assert set(later) - forward == backward - forward


def test_a_call_without_gradients_foresees_no_backward(monkeypatch):
    swiglu = codalang.load("swiglu").swiglu
    with on_kernels(monkeypatch) as (launched, told):
        a, w = torch.ones(64, 32, dtype=torch.bfloat16), torch.ones(128, 32, dtype=torch.bfloat16)
        swiglu(a, w)
        swiglu(a, w)
        assert [[len(specs) for specs in each] for each in told] == [[1, 0]]  # once for these forms
        swiglu(a.requires_grad_(), w)
    assert len(told[1][1]) > 1


def test_what_has_no_kernel_is_told_where_it_is_called(monkeypatch):
    """A rehearsal takes no warning from the call, and gives none before it."""

    def refuse(*_: object, **__: object) -> None:
        raise CodaUnsupportedError("too wide")

    monkeypatch.setattr(execute, "_said", set())
    monkeypatch.setattr(run, "gemm", refuse)
    a, w = torch.ones(64, 32, dtype=torch.bfloat16), torch.ones(128, 32, dtype=torch.bfloat16)
    with on_kernels(monkeypatch) as (_, told), warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(execute.CodaFallbackWarning, match="too wide"):
            codalang.load("swiglu").swiglu(a, w)
    assert told == [[[], []]]


# ---- who compiles it ----------------------------------------------------------------------------------------------


def test_the_caller_compiles_the_first_and_workers_the_others(cache, monkeypatch):
    here = []
    build = load._build
    monkeypatch.setattr(load, "_build", lambda spec, *rest: here.append(spec) or build(spec, *rest))
    with beside.foreseen(lambda: [SPECS, SPECS]):
        beside.function(FIRST)
        for future in list(beside._helpers.pending.values()):
            assert future.result().error is None
    assert here == [FIRST]
    assert names(cache.root) == {key_of(spec) for spec in SPECS}
    needs(*SPECS)
    assert here == [FIRST] and not beside._helpers.pending


@pytest.mark.parametrize("number, specs", [("0", SPECS), ("2", SPECS[:1])])
def test_nothing_is_started_where_nothing_is_to_gain(cache, monkeypatch, number, specs):
    monkeypatch.setenv(workers.NUMBER, number)
    monkeypatch.setattr(Workers, "submit", lambda *_: pytest.fail("a worker"))
    needs(*specs)
    assert names(cache.root) == {key_of(spec) for spec in specs}


def test_kernels_on_disk_are_not_rehearsed(cache):
    for spec in SPECS:
        load.library(spec)
    with beside.foreseen(lambda: pytest.fail("rehearsed")):
        for spec in SPECS:
            beside.function(spec)


def test_the_number_of_workers(monkeypatch):
    monkeypatch.delenv(workers.NUMBER, raising=False)
    monkeypatch.setattr(workers, "cores", lambda: 16)
    assert workers.number_beside() == 15
    monkeypatch.setenv(workers.NUMBER, "4")
    assert workers.number_beside() == 4
    for text in ("-1", "many", "1.5"):
        monkeypatch.setenv(workers.NUMBER, text)
        with pytest.raises(CodaCallError, match=workers.NUMBER):
            workers.number_beside()


def test_no_more_workers_than_kernels_or_than_allowed(cache):
    found = Workers(2, cache.root)
    futures = [found.submit(spec) for spec in SPECS]
    assert [f.result().error for f in futures] == [None] * 3 and len(found._processes) == 2
    found.stop()


def test_one_process_at_a_time_has_workers(cache, monkeypatch):
    (cache.shared / "workers.lock").touch()
    theirs = Claim(cache.shared / "workers.lock")
    assert theirs.take()
    with monkeypatch.context() as patch:
        patch.setattr(Workers, "submit", lambda *_: pytest.fail("a worker"))
        needs(FIRST, OTHERS[0])
    assert names(cache.root) == {key_of(FIRST), key_of(OTHERS[0])}
    theirs.drop()
    assert Claim(cache.shared / "workers.lock").take()


def test_workers_are_asked_for_again_at_the_next_kernel(cache, monkeypatch):
    """Another process that had them has ended meanwhile."""
    theirs = Claim(cache.shared / "workers.lock")
    assert theirs.take()
    asked = []
    monkeypatch.setattr(Workers, "submit", lambda self, spec: asked.append(spec) or Future())
    with beside.foreseen(lambda: [SPECS]):
        beside.function(FIRST)
        theirs.drop()
        beside.function(OTHERS[0])
    assert asked == OTHERS[1:]


def test_the_claim_is_left_when_workers_have_ended(cache, monkeypatch):
    monkeypatch.setattr(workers, "LINGER_SECONDS", 0.05)
    needs(*SPECS)
    other = Claim(cache.shared / "workers.lock")
    deadline = time.monotonic() + 30
    while not other.take():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_forked_child_has_no_workers_of_its_parent(cache):
    with beside.foreseen(lambda: [SPECS]):
        beside.function(FIRST)
    reader, writer = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of a fork beside threads
        child = os.fork()
    if not child:
        os.write(writer, repr((len(beside._helpers.pending), beside._helpers._workers)).encode())
        os._exit(0)
    os.waitpid(child, 0)
    assert os.read(reader, 100) == b"(0, None)"
    os.close(reader)
    os.close(writer)


# ---- what goes wrong ----------------------------------------------------------------------------------------------


def test_a_worker_that_is_killed(cache):
    """What it had begun and what waited is compiled here."""
    with beside.foreseen(lambda: [SPECS]):
        beside.function(FIRST)
        found = beside._helpers._workers
        (process, *_) = list(found._processes)
        process.kill()
        for spec in OTHERS:
            beside.function(spec)
    assert found.is_stopped
    assert names(cache.root) == {key_of(spec) for spec in SPECS}


@pytest.mark.parametrize("executable", ["/nowhere/python", "/bin/true", ""])
def test_a_worker_that_cannot_start(cache, monkeypatch, executable):
    monkeypatch.setattr(sys, "executable", executable)
    found = Workers(2, cache.root)
    with pytest.raises(WorkerError):
        found.submit(FIRST).result()
    assert found.is_stopped
    with pytest.raises(WorkerError):
        found.submit(FIRST).result()
    needs(*SPECS)
    assert names(cache.root) == {key_of(spec) for spec in SPECS}
    assert all(c.error is None for c in compile_each(SPECS).values())


def test_what_does_not_answer_is_given_up(cache, monkeypatch, tmp_path):
    silent = tmp_path / "silent"
    silent.write_text("#!/bin/sh\nexec sleep 60\n")
    silent.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(silent))
    monkeypatch.setattr(workers, "START_SECONDS", 0.2)
    with pytest.raises(WorkerError, match="does not answer"):
        Workers(1, cache.root).submit(FIRST).result()


def test_an_error_in_a_kernel_is_raised_where_it_is_called(cache):
    with pytest.raises(Exception) as plain:
        load.library(WRONG)
    with pytest.raises(type(plain.value)) as beside_others:
        needs(FIRST, WRONG)
    assert str(beside_others.value) == str(plain.value)
    assert key_of(FIRST) in names(cache.root)
    assert compile_each([WRONG, FIRST])[WRONG].error


def test_after_an_interrupt_the_next_call_has_other_workers(cache):
    with pytest.raises(KeyboardInterrupt), beside.foreseen(lambda: [SPECS]):
        beside.function(FIRST)
        before = beside._helpers._workers
        raise KeyboardInterrupt
    assert before.is_stopped and not beside._helpers.pending
    cache.clear()
    beside.function.cache_clear()
    with beside.foreseen(lambda: [SPECS]):
        beside.function(FIRST)
        assert [f.result().error for f in beside._helpers.pending.values()] == [None, None]


def test_an_error_of_foreseeing_is_none_of_the_call(cache):
    def find():
        yield [OTHERS[0]]
        raise RuntimeError

    with beside.foreseen(find):
        beside.function(FIRST)
    assert set(beside._helpers.pending) == {key_of(OTHERS[0])}


def test_a_remark_reaches_the_user_once(cache):
    future: Future[Compiled] = Future()
    future.set_running_or_notify_cancel()
    future.set_result(Compiled(1.0, ("it spills",)))
    beside._helpers.pending[key_of(FIRST)] = future
    with pytest.warns(CodaSlowKernelWarning, match="it spills") as caught:
        needs(FIRST)
        needs(FIRST)
    assert len([w for w in caught if w.category is CodaSlowKernelWarning]) == 1


def test_a_disk_that_takes_nothing_ends_the_workers(cache, monkeypatch):
    """They cannot hand anything over."""
    found = Workers(1, cache.root)
    monkeypatch.setattr(workers, "_asked", lambda *_: Compiled(1.0, is_kept=False))
    found.submit(FIRST).result()
    with pytest.raises(WorkerError):
        found.submit(FIRST).result()


# A program without a guard: what workers would run again if they imported it.
SCRIPT = """
import os, sys, time
sys.path.insert(0, sys.argv[1])
print("begun", flush=True)
import test_beside
from codalang.lower import beside, load, workers
from codalang.lower.ahead import compile_each
workers.cores = lambda: 3
load.launcher = load.library
if sys.argv[2] == "each":
    outcome = compile_each(test_beside.SPECS)
    print([c.error for c in outcome.values()], "cutlass" in sys.modules, flush=True)
else:
    with beside.foreseen(lambda: [test_beside.SPECS]):
        helpers = beside._helpers
        begin = helpers.begin
        def begun(*given):
            done = begin(*given)
            while len(helpers._workers._processes) < 2:
                time.sleep(0.01)
            print(*[p.pid for p in helpers._workers._processes], flush=True)
            return done
        helpers.begin = begun
        load.launcher = lambda spec: time.sleep(60 if sys.argv[2] == "call" else 0)
        beside.function(test_beside.FIRST)
        print("ended", flush=True)
"""


def script(tmp_path: Path, how: str) -> subprocess.Popen[str]:
    path = tmp_path / "unguarded.py"
    path.write_text(SCRIPT)
    environment = os.environ | {"PYTHONPATH": str(ROOT), "CODALANG_CACHE_DIR": str(tmp_path / "cache")}
    return subprocess.Popen(
        [sys.executable, str(path), str(Path(__file__).parent), how],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def test_a_script_needs_no_guard(tmp_path):
    process = script(tmp_path, "each")
    shown, errors = process.communicate(timeout=120)
    assert shown.splitlines() == ["begun", "[None, None, None] False"], errors
    assert "Traceback" not in errors


def test_nothing_waits_at_exit_for_what_is_compiled_in_the_background(tmp_path):
    process = script(tmp_path, "end")
    shown, errors = process.communicate(timeout=60)
    begun, pids, ended = shown.splitlines()
    assert (begun, ended, process.returncode) == ("begun", "ended", 0) and "Traceback" not in errors
    assert not any(map(is_alive, map(int, pids.split())))
    assert not names(tmp_path)


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.skipif(sys.platform != "linux", reason="how a process dies with its parent")
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_workers_die_with_whoever_started_them(tmp_path, how):
    """Ctrl-C is heard by all of a terminal's processes; the others by one."""
    process = script(tmp_path, "call")
    assert process.stdout is not None
    assert process.stdout.readline() == "begun\n"
    pids = list(map(int, process.stdout.readline().split()))
    assert len(pids) == 2
    assert all(map(is_alive, pids))
    (os.killpg if how is signal.SIGINT else os.kill)(process.pid, how)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == -how
    assert errors.count("Traceback") == (how is signal.SIGINT) == errors.count("KeyboardInterrupt")
    deadline = time.monotonic() + 5
    while any(map(is_alive, pids)):
        assert time.monotonic() < deadline
        time.sleep(0.01)

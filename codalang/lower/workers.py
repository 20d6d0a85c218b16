"""Processes that compile kernels for this one.  Each is fed by a thread of this process, which starts it.

    workers = Workers(7, disk_cache().root)
    future = workers.submit(spec)          # cancel() takes back what no process has begun
    future.result()                        # a `Compiled`, or WorkerError: then compile it yourself

| it must survive                       | because                                                                      |
|---------------------------------------|------------------------------------------------------------------------------|
| a script without a `__main__` guard   | a worker imports this package alone, by this process's `sys.path`            |
| CUDA in this process                  | it is started afresh, not forked, and is shown no GPU                        |
| a worker that cannot start or dies    | that one and all that wait fail with WorkerError; nothing is started again   |
| Ctrl-C                                | workers do not hear it; whoever does calls `stop`, which kills them          |
| this process killed                   | the kernel kills a worker with the thread that started it                    |
| a fork of this process                | the child forgets its parent's workers, see `beside`                         |

A worker with nothing to do for some seconds ends.  Nothing waits for one at exit.
"""

from __future__ import annotations

import os
import pickle
import select
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

from codalang.errors import CodaCallError
from codalang.lower.spec import KernelSpec
from codalang.lower.worker import Compiled

NUMBER = "CODALANG_COMPILE_WORKERS"  # how many, where the user knows better
LINGER_SECONDS = 5.0  # the next program of a first step may come soon, and a worker takes one to start
START_SECONDS = 120.0  # what has not answered by then is something else

_START = "import sys; parent = int(sys.argv[1]); sys.path[:] = sys.argv[2:]; "
_START += "from codalang.lower.worker import main; main(parent)"

_Job = tuple["Future[Compiled]", KernelSpec]


class WorkerError(Exception):
    """A worker could not do its work; what it was asked for may be right."""


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def number_beside() -> int:
    """How many workers may run beside a process that compiles too: what the user said, else a core for each.

    Raises CodaCallError where what the user said is no number.
    """
    text = os.environ.get(NUMBER, "").strip()
    if not text:
        return cores() - 1
    if not text.isdecimal():
        raise CodaCallError(f"{NUMBER} is {text!r}", hint="it is a number of processes, 0 for none")
    return int(text)


class Workers:
    """At most `most` workers for one folder of the disk cache.  See the module's docstring."""

    def __init__(self, most: int, root: Path, ended: Callable[[], None] = lambda: None) -> None:
        """`ended` is told when the last one has ended; others may be started later."""
        self._most, self._root, self._ended = most, root, ended
        self._changed = threading.Condition()
        self._jobs: deque[_Job] = deque()
        self._processes: set[subprocess.Popen[bytes]] = set()
        self._threads = self._idle = 0
        self._stopped = False

    @property
    def is_stopped(self) -> bool:
        """True after `stop`, and where one failed."""
        return self._stopped

    @property
    def are_running(self) -> bool:
        """Is there any?"""
        return self._threads > 0

    def submit(self, spec: KernelSpec) -> Future[Compiled]:
        """A kernel to bring into the disk cache."""
        future: Future[Compiled] = Future()
        with self._changed:
            self._jobs.append((future, spec))
            if self._stopped:
                self._fail()
            elif self._idle < len(self._jobs) and self._threads < self._most:
                self._threads += 1
                threading.Thread(target=self._serve, name="codalang-worker", daemon=True).start()
            self._changed.notify()
        return future

    def stop(self) -> None:
        """Kill the workers.  What they have not done fails with WorkerError."""
        with self._changed:
            self._stopped = True
            self._fail()
            for process in self._processes:
                process.kill()
            self._changed.notify_all()

    def _fail(self) -> None:
        while self._jobs:
            future, _ = self._jobs.popleft()
            if future.set_running_or_notify_cancel():
                future.set_exception(WorkerError())

    def _next(self) -> _Job | None:
        """Work for a worker; None where there was none for a while."""
        with self._changed:
            self._idle += 1
            self._changed.wait_for(lambda: self._jobs or self._stopped, LINGER_SECONDS)
            self._idle -= 1
            if self._jobs:
                return self._jobs.popleft()
            self._threads -= 1
            return None

    def _serve(self) -> None:
        """What a thread does."""
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])  # a process inherits it
        process: subprocess.Popen[bytes] | None = None
        while (job := self._next()) is not None:
            future, spec = job
            if not future.set_running_or_notify_cancel():
                continue
            try:
                process = process or self._started()
                answer = _asked(process, spec)
            except Exception as error:
                future.set_exception(WorkerError(f"{type(error).__name__}: {error}"))
                self.stop()
                continue
            future.set_result(answer)
            if not answer.is_kept:
                self.stop()
        if process is not None:
            process.kill()
            process.communicate()
            with self._changed:
                self._processes.discard(process)
        self._ended()

    def _started(self) -> subprocess.Popen[bytes]:
        environment = {NUMBER: "0", "CODALANG_CACHE_DIR": os.path.abspath(self._root), "CUDA_VISIBLE_DEVICES": ""}
        if getattr(sys, "frozen", False):
            raise OSError(f"{sys.executable} is no interpreter")
        process = subprocess.Popen(
            [sys.executable, "-c", _START, str(os.getpid()), *sys.path],
            env=os.environ | environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        with self._changed:
            self._processes.add(process)
            if self._stopped:
                process.kill()
        assert process.stdout is not None
        if not select.select([process.stdout], [], [], START_SECONDS)[0]:
            raise OSError(f"{sys.executable} does not answer")
        pickle.load(process.stdout)
        return process


def _asked(process: subprocess.Popen[bytes], spec: KernelSpec) -> Compiled:
    """A worker's answer."""
    assert process.stdin is not None and process.stdout is not None
    pickle.dump(pickle.dumps(spec), process.stdin)
    process.stdin.flush()
    answer: Compiled = pickle.load(process.stdout)
    return answer

"""Kernels compiled beside the one that a call needs now: the others of the same program, by worker processes.

    with foreseen(kernels_of_the_plan): ...     which kernels will be needed, asked where the first is not on disk

The thread that needs a kernel compiles it itself, as ever, and meanwhile workers compile the others that are not on
disk.  When it comes to one of those, it takes it back where no worker has begun it, else waits for it.  What nobody has
come to yet (the kernels of a backward) goes on in the background.  So a call waits for what it needs and for nothing
else, and where no worker is to be had, or one fails, everything is as it is without: the error that a kernel has is
raised where it is called, and a worker's remarks are warnings there.

Of the processes that share a folder of the cache, one at a time has workers, so that there are never more than there
are cores, however many ranks start at once.  The others compile for themselves what nobody else is compiling, wait for
the rest (`cache`), and ask again at each kernel that is missing.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import logging
import os
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future

from codalang.lower import load
from codalang.lower.cache import Claim
from codalang.lower.load import CodaSlowKernelWarning
from codalang.lower.spec import KernelSpec
from codalang.lower.worker import Compiled
from codalang.lower.workers import WorkerError, Workers, number_beside

Find = Callable[[], Iterable[Iterable[KernelSpec]]]

_log = logging.getLogger(__name__)


class _Thread(threading.local):
    find: Find | None = None


_thread = _Thread()


@contextlib.contextmanager
def foreseen(find: Find) -> Iterator[None]:
    """Meanwhile this thread needs kernels, which `find` gives in their order, then those that are likely to be needed
    next.  It is asked once at most, and where it fails nothing is foreseen."""
    before, _thread.find = _thread.find, find
    try:
        yield
    except KeyboardInterrupt:
        stop()
        raise
    finally:
        _thread.find = before


@functools.cache
def function(spec: KernelSpec) -> Callable[..., None]:
    """The launcher of a kernel, compiled at need.  Its arguments are those of the kernel class's `__call__`."""
    key = load.key_of(spec)
    future = _helpers.pending.pop(key, None)
    if future is not None:
        _wait(future)
    elif _thread.find is not None and not load.is_there(key) and _helpers.begin(_thread.find, key):
        _thread.find = None
    return load.launcher(spec)


def stop() -> None:
    """Nothing more is compiled in the background."""
    _helpers.stop()


def _wait(future: Future[Compiled]) -> None:
    """Wait for what a worker has begun; what it has not, or does not do, is left to the caller."""
    if future.cancel():
        return
    try:
        found = future.result()
    except WorkerError as error:
        _log.debug("a worker failed: %s", error)
        return
    for remark in found.remarks:
        warnings.warn(remark, CodaSlowKernelWarning, stacklevel=3)


class _Helpers:
    """The workers of this process, and what they were asked for."""

    def __init__(self) -> None:
        self.pending: dict[str, Future[Compiled]] = {}  # by the kernel's key
        self._lock = threading.Lock()
        self._workers: Workers | None = None
        self._claim: Claim | None = None  # held while workers run

    def begin(self, find: Find, own: str) -> bool:
        """Let workers compile what is foreseen and is not on disk, but for the kernel that the caller is to compile.
        False where this process may have none now.  Raises CodaCallError, see `number_beside`."""
        workers = self._claimed(number_beside())
        if workers is None:
            return False
        try:
            for specs in find():
                for spec in reversed(list(specs)):  # the caller comes from the other end
                    key = load.key_of(spec)
                    with self._lock:
                        if key != own and key not in self.pending and not load.is_there(key):
                            self.pending[key] = workers.submit(spec)
        except Exception:
            _log.debug("kernels could not be foreseen", exc_info=True)
        self._leave_to_others()
        return True

    def stop(self) -> None:
        """Kill the workers; later ones are others."""
        with self._lock:
            if self._workers is not None:
                self._workers.stop()
            self._workers = None
            self.pending.clear()

    def _claimed(self, most: int) -> Workers | None:
        cache = load.disk_cache()
        if most < 1 or cache.shared is None or (self._workers is not None and self._workers.is_stopped):
            return None
        with self._lock:
            self._claim = self._claim or Claim(cache.shared / "workers.lock")
            if not self._claim.take():
                return None
            self._workers = self._workers or Workers(most, cache.root, self._leave_to_others)
            return self._workers

    def _leave_to_others(self) -> None:
        """Where no worker runs, another process may have some."""
        with self._lock:
            if self._claim is not None and not (self._workers is not None and self._workers.are_running):
                self._claim.drop()


_helpers = _Helpers()
atexit.register(stop)


def _forget() -> None:
    """What a forked child does: workers are its parent's."""
    global _helpers
    _helpers = _Helpers()


os.register_at_fork(after_in_child=_forget)

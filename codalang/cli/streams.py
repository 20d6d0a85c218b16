"""Standard streams as a command needs them: closed ones, encodings without a character, and output that fails.

| stream          | where it is closed, or cannot hold a character                                    |
|-----------------|-----------------------------------------------------------------------------------|
| standard output | writing to it is an OSError; a character that its encoding lacks becomes an escape |
| standard error  | nothing is said                                                                   |

A program's own text is UTF-8 wherever it goes, as in files: `write_program`.
"""

from __future__ import annotations

import errno
import io
import os
import sys


class _Closed(io.TextIOBase):
    def write(self, text: str) -> int:
        raise OSError(errno.EBADF, os.strerror(errno.EBADF))


def ready_streams() -> None:
    """Make the process's streams such that printing to them raises nothing but OSError."""
    if sys.stdout is None:
        sys.stdout = _Closed()
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115 (it is for the rest of the process)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def drop_output() -> None:
    """Let what is still to be written to standard output go nowhere: the interpreter flushes it when it ends."""
    if not isinstance(sys.stdout, _Closed):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def write_program(text: str) -> None:
    """Write .coda to standard output, in UTF-8."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.flush()
        sys.stdout.buffer.write(text.encode())
    else:
        sys.stdout.write(text)

"""The on-disk cache of compiled objects: built once per machine and user, whatever happens meanwhile.

    cache = Cache()
    path = cache.load_or_build(key(source=text, arch="sm_90a"), ".o", build)     # build(path) writes the object

| it must survive                 | because                                                                            |
|---------------------------------|------------------------------------------------------------------------------------|
| many processes, a cold cache    | a build holds an exclusive `flock` of its key; the others wait, look again, load   |
| a builder that is killed        | the kernel drops its lock; its unfinished files are swept by the next builder     |
| a process killed while writing  | files appear by `os.replace` of a complete, fsynced temporary                      |
| a truncated or altered entry    | each entry has a digest beside it, checked before use; a mismatch is a miss        |
| a read-only or full disk        | the object stays in a temporary folder of this process, and a warning says so      |
| other users                     | the folder is 0700 and must belong to the user (or root); nobody else may write it |

So the cache never makes a call fail: what it cannot do safely it does not do, and the object is built anyway.

    <root>/objects/<key><suffix>          the object
    <root>/objects/<key><suffix>.sha256   its digest, written after it
    <root>/objects/<key>.lock             empty; locked by whoever builds
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import fcntl
import functools
import hashlib
import importlib.metadata
import os
import re
import shutil
import stat
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

# A build takes seconds; whoever waited this long assumes that the lock is stuck, and builds for itself.
LOCK_TIMEOUT_SECONDS = 600.0

# What decides how an epilogue becomes a kernel: a change in any of these folders must not find old objects.
_LOWERING_FOLDERS = ("ir", "lower")

_KEY = re.compile(r"[A-Za-z0-9_-]{1,160}")


class CodaCacheWarning(UserWarning):
    """The cache of compiled objects cannot be used; kernels are compiled again in each process."""


def key(**parts: str) -> str:
    """The key of an object: a SHA-256 over every named part, and over what all objects depend on.

    The parts are what the caller varies (specification, generated source, architecture, options).  Added here are
    the sources that do the lowering and the version of the device compiler.  Each text is preceded by its length, so
    that no two sets of parts read the same.
    """
    digest = hashlib.sha256()
    for name, text in sorted({**parts, **_environment()}.items()):
        for piece in (name.encode(), text.encode()):
            digest.update(len(piece).to_bytes(8, "little"))
            digest.update(piece)
    return digest.hexdigest()


@functools.cache
def _environment() -> dict[str, str]:
    try:
        compiler = importlib.metadata.version("nvidia-cutlass-dsl")
    except importlib.metadata.PackageNotFoundError:
        compiler = "none"
    package = Path(__file__).resolve().parent.parent
    lowering = hashlib.sha256()
    for folder in _LOWERING_FOLDERS:
        for path in sorted((package / folder).rglob("*.py")):
            lowering.update(f"{path.relative_to(package)}\0{path.stat().st_size}\0".encode())
            lowering.update(path.read_bytes())
    return {"@compiler": compiler, "@lowering": lowering.hexdigest()}


def default_root() -> Path:
    """`$CODALANG_CACHE_DIR`, else `$XDG_CACHE_HOME/codalang`, else `~/.cache/codalang`; without a home, a folder of
    this user's in the system's temporary folder."""
    explicit = os.environ.get("CODALANG_CACHE_DIR")
    if explicit:
        return Path(explicit).expanduser()
    xdg = os.environ.get("XDG_CACHE_HOME")
    if xdg and os.path.isabs(xdg):
        return Path(xdg) / "codalang"
    home = os.path.expanduser("~")
    if os.path.isabs(home):
        return Path(home) / ".cache" / "codalang"
    return Path(tempfile.gettempdir()) / f"codalang-{os.geteuid()}"


class Cache:
    """A folder of compiled objects.  See the module's docstring for what it promises."""

    def __init__(self, root: Path | str | None = None, kind: str = "objects") -> None:
        """`root` defaults to `default_root()`, `kind` is the folder in it.  Nothing is created before the first object
        is asked for."""
        self.root = Path(root) if root is not None else default_root()
        self.kind = kind
        self._refused: str | None = None
        self._checked = False
        self._private: dict[str, Path] = {}

    def load_or_build(self, key: str, suffix: str, build: Callable[[Path], None]) -> Path:
        """The path of the object of that key, built now if it is not there.

        Args:
            key: from `key(...)`; letters, digits, `-` and `_`.
            suffix: the file's extension, `.o` for instance.
            build: writes the object to the path that it is given.  What it raises reaches the caller, and leaves the
                cache as it was.

        Warns CodaCacheWarning where the folder cannot be used; the object then lives as long as this process.
        """
        if not _KEY.fullmatch(key) or not re.fullmatch(r"(\.[A-Za-z0-9]+)+", suffix):
            raise ValueError(f"not a cache key and suffix: {key!r}, {suffix!r}")
        name = key + suffix
        if name in self._private and self._private[name].exists():
            return self._private[name]
        folder = self._folder()
        if folder is None:
            return self._build_privately(name, build)
        entry = folder / name
        if _verified(entry):
            return entry
        with contextlib.ExitStack() as stack:
            try:
                stack.enter_context(_locked(folder / f"{key}.lock"))
            except OSError as error:
                self._warn(f"cannot lock {folder}: {error.strerror or error}")
                return self._build_privately(name, build)
            if _verified(entry):  # somebody else built it while we waited
                return entry
            _sweep(folder, key)
            data = _build_bytes(name, build)
            try:
                _write_atomically(entry, data)
                _write_atomically(_digest_path(entry), _digest_line(data))
            except OSError as error:
                self._warn(f"cannot write to {folder}: {error.strerror or error}")
                return self._keep_privately(name, data)
            return entry

    @property
    def shared(self) -> Path | None:
        """The folder that other processes find objects in; None where there is none."""
        return self._folder()

    def has(self, key: str, suffix: str) -> bool:
        """Is that object there for every process?"""
        folder = self._folder()
        return folder is not None and _verified(folder / (key + suffix))

    def find(self, key: str, suffix: str) -> bytes | None:
        """What is kept under that key, or None.  Where nothing was ever kept, it creates nothing."""
        if not (self.root / self.kind).is_dir():
            return None
        folder = self._folder()
        entry = folder / (key + suffix) if folder else None
        return entry.read_bytes() if entry and _verified(entry) else None

    def replace(self, key: str, suffix: str, data: bytes) -> bool:
        """Keep data under that key, whatever was there.  False, with a warning, where the folder cannot be used."""
        folder = self._folder()
        if folder is None:
            return False
        entry = folder / (key + suffix)
        try:
            with _locked(folder / f"{key}.lock"):
                _sweep(folder, key)
                _write_atomically(entry, data)
                _write_atomically(_digest_path(entry), _digest_line(data))
        except OSError as error:
            self._warn(f"cannot write to {folder}: {error.strerror or error}")
            return False
        return True

    def clear(self) -> None:
        """Remove every object.  A process that is loading one rebuilds it."""
        folder = self._folder()
        if folder is not None:
            for path in folder.iterdir():
                if path.suffix != ".lock":  # a lock that is held must keep its file
                    path.unlink(missing_ok=True)

    def _folder(self) -> Path | None:
        """The folder of objects, made and checked at first use; None where it must not be used."""
        if not self._checked:
            self._checked = True
            folder = self.root / self.kind
            try:
                self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
                folder.mkdir(mode=0o700, exist_ok=True)
            except OSError as error:
                if not folder.is_dir():
                    self._refused = f"cannot create {folder}: {error.strerror or error}"
            self._refused = self._refused or _unsafe(self.root) or _unsafe(folder, private=True)
            if self._refused:
                self._warn(self._refused)
        return None if self._refused else self.root / self.kind

    def _warn(self, reason: str) -> None:
        warnings.warn(
            f"{reason}; kernels are compiled anew in each process. "
            "Set CODALANG_CACHE_DIR to a folder that you own and nobody else can write.",
            CodaCacheWarning,
            stacklevel=4,
        )

    def _build_privately(self, name: str, build: Callable[[Path], None]) -> Path:
        return self._keep_privately(name, _build_bytes(name, build))

    def _keep_privately(self, name: str, data: bytes) -> Path:
        path = _process_folder(os.getpid()) / name
        path.write_bytes(data)
        self._private[name] = path
        return path


def _unsafe(folder: Path, private: bool = False) -> str | None:
    """Why what is in that folder cannot be trusted, or None.  Tightens a private one of ours that others can read."""
    try:
        info = folder.stat()
    except OSError as error:
        return f"cannot read {folder}: {error.strerror or error}"
    if not stat.S_ISDIR(info.st_mode):
        return f"{folder} is not a folder"
    if info.st_uid not in (os.geteuid(), 0):
        return f"{folder} belongs to another user (uid {info.st_uid})"
    if info.st_mode & 0o022:
        return f"{folder} can be written by others (mode {stat.S_IMODE(info.st_mode):04o})"
    if private and info.st_uid == os.geteuid() and info.st_mode & 0o077:
        with contextlib.suppress(OSError):
            folder.chmod(0o700)
    return None


def _digest_path(entry: Path) -> Path:
    return entry.with_name(entry.name + ".sha256")


def _digest_line(data: bytes) -> bytes:
    return f"{hashlib.sha256(data).hexdigest()} {len(data)}\n".encode()


def _verified(entry: Path) -> bool:
    """True where the object is there and is what was written."""
    try:
        return _digest_path(entry).read_bytes() == _digest_line(entry.read_bytes())
    except OSError:
        return False


def _build_bytes(name: str, build: Callable[[Path], None]) -> bytes:
    """Build in a folder of its own, so that no failure of the builder can leave anything in the cache."""
    with tempfile.TemporaryDirectory(prefix="codalang-build-") as scratch:
        path = Path(scratch) / name
        build(path)
        return path.read_bytes()


def _write_atomically(path: Path, data: bytes) -> None:
    """Write, fsync, rename: a reader sees the old file or the whole new one."""
    handle, temporary = tempfile.mkstemp(prefix=f"{path.name}.", suffix=".tmp", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


def _sweep(folder: Path, key: str) -> None:
    """Remove what a killed builder of this key left.  Only the holder of the key's lock may."""
    for path in folder.glob(f"{key}.*.tmp"):
        with contextlib.suppress(OSError):
            path.unlink()


# Descriptors of locks held now.  A forked child must not keep its parent's lock alive after the parent has died.
_held: set[int] = set()


def _release_in_child() -> None:
    for descriptor in _held:
        with contextlib.suppress(OSError):
            os.close(descriptor)
    _held.clear()


os.register_at_fork(after_in_child=_release_in_child)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock of that file.  Where the file system has no locks, or waiting took too long, go on
    without: writing is atomic, so the only loss is that an object may be built twice.  Raises OSError where the lock
    file cannot be opened."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    _held.add(descriptor)
    try:
        deadline, pause = time.monotonic() + LOCK_TIMEOUT_SECONDS, 0.005
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError as error:
                if error.errno not in (errno.EAGAIN, errno.EACCES) or time.monotonic() > deadline:
                    break
            time.sleep(pause)
            pause = min(2 * pause, 0.2)
        yield
    finally:
        if descriptor in _held:  # not so in a child that was forked meanwhile
            _held.discard(descriptor)
            os.close(descriptor)


class Claim:
    """A lock that one process at a time can have, and that none waits for: `Claim(path).take()`."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor: int | None = None

    def take(self) -> bool:
        """Is it ours now?  Not so where the file system has no locks."""
        if self._descriptor in _held:
            return True
        try:
            descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError:
            return False
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(descriptor)
            return False
        self._descriptor = descriptor
        _held.add(descriptor)
        return True

    def drop(self) -> None:
        """Leave it to others."""
        if self._descriptor is not None and self._descriptor in _held:
            _held.discard(self._descriptor)
            os.close(self._descriptor)
        self._descriptor = None


@functools.cache
def _process_folder(pid: int) -> Path:
    """A private folder of this process, removed at its end.  Keyed by pid: a fork gets its own."""
    folder = Path(tempfile.mkdtemp(prefix="codalang-"))

    def remove() -> None:
        if os.getpid() == pid:
            shutil.rmtree(folder, ignore_errors=True)

    atexit.register(remove)
    return folder

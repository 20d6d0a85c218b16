"""The on-disk cache: many processes, killed builders, damaged entries, unsafe and unwritable folders."""

from __future__ import annotations

import errno
import os
import signal
import stat
import subprocess
import sys
import time
import warnings
from pathlib import Path

import pytest
from cutlass import cute
from test_lower import spec_of, stdlib_epilogue

from codalang.errors import CodaCompileError
from codalang.lower import cache as cache_module
from codalang.lower import load
from codalang.lower.cache import Cache, CodaCacheWarning, default_root, key

KEY = "ab" * 32


def _writer(data: bytes, calls: list[Path]):
    def build(path: Path) -> None:
        calls.append(path)
        path.write_bytes(data)

    return build


def test_builds_once_then_loads(tmp_path):
    calls: list[Path] = []
    first = Cache(tmp_path / "c").load_or_build(KEY, ".o", _writer(b"object", calls))
    second = Cache(tmp_path / "c").load_or_build(KEY, ".o", _writer(b"other", calls))
    assert first == second and first.read_bytes() == b"object" and len(calls) == 1


def test_keys_and_suffixes_are_apart(tmp_path):
    cache, calls = Cache(tmp_path), []
    os.chmod(tmp_path, 0o700)
    paths = {
        cache.load_or_build(k, suffix, _writer(f"{k}{suffix}".encode(), calls))
        for k in (KEY, "cd" * 32)
        for suffix in (".o", ".py")
    }
    assert len(paths) == len(calls) == 4
    assert all(p.read_bytes() == p.name.encode() for p in paths)


@pytest.mark.parametrize("bad", [("../x", ".o"), ("", ".o"), (KEY, "o"), (KEY, "/../o"), (KEY, "")])
def test_a_key_cannot_leave_the_folder(tmp_path, bad):
    with pytest.raises(ValueError, match="not a cache key"):
        Cache(tmp_path).load_or_build(*bad, _writer(b"", []))


def test_key_separates_parts():
    assert key(a="x", b="y") == key(b="y", a="x")
    assert len({key(a="xy", b=""), key(a="x", b="y"), key(ab="xy"), key(a="x", c="y")}) == 4


def test_key_depends_on_the_lowering_and_the_compiler(monkeypatch):
    before = key(a="x")
    for part in cache_module._environment():
        changed = {**cache_module._environment(), part: "another"}
        monkeypatch.setattr(cache_module, "_environment", lambda changed=changed: changed)
        assert key(a="x") != before
        monkeypatch.undo()


@pytest.mark.parametrize("damage", ["truncated", "flipped", "no digest", "empty digest", "gone"])
def test_a_damaged_entry_is_rebuilt_and_stays_good(tmp_path, damage):
    calls: list[Path] = []
    build = _writer(b"object" * 100, calls)
    path = Cache(tmp_path / "c").load_or_build(KEY, ".o", build)
    digest = path.with_name(path.name + ".sha256")
    match damage:
        case "truncated":
            path.write_bytes(path.read_bytes()[:7])
        case "flipped":
            path.write_bytes(b"O" + path.read_bytes()[1:])
        case "no digest":
            digest.unlink()
        case "empty digest":
            digest.write_bytes(b"")
        case "gone":
            path.unlink()
    for _ in range(2):
        assert Cache(tmp_path / "c").load_or_build(KEY, ".o", build).read_bytes() == b"object" * 100
    assert len(calls) == 2


def test_a_failing_build_reaches_the_caller_and_leaves_nothing(tmp_path):
    def fail(path: Path) -> None:
        path.write_bytes(b"half")
        raise RuntimeError("ptxas failed")

    cache = Cache(tmp_path / "c")
    with pytest.raises(RuntimeError, match="ptxas failed"):
        cache.load_or_build(KEY, ".o", fail)
    calls: list[Path] = []
    assert cache.load_or_build(KEY, ".o", _writer(b"whole", calls)).read_bytes() == b"whole"
    assert len(calls) == 1
    assert {p.suffix for p in (tmp_path / "c" / "objects").iterdir()} == {".o", ".sha256", ".lock"}


def test_folder_is_private(tmp_path):
    Cache(tmp_path / "c").load_or_build(KEY, ".o", _writer(b"x", []))
    for folder in (tmp_path / "c", tmp_path / "c" / "objects"):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o1777, 0o702])
@pytest.mark.parametrize("which", [".", "objects"])
def test_a_folder_that_others_can_write_is_not_trusted(tmp_path, mode, which):
    root = tmp_path / "c"
    planted = Cache(root).load_or_build(KEY, ".o", _writer(b"planted", []))
    os.chmod(root / which, mode)
    calls: list[Path] = []
    with pytest.warns(CodaCacheWarning, match="written by others"):
        path = Cache(root).load_or_build(KEY, ".o", _writer(b"mine", calls))
    assert path.read_bytes() == b"mine" and len(calls) == 1 and path != planted
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


def test_a_folder_of_another_user_is_not_trusted(tmp_path, monkeypatch):
    root = tmp_path / "c"
    Cache(root).load_or_build(KEY, ".o", _writer(b"theirs", []))
    monkeypatch.setattr(os, "geteuid", lambda: 4321)
    if root.stat().st_uid == 0:  # root may do anything anyway, so its folders are trusted; give it to somebody else
        os.chown(root, 1234, -1)
    with pytest.warns(CodaCacheWarning, match="another user"):
        assert Cache(root).load_or_build(KEY, ".o", _writer(b"mine", [])).read_bytes() == b"mine"


def test_the_root_is_a_file(tmp_path):
    (tmp_path / "c").write_text("not a folder")
    cache, calls = Cache(tmp_path / "c"), []
    with pytest.warns(CodaCacheWarning):
        path = cache.load_or_build(KEY, ".o", _writer(b"mine", calls))
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # said once; and the process keeps what it has built
        assert cache.load_or_build(KEY, ".o", _writer(b"mine", calls)) == path
    assert len(calls) == 1


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EDQUOT, errno.EACCES])
def test_a_disk_that_takes_nothing(tmp_path, monkeypatch, code):
    def refuse(path: Path, data: bytes) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(cache_module, "_write_atomically", refuse)
    cache, calls = Cache(tmp_path / "c"), []
    with pytest.warns(CodaCacheWarning, match=os.strerror(code)):
        path = cache.load_or_build(KEY, ".o", _writer(b"mine", calls))
    assert path.read_bytes() == b"mine"
    assert cache.load_or_build(KEY, ".o", _writer(b"mine", calls)) == path and len(calls) == 1


@pytest.mark.parametrize("where", ["kernel", "copy"])
def test_no_room_anywhere(tmp_path, monkeypatch, where):
    """Neither in the cache nor in the temporary folder: a typed error that says what to do."""

    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    relu = Path(__file__).resolve().parent.parent / "stdlib" / "relu.coda"
    spec = spec_of(stdlib_epilogue(relu), None)
    monkeypatch.setattr(load, "disk_cache", lambda: Cache(tmp_path / "c"))
    if where == "kernel":
        monkeypatch.setattr(cute, "compile", refuse)
    else:
        monkeypatch.setattr(load, "_build", lambda spec, path, compiler: path.write_bytes(b"built"))
        monkeypatch.setattr(cache_module, "_write_atomically", refuse)
        monkeypatch.setattr(cache_module, "_process_folder", refuse)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CodaCacheWarning)
        with pytest.raises(CodaCompileError, match="`relu` cannot be written: No space left") as caught:
            load.library(spec)
    assert "TMPDIR" in str(caught.value.hint)
    assert not list(tmp_path.rglob("*.so")) and not list(tmp_path.rglob("*.o"))


def test_entries_on_a_read_only_disk_are_used(tmp_path, monkeypatch):
    Cache(tmp_path / "c").load_or_build(KEY, ".o", _writer(b"baked in", []))
    real = os.open

    def refuse(path, flags, *rest, **named):
        if flags & (os.O_WRONLY | os.O_RDWR) and str(path).startswith(str(tmp_path / "c")):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        return real(path, flags, *rest, **named)

    monkeypatch.setattr(os, "open", refuse)
    cache, calls = Cache(tmp_path / "c"), []
    assert cache.load_or_build(KEY, ".o", _writer(b"x", calls)).read_bytes() == b"baked in"
    with pytest.warns(CodaCacheWarning, match="cannot lock"):
        assert cache.load_or_build("cd" * 32, ".o", _writer(b"new", calls)).read_bytes() == b"new"
    assert len(calls) == 1


def test_default_root(monkeypatch):
    monkeypatch.setenv("CODALANG_CACHE_DIR", "/somewhere/else")
    assert default_root() == Path("/somewhere/else")
    monkeypatch.delenv("CODALANG_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert default_root() == Path("/xdg/codalang")
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")  # the specification says to ignore it
    monkeypatch.setenv("HOME", "/home/somebody")
    assert default_root() == Path("/home/somebody/.cache/codalang")


def test_clear(tmp_path):
    cache, calls = Cache(tmp_path / "c"), []
    cache.load_or_build(KEY, ".o", _writer(b"1", calls))
    cache.clear()
    cache.load_or_build(KEY, ".o", _writer(b"2", calls))
    assert len(calls) == 2


# A process of its own: builds (slowly, and leaving a mark) or loads, then prints what it got.
_WORKER = """
import os, sys, time
from pathlib import Path
from codalang.lower.cache import Cache
root, marks, seconds = sys.argv[1:4]
def build(path):
    (Path(marks) / str(os.getpid())).touch()
    path.write_bytes(b"half")
    time.sleep(float(seconds))
    path.write_bytes(b"object" * 1000)
path = Cache(root).load_or_build("ab" * 32, ".o", build)
sys.stdout.write(str(len(path.read_bytes())))
"""


def _worker(root: Path, marks: Path, seconds: float) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parent.parent)}
    return subprocess.Popen(
        [sys.executable, "-W", "error", "-c", _WORKER, str(root), str(marks), str(seconds)],
        stdout=subprocess.PIPE,
        env=environment,
        text=True,
    )


def _wait_for(condition, seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "timed out"
        time.sleep(0.005)


def test_sixteen_processes_build_once(tmp_path):
    marks = tmp_path / "marks"
    marks.mkdir()
    workers = [_worker(tmp_path / "c", marks, 1.0) for _ in range(16)]
    assert [w.communicate()[0] for w in workers] == ["6000"] * 16
    assert len(list(marks.iterdir())) == 1


def test_a_killed_builder_blocks_nobody(tmp_path):
    marks = tmp_path / "marks"
    marks.mkdir()
    stuck = _worker(tmp_path / "c", marks, 3600)
    _wait_for(lambda: list(marks.iterdir()))
    waiting = _worker(tmp_path / "c", marks, 0)
    time.sleep(0.3)
    assert waiting.poll() is None and len(list(marks.iterdir())) == 1  # it waits for the lock
    stuck.send_signal(signal.SIGKILL)
    stuck.communicate()
    assert waiting.communicate(timeout=30)[0] == "6000"


def test_killed_while_writing(tmp_path):
    """The temporary of a process that died between opening and renaming is never read, and swept."""
    script = """
import os, signal, sys
from codalang.lower import cache
def die(descriptor):
    os.kill(os.getpid(), signal.SIGKILL)
cache.os.fsync = die
cache.Cache(sys.argv[1]).load_or_build("ab" * 32, ".o", lambda path: path.write_bytes(b"half"))
"""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parent.parent)}
    died = subprocess.run([sys.executable, "-c", script, str(tmp_path / "c")], env=environment)
    assert died.returncode == -signal.SIGKILL
    objects = tmp_path / "c" / "objects"
    assert list(objects.glob("*.tmp")) and not (objects / f"{KEY}.o").exists()
    assert Cache(tmp_path / "c").load_or_build(KEY, ".o", _writer(b"whole", [])).read_bytes() == b"whole"
    assert not list(objects.glob("*.tmp"))


def test_a_forked_child_does_not_keep_the_lock(tmp_path):
    """The builder forks a helper and dies; the helper lives on, and the next builder does not wait for it."""
    script = """
import os, signal, sys, time
from codalang.lower import cache
def build(path):
    child = os.fork()
    if child == 0:
        os.close(1)  # the test waits for our output to end
        time.sleep(60)
        os._exit(0)
    print(child, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
cache.Cache(sys.argv[1]).load_or_build("ab" * 32, ".o", build)
"""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parent.parent)}
    died = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "c")], env=environment, stdout=subprocess.PIPE, text=True
    )
    child = int(died.stdout)
    try:
        start = time.monotonic()
        Cache(tmp_path / "c").load_or_build(KEY, ".o", _writer(b"whole", []))
        assert time.monotonic() - start < 20
    finally:
        os.kill(child, signal.SIGKILL)

"""benchmarks/sanitize.py: what it runs, how it reads what the sanitizer says, what it does where there is none."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

import sanitize  # noqa: E402
from sanitize import Outcome, Share  # noqa: E402

MEMCHECK = """\
========= COMPUTE-SANITIZER
========= Invalid __global__ write of size 2 bytes
=========     at kernel_cutlass_kernel_codalanglowerhosted+0x5a0
=========     by thread (3,0,0) in block (1,0,0)
=========     Access at 0x7f is out of bounds
=========
========= Invalid __shared__ read of size 4 bytes
=========     at kernel_cutlass_kernel_codalanglowersm90+0x10
========= Target application returned an error
========= ERROR SUMMARY: 2 errors
"""
RACECHECK = """\
========= COMPUTE-SANITIZER
========= Error: Race reported between Write access at kernel+0x10
=========     and Read access at kernel+0x20 [64 hazards]
=========
========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)
"""

# Acts as a sanitizer does: takes its options, and writes a log beside what the program that it runs writes.
FAKE = """\
#!{python}
import json, pathlib, sys, time
arguments = sys.argv[1:]
tool, log = arguments[1], pathlib.Path(arguments[3])
index, count, folder = arguments[-3:]
assert arguments[arguments.index("--work") + 1] == tool
log.write_text({log!r} if tool == "racecheck" else "")
if tool == "synccheck":
    time.sleep(60)
case = dict(tool=tool, name="relu", case=f"case {{index}} of {{count}}", errors=[])
(pathlib.Path(folder) / f"{{tool}}-{{index}}.jsonl").write_text(json.dumps(case) + "\\n")
"""


@pytest.fixture
def fake(tmp_path: Path) -> str:
    path = tmp_path / "compute-sanitizer"
    path.write_text(FAKE.format(python=sys.executable, log=RACECHECK))
    path.chmod(0o755)
    return str(path)


def test_every_epilogue_runs_on_both_hosts_and_on_large_tilings() -> None:
    found = sanitize.cases()
    assert {c.subject.name for c in found} == set(sanitize.gpu_cases.LIBRARY) - unreachable(found)
    for on_gemm in (True, False):
        kinds = {(c.subject.backward, c.tiling is None) for c in found if c.subject.on_gemm == on_gemm}
        assert kinds == {(b, t) for b in (False, True) for t in ((True, False) if on_gemm else (True,))}
    assert sanitize.planted() in found


def unreachable(found: list) -> set[str]:
    """Epilogues without a kernel on either host."""
    names = set(sanitize.gpu_cases.LIBRARY) - {c.subject.name for c in found}
    subjects = sanitize.gpu_cases.Subject
    return {n for n in names if all(sanitize.gpu_cases.lacking(subjects(n, False, host)) for host in (True, False))}


def test_records_are_counted_by_their_first_lines() -> None:
    assert sanitize.records(MEMCHECK) == (
        "Invalid __global__ write of size 2 bytes",
        "Invalid __shared__ read of size 4 bytes",
    )
    assert sanitize.records(RACECHECK) == ("Error: Race reported between Write access at kernel+0x10",)
    assert sanitize.records("========= COMPUTE-SANITIZER\n========= ERROR SUMMARY: 0 errors\n") == ()


def test_an_error_is_told_of_the_case_that_ran_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    share, log = Share("memcheck", 0, 90), tmp_path / "memcheck-0.log"
    todo = sanitize.cases()[::90]
    begun: list[object] = []

    def run_one(case: object) -> None:
        begun.append(case)
        if case is todo[1]:
            raise RuntimeError("no such kernel")
        if case is todo[2]:
            with log.open("a") as lines:
                lines.write(MEMCHECK)

    monkeypatch.setattr(sanitize, "cases", lambda: [c for c in todo for _ in range(90)])
    monkeypatch.setattr(sanitize, "run_one", run_one)
    monkeypatch.setattr(sanitize, "SETTLE_SECONDS", 0.0)
    sanitize.work(share, tmp_path)
    assert begun == todo
    found = list(sanitize.outcomes([share], tmp_path))
    assert [(o.case, len(o.errors)) for o in found] == [(str(todo[0]), 0), (str(todo[2]), 2)]


def test_the_planted_fault_has_a_process_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    share = Share("memcheck", 2, 2)

    def run_one(case: object) -> None:
        assert case is None
        share.path(tmp_path, ".log").write_text(MEMCHECK)
        raise RuntimeError("the context is destroyed")

    monkeypatch.setattr(sanitize, "run_one", run_one)
    sanitize.work(share, tmp_path)
    (outcome,) = sanitize.outcomes([share], tmp_path)
    assert (outcome.name, len(outcome.errors)) == (sanitize.PLANTED, 2)


def test_tools_run_beside_each_other_within_a_time(fake: str, tmp_path: Path) -> None:
    shares = [Share(tool, i, 2) for tool in sanitize.TOOLS for i in range(2)]
    sanitize.run_tools(fake, shares, tmp_path, 3.0)
    found = list(sanitize.outcomes(shares, tmp_path))
    assert [(o.tool, o.case) for o in found if o.case] == [
        (tool, f"case {i} of 2") for tool in ("memcheck", "racecheck") for i in range(2)
    ]
    assert [(o.tool, o.errors) for o in found if not o.case] == 2 * [("racecheck", sanitize.records(RACECHECK))]


def test_the_table_says_what_was_covered(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    expected = [c for c in sanitize.cases() if c.subject.name in ("relu", "bias")]
    mine = [c for c in expected if c.subject.name == "relu"]
    found = [Outcome("memcheck", "relu", str(c), ()) for c in mine[1:]]
    found += [Outcome("memcheck", sanitize.PLANTED, sanitize.PLANTED, ("Invalid write",))]
    rows = {row["epilogue"]: row["memcheck"] for row in sanitize.table(found, expected, ["memcheck"])}
    assert rows["relu"] == f"0 ({len(mine) - 1} of {len(mine)})"
    assert rows["bias"].startswith("0 (0 of ")
    assert rows["all"] == f"0 ({len(mine) - 1} of {len(expected)})"
    assert sanitize.judged(found, ["memcheck"], tmp_path) == 0
    assert json.loads((tmp_path / "sanitize.json").read_text())[-1]["errors"] == ["Invalid write"]
    assert sanitize.judged(found[:-1], ["memcheck"], tmp_path) == 1  # a tool that sees nothing proves nothing
    assert sanitize.judged(found[:-1], ["synccheck"], tmp_path) == 0
    found.append(Outcome("racecheck", "relu", "the case", ("Error: Race",)))
    assert sanitize.judged(found, ["memcheck", "racecheck"], tmp_path) == 1
    assert "racecheck: the case: 1 errors: Error: Race" in capsys.readouterr().out


def test_no_sanitizer_is_one_line(fake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sanitize.shutil, "which", lambda name: None)
    assert sanitize.sanitizers([fake, "/nowhere/compute-sanitizer"]) == [fake]

"""The command line: output, exit codes, JSON, and errors without tracebacks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import codalang
from codalang.cli import main

ROOT = Path(__file__).resolve().parent.parent
STDLIB = ("bias_gelu", "residual_rms", "scaled_swiglu", "swiglu")

GOOD = "epilogue f(acc: tile[T, D], r: col[T]) {\n    store y: tile[T, D] = acc * r\n}\n"
TWO = GOOD + "\nepilogue g(acc: tile[M, N]) {\n    store y: tile[M, N] = acc\n}\n"
UGLY = "# kept\nepilogue f( acc:tile[M,N] ){ store y:tile[M,N]=acc*2 # this too\n}"
BAD = "epilogue f(acc: tile[M, N]) {\n    store y: tile[M, N] = acc * gama\n}\n"
WORSE = "epilogue f(acc: tile[M, N]) {\n    store y tile[M, N] = acc\n}\n"


@pytest.fixture
def file(tmp_path):
    def write(text: str, name: str = "p.coda") -> Path:
        path = tmp_path / name
        path.write_text(text)
        return path

    return write


# ---- check -----------------------------------------------------------------------------------------------------------


def test_check(run, file):
    code, out, err = run("check", file(TWO), "swiglu", "-", stdin=GOOD)
    assert (code, err) == (0, "")
    assert [line.split(": ", 1)[1] for line in out.splitlines()] == [
        "ok, 2 epilogues",
        "ok, 1 epilogue",
        "ok, 1 epilogue",
    ]


def test_check_goes_on_after_an_error(run, file):
    bad, worse, good = file(BAD, "bad.coda"), file(WORSE, "worse.coda"), file(GOOD, "good.coda")
    code, out, err = run("check", bad, worse, good, "no/such.coda")
    assert code == 1 and out == f"{good}: ok, 1 epilogue\n"
    assert f"error: {bad}:2:33: " in err and "    2 |     store y: tile[M, N] = acc * gama" in err and "^^^^" in err
    assert f"error: {worse}:2:" in err and "cannot read 'no/such.coda'" in err


def test_check_as_json(run, file):
    bad = file(BAD)
    code, out, err = run("check", "--json", bad, "swiglu")
    result = json.loads(out)
    assert code == 1 and result["ok"] is False and "gama" in err
    assert [p["ok"] for p in result["programs"]] == [False, True]
    (error,) = result["errors"]
    assert (error["type"], error["file"], error["line"], error["column"]) == ("CodaNameError", str(bad), 2, 33)
    assert "gama" in error["message"]


def test_check_what_is_not_text(run, tmp_path):
    path = tmp_path / "x.coda"
    path.write_bytes(b"epilogue \xff")
    code, _, err = run("check", path)
    assert code == 1 and f"{path}:1:10: byte 0xff is not UTF-8" in err
    assert run("check", tmp_path)[0] == 1
    assert run("check", "-", stdin=b"\xff")[0] == 1


# ---- fmt -------------------------------------------------------------------------------------------------------------


def test_fmt_in_place(run, file):
    path = file(UGLY)
    path.chmod(0o640)
    assert run("fmt", path) == (0, "", f"reformatted {path}\n")
    text = path.read_text()
    assert "# kept" in text and "# this too" in text and text != UGLY and path.stat().st_mode & 0o777 == 0o640
    assert run("fmt", path) == (0, "", "") and path.read_text() == text
    assert run("fmt", "--check", path) == (0, "", "")
    assert os.listdir(path.parent) == [path.name]


def test_fmt_check_and_diff_write_nothing(run, file):
    path = file(UGLY)
    assert run("fmt", "--check", path) == (1, "", f"would reformat {path}\n")
    code, out, _ = run("fmt", "--diff", path)
    assert code == 1 and out.startswith(f"--- {path}") and "+    store y: tile[M, N] = acc * 2" in out
    assert path.read_text() == UGLY


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_fmt_keeps_line_ends(run, tmp_path, end):
    ugly, path = UGLY.replace("\n", end).encode(), tmp_path / "p.coda"
    path.write_bytes(ugly)
    code, out, _ = run("fmt", "--diff", path)
    changed = [line[1:] for line in out.splitlines()[2:] if line[0] == "-"]
    assert code == 1 and changed and not {line[1:] for line in out.splitlines()[2:] if line[0] == "+"} & set(changed)
    assert run("fmt", path)[0] == 0
    formatted = path.read_bytes()
    assert formatted.count(end.encode()) == len(formatted.decode().splitlines())
    assert run("fmt", "--check", path)[0] == 0
    path.write_bytes(formatted.replace(end.encode(), b"\r\n", 1).replace(b"\r\n", b"\n", 1))
    if end == "\r\n":  # mixed: as the first line's
        assert run("fmt", "--diff", path)[1].count("\\r") >= 2
        assert run("fmt", path)[0] == 0 and b"\r" not in path.read_bytes()


def test_check_of_nothing(run, file):
    path = file("# nothing\n")
    assert run("check", path) == (0, f"{path}: ok, no epilogues or programs\n", "")


def test_fmt_stdin(run):
    code, out, _ = run("fmt", "-", stdin=UGLY)
    assert code == 0 and "    store y: tile[M, N] = acc * 2" in out
    assert run("fmt", "-", stdin=out) == (0, out, "")
    assert run("fmt", "--check", "-", stdin=UGLY)[0] == 1


def test_fmt_leaves_a_wrong_file_alone(run, file):
    wrong, ugly = file(WORSE, "wrong.coda"), file(UGLY, "ugly.coda")
    code, _, err = run("fmt", wrong, ugly)
    assert code == 1 and "error" in err and wrong.read_text() == WORSE and ugly.read_text() != UGLY


def test_fmt_follows_links(run, file, tmp_path):
    path = file(UGLY)
    link = tmp_path / "link.coda"
    link.symlink_to(path)
    assert run("fmt", link)[0] == 0
    assert link.is_symlink() and path.read_text() != UGLY


def test_fmt_as_json(run, file):
    path = file(UGLY)
    code, out, _ = run("fmt", "--check", "--json", path)
    assert code == 1 and json.loads(out)["changed"] == [str(path)]


def test_the_library_is_formatted(run):
    assert run("fmt", "--check", *sorted((ROOT / "stdlib").glob("*.coda")))[0] == 0


# ---- grad ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", STDLIB)
def test_grad(run, name):
    code, out, _ = run("grad", name)
    assert code == 0
    assert out == codalang.load(name)[name].backward.source
    assert run("check", "-", stdin=out)[0] == 0


def test_grad_of_some(run):
    code, out, _ = run("grad", "residual_rms", "--wrt", "gamma", "--cotangents", "h")
    assert code == 0 and "d_gamma" in out and "d_acc" not in out and "d_x" not in out
    assert "saved_" in run("grad", "swiglu", "--forward")[1].split("epilogue")[1]


def test_grad_of_all_and_of_one(run, file):
    path = file(TWO)
    assert run("grad", path)[1].count("epilogue") == 2
    assert "epilogue g_backward" in run("grad", path, "g")[1]
    code, _, err = run("grad", path, "h")
    assert code == 1 and "defines no epilogue `h`; it defines f, g" in err


def test_grad_as_json(run):
    code, out, _ = run("grad", "swiglu", "--json")
    (derivative,) = json.loads(out)["derivatives"]
    assert code == 0 and derivative["saved"] == ["saved_acc"] and derivative["gradients"] == {"acc": "d_acc"}
    assert derivative["loads"]["saved_acc"] == {"source": "saved", "name": "saved_acc"}


def test_grad_of_unknown_names(run):
    code, _, err = run("grad", "swiglu", "--wrt", "nothing")
    assert code == 1 and "nothing" in err


# ---- emit and compile ------------------------------------------------------------------------------------------------


def test_emit_ir_and_backward(run):
    code, out, _ = run("emit", "swiglu", "--stage", "ir")
    assert code == 0 and run("check", "-", stdin=out)[0] == 0 and "silu" not in out
    assert run("emit", "swiglu", "--stage", "backward")[1] == run("grad", "swiglu")[1]


@pytest.mark.parametrize("name", STDLIB)
def test_emit_cutedsl_is_python(run, name):
    code, out, _ = run("emit", name, "--backward", "--json")
    stages = json.loads(out)["stages"]
    assert code == 0 and [s["name"] for s in stages] == [name, f"{name}_backward"]
    for stage in stages:
        compile(stage["text"], name, "exec")
    assert f"{name}.coda:" in stages[0]["text"]  # each line says where it came from


def test_emit_ptx(run):
    code, out, _ = run("emit", "bias_gelu", "--stage", "ptx", "--dtype", "f16")
    assert code == 0 and ".target sm_90a" in out and "wgmma.mma_async" in out and ".f16.f16" in out


def test_compile(run, tmp_path):
    folder = tmp_path / "new" / "folder"
    code, out, _ = run("compile", "swiglu", "--backward", "-o", folder, "--json")
    objects = json.loads(out)["objects"]
    assert code == 0 and [o["name"] for o in objects] == ["swiglu", "swiglu_backward"]
    for o in objects:
        assert Path(o["object"]).read_bytes().startswith(b"\x7fELF") and Path(o["object"]).parent == folder
        assert o["arch"] == "sm_90a" and 0 < o["registers"] <= 255 and o["spill_bytes"] == 0 and not o["serialized"]
    assert 0 < objects[0]["shared_bytes"] <= 232_448 and objects[1]["config"] is None


def test_compile_what_no_matmul_can_host(run, file, tmp_path):
    path = file("epilogue f(r: col[M]) {\n    store y: tile[M, N] = r\n}\n")
    code, out, _ = run("compile", path, "-o", tmp_path)
    assert code == 0 and "hosted on plain tensors" in out and (tmp_path / "f.o").exists()


def test_compile_into_a_file(run, tmp_path):
    (tmp_path / "file").write_text("")
    code, _, err = run("compile", "swiglu", "-o", tmp_path / "file")
    assert code == 1 and "cannot write to" in err


# ---- run -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["bf16", "f16", "f32", "f64"])
@pytest.mark.parametrize("name", STDLIB)
def test_run(run, name, dtype):
    code, out, _ = run(
        "run", name, "--backward", "--dtype", dtype, "--shape", "M=9,N=26,K=40", "--device", "cpu", "--json"
    )
    result = json.loads(out)
    assert code == 0 and result["ok"] and result["shape"] == {"M": 9, "N": 26, "K": 40}
    bound = {"bf16": 1e-2, "f16": 2e-3, "f32": 2e-6, "f64": 1e-14}[dtype]
    assert all(0 <= r["error"] < bound for r in result["results"])
    assert {"d_a", "d_w"} <= {r["name"] for r in result["results"]}


LANGUAGE = """
state energy(x) {
    carry total = 0, count: i32 = 0
    update { return (total + x * x, count + 1) }
    merge { return (a_total + b_total, a_count + b_count) }
    finalize (energy, count) = (total, count)
    vjp (x) = (2 * x * d_energy)
}
epilogue f(acc: tile[M, N], keep: tile[M, N]: bool, target: col[M]: i64, offset: row[N]: i32, k: scalar: i32,
           g: row[N]) {
    let x = where(keep, acc * rsqrt(group_sum(acc * acc, 16) + 1), g)
    store y: tile[M, N] = x * cos(float(offset + k))
    store v: row[N] = g * g
    reduce logit: col[M] = sum(where(col_index() == target, x, 0))
    reduce amax: scalar = max(abs(x))
    state (top, at): row[N] = argmax(x, row_index())
    state (mean, var, n): col[M] = welford(x)
    state (energy, count): col[M] = energy(x)
    state lse: scalar = online_logsumexp(x)
}
"""


@pytest.mark.parametrize("dtype", ["bf16", "f32", "f64"])
def test_run_of_the_full_language(run, file, dtype):
    arguments = ("--backward", "--dtype", dtype, "--shape", "M=9,N=32,K=40", "--device", "cpu", "--json")
    code, out, _ = run("run", file(LANGUAGE), *arguments)
    result = json.loads(out)
    assert code == 0 and result["ok"]
    found = {r["name"]: r for r in result["results"]}
    assert found["at"]["dtype"] == found["count"]["dtype"] == "int32"
    assert [r["name"] for r in result["results"]][-3:] == ["d_a", "d_w", "d_g"]
    bound = {"bf16": 1e-2, "f32": 1e-5, "f64": 1e-13}[dtype]
    assert all(0 <= r["error"] < bound for r in result["results"]), found


def test_run_notices_a_wrong_index(run, file, monkeypatch):
    """One that points at another element; but not one that points at an equal one."""
    from codalang.torch import execute

    original = execute._run_reference
    path = file("")
    text = "epilogue f(acc: tile[M, N]) {\n    state (v, i): col[M] = argmax(PLACE, col_index())\n}\n"
    for place, shift, wanted in (("acc", 0, 0), ("acc", 1, 1), ("abs(acc) * 0", 3, 0)):

        def shifted(job, values, device, shift=shift):
            value, index = original(job, values, device)
            return [value, (index + shift) % job.columns]

        monkeypatch.setattr(execute, "_run_reference", shifted)
        path.write_text(text.replace("PLACE", place))
        assert run("run", path, "--dtype", "f64", "--device", "cpu", "--shape", "M=9,N=32,K=40")[0] == wanted


def test_run_notices_a_wrong_gradient(run, monkeypatch):
    from codalang.autodiff import rules

    right = rules.RULES["sigmoid"]
    monkeypatch.setitem(rules.RULES, "sigmoid", lambda g, y, x: right(g, y + y, x))
    code, out, _ = run("run", "-", "--backward", "--dtype", "f64", "--device", "cpu", stdin=SIGMOID)
    assert code == 1 and "INACCURATE" in out


SIGMOID = "epilogue s(acc: tile[M, N]) {\n    store y: tile[M, N] = sigmoid(acc)\n}\n"


def test_run_is_reproducible(run):
    arguments = ("run", "scaled_swiglu", "--dtype", "f16", "--device", "cpu", "--shape", "M=5,N=8")
    first = run(*arguments)
    assert first[0] == 0 and first == run(*arguments) != run(*arguments, "--seed", "1")
    assert "scaled_swiglu: M = 5, N = 8, K = 256, f16, on cpu" in first[1]


def test_run_takes_the_programs_dimensions(run, file):
    path = file(GOOD)
    assert run("run", path, "--shape", "T=4,D=6,K=8")[0] == 0
    code, _, err = run("run", path, "--shape", "M=4")
    assert code == 1 and "its dimensions are T, D, K" in err
    assert run("run", "swiglu", "--shape", "N=7")[0] == 1  # odd
    code, _, err = run("run", file(TWO))
    assert code == 1 and "defines 2 epilogues: f, g" in err
    assert run("run", path, "f", "--shape", "T=0,D=6")[0] == 0


def test_run_without_an_accumulator(run, file):
    path = file("epilogue f(r: col[M], g: row[N]) {\n    store y: tile[M, N] = r * g\n}\n")
    assert run("run", path, "--shape", "M=4,N=6", "--backward", "--dtype", "f64")[0] == 0


# ---- the process -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments",
    [[], ["bogus"], ["check"], ["run", "swiglu", "--shape", "M"], ["run", "swiglu", "--shape", "M=-3"], ["grad"],
     ["emit", "swiglu", "--stage", "sass"], ["compile", "swiglu", "--dtype", "f64"], ["fmt", "--check", "--diff", "x"]],
)  # fmt: skip
def test_usage_errors(run, arguments):
    code, out, err = run(*arguments)
    assert code == 2 and out == "" and "usage: codalang" in err


def test_version_and_help(run):
    assert run("--version") == (0, f"codalang {codalang.__version__}\n", "")
    for command in ("check", "fmt", "grad", "emit", "compile", "run"):
        assert run(command, "--help")[0] == 0 and command in run("--help")[1]


def _process(*arguments: str, **options) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "codalang", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        **options,
    )


def test_the_module_is_the_command(file):
    done = _process("check", str(file(BAD)))
    assert done.returncode == 1 and done.stdout == "" and "^^^^" in done.stderr and "Traceback" not in done.stderr
    assert "\033[" not in done.stderr  # no colours into a pipe
    assert _process("grad", "-", input=GOOD).stdout.startswith("epilogue f_backward(")


def test_a_reader_that_goes_away():
    command = f"{sys.executable} -m codalang grad swiglu | true; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], cwd=ROOT, capture_output=True, text=True)
    assert "Traceback" not in done.stderr and "BrokenPipe" not in done.stderr and done.stdout.endswith("1\n")


# --- explain ----------------------------------------------------------------------------------------------------------


def test_explain_says_what_is_moved_kept_and_scheduled(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "scaled_swiglu", "--json"]) == 0
    (report,) = json.loads(capsys.readouterr().out)["epilogues"]
    assert report["forward"]["stores"] == {"y": 1.0, "saved_acc": 2.0}
    assert report["backward"]["loads"] == {"d_y": 1.0, "saved_acc": 2.0}
    assert report["backward"]["bytes_per_element"] == 5.0
    assert report["forward"]["primitives"]["tile store"] == 2
    assert {k["value"]: k["how"] for k in report["kept"]}["acc"] == "saved"
    assert report["forward"]["kernel"]["shared_bytes"] <= 232_448
    assert main(["explain", "residual_rms"]) == 0
    text = capsys.readouterr().out
    assert "loaded: the forward stores it anyway" in text
    assert "kernel     hosted on plain tensors" in text


def test_explain_of_an_epilogue_without_a_gradient(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "still.coda"
    path.write_text("epilogue still(acc: tile[M, N]) { store y: tile[M, N] = stop_gradient(acc) }\n")
    assert main(["explain", str(path)]) == 0
    assert "no backward: every gradient is zero" in capsys.readouterr().out


# ---- derivatives that compute nothing --------------------------------------------------------------------------------

FLAT = (
    "epilogue f(acc: tile[M, N]) {\n    store y: tile[M, N] = 1.0\n}\n",
    "epilogue f(acc: tile[M, N]) {\n    store y: tile[M, N] = where(acc > 0, 1, 0)\n}\n",
    "epilogue f(acc: tile[M, N]) {\n    store y: tile[M, N] = stop_gradient(acc)\n}\n",
    "epilogue f(acc: tile[M, N]) {\n    state (_, at): col[M] = argmax(acc, col_index())\n}\n",
)
NOTHING = "# `f_backward` computes nothing: every gradient is zero\n"


@pytest.mark.parametrize("program", FLAT)
def test_a_derivative_of_zeros_is_a_comment(run, file, program):
    path = file(program)
    for command in (["grad"], ["emit", "--stage", "backward"]):
        assert run(*command, path) == (0, NOTHING, "")
        code, out, _ = run(*command, path, "--json")
        assert code == 0 and NOTHING in (json.loads(out).get("derivatives") or json.loads(out)["stages"])[0].values()
    assert run("check", "-", stdin=NOTHING)[0] == 0
    code, out, _ = run("emit", path, "--backward")
    assert code == 0 and "f_backward" not in out


@pytest.mark.parametrize("option", ["--wrt", "--cotangents"])
def test_a_derivative_for_nothing_is_a_comment(run, option):
    assert run("grad", "swiglu", option, "") == (0, NOTHING.replace("f_", "swiglu_"), "")


# ---- what people type by mistake, and streams that fail --------------------------------------------------------------

GROUPS = "epilogue f(acc: tile[M, 2*N]) {\n    store y: tile[M, 2*N] = group_sum(acc, 64)\n}\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run", "swiglu", "--seed", "99999999999999999999"], "64 bits"),
        (["run", "swiglu", "--shape", "M=99999999999999999999"], "M must be below 2**31"),
        (["run", "swiglu", "--shape", "M=4,N=4,M=8"], "M is given twice"),
        (["run", "swiglu", "--shape", "M=²"], "not NAME=NUMBER"),
        (["explain", "swiglu", "--rows", "0"], "from 1 to"),
        (["explain", "swiglu", "--columns", "-5"], "from 1 to"),
        (["compile", "swiglu", "-o", ""], "directory is empty"),
    ],
)
def test_a_wrong_option_is_told_as_json_too(run, arguments, message):
    code, out, err = run(*arguments)
    assert code == 2 and out == "" and message in err and "usage: codalang" in err
    code, out, err = run(*arguments, "--json")
    result = json.loads(out)
    assert code == 2 and message in err and not result["ok"] and message in result["errors"][0]["message"]


def test_more_than_fits_in_memory(run):
    code, out, err = run("run", "swiglu", "--shape", "M=2147483647,N=2147483646,K=0", "--json")
    (error,) = json.loads(out)["errors"]
    assert code == 1 and error["argument"] == "--shape" and "not enough memory for M = 2147483647" in err


def test_explain_takes_columns_that_the_program_takes(run, file):
    path = file(GROUPS)
    assert run("explain", path)[0] == run("explain", path, "--columns", "192")[0] == 0
    code, _, err = run("explain", path, "--columns", "96")
    assert code == 1 and "multiple of 64 columns, got 96" in err
    assert "multiple of 2 columns" in run("explain", "swiglu", "--columns", "7")[2]


@pytest.mark.parametrize("command", [["compile"], ["grad"], ["emit"], ["explain"], ["run"]])
def test_a_file_without_epilogues(run, file, command):
    path = file("fn double(x) = x * 2\n")
    code, out, err = run(*command, path)
    assert (code, out) == (1, "") and f"{path} defines no epilogues" in err
    assert run("check", path)[0] == 0


def test_an_empty_name_of_a_program(run):
    for command in ("check", "grad", "run"):
        code, out, err = run(command, "")
        assert (code, out) == (1, "") and "empty" in err


def test_fmt_as_json_is_one_object(run, file):
    path = file(UGLY)
    for option in ("--check", "--diff"):
        code, out, _ = run("fmt", option, "--json", path)
        result = json.loads(out)
        assert code == 1 and result["ok"] is False and result["changed"] == [str(path)] and path.read_text() == UGLY
        assert [s["text"].startswith("--- ") for s in result["shown"]] == [True] * (option == "--diff")
    code, out, _ = run("fmt", "--json", "-", stdin=UGLY)
    assert code == 0 and json.loads(out)["shown"][0]["text"].startswith("# kept\n")
    assert json.loads(run("fmt", "--check", "--json", file(GOOD, "good.coda"))[1])["ok"] is True


def _shell(command: str, **environment: str) -> subprocess.CompletedProcess[bytes]:
    """A shell's command line in which `$coda` is the command."""
    environment = {**os.environ, "coda": f"{sys.executable} -W ignore -m codalang", **environment}
    done = subprocess.run(["sh", "-c", command], cwd=ROOT, env=environment, capture_output=True, input=b"")
    assert b"Traceback" not in done.stderr and b"Exception ignored" not in done.stderr, done.stderr.decode()
    return done


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="the system has no full device")
@pytest.mark.parametrize("options", ["", " --json"])
def test_output_that_cannot_be_written(options):
    for command in ("grad swiglu", "check swiglu"):
        full = _shell(f"$coda {command}{options} > /dev/full")
        assert full.returncode == 1 and b"cannot write to standard output: No space left" in full.stderr
        closed = _shell(f"$coda {command}{options} >&-")
        assert closed.returncode == 1 and b"cannot write to standard output" in closed.stderr


def test_closed_streams():
    assert b"standard input: it is closed" in _shell("$coda check - <&-").stderr
    done = _shell("$coda check no/such.coda --json 2>&-")
    assert done.returncode == 1 and json.loads(done.stdout)["ok"] is False


def test_characters_that_the_encoding_lacks(tmp_path):
    path = tmp_path / "é.coda"
    path.write_text("# é\nepilogue f(acc: tile[M, N]) {\n    store y: tile[M, N] = acc\n}\n", encoding="utf-8")
    done = _shell(f"$coda check '{path}'", PYTHONIOENCODING="ascii")
    assert done.returncode == 0 and b"\\xe9.coda: ok" in done.stdout
    done = _shell(f"$coda fmt - < '{path}'", PYTHONIOENCODING="ascii")
    assert done.returncode == 0 and done.stdout == path.read_bytes()
    assert json.loads(_shell(f"$coda check '{path}' --json", PYTHONIOENCODING="ascii").stdout)["ok"] is True

"""The command line on programs: check, fmt, grad, explain, graph, emit, compile, run."""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

import codalang
from codalang.cli.programs import load_program
from codalang.cli.sizes import TYPICAL, all_sizes

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = sorted((ROOT / "examples").glob("*.coda"))
MLP, GELU, LLAMA = (ROOT / "examples" / f"{name}.coda" for name in ("mlp", "mlp_gelu", "llama_block"))
SIZES = {"T": 48, "H": 24, "D": 32, "F": 40}
DIMS = ["--dims", *(f"{name}={size}" for name, size in SIZES.items())]
SVG = "{http://www.w3.org/2000/svg}"

SMALL = """\
epilogue scaled(acc: tile[M, N], r: col[M]) {
    store y: tile[M, N] = acc * r
}

program chain(x: [T, D], w: [D, D], s: [T]) {
    r = s * s + 1
    y = scaled(x @ w.T, r = r)
    z = y @ w
    return z
}
"""


@pytest.fixture
def small(tmp_path):
    path = tmp_path / "small.coda"
    path.write_text(SMALL)
    return path


@pytest.fixture
def rechecked(run, tmp_path):
    """Whether a text is a file that is right."""

    def call(text: str) -> bool:
        path = tmp_path / "again.coda"
        path.write_text(text)
        return run("check", path)[0] == 0

    return call


# ---- check, fmt, grad ------------------------------------------------------------------------------------------------


def test_check_counts_both(run, small):
    assert run("check", small) == (0, f"{small}: ok, 1 epilogue, 1 program\n", "")
    _, out, _ = run("check", "--json", small)
    (checked,) = json.loads(out)["programs"]
    assert (checked["epilogues"], checked["programs"]) == (["scaled"], ["chain"])


def test_check_points_at_what_is_wrong(run, small):
    small.write_text(SMALL.replace("w: [D, D]", "w: [E, F]"))
    code, _, err = run("check", small)
    assert code == 1 and f"{small}:7:" in err and "scaled(x @ w.T, r = r)" in err and "^" in err


def test_examples_are_right_and_laid_out(run):
    assert run("check", *EXAMPLES)[0] == 0
    assert run("fmt", "--check", *EXAMPLES)[0] == 0


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
@pytest.mark.parametrize("forward", [[], ["--forward"]], ids=["backward", "both"])
def test_grad_of_a_file_is_a_file(run, rechecked, path, forward):
    """Of all its programs, though their epilogues share names."""
    code, out, _ = run("grad", path, *forward)
    assert code == 0 and rechecked(out)
    for name in load_program(str(path)).programs:
        assert f"program {name}_backward(" in out
        assert (f"program {name}(" in out) == bool(forward)


def test_grad_is_what_modules_derive(run):
    names = "y0,x0,w0,w1,w2,g0,eps"
    assert run("grad", MLP, "--wrt", names)[1] == codalang.load(MLP).mlp.backward.source


def test_grad_leaves_defaults_out(run):
    assert "d_eps" not in run("grad", MLP)[1] and "d_eps" in run("grad", MLP, "--wrt", "eps")[1]


def test_grad_of_some(run, small):
    code, out, _ = run("grad", small, "chain", "--wrt", "s", "--json")
    (derivative,) = json.loads(out)["derivatives"]
    assert code == 0 and derivative["gradients"] == {"s": "d_s"} and "d_w" not in derivative["backward"]
    assert derivative["cotangents"] == {"z": "d_z"}


def test_grad_of_an_epilogue_beside_programs(run, small):
    out = run("grad", small, "scaled")[1]
    assert out.startswith("epilogue scaled_backward(") and "program" not in out


def test_names_that_are_not_there(run, small):
    for name, hint in (("chian", "did you mean `chain`?"), ("scaaled", "did you mean `scaled`?")):
        code, _, err = run("grad", small, name)
        assert code == 1 and "it defines chain, scaled" in err and hint in err
    code, _, err = run("graph", small, "scaled")
    assert code == 1 and "defines no program `scaled`; it defines chain" in err
    code, _, err = run("graph", "swiglu")
    assert code == 1 and "defines no programs" in err and "only programs are drawn" in err
    code, _, err = run("graph", LLAMA)
    assert code == 1 and "defines 6 programs" in err and "llama_block" in err


# ---- explain ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def report(run):
    code, out, _ = run("explain", MLP, *DIMS, "--json")
    (found,) = json.loads(out)["programs"]
    assert code == 0
    return found


def test_explain_counts_kernels_and_bytes(report):
    """By hand: 3 matmuls forward and 6 backward; kept are x1, h1, activation, gate/up projection, and two vectors."""
    t, h, d, f = SIZES.values()
    forward, backward = report["forward"], report["backward"]
    assert forward["kernels"] == {"matmul": 3, "hosted": 0, "vector": 1}
    assert backward["kernels"] == {"matmul": 6, "hosted": 0, "vector": 1}
    assert forward["operations"] == 2 * t * (h * d + 3 * f * d)
    assert backward["operations"] == 2 * forward["operations"]
    kept = {value["value"]: (value["bytes"], value["how"]) for value in report["kept"]["values"]}
    assert kept == {
        "x1": (2 * t * d, "made"),
        "h1": (2 * t * d, "made"),
        "ss1": (4 * t, "made"),
        "r1": (4 * t, "made"),
        "y1": (2 * t * f, "made"),
        "saved_acc_y1": (4 * t * f, "saved"),
    }
    assert report["kept"]["bytes"] == sum(size for size, _ in kept.values())


def test_explain_lists_what_each_statement_moves(report):
    t, h, d, _ = SIZES.values()
    first, step, *_ = report["forward"]["statements"]
    assert first["text"] == "(x1, h1, ss1) = residual_rms(y0 @ w0.T, res = x0, gamma = g0)"
    assert first["extents"] == [t, d, h]
    assert first["operands"] == {"y0": 2 * t * h, "w0": 2 * d * h}
    assert first["loads"] == {"x0": 2 * t * d, "g0": 2 * d}
    assert first["stores"] == {"x1": 2 * t * d, "h1": 2 * t * d, "ss1": 4 * t}
    assert first["primitives"] == {
        "map": 3, "tile load": 1, "vector load": 1, "tile store": 2, "tile reduction": 1
    }  # fmt: skip
    assert (step["kind"], step["text"]) == ("vector", "r1 = rsqrt(ss1 / D + eps)")
    hosts = [s["host"] for s in report["backward"]["statements"] if s["epilogue"] and s["kind"] == "matmul"]
    assert hosts == ["d_x2 @ w2", "d_acc_y1 @ w1"]  # each derived epilogue sits on the matmul of its cotangent


def test_explain_without_sizes_gives_polynomials(run, report):
    """Which are the numbers where the sizes are put in."""
    _, out, _ = run("explain", MLP, "--json")
    (symbolic,) = json.loads(out)["programs"]
    checked = 0

    def same(ours, theirs) -> None:
        nonlocal checked
        if isinstance(ours, dict):
            assert ours.keys() == theirs.keys()
            for key in ours:
                same(ours[key], theirs[key])
        elif isinstance(ours, list):
            for pair in zip(ours, theirs, strict=True):
                same(*pair)
        elif isinstance(ours, str) and isinstance(theirs, int):
            assert eval(ours, dict(SIZES)) == theirs
            checked += 1
        else:
            assert ours == theirs

    same({**symbolic, "sizes": report["sizes"]}, report)
    assert checked > 60


def test_explain_in_words(run):
    code, out, _ = run("explain", MLP, *DIMS)
    assert code == 0 and out.startswith("mlp: T = 48, H = 24, D = 32, F = 40\n")
    assert "  forward `mlp`: 3 matmuls, 1 vector step; " in out
    assert re.search(r"saved_acc_y1 +7.5 KiB  an extra store of the forward", out)
    assert "loads    x0 (3 KiB), g0 (64 B)" in out
    assert "  backward `mlp_backward`: 6 matmuls, 1 vector step; " in out


def test_explain_of_what_has_no_backward(run, tmp_path):
    path = tmp_path / "counting.coda"
    path.write_text(
        "state positives(x) {\n    carry n = 0\n    update { return n + where(x > 0, 1, 0) }\n"
        "    merge { return a_n + b_n }\n    finalize (n) = (n)\n}\n\n"
        "epilogue count(acc: tile[M, N]) {\n    state n: col[M] = positives(acc)\n}\n\n"
        "program counted(x: [T, D], w: [N, D]) {\n    n = count(x @ w.T)\n    return n\n}\n"
    )
    code, out, _ = run("explain", path)
    assert code == 0 and "1 matmul" in out and "no backward: " in out


def test_sizes_that_cannot_be(run, small):
    for command in ("explain", "graph", "run", "emit"):
        code, _, err = run(command, small, "--dims", "Q=4")
        assert code == 1 and "`chain` has no dimension `Q`; its dimensions are T, D" in err
    code, _, err = run("explain", small, "--dims", "T=4", "D=")
    assert code == 2 and "NAME=NUMBER" in err
    code, _, err = run("explain", small, "--dims", "T=4", "D")  # what follows the sizes is a name
    assert code == 1 and "defines no program or epilogue `D`" in err
    code, _, err = run("explain", small, "--dims", "T=4", "T=5")
    assert code == 2 and "T is given twice" in err
    assert run("explain", "swiglu", "--dims", "M=4")[0] == 1


def test_usual_sizes():
    programs = load_program(str(LLAMA)).programs
    small, large = TYPICAL
    assert all_sizes(programs["llama_block"], {"F": 7}, TYPICAL) == {
        "T": large, "P": small, "Q": small, "D": large, "F": 7, "KV": small
    }  # fmt: skip


# ---- graph -----------------------------------------------------------------------------------------------------------


def drawn(text: str) -> tuple[list[str], list[str]]:
    """The classes of the rectangles that have a text, and all texts."""
    root = ElementTree.fromstring(text)
    boxes = [group.find(f"{SVG}rect") for group in root.iter(f"{SVG}g") if group.find(f"{SVG}title") is not None]
    return [box.get("class") for box in boxes if box is not None], [
        "".join(t.itertext()) for t in root.iter(f"{SVG}text")
    ]


def test_graph(run):
    code, out, _ = run("graph", MLP)
    classes, texts = drawn(out)
    assert code == 0
    assert classes.count("matmul") == 3 and classes.count("vector") == 1 and classes.count("chip weight") == 6
    assert classes.count("chip result") == 1 and not any("kept" in c for c in classes)
    for text in ("y0 @ w0.T", "residual_rms", "scaled_swiglu", "r1 = rsqrt(ss1 / D + eps)", "x2  2*D*T B"):
        assert text in texts


def test_graph_of_both_passes(run, tmp_path):
    path = tmp_path / "mlp.svg"
    assert run("graph", MLP, "mlp", "--backward", *DIMS, "-o", path) == (0, "", "")
    classes, texts = drawn(path.read_text())
    assert classes.count("matmul") == 9 and classes.count("vector") == 2
    # x1 h1 ss1 r1 y1 saved_acc_y1, in the forward and again in the backward
    assert classes.count("chip kept") == 12
    assert "mlp_backward" in texts and "saved_acc_y1  7.5 KiB" in texts and "d_w1  5 KiB" in texts
    assert any("kept for the backward" in text and "T = 48" in text for text in texts)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_every_program_is_drawn(run, path):
    for name, program in load_program(str(path)).programs.items():
        code, out, _ = run("graph", path, name, "--backward")
        _, texts = drawn(out)
        assert code == 0
        names = [param.name for param in program.params if param.default is None]
        names += [name for statement in program.statements for name in statement.makes]
        for value in names:
            assert any(text.startswith(f"{value}  ") for text in texts), value


def test_graph_as_json(run, small, tmp_path):
    code, out, _ = run("graph", small, "--json")
    assert code == 0 and json.loads(out)["svg"].startswith("<svg")
    code, _, err = run("graph", small, "-o", tmp_path / "no" / "where.svg")
    assert code == 1 and "cannot write" in err


# ---- emit, compile, run ----------------------------------------------------------------------------------------------


def test_emit_ir_and_backward(run, rechecked, small):
    _, out, _ = run("emit", small, "--stage", "ir", "--backward")
    assert "program chain(" in out and "program chain_backward(" in out
    assert run("emit", small, "--stage", "backward")[1] == run("grad", small)[1]


def test_emit_cutedsl_of_each_kernel(run):
    code, out, _ = run("emit", GELU, "mlp_gelu", "--backward", "--json")
    stages = json.loads(out)["stages"]
    names = [stage["name"] for stage in stages]
    assert code == 0 and {"bias_gelu", "bias_residual", "bias_gelu_backward"} <= set(names)
    for stage in stages:
        compile(stage["text"], stage["name"], "exec")


def test_kernels_are_those_of_the_sizes(run):
    """A size that TMA cannot address, or a pair axis, makes another kernel; and nothing is remembered from before."""
    before = run("emit", GELU, "mlp_gelu", "--dims", "T=256")[1]
    assert run("emit", GELU, "mlp_gelu", "--dims", "T=256")[1] == before


def test_compile_each_kernel(run, small, tmp_path):
    code, out, _ = run("compile", small, "-o", tmp_path / "objects", "--json")
    objects = json.loads(out)["objects"]
    assert code == 0 and [Path(o["object"]).name for o in objects] == [
        "chain.vector.o", "chain.scaled.o", "chain.matmul.o"
    ]  # fmt: skip
    for made in objects:
        assert Path(made["object"]).read_bytes()[:4] == b"\x7fELF" and made["spill_bytes"] == 0


def test_compile_says_what_is_wrong_with_a_kernel(run, small, tmp_path, monkeypatch):
    from codalang.lower import compile as compiler

    def compiled(spec, path, **_):
        path.write_bytes(b"object")
        if spec.epilogue.name == "scaled":
            return compiler.Report(168, 24, None)
        return compiler.Report(168, 0, "C7515: serialized" if spec.operand is not None else None)

    monkeypatch.setattr(compiler, "compile_object", compiled)
    code, out, err = run("compile", small, "-o", tmp_path)
    assert code == 1 and out.count(".o: sm_90a") == 3
    spilled, serialized = err.strip().split("\n")
    assert "`scaled`" in spilled and "chain.scaled.o" in spilled and "spills 24 bytes of registers" in spilled
    assert "chain.matmul.o" in serialized and "C7515: serialized" in serialized
    code, out, _ = run("compile", small, "-o", tmp_path, "--json")
    assert code == 1 and [e["type"] for e in json.loads(out)["errors"]] == ["CodaCompileError"] * 2
    help_ = run("compile", "--help")[1]
    assert "spills" in help_ and "serializes" in help_


def test_where_nothing_is_launched_that_is_said(run, tmp_path):
    line = "mlp: nothing is launched at T = 0, H = 4096, D = 4096, F = 4096\n"
    assert run("compile", MLP, "--dims", "T=0", "-o", tmp_path) == (0, line, "")
    assert run("emit", MLP, "--dims", "T=0") == (0, "", line)
    assert json.loads(run("compile", MLP, "--dims", "T=0", "-o", tmp_path, "--json")[1])["idle"] == [line.strip()]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (["grad", GELU, "mlp_gelu", "--forward"], ["grad", GELU, "--forward", "mlp_gelu"]),
        (["grad", MLP, "mlp", "--wrt", "x0"], ["grad", "--wrt", "x0", MLP, "mlp"]),
        (["explain", MLP, "mlp", "--dims", "T=8", "D=4"], ["explain", MLP, "--dims", "T=8", "D=4", "mlp"]),
        (["explain", MLP, "--dims", "T=8"], ["explain", "--dims", "T=8", MLP]),
        (["explain", MLP, "--dims", "T=8"], ["explain", "--dim", "T=8", "--", MLP]),
        (["explain", MLP, "mlp", "--dims", "T=8", "--json"], ["explain", "--json", MLP, "--dims=T=8", "mlp"]),
        (["check", MLP, GELU, "--json"], ["check", MLP, "--json", GELU]),
    ],
)
def test_options_may_stand_anywhere(run, one, other):
    assert run(*one)[0] == 0
    assert run(*one) == run(*other)


def test_a_size_without_a_number_is_told(run):
    code, _, err = run("explain", MLP, "--dims", "T", "D=4")
    assert code == 2 and "`T` is not NAME=NUMBER" in err
    code, _, err = run("run", MLP, "--seed", "x")
    assert code == 2 and "--seed: `x` is no whole number" in err


@pytest.mark.parametrize("option", ["--rows", "--columns", "--depth", "--budget"])
def test_options_of_epilogues_are_refused_for_programs(run, option):
    code, _, err = run("explain", MLP, option, "4")
    assert code == 1 and f"{option} is of an epilogue; `mlp` is a program" in err
    assert run("explain", MLP, "residual", option, "8")[0] == 0


@pytest.mark.parametrize("dtype", ["bf16", "f16", "f32", "f64"])
def test_run(run, dtype):
    code, out, _ = run("run", MLP, "--backward", "--dtype", dtype, "--device", "cpu", "--json")
    result = json.loads(out)
    names = [row["name"] for row in result["results"]]
    assert code == 0 and result["ok"] and names == ["x2", "d_y0", "d_x0", "d_w0", "d_w1", "d_w2", "d_g0"]
    bound = {"bf16": 2e-2, "f16": 3e-3, "f32": 1e-6, "f64": 1e-14}[dtype]
    assert all(0 <= row["error"] <= bound for row in result["results"])


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_run_every_program(run, path):
    for name in load_program(str(path)).programs:
        code, out, _ = run("run", path, name, "--backward", "--dtype", "f64", "--device", "cpu")
        assert code == 0, out


def test_run_takes_sizes(run):
    code, out, _ = run("run", MLP, "--dims", "T=5", "D=8", "--device", "cpu", "--json")
    result = json.loads(out)
    assert code == 0 and result["shape"] == {"T": 5, "H": 24, "D": 8, "F": 24}
    assert result["results"][0]["shape"] == [5, 8]


def test_run_needs_a_name_where_there_are_several(run):
    code, _, err = run("run", LLAMA)
    assert code == 1 and "defines 6 programs" in err


def test_what_is_timed(run, monkeypatch):
    """Each way runs; only a GPU has times to tell."""
    from codalang.cli import trial_program

    done: list[str] = []

    def measure(ways) -> dict[str, float]:
        for name, way in ways.items():
            way()
            done.append(name)
        return dict.fromkeys(ways, 1.0)

    monkeypatch.setattr(trial_program, "measure", measure)
    module = load_program(str(MLP))
    options = argparse.Namespace(dtype="f32", seed=0, backward=True)
    trial = trial_program.Trial(module, module.programs["mlp"], SIZES, options, "cpu")
    assert [entry["way"] for entry in trial.times()] == done
    assert done == ["codalang", "cublas (matmuls alone)", "codalang, both passes", "cublas, both passes"]

"""The derived Llama block by numbers: kernels, activation-sized loads and stores of each, and what is kept.

Written out by hand from what reverse fusion can reach; more is a regression.  Each kind of tensor has its own size.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from codalang.autodiff import derive_program
from codalang.cli.explain_program import explain_program
from codalang.cli.programs import load_program

EXAMPLES = Path(__file__).parents[1] / "examples"
SIZES = {"T": 1024, "D": 64, "H": 80, "F": 176, "R": 56}
T, D, H, F, R = SIZES.values()
WEIGHTS = ["y", "x", "w_o", "g_mlp", "w_gate_up", "w_down", "g_attention", "w_qkv"]
# bf16 bytes of a matrix of T rows
STREAM, HIDDEN, GATE_UP, QKV = 2 * T * D, 2 * T * F, 4 * T * F, 4 * T * R


@pytest.fixture(scope="module")
def report() -> dict:
    program = load_program(str(EXAMPLES / "llama_block.coda")).programs["llama_block_fused"]
    return explain_program(program, derive_program(program, wrt=WEIGHTS), SIZES, "bf16")


def moved(part: dict) -> list[tuple[str, dict[str, int], dict[str, int]]]:
    """(epilogue or matmul, large loads besides the operands, large stores) of each kernel that is no vector step."""
    large = 1024 * 64
    return [
        (
            statement["epilogue"] or statement["text"],
            {name: size for name, size in statement["loads"].items() if size >= large},
            {name: size for name, size in statement["stores"].items() if size >= large},
        )
        for statement in part["statements"]
        if statement["kind"] != "vector"
    ]


def test_forward(report: dict) -> None:
    """Beside four matmuls: the residual is read twice, and one tensor is stored for the backward alone."""
    assert report["forward"]["kernels"] == {"matmul": 4, "hosted": 0, "vector": 2}
    assert moved(report["forward"]) == [
        ("residual_rms", {"x": STREAM}, {"x1": STREAM, "h1": STREAM}),
        ("scaled_swiglu", {}, {"a": HIDDEN, "saved_acc_a": GATE_UP}),
        ("residual_rms", {"x1": STREAM}, {"x2": STREAM, "h2": STREAM}),
        ("scaled_rope", {}, {"qkv": QKV}),
    ]


def test_backward(report: dict) -> None:
    """Eight matmuls, and one kernel for the cotangent that comes from attention; no kernel of a norm."""
    assert report["backward"]["kernels"] == {"matmul": 8, "hosted": 1, "vector": 2}
    assert moved(report["backward"]) == [
        ("scaled_rope_backward", {"d_qkv": QKV, "qkv": QKV}, {"d_acc_qkv": QKV}),
        ("d_w_qkv = d_acc_qkv.T @ h2", {}, {}),
        ("residual_rms_backward", {"d_x2": STREAM, "x2": STREAM}, {"d_x1": STREAM}),
        ("d_w_down = d_x1.T @ a", {}, {}),
        ("scaled_swiglu_backward", {"saved_acc_a": GATE_UP}, {"d_acc_a": GATE_UP}),
        ("d_w_gate_up = d_acc_a.T @ h1", {}, {}),
        ("residual_rms_backward", {"d_x1": STREAM, "x1": STREAM}, {"d_x": STREAM}),
        ("d_w_o = d_x.T @ y", {}, {}),
        ("d_y = d_x @ w_o", {}, {"d_y": 2 * T * H}),
    ]


def test_kept(report: dict) -> None:
    """Both residual streams and their weighted copies, gate/up and its activation, qkv, and four vectors."""
    kept = {value["value"]: value["bytes"] for value in report["kept"]["values"]}
    vectors = dict.fromkeys(("ss1", "r1", "ss2", "r2"), 4 * T)
    assert kept == {
        "x1": STREAM, "h1": STREAM, "a": HIDDEN, "saved_acc_a": GATE_UP, "x2": STREAM, "h2": STREAM, "qkv": QKV
    } | vectors  # fmt: skip
    assert [value["value"] for value in report["kept"]["values"] if value["how"] == "saved"] == ["saved_acc_a"]


def test_each_derived_epilogue_sits_on_the_matmul_of_its_cotangent(report: dict) -> None:
    hosts = {s["epilogue"]: s["host"] for s in report["backward"]["statements"] if s["kind"] != "vector"}
    assert hosts["scaled_rope_backward"] == "d_qkv"
    assert hosts["scaled_swiglu_backward"] == "d_x1 @ w_down"
    rms = [s["host"] for s in report["backward"]["statements"] if (s["epilogue"] or "").startswith("residual_rms")]
    assert rms == ["d_acc_qkv @ w_qkv", "d_acc_a @ w_gate_up"]

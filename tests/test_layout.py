"""The layered layout: edges point down, and nothing lies on anything else, whatever the graph."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from codalang.cli.layout import Layout, arrange

GAP = 10.0
# Coordinates are sums of a few hundred numbers.
SLACK = 1e-6


@st.composite
def graphs(draw: st.DrawFn) -> tuple[dict[str, tuple[float, float]], list[tuple[str, str]]]:
    """Boxes of random sizes, and edges from earlier ones to later ones."""
    count = draw(st.integers(0, 14))
    names = [f"b{i}" for i in range(count)]
    size = st.floats(1, 200)
    boxes = {name: (draw(size), draw(size)) for name in names}
    pairs = [(a, b) for i, a in enumerate(names) for b in names[i + 1 :]]
    return boxes, draw(st.lists(st.sampled_from(pairs), max_size=24)) if pairs else []


def edges_of(layout: Layout, boxes: dict[str, tuple[float, float]], name: str) -> tuple[float, float, float, float]:
    """Left, right, top and bottom of a box."""
    (x, y), (width, height) = layout.centres[name], boxes[name]
    return x - width / 2, x + width / 2, y - height / 2, y + height / 2


@given(graphs())
def test_boxes_stand_apart_and_inside(graph) -> None:
    boxes, edges = graph
    layout = arrange(boxes, edges, gap=GAP)
    assert layout.centres.keys() == boxes.keys()
    placed = [edges_of(layout, boxes, name) for name in boxes]
    for left, right, top, bottom in placed:
        assert -SLACK <= left and right <= layout.width + SLACK
        assert -SLACK <= top and bottom <= layout.height + SLACK
    for i, (left, right, top, bottom) in enumerate(placed):
        for other_left, other_right, other_top, other_bottom in placed[i + 1 :]:
            beside = right + GAP <= other_left + SLACK or other_right + GAP <= left + SLACK
            assert beside or bottom <= other_top + SLACK or other_bottom <= top + SLACK


@given(graphs())
def test_edges_lead_down_from_box_to_box(graph) -> None:
    boxes, edges = graph
    layout = arrange(boxes, edges, gap=GAP)
    assert layout.routes.keys() == set(edges)
    for (tail, head), route in layout.routes.items():
        left, right, _, bottom = edges_of(layout, boxes, tail)
        assert left <= route[0].x <= right and abs(route[0].y - bottom) <= SLACK
        left, right, top, _ = edges_of(layout, boxes, head)
        assert left <= route[-1].x <= right and abs(route[-1].y - top) <= SLACK
        assert all(there.y > here.y - SLACK for here, there in pairwise(route))


@given(graphs())
def test_long_edges_pass_beside_boxes(graph) -> None:
    """Where an edge passes a layer it goes straight down, outside every box there."""
    boxes, edges = graph
    layout = arrange(boxes, edges, gap=GAP)
    for route in layout.routes.values():
        for here, there in zip(route[1:-1:2], route[2:-1:2], strict=True):
            assert here.x == there.x
            for name in boxes:
                left, right, top, bottom = edges_of(layout, boxes, name)
                outside = here.x <= left + SLACK or here.x >= right - SLACK
                assert outside or bottom <= here.y + SLACK or top >= there.y - SLACK


def test_a_chain_is_straight() -> None:
    boxes = {name: (40.0, 20.0) for name in "abcd"}
    layout = arrange(boxes, [("a", "b"), ("b", "c"), ("c", "d")])
    assert len({x for x, _ in layout.centres.values()}) == 1


def test_a_source_stands_just_above_its_use() -> None:
    boxes = {name: (40.0, 20.0) for name in "abcwd"}
    layout = arrange(boxes, [("a", "b"), ("b", "c"), ("w", "d"), ("c", "d")])
    assert layout.centres["w"].y == layout.centres["c"].y


def test_crossings_that_need_not_be_are_not() -> None:
    boxes = {name: (40.0, 20.0) for name in ("a", "b", "c", "x", "y", "z")}
    layout = arrange(boxes, [("a", "z"), ("b", "y"), ("c", "x")])
    upper = sorted("abc", key=lambda name: layout.centres[name].x)
    lower = sorted("xyz", key=lambda name: layout.centres[name].x)
    assert [dict(a="z", b="y", c="x")[name] for name in upper] == lower

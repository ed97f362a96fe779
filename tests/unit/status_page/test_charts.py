from __future__ import annotations

import re
import xml.etree.ElementTree as ET

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2pdiloco_node.status_page.charts import HEIGHT, WIDTH, line_chart

finite = st.floats(-1e6, 1e6, allow_nan=False)


@given(st.lists(finite, min_size=1, max_size=50), st.lists(st.integers(0, 100), max_size=5))
def test_any_curve_is_well_formed_and_stays_inside(ys: list[float], marks: list[int]) -> None:
    svg = ET.fromstring(line_chart(range(1, len(ys) + 1), ys, name="loss", marks=marks))
    (line,) = svg.findall("polyline")
    points = [tuple(map(float, p.split(","))) for p in line.attrib["points"].split()]
    assert len(points) == len(ys)
    assert all(0 <= x <= WIDTH and 0 <= y <= HEIGHT for x, y in points)


def test_lower_is_lower_and_later_is_right() -> None:
    svg = ET.fromstring(line_chart([0, 10, 20], [5.5, 3.0, 2.0], name="Evaluation loss"))
    points = [p.split(",") for p in svg.find("polyline").attrib["points"].split()]
    assert sorted(points, key=lambda p: float(p[0])) == points
    assert sorted(points, key=lambda p: float(p[1])) == points
    assert svg.attrib["aria-label"] == (
        "Evaluation loss: from 5.500 at version 0 to 2.000 at version 20, lowest 2.000"
    )


def test_marks_stand_where_membership_changed() -> None:
    svg = ET.fromstring(line_chart([0, 100], [3.0, 2.0], name="loss", marks=[50, 900]))
    (mark,) = [e for e in svg.findall("line") if e.attrib["class"] == "mark"]
    xs = [float(p.split(",")[0]) for p in svg.find("polyline").attrib["points"].split()]
    assert float(mark.attrib["x1"]) == pytest.approx(sum(xs) / 2)


def test_an_empty_curve_says_so() -> None:
    svg = ET.fromstring(line_chart([], [], name="Training loss"))
    assert "".join(svg.itertext()) == "no data yet"
    assert svg.attrib["aria-label"] == "Training loss: no data yet"


def test_axis_numbers_do_not_repeat() -> None:
    svg = str(line_chart([0, 1], [2.0001, 2.0004], name="loss"))
    labels = re.findall(r'class="y"[^>]*>([^<]*)<', svg)
    assert len(set(labels)) == len(labels) >= 2


def test_there_is_no_version_one_and_a_half() -> None:
    """The axis of two versions said 0 0 1 2 2."""
    svg = ET.fromstring(line_chart([0, 1, 2], [5.0, 4.0, 3.0], name="loss"))
    assert [e.text for e in svg.findall("text") if e.attrib["class"] == "x"] == ["0", "1", "2"]

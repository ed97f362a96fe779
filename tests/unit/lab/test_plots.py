"""Pictures: valid files that name every arm, and the same for the same figures."""

from __future__ import annotations

import math
from pathlib import Path
from types import ModuleType
from xml.etree import ElementTree as ET

import msgspec
import pytest

from p2pdiloco.errors import OperatorError
from p2pdiloco.sim.lab.experiment import Experiment, Model, Outer
from p2pdiloco.sim.lab.result import Point
from p2pdiloco_node.lab.plots import check_plot, draw
from p2pdiloco_node.lab.study import Study

pytest.importorskip("matplotlib")
ARMS = (Experiment(name="barrier & co", outer=Outer(policy="barrier")), Experiment(name="quorum"))
STUDY = Study("pair", "Does nobody wait?", (1, 2, 3), ARMS)


def test_an_svg_names_each_arm_and_both_axes(tmp_path: Path, fake: ModuleType) -> None:
    results = [fake.result(arm, seed) for arm in ARMS for seed in STUDY.seeds]
    draw(tmp_path / "a.svg", STUDY, results)
    text = " ".join(e.text or "" for e in ET.parse(tmp_path / "a.svg").iter())
    for words in (
        "barrier & co",
        "quorum",
        "nats per token",
        "millions",
        "virtual time",
        "loss at the end",
        "arms, in the order of the legend",
        "Does nobody wait?",
    ):
        assert words in text
    draw(tmp_path / "b.svg", STUDY, results)
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()


def test_where_traffic_differs_the_ends_are_drawn_against_it(tmp_path: Path, fake: ModuleType) -> None:
    """The curve of loss against bytes of a study of codecs."""
    much, little = fake.result(ARMS[0], 1), fake.result(ARMS[1], 1)
    little = msgspec.structs.replace(little, bytes_up=much.bytes_up / 80)
    draw(tmp_path / "a.svg", STUDY, [much, little])
    text = " ".join(e.text or "" for e in ET.parse(tmp_path / "a.svg").iter())
    assert "sent by a node, MB" in text
    assert "in the order of the legend" not in text


def test_a_png_is_one(tmp_path: Path, fake: ModuleType) -> None:
    draw(tmp_path / "a.png", STUDY, [fake.result(ARMS[0], 1)])
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def test_an_arm_that_ran_away_leaves_the_others_readable(tmp_path: Path, fake: ModuleType) -> None:
    good = fake.result(ARMS[0], 1)
    wild = fake.result(ARMS[1], 1)
    wild = msgspec.structs.replace(
        wild, curve=(*wild.curve[:3], Point(10**6, 1.0, 9, math.nan), Point(2 * 10**6, 2.0, 9, math.inf))
    )
    draw(tmp_path / "a.svg", STUDY, [good, wild])
    ET.parse(tmp_path / "a.svg")


def test_what_cannot_be_drawn_is_said_before_anything_is_run(tmp_path: Path) -> None:
    with pytest.raises(OperatorError, match=r"\.svg or \.png"):
        check_plot(tmp_path / "a.pdf", STUDY)
    nothing = Study("s", "", (1,), (Experiment(model=Model(kind="none")),))
    with pytest.raises(OperatorError, match="has none"):
        check_plot(tmp_path / "a.svg", nothing)
    with pytest.raises(OperatorError, match="no run has a curve"):
        draw(tmp_path / "a.svg", STUDY, [])
    check_plot(tmp_path / "a.svg", STUDY)


def test_names_are_no_formulas_and_none_is_hidden(tmp_path: Path, fake: ModuleType) -> None:
    names = (r"eta $\frac{1$", "$x_{$", r"\$5$", "_hidden", "\U0001f419")
    arms = tuple(Experiment(name=name) for name in names)
    study = Study("s", r"Is $\frac{1}$ more than _?", (1,), arms)
    results = [fake.result(arm, 1) for arm in arms]
    draw(tmp_path / "a.svg", study, results)
    texts = [(e.text or "").strip() for e in ET.parse(tmp_path / "a.svg").iter()]
    for words in (*names, study.question):
        assert words in texts
    draw(tmp_path / "a.png", study, results)


def test_a_picture_that_cannot_be_written_is_said(tmp_path: Path, fake: ModuleType) -> None:
    with pytest.raises(OperatorError, match="cannot be written"):
        draw(tmp_path / "nowhere" / "a.svg", STUDY, [fake.result(ARMS[0], 1)])

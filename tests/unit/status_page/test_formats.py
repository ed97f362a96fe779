from __future__ import annotations

import pytest

from p2pdiloco_node.status_page import formats as f


@pytest.mark.parametrize("nothing", [None, float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("name", ["count", "big", "size", "number", "times", "duration", "ago"])
def test_what_is_not_known_is_a_dash(name: str, nothing: float | None) -> None:
    assert getattr(f, name)(nothing) == "–"


@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        (f.count(1234567), "1,234,567"),
        (f.big(0), "0"),
        (f.big(999), "999"),
        (f.big(12_345_678), "12.3 M"),
        (f.big(999_960), "1.00 M"),
        (f.size(1_350_000), "1.35 MB"),
        (f.size(17), "17 B"),
        (f.size(19_000_000_000), "19.0 GB"),
        (f.number(2.31449), "2.314"),
        (f.number(1e9), "1.00e+09"),
        (f.times(172.4), "172×"),
        (f.times(3.04), "3.0×"),
        (f.percent(0.99999), "99.9 %"),
        (f.percent(1.0), "100 %"),
        (f.duration(59.4), "59 s"),
        (f.duration(192), "3 min 12 s"),
        (f.duration(3725), "1 h 2 min"),
        (f.duration(200_000), "2 days 7 h"),
        (f.ago(4), "now"),
        (f.ago(47), "40 s ago"),
        (f.ago(130), "2 min ago"),
        (f.ago(90_000), "25 h ago"),
        (f.clock(1_790_000_000), "14:13:20"),
        (f.moment(None), "–"),
        (f.iso(0), "1970-01-01T00:00:00Z"),
    ],
)
def test_numbers_for_people(shown: str, expected: str) -> None:
    assert shown.replace(f.NBSP, " ") == expected

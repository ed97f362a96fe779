"""Every text colour can be read on every ground it stands on, in light and dark (WCAG 2, AA: 4.5 : 1)."""

from __future__ import annotations

import re
from importlib.resources import files

import pytest

CSS = (files("p2pdiloco_node.status_page") / "static" / "page.css").read_text()
SCHEMES = re.findall(r":root \{(.*?)\}", CSS, re.DOTALL)
TEXTS = ("ink", "soft", "accent", "good", "busy", "warn", "bad", "quiet")


def luminance(colour: str) -> float:
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    r, g, b = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts)
    return 0.2126 * r + 0.7152 * g + 0.0722 * b


@pytest.mark.parametrize("scheme", range(2))
@pytest.mark.parametrize("ground", ["paper", "card"])
def test_contrast(scheme: int, ground: str) -> None:
    assert len(SCHEMES) == 2
    colours = dict(re.findall(r"--(\w+): (#[0-9a-f]{6});", SCHEMES[scheme]))
    for text in TEXTS:
        high, low = sorted((luminance(colours[text]), luminance(colours[ground])), reverse=True)
        assert (high + 0.05) / (low + 0.05) >= 4.5, (text, ground)

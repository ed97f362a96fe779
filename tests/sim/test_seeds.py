"""Target R1: three hundred random swarms, twenty of them with real keys, and no broken promise.

`p2pdiloco simulate --seeds N` tells the story of one of them again.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from p2pdiloco_node.lab.seeds import REAL_KEYS_EVERY, SimulationReport, simulate_seeds

EVERYDAY = range(1, 301)
CHUNK = 10
KEPT = Path(__file__).parent / "kept_seeds.txt"


def kept_seeds() -> list[int]:
    lines = (line.partition("#")[0].strip() for line in KEPT.read_text().splitlines())
    return [int(line) for line in lines if line]


def assert_kept_all_promises(report: SimulationReport) -> None:
    broken = [f"seed {r.seed}: {r.violation}" for r in report.violations]
    assert not broken, "\n".join([*broken, "again: p2pdiloco simulate --seeds N"])


def test_seeds_that_once_found_a_bug() -> None:
    assert_kept_all_promises(simulate_seeds(kept_seeds()))


@pytest.mark.parametrize("first", EVERYDAY[::CHUNK])
def test_everyday_seeds(first: int) -> None:
    report = simulate_seeds(range(first, first + CHUNK))
    assert_kept_all_promises(report)
    assert report.late <= 1, "target R2: the next entry within two timeouts and a fetch"
    # A simulator in which nothing happens finds nothing.
    assert report.entries > 5 * CHUNK
    assert report.starts > 2 * CHUNK


def test_twenty_of_them_have_real_keys() -> None:
    assert sum(1 for seed in EVERYDAY if seed % REAL_KEYS_EVERY == 0) == 20

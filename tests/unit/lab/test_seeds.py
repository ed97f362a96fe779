"""`p2pdiloco simulate`: what it accepts, says and returns."""

from __future__ import annotations

import json

import pytest

from p2pdiloco import limits
from p2pdiloco.errors import OperatorError
from p2pdiloco.protocol import node as node_module
from p2pdiloco.protocol.election import Election
from p2pdiloco_node.lab.seeds import in_words, parse_seeds, print_simulation, simulate_seeds


class NeverLeads(Election):
    """A swarm in which nothing happens."""

    def try_to_lead(self, term: int, *, current: bool) -> None:
        pass


@pytest.mark.parametrize(
    ("text", "seeds"),
    [("1..4", [1, 2, 3, 4]), ("7", [7]), ("1,2,9", [1, 2, 9]), ("1..2,5..6", [1, 2, 5, 6]), ("0", [0])],
)
def test_seeds_are_ranges_or_numbers(text: str, seeds: list[int]) -> None:
    assert parse_seeds(text) == seeds


@pytest.mark.parametrize(
    "text", ["", "x", "1..", "..3", "4..1", "-3..2", "1.5", f"1..{2 * limits.simulated_seeds_max}"]
)
def test_other_seeds_are_refused_with_a_way_out(text: str) -> None:
    with pytest.raises(OperatorError, match="seed") as refused:
        parse_seeds(text)
    assert refused.value.exit_code == 2


def test_a_clean_seed_says_so_and_exits_with_zero(capsys: pytest.CaptureFixture[str]) -> None:
    assert print_simulation("5") == 0
    said = capsys.readouterr().out
    assert said.startswith("1 seed and 0 directed schedules")
    assert said.endswith("No violation.\n")


def test_one_of_a_thing_is_one() -> None:
    report = simulate_seeds([5])._replace(
        schedules=1, entries=1, memberships=1, starts=1, messages=1, late=1, wall_s=2.0
    )
    said = in_words(report)
    assert said.startswith(
        "1 seed and 1 directed schedule in 2 s: 1 entry certified, 1 change of committee, 1 start, 1 message."
    )
    assert "in 1 seed later than target R2" in said


def test_a_violated_seed_is_named_with_how_to_see_it_again(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_module, "Election", NeverLeads)
    assert print_simulation("5,6") == 1
    said = capsys.readouterr().out
    assert "seed 5: the log goes on when faults stop" in said
    assert "p2pdiloco simulate --seeds 5" in said


def test_json_names_violations_and_holds_no_nan(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_module, "Election", NeverLeads)
    assert print_simulation("5", json_file="-") == 1
    told = json.loads(capsys.readouterr().out)
    assert [v["name"] for v in told["violations"]] == ["5"]
    assert told["recovery_s_median"] is None
    assert told["seeds"] == 1


def test_a_broken_schedule_counts_as_a_violation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_module, "Election", NeverLeads)
    report = simulate_seeds([], schedules=["alone"])
    assert not report.ok
    assert [r.name for r in report.broken_schedules] == ["alone"]

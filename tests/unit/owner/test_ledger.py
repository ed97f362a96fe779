"""What a key has signed, kept beside it for each run."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from p2pdiloco.errors import OperatorError
from p2pdiloco.ids import RunId
from p2pdiloco_node.owner.ledger import Ledger, Signed

RUN = RunId(b"r" * 32)


def test_a_ledger_remembers_for_each_run(tmp_path: Path) -> None:
    key = tmp_path / "owner.key"
    assert Ledger(key).of(RUN) == Signed()
    Ledger(key).note(RUN, Signed(2, 9))
    Ledger(key).note(RunId(b"s" * 32), Signed(0, 1))
    assert Ledger(key).of(RUN) == Signed(2, 9)
    assert Ledger(key).of(RunId(b"s" * 32)) == Signed(0, 1)
    assert stat.S_IMODE((tmp_path / "owner.key.signed").stat().st_mode) == 0o600


@pytest.mark.parametrize("content", ["{", "[]", '{"a": {"epoch": -1}}', '{"a": {"term": 1}}', "x" * 2**21])
def test_a_damaged_ledger_is_said_and_nothing_is_signed_over_it(tmp_path: Path, content: str) -> None:
    (tmp_path / "owner.key.signed").write_text(content)
    with pytest.raises(OperatorError, match="put it back from a backup"):
        Ledger(tmp_path / "owner.key").note(RUN, Signed(1, 1))
    assert (tmp_path / "owner.key.signed").read_text() == content

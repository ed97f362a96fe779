"""What a fork has of its parent."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from p2pdiloco.run_spec import RunSpec
from p2pdiloco.sim.keys import FastSigner
from p2pdiloco.sim.tiny_run import tiny_run
from p2pdiloco_node.owner.fork import _spec
from p2pdiloco_node.run_file import read_run_file

STRICT = {"admission": "open", "trust_tokens": 123_456_789, "bootstrap_tokens": 987_654_321}


class Heard:
    def __init__(self) -> None:
        self.said: list[str] = []

    def say(self, text: str) -> None:
        self.said.append(text)


def forked(parent: dict[str, Any], **tables: dict[str, Any]) -> tuple[RunSpec, RunSpec, list[str]]:
    """(parent, fork, what was said)."""
    tiny = tiny_run(FastSigner("owner"), FastSigner("witness").peer_id)
    spec = msgspec.structs.replace(tiny.spec, **parent)
    origin = SimpleNamespace(spec=spec, run=tiny.run)
    found = SimpleNamespace(origin=origin, certified=SimpleNamespace(version=1, params_root=bytes(32)))
    parts = read_run_file(None)
    for table, fields in tables.items():
        parts[table].update(fields)
    told = Heard()
    fork = _spec(cast("Any", found), parts, spec.data, spec.genesis, cast("Any", told))
    return spec, fork, told.said


@pytest.mark.parametrize("tables", [{}, {"inner": {"lr": 1e-5}}, {"run": {"tokens": 10**9}}])
def test_a_strict_run_stays_strict(tables: dict[str, dict[str, Any]]) -> None:
    spec, fork, said = forked(STRICT, **tables)
    assert (fork.trust_tokens, fork.bootstrap_tokens) == (spec.trust_tokens, spec.bootstrap_tokens)
    assert fork.admission == "open"
    assert not said


def test_a_longer_pass_asks_for_as_many_passes_and_says_so() -> None:
    steps = forked(STRICT)[0].inner.inner_steps
    spec, fork, said = forked(STRICT, inner={"inner_steps": 3 * steps})
    assert (fork.trust_tokens, fork.bootstrap_tokens) == (3 * spec.trust_tokens, 3 * spec.bootstrap_tokens)
    assert "370,370,367" in said[0]
    assert forked(STRICT, inner={"inner_steps": 3 * steps}, run={"trust_tokens": 7})[1].trust_tokens == 7


def test_another_admission_has_the_figures_of_a_new_run() -> None:
    assert forked(STRICT, run={"admission": "local"})[1].trust_tokens == 0
    local, fork, said = forked({"admission": "local", "trust_tokens": 0, "bootstrap_tokens": 0},
                               run={"admission": "open"})  # fmt: skip
    of_a_pass = local.inner.inner_steps * local.inner.sequences_per_step * local.model.seq_len
    assert (fork.trust_tokens, fork.bootstrap_tokens) == (16 * of_a_pass, 64 * of_a_pass)
    assert len(said) == 1

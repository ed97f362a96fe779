"""Whatever arrives, in whatever order: what a plan promises (algorithm.md 1, 4; protocol.md 8)."""

import json
from pathlib import Path

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from p2pdiloco.rules.state import after_outer_step, rules_digest
from p2pdiloco.wire.codec import encode

VECTORS = Path(__file__).resolve().parents[2] / "vectors" / "rules.json"

delivery = st.fixed_dictionaries(
    {
        "number": st.integers(0, 9),
        "steps": st.integers(1, 45),
        "back": st.integers(-1, 12),
        "skip": st.integers(0, 2),
        "norm": st.floats(0, 1e6),
    }
)
entry = st.tuples(
    st.lists(delivery, min_size=1, max_size=12, unique_by=lambda d: (d["number"], d["skip"])),
    st.sets(st.integers(0, 9), max_size=2),
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(entry, min_size=1, max_size=12), st.booleans())
def test_random_logs(make_log, make_candidate, name_peer, entries, is_open):
    log = make_log(
        outer={"staleness_max": 2},
        admission="open" if is_open else "local",
        trust_tokens=20,
        bootstrap_tokens=30,
    )
    named: set[tuple[bytes, int]] = set()
    for deliveries, left in entries:
        candidates = []
        for d in deliveries:
            one = log.next_candidate(d["number"], steps=d["steps"], norm=d["norm"])
            base = max(0, log.state.version - d["back"])
            candidates.append(
                make_candidate(one.peer, one.sequence + d["skip"], base, steps=d["steps"], norm=d["norm"])
            )
        step = log.plan(candidates, tuple(left))  # asserts that a voter accepts it
        if step is None:
            continue
        # Nothing counts twice, listed or refused.
        here = {(c.peer, c.sequence) for c in (*step.contributions, *step.refused)}
        assert not here & named
        named |= here
        assert 0 <= step.scalars.rho <= 1
        assert step.t_full >= sum(c.tokens for c in step.contributions)
        total = sum(c.tokens for c in step.contributions)
        if len(step.contributions) >= 3 and not is_open:
            assert all(2 * c.tokens <= total for c in step.contributions)
        assert all(0 <= c.clip <= 1 and c.weight <= c.tokens for c in step.contributions)
        assert step.clock == log.state.clock + total
        log.state = after_outer_step(log.state, step, log.spec)
        assert len(log.state.clocks) <= log.state.version + 1
        assert log.state.clocks[-1] == log.state.clock


def test_the_rules_state_of_a_written_log(make_log):
    """Pins encoding and arithmetic of the state: another digest here is another math_version."""
    written = json.loads(VECTORS.read_text())
    log = make_log(outer={"staleness_max": 3, "mu": 0.9, "eta_alone": 0.4, "eta_eight": 0.8})
    found = []
    for deliveries in written["entries"]:
        candidates = [
            log.next_candidate(d["peer"], base=d["base"], steps=d["steps"], norm=d["norm"])
            for d in deliveries
        ]
        step = log.apply(candidates)
        scalars = {name: getattr(step.scalars, name) for name in step.scalars.__struct_fields__}
        found.append(
            {
                "clock": step.clock,
                "t_full": step.t_full,
                "scalars": {name: f"{value:.5g}" for name, value in scalars.items()},
                "rules_digest": rules_digest(log.state).hex(),
            }
        )
    assert found == written["after"]
    assert encode(log.state).hex() == written["last_state"]

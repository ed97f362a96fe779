"""The product's quorum, and the two policies that it is compared with."""

import msgspec
import pytest

from p2pdiloco.ids import PeerId, digest_of
from p2pdiloco.rules.closing import Arrival, ClosingView, decide_closing
from p2pdiloco.sim.keys import signer_named
from p2pdiloco.sim.lab.experiment import Outer
from p2pdiloco.sim.lab.policies import decide
from p2pdiloco.sim.tiny_run import tiny_run


def peer(n: int) -> PeerId:
    return PeerId(digest_of(b"%d" % n))


@pytest.fixture(scope="module")
def spec():
    """A pass takes 10 s, the deadline comes after 15 s."""
    spec = tiny_run(signer_named("owner", real=False), signer_named("witness", real=False).peer_id).spec
    return msgspec.structs.replace(spec, inner=msgspec.structs.replace(spec.inner, pass_s=10.0))


def view(arrivals: dict[int, float], live: int, *, first_step: bool = False) -> ClosingView:
    """`arrivals`: number -> seconds; `live`: nodes of 10 tokens each, all trusted."""
    return ClosingView(
        last_step_at=0.0,
        first_step=first_step,
        arrivals=[Arrival(peer(n), 10, at, trusted=True) for n, at in arrivals.items()],
        live={peer(n): 10 for n in range(live)},
        trusted=frozenset(peer(n) for n in range(live)),
        spreads=[1.0, 1.0, 1.0],
    )


def test_quorum_is_the_products_unless_its_knobs_are_moved(spec):
    for arrivals, live, now in (({0: 3.0, 1: 4.0}, 8, 4.5), ({0: 3.0}, 8, 3.5), ({0: 3.0}, 8, 15.0)):
        asked = view(arrivals, live)
        assert decide("quorum", asked, spec, now=now, outer=Outer()) == decide_closing(asked, spec, now=now)
    quarter = view({0: 3.0, 1: 4.0}, 8)
    assert decide("quorum", quarter, spec, now=4.5, outer=Outer()).wake_at == 5.0
    assert decide("quorum", quarter, spec, now=4.5, outer=Outer(grace=2.0)).wake_at == 6.0
    assert decide("quorum", quarter, spec, now=4.5, outer=Outer(closing_share=0.3)).wake_at == 15.0


@pytest.mark.parametrize(("share", "enough"), [(0.1, 5), (0.25, 12), (0.3, 15), (0.5, 16)])
def test_a_large_swarm_needs_three_times_the_share(spec, share, enough):
    for there in (enough - 1, enough):
        crowd = view(dict.fromkeys(range(there), 1.0), 16)
        assert decide("quorum", crowd, spec, now=14.0, outer=Outer(closing_share=share)).close is (
            there == enough
        )


def test_immediate_waits_for_nobody(spec):
    outer = Outer(policy="immediate")
    assert not decide("immediate", view({}, 8), spec, now=100.0, outer=outer).close
    assert decide("immediate", view({3: 1.0}, 8, first_step=True), spec, now=1.0, outer=outer).close


def test_a_barrier_waits_for_every_live_node_and_has_no_deadline(spec):
    outer = Outer(policy="barrier")
    assert not decide("barrier", view({}, 0), spec, now=1e6, outer=outer).close
    waiting = decide("barrier", view({0: 1.0, 2: 1.0, 9: 1.0}, 3), spec, now=1e6, outer=outer)
    assert waiting == (False, "barrier: 2 of 3 delivered", None)
    # Node 9 delivered and then fell silent: it is taken, and nobody is waited for.
    assert decide("barrier", view({0: 1.0, 1: 2.0, 2: 1.0, 9: 1.0}, 3), spec, now=2.0, outer=outer).close


def test_a_barrier_closes_when_an_entry_is_full(spec):
    outer = Outer(policy="barrier")
    assert not decide("barrier", view(dict.fromkeys(range(31), 1.0), 64), spec, now=9.0, outer=outer).close
    assert decide("barrier", view(dict.fromkeys(range(32), 1.0), 64), spec, now=9.0, outer=outer).close


def test_data_parallel_has_no_outer_steps(spec):
    with pytest.raises(AssertionError, match="data_parallel"):
        decide("data_parallel", view({0: 1.0}, 1), spec, now=1.0, outer=Outer(policy="data_parallel"))

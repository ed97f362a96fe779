"""The lab's engine on a toy: the product's rules on a virtual clock."""

from __future__ import annotations

import numpy as np
import pytest
from msgspec.structs import replace

from p2pdiloco import limits
from p2pdiloco.errors import OperatorError
from p2pdiloco.sim.lab.engine import Lab, run_experiment
from p2pdiloco.sim.lab.experiment import Experiment, Inner, Model, Outer, Run, Swarm
from p2pdiloco.sim.lab.result import Result

from .toy import ToyModel, ToyTrainer

MIXED = (1.0, 0.8, 0.6, 0.3)
BASE = Experiment(
    swarm=Swarm(nodes=4, speeds=MIXED, latency_s=0.01, commit_s=0.05, jitter=0.0),
    inner=Inner(inner_steps=10, sequences_per_step=2, lr=0.05),
    run=Run(rounds=12, round_steps=6.75, evaluations=4),
)


def live(e: Experiment, seed: int = 1, model: ToyModel | None = None) -> Result:
    real = None if e.model.kind == "none" else (model or ToyModel(seed))
    return run_experiment(e, seed, generator(seed), real, lambda share, words: None)


def generator(seed: int) -> np.random.Generator:
    return np.random.Generator(np.random.PCG64(seed))


def with_swarm(**changes: object) -> Experiment:
    return replace(BASE, swarm=replace(BASE.swarm, **changes))


def with_outer(**changes: object) -> Experiment:
    return replace(BASE, outer=replace(BASE.outer, **changes))


def test_a_swarm_of_mixed_speeds_learns_and_nobody_waits() -> None:
    r = live(BASE)
    assert r.final_loss is not None
    assert r.final_loss < r.curve[0].loss / 2
    assert r.tokens >= BASE.target_tokens
    assert r.goodput > 0.85  # the passes under way at the end are lost
    assert all(n.waited_s == 0 for n in r.nodes)
    # DyLU: steps follow speeds, passes do not.
    assert r.nodes[3].steps == pytest.approx(0.3 * r.nodes[0].steps, abs=2)
    assert abs(r.nodes[3].deltas - r.nodes[0].deltas) <= 1


def test_equal_seeds_give_equal_bits_and_others_do_not() -> None:
    assert live(BASE) == live(BASE)
    assert live(BASE).final_loss != live(BASE, seed=2).final_loss


def test_the_barrier_waits_for_the_slowest_and_does_not_mind_speeds() -> None:
    barrier = replace(
        with_outer(policy="barrier", dylu=False, in_flight_max=1), inner=replace(BASE.inner, inner_steps=7)
    )
    mixed = live(barrier)
    equal = live(replace(barrier, swarm=replace(barrier.swarm, speeds=(1.0,))))
    assert mixed.final_loss == equal.final_loss  # the same passes from the same states
    assert mixed.hours > 3 * equal.hours
    assert mixed.staleness_max == 0
    assert mixed.rho_mean == pytest.approx(1.0)
    assert mixed.nodes[0].waited_s > 0.6 * mixed.hours * 3600


def test_one_node_alone_is_diloco_on_one_worker() -> None:
    e = replace(BASE, swarm=Swarm(nodes=1, jitter=0.0), run=Run(rounds=5, evaluations=0))
    r = live(e)
    assert r.versions == 5
    assert r.rho_mean == pytest.approx(1.0)


def test_without_a_model_the_clockwork_is_the_same() -> None:
    real = live(replace(BASE, run=replace(BASE.run, evaluations=0)))
    bare = live(replace(BASE, model=Model(kind="none", params=4432)))
    assert bare.final_loss is None
    assert bare.versions == pytest.approx(real.versions, abs=2)
    assert bare.goodput == pytest.approx(real.goodput, abs=0.03)
    assert bare.staleness_mean == pytest.approx(real.staleness_mean, abs=0.1)


def test_passes_fall_into_step_and_nobody_waits() -> None:
    swarm = Swarm(nodes=8, latency_s=0.01, commit_s=0.05, jitter=0.05)
    e = replace(BASE, swarm=swarm, model=Model(kind="none"), run=Run(rounds=60))
    apart = live(replace(e, outer=Outer(align=False)))
    together = live(e)
    assert together.rho_mean > 0.9 > apart.rho_mean
    assert together.versions < 1.15 * 60
    assert sum(n.waited_s for n in together.nodes) == 0
    assert together.goodput > 0.95


def test_lost_deltas_are_offered_again() -> None:
    r = live(with_swarm(delta_loss=0.5))
    assert r.final_loss is not None
    assert r.final_loss < r.curve[0].loss / 2
    assert sum(n.listed for n in r.nodes) > 0.7 * sum(n.deltas for n in r.nodes)
    assert r.staleness_mean > live(BASE).staleness_mean


def test_deaths_cost_their_own_share_only() -> None:
    r = live(with_swarm(mtbf_s=60.0, repair_s=10.0, failover_s=1.0))
    assert sum(n.failures for n in r.nodes) > 0
    assert sum(n.down_s for n in r.nodes) > 0
    assert r.final_loss is not None
    assert r.final_loss < r.curve[0].loss / 2


def test_an_absence_beyond_staleness_max_starts_afresh() -> None:
    model = ToyModel()
    e = replace(
        BASE, swarm=replace(BASE.swarm, speeds=(1.0,), absences=((0.2, 3, 20),)),
        run=Run(rounds=40, evaluations=20),
    )  # fmt: skip
    r = live(e, model=model)
    assert model.trainers[3].zeroed == 1
    assert r.nodes[3].down_s == pytest.approx(200, abs=1)
    # Back by the twelfth of twenty evaluations: no spike, and hardly a worse end.
    losses = [p.loss for p in r.curve]
    assert max(losses[12:]) <= 1.05 * losses[11]
    stayed = live(replace(e, swarm=replace(e.swarm, absences=())))
    assert stayed.final_loss is not None
    assert losses[-1] < 1.3 * stayed.final_loss


def test_nodes_join_and_leave_by_tokens() -> None:
    r = live(with_swarm(joins=((0.3, 4),), leaves=((0.7, 6),)))
    assert len(r.nodes) == 8
    assert r.final_loss is not None
    assert r.final_loss < r.curve[0].loss / 2
    assert r.nodes[7].steps < r.nodes[0].steps


def test_the_rate_follows_the_token_clock() -> None:
    model = ToyModel()
    live(BASE, model=model)
    rates = model.trainers[0].rates
    assert max(rates) == pytest.approx(BASE.inner.lr, rel=0.02)
    assert rates[-1] == pytest.approx(BASE.inner.lr * BASE.inner.lr_min_share, rel=0.25)


def test_bytes_are_counted_as_they_travel() -> None:
    e = replace(with_swarm(stagger=0.0), model=Model(kind="none", params=128 * 64), outer=Outer(codec="int4"))
    lab = Lab(e, generator(1), None, lambda share, words: None)
    r = lab.live(1)
    size = lab.delta_bytes(0, "int4")
    listed = sum(len(s.contributions) for s in lab.ledgers[0].entries)
    deltas = sum(n.deltas for n in r.nodes)
    # Two of four nodes are voters, the witness is the third: a delta goes to all of them but its sender, and
    # the two others fetch what is not their own once it is listed.
    voters = [n.deltas for n in r.nodes[:2]]
    uploaded = (deltas * 3 - sum(voters)) * size
    to_nodes = (deltas * 2 - sum(voters)) * size
    fetched = sum(n.bytes_down for n in r.nodes) - to_nodes
    assert sum(n.bytes_up for n in r.nodes) == uploaded + fetched
    by_followers = sum(
        c.peer in {n.peer for n in lab.nodes[2:]} for s in lab.ledgers[0].entries for c in s.contributions
    )
    assert fetched == (2 * listed - by_followers) * size


def test_fragments_are_synced_one_at_a_time() -> None:
    e = with_outer(fragments=3)
    lab = Lab(e, generator(1), ToyModel(), lambda share, words: None)
    r = lab.live(1)
    assert r.final_loss is not None
    assert r.final_loss < r.curve[0].loss / 2
    assert min(ledger.version for ledger in lab.ledgers) >= 8
    # The peak: one fragment's delta, not the whole model's.
    assert max(lab.delta_bytes(f, "fp16") for f in range(3)) < Lab(
        BASE, generator(1), ToyModel(), lambda s, w: None
    ).delta_bytes(0, "fp16")


def test_a_swarm_that_gets_nowhere_says_so() -> None:
    e = replace(with_swarm(nodes=1, delta_lost_for_good=1.0), model=Model(kind="none"))
    with pytest.raises(OperatorError, match="no outer step in 1000 passes"):
        live(e)


def test_nodes_that_never_finish_a_pass_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "lab_events_max", 20_000)
    e = replace(with_swarm(mtbf_s=0.001, repair_s=0.0), model=Model(kind="none"))
    with pytest.raises(OperatorError, match="events without an outer step"):
        live(e)


def test_not_everybody_may_leave() -> None:
    e = replace(with_swarm(leaves=((0.1, 4),), joins=((0.9, 4),)), model=Model(kind="none"))
    with pytest.raises(OperatorError, match="takes everybody away"):
        live(e)


def test_lost_deltas_hold_no_slot() -> None:
    r = live(with_swarm(delta_lost_for_good=0.5))
    assert r.final_loss is not None
    assert r.final_loss < r.curve[0].loss / 2
    assert sum(n.too_late for n in r.nodes) == pytest.approx(0.5 * sum(n.deltas for n in r.nodes), rel=0.4)
    assert all(n.waited_s == 0 for n in r.nodes)


def test_under_a_barrier_who_returns_holds_up_nobody() -> None:
    e = replace(with_outer(policy="barrier"), swarm=replace(BASE.swarm, absences=((0.3, 1, 3),)))
    lab = Lab(e, generator(1), ToyModel(), lambda share, words: None)
    r = lab.live(1)
    # Two passes of silence for the one that is away; every other round lasts one pass.
    assert r.hours * 3600 < (r.versions + 3) * 10.5
    assert all(s.scalars.rho <= 1 for s in lab.ledgers[0].entries)
    assert len(lab.ledgers[0].entries[-1].contributions) == 4


def test_a_diverged_run_has_an_infinite_loss() -> None:
    class Exploding(ToyModel):
        def trainer(self, node: int, *, batch_factor: int = 1) -> ToyTrainer:
            trainer = super().trainer(node, batch_factor=batch_factor)
            step = trainer.step

            def explodes(lr: float) -> float:
                return step(lr) if len(trainer.rates) < 15 else float("nan")

            trainer.step = explodes  # type: ignore[method-assign]
            return trainer

    r = live(BASE, model=Exploding())
    assert r.final_loss == float("inf")
    assert sum(n.rolled_back for n in r.nodes) > 0


def test_one_step_that_is_not_finite_costs_its_pass_only() -> None:
    class Slips(ToyModel):
        def trainer(self, node: int, *, batch_factor: int = 1) -> ToyTrainer:
            trainer = super().trainer(node, batch_factor=batch_factor)
            step = trainer.step
            slips = iter([30])

            def slipping(lr: float) -> float:
                if node == 0 and len(trainer.rates) == 30 and next(slips, None):
                    return float("nan")
                return step(lr)

            trainer.step = slipping  # type: ignore[method-assign]
            return trainer

    model = Slips()
    r = live(BASE, model=model)
    assert r.nodes[0].rolled_back == 1
    assert model.trainers[0].zeroed == 1
    assert r.final_loss is not None
    assert r.final_loss < r.curve[0].loss / 2


def test_data_parallel_is_one_step_per_global_batch() -> None:
    model = ToyModel()
    r = live(with_outer(policy="data_parallel"), model=model)
    assert r.final_loss is not None
    assert r.final_loss < r.curve[0].loss / 2
    assert r.versions == len(model.trainers[0].rates)
    assert r.tokens == pytest.approx(BASE.target_tokens, rel=0.02)
    assert r.hours * 3600 == pytest.approx(r.versions * (1 / 0.3 + 6 * 0.01))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"optimizer": "textbook"}, 'outer.policy = "immediate"'),
        ({"expert_weights": True}, "mixtral"),
        ({"fragments": 2, "policy": "barrier"}, "staggered"),
    ],
)
def test_nonsense_is_refused(changes: dict[str, object], words: str) -> None:
    with pytest.raises(OperatorError, match=words):
        live(with_outer(**changes))


@pytest.mark.parametrize("mbit", [1.0, 8.0])
def test_no_link_carries_more_than_it_can(mbit: float) -> None:
    """What was queued and not sent when the run ended, or its sender died, is no traffic."""
    swarm = Swarm(nodes=6, step_s=1.0, up_mbit=mbit, down_mbit=mbit, mtbf_s=200.0, repair_s=20.0)
    bare = Model(kind="none", params=2_000_000)
    result = live(replace(BASE, swarm=swarm, outer=Outer(codec="fp16"), model=bare, run=Run(rounds=6)))
    most = mbit * 1e6 / 8 * result.hours * 3600
    assert 0 < max(n.bytes_up for n in result.nodes) <= most * 1.001
    assert 0 < max(n.bytes_down for n in result.nodes) <= most * 1.001


def test_the_goodput_of_a_short_run_is_that_of_a_long_one() -> None:
    """What is in a pass at the end is not lost."""
    short, long = (live(replace(BASE, model=Model(kind="none"), run=Run(rounds=n))) for n in (3, 60))
    assert short.goodput == pytest.approx(long.goodput, abs=0.03)
    assert 0.97 < long.goodput <= 1.0

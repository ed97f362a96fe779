"""From the builder's facts to one RunStatus. Pure and repeatable: building changes nothing."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from msgspec.structs import replace

from p2pdiloco import limits
from p2pdiloco.ids import PeerId
from p2pdiloco.protocol.tracker import Listed
from p2pdiloco.rules.evaluation import bits_per_byte, perplexity
from p2pdiloco.status import read_model as rm
from p2pdiloco.status.checkpoints import with_losses
from p2pdiloco.status.join import export_line
from p2pdiloco.status.names import clean_name, clean_text, finite
from p2pdiloco.status.words import RunFacts, evaluators_words, node_word, run_word
from p2pdiloco.wire.messages import Outcome

if TYPE_CHECKING:
    from p2pdiloco.status.builder import StatusBuilder

COMING = ("joining", "syncing")
WORKING = ("training", "late", "waiting", "unreachable")


def render_status(b: StatusBuilder, now: float) -> rm.RunStatus:
    age = None if b.fed_unix is None else max(0.0, now - b.fed_unix)
    stale = age is not None and age > limits.data_age_s_max
    generated = now
    if stale and b.fed_unix is not None:
        # No fake ticking (scenario S22): what is said is how things stood when news last came.
        now = b.fed_unix
    nodes = _nodes(b, now)
    by_state = Counter(row.state.word for row in nodes)
    committee = _committee(b, now)
    return rm.RunStatus(
        format=rm.FORMAT,
        generated_unix=generated,
        run=rm.RunView(
            name=clean_text(b.spec.name, limits.name_chars_max),
            run_id=b.run.hex(),
            about=_about(b),
            params=b.spec.model.params,
            local=b.spec.admission == "local",
        ),
        state=run_word(_facts(b, now, by_state, committee)),
        progress=_progress(b, now),
        learning=_learning(b),
        rates=rm.Rates(
            tokens_per_s=b.history.tokens_per_s(now),
            tokens_per_s_24h=b.history.tokens_per_s_day(now),
            bytes_per_node_per_step=b.traffic.per_step(),
            bytes_per_node_per_token=b.traffic.per_token(),
            times_less_than_bf16_data_parallel=b.traffic.times_less(
                # Of a run that is over nobody works: the figure stays that of those who did.
                b.traffic.contributors if b.finished else sum(by_state[s] for s in WORKING)
            ),
        ),
        nodes=nodes,
        nodes_by_state=dict(sorted(by_state.items())),
        committee=committee,
        rounds=_rounds(b),
        totals=rm.Totals(
            accepted=sum(b.staleness.values()),
            stale=b.stale,
            refused=dict(sorted(b.refused.items())),
            staleness={str(k): n for k, n in sorted(b.staleness.items())},
            terms=len(b.terms),
            aggregators=tuple(b.name_of(p) for p in b.aggregators),
        ),
        events=tuple(reversed(b.events)),
        join=b.join,
        health=rm.Health(
            build=b.build_name,
            uptime_s=max(0.0, generated - b.started_unix),
            data_age_s=age,
            stale=stale,
            history_since_unix=next((p.when_unix for p in b.history.points if p.when_unix), None),
        ),
        checkpoints=with_losses(b.checkpoints, b.evaluations),
        export_line=export_line(b.join),
    )


def _about(b: StatusBuilder) -> str:
    model = b.spec.model
    where = "on this machine" if b.spec.admission == "local" else "over the ordinary internet"
    return f"A {model.family} model of {_params(model.params)} parameters, trained together {where}."


def _params(n: int) -> str:
    if n < 1e6:
        return f"{n:,}"
    return f"{n / 1e9:.1f} billion" if n >= 1e9 else f"{n / 1e6:.3g} million"


def _facts(b: StatusBuilder, now: float, by_state: Counter[str], committee: rm.CommitteeView) -> RunFacts:
    last = b.history.points[-1].when_unix if b.history.points else None
    election_s = 2 * b.spec.committee.timeout_s_max
    return RunFacts(
        version=b.version,
        target_version=b.spec.target_version,
        tokens=b.clock,
        target_tokens=b.target_tokens,
        finished=b.finished,
        paused=b.paused,
        training=sum(by_state[s] for s in WORKING),
        coming=sum(by_state[s] for s in COMING),
        resting=by_state["paused"] + by_state["leaving"],
        revoked=sum(row.live for peer, row in b.listed.items() if peer in b.revoked),
        seats=b.committee.size,
        quorum=b.committee.quorum,
        answering=committee.answering,
        silent_s=None if last is None else max(0.0, now - last),
        step_s=b.history.seconds_per_step(),
        deadline_s=b.spec.outer.deadline_passes * b.spec.inner.pass_s + election_s,
    )


def _progress(b: StatusBuilder, now: float) -> rm.Progress:
    target_version = b.spec.target_version or None
    step_s, rate = b.history.seconds_per_step(), b.history.tokens_per_s(now)
    # The run ends at whichever target comes first, so that one is its progress; as a rule the version.
    shares = {"version": b.version / target_version} if target_version else {}
    shares["tokens"] = b.clock / b.target_tokens
    measure = max(shares, key=shares.__getitem__)
    left_s = []
    if rate:
        left_s.append((b.target_tokens - b.clock) / rate)
    if step_s and target_version:
        left_s.append((target_version - b.version) * step_s)
    return rm.Progress(
        version=b.version,
        target_version=target_version,
        tokens=b.clock,
        target_tokens=b.target_tokens,
        measure=measure,
        share=min(1.0, shares[measure]),
        eta_s=None if b.finished or b.paused or not left_s else max(0.0, min(left_s)),
        last_step_unix=b.history.points[-1].when_unix if b.history.points else None,
        seconds_per_step=step_s,
    )


def _learning(b: StatusBuilder) -> rm.Learning:
    evaluations = tuple(b.evaluations[v] for v in sorted(b.evaluations))
    stretch = -(-len(evaluations) // limits.chart_points_max) or 1
    # The first and the newest are always shown; in between one of each stretch.
    shown = evaluations[:1] + evaluations[1:-1][::stretch] + evaluations[1:][-1:]
    newest = evaluations[-1] if evaluations else None
    sets = _sets(b, newest) if newest else ()
    return rm.Learning(
        loss=next((p.loss for p in reversed(b.history.points) if p.loss is not None), None),
        curve=b.history.curve(b.membership_changes),
        evaluation=newest,
        evaluation_first=evaluations[0] if evaluations else None,
        perplexity=sets[0].perplexity if sets else None,
        bits_per_byte=sets[0].bits_per_byte if sets else None,
        # Who said what is shown of the newest alone: of hundreds it would be most of the JSON.
        evaluations=tuple(replace(p, reports=()) for p in shown),
        evaluators=evaluators_words(newest) if newest else "",
        sets=sets,
        samples=tuple(b.samples[v] for v in sorted(b.samples, reverse=True)),
    )


def _sets(b: StatusBuilder, point: rm.EvalPoint) -> tuple[rm.EvalSet, ...]:
    return tuple(
        rm.EvalSet(
            name=clean_name(held_out.name),
            loss=loss,
            perplexity=perplexity(loss),
            bits_per_byte=bits_per_byte(loss, held_out),
            tokens=held_out.shard.tokens,
        )
        # A point from a database of before has the first loss alone.
        for held_out, loss in zip(b.spec.data.evaluations, point.losses or (point.loss,), strict=False)
    )


def _nodes(b: StatusBuilder, now: float) -> tuple[rm.NodeRow, ...]:
    nodes = [(p, row) for p, row in b.listed.items() if row.role == "node"]
    # After a restart of the tracker the log still knows who contributed in the last day.
    missing = [
        (p, None) for p, a in b.accounts.items() if p not in b.listed and a.tokens and a.tokens_day(now) > 0
    ]
    rows = [_node(b, p, row, now) for p, row in [*nodes, *missing]]
    rank = {**dict.fromkeys(WORKING, 0), **dict.fromkeys(COMING, 1), "offline": 3}
    return tuple(sorted(rows, key=lambda r: (rank.get(r.state.word, 2), -r.tokens, r.who.name)))


def _node(b: StatusBuilder, peer: PeerId, row: Listed | None, now: float) -> rm.NodeRow:
    account = b.accounts[peer]
    report = row.report if row else None
    live = bool(row and row.live)
    behind = max(0, b.version - report.version) if report and live else None
    state = node_word(
        row,
        rounds_behind=b.history.rounds_since(report.version) if report else 0.0,
        versions_since_delta=None if account.last_version is None else b.version - account.last_version,
        left=account.left,
        revoked=peer in b.revoked,
    )
    outcome = account.last_outcome or (clean_text(report.last_outcome, 32) if report else "")
    if account.last_outcome and account.last_version is not None:
        outcome = f"{outcome}, version {account.last_version:,}"
    if peer in b.revoked:
        outcome = f"{Outcome.NOT_ADMITTED} since version {b.revoked[peer]:,}"
    off = row.clock_offset_s if row and live else 0.0
    leader = b.committee.aggregator_of(b.term) if b.term is not None else None
    return rm.NodeRow(
        who=b.name_of(peer),
        state=state,
        device=clean_text(report.device, 48) if report else "",
        loss=(finite(report.loss) or None) if report and live and peer not in b.revoked else None,
        tokens_per_s=finite(report.tokens_per_s) if report and state.word in WORKING else None,
        versions_behind=behind,
        tokens=account.tokens,
        tokens_24h=account.tokens_day(now),
        deltas=account.deltas,
        last_outcome=outcome,
        last_seen_s=row.silent_s if row else _since(b.heard_unix.get(peer), now),
        seat=peer in b.committee.members,
        aggregates=peer == leader,
        clock_offset_s=off if finite(off) is not None and abs(off) > limits.clock_offset_s_max else None,
        build=clean_text(report.build, 32) if report else "",
    )


def _since(then: float | None, now: float) -> float | None:
    return None if then is None else max(0.0, now - then)


def _committee(b: StatusBuilder, now: float) -> rm.CommitteeView:
    c = b.committee
    leader = c.aggregator_of(b.term) if b.term is not None else None
    members = tuple(
        rm.Member(
            who=b.name_of(p),
            role="witness" if p == c.witness else "voter",
            aggregates=p == leader,
            answers=b.answers(p, now),
        )
        for p in c.members
    )
    left = b.spec.committee.rotation - b.steps_in_term
    return rm.CommitteeView(
        term=b.term,
        aggregator=b.name_of(leader) if leader is not None else None,
        steps_until_rotation=max(1, left) if c.voters and b.term is not None else None,
        members=members,
        quorum=c.quorum,
        answering=sum(bool(m.answers) for m in members),
    )


def _rounds(b: StatusBuilder) -> tuple[rm.RoundRow, ...]:
    points = b.history.points[-limits.rounds_shown - 1 :]
    rows = []
    for i, p in enumerate(points):
        before = points[i - 1] if i else None
        seconds = (
            p.when_unix - before.when_unix
            if before and p.when_unix is not None and before.when_unix is not None
            else None
        )
        rows.append(
            rm.RoundRow(
                version=p.version,
                when_unix=p.when_unix,
                aggregator=p.aggregator,
                deltas=p.deltas,
                stale=p.stale,
                refused=p.refused,
                seconds=seconds,
                loss=p.loss,
            )
        )
    return tuple(reversed(rows))[: limits.rounds_shown]

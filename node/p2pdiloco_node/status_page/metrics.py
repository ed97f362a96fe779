"""/metrics for Prometheus. Series are bounded: names are labels of one info metric only, nodes are capped."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from p2pdiloco import limits
from p2pdiloco.status.read_model import RunStatus

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
REASONS_MAX = 16  # refusal reasons with a series of their own


class _Snapshot(Collector):
    def __init__(self, status: RunStatus, streams: int) -> None:
        self._s = status
        self._streams = streams

    def collect(self) -> Iterator[Metric]:
        s = self._s
        evaluation = s.learning.evaluation
        for name, value, about in (
            ("version", s.progress.version, "Outer steps applied"),
            ("target_tokens", s.progress.target_tokens, "Tokens at which the run ends"),
            ("loss", s.learning.loss, "Training loss of the newest outer step, nats per token"),
            (
                "evaluation_loss",
                evaluation.loss if evaluation else None,
                "Held-out loss, nats/token",
            ),
            ("tokens_per_second", s.rates.tokens_per_s, "Tokens merged per second, last outer steps"),
            ("bytes_per_node_per_step", s.rates.bytes_per_node_per_step, "Bytes per node per outer step"),
            (
                "checkpoint_version",
                s.checkpoints[0].version if s.checkpoints else None,
                "Newest version offered for download",
            ),
            ("term", s.committee.term, "Term of the aggregator"),
            ("committee_seats", len(s.committee.members), "Seats of the committee"),
            ("committee_answering", s.committee.answering, "Committee members heard lately"),
            ("data_age_seconds", s.health.data_age_s, "Age of what the page shows"),
            ("uptime_seconds", s.health.uptime_s, "Since the tracker started"),
            ("event_streams", self._streams, "Open live pages"),
        ):
            # What is not known has no sample: a 0 would be a lie in every graph.
            if value is not None:
                yield GaugeMetricFamily(f"p2pdiloco_{name}", about, value=float(value))
        yield CounterMetricFamily("p2pdiloco_tokens", "Tokens merged (token clock)", value=s.progress.tokens)
        yield from self._evaluations()
        yield self._deltas()
        states = GaugeMetricFamily("p2pdiloco_nodes", "Nodes by state", labels=["state"])
        for state, n in s.nodes_by_state.items():
            states.add_metric([state], n)
        yield states
        yield from self._nodes()

    def _evaluations(self) -> Iterator[Metric]:
        """Of the newest evaluated version; sets are named by the run's owner, and at most 16."""
        learning = self._s.learning
        of_set = {
            "loss": "Held-out loss, nats per token",
            "perplexity": "e to the held-out loss",
            "bits_per_byte": "Held-out loss, bits per byte of text",
        }
        for field, about in of_set.items():
            family = GaugeMetricFamily(f"p2pdiloco_evaluation_set_{field}", about, labels=["set"])
            for name, held_out in {e.name: e for e in learning.sets}.items():
                family.add_metric([name], getattr(held_out, field))
            yield family
        if (newest := learning.evaluation) is not None:
            for name, value, about in (
                ("version", newest.version, "Newest evaluated version"),
                ("evaluators", len(newest.reports), "Evaluators of that version whose word counts"),
                ("evaluators_agreeing", newest.agreeing, "Of these, those that say what is shown"),
                ("evaluators_asked", newest.asked, "Evaluators of that version that the log chose"),
            ):
                yield GaugeMetricFamily(f"p2pdiloco_evaluation_{name}", about, value=float(value))

    def _deltas(self) -> CounterMetricFamily:
        t = self._s.totals
        deltas = CounterMetricFamily("p2pdiloco_deltas", "Deltas by outcome in the log", labels=["outcome"])
        deltas.add_metric(["ACCEPTED"], t.accepted)
        reasons = sorted(t.refused.items(), key=lambda item: (-item[1], item[0]))
        for reason, n in reasons[:REASONS_MAX]:
            deltas.add_metric([reason], n)
        if reasons[REASONS_MAX:]:
            deltas.add_metric(["other"], sum(n for _, n in reasons[REASONS_MAX:]))
        return deltas

    def _nodes(self) -> Iterator[Metric]:
        nodes = self._s.nodes[: limits.metric_nodes_max]
        info = GaugeMetricFamily("p2pdiloco_node_info", "Names of nodes", labels=["node", "name"])
        tokens = CounterMetricFamily("p2pdiloco_node_tokens", "Tokens accepted in the log", labels=["node"])
        seen = GaugeMetricFamily("p2pdiloco_node_last_seen_seconds", "Since it was heard", labels=["node"])
        for fingerprint, row in {n.who.fingerprint: n for n in nodes}.items():
            info.add_metric([fingerprint, row.who.name], 1)
            tokens.add_metric([fingerprint], row.tokens)
            if row.last_seen_s is not None:
                seen.add_metric([fingerprint], row.last_seen_s)
        yield from (info, tokens, seen)


def metrics_text(status: RunStatus, streams: int) -> bytes:
    """The exposition of one snapshot, from a registry of its own."""
    registry = CollectorRegistry()
    registry.register(_Snapshot(status, streams))
    return generate_latest(registry)

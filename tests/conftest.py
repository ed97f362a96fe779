"""A made-up run for tests of what people see: certified entries without real signatures."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping, Sequence

import msgspec
import pytest

from p2pdiloco import run_spec
from p2pdiloco.ids import PeerId, RunId, digest_of
from p2pdiloco.protocol.tracker import Listed
from p2pdiloco.rules import state
from p2pdiloco.rules.evaluation import measured_tokens
from p2pdiloco.run_spec import (
    BYTES,
    FORMAT,
    BlobRef,
    CommitteeSpec,
    DataSpec,
    EvaluationSet,
    Genesis,
    InnerSpec,
    ModelSpec,
    OuterSpec,
    RunSpec,
    TensorSpec,
)
from p2pdiloco.status import StatusBuilder, join_hint
from p2pdiloco.wire import envelope, log, messages
from p2pdiloco.wire.codec import encode
from p2pdiloco.wire.log import (
    AckSignature,
    Body,
    Certificate,
    Committee,
    Content,
    Contribution,
    Entry,
    Membership,
    OuterStep,
    OwnerEntry,
    OwnerWord,
    Refused,
    Scalars,
    committee_digest,
)
from p2pdiloco.wire.messages import EvalReport, NodeReport, SetLoss

RUN = RunId(digest_of(b"a made-up run"))
WITNESS = PeerId(digest_of(b"witness"))

# msgspec reads a type's bounds when one is first decoded. A test that puts another limit in the place of the
# real one must not be the first.
for module in (run_spec, state, envelope, log, messages):
    for kind in vars(module).values():
        if isinstance(kind, type) and issubclass(kind, msgspec.Struct) and kind is not msgspec.Struct:
            msgspec.msgpack.Decoder(kind)


@pytest.fixture(autouse=True)
def _logging_is_left_as_it_was() -> Iterator[None]:
    """A daemon's life sets logging up for its process; here the next test's is the same one."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


T0 = 1_790_000_000.0  # Unix seconds


def peer_of(i: int) -> PeerId:
    return PeerId(digest_of(b"node %d" % i))


def made_up_spec(*, admission: str = "local", target_tokens: int = 2_000_000, **changed: object) -> RunSpec:
    tensors = (TensorSpec("w", (870, 1000)),)
    fields = {
        "format": FORMAT,
        "math_version": 1,
        "name": "stdlib bytes",
        "owner_key": bytes(32),
        "model": ModelSpec("llama", "1m", b"{}", 256, 128, tensors),
        "data": DataSpec(
            BYTES,
            1,
            (BlobRef(digest_of(b"s"), 4096, 4096),),
            (EvaluationSet("all", BlobRef(digest_of(b"e"), 4096, 4096), 4096),),
        ),
        "inner": InnerSpec(20, 4.0, 8, 1e-3, 0.1, 1000, 10, 0.9, 0.95, 0.1, 1.0),
        "outer": OuterSpec(),
        "committee": CommitteeSpec(
            Committee(WITNESS, ()), rotation=3, heartbeat_s=0.5, timeout_s_min=1.5, timeout_s_max=3.0
        ),
        "genesis": Genesis((digest_of(b"p"),), (digest_of(b"m"),)),
        "admission": admission,
        "trust_tokens": 0,
        "bootstrap_tokens": 0,
        "target_tokens": target_tokens,
        "target_version": 0,
        "eval_every": 4,
        "nonce": bytes(16),
    }
    return RunSpec(**{**fields, **changed})


def made_up_refusal(i: int, why: str) -> Refused:
    return Refused(
        delta=digest_of(b"refused"), peer=peer_of(i), base_version=0, sequence=1, steps=1, reason=why,
        key=bytes(32), signature=bytes(64),
    )  # fmt: skip


class FakeRun:
    """Feeds a StatusBuilder by hand, one fact at a time. `now` is its wall clock."""

    def __init__(self, *, join: str = "http://203.0.113.7:8470", **changed: object) -> None:
        self.spec = made_up_spec(**changed)
        self.now = T0
        self.index = self.version = self.clock = 0
        self.committee = self.spec.committee.genesis
        self.term = 1
        self.rows: dict[PeerId, Listed] = {}
        self.entries: list[tuple[Entry, float, dict[bytes, float]]] = []
        self.builder = self.new_builder(join)

    def new_builder(self, join: str = "http://203.0.113.7:8470") -> StatusBuilder:
        """As a restarted tracker makes it."""
        return StatusBuilder(
            RUN,
            self.spec,
            join=join_hint(RUN, join, local=self.spec.admission == "local", folder="tiny-run"),
            build="0.1.0",
            started_unix=T0 - 30,
        )

    def node(self, i: int, name: str = "", state: str = "training", *, live: bool = True, role: str = "node",
             left: str | None = None, silent_s: float = 1.0, bad: str = "", report: bool = True,
             reachable: bool | None = True, offset_s: float = 0.0, **says: object) -> None:  # fmt: skip
        """Put a row into the directory; shown from the next `listed()` on."""
        fields = {
            "state": state,
            "why": "",
            "version": self.version,
            "inner_step": 3,
            "inner_steps": 20,
            "loss": 2.5,
            "tokens_per_s": 5000.0,
            "device": "cpu, 2 cores",
            "last_outcome": "",
            "bytes_up": 0,
            "bytes_down": 0,
            "longest_inner_gap_s": 0.1,
            "build": "0.1.0",
        }
        peer = peer_of(i) if role == "node" else WITNESS
        said = NodeReport(**{**fields, **says}) if report and not bad else None
        self.rows[peer] = Listed(
            peer,
            name or f"node {i}",
            role,
            state,
            live,
            left,
            silent_s,
            False,
            reachable,
            said,
            bad,
            offset_s,
        )

    def listed(self) -> None:
        self.builder.directory(self.rows.values(), when_unix=self.now)

    def entry(
        self, content: Content, *, last: bool = False, losses: Mapping[bytes, float] | None = None
    ) -> None:
        self.index += 1
        body = Body(RUN, 0, self.index, bytes(32), committee_digest(self.committee), content)
        acks = (AckSignature(bytes(32), bytes(64)),)
        certificate = Certificate(committee_digest(self.committee), self.term, last, acks)
        entry = Entry(encode(body), certificate)
        self.entries.append((entry, self.now, dict(losses or {})))
        self.builder.entry_applied(entry, when_unix=self.now, losses=losses)
        if last:
            self.term += 1

    def step(
        self,
        deltas: Sequence[tuple[int, int, float]],
        *,
        staleness: Mapping[int, float] | None = None,
        refused: Sequence[tuple[int, str]] = (),
        last: bool = False,
        after_s: float = 4.0,
    ) -> None:
        """One outer step; `deltas`: (node, tokens, loss)."""
        self.now += after_s
        self.version += 1
        self.clock += sum(tokens for _, tokens, _ in deltas)
        made, losses = [], {}
        for i, tokens, loss in deltas:
            delta = digest_of(b"delta %d %d" % (self.version, i))
            losses[delta] = loss
            late = (staleness or {}).get(i, 0.0)
            made.append(
                Contribution(
                    delta=delta,
                    peer=peer_of(i),
                    base_version=0,
                    sequence=self.version,
                    steps=tokens // 1024,
                    tokens=tokens,
                    norm=1.0,
                    staleness=late,
                    weight=1.0,
                    clip=1.0,
                    key=bytes(32),
                    signature=bytes(64),
                )
            )
        no = tuple(made_up_refusal(i, why) for i, why in refused)
        scalars = Scalars(1.0, 1.0, 0.9, 1.0, 0.5)
        content = OuterStep(self.version, 0, tuple(made), no, (), scalars, self.clock, 60_000, bytes(32))
        self.entry(content, last=last, losses=losses)

    def seats(self, *nodes: int, witness: bool = True) -> None:
        self.now += 0.1
        committee = Committee(WITNESS if witness else bytes(32), tuple(peer_of(i) for i in nodes))
        self.entry(Membership(committee, bytes(32)))
        self.committee = committee
        self.term += 1

    def owner(self, kind: str, value: int = 0, *, node: int | None = None) -> None:
        self.now += 0.1
        peer = b"" if node is None else peer_of(node)
        self.entry(OwnerEntry(OwnerWord(kind, 1, value, peer, b""), bytes(32)))

    def evaluated(
        self,
        loss: float,
        by: int | None = None,
        version: int | None = None,
        *,
        losses: Sequence[float] = (),
        samples: Sequence[str] = (),
    ) -> None:
        """A report, by a chosen node unless another is named; of the newest version.

        `losses`: of the sets behind the first. Raises: PeerError, as the builder does.
        """
        version = self.version if version is None else version
        chosen = self.builder.evaluators.chosen(version).chosen
        sender = peer_of(by) if by is not None else chosen[0] if chosen else peer_of(1)
        tokens = measured_tokens(self.spec)
        said = (loss, *losses)
        sets = tuple(SetLoss(x, n) for x, n in zip(said, (*tokens, *tokens), strict=False))
        report = EvalReport(version, bytes(32), sets, tuple(samples))
        self.builder.evaluated(sender, report, when_unix=self.now)

    def lifelike(self, versions: int = 60) -> None:
        """Four nodes of mixed speed, a few events, an evaluation every fourth version."""
        names = {1: "attic-3090", 2: "Müller’s laptop", 3: "lab-a", 4: "basement"}
        for i, name in names.items():
            self.node(i, name, state="joining", report=False)
        self.listed()
        self.evaluated(5.545)
        sent = dict.fromkeys(names, 0)
        for v in range(1, versions + 1):
            if v == 4:
                self.seats(1, 3)
            for i, name in names.items():
                here = not (i == 4 and 25 <= v < 40)
                self.node(
                    i,
                    name,
                    bytes_up=sent[i],
                    bytes_down=2 * sent[i],
                    live=here,
                    silent_s=1.0 if here else 4.0 * (v - 24),
                    tokens_per_s=(9000, 3200, 5600, 4100)[i - 1],
                    device=("NVIDIA RTX 3090", "Apple M2, cpu", "NVIDIA A4000", "cpu, 4 cores")[i - 1],
                    loss=self.loss(v),
                )
                sent[i] += 1_350_000 * here
            self.listed()
            here = [i for i in names if not (i == 4 and 25 <= v < 40) and not (i == 2 and v % 3)]
            self.step(
                [(i, (20480, 7168, 16384, 10240)[i - 1], self.loss(v) + 0.02 * i) for i in here],
                staleness={2: 1.3},
                refused=[(4, "TOO_LATE")] if v == 40 else (),
                last=v % 3 == 0 and v > 4,
                after_s=4.0 + 0.3 * math.sin(v),
            )
            if v % self.spec.eval_every == 0:
                self.evaluated(self.loss(v) + 0.05)
        self.listed()

    @staticmethod
    def loss(version: int) -> float:
        return 1.9 + 3.6 * math.exp(-version / 14) + 0.05 * math.sin(version * 1.7)


@pytest.fixture
def fake_run() -> type[FakeRun]:
    return FakeRun

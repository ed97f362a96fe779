"""A run made by hand: one witness certifies the deltas of two nodes, the product's own stores keep it."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Self

import msgspec
import numpy as np
import pytest
from aiohttp import web

from p2pdiloco.diloco.compress import Origin
from p2pdiloco.diloco.compress import encode as encode_delta
from p2pdiloco.diloco.global_state import chunks_of
from p2pdiloco.diloco.norms import l2_norm
from p2pdiloco.errors import PeerError
from p2pdiloco.ids import NO_DIGEST, Digest, RunId, digest_of, tagged_digest
from p2pdiloco.protocol.run_log import RunLog
from p2pdiloco.rules.state import after_membership, after_outer_step, genesis_state, rules_digest
from p2pdiloco.run_spec import (
    BYTES,
    BlobRef,
    CommitteeSpec,
    DataSpec,
    EvaluationSet,
    Genesis,
    ModelSpec,
    RunSpec,
    TensorSpec,
    TokenizerSpec,
    run_id_of,
    sign_run_spec,
)
from p2pdiloco.wire.codec import encode
from p2pdiloco.wire.frames import make_frame
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
    Scalars,
    body_digest,
    committee_digest,
    state_root,
)
from p2pdiloco.wire.signing import Ed25519Signer, ack_statement, delta_statement, verify_ed25519
from p2pdiloco_node.ports import Array, Purpose
from p2pdiloco_node.storage.blob_store import DiskBlobStore
from p2pdiloco_node.storage.journal import DiskJournal
from p2pdiloco_node.storage.state_keeper import DiskStateKeeper
from p2pdiloco_node.transport.readers import ReaderRoutes
from p2pdiloco_node.transport.server import Server
from p2pdiloco_node.transport.traffic import Traffic

OWNER = Ed25519Signer(bytes(range(32)))
WITNESS = Ed25519Signer(bytes([7] * 32))
NODES = (Ed25519Signer(bytes([1] * 32)), Ed25519Signer(bytes([2] * 32)))
TENSORS = (TensorSpec("model.embed_tokens.weight", (256, 8)), TensorSpec("model.norm.weight", (8,)))
PARAMS = sum(t.size for t in TENSORS)


class KeptRun:
    """A run's DIR as a tracker keeps it; `step` certifies a version more."""

    def __init__(
        self,
        folder: Path,
        template: RunSpec,
        *,
        params: Array | None = None,
        model: ModelSpec | None = None,
        tokenizer_json: bytes = b"",
        tokenizer: TokenizerSpec = BYTES,
        held_out: bytes = b"held out " * 40,
        token_bytes: int = 1,
        text_bytes: int | None = None,
        **changed: object,
    ) -> None:
        self.folder = folder
        (folder / "blobs").mkdir(parents=True)
        config = {"vocab_size": 256, "hidden_size": 8}
        self.model = model or ModelSpec(
            "llama", "tiny", json.dumps(config, sort_keys=True).encode(), 256, 32, TENSORS
        )
        start = np.random.default_rng(1).standard_normal(self.model.params).astype(np.float32)
        self.start = start if params is None else params
        frame = make_frame(held_out)
        tokens = len(held_out) // token_bytes
        if tokenizer_json:
            piece = make_frame(tokenizer_json)
            self._put(piece)
            ref = BlobRef(digest_of(piece), len(piece), len(tokenizer_json))
            tokenizer = msgspec.structs.replace(tokenizer, pieces=(ref,))
        self.held_out = BlobRef(self._put(frame), len(frame), tokens)
        data = DataSpec(
            tokenizer,
            token_bytes,
            (self.held_out,),
            (EvaluationSet("all", self.held_out, text_bytes or len(held_out)),),
        )
        chunks = [tuple(self._put(c) for c in chunks_of(a)) for a in (self.start, np.zeros_like(self.start))]
        self.spec = msgspec.structs.replace(
            template,
            model=self.model,
            data=data,
            owner_key=OWNER.public_key,
            genesis=Genesis(*chunks),
            committee=CommitteeSpec(Committee(WITNESS.peer_id, ())),
            **changed,
        )
        self.signed = sign_run_spec(self.spec, OWNER)
        self.run: RunId = run_id_of(encode(self.spec))
        (folder / "spec.bin").write_bytes(self.signed)
        own = folder / "witness"
        self.blobs = DiskBlobStore(own / "blobs", also=(folder / "blobs",))
        self.journal = DiskJournal(own / "journal")
        self.journal.load_entries()
        self.keeper = DiskStateKeeper(own, self.spec, self.blobs)
        self.log = RunLog(self.run, self.spec)
        self.rules = genesis_state(self.spec)
        self.roots = (self.spec.genesis.params_root, self.spec.genesis.momentum_root)
        self.params = {0: self.start.copy()}  # by version

    def _put(self, data: bytes | memoryview) -> Digest:
        digest = digest_of(data)
        (self.folder / "blobs" / digest.hex()).write_bytes(data)
        return digest

    @property
    def version(self) -> int:
        return self.rules.version

    def delta(self, number: int, values: Array | None = None) -> Contribution:
        """Node `number`'s delta for the next version, in the store."""
        signer = NODES[number]
        sequence = self.version + 1
        if values is None:
            noise = np.random.default_rng(100 * sequence + number)
            values = (0.01 * noise.standard_normal(self.model.params)).astype(np.float32)
        blob = encode_delta(
            self.spec.outer.codec, values, self.model.tensors, Origin(signer.peer_id, sequence)
        )
        digest = digest_of(blob)
        self.blobs.put(digest, blob)
        statement = delta_statement(self.run, digest, 0, self.version, sequence, 4)
        return Contribution(
            delta=digest, peer=signer.peer_id, base_version=self.version, sequence=sequence, steps=4,
            tokens=1000 * (number + 1), norm=float(np.float32(l2_norm(values))), staleness=0.0, weight=1.0,
            clip=1.0, key=signer.public_key, signature=signer.sign(statement),
        )  # fmt: skip

    def step(self, contributions: Sequence[Contribution] | None = None) -> None:
        """Certify the next version."""
        if contributions is None:
            contributions = [self.delta(0), self.delta(1)]
        listed = tuple(sorted(contributions, key=lambda c: c.delta))
        clock = self.rules.clock + sum(c.tokens for c in listed)
        scalars = Scalars(float(len(listed)), 1.0, 0.5, 1.0, 0.5)
        step = OuterStep(self.version + 1, 0, listed, (), (), scalars, clock, 3000, NO_DIGEST)
        ticket = tagged_digest("test", encode(step))
        roots = self.keeper.prepare(ticket, step)
        self.roots = (roots.params, roots.momentum)
        self.rules = after_outer_step(self.rules, step, self.spec)
        root = state_root(*self.roots, rules_digest(self.rules))
        self.certify(msgspec.structs.replace(step, state_root=root))
        self.keeper.install(self.log.index, step.version, ticket, encode(self.rules))
        self.params[step.version] = self.keeper.params().copy()

    def membership(self) -> None:
        """An entry that changes no array."""
        committee = self.rules.committee
        self.rules = after_membership(self.rules, committee)
        root = state_root(*self.roots, rules_digest(self.rules))
        self.certify(Membership(committee, root))
        self.keeper.install(self.log.index, self.version, None, encode(self.rules))

    def certify(self, content: Content) -> None:
        log = self.log
        named = committee_digest(log.committee)
        body = encode(Body(self.run, 0, log.index + 1, log.head, named, content))
        statement = ack_statement(self.run, 0, named, 1, log.index + 1, body_digest(body), last=False)
        ack = AckSignature(WITNESS.public_key, WITNESS.sign(statement))
        entry = Entry(body, Certificate(named, 1, False, (ack,)))
        log.append(entry)
        self.journal.append_entries([entry])

    def snapshot(self) -> None:
        self.keeper.take_snapshot(self.log.index, self.version)

    def steps(self, count: int) -> Self:
        for _ in range(count):
            self.step()
        return self

    def routes(self) -> list[web.RouteDef]:
        """As a tracker serves it."""

        async def nothing(*_: Any) -> None:
            raise PeerError("MALFORMED", "nobody talks here")

        server = Server(
            run=self.run, me=WITNESS.peer_id, run_spec=self.signed, build="1", blobs=self.blobs,
            verify=verify_ed25519, on_message=nothing, on_delta=nothing, head=lambda: None, health=dict,
            known=lambda _peer: False, local=True,
        )  # fmt: skip
        server.reveal(*self.blobs.digests(Purpose.DELTA))
        app = server.app()
        readers = ReaderRoutes(
            self.run,
            self.folder / "witness" / "journal" / "log",
            lambda: self.journal.rewrites,
            lambda: self.keeper.snapshots,
            Traffic(),
            local=True,
        )
        app.add_routes(readers.routes())
        self.app = app
        return readers.routes()


@pytest.fixture
def kept_run(tmp_path: Path, fake_run: Any) -> Callable[..., KeptRun]:
    """Makes a run in `tmp_path`/run."""

    def make(name: str = "run", **more: Any) -> KeptRun:
        return KeptRun(tmp_path / name, fake_run().spec, **more)

    return make

"""The bytes on the wire are a promise: any change of them needs a new protocol version.

`tests/vectors/wire.json` holds one encoding of every kind, of the log's things, of the statements that are
signed and of the names that are hashed. After raising `PROTOCOL_VERSION`, write it anew with

    python tests/rules/test_wire_vectors.py

and describe the change in docs/spec/wire.md and CHANGELOG.md.
"""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Any

import msgspec.inspect as types
import pytest

from p2pdiloco.ids import RunId, digest_of, merkle_root, peer_id_of, tagged_digest
from p2pdiloco.run_spec import RunSpec, SignedRunSpec, run_id_of
from p2pdiloco.wire import envelope, log, signing
from p2pdiloco.wire.codec import decode, encode
from p2pdiloco.wire.messages import KINDS, Heartbeat

RECEIVER = peer_id_of(bytes(32))
VECTORS = Path(__file__).resolve().parents[1] / "vectors" / "wire.json"
WRONG = (
    "the encoding of {} changed, so the protocol version must change: nodes of the old build would "
    "refuse or misread it. Raise PROTOCOL_VERSION in p2pdiloco/wire/envelope.py, then write the vectors anew."
)
LOG_THINGS: dict[str, Any] = {
    "Committee": log.Committee,
    "OuterStep": log.OuterStep,
    "Membership": log.Membership,
    "OwnerEntry": log.OwnerEntry,
    "Body": log.Body,
    "Certificate": log.Certificate,
    "Entry": log.Entry,
    "RunSpec": RunSpec,
    "SignedRunSpec": SignedRunSpec,
}


class Maker:
    """Fills a type with values that differ from field to field, the same in every process."""

    def __init__(self) -> None:
        self._count = 0

    def value(self, kind: types.Type) -> Any:
        self._count += 1
        n = self._count
        match kind:
            case types.StructType():
                return kind.cls(**{field.name: self.value(field.type) for field in kind.fields})
            case types.UnionType():
                return self.value(kind.types[0])
            case types.VarTupleType():
                return tuple(self.value(kind.item_type) for _ in range(max(2, kind.min_length or 0)))
            case types.BytesType():
                size = max(kind.min_length or 0, min(5, kind.max_length or 5))
                return hashlib.shake_128(n.to_bytes(4, "big")).digest(size)
            case types.StrType():
                words = re.findall(r"\w+", kind.pattern or "")
                return words[0] if words else f"word {n}"
            case types.IntType():
                return min((kind.ge or 0) + 1000 + n, kind.le if kind.le is not None else 2**62)
            case types.FloatType():
                return min(n / 8 + (kind.ge or 0), kind.le if kind.le is not None else 1e9)
            case types.BoolType():
                return n % 2 == 1
            case types.EnumType():
                return list(kind.cls)[n % len(kind.cls)]
        raise AssertionError(f"no example for {kind}")


def example(cls: Any) -> Any:
    return Maker().value(types.type_info(cls))


def make_vectors() -> dict[str, Any]:
    signer = signing.Ed25519Signer(bytes(range(32)))
    run, committee, body = (tagged_digest("test", bytes([n])) for n in range(3))
    return {
        "protocol_version": envelope.PROTOCOL_VERSION,
        "messages": {name: encode(example(cls)).hex() for name, cls in sorted(KINDS.items())},
        "log": {name: encode(example(cls)).hex() for name, cls in LOG_THINGS.items()},
        "signed": {
            "envelope": envelope.seal(
                example(Heartbeat), signer, run=RunId(run), epoch=1, boot=2, n=3, to=RECEIVER
            ).hex(),
            "ack": signing.ack_statement(RunId(run), 1, committee, 2, 3, body, last=True).hex(),
            "proposal": signing.proposal_statement(RunId(run), 1, committee, 2, 3, body, last=False).hex(),
            "delta": signing.delta_statement(RunId(run), body, 0, 1, 2, 3).hex(),
            "owner": example(log.OwnerWord).statement(RunId(run), 1).hex(),
        },
        "names": {
            "blob": digest_of(b"p2pdiloco").hex(),
            "peer": peer_id_of(signer.public_key).hex(),
            "run": run_id_of(b"p2pdiloco").hex(),
            "committee": log.committee_digest(example(log.Committee)).hex(),
            "body": log.body_digest(b"p2pdiloco").hex(),
            "genesis": log.genesis_digest(RunId(run)).hex(),
            "state": log.state_root(run, committee, body).hex(),
            **{
                f"merkle_{n}": merkle_root([digest_of(bytes([i])) for i in range(n)]).hex()
                for n in range(1, 6)
            },
        },
    }


@pytest.fixture(scope="module")
def kept() -> dict[str, Any]:
    vectors: dict[str, Any] = json.loads(VECTORS.read_text())
    return vectors


def test_vectors_are_of_this_protocol(kept: dict[str, Any]) -> None:
    assert kept["protocol_version"] == envelope.PROTOCOL_VERSION, "write the vectors anew for the new version"


@pytest.mark.parametrize("part", ["messages", "log", "signed", "names"])
def test_nothing_encodes_differently(kept: dict[str, Any], part: str) -> None:
    made = make_vectors()[part]
    assert made.keys() == kept[part].keys(), WRONG.format(sorted(made.keys() ^ kept[part].keys()))
    changed = [name for name in made if made[name] != kept[part][name]]
    assert not changed, WRONG.format(changed)


@pytest.mark.parametrize("name", sorted({**KINDS, **LOG_THINGS}))
def test_kept_bytes_open_to_what_was_sealed(kept: dict[str, Any], name: str) -> None:
    cls: Any = {**KINDS, **LOG_THINGS}[name]
    data = bytes.fromhex({**kept["messages"], **kept["log"]}[name])
    assert decode(data, cls) == example(cls), WRONG.format(name)


def test_the_kept_envelope_opens(kept: dict[str, Any]) -> None:
    opened = envelope.open_envelope(
        bytes.fromhex(kept["signed"]["envelope"]),
        signing.verify_ed25519,
        run=RunId(tagged_digest("test", bytes([0]))),
        me=RECEIVER,
        epoch=1,
    )
    assert opened.message == example(Heartbeat)
    assert (opened.epoch, opened.boot, opened.n) == (1, 2, 3)


def test_statements_cannot_stand_for_one_another(kept: dict[str, Any]) -> None:
    """Every signed thing begins with a domain tag of its own (docs/spec/wire.md)."""
    tags = [
        bytes.fromhex(kept["signed"][name]).split(b"\0")[0] for name in ("ack", "proposal", "delta", "owner")
    ]
    tags.append(envelope.DOMAIN.rstrip(b"\0"))
    assert len(set(tags)) == len(tags)
    assert all(tag.startswith(b"p2pdiloco/v1/") for tag in tags)


if __name__ == "__main__":
    VECTORS.write_text(json.dumps(make_vectors(), indent=1) + "\n")
    print(f"wrote {VECTORS}")

"""Where an exported model comes from: p2pdiloco.json, for programs, and what the model card is made of.

Version, tokens, contributors and digests come from the certified log and the signed RunSpec. Names and the
evaluation are what a tracker says of the run: no entry certifies them, and the words here say so.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

from p2pdiloco import limits
from p2pdiloco.ids import Digest, RunId, merkle_root, short
from p2pdiloco.rules.evaluation import bits_per_byte, perplexity
from p2pdiloco.run_spec import RunSpec
from p2pdiloco.status import clean_name, clean_text
from p2pdiloco_node import __version__
from p2pdiloco_node.export.chain import Tally
from p2pdiloco_node.export.weights import Written

FORMAT = 1  # goes up when the meaning of a key changes; keys are only ever added
Facts = dict[str, Any]


class Evaluation(NamedTuple):
    """Held-out loss, nats per token, of a version, as the run's evaluators told the tracker."""

    version: int
    loss: float  # on the first set
    tokens: int
    losses: tuple[float, ...] = ()  # by evaluation set, in the RunSpec's order, where they are known


class Heard(NamedTuple):
    """What a tracker says and no entry certifies."""

    evaluation: Evaluation | None = None
    # by fingerprint
    names: Mapping[str, str] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Origin:
    """Which certified version this is."""

    run: RunId
    spec: RunSpec
    version: int
    index: int  # of the log entry that made it
    head: Digest  # that entry's body
    params_root: Digest
    tally: Tally


def facts_of(origin: Origin, heard: Heard, dtype: str, weights: Sequence[Written]) -> Facts:
    """Plain values for JSON, the same for the same version."""
    run, spec, tally = origin.run, origin.spec, origin.tally
    parent = spec.parent
    return {
        "format": FORMAT,
        "made_by": f"p2pdiloco {__version__}",
        "run": {
            "id": run.hex(),
            "name": clean_name(spec.name),
            "owner_key": spec.owner_key.hex(),
            "admission": spec.admission,
            "origin": clean_text(spec.origin),
            "parent": None
            if parent is None
            else {
                "run": parent.run.hex(),
                "version": parent.version,
                "params_root": parent.params_root.hex(),
            },
        },
        "version": origin.version,
        "tokens": tally.tokens,
        "target_tokens": max(spec.target_tokens, tally.target_tokens),
        "target_version": spec.target_version or None,
        "ended_by_owner": tally.ended_by_owner,  # at this version, before its targets
        "log": {"index": origin.index, "head": origin.head.hex(), "params_root": origin.params_root.hex()},
        "model": {
            "family": spec.model.family,
            "preset": clean_text(spec.model.preset),
            "params": spec.model.params,
            "seq_len": spec.model.seq_len,
            "vocab_size": spec.model.vocab_size,
        },
        "data": _data(spec),
        "evaluation": _evaluation(spec, heard.evaluation),
        "contributors": [
            {
                "peer": peer.hex(),
                "name": clean_name(heard.names[short(peer)]) if short(peer) in heard.names else "",
                "tokens": share.tokens,
                "deltas": share.deltas,
            }
            for peer, share in sorted(tally.shares.items(), key=lambda item: (-item[1].tokens, item[0]))
        ],
        "weights": {"dtype": dtype, "files": [file._asdict() for file in weights]},
    }


def _data(spec: RunSpec) -> Facts:
    data = spec.data
    digests = [Digest(shard.digest) for shard in data.shards]
    listed = digests if len(digests) <= limits.array_items_max else []
    return {
        "tokens": sum(shard.tokens for shard in data.shards),
        "shards": len(digests),
        "shards_root": merkle_root(digests).hex(),  # names all of them, in order
        "shard_digests": [digest.hex() for digest in listed],
        "tokenizer": {
            "kind": data.tokenizer.kind,
            "vocab_size": data.tokenizer.vocab_size,
            "end_token": data.tokenizer.end_token,
            "digests": [piece.digest.hex() for piece in data.tokenizer.pieces],
        },
        "held_out": [
            {
                "name": clean_name(held.name),
                "digest": held.shard.digest.hex(),
                "tokens": held.shard.tokens,
                "token_bytes": data.token_bytes,
                "text_bytes": held.text_bytes,
            }
            for held in data.evaluations
        ],
    }


def _evaluation(spec: RunSpec, said: Evaluation | None) -> Facts | None:
    if said is None or not 0 <= said.loss <= limits.loss_shown_max:
        return None
    first = spec.data.evaluations[0]
    return {
        "version": said.version,
        "loss": said.loss,
        "perplexity": perplexity(said.loss),
        "bits_per_byte": bits_per_byte(said.loss, first),
        "tokens": said.tokens,
        "sets": [
            {
                "name": clean_name(held.name),
                "loss": loss,
                "perplexity": perplexity(loss),
                "bits_per_byte": bits_per_byte(loss, held),
            }
            for held, loss in zip(spec.data.evaluations, said.losses or (said.loss,), strict=False)
            if 0 <= loss <= limits.loss_shown_max
        ],
        "said_by": "the run's tracker",
    }

"""`p2pdiloco run inspect`: all that a RunSpec says, in words with units, how far the run is, and what a node
needs for it in traffic and memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from p2pdiloco import limits
from p2pdiloco.ids import Digest, PeerId, RunId, merkle_root, peer_id_of, short
from p2pdiloco.protocol.run_log import RunLog
from p2pdiloco.rules.delta_layout import encoded_size
from p2pdiloco.rules.state import RulesState
from p2pdiloco.run_spec import RunSpec
from p2pdiloco.wire.log import OwnerEntry
from p2pdiloco.words import count_of
from p2pdiloco_node.run.checks import Declared, memory, traffic
from p2pdiloco_node.training.memory_plan import amount, in_words

Row = tuple[str, str]


class Now(NamedTuple):
    """How far the run is, from a checked log."""

    log: RunLog
    rules: RulesState
    names: Mapping[PeerId, str]


class Section(NamedTuple):
    title: str
    rows: Sequence[Row]  # an empty label: more of the row before
    lines: Sequence[str] = ()  # a table of its own


def sections(
    run: RunId, spec: RunSpec, declared: Declared, *, link: str = "", now: Now | None = None
) -> list[Section]:
    """What is printed for people."""
    found = [
        Section(f"Run {spec.name}", _identity(run, spec, link)),
        Section("Model", _model(spec)),
        Section("Data", _data(spec)),
        Section("Inner loop", _inner(spec)),
        Section("Outer loop", _outer(spec)),
        Section("Committee", _committee(spec)),
        Section("Targets, evaluation, samples", _targets(spec)),
        Section("What a node sends and fetches", _traffic(spec, declared)),
    ]
    if declared.memory_gb is not None:
        lines = in_words(memory(spec, declared.memory_gb), free=False)
        found.append(Section(f"Memory of a node with {declared.memory_gb:g} GiB on its GPU", (), lines))
    if now is not None:
        found.append(Section("Now", _now(spec, now)))
    return found


def in_lines(found: Sequence[Section]) -> list[str]:
    width = max(len(label) for section in found for label, _ in section.rows)
    lines: list[str] = []
    for section in found:
        lines += ["", section.title]
        lines += [f"  {label:{width}}  {value}" for label, value in section.rows]
        lines += section.lines
    return lines[1:]


def as_plain(
    run: RunId, spec: RunSpec, declared: Declared, *, link: str = "", now: Now | None = None
) -> dict[str, Any]:
    """The same for programs: the RunSpec's fields with digests in hex, and what follows from them."""
    t = traffic(spec, declared)
    plain: dict[str, Any] = {
        "run": run.hex(),
        "join": link,
        "spec": _plain(msgspec.to_builtins(spec, builtin_types=(bytes,)), spec),
        "params": spec.model.params,
        "tokens_per_inner_step": spec.tokens_per_inner_step,
        "tokens_per_pass": spec.inner.inner_steps * spec.tokens_per_inner_step,
        "training_tokens": sum(shard.tokens for shard in spec.data.shards),
        "params_root": spec.genesis.params_root.hex(),
        "traffic": t._asdict(),
    }
    if declared.memory_gb is not None:
        plan = memory(spec, declared.memory_gb)
        plain["memory"] = {
            "gpu_bytes": plan.gpu,
            "micro_batch": plan.micro_batch,
            "checkpointing": plan.checkpointing,
            "offload": plan.offload,
            "missing_bytes": sum(plan.missing.values()),
        }
    if now is not None:
        plain["now"] = {
            "epoch": now.log.epoch,
            "index": now.log.index,
            "version": now.rules.version,
            "tokens": now.rules.clock,
            "target_tokens": now.rules.target_tokens,
            "paused": now.rules.paused,
            "finished": now.rules.finished,
            "committee": [m.hex() for m in now.log.committee.members],
            "revoked": [p.hex() for p in now.rules.revoked],
            "owner_sequence": now.rules.owner_sequence,
        }
    return plain


def _plain(value: Any, like: Any) -> Any:
    """Names for fields, hex for bytes."""
    if isinstance(like, msgspec.Struct):
        names = like.__struct_fields__
        return {name: _plain(item, getattr(like, name)) for name, item in zip(names, value, strict=True)}
    if isinstance(like, tuple):
        return [_plain(item, inner) for item, inner in zip(value, like, strict=True)]
    if isinstance(value, bytes):
        return value.hex()
    return value


def _identity(run: RunId, spec: RunSpec, link: str) -> list[Row]:
    rows = [
        ("RunId", run.hex()),
        ("format, arithmetic", f"{spec.format}, {spec.math_version}"),
        ("owner's key", f"{spec.owner_key.hex()} (peer {short(peer_id_of(spec.owner_key))})"),
        ("admission", _admission(spec)),
        ("version 0", spec.origin or "initialised from a seed"),
        ("its params' root", spec.genesis.params_root.hex()),
    ]
    if spec.parent is not None:
        parent = spec.parent
        rows.append(("fork of", f"run {parent.run.hex()} at version {parent.version:,}"))
        same = merkle_root([Digest(c) for c in spec.genesis.params]) == parent.params_root
        rows.append(("", f"{'its params, unchanged' if same else 'NOT with its params'}"))
    rows.append(("nonce", spec.nonce.hex()))
    if link:
        rows.append(("join", f"p2pdiloco node --join {link}"))
    return rows


def _admission(spec: RunSpec) -> str:
    if spec.admission == "local":
        return "local: everybody who reaches it is trusted; addresses of one machine or network"
    return (
        f"open: trusted after {spec.trust_tokens:,} accepted tokens; everybody is until the run has merged "
        f"{spec.bootstrap_tokens:,}"
    )


def _model(spec: RunSpec) -> list[Row]:
    model = spec.model
    return [
        ("family", f"{model.family} ({model.preset})" if model.preset else model.family),
        (
            "parameters",
            f"{model.params:,} in {count_of(len(model.tensors), 'tensor')}, {_size(4 * model.params)}",
        ),
        ("vocabulary", f"{model.vocab_size:,} tokens"),
        ("sequences", count_of(model.seq_len, "token")),
        ("made with", model.made_with or "unknown releases"),
        ("config", model.config.decode("utf-8", "replace")),
    ]


def _data(spec: RunSpec) -> list[Row]:
    data = spec.data
    tokens, size = sum(s.tokens for s in data.shards), sum(b.size for b in data.blobs)
    tokenizer, shards = data.tokenizer, count_of(len(data.shards), "shard")
    words = "bytes" if tokenizer.kind == "bytes" else "tokenizer.json"
    window = min(data.window_shards, len(data.shards))
    return [
        ("tokens", f"{tokens:,} in {shards}, {count_of(data.token_bytes, 'byte')} each when opened"),
        ("of the target", f"{spec.target_tokens / max(1, tokens):.2f} times over the data"),
        ("to fetch", f"{_size(size)} in all; a node reads {count_of(window, 'shard')} at once"),
        (
            "tokenizer",
            f"{words}, {tokenizer.vocab_size:,} tokens; {tokenizer.end_token} ends a document",
        ),
        *[
            (
                "held out" if place == 0 else "",
                f"{e.name}: {e.shard.tokens:,} tokens, {e.text_bytes:,} bytes of text",
            )
            for place, e in enumerate(data.evaluations)
        ],
    ]


def _inner(spec: RunSpec) -> list[Row]:
    inner, step = spec.inner, spec.tokens_per_inner_step
    return [
        ("a pass", f"{count_of(inner.inner_steps, 'inner step')} (H), or {inner.pass_s:g} s"),
        ("an inner step", f"{count_of(inner.sequences_per_step, 'sequence')}, {count_of(step, 'token')}"),
        ("a full pass", f"{count_of(inner.inner_steps * step, 'token')} of one node"),
        ("learning rate", f"{inner.lr:g}, down to {inner.lr_min_share:g} of it at the target"),
        ("warm-up", f"{count_of(inner.warmup_tokens, 'token')} of the run"),
        ("after joining", f"{count_of(inner.moments_warmup_steps, 'step')} until AdamW's moments are warm"),
        ("AdamW", f"beta {inner.beta1:g} and {inner.beta2:g}, weight decay {inner.weight_decay:g}"),
        ("gradients", f"clipped to norm {inner.clip_norm:g}"),
    ]


def _outer(spec: RunSpec) -> list[Row]:
    outer = spec.outer
    size = encoded_size(outer.codec, spec.model.tensors)
    return [
        ("codec", f"{outer.codec}: a delta is {_size(size)}"),
        ("error feedback", f"{outer.error_feedback_beta:g} of what was not sent is kept for later"),
        ("momentum (mu)", f"{outer.mu:g}"),
        ("step (eta)", f"{outer.eta_alone:g} alone, {outer.eta_eight:g} with eight nodes"),
        ("staleness", f"{outer.decay} decay of weights, lambda {outer.lambda_:g}"),
        ("too late", f"after {count_of(outer.staleness_max, 'round')} on the token clock"),
        ("closes", f"by {outer.policy}, after {outer.deadline_passes:g} times a pass at the latest"),
        ("fragments", f"{outer.fragments}"),
    ]


def _committee(spec: RunSpec) -> list[Row]:
    c = spec.committee
    return [
        ("seats", f"at most {c.size_max}; begins with {_seats(c.genesis.size)}"),
        ("witness", PeerId(c.genesis.witness).hex()),
        ("an aggregator serves", count_of(c.rotation, "outer step")),
        (
            "heartbeats",
            f"every {c.heartbeat_s:g} s; {c.timeout_s_min:g} to {c.timeout_s_max:g} s are silence",
        ),
        (
            "a seat",
            f"after {c.voter_standing_s:g} s of standing; lost after {c.voter_lease_s:g} s of silence",
        ),
    ]


def _seats(size: int) -> str:
    return "the witness alone" if size == 1 else f"{size} seats"


def _targets(spec: RunSpec) -> list[Row]:
    steps = count_of(spec.target_version, "outer step")
    version = f"or {steps}" if spec.target_version else "no limit of outer steps"
    versions = count_of(spec.eval_every, "version")
    rows = [
        ("the run is over after", f"{count_of(spec.target_tokens, 'token')}, {version}"),
        ("evaluation", f"every {versions}, by {count_of(spec.evaluators_max, 'node')} at most"),
    ]
    if spec.samples.prompts:
        rows.append(("samples", f"{count_of(spec.samples.tokens, 'token')} after each prompt"))
        rows += [("", repr(prompt)) for prompt in spec.samples.prompts]
    else:
        rows.append(("samples", "none"))
    return rows


def _traffic(spec: RunSpec, declared: Declared) -> list[Row]:
    t = traffic(spec, declared)
    share = f"{t.up_share:.0%}" if t.up_share >= 0.005 else "less than 1%"
    up = f"{_seconds(t.up_s)} at {declared.up_mbit:g} Mbit/s, {share} of a pass"
    seats = "the witness alone" if t.voters == 1 else f"each of at most {t.voters} seats"
    down = f"{_seconds(t.down_s)} at {declared.down_mbit:g} Mbit/s"
    return [
        ("up, in a pass", f"{_size(t.up_bytes)}, a delta to {seats}: {up}"),
        ("down, in a pass", f"{_size(t.down_bytes)} with {limits.planned_nodes} nodes: {down}"),
        ("at the beginning", f"{_size(8 * spec.model.params)} of params and momentum, and data"),
    ]


def _seconds(seconds: float) -> str:
    if seconds < 0.1:
        return "less than 0.1 s"
    return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:,.0f} s"


def _size(size: int) -> str:
    """Bytes: what is smaller than a MiB by its thousands, not rounded up to one."""
    if size < 1000:
        return count_of(size, "byte")
    return f"{size / 1000:,.1f} kB" if size < limits.MIB else amount(size)


def _now(spec: RunSpec, now: Now) -> list[Row]:
    log, rules = now.log, now.rules

    def name(peer: bytes) -> str:
        known = "witness" if peer == spec.committee.genesis.witness else now.names.get(PeerId(peer), "")
        return f"{known} ({short(peer)})" if known else short(peer)

    words = "over" if rules.finished else "paused by the owner" if rules.paused else "going on"
    rows = [
        ("the run is", words),
        ("version", f"{rules.version:,}, entry {log.index:,}, epoch {log.epoch}"),
        ("tokens", f"{rules.clock:,} of {rules.target_tokens:,} ({rules.clock / rules.target_tokens:.1%})"),
        ("committee", ", ".join(name(m) for m in log.committee.members)),
    ]
    if rules.revoked:
        rows.append(("revoked", ", ".join(name(p) for p in rules.revoked)))
    for index in range(1, log.index + 1):
        content = log.content(index)
        if isinstance(content, OwnerEntry) and content.word.owner_sequence:
            word = content.word
            what = f" {count_of(word.value, 'token')}" if word.kind == "extend" else ""
            what = f" {name(word.peer)}" if word.kind == "revoke" else what
            rows.append(("the owner said", f"{word.kind}{what} (entry {index}, word {word.owner_sequence})"))
    return rows

"""The RunSpec: everything that the nodes of a run must agree on, signed by the run's owner.

Its digest is the RunId, so a tracker cannot swap the run. Local taste (limits, paths) is configuration.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

import msgspec
from msgspec import Meta

from p2pdiloco import limits
from p2pdiloco.errors import OperatorError, PeerError
from p2pdiloco.exit_codes import RUN
from p2pdiloco.ids import Digest, RunId, merkle_root, tagged_digest
from p2pdiloco.wire.codec import Struct, decode, encode
from p2pdiloco.wire.log import Bytes32, Committee
from p2pdiloco.wire.signing import Signer, Verify

FORMAT = 2
TOKEN_WIDTHS = (1, 2, 4)  # bytes
MATH_VERSION = 1  # changes whenever decode, merge or outer step could give other bits

Release = Annotated[int, Meta(ge=1, le=2**16)]  # of a format
Tokens = Annotated[int, Meta(ge=0, le=limits.run_tokens_max)]
Versions = Annotated[int, Meta(ge=0, le=limits.run_versions_max)]
SomeVersions = Annotated[int, Meta(ge=1, le=limits.run_versions_max)]
TokenId = Annotated[int, Meta(ge=0, le=limits.tokenizer_ids_max - 1)]
Prompt = Annotated[str, Meta(max_length=limits.sample_prompt_chars_max)]
Encoded = Annotated[tuple[TokenId, ...], Meta(max_length=limits.sample_prompt_tokens_max)]
Fraction = Annotated[float, Meta(ge=0, le=1)]
Seconds = Annotated[float, Meta(gt=0, le=86400)]


class BlobRef(Struct, frozen=True):
    """A frame by name and size. `tokens` for shards, of `DataSpec.token_bytes` bytes each when opened."""

    digest: Bytes32
    size: Annotated[int, Meta(ge=1, le=limits.frame_bytes_max)]
    tokens: Annotated[int, Meta(ge=0, le=limits.frame_content_bytes_max)]


class TensorSpec(Struct, frozen=True):
    """One tensor of the model, in the order in which params are flattened."""

    name: Annotated[str, Meta(max_length=256)]
    shape: Annotated[tuple[Annotated[int, Meta(ge=1, le=limits.model_params_max)], ...], Meta(max_length=8)]

    @property
    def size(self) -> int:
        n = 1
        for d in self.shape:
            n *= d
        return n


class ModelSpec(Struct, frozen=True):
    """A transformers config class by name with its arguments; never remote code.

    `config` is a JSON object of plain values with sorted keys: what the class is called with. It is opened
    by the trainer alone, which refuses a family or a key that it does not know.
    """

    family: Annotated[str, Meta(pattern="^[a-z0-9_]{1,32}$")]  # transformers' model_type
    preset: Annotated[str, Meta(max_length=64)]  # for people: llama:20m; empty: of a file
    config: Annotated[bytes, Meta(max_length=limits.model_config_bytes_max)]
    vocab_size: Annotated[int, Meta(ge=1, le=limits.model_config_int_max)]
    seq_len: Annotated[int, Meta(ge=1, le=limits.sequence_tokens_max)]  # tokens of a training sequence
    tensors: Annotated[tuple[TensorSpec, ...], Meta(min_length=1, max_length=limits.array_items_max)]
    made_with: Annotated[str, Meta(max_length=limits.made_with_chars_max, pattern="^[a-z0-9., +_-]*$")] = ""
    # ^ for people: releases of the libraries whose config class and tokenizer these are

    @property
    def params(self) -> int:
        """Number of parameters (float32 values)."""
        return sum(t.size for t in self.tensors)


class TokenizerSpec(Struct, frozen=True):
    """How text became tokens: bytes as they are, or a tokenizer.json by digest."""

    kind: Annotated[str, Meta(pattern="^(bytes|json)$")]
    vocab_size: Annotated[int, Meta(ge=1, le=limits.tokenizer_ids_max)]
    end_token: TokenId  # stands behind each document
    pieces: Annotated[tuple[BlobRef, ...], Meta(max_length=8)] = ()
    # ^ tokenizer.json cut into frames of at most `frame_content_bytes_max`; `tokens` are a frame's bytes


BYTES = TokenizerSpec(kind="bytes", vocab_size=256, end_token=0)


class EvaluationSet(Struct, frozen=True):
    """Held-out text. `text_bytes` are the UTF-8 bytes that its tokens stand for: bits per byte."""

    name: Annotated[str, Meta(min_length=1, max_length=limits.name_chars_max)]
    shard: BlobRef
    text_bytes: Annotated[int, Meta(ge=1, le=limits.corpus_bytes_max)]


class DataSpec(Struct, frozen=True):
    """Token shards, little-endian unsigned integers of `token_bytes` each, and what is held out.

    The first evaluation set is a sample of the whole corpus, those that follow are of one source each.
    """

    tokenizer: TokenizerSpec
    token_bytes: Annotated[int, Meta(ge=1, le=4)]  # 1, 2 or 4
    shards: Annotated[tuple[BlobRef, ...], Meta(min_length=1, max_length=100_000)]
    evaluations: Annotated[tuple[EvaluationSet, ...], Meta(min_length=1, max_length=16)]
    window_shards: Annotated[int, Meta(ge=1, le=256)] = limits.data_window_shards
    # ^ shards that a node reads at once (algorithm.md 8): fewer need less disk, more are better mixed

    @property
    def evaluation(self) -> BlobRef:
        """The held-out shard of the whole corpus."""
        return self.evaluations[0].shard

    @property
    def blobs(self) -> tuple[BlobRef, ...]:
        """Everything of the run's data that travels: shards, evaluation sets, tokenizer."""
        return (*self.shards, *(e.shard for e in self.evaluations), *self.tokenizer.pieces)


class InnerSpec(Struct, frozen=True):
    """Inner loop (algorithm.md 2)."""

    inner_steps: Annotated[int, Meta(ge=1, le=limits.inner_steps_max)]  # H
    pass_s: Seconds
    sequences_per_step: Annotated[int, Meta(ge=1, le=limits.sequences_per_step_max)]
    # ^ batch of one inner step, in sequences of model.seq_len tokens
    lr: Annotated[float, Meta(gt=0, le=1)]
    lr_min_share: Fraction  # of lr, at target_tokens
    warmup_tokens: Tokens  # on the run's token clock
    moments_warmup_steps: Annotated[int, Meta(ge=0, le=limits.inner_steps_max)]
    # ^ after joining or a long absence
    beta1: Fraction
    beta2: Fraction
    weight_decay: Fraction
    clip_norm: Annotated[float, Meta(gt=0)]


class OuterSpec(Struct, frozen=True):
    """Outer loop (algorithm.md 4). Defaults: as measured in docs/results/learning.md."""

    mu: Fraction = 0.5
    decay: Annotated[str, Meta(pattern="^(exponential|constant)$")] = "exponential"
    lambda_: Annotated[float, Meta(ge=0, le=10)] = 0.07
    staleness_max: Annotated[int, Meta(ge=1, le=limits.staleness_rounds_max)] = 16
    eta_alone: Annotated[float, Meta(gt=0, le=2)] = 0.5
    eta_eight: Annotated[float, Meta(gt=0, le=2)] = 0.65
    policy: Annotated[str, Meta(pattern="^quorum$")] = "quorum"
    deadline_passes: Annotated[float, Meta(gt=0, le=100)] = 1.5
    codec: Annotated[str, Meta(pattern="^(fp16|int4|topk(32|64|128))$")] = "int4"
    error_feedback_beta: Fraction = 1.0
    fragments: Annotated[int, Meta(ge=1, le=1)] = 1


# Where most of a delta comes later or never, momentum pulls too far and old feedback is stale.
SPARSE_OUTER = {"mu": 0.0, "eta_alone": 1.0, "eta_eight": 1.0, "error_feedback_beta": 0.95}


def outer_defaults(codec: str) -> dict[str, float]:
    """What a codec wants otherwise than `OuterSpec`'s defaults, as measured in docs/results/learning.md."""
    return dict(SPARSE_OUTER) if codec.startswith("topk") else {}


class CommitteeSpec(Struct, frozen=True):
    """Election and rotation (protocol.md 3, 4). Home-link defaults; the demo has its own timings."""

    genesis: Committee
    size_max: Annotated[int, Meta(ge=1, le=7)] = 3
    rotation: SomeVersions = 8
    heartbeat_s: Seconds = 5.0
    timeout_s_min: Seconds = 15.0
    timeout_s_max: Seconds = 30.0
    voter_standing_s: Annotated[float, Meta(ge=0, le=86400)] = 600.0
    voter_lease_s: Seconds = 120.0


def chunk_bytes_of(params: int) -> int:
    """Bytes of each chunk but the last: 4 MiB, doubled until an array has at most 2048 (protocol.md 2).

    So 4 MiB up to two thousand million params; the digests of params and momentum are one message's.
    """
    size = limits.chunk_bytes
    while 4 * params > limits.chunks_max * size:
        size *= 2
    return size


def chunk_sizes(params: int) -> list[int]:
    """Bytes of each chunk of an array of `params` values."""
    size, whole = 4 * params, chunk_bytes_of(params)
    return [min(whole, size - first) for first in range(0, size, whole)]


class Genesis(Struct, frozen=True):
    """Version 0: params by chunk digests (momentum is zero)."""

    params: Annotated[tuple[Bytes32, ...], Meta(min_length=1, max_length=limits.array_items_max)]
    momentum: Annotated[tuple[Bytes32, ...], Meta(min_length=1, max_length=limits.array_items_max)]

    @property
    def params_root(self) -> Digest:
        return merkle_root([Digest(c) for c in self.params])

    @property
    def momentum_root(self) -> Digest:
        return merkle_root([Digest(c) for c in self.momentum])


class Parent(Struct, frozen=True):
    """A fork: whose certified version this run's version 0 is."""

    run: Bytes32
    version: Versions
    params_root: Bytes32


class SampleSpec(Struct, frozen=True):
    """Continuations that evaluators write, greedily, for people to read."""

    prompts: Annotated[tuple[Prompt, ...], Meta(max_length=limits.sample_prompts_max)] = ()
    tokens: Annotated[int, Meta(ge=1, le=256)] = 48  # of each continuation
    encoded: Annotated[tuple[Encoded, ...], Meta(max_length=limits.sample_prompts_max)] = ()
    # ^ the prompts' tokens, made with the run: no node runs the tokenizer of a stranger over text


class RunSpec(Struct, frozen=True):
    format: Release
    math_version: Release
    name: Annotated[str, Meta(min_length=1, max_length=limits.name_chars_max)]
    owner_key: Bytes32
    model: ModelSpec
    data: DataSpec
    inner: InnerSpec
    outer: OuterSpec
    committee: CommitteeSpec
    genesis: Genesis
    admission: Annotated[str, Meta(pattern="^(local|open)$")]
    trust_tokens: Tokens  # open runs: trusted after so many accepted tokens
    bootstrap_tokens: Tokens  # open runs: everybody is trusted until the clock reaches this
    target_tokens: Annotated[int, Meta(ge=1, le=limits.run_tokens_max)]
    target_version: Versions  # 0: none
    eval_every: SomeVersions
    nonce: Annotated[bytes, Meta(min_length=16, max_length=16)]  # two runs alike have two RunIds
    evaluators_max: Annotated[int, Meta(ge=1, le=3)] = 3  # nodes that evaluate a version
    samples: SampleSpec = SampleSpec()
    origin: Annotated[str, Meta(max_length=limits.origin_chars_max)] = ""  # of version 0; empty: initialised
    parent: Parent | None = None

    @property
    def tokens_per_inner_step(self) -> int:
        return self.inner.sequences_per_step * self.model.seq_len


def contradictions(spec: RunSpec) -> Iterator[str]:
    """What no single field shows and no node may be made to try; a sentence each."""
    data, words = spec.data, spec.data.tokenizer
    if spec.model.params > limits.model_params_max:
        yield f"the model has {spec.model.params:,} parameters; {limits.model_params_max:,} are the most."
    if spec.tokens_per_inner_step > limits.step_tokens_max:
        yield (
            f"an inner step has {spec.tokens_per_inner_step:,} tokens; {limits.step_tokens_max:,} are the "
            "most: fewer or shorter sequences."
        )
    if data.token_bytes not in TOKEN_WIDTHS:
        yield f"tokens have {data.token_bytes} bytes each instead of 1, 2 or 4."
    longest = max(ref.tokens for ref in (*data.shards, *(held.shard for held in data.evaluations)))
    if longest * data.token_bytes > limits.frame_content_bytes_max:
        yield (
            f"a shard has {longest:,} tokens of {data.token_bytes} bytes; "
            f"{limits.frame_content_bytes_max:,} bytes are the most."
        )
    window = data.window_shards * (longest // spec.model.seq_len)
    if window > limits.window_sequences_max:
        yield (
            f"{data.window_shards} shards read at once have {window:,} sequences; "
            f"{limits.window_sequences_max:,} are the most: longer sequences, or fewer shards."
        )
    if words.end_token >= words.vocab_size:
        yield f"documents end with token {words.end_token}, and the tokenizer has {words.vocab_size:,}."
    samples, known = spec.samples, min(words.vocab_size, spec.model.vocab_size)
    if len(samples.encoded) != len(samples.prompts):
        yield f"there are {len(samples.prompts)} prompts, and tokens of {len(samples.encoded)}."
    if any(token >= known for prompt in samples.encoded for token in prompt):
        yield f"a prompt has a token that is none of the {known:,}."
    vocabulary = words.vocab_size
    if vocabulary > spec.model.vocab_size:
        yield (
            f"the tokenizer has {vocabulary:,} tokens and the model {spec.model.vocab_size:,}: choose a "
            "model that is made for this tokenizer, or the tokenizer of this model."
        )
    if vocabulary > 256**data.token_bytes:
        yield (
            f"{vocabulary:,} tokens do not fit into {data.token_bytes} bytes each: prepare the data again "
            "with this tokenizer."
        )
    pieces = len(chunk_sizes(spec.model.params))
    if (len(spec.genesis.params), len(spec.genesis.momentum)) != (pieces, pieces):
        yield (
            f"version 0 has {len(spec.genesis.params):,} chunks of params and "
            f"{len(spec.genesis.momentum):,} of momentum, and its model makes {pieces:,} of each."
        )
    yield from contradictory_timings(spec.committee)
    yield from contradictory_loops(spec.inner, spec.outer)


def contradictory_timings(c: CommitteeSpec) -> Iterator[str]:
    """Of a committee that cannot agree; a sentence each."""
    if c.size_max not in limits.committee_sizes:
        yield f"committee.size_max is {c.size_max}: a committee has 1, 3, 5 or 7 seats."
    if c.heartbeat_s < limits.run_seconds_min:
        yield f"committee.heartbeat_s is {c.heartbeat_s:g} s: {limits.run_seconds_min:g} s is the least."
    if c.timeout_s_min < limits.beats_min * c.heartbeat_s:
        yield (
            f"committee.timeout_s_min ({c.timeout_s_min:g} s) is less than {limits.beats_min} heartbeats of "
            f"{c.heartbeat_s:g} s: one that is lost would depose the aggregator; raise it to "
            f"{3 * c.heartbeat_s:g} or shorten committee.heartbeat_s."
        )
    if c.timeout_s_max <= c.timeout_s_min:
        yield (
            f"committee.timeout_s_max ({c.timeout_s_max:g} s) is not above timeout_s_min "
            f"({c.timeout_s_min:g} s): all voters would move at once; raise it to {2 * c.timeout_s_min:g}."
        )
    if c.voter_lease_s < c.timeout_s_max:
        yield (
            f"committee.voter_lease_s ({c.voter_lease_s:g} s) is less than timeout_s_max "
            f"({c.timeout_s_max:g} s): a voter would lose its seat before its silence is seen; raise it to "
            f"{4 * c.timeout_s_max:g}."
        )


def contradictory_loops(inner: InnerSpec, outer: OuterSpec) -> Iterator[str]:
    """Of loops that divide by nothing, or never forget; a sentence each."""
    if inner.pass_s < limits.run_seconds_min:
        yield f"inner.pass_s is {inner.pass_s:g} s: {limits.run_seconds_min:g} s is the least."
    if outer.mu >= 1:
        yield "outer.mu is 1: momentum would never decay; give less than 1, such as 0.5."
    if inner.beta1 >= 1 or inner.beta2 >= 1:
        yield "inner.beta1 and inner.beta2 must be less than 1: AdamW divides by what is missing to 1."


class Heading(msgspec.Struct, frozen=True, array_like=True):
    """The fields with which a RunSpec of any format begins; what follows them is left alone."""

    format: Annotated[int, Meta(ge=1)]
    math_version: Annotated[int, Meta(ge=1)]
    name: Annotated[str, Meta(min_length=1, max_length=limits.name_chars_max)]
    owner_key: Bytes32


class SignedRunSpec(Struct, frozen=True):
    """The RunSpec's bytes as the owner signed them."""

    spec: Annotated[bytes, Meta(max_length=limits.run_spec_bytes_max)]
    signature: Annotated[bytes, Meta(min_length=64, max_length=64)]


def run_id_of(spec_bytes: bytes) -> RunId:
    return RunId(tagged_digest("run", spec_bytes))


def sign_run_spec(spec: RunSpec, owner: Signer) -> bytes:
    """Bytes of the signed RunSpec, as a tracker serves them."""
    assert owner.public_key == spec.owner_key
    data = encode(spec)
    return encode(SignedRunSpec(data, owner.sign(b"p2pdiloco/v1/run-spec\0" + data)))


def spec_bytes_of(signed: bytes) -> bytes:
    """The RunSpec's own bytes, as signed. Raises: PeerError MALFORMED."""
    return decode(signed, SignedRunSpec, bytes_max=limits.run_spec_bytes_max + 1024).spec


def open_run_spec(data: bytes, verify: Verify, *, expected: RunId | None = None) -> tuple[RunId, RunSpec]:
    """Open an untrusted signed RunSpec.

    Raises:
        PeerError: MALFORMED, WRONG_RUN if its digest is not `expected`, BAD_SIGNATURE: it was changed on the
            way. BAD_RUN_SPEC: what was signed is no run that can be (contradictions are that, too).
        OperatorError: the run needs another version of this program.
    """
    signed = decode(data, SignedRunSpec, bytes_max=limits.run_spec_bytes_max + 1024)
    run = run_id_of(signed.spec)
    if expected is not None and run != expected:
        raise PeerError("WRONG_RUN", f"expected run {expected.hex()[:16]}, got {run.hex()[:16]}")
    try:
        heading = decode(signed.spec, Heading, bytes_max=limits.run_spec_bytes_max)
        if not verify(heading.owner_key, signed.signature, b"p2pdiloco/v1/run-spec\0" + signed.spec):
            raise PeerError("BAD_SIGNATURE", "RunSpec")
        if heading.format != FORMAT or heading.math_version != MATH_VERSION:
            # Before the rest is read: another format may well have other fields.
            raise OperatorError(
                f"run {heading.name!r} has format {heading.format} and math {heading.math_version}; this "
                f"build has {FORMAT} and {MATH_VERSION}: install the version that the run names "
                "(pip install p2pdiloco).",
                exit_code=RUN,
            )
        spec = decode(signed.spec, RunSpec, bytes_max=limits.run_spec_bytes_max)
    except PeerError as error:
        if error.reason == "BAD_SIGNATURE":
            raise
        raise PeerError("BAD_RUN_SPEC", str(error)) from None
    fault = next(contradictions(spec), None)
    if fault is not None:
        raise PeerError("BAD_RUN_SPEC", fault)
    return run, spec

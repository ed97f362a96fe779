"""The signed RunSpec: its digest is the run (protocol.md 2, 7)."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from p2pdiloco import limits
from p2pdiloco.errors import OperatorError, PeerError
from p2pdiloco.ids import RunId, digest_of, merkle_root
from p2pdiloco.rules.delta_layout import CODECS
from p2pdiloco.run_spec import (
    FORMAT,
    MATH_VERSION,
    BlobRef,
    EvaluationSet,
    OuterSpec,
    RunSpec,
    SampleSpec,
    SignedRunSpec,
    TensorSpec,
    TokenizerSpec,
    contradictions,
    open_run_spec,
    outer_defaults,
    run_id_of,
    sign_run_spec,
    spec_bytes_of,
)
from p2pdiloco.sim.tiny_run import tiny_run
from p2pdiloco.wire.codec import decode, encode
from p2pdiloco.wire.signing import Ed25519Signer, verify_ed25519

OWNER = Ed25519Signer(bytes([1]) * 32)
THIEF = Ed25519Signer(bytes([2]) * 32)
TINY = tiny_run(OWNER, THIEF.peer_id)


def signed(spec: RunSpec, key: Ed25519Signer = OWNER) -> bytes:
    """Signed by whom the test says, whoever the RunSpec names."""
    return by(encode(spec), key)


def by(data: bytes, key: Ed25519Signer = OWNER) -> bytes:
    return encode(SignedRunSpec(data, key.sign(b"p2pdiloco/v1/run-spec\0" + data)))


def changed(**fields: Any) -> RunSpec:
    return msgspec.structs.replace(TINY.spec, **fields)


def refused(data: bytes, reason: str, expected: RunId | None = None) -> None:
    with pytest.raises(PeerError) as error:
        open_run_spec(data, verify_ed25519, expected=expected)
    assert error.value.reason == reason


def test_the_way_there_and_back() -> None:
    data = sign_run_spec(TINY.spec, OWNER)
    assert open_run_spec(data, verify_ed25519) == (TINY.run, TINY.spec)
    assert open_run_spec(data, verify_ed25519, expected=TINY.run) == (TINY.run, TINY.spec)
    assert run_id_of(spec_bytes_of(data)) == TINY.run


def test_two_runs_alike_have_two_names() -> None:
    assert run_id_of(encode(changed(nonce=bytes([1] * 16)))) != TINY.run


def test_a_tracker_cannot_swap_the_run() -> None:
    other = changed(name="another", owner_key=THIEF.public_key)
    refused(signed(other, THIEF), "WRONG_RUN", expected=TINY.run)


def test_only_the_owner_it_names_signs_it() -> None:
    refused(signed(TINY.spec, THIEF), "BAD_SIGNATURE")
    signature = decode(sign_run_spec(TINY.spec, OWNER), SignedRunSpec, bytes_max=2**22).signature
    refused(encode(SignedRunSpec(encode(changed(target_tokens=1)), signature)), "BAD_SIGNATURE")


@pytest.mark.parametrize("change", [{"format": FORMAT + 1}, {"math_version": MATH_VERSION + 1}])
def test_a_run_of_another_version_is_the_operators_to_mend(change: dict[str, int]) -> None:
    with pytest.raises(OperatorError, match="install the version") as error:
        open_run_spec(signed(changed(**change)), verify_ed25519)
    assert error.value.exit_code == 5


def test_a_format_to_come_is_told_from_a_damaged_file() -> None:
    """Its fields beyond the heading are unknown here."""
    heading = [FORMAT + 1, 3, "later", OWNER.public_key, {"something": "new"}]
    with pytest.raises(OperatorError, match="'later' has format 3 and math 3"):
        open_run_spec(by(encode(heading)), verify_ed25519)
    refused(by(encode(heading), THIEF), "BAD_SIGNATURE")


def test_a_field_out_of_range_is_malformed() -> None:
    refused(signed(changed(eval_every=0)), "BAD_RUN_SPEC")
    refused(signed(changed(admission="everybody")), "BAD_RUN_SPEC")
    refused(signed(changed(name="")), "BAD_RUN_SPEC")
    refused(by(encode([*msgspec.to_builtins(TINY.spec, builtin_types=(bytes,)), 1])), "BAD_RUN_SPEC")


def with_part(part: str, **fields: Any) -> RunSpec:
    return changed(**{part: msgspec.structs.replace(getattr(TINY.spec, part), **fields)})


def with_shard(**fields: Any) -> RunSpec:
    return with_part("data", shards=(msgspec.structs.replace(TINY.spec.data.shards[0], **fields),))


@pytest.mark.parametrize(
    "spec",
    [
        with_part("inner", inner_steps=limits.inner_steps_max + 1),
        with_part("inner", pass_s=1e-300),
        with_part("committee", heartbeat_s=1e-300),
        with_part("inner", sequences_per_step=limits.sequences_per_step_max + 1),
        with_part("inner", moments_warmup_steps=limits.inner_steps_max + 1),
        with_part("inner", warmup_tokens=limits.run_tokens_max + 1),
        with_part("outer", staleness_max=limits.staleness_rounds_max + 1),
        with_part("committee", rotation=limits.run_versions_max + 1),
        with_part("model", seq_len=limits.sequence_tokens_max + 1),
        with_part("model", vocab_size=limits.model_config_int_max + 1),
        with_part("model", tensors=(TensorSpec("w", (limits.model_params_max + 1,)),)),
        with_part("model", made_with="transformers \x1b[2J"),
        with_part("data", tokenizer=TokenizerSpec("bytes", limits.tokenizer_ids_max + 1, 0)),
        with_part("data", evaluations=(EvaluationSet("all", TINY.spec.data.shards[0], 2**40),)),
        with_part("samples", prompts=("a",), encoded=((limits.tokenizer_ids_max,),)),
        with_part("samples", prompts=("a",), encoded=((1,) * (limits.sample_prompt_tokens_max + 1),)),
        with_shard(tokens=2**33),
        with_shard(size=limits.frame_bytes_max + 1),
        changed(target_tokens=limits.run_tokens_max + 1),
        changed(target_version=limits.run_versions_max + 1),
        changed(eval_every=limits.run_versions_max + 1),
        changed(trust_tokens=limits.run_tokens_max + 1),
    ],
)
def test_every_figure_has_a_bound(spec: RunSpec) -> None:
    """A stranger's RunSpec is opened before anything is known of it: no figure may cost its reader memory."""
    refused(signed(spec), "BAD_RUN_SPEC")


@pytest.mark.parametrize(
    ("spec", "sentence"),
    [
        (with_part("model", tensors=(TensorSpec("w", (2**20, 2**20)),)), "parameters"),
        (
            changed(
                inner=msgspec.structs.replace(TINY.spec.inner, sequences_per_step=2**14),
                model=msgspec.structs.replace(TINY.spec.model, seq_len=2**13),
            ),
            "tokens",
        ),
        (with_part("data", token_bytes=3), "1, 2 or 4"),
        (
            changed(
                data=msgspec.structs.replace(
                    TINY.spec.data, token_bytes=2, shards=(BlobRef(bytes(32), 9, 2**21 + 1),)
                )
            ),
            "bytes are the most",
        ),
        (
            changed(
                model=msgspec.structs.replace(TINY.spec.model, seq_len=1),
                data=msgspec.structs.replace(TINY.spec.data, shards=(BlobRef(bytes(32), 9, 2**22),)),
            ),
            "sequences",
        ),
        (with_part("data", tokenizer=TokenizerSpec("bytes", 100, 100)), "end with token 100"),
        (with_part("samples", prompts=("a", "b"), encoded=((1,),)), "2 prompts"),
        (with_part("samples", prompts=("a",), encoded=((256,),)), "none of the 256"),
        # Chunks that no model needs: each may be as large as a chunk gets.
        (with_part("genesis", params=(bytes(32),) * 4096), "4,096 chunks of params"),
        (with_part("genesis", momentum=(bytes(32),) * 2), "2 of momentum"),
        (with_part("committee", size_max=2), "1, 3, 5 or 7 seats"),
        (with_part("committee", heartbeat_s=2.0), "less than 2 heartbeats"),
        (with_part("committee", timeout_s_max=1.0), "not above timeout_s_min"),
        (with_part("committee", voter_lease_s=1.0), "voter_lease_s"),
        (with_part("outer", mu=1.0), "momentum would never decay"),
        (with_part("inner", beta2=1.0), "AdamW divides"),
        (with_part("data", tokenizer=TokenizerSpec("json", 300, 0)), "the model 256"),
    ],
)
def test_figures_that_are_too_much_together_are_refused(spec: RunSpec, sentence: str) -> None:
    assert sentence in next(contradictions(spec))
    refused(signed(spec), "BAD_RUN_SPEC")


def test_the_most_that_is_allowed_is_allowed() -> None:
    spec = changed(
        inner=msgspec.structs.replace(TINY.spec.inner, sequences_per_step=2**13),
        model=msgspec.structs.replace(TINY.spec.model, seq_len=2**13, made_with="transformers 5.24.0"),
        data=msgspec.structs.replace(
            TINY.spec.data,
            shards=(BlobRef(bytes(32), 9, 2**22),) * 4,
        ),
        samples=SampleSpec(("a", ""), 8, ((255,), ())),
    )
    assert open_run_spec(signed(spec), verify_ed25519)[1] == spec


def test_another_test_s_limit_is_nobody_s_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """Alone this is the first that is decoded: what stands for a limit would stay (tests/conftest.py)."""
    monkeypatch.setattr(limits, "sequence_tokens_max", 1)
    assert open_run_spec(signed(changed()), verify_ed25519)[1] == changed()


@pytest.mark.parametrize("codec", ["topk16", "topk", "topk640", "int8", "INT4", ""])
def test_a_codec_that_nobody_has_is_malformed(codec: str) -> None:
    refused(signed(changed(outer=OuterSpec(codec=codec))), "BAD_RUN_SPEC")


@pytest.mark.parametrize("codec", CODECS)
def test_every_codec_may_be_asked_for(codec: str) -> None:
    spec = changed(outer=OuterSpec(codec=codec))
    assert open_run_spec(signed(spec), verify_ed25519)[1] == spec


@settings(max_examples=60, deadline=None)
@given(data=st.binary(max_size=300) | st.binary(max_size=200).map(by))
def test_arbitrary_bytes_raise_nothing_but_a_peer_error(data: bytes) -> None:
    with pytest.raises(PeerError):
        open_run_spec(data, verify_ed25519)


@settings(max_examples=60, deadline=None)
@given(place=st.integers(0, 8 * len(sign_run_spec(TINY.spec, OWNER)) - 1))
def test_a_flipped_bit_is_refused(place: int) -> None:
    raw = bytearray(sign_run_spec(TINY.spec, OWNER))
    raw[place // 8] ^= 1 << place % 8
    with pytest.raises(PeerError):
        open_run_spec(bytes(raw), verify_ed25519, expected=TINY.run)


def test_what_follows_from_its_fields() -> None:
    assert TINY.spec.tokens_per_inner_step == 8
    assert TINY.spec.model.params == 160
    assert TINY.spec.genesis.params_root == merkle_root([digest_of(TINY.params.tobytes())])


def test_each_codec_has_the_outer_loop_that_was_measured_best_for_it() -> None:
    """docs/results/learning.md: topk learns without momentum and with fading feedback."""
    dense, sparse = OuterSpec(**outer_defaults("int4")), OuterSpec(**outer_defaults("topk64"))
    assert dense == OuterSpec() == OuterSpec(**outer_defaults("fp16"))
    assert (sparse.mu, sparse.eta_alone, sparse.eta_eight, sparse.error_feedback_beta) == (
        0.0,
        1.0,
        1.0,
        0.95,
    )

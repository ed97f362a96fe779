"""How listed deltas become one mean: the product's, and three variants to compare it with.

Radial-directional averaging, direction correction of stale deltas, and experts weighted by their own tokens.
Norms and angles are of single tensors. All variants end in the array that an outer optimizer is given.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from p2pdiloco.diloco.layout import Array, Run, sparse_runs
from p2pdiloco.diloco.merge import Mean, merge
from p2pdiloco.diloco.norms import l2_norm
from p2pdiloco.run_spec import TensorSpec
from p2pdiloco.sim.lab.experiment import Outer
from p2pdiloco.sim.lab.experts import ExpertSlice, expert_slices
from p2pdiloco.wire.log import OuterStep

# HeLoCo (arXiv 2606.00271), as in its authors' code.
COS_OK = 0.2  # more aligned with momentum than this: left alone
COS_BAD = -0.2  # rotation would be complete here
CONFIDENCE = 3.0  # how many momenta a delta must outweigh to be half trusted
SHRINK = 0.5  # of the opposing component, at most


def merge_listed(
    outer: Outer,
    step: OuterStep,
    deltas: Sequence[Array],
    tensors: tuple[TensorSpec, ...],
    momentum: Array | None,
    expert_tokens: Sequence[Sequence[float]],
) -> Array:
    """The mean of an outer step, float32 [params of `tensors`].

    Args:
        deltas: decoded, float32 [params], left as they are; in the order of `step.contributions`.
        momentum: float32 [params] on a mean's scale, for direction correction.
        expert_tokens: for each delta its tokens by expert, layer by layer (LabTrainer.expert_tokens); empty
            for a dense model. Used with `outer.expert_weights`.

    Each coordinate of a sparse codec is averaged over its senders if `outer.average_over` says so; dense
    deltas before `dense_rounds` are too, which changes those alone that are exactly zero.
    """
    assert len(deltas) == len(step.contributions)
    if outer.direction_correction:
        assert momentum is not None, "direction correction without momentum: mu is above 0 and below 1"
        deltas = [
            corrected(delta, momentum, tensors) if c.staleness > 0 else delta
            for c, delta in zip(step.contributions, deltas, strict=True)
        ]
    runs = sparse_runs(outer.codec, tensors) if outer.average_over == "senders" else ()
    named = {c.delta: delta for c, delta in zip(step.contributions, deltas, strict=True)}
    mean = merge(step, len(deltas[0]), lambda digest, out: np.copyto(out, named[digest]), runs)
    clips = [c.clip for c in step.contributions]
    if outer.merge == "rda":
        weights = [c.weight for c in step.contributions]
        for tensor, here in _places(tensors):
            if not _is_embedding(tensor):
                mean[here] = rda([delta[here] for delta in deltas], weights, clips)
    if outer.expert_weights:
        for expert, weights in _expert_weights(step, tensors, expert_tokens):
            parts = [delta[expert.part] for delta in deltas]
            if sum(weights) == 0:
                mean[expert.part] = 0
            elif outer.merge == "rda":
                mean[expert.part] = rda(parts, weights, clips)
            else:
                mean[expert.part] = _weighted_mean(parts, weights, clips, _runs_within(runs, expert.part))
    return mean


def rda(vectors: Sequence[Array], weights: Sequence[float], clips: Sequence[float]) -> Array:
    """Radial-directional averaging of float32 [n] vectors (Decoupled DiLoCo, arXiv 2604.21428).

        (sum w |v| / sum w) * phi(sum w phi(v) / sum w)        phi(x) = x / |x|, phi(0) = 0

    Near-orthogonal deltas of M nodes have a mean that is sqrt(M) shorter than they are; this one is not. A
    clip shortens |v| alone. Embeddings are averaged plainly (their rows are rare), which the caller sees to.
    """
    total = sum(weights)
    length = 0.0
    direction: Array = np.zeros(len(vectors[0]), np.float32)
    for v, w, clip in zip(vectors, weights, clips, strict=True):
        norm = l2_norm(v)
        if norm > 0:
            length += w * clip * norm / total
            direction += v * np.float32(w / total / norm)
    norm = l2_norm(direction)
    return direction * np.float32(length / norm) if norm > 0 else direction


def corrected(delta: Array, momentum: Array, tensors: Sequence[TensorSpec]) -> Array:
    """HeLoCo's direction correction of a stale delta, tensor by tensor (arXiv 2606.00271). Float32 [params].

    With c = cos(d, m) and conf = |d| / (|d| + 3 |m|):

        c >= 0.2      d' = d
        0 <= c < 0.2  d' = |d| phi((1 - lambda) phi(d) + lambda phi(m)),  lambda = (1 - (c + 0.2) / 0.4) conf
        c < 0         d' = d - beta (d . phi(m)) phi(m),                  beta = min(0.5 (-c) conf, 0.5)
    """
    result = delta.copy()
    for _, here in _places(tensors):
        d, m = delta[here], momentum[here]
        d_norm, m_norm = l2_norm(d), l2_norm(m)
        if d_norm == 0 or m_norm == 0:
            continue
        along = float(np.dot(d.astype(np.float64), m.astype(np.float64))) / m_norm
        c = along / d_norm
        confidence = d_norm / (d_norm + CONFIDENCE * m_norm)
        if c >= COS_OK:
            continue
        if c < 0:
            shrink = min(SHRINK * -c * confidence, SHRINK)
            result[here] -= m * np.float32(shrink * along / m_norm)
        else:
            turn = min((1 - (c - COS_BAD) / (COS_OK - COS_BAD)) * confidence, 1.0)
            turned = d * np.float32((1 - turn) / d_norm) + m * np.float32(turn / m_norm)
            result[here] = turned * np.float32(d_norm / l2_norm(turned))
    return result


def untrained(tensors: Sequence[TensorSpec], expert_tokens: Sequence[Sequence[float]]) -> list[slice]:
    """Experts without a token in any of an entry's deltas: they are not moved, not even by momentum.

    Returns: their parts of the flat params (algorithm.md 8).
    """
    return [
        expert.part
        for expert, tokens in _tokens_of(tensors, expert_tokens)
        if not any(tokens)
    ]  # fmt: skip


def _places(tensors: Sequence[TensorSpec]) -> Iterator[tuple[TensorSpec, slice]]:
    first = 0
    for tensor in tensors:
        yield tensor, slice(first, first + tensor.size)
        first += tensor.size


def _is_embedding(tensor: TensorSpec) -> bool:
    """Rows by token: the input embedding, and the output head that is often tied to it."""
    return "embed" in tensor.name or "lm_head" in tensor.name


def _tokens_of(
    tensors: Sequence[TensorSpec], expert_tokens: Sequence[Sequence[float]]
) -> Iterator[tuple[ExpertSlice, Sequence[float]]]:
    """Each expert's part with its tokens, a figure a delta."""
    parts = expert_slices(tensors)
    experts = 1 + max((p.expert for p in parts), default=0)
    for part in parts:
        yield part, [tokens[part.layer * experts + part.expert] for tokens in expert_tokens]


def _expert_weights(
    step: OuterStep, tensors: Sequence[TensorSpec], expert_tokens: Sequence[Sequence[float]]
) -> Iterator[tuple[ExpertSlice, list[float]]]:
    """Each expert's part with its weights: of w_i the share that the expert has of its layer's tokens.

    So caps and staleness count for experts as they do for whole deltas.
    """
    parts = list(_tokens_of(tensors, expert_tokens))
    layers: dict[int, npt.NDArray[np.float64]] = {}
    for (layer, _), tokens in {(p.layer, p.expert): tokens for p, tokens in parts}.items():
        layers[layer] = layers.get(layer, 0.0) + np.asarray(tokens, np.float64)
    for part, tokens in parts:
        yield (
            part,
            [
                c.weight * own / all_experts if all_experts else 0.0
                for c, own, all_experts in zip(step.contributions, tokens, layers[part.layer], strict=True)
            ],
        )


def _weighted_mean(
    parts: Sequence[Array], weights: Sequence[float], clips: Sequence[float], runs: tuple[Run, ...]
) -> Array:
    """The product's mean, of parts of deltas with weights of their own."""
    mean = Mean(len(parts[0]), runs)
    for part, weight, clip in zip(parts, weights, clips, strict=True):
        if weight:
            mean.add(part.copy(), weight=weight, clip=clip)
    return mean.divide(sum(weights))


def _runs_within(runs: tuple[Run, ...], part: slice) -> tuple[Run, ...]:
    """The runs' intersections with `part`, counted from its start."""
    inside = []
    for run in runs:
        start, stop = max(run.start, part.start), min(run.stop, part.stop)
        if start < stop:
            inside.append(Run(start - part.start, stop - start, 0))
    return tuple(inside)

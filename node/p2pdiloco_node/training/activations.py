"""How much memory a forward and backward pass takes beside the params: an estimate from dimensions. No torch.

Counted layer by layer from what each operation keeps for its gradient. A test compares it with what torch
keeps on a CPU, for every family: within a fifth (tests/unit/training/test_activations.py). What a GPU's
kernels keep under autocast is counted by the same rules and not yet measured.
"""

from __future__ import annotations

from p2pdiloco import limits
from p2pdiloco.run_spec import ModelSpec
from p2pdiloco_node.training.families import Family, family_of
from p2pdiloco_node.training.shapes import Shape, shape_of

FLOAT32, BF16 = 4, 2  # bytes
WORK_SHARE = 0.5  # of one layer's activations: gradients on their way through it
COPIES_OF_LOGITS = 4  # as made, in float32, their softmax, its gradient


def kept_bytes_per_token(shape: Shape, family: Family, seq_len: int, width: int) -> int:
    """What one layer keeps of one token for the backward pass. `width`: bytes of what a matrix makes."""
    h, q, kv = shape.hidden, shape.queries, shape.keys
    # A norm keeps its input (and, if it is made of steps, what it scales) in float32, and its result is kept
    # by the matrices behind it.
    norms = family.norms * (h * FLOAT32 * (1 if family.layer_norm else 2) + h * width)
    # Queries, keys, values after rotation, the result, and its rows side by side for the next matrix.
    attention = (3 * q + 2 * kv) * width
    if not family.sdpa:
        attention += shape.heads * seq_len * (2 * width + FLOAT32)
    if family.gated:
        inside, experts = 4, 4
    else:
        inside = experts = 5 if family.stepwise_activation else 2
    dense = inside * shape.dense * width
    # Each expert has its own copy of its tokens, going in and coming out.
    routed = shape.experts_per_token * (experts * shape.expert + 2 * h) * width
    sparse = routed + inside * shape.shared * width + 3 * shape.experts * FLOAT32
    # Where some layers are dense and some have experts: the larger.
    return norms + attention + (max(dense, sparse) if shape.expert else dense)


def activation_bytes(model: ModelSpec, sequences: int, *, bf16: bool, checkpointing: bool) -> int:
    """Largest memory of one forward and backward pass over `sequences` sequences, logits included."""
    shape, family = shape_of(model), family_of(model.family)
    width = BF16 if bf16 else FLOAT32
    tokens = sequences * model.seq_len
    layer = tokens * kept_bytes_per_token(shape, family, model.seq_len, width)
    recomputed = layer if checkpointing else 0
    work = round(WORK_SHARE * layer) + (COPIES_OF_LOGITS - 1) * logits_bytes(shape.vocab, tokens)
    return kept_bytes(model, sequences, bf16=bf16, checkpointing=checkpointing) + recomputed + work


def kept_bytes(model: ModelSpec, sequences: int, *, bf16: bool, checkpointing: bool) -> int:
    """Of it: what is there when the forward pass ends, for the backward pass to use."""
    shape, family = shape_of(model), family_of(model.family)
    tokens = sequences * model.seq_len
    stream = tokens * shape.hidden * FLOAT32  # what runs from layer to layer
    width = BF16 if bf16 else FLOAT32
    layer = stream if checkpointing else tokens * kept_bytes_per_token(shape, family, model.seq_len, width)
    ends = 3 * stream  # the embedding's result, the last norm
    return shape.layers * layer + ends + logits_bytes(shape.vocab, tokens)


def logits_bytes(vocab: int, tokens: int) -> int:
    """Float32 logits of as many tokens as are there at a time."""
    return FLOAT32 * vocab * min(tokens, max(1, limits.logits_bytes // (FLOAT32 * vocab)))

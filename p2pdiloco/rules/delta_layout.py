"""Where each tensor lies in a delta's blob, and so its exact size in bytes (algorithm.md 7).

    header      48 bytes: magic "pdlt", format, codec, two zeros, sequence (8, big-endian), peer (32)
    int4:
    scales      float16 little-endian, one for each block of 128 values of the tensors coded in blocks
    nibbles     64 bytes a block: value 2i in the low half of byte i, value 2i + 1 in the high half
    topk32, topk64, topk128, where k is the number and l = log2(4096 / k):
    scales      two float16 little-endian for each chunk of 4096 values of the tensors coded in chunks
    low         l bits for each kept value: the low bits of its place
    high        two bits for each kept value: the rest of the places, in unary
    signs       one bit for each kept value: 1 is negative
    groups      one bit for each kept value: 1 takes the second, larger scale of its chunk
    all:
    raw         float16 little-endian, the values of all other tensors

Peer and sequence make every blob its own: two zero deltas do not share a digest, and nobody can sign
another's blob as one's own. Everything else about a delta is in its signed DeltaHeader.

Tensors keep the order of the RunSpec. The size follows from the model alone, so a wrong one is refused
before a byte is read. That is worth more than zstd, which takes 15 % off int4 (measured on Gaussian values),
and more than an entropy coder, which takes 6 to 10 % off topk (docs/adr/0014).

Of a chunk of n values ceil(n k / 4096) are kept: k of a whole one, in proportion of a tensor's last. Each
2**l consecutive values of a tensor are a bucket, counted through all tensors; so there are as many buckets
as kept values. With b_j the bucket of the j-th kept value, bit b_j + j of `high` is set (Elias-Fano). Bits
are counted from the lowest of each byte; each part ends with zero bits up to a whole byte.
"""

from __future__ import annotations

from functools import lru_cache

from p2pdiloco.run_spec import TensorSpec

MAGIC = b"pdlt"
FORMAT = 1
HEADER_BYTES = 48
BLOCK = 128  # values that share a scale under int4
CHUNK = 4096  # values of which the largest are kept under topk
CODECS = {"fp16": 1, "int4": 2, "topk32": 3, "topk64": 4, "topk128": 5}  # byte 5 of the header
KEPT = {"topk32": 32, "topk64": 64, "topk128": 128}  # values kept of a chunk
small_values_max = 1024  # tensors this small are raw: they cost nothing and matter (norms, biases, routers)


def is_sparse(codec: str) -> bool:
    """Whether most coordinates are not sent at all; then each is averaged over those who sent it."""
    return codec in KEPT


def is_raw(codec: str, tensor: TensorSpec) -> bool:
    """Whether a tensor's values are raw float16, neither in blocks (int4) nor in chunks (topk)."""
    return codec == "fp16" or len(tensor.shape) < 2 or tensor.size <= small_values_max


def place_bits(kept: int) -> int:
    """l, the low bits of a place: 2**l values make a bucket. `kept` is one of KEPT's."""
    return (CHUNK // kept).bit_length() - 1


def kept_of(kept: int, size: int) -> int:
    """How many of a tensor's `size` values travel, which is also the number of its buckets."""
    return -(-size * kept // CHUNK)


def bit_parts(kept: int, total: int) -> tuple[int, int, int, int]:
    """Bytes of low, high, signs and groups where `total` values are kept in all tensors."""
    flags = -(-total // 8)
    return -(-total * place_bits(kept) // 8), -(-2 * total // 8), flags, flags


@lru_cache(maxsize=16)
def encoded_size(codec: str, tensors: tuple[TensorSpec, ...]) -> int:
    """Exact size of a delta's blob in bytes. `codec` is one of CODECS: the RunSpec's type allows no other."""
    size = HEADER_BYTES + sum(2 * t.size for t in tensors if is_raw(codec, t))
    coded = [t.size for t in tensors if not is_raw(codec, t)]
    if is_sparse(codec):
        kept = KEPT[codec]
        size += sum(-(-n // CHUNK) * 4 for n in coded)
        size += sum(bit_parts(kept, sum(kept_of(kept, n) for n in coded)))
    else:
        size += sum(-(-n // BLOCK) * (2 + BLOCK // 2) for n in coded)
    return size

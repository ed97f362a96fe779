"""Moments in host memory are the same moments."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pytest

from p2pdiloco_node.training.presets import inner_spec

Floats = npt.NDArray[np.float32]

if TYPE_CHECKING:
    from p2pdiloco_node.training.adamw import AdamW


def make(*, on_host: bool) -> tuple[AdamW, list[Any]]:
    import torch

    from p2pdiloco_node.training.adamw import AdamW
    from p2pdiloco_node.training.flat_params import Placed

    generator = torch.Generator().manual_seed(1)
    parameters = [
        torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in ((5, 3), (4,), (2, 2))
    ]
    for parameter in parameters:
        parameter.grad = torch.randn(parameter.shape, generator=generator)
    placed, at = [], 0
    for parameter in parameters:
        placed.append(Placed(slice(at, at + parameter.numel()), parameter))
        at += parameter.numel()
    return AdamW(placed, inner_spec("llama:tiny", 10**6), device="cpu", on_host=on_host), parameters


def moments(optimizer: AdamW) -> Floats:
    return np.stack([np.concatenate(list(optimizer.moments(row))) for row in range(2)])


def test_on_the_host_every_bit_is_the_same() -> None:
    import torch

    (one, here), (other, there) = make(on_host=False), make(on_host=True)
    assert not moments(one).any()
    for step in range(4):
        for optimizer in (one, other):
            optimizer.step(1e-2 * (step + 1))
    assert all(torch.equal(a, b) for a, b in zip(here, there, strict=True))
    assert np.array_equal(moments(one), moments(other))
    assert moments(one).shape == (2, 15 + 4 + 4)
    assert np.count_nonzero(moments(one)) == moments(one).size


@pytest.mark.parametrize("on_host", [False, True])
def test_moments_come_back(on_host: bool) -> None:
    import torch

    (one, here), (other, there) = make(on_host=on_host), make(on_host=not on_host)
    for _ in range(3):
        one.step(1e-2)
    for a, b in zip(here, there, strict=True):
        b.data.copy_(a)
    other.load(3, moments(one))
    for optimizer in (one, other):
        optimizer.step(1e-2)
    assert all(torch.equal(a, b) for a, b in zip(here, there, strict=True))


def test_vectors_are_not_decayed() -> None:
    optimizer, (matrix, vector, _) = make(on_host=True)
    for parameter in (matrix, vector):
        parameter.grad.zero_()
    kept = vector.detach().clone(), matrix.detach().clone()
    optimizer.step(0.5)
    assert np.array_equal(vector.detach().numpy(), kept[0].numpy())
    np.testing.assert_allclose(matrix.detach().numpy(), kept[1].numpy() * (1 - 0.5 * 0.1), rtol=1e-6)

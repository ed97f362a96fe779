"""AdamW over what a rank holds of the params, with its moments on the device or in host memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from p2pdiloco.run_spec import InnerSpec
from p2pdiloco_node.training.flat_params import Placed, in_pieces

Floats = npt.NDArray[np.float32]
STATE = ("exp_avg", "exp_avg_sq")  # torch's names of the first and the second moment


class AdamW:
    """torch's fused AdamW (algorithm.md 2); moments are the node's own and are never sent.

    On the host the moments of one tensor at a time come to the device, are used and go back: 16 bytes a
    parameter over the bus for each inner step, for 8 bytes a parameter less on the device. The arithmetic is
    the same.
    """

    def __init__(self, placed: Iterable[Placed], inner: InnerSpec, *, device: str, on_host: bool) -> None:
        """`placed`: parameters in the flat order, each with its gradient's place."""
        self._parameters = list(placed)
        self._inner = inner
        self._device = device
        self._on_host = on_host
        self.zero()

    def zero(self) -> None:
        """Forget the moments."""
        inner = self._inner
        shared: dict[str, Any] = {"lr": inner.lr, "betas": (inner.beta1, inner.beta2), "fused": True}

        def group(parameters: list[Any], *, decayed: bool) -> dict[str, Any]:
            # Norms (vectors) are not decayed: pulling a gain towards zero regularises nothing.
            return {"params": parameters, "weight_decay": inner.weight_decay if decayed else 0.0}

        every = [p for _, p in self._parameters]
        if self._on_host:
            self._optimizers = [torch.optim.AdamW([group([p], decayed=p.dim() > 1)], **shared) for p in every]
        else:
            groups = [
                group([p for p in every if p.dim() > 1], decayed=True),
                group([p for p in every if p.dim() <= 1], decayed=False),
            ]
            self._optimizers = [torch.optim.AdamW([g for g in groups if g["params"]], **shared)]

    def step(self, lr: float) -> None:
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                group["lr"] = lr
            if not self._on_host:
                optimizer.step()
                continue
            (parameter,) = optimizer.param_groups[0]["params"]
            state = optimizer.state[parameter]
            kept = {key: state[key] for key in STATE if key in state}
            for key, host in kept.items():
                state[key] = host.to(self._device, non_blocking=True)
            optimizer.step()
            for key in STATE:
                state[key] = self._to_host(state[key], kept.get(key))

    def moments(self, row: int) -> Iterator[Floats]:
        """First (0) or second (1) moments in the flat order, a piece at a time; copies."""
        for place, _, _, state in self._states():
            values = state[STATE[row]].reshape(-1) if STATE[row] in state else None
            for piece in in_pieces(place):
                here = slice(piece.start - place.start, piece.stop - place.start)
                if values is None:
                    yield np.zeros(piece.stop - piece.start, np.float32)
                else:
                    yield np.array(values[here].cpu().numpy(), np.float32)

    def load(self, steps: int, both: Floats) -> None:
        """After `steps` inner steps. `both`: (2, params) first and second moments of the whole model."""
        self.zero()
        for place, optimizer, parameter, _ in self._states():
            first, second = (
                torch.from_numpy(both[row, place].copy()).view(parameter.shape) for row in range(len(STATE))
            )
            if self._on_host:
                first, second = (self._to_host(moment, None) for moment in (first, second))
            else:
                first, second = (moment.to(self._device) for moment in (first, second))
            state = {"step": torch.tensor(float(steps), device=self._device)}
            optimizer.state[parameter] = state | dict(zip(STATE, (first, second), strict=True))

    def _states(self) -> Iterator[tuple[slice, Any, Any, Any]]:
        """(place, optimizer, parameter, its state) in the flat order."""
        for number, (place, parameter) in enumerate(self._parameters):
            optimizer = self._optimizers[number if self._on_host else 0]
            yield place, optimizer, parameter, optimizer.state.get(parameter, {})

    def _to_host(self, moment: Any, place: Any) -> Any:
        """Into `place`, or new pinned memory, which the GPU's copies need to be fast."""
        if self._device == "cpu":
            return moment
        if place is None:
            place = torch.empty(moment.shape, dtype=moment.dtype, device="cpu", pin_memory=True)
        return place.copy_(moment)

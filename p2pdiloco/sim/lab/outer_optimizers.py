"""Outer optimizers to compare: what the global state makes of a merged pseudo-gradient.

All of them move `params` by eta times something of the scale of the mean, so that eta means the same:
`rho`, the share of a full round that an entry merges, scales steps and the fading of averages, as in
algorithm.md 4. Except for the product's own they are for the lab: nobody has to compute their bits again.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from p2pdiloco.diloco.global_state import GlobalState
from p2pdiloco.diloco.layout import Array
from p2pdiloco.diloco.outer_step import apply_outer_step
from p2pdiloco.sim.lab.experiment import Outer
from p2pdiloco.wire.log import OuterStep

ADAM_EPSILON = 0.1  # of the mean's RMS; DiLoCo (arXiv 2311.08105) found Adam unstable below 0.1


class OuterOptimizer(Protocol):
    """One fragment's outer optimizer with its state."""

    @property
    def momentum(self) -> Array | None:
        """Float32 [n], its average of past means, on the scale of one of them; None: it keeps none."""
        ...

    def step(self, params: Array, mean: Array, planned: OuterStep) -> None:
        """Move `params` (float32 [n], in place) by the `mean` of `planned` (float32 [n], overwritten)."""
        ...


def make_optimizer(outer: Outer, n: int) -> OuterOptimizer:
    """The optimizer that `outer` names, for `n` params. With mu = 0 `nesterov` is plain SGD."""
    match outer.optimizer:
        case "nesterov":
            return Nesterov(outer.mu, n)
        case "delayed_nesterov":
            return DelayedNesterov(outer.mu, outer.delay, n)
        case "adamw":
            return Adam(outer.mu, outer.beta2, n)
        case "lion":
            return Lion(outer.mu, outer.beta2, n)
        case "textbook":
            return Textbook(outer.mu, n)


class Nesterov:
    """The product's: rho-scaled Nesterov (diloco/outer_step.py, algorithm.md 4)."""

    def __init__(self, mu: float, n: int) -> None:
        self._mu = mu
        self._m: Array = np.zeros(n, np.float32)

    @property
    def momentum(self) -> Array | None:
        return _of_one_mean(self._m, self._mu)

    def step(self, params: Array, mean: Array, planned: OuterStep) -> None:
        apply_outer_step(GlobalState(params, self._m), mean, planned.scalars, self._mu)


class DelayedNesterov:
    """Asynchronous Local-SGD (arXiv 2401.09135), algorithm 3, c = 0: gradients act at once, momentum rarely.

        sum <- sum + n g;  G <- G - eta n g / N          for each entry, of n deltas
        x = count / N;  m <- mu^x m + (1 - mu^x) / (1 - mu) sum / count;  G <- G - eta x mu m
                                                         when count, of deltas since the last time, reaches N

    With one delta an entry x is 1 and this is the paper's m <- mu m + sum / N; G <- G - eta (mu m + g / N).
    An entry may list several, so the count may overshoot: x keeps the pace of momentum. A stale delta counts
    by its decay (in g, not in n), which the paper's, of lambda 0, does not do.
    """

    def __init__(self, mu: float, delay: int, n: int) -> None:
        self._mu, self._delay = mu, delay
        self._m: Array = np.zeros(n, np.float32)
        self._sum: Array = np.zeros(n, np.float32)
        self._count = 0

    @property
    def momentum(self) -> Array | None:
        return _of_one_mean(self._m, self._mu)

    def step(self, params: Array, mean: Array, planned: OuterStep) -> None:
        eta, listed = planned.scalars.eta, len(planned.contributions)
        mean *= np.float32(listed * _freshness(planned))
        self._sum += mean
        self._count += listed
        mean *= np.float32(eta / self._delay)
        params -= mean
        if self._count < self._delay:
            return
        x = self._count / self._delay
        fading = self._mu**x
        gain = x if self._mu == 1 else (1 - fading) / (1 - self._mu)
        self._m *= np.float32(fading)
        self._m += self._sum * np.float32(gain / self._count)
        params -= self._m * np.float32(eta * x * self._mu)
        self._sum.fill(0)
        self._count = 0


class Adam:
    """FedAdam (arXiv 2003.00295) with bias correction, rho-scaled; its weight decay is 0, so AdamW is Adam.

        m <- mu^rho m + (1 - mu^rho) g;  v <- beta2^rho v + (1 - beta2^rho) g^2;  t <- t + rho
        m' = m / (1 - mu^t);  v' = v / (1 - beta2^t);  s = sqrt(mean of v')
        G <- G - eta rho s m' / (sqrt(v') + 0.1 s)

    Normalised by s, the RMS of all coordinates: eta and epsilon do not depend on the model's scale and eta
    compares with an SGD's. Nesterov's gain on a constant g is 1 / (1 - mu) times as large, so the best eta
    here is up to so many times higher. Adam is what stays stable at large delays (CGAD, arXiv 2605.09126).
    """

    def __init__(self, mu: float, beta2: float, n: int) -> None:
        self._mu, self._beta2 = mu, beta2
        self._m: Array = np.zeros(n, np.float32)
        self._v: Array = np.zeros(n, np.float32)
        self._rounds = 0.0

    @property
    def momentum(self) -> Array | None:
        return self._m if self._mu > 0 else None

    def step(self, params: Array, mean: Array, planned: OuterStep) -> None:
        rho = planned.scalars.rho
        self._rounds += rho
        _average(self._m, mean, self._mu**rho)
        np.square(mean, out=mean)
        _average(self._v, mean, self._beta2**rho)
        variance = self._v / np.float32(_filled(self._beta2, self._rounds))
        scale = float(np.sqrt(variance.mean(dtype=np.float64)))
        if scale == 0:
            return
        np.sqrt(variance, out=variance)
        variance += np.float32(ADAM_EPSILON * scale)
        move = self._m / variance
        move *= np.float32(planned.scalars.eta * rho * scale / _filled(self._mu, self._rounds))
        params -= move


class Lion:
    """Lion (arXiv 2302.06675) on means, rho-scaled and without weight decay.

        s^2 <- beta2^rho s^2 + (1 - beta2^rho) mean of g^2, bias-corrected
        G <- G - eta rho s sign(mu m + (1 - mu) g)
        m <- beta2^rho m + (1 - beta2^rho) g

    Scaled by s, the RMS of means, for the same reasons as Adam: a sign alone is of no scale.
    """

    def __init__(self, mu: float, beta2: float, n: int) -> None:
        self._mu, self._beta2 = mu, beta2
        self._m: Array = np.zeros(n, np.float32)
        self._square = 0.0
        self._rounds = 0.0

    @property
    def momentum(self) -> Array | None:
        return self._m

    def step(self, params: Array, mean: Array, planned: OuterStep) -> None:
        rho = planned.scalars.rho
        fading = self._beta2**rho
        self._rounds += rho
        self._square = fading * self._square + (1 - fading) * float(np.square(mean).mean(dtype=np.float64))
        scale = (self._square / _filled(self._beta2, self._rounds)) ** 0.5
        move = self._m * np.float32(self._mu)
        move += mean * np.float32(1 - self._mu)
        np.sign(move, out=move)
        move *= np.float32(planned.scalars.eta * rho * scale)
        params -= move
        _average(self._m, mean, fading)


class Textbook:
    """Asynchronous DiLoCo as in the literature (arXiv 2401.09135, section 4): each delta by itself.

        m <- mu m + s delta;  G <- G - eta (s delta + mu m)          s = decay(k), exp(-lambda k) by default

    No rho: this is the rule whose momentum compounds (algorithm.md 4). Where an entry lists several deltas
    each is taken to be their mean, decayed as they are on average: only their order is lost.
    """

    def __init__(self, mu: float, n: int) -> None:
        self._mu = mu
        self._m: Array = np.zeros(n, np.float32)

    @property
    def momentum(self) -> Array | None:
        return _of_one_mean(self._m, self._mu)

    def step(self, params: Array, mean: Array, planned: OuterStep) -> None:
        eta, mu = np.float32(planned.scalars.eta), np.float32(self._mu)
        mean *= np.float32(_freshness(planned))
        for _ in planned.contributions:
            self._m *= mu
            self._m += mean
            move = self._m * mu
            move += mean
            move *= eta
            params -= move


def _of_one_mean(m: Array, mu: float) -> Array | None:
    """Heavy-ball momentum on the scale of one mean: a constant g gives m = g / (1 - mu)."""
    return m * np.float32(1 - mu) if 0 < mu < 1 else None


def _freshness(planned: OuterStep) -> float:
    """decay(k) of an entry's deltas, averaged by tokens, in (0, 1]. The mean has divided it out."""
    return planned.scalars.weight_sum / sum(c.tokens for c in planned.contributions)


def _average(average: Array, value: Array, fading: float) -> None:
    """average <- fading * average + (1 - fading) * value, in place."""
    average *= np.float32(fading)
    average += value * np.float32(1 - fading)


def _filled(beta: float, rounds: float) -> float:
    """The share of an average from zero that is filled after so many rounds (Adam's bias correction)."""
    return 1 - beta**rounds if beta < 1 else 1.0

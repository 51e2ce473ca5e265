"""Transported projection: predict the final coefficients of a memory in a moving channel frame (paper, appendix D).

    C_t = L C_{t-1} R_t + epsilon B f_t^T,     L = exp(epsilon A),     R_t = exp(sqrt(epsilon) sum_k rho_{t,k} G_k)

with white noise f_t [d], operation coefficients rho_t [K] and the LegS operator (A, B) of order N at time 1. Half of
the K generators are dense skew matrices of unit Frobenius norm, half elementary nilpotent ones e_i e_j^T.
"""

import functools
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from shippo_ssm.projection import LegS


class Sequences(NamedTuple):
    """White noise and the coefficients of the transport."""

    signal: Tensor  # [.., T, d]
    coef: Tensor  # [.., T, K]


@functools.cache
def _generators(width: int, count: int, seed: int) -> Tensor:
    rng = torch.Generator().manual_seed(seed)
    skew = torch.randn(count - count // 2, width, width, generator=rng, dtype=torch.float64)
    skew = skew - skew.mT
    skew = skew / skew.flatten(1).norm(dim=1)[:, None, None]
    nilpotent = torch.zeros(count // 2, width, width, dtype=torch.float64)
    places = torch.randperm(width * (width - 1), generator=rng)[: count // 2]
    for generator, place in zip(nilpotent, places.tolist()):
        i, j = divmod(place, width - 1)
        generator[i, j + (j >= i)] = 1.0
    return torch.cat([skew, nilpotent])


@dataclass(frozen=True, kw_only=True, slots=True)
class ProjectionTask:
    """The transported projection task."""

    width: int = 16
    """Channels d."""
    d_state: int = 16
    """State order N."""
    num_generators: int = 16
    """K, half of them skew and half nilpotent."""
    length: int = 256
    coef_range: float = 0.15
    epsilon: float = 0.05
    generator_seed: int = 321

    @property
    def generators(self) -> Tensor:
        """G [K, d, d] in float64."""
        return _generators(self.width, self.num_generators, self.generator_seed)

    @property
    def left(self) -> Tensor:
        """L = exp(epsilon A), [N, N] in float64."""
        return torch.linalg.matrix_exp(self.epsilon * torch.from_numpy(LegS(self.d_state).A(1.0)))

    @property
    def write(self) -> Tensor:
        """epsilon B, [N] in float64."""
        return self.epsilon * torch.from_numpy(LegS(self.d_state).B(1.0))

    def draw(self, rng: torch.Generator, *shape: int) -> Sequences:
        """Sequences with standard normal f and coefficients uniform in [-coef_range, coef_range]."""
        signal = torch.randn(*shape, self.length, self.width, generator=rng)
        coef = torch.rand(*shape, self.length, self.num_generators, generator=rng)
        return Sequences(signal, coef.mul_(2).sub_(1).mul_(self.coef_range))

    def generator(self, sequences: Sequences) -> Tensor:
        """log R_t = sqrt(epsilon) sum_k rho_{t,k} G_k, [.., T, d, d]."""
        weights = self.epsilon**0.5 * self.generators.to(sequences.coef)
        return (sequences.coef @ weights.flatten(1)).unflatten(-1, (self.width, self.width))

"""Paired noncommutative transport: write a vector, move its frame twice, ask for the answer (paper, appendix D).

An example is three tokens, WRITE(v), OP(g_1, c_1), OP(g_2, c_2); its answer is v^T R_{g_1}(c_1) R_{g_2}(c_2) with
R_g(c) = exp(c G_g) = I + c G_g and the elementary shears G_a = e_1 e_2^T and G_b = e_2 e_3^T, which do not commute. An
ordinary example draws both generators independently (aa, ab, ba, bb). A pair is ab together with ba, of the same v and
coefficients.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from shippo_ssm._expect import expect_size


def stream(seed: int, *key: int) -> torch.Generator:
    """A random generator that is a function of (seed, key) alone: a run continues from its step count."""
    if seed < 0 or any(k < 0 for k in key):
        raise ValueError(f"stream got seed {seed} and key {key}; expected nonnegative integers; choose seeds from 0 upwards")
    word = np.random.SeedSequence([seed, *key]).generate_state(1, dtype=np.uint64)[0]
    return torch.Generator().manual_seed(int(word >> np.uint64(1)))


class Examples(NamedTuple):
    """Three-token examples: WRITE(value), OP(generator[0], coef[0]), OP(generator[1], coef[1])."""

    value: Tensor  # [.., d]
    generator: Tensor  # [.., 2], integers below K
    coef: Tensor  # [.., 2]

    def swapped(self) -> Examples:
        """The same examples with the two operations in the other order."""
        return Examples(self.value, self.generator.flip(-1), self.coef.flip(-1))


@dataclass(frozen=True, kw_only=True, slots=True)
class PairedTask:
    """The paired transport task in d channels with K = 2 elementary shears."""

    width: int = 4
    """Channels d of a payload."""
    coef_range: float = 0.5
    """Operation coefficients are uniform in [-coef_range, coef_range]."""

    def __post_init__(self) -> None:
        expect_size("PairedTask", "width", self.width, "3 or more; the shears move channel 1 to 2 and 2 to 3", 3)

    @property
    def generators(self) -> Tensor:
        """G_a = e_1 e_2^T and G_b = e_2 e_3^T, [K, d, d]."""
        generators = torch.zeros(2, self.width, self.width)
        generators[0, 0, 1] = generators[1, 1, 2] = 1.0
        return generators

    def draw(self, rng: torch.Generator, *shape: int) -> Examples:
        """Ordinary examples: v ~ N(0, I/d), generators and coefficients independent and uniform."""
        value = torch.randn(*shape, self.width, generator=rng) / self.width**0.5
        generator = torch.randint(0, 2, (*shape, 2), generator=rng)
        return Examples(value, generator, self._coef(rng, *shape))

    def draw_pairs(self, rng: torch.Generator, *shape: int) -> Examples:
        """Pairs in the order ab; `.swapped()` gives ba with the same payload and coefficients."""
        value = torch.randn(*shape, self.width, generator=rng) / self.width**0.5
        return Examples(value, torch.tensor([0, 1]).expand(*shape, 2), self._coef(rng, *shape))

    def right(self, examples: Examples) -> Tensor:
        """R_g(c) = I + c G_g of both operations, [.., 2, d, d]."""
        shear = self.generators.to(examples.coef)[examples.generator]
        return torch.eye(self.width).to(shear) + examples.coef[..., None, None] * shear

    def answer(self, examples: Examples) -> Tensor:
        """y = v^T R_1 R_2, [.., d]."""
        first, second = self.right(examples).unbind(-3)
        return (examples.value.unsqueeze(-2) @ first @ second).squeeze(-2)

    def order_averaged(self, examples: Examples) -> Tensor:
        """v^T (R_1 R_2 + R_2 R_1) / 2, [.., d]: the best answer of a memory that cannot see the order."""
        return (self.answer(examples) + self.answer(examples.swapped())) / 2

    def _coef(self, rng: torch.Generator, *shape: int) -> Tensor:
        return (torch.rand(*shape, 2, generator=rng) * 2 - 1) * self.coef_range

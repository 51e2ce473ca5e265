"""The exponential of a sum of generators that all tokens share."""

from typing import final

import torch
from torch import Tensor, nn

from shippo_ssm.actions.base import not_finite
from shippo_ssm.actions.expm import check_square
from shippo_ssm.actions.family import Exponential
from shippo_ssm.dispatch import is_readable


@final
class Lie(Exponential):
    """R = exp(step sum_k coords_k G_k): generators G [K, P, P] shared by all tokens, trained if `learnable`.

    Example:
        >>> shears = torch.tensor([[[0.0, 1.0], [0.0, 0.0]], [[0.0, 0.0], [1.0, 0.0]]])
        >>> Lie(shears).dense(torch.tensor([2.0, 0.0]), 1.0).tolist()
        [[1.0, 2.0], [0.0, 1.0]]
    """

    def __init__(self, generators: Tensor, learnable: bool = True) -> None:
        check_square("Lie", "generators", generators)
        if generators.ndim != 3:
            raise ValueError(f"Lie: `generators` has shape {tuple(generators.shape)}; expected [K, P, P]; stack them")
        super().__init__(generators.shape[-1], [f"rho[{k}]" for k in range(len(generators))])
        generators = generators.detach().clone()
        if is_readable(generators) and not bool(torch.isfinite(generators).all()):
            raise not_finite("Lie", "generators")
        if learnable:
            self.generators = nn.Parameter(generators)
        else:
            self.register_buffer("generators", generators)

    def matrix(self, coords: Tensor) -> Tensor:
        self.check(coords)
        return torch.einsum("...k,kij->...ij", coords, self.generators.to(coords.dtype))

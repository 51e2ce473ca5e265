"""The exponential of a sum of the factors' generators."""

from typing import final

from shippo_ssm.actions.families.bases import Factored
from shippo_ssm.actions.family import Exponential


@final
class Structured(Factored, Exponential):
    """R = exp(step (-Diag(softplus(d)) + sum theta Omega + sum eta N + sum zeta p q^T)).

    Coordinates and arguments are those of `SplitFlow`; `bounded`, the sum is `contracted`: ||R||_2 <= 1.

    Example:
        >>> Structured(4).num_coordinates
        16
    """

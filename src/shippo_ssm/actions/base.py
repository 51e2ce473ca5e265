"""What factors have in common, and what factors and families share: a rule for `vmap`, a check of states, an error."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from shippo_ssm.actions.family import RightAction


class Factor(ABC):
    """R = exp(coef G) for a fixed generator G of which the exponential has a closed form."""

    width: int

    @property
    @abstractmethod
    def generator(self) -> Tensor:
        """G [P, P] in float32, or in the dtype of the vectors that define it."""

    @abstractmethod
    def act_columns(self, columns: Sequence[Tensor], coef: Tensor) -> list[Tensor]:
        """The P columns [.., N] of `state exp(coef G)`, given those of `state`; `coef` broadcasts against a column."""

    def act(self, state: Tensor, coef: Tensor | float) -> Tensor:
        """state exp(coef G) for a state [.., N, P] and one coefficient per leading index [..], or a number."""
        check_state(self, state)
        coef = torch.as_tensor(coef, dtype=state.dtype, device=state.device)
        return torch.stack(torch.broadcast_tensors(*self.act_columns(state.unbind(-1), coef.unsqueeze(-1))), -1)

    def dense(self, coef: Tensor | float) -> Tensor:
        """exp(coef G) [.., P, P] for coefficients [..]."""
        coef = torch.as_tensor(coef)
        coef = coef if coef.is_floating_point() else coef.to(torch.get_default_dtype())
        return self.act(torch.eye(self.width, dtype=coef.dtype, device=coef.device), coef)

    def inverse(self, coef: Tensor | float) -> Tensor:
        """exp(-coef G) [.., P, P], the inverse of `dense(coef)`."""
        return self.dense(-coef)


def register_vmap(op: Any, num_tensors: int) -> None:
    """Under `vmap`, call the op with the mapped axis first; its first arguments are tensors."""

    def mapped(info: Any, in_dims: Sequence[int | None], *arguments: Any) -> tuple[Tensor, int]:
        tensors = [
            tensor.expand(info.batch_size, *tensor.shape) if dim is None else tensor.movedim(dim, 0)
            for tensor, dim in zip(arguments[:num_tensors], in_dims)
        ]
        return op(*tensors, *arguments[num_tensors:]), 0

    op.register_vmap(mapped)


def check_state(action: Factor | RightAction, state: Tensor) -> None:
    """Raise where a state is not [.., N, P] for the width P of an action."""
    if state.ndim < 2 or state.shape[-1] != action.width:
        raise ValueError(
            f"{type(action).__name__}: `state` has shape {tuple(state.shape)}; expected [.., N, {action.width}]; "
            "the last axis counts the channels of one group"
        )


def not_finite(op: str, name: str) -> ValueError:
    """Error for an argument with a NaN or an infinity."""
    return ValueError(f"{op}: `{name}` has an entry that is not finite; expected numbers; look for a NaN where it is made")

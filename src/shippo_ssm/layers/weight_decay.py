"""Parameters without weight decay, which also stay in float32 in a half-precision model; optimiser groups for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, Self

from torch import Tensor, nn

from shippo_ssm.dispatch import compute_dtype


class NoWeightDecay(nn.Module):
    """A module whose parameters named in `no_weight_decay` carry `_no_weight_decay` and stay in float32.

    Casts, copies, `load_state_dict(assign=True)` and `from_pretrained` replace parameters; replacements are marked again.
    """

    no_weight_decay: ClassVar[tuple[str, ...]] = ()

    def no_weight_decay_parameters(self) -> list[nn.Parameter]:
        """Parameters without weight decay of this module and of all inside it."""
        modules = [module for module in self.modules() if isinstance(module, NoWeightDecay)]
        named = [module._parameters.get(name) for module in modules for name in module.no_weight_decay]
        return [parameter for parameter in named if parameter is not None]

    def right_parameters(self) -> list[Tensor]:
        """Parameters of this module that make the coordinates of right actions."""
        return []

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        super().register_parameter(name, param)
        self._mark()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._mark()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Keep marked parameters in float32 under `.half()` and `.to(bfloat16)`; moves and `.double()` apply to them."""
        marked = {id(parameter) for parameter in self._mark()}

        def keep(tensor: Tensor) -> Tensor:
            changed = fn(tensor)
            if id(tensor) in marked and compute_dtype(changed.dtype) != changed.dtype:
                return tensor.to(device=changed.device)
            return changed

        super()._apply(keep, recurse)
        self._mark()
        return self

    def _mark(self) -> list[nn.Parameter]:
        """Mark this module's own parameters and return them."""
        own = [parameter for name in self.no_weight_decay if (parameter := self._parameters.get(name)) is not None]
        for parameter in own:
            parameter._no_weight_decay = True  # pyright: ignore[reportAttributeAccessIssue]
        return own


def weight_decay_groups(model: nn.Module, weight_decay: float, right_lr: float | None = None) -> list[dict[str, Any]]:
    """Optimiser groups: one with `weight_decay`, one without for the parameters that SHiPPO layers exclude from it.

    Args:
        model: any module.
        weight_decay: weight decay of the first group.
        right_lr: a learning rate of their own for the parameters of right actions, in two more groups. Everything stored feels
            a change of a right action once per token: a tenth of the other learning rate keeps stored values in place.
    """
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if bool(getattr(p, "_no_weight_decay", False)) is excluded], "weight_decay": decay}
        for excluded, decay in ((False, weight_decay), (True, 0.0))
    ]
    if right_lr is None:
        return groups
    modules = [module for module in model.modules() if isinstance(module, NoWeightDecay)]
    right = {id(p) for module in modules for p in module.right_parameters()}
    return [
        group | {"params": [p for p in group["params"] if (id(p) in right) is acts]} | ({"lr": right_lr} if acts else {})
        for acts in (False, True)
        for group in groups
    ]

"""Parameters that are spared: they stay in float32 in a half-precision model, and take no weight decay."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, Self

from torch import Tensor, nn

from shippo_ssm._dtypes import compute_dtype


class Spared(nn.Module):
    """A module that spares the parameters it names: they carry `_no_weight_decay`, however they came to be there.

    Parameters are replaced by casts, copies, `load_state_dict(assign=True)` and `from_pretrained`; what replaces a spared one
    is marked again.
    """

    spared: ClassVar[tuple[str, ...]] = ()

    def spared_parameters(self) -> list[nn.Parameter]:
        """Those of this module and of all inside it."""
        modules = [module for module in self.modules() if isinstance(module, Spared)]
        named = [module._parameters.get(name) for module in modules for name in module.spared]
        return [parameter for parameter in named if parameter is not None]

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        super().register_parameter(name, param)
        self._mark()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._mark()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """`.half()` and `.to(bfloat16)` leave spared parameters in float32; moves and `.double()` take them along."""
        spared = {id(parameter) for parameter in self._mark()}

        def keep(tensor: Tensor) -> Tensor:
            changed = fn(tensor)
            if id(tensor) in spared and compute_dtype(changed.dtype) != changed.dtype:
                return tensor.to(device=changed.device)
            return changed

        super()._apply(keep, recurse)
        self._mark()
        return self

    def _mark(self) -> list[nn.Parameter]:
        """Mark this module's own; returns them."""
        own = [parameter for name in self.spared if (parameter := self._parameters.get(name)) is not None]
        for parameter in own:
            parameter._no_weight_decay = True  # pyright: ignore[reportAttributeAccessIssue]
        return own

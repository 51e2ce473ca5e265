"""The options of the layer, once: `Shippo`, the experiments' models and the Hugging Face configuration take them from here."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass

from shippo_ssm.actions import RightAction


@dataclass(frozen=True, slots=True)
class ShippoSpec:
    """How a `Shippo` layer is built, apart from its width.

    Example:
        >>> from shippo_ssm.layers import Shippo, ShippoSpec
        >>> spec = ShippoSpec(d_state=8, right="dense")
        >>> Shippo(16, spec=spec).right.num_coordinates
        16
    """

    d_state: int = 32
    """N, slots of the memory per group."""
    d_conv: int = 4
    """Taps of the short causal convolution."""
    expand: float = 2
    """D = expand d_model channels inside."""
    group_width: int = 4
    """P, channels per transport group; D must be a multiple of it."""
    right: str | RightAction = "split"
    """The right action: "split", "dense", "none", or a family of `shippo_ssm.actions` of width P."""
    _: KW_ONLY
    write_rank: int = 1
    """r, sources per position and group; each has its own value channels and write."""
    controller_conv: int = 0
    """Taps of the controller's own causal convolution; 0 is the input-only controller."""
    learnable_initial_state: bool = False
    """Whether the memory starts from a learnable H_0 [G, N, P] instead of zeros."""
    drift_init: str = "s4d-real"
    """Where the drift starts: "s4d-real" (time scales 1, 1/2, .. 1/N) or "legs" (one slow scale); see `initial_drift`."""
    dt_min: float = 0.001
    """The smallest step at the start; steps start log-uniform over the groups."""
    dt_max: float = 0.1
    """The largest step at the start."""
    bias: bool = False
    """Whether in- and out-projection have a bias."""
    conv_bias: bool = True
    """Whether the short convolution has a bias."""
    backend: str = "auto"
    """Backend of the scan; "auto" takes the fastest for the device."""

    def __post_init__(self) -> None:
        for name in ("d_state", "d_conv", "group_width", "write_rank"):
            expect_positive("Shippo", name, getattr(self, name))
        if not 0 < self.dt_min <= self.dt_max:
            raise ValueError(f"Shippo: `dt_min`, `dt_max` are {self.dt_min}, {self.dt_max}; expected 0 < dt_min <= dt_max")

    def num_channels(self, d_model: int) -> int:
        """D = expand d_model, checked to be whole and a multiple of the group width."""
        expect_positive("Shippo", "d_model", d_model)
        channels = int(self.expand * d_model)
        if channels < 1 or channels != self.expand * d_model:
            raise ValueError(f"Shippo: `expand` is {self.expand} with d_model = {d_model}; expected a whole number of channels")
        if channels % self.group_width:
            raise ValueError(
                f"Shippo: `group_width` is {self.group_width} with d_model * expand = {channels} channels; expected a divisor "
                f"of {channels}; choose another group_width or expand"
            )
        return channels


def expect_positive(op: str, name: str, size: int) -> None:
    """Raise where a size is not a positive integer."""
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        raise ValueError(f"{op}: `{name}` is {size!r}; expected a positive integer")

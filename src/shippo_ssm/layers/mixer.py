"""The SHiPPO sequence layer, in the place of a Mamba mixer or an attention layer.

Data path: u [B, T, d_model] is projected to a branch of D = expand d_model channels (r D for rank-r writes) and a gate z
[B, T, D]. The branch passes a short causal convolution and a SiLU; its channels, cut into G groups of width P, are the values
[B, T, G, P] that are written. The controller reads the branch and emits write, read, step, mix and right coordinates per
group; the family makes right actions R [B, T, G, P, P] of coordinates and steps; the two-point cell moves the memory
[B, G, N, P] and is read out. A skip adds the value, the gate multiplies, and an out-projection returns to [B, T, d_model].

The state between calls is a `ShippoState` of fixed size. Padding is the identity map; packed sequences do not see each other.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shippo_ssm._dtypes import compute_dtype
from shippo_ssm.actions import RightAction, get_family
from shippo_ssm.layers.cell import CellState, shippo_cell, shippo_cell_step
from shippo_ssm.layers.checks import check_input, check_mask, check_state
from shippo_ssm.layers.controller import Controller, Emission
from shippo_ssm.layers.conv import ShortConv
from shippo_ssm.layers.drift import initial_drift
from shippo_ssm.layers.state import ShippoState


class Shippo(nn.Module):
    """y = W_out (silu(z) (read^T H + skip value)), H_t = L_t (H_{t-1} + beta_t U_{t-1}) R_t + gamma_t U_t: one SHiPPO layer.

    Args:
        d_model: width of input and output.
        d_state: N, slots of the memory per group.
        d_conv: taps of the short causal convolution.
        expand: D = expand d_model channels inside.
        group_width: P, channels per transport group; D must be a multiple of it.
        right: "split", "dense", "none", or a family of `shippo_ssm.actions` of width P.
        write_rank: r, sources per position and group; each has its own value channels and write.
        controller_conv: taps of the controller's own causal convolution; 0 (default) is the input-only controller.
        learnable_initial_state: whether the memory starts from a learnable H_0 [G, N, P] instead of zeros.
        drift_init: "s4d-real" (time scales 1, 1/2, .. 1/N) or "legs" (one slow scale); see `initial_drift`.
        dt_min, dt_max: range of the steps at the start, log-uniform over groups.
        bias: whether in- and out-projection have a bias.
        conv_bias: whether the short convolution has one.
        backend: the scan's backend; "auto" takes the fastest for the device.
        layer_idx: place in a stack, for caches and messages.

    Example:
        >>> import torch
        >>> from shippo_ssm import Shippo
        >>> layer = Shippo(16, d_state=8, backend="reference")
        >>> u = torch.randn(2, 6, 16)
        >>> y, state = layer(u[:, :5], output_state=True)
        >>> y_last, state = layer.step(u[:, 5], state)
        >>> torch.allclose(y_last, layer(u)[:, 5], atol=1e-5)
        True
    """

    def __init__(
        self,
        d_model: int,
        d_state: int = 32,
        d_conv: int = 4,
        expand: float = 2,
        group_width: int = 4,
        right: str | RightAction = "split",
        *,
        write_rank: int = 1,
        controller_conv: int = 0,
        learnable_initial_state: bool = False,
        drift_init: str = "s4d-real",
        dt_min: float = 0.001,
        dt_max: float = 0.1,
        bias: bool = False,
        conv_bias: bool = True,
        backend: str = "auto",
        layer_idx: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        for name, size in {"d_model": d_model, "d_state": d_state, "d_conv": d_conv, "write_rank": write_rank}.items():
            if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                raise ValueError(f"Shippo: `{name}` is {size!r}; expected a positive integer")
        d_inner = int(expand * d_model)
        if d_inner < 1 or d_inner != expand * d_model:
            raise ValueError(f"Shippo: `expand` is {expand} with d_model = {d_model}; expected a whole number of channels")
        if isinstance(group_width, bool) or not isinstance(group_width, int) or group_width < 1 or d_inner % group_width:
            raise ValueError(
                f"Shippo: `group_width` is {group_width!r} with d_model * expand = {d_inner} channels; expected a divisor of "
                f"{d_inner}; choose another group_width or expand"
            )
        self.d_model, self.d_state, self.d_conv, self.d_inner = d_model, d_state, d_conv, d_inner
        self.group_width, self.num_groups, self.write_rank = group_width, d_inner // group_width, write_rank
        self.drift_init, self.backend, self.layer_idx = drift_init, backend, layer_idx
        # Switched off by `identity_right`, which replaces R by I at evaluation.
        self.use_right = True

        place: dict[str, Any] = {"device": device, "dtype": dtype}
        self.in_proj = nn.Linear(d_model, (write_rank + 1) * d_inner, bias=bias, **place)
        self.conv = ShortConv(write_rank * d_inner, d_conv, bias=conv_bias, **place)
        self.right = get_family(right, group_width).to(**place)
        # The start is a list of plain numbers also where modules are built without storage, on the meta device.
        with torch.device("cpu"):
            start = self.right.init_coordinates().tolist()
        self.controller = Controller(
            d_inner,
            self.num_groups,
            d_state,
            self.right.num_coordinates,
            write_rank=write_rank,
            conv_width=controller_conv,
            dt_min=dt_min,
            dt_max=dt_max,
            init_coordinates=start,
            **place,
        )
        self.drift_log = nn.Parameter(torch.empty(self.num_groups, d_state, **place))
        self.skip = nn.Parameter(torch.empty(self.num_groups, group_width, **place))
        self.initial_memory = None
        if learnable_initial_state:
            self.initial_memory = nn.Parameter(torch.empty(self.num_groups, d_state, group_width, **place))
        self.out_proj = nn.Linear(d_inner, d_model, bias=bias, **place)
        for parameter in self.sensitive_parameters():
            parameter._no_weight_decay = True  # pyright: ignore[reportAttributeAccessIssue]
        self.reset_parameters()
        # A layer asked for in half precision keeps its sensitive parameters in float32 as well.
        if compute_dtype(self.drift_log.dtype) != self.drift_log.dtype:
            for parameter in self.sensitive_parameters():
                parameter.data = parameter.data.float()

    def reset_parameters(self) -> None:
        """Start anew: projections and convolution as linear layers do, drift as `drift_init` says, steps and coordinates as the
        controller does."""
        self.in_proj.reset_parameters()
        self.conv.reset_parameters()
        self.controller.reset_parameters()
        self.out_proj.reset_parameters()
        with torch.no_grad():
            for index, drift in enumerate(initial_drift(self.drift_init, self.d_state)):
                self.drift_log[:, index] = -drift
            self.drift_log.log_()
            self.skip.fill_(1.0)
            if self.initial_memory is not None:
                self.initial_memory.normal_(std=self.d_state**-0.5)

    def sensitive_parameters(self) -> list[nn.Parameter]:
        """What stays in float32 in a half-precision model and takes no weight decay: drift, skip, controller biases, H_0."""
        own = [self.drift_log, self.skip] + ([] if self.initial_memory is None else [self.initial_memory])
        return own + self.controller.sensitive_parameters()

    @property
    def drift(self) -> Tensor:
        """The left generator a = -exp(drift_log), [G, N]."""
        return -torch.exp(self.drift_log)

    def init_state(self, batch_size: int) -> ShippoState:
        """The state before the first token, for `batch_size` sequences."""
        like = self.in_proj.weight
        kept = compute_dtype(like.dtype)
        windows = ("conv", "controller")
        zeros = {
            name: like.new_zeros(shape, dtype=like.dtype if name in windows else kept)
            for name, shape in self.state_shapes(batch_size).items()
        }
        memory = zeros["memory"]
        if self.initial_memory is not None:
            memory = memory + self.initial_memory.to(kept)
        return ShippoState(zeros["conv"], CellState(memory, zeros["write"], zeros["value"]), zeros.get("controller"))

    def state_shapes(self, batch_size: int) -> dict[str, tuple[int, ...]]:
        """The shapes of the tensors of a `ShippoState` of `batch_size` sequences, by name."""
        groups = (batch_size, self.num_groups)
        ranks = (*groups, self.write_rank) if self.write_rank > 1 else groups
        shapes = {
            "conv": (batch_size, self.d_conv - 1, self.write_rank * self.d_inner),
            "memory": (*groups, self.d_state, self.group_width),
            "write": (*ranks, self.d_state),
            "value": (*ranks, self.group_width),
        }
        if self.controller.conv is not None:
            shapes["controller"] = (batch_size, self.controller.conv.width - 1, self.d_inner)
        return shapes

    def forward(
        self,
        u: Tensor,
        state: ShippoState | None = None,
        *,
        attention_mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        output_state: bool = False,
    ) -> Any:
        """Run the layer over a segment.

        Args:
            u: [B, T, d_model].
            state: the `ShippoState` of an earlier segment; a fresh start by default.
            attention_mask: [B, T], bool or 0/1 integers; padding may stand left, right or between, and leaves the state alone.
            cu_seqlens: [num_sequences + 1] boundaries of sequences packed along T, with B = 1; one state per sequence.
            output_state: whether to return the state after the segment.

        Returns:
            y [B, T, d_model] (zeros at padding), or (y, `ShippoState`) with `output_state=True`.
        """
        check_input("Shippo.forward", u, ("B", "T", "d_model"), self.d_model)
        mask = check_mask("Shippo.forward", attention_mask, u, cu_seqlens)
        state = self._enter("Shippo.forward", u, state, cu_seqlens)

        def recur(value: Tensor, emission: Emission, right: Tensor | None) -> tuple[Tensor, CellState | None]:
            return shippo_cell(
                value,
                emission.write,
                emission.read,
                emission.step,
                emission.mix,
                self.drift.to(value.dtype),
                right,
                initial_state=state.cell,
                output_final_state=output_state,
                cu_seqlens=cu_seqlens,
                mask=mask,
                backend=self.backend,
            )

        y, after = self._run(u, state, recur, mask, cu_seqlens)
        if mask is not None:
            y = y * mask.unsqueeze(-1)
        return (y, after) if output_state else y

    def step(self, u: Tensor, state: ShippoState) -> tuple[Tensor, ShippoState]:
        """One token: u [B, d_model] and a state give y [B, d_model] and the next state, in time and memory that do not grow."""
        check_input("Shippo.step", u, ("B", "d_model"), self.d_model)
        check_state("Shippo.step", state, self.state_shapes(u.shape[0]), u.device)

        def recur(value: Tensor, emission: Emission, right: Tensor | None) -> tuple[Tensor, CellState]:
            write, read, step, mix, *_ = (tensor.squeeze(1) for tensor in emission)
            right = None if right is None else right.squeeze(1)
            drift = self.drift.to(value.dtype)
            y, cell = shippo_cell_step(value.squeeze(1), write, read, step, mix, drift, right, state.cell)
            return y.unsqueeze(1), cell

        y, after = self._run(u.unsqueeze(1), state, recur, None, None)
        assert after is not None
        return y.squeeze(1), after

    def right_actions(
        self,
        u: Tensor,
        state: ShippoState | None = None,
        *,
        attention_mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
    ) -> Tensor:
        """The right actions R [B, T, G, P, P] that the layer would apply along `u` [B, T, d_model]."""
        check_input("Shippo.right_actions", u, ("B", "T", "d_model"), self.d_model)
        mask = check_mask("Shippo.right_actions", attention_mask, u, cu_seqlens)
        state = self._enter("Shippo.right_actions", u, state, cu_seqlens)
        branch, _ = self.in_proj(u).split([self.write_rank * self.d_inner, self.d_inner], dim=-1)
        x, _ = self.conv(branch, state.conv, mask=mask, cu_seqlens=cu_seqlens)
        emission, _ = self.controller(F.silu(x[..., : self.d_inner]), state.controller, mask=mask, cu_seqlens=cu_seqlens)
        return self.right(emission.coords, emission.step)

    def extra_repr(self) -> str:
        return f"d_model={self.d_model}, d_state={self.d_state}, num_groups={self.num_groups}, group_width={self.group_width}"

    def _enter(self, op: str, u: Tensor, state: ShippoState | None, cu_seqlens: Tensor | None) -> ShippoState:
        """The state to start from, checked against the layer's shapes."""
        count = u.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
        if state is None:
            return self.init_state(count)
        check_state(op, state, self.state_shapes(count), u.device)
        return state

    def _run(
        self,
        u: Tensor,
        state: ShippoState,
        recur: Callable[[Tensor, Emission, Tensor | None], tuple[Tensor, CellState | None]],
        mask: Tensor | None,
        cu_seqlens: Tensor | None,
    ) -> tuple[Tensor, ShippoState | None]:
        """The data path around the recurrence, shared by `forward` (a scan) and `step` (one update)."""
        branch, gate = self.in_proj(u).split([self.write_rank * self.d_inner, self.d_inner], dim=-1)
        x, window = self.conv(branch, state.conv, mask=mask, cu_seqlens=cu_seqlens)
        x = F.silu(x)
        main = x[..., : self.d_inner]
        emission, own_window = self.controller(main, state.controller, mask=mask, cu_seqlens=cu_seqlens)
        # The recurrence runs in float32 at least, also where autocast lowers the projections.
        with _full_precision(u.device.type):
            ranks = x.unflatten(-1, (self.write_rank, self.num_groups, self.group_width)).to(emission.step.dtype)
            gated = emission.write_gate[..., None, :, None] * ranks
            value = gated.transpose(-3, -2) if self.write_rank > 1 else gated.squeeze(-3)
            right = None
            if self.right.num_coordinates and self.use_right:
                right = self.right(emission.coords, emission.step)
            y, cell = recur(value, emission, right)
            y = emission.read_gate.unsqueeze(-1) * y + self.skip.to(y.dtype) * ranks.select(-3, 0)
        y = self.out_proj(y.flatten(-2).to(gate.dtype) * F.silu(gate))
        return y, None if cell is None else ShippoState(window, cell, own_window)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Shippo:
        """`.half()` and `.to(bfloat16)` leave the sensitive parameters in float32; moves and `.double()` take them along."""
        sensitive = {id(parameter) for parameter in self.sensitive_parameters()}

        def keep(tensor: Tensor) -> Tensor:
            changed = fn(tensor)
            if id(tensor) in sensitive and compute_dtype(changed.dtype) != changed.dtype:
                return tensor.to(device=changed.device)
            return changed

        super()._apply(keep, recurse)
        for parameter in self.sensitive_parameters():
            parameter._no_weight_decay = True  # pyright: ignore[reportAttributeAccessIssue]
        return self


def _full_precision(device_type: str) -> contextlib.AbstractContextManager[Any]:
    """Autocast switched off where it is on; nothing elsewhere, so that traced graphs stay plain."""
    if torch.is_autocast_enabled(device_type):
        return torch.autocast(device_type, enabled=False)
    return contextlib.nullcontext()

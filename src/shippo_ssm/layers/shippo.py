"""The SHiPPO sequence layer, in the place of a Mamba mixer or an attention layer.

Data path: u [B, T, d_model] is projected to a branch of D = expand d_model channels (r D for rank-r writes) and a gate z
[B, T, D]. The branch passes a short causal convolution and a SiLU; its channels, cut into G groups of width P, are the values
[B, T, G, P] that are written. The controller reads the branch and emits step, mix and right coordinates per group, and write
and read vectors, which groups may share; the family makes right actions R [B, T, G, P, P] of coordinates and steps; the
two-point cell moves the memory [B, G, N, P] and is read out (through a norm, if asked for). A skip adds the value, the gate
multiplies, and an out-projection returns to [B, T, d_model].

The state between calls is a `ShippoState` of fixed size. Padding is the identity map; packed sequences do not see each other.
"""

from __future__ import annotations

import contextlib
import inspect
import time
from typing import Any, Unpack

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shippo_ssm.actions import get_family
from shippo_ssm.dispatch import compute_dtype
from shippo_ssm.layers import decode
from shippo_ssm.layers.cell import run_cell, shippo_cell_step
from shippo_ssm.layers.controller import Controller
from shippo_ssm.layers.mixer import Mixer, Segment, SegmentOptions, check_segment
from shippo_ssm.layers.rows import NoDecayNorm, ShortConv, scaled
from shippo_ssm.layers.spec import ShippoSpec, make_spec
from shippo_ssm.layers.states import CellState, ShippoState, check_state
from shippo_ssm.layers.weight_decay import NoWeightDecay
from shippo_ssm.scan import Recurrence

# Small beside what is read of a live memory, so that the norm gives it the same scale whatever it holds. The norm multiplies
# what is left of a wiped memory, and its gradients, by 1 / sqrt(eps) at most: with 1e-10 deep models on text diverged. ONNX
# export drops what it takes for zero, 1e-8 and below.
READ_EPS = 1e-7


class Shippo(Mixer[ShippoState], NoWeightDecay):
    """y = W_out (silu(z) (read^T H + skip value)), H_t = L_t (H_{t-1} + beta_t U_{t-1}) R_t + gamma_t U_t: one SHiPPO layer.

    Args:
        d_model: width of input and output.
        args, options: the fields of `ShippoSpec`, by position or by name.
        preset: a word of `PRESETS`, for what the options do not say: "tracking" (the default) or "language".
        spec: all of them as one record instead.
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

    supports_all_states = True
    supports_group = True
    supports_positions = True
    supports_dt = True
    no_weight_decay = ("drift_log", "skip", "initial_memory")

    def __init__(
        self, d_model: int, *args: Any, preset: str | None = None, spec: ShippoSpec | None = None, layer_idx: int | None = None,
        device: torch.device | str | None = None, dtype: torch.dtype | None = None, **options: Any,
    ) -> None:  # fmt: skip
        if spec is not None and (args or options or preset):
            extra = preset or args or ", ".join(options)
            raise ValueError(f"Shippo: `spec` came with {extra}; expected one of them; change the spec")
        spec = spec or make_spec("Shippo", preset, *args, **options)
        d_inner = spec.num_channels(d_model)
        super().__init__(d_model)
        self.spec, self.d_inner, self.num_groups, self.layer_idx = spec, d_inner, d_inner // spec.group_width, layer_idx

        place: dict[str, Any] = {"device": device, "dtype": dtype}
        self.in_proj = nn.Linear(d_model, (spec.write_rank + 1) * d_inner, bias=spec.bias, **place)
        self.conv = ShortConv(spec.write_rank * d_inner, spec.d_conv, bias=spec.conv_bias, **place)
        self.right = get_family(spec.right, spec.group_width, spec.bounded).to(**place)
        self.controller = Controller(d_inner, self.num_groups, self.right, spec, **place)
        self.drift_log = nn.Parameter(torch.empty(self.num_groups, spec.d_state, **place))
        self.skip = nn.Parameter(torch.empty(self.num_groups, spec.group_width, **place))
        self.read_norm = NoDecayNorm(d_inner, eps=READ_EPS, **place) if spec.read_norm else None
        self.initial_memory = None
        if spec.learnable_initial_state:
            self.initial_memory = nn.Parameter(torch.empty(self.num_groups, spec.d_state, spec.group_width, **place))
        self.out_proj = nn.Linear(d_inner, d_model, bias=spec.bias, **place)
        # Of the tensors of a `ShippoState`, for one sequence.
        rank = (spec.write_rank,) if spec.write_rank > 1 else ()
        self.state_shapes = {
            "conv": (spec.d_conv - 1, spec.write_rank * d_inner),
            "memory": (self.num_groups, spec.d_state, spec.group_width),
            "write": (self.controller.num_sets, *rank, spec.d_state),
            "value": (self.num_groups, *rank, spec.group_width),
        }
        if spec.controller_conv:
            self.state_shapes["controller"] = (spec.controller_conv - 1, d_inner)
        self.reset_parameters()
        # A layer built in half precision keeps these parameters in float32 as well.
        for parameter in self.parameters():
            if getattr(parameter, "_no_weight_decay", False):
                parameter.data = parameter.data.to(compute_dtype(parameter.dtype))

    def reset_parameters(self) -> None:
        """Start anew, as the spec says; what it does not speak of starts as linear layers and convolutions do."""
        self.in_proj.reset_parameters()
        self.conv.reset_parameters()
        self.controller.reset_parameters()
        self.out_proj.reset_parameters()
        spec, into = self.spec, self.in_proj.weight
        with torch.no_grad():
            # Every group starts from the same N rates.
            geometric, real = np.geomspace(1 / spec.memory_length, 1.0, spec.d_state), np.arange(1.0, spec.d_state + 1)
            for index, rate in enumerate((geometric if spec.drift_init == "geometric" else real).tolist()):
                self.drift_log[:, index] = rate
            self.drift_log.log_()
            self.skip.fill_(1.0)
            if self.read_norm is not None:
                self.read_norm.reset_parameters()
            if self.initial_memory is not None:
                self.initial_memory.normal_(std=spec.initial_state_std * spec.d_state**-0.5)
            if spec.in_init == "identity":
                eye = torch.eye(self.d_model, dtype=into.dtype, device=into.device)
                into[: self.d_inner] = eye.repeat(-(-self.d_inner // self.d_model), 1)[: self.d_inner]
            if spec.conv_init != "random":
                # Copy k of the input sees the token k before the present one; "identity" has the present one only.
                copies = torch.arange(self.d_inner, device=into.device) // self.d_model
                lags = copies.clamp(max=spec.d_conv - 1) if spec.conv_init == "staggered" else torch.zeros_like(copies)
                self.conv.start_as_shift(lags.repeat(spec.write_rank))
            if spec.read_init == "next":
                # What a write says to the token before, a read says to the present one.
                read = self.controller.read_proj.weight
                read.copy_(read.roll(-self.d_model, 1))
            if spec.out_init == "transpose":
                # Scaled to the spread that a linear layer of this width starts with.
                values = into[: self.d_inner].float()
                self.out_proj.weight.copy_(values.mT * (3 * self.d_inner) ** -0.5 / values.std())

    @property
    def drift(self) -> Tensor:
        """The left generator a = -exp(drift_log), [G, N]."""
        return -torch.exp(self.drift_log)

    def init_state(self, batch_size: int, like: Tensor | None = None) -> ShippoState:
        """The state before the first token, for `batch_size` sequences; dtype and device as `like`, or as the layer."""
        if like is None and self.drift_log.is_meta and decode.is_hooked(self):
            # Offloaded weights come with a call of the layer: so does the state, after no position.
            return self(torch.zeros(batch_size, 0, self.d_model, dtype=self.conv.weight.dtype), output_state=True)[1]
        like = self.conv.weight if like is None else like
        # What stays in float32 in a half-precision layer says the dtype of the memory.
        kept, shapes = self.drift_log.dtype, {name: (batch_size, *shape) for name, shape in self.state_shapes.items()}
        memory = like.new_zeros(shapes["memory"], dtype=kept)
        if self.initial_memory is not None:
            memory = memory + self.initial_memory.to(kept)
        cell = CellState(memory, like.new_zeros(shapes["write"], dtype=kept), like.new_zeros(shapes["value"], dtype=kept))
        controller = like.new_zeros(shapes["controller"]) if "controller" in shapes else None
        return ShippoState(like.new_zeros(shapes["conv"]), cell, controller)

    def run(self, u: Tensor, state: ShippoState | None, segment: Segment) -> tuple[Tensor, ShippoState]:
        """One segment; a single token that continues a state takes one update of the cell instead of a scan."""
        plan = None if torch.is_grad_enabled() else decode.find_plan(self, u, state, segment)
        if plan is not None:
            return decode.decode(self, plan, u, state, segment)
        if segment.return_all_states:
            return self.run_stepwise(u, state, segment)
        count = u.shape[0] if segment.cu_seqlens is None else segment.cu_seqlens.shape[0] - 1
        if fresh := state is None:
            state = self.init_state(count, u)
        else:
            check_state("Shippo", state, count, self.state_shapes, u.device)
        branch, gate = self.in_proj(u).split([self.spec.write_rank * self.d_inner, self.d_inner], dim=-1)
        x, window = self.conv(branch, state.conv, segment)
        x = F.silu(x)
        emission, own_window = self.controller(x[..., : self.d_inner], state.controller, segment)
        # The recurrence runs in float32 at least, also where autocast lowers the projections.
        lowered = not u.is_meta and torch.is_autocast_enabled(u.device.type)
        with torch.autocast(u.device.type, enabled=False) if lowered else contextlib.nullcontext():
            groups, width = self.num_groups, self.spec.group_width
            ranks = x.unflatten(-1, (self.spec.write_rank, groups, width)).transpose(-3, -2).to(emission.step.dtype)
            (value,) = scaled(ranks, emission.write_gate)
            right = None
            if self.right.num_coordinates and self.use_right:
                right = self.right(emission.coords, emission.step)
            drift = -torch.exp(self.drift_log).to(value.dtype)
            record = Recurrence(value, emission.write, emission.read, emission.step, drift, right)
            if u.shape[1] == 1 and segment.whole and not fresh:
                y, cell = shippo_cell_step(record, emission.mix, state.cell)
            else:
                y, cell = run_cell(record, emission.mix, state.cell, segment, self.spec.backend, fresh)
            # Of one rank a view: the gradient of a selection is filled with zeros first.
            read_gate, own = emission.read_gate, ranks.squeeze(-2) if self.spec.write_rank == 1 else ranks.select(-2, 0)
            if segment.positions is not None:
                y, read_gate, own, gate = (segment.at_positions(tensor) for tensor in (y, read_gate, own, gate))
            (y,) = scaled(y, read_gate)
            if self.read_norm is not None:
                y = self.read_norm(y.flatten(-2)).view_as(y)
            y = y + self.skip.to(y.dtype) * own
        y = self.out_proj(y.flatten(-2).to(gate.dtype) * F.silu(gate))
        if segment.mask is not None:
            y = torch.where(segment.at_positions(segment.mask).unsqueeze(-1), y, 0)
        return y, ShippoState(window, cell, own_window)

    def right_actions(self, u: Tensor, state: ShippoState | None = None, **options: Unpack[SegmentOptions]) -> Tensor | None:
        """R [B, T, G, P, P] that the layer applies along `u` [B, T, d_model]; `None` without a right action."""
        found: list[Tensor] = []
        with self.right.register_forward_hook(lambda *call: found.append(call[-1])):
            self.run(u, state, check_segment(self, u, **options))
        return found[0] if found else None

    def extra_repr(self) -> str:
        return f"d_model={self.d_model}, num_groups={self.num_groups}, {self.spec}"


def _signature() -> inspect.Signature:
    """`Shippo.__init__` as a reader wants to see it: the fields of the spec in the place of `*args` and `**options`."""
    own = [p for p in inspect.signature(Shippo.__init__).parameters.values() if not p.kind.name.startswith("VAR_")]
    fields = list(inspect.signature(ShippoSpec).parameters.values())
    return inspect.Signature(sorted([*own[:2], *fields, *own[2:]], key=lambda parameter: parameter.kind))


vars(Shippo.__init__)["__signature__"] = _signature()


def warmup(
    d_model: int = 128, *, batch_size: int = 2, length: int = 64, dtype: torch.dtype = torch.float32, training: bool = True,
    decoding: bool = True, **options: Any,
) -> float:  # fmt: skip
    """Compile the CPU kernels of `Shippo(d_model, **options)` and keep them on disk, so that no later process waits for them.

    Kernels belong to the sizes of a group (`d_state`, `group_width`), the right action, the dtype and the processor; few depend
    on `d_model`, `batch_size` or `length`, where large operands have a kernel of their own.

    Args:
        d_model: width of the layer.
        batch_size: sequences of the call.
        length: positions of the call.
        dtype: of the weights and inputs.
        training: whether to compile the backward pass.
        decoding: whether to compile the step of one token.
        options: of `Shippo`.

    Returns:
        The seconds it took; a fraction of one where the kernels were on disk already.

    Example:
        >>> from shippo_ssm import warmup
        >>> warmup(16, d_state=8, training=False, decoding=False) > 0
        True
    """
    begin = time.perf_counter()
    layer = Shippo(d_model, dtype=dtype, **options)
    u = torch.randn(batch_size, length, d_model, dtype=dtype)
    with torch.set_grad_enabled(training):
        y = layer(u)
        if training:
            y.sum().backward()
    if decoding:
        with torch.no_grad():
            layer.eval().step(u[:, 0], layer.init_state(batch_size))
    return time.perf_counter() - begin

"""The options of the layer, once: `Shippo`, the experiments' models and the Hugging Face configuration take them from here.

How a layer starts decides whether it learns. A right action's angle is step x coordinate and a source's weight is step x mix,
so time is counted in tokens: steps start at one. Of the `PRESETS`, "tracking", the default, learns what tokens do to a state;
"language" is for text: a part of the channels sees the token before, and right actions may forget. A layer that has to learn
what tokens do must not begin with that: it would learn pairs of tokens by heart instead.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import KW_ONLY, dataclass, fields
from difflib import get_close_matches
from typing import Any

from shippo_ssm._expect import expect_fields, expect_real, expect_size
from shippo_ssm.actions import RightAction
from shippo_ssm.dispatch import SCAN_BACKENDS, unknown_backend

# The start of a Mamba-style layer, as arguments: Shippo(d_model, **PAPER_START).
PAPER_START: dict[str, Any] = {
    "right": "split", "bounded": False, "learnable_initial_state": False, "initial_state_std": 1.0, "drift_init": "s4d-real",
    "dt_min": 0.001, "dt_max": 0.1, "in_init": "random", "conv_init": "random", "read_init": "random", "read_norm": False,
    "out_init": "random",
}  # fmt: skip
# The paper's geometry, as arguments: one write and one read vector per transport group, every number of the controller in full.
PAPER_GEOMETRY: dict[str, Any] = {
    "d_state": 32, "num_bc_groups": None, "controller_rank": None, "low_rank_right": False, "memory_length": 4096.0,
}  # fmt: skip
# What a word changes of the defaults: Shippo(d_model, preset="language").
PRESETS: dict[str, dict[str, Any]] = {
    "tracking": {},
    # Prototype, bits per byte of text: dissipative, bottleneck 32 and N 32 1.823, orthogonal 1.863, no right action 1.873.
    "language": {
        "right": "dissipative",
        "conv_init": "staggered",
        "controller_rank": 32,
        "low_rank_right": True,
        "memory_length": 4096.0,
    },
}
# What the words of a start may be.
WORDS = {
    "drift_init": ("geometric", "s4d-real"),
    "in_init": ("identity", "random"),
    "conv_init": ("identity", "staggered", "random"),
    "read_init": ("write", "next", "random"),
    "out_init": ("transpose", "random"),
}
# Options that other layers have -> what to do here.
_ELSEWHERE = {
    "dropout": "the layer has none inside; use Block(Shippo(d_model), dropout=p) or put nn.Dropout behind it",
    "bidirectional": "use Bidirectional(Shippo(d_model), Shippo(d_model))",
    "lengths mask padding_mask": "call the layer with attention_mask= [B, T], or with packed sequences and cu_seqlens=",
    "dt time_deltas": "it belongs to a call: layer(u, dt=...) with times [B, T] since the previous sample",
    "initial_state h0 hx": "it belongs to a call: layer(u, state); `learnable_initial_state` gives the layer one of its own",
    "hidden_size input_size dim": "the width is `d_model`, the first argument; the memory has `d_state` and `group_width`",
    "num_layers n_layers": "use ShippoBackbone(d_model, n_layers) for several layers",
    "batch_first": "leave it out; inputs are always [B, T, d_model]",
    "ngroups n_groups": "it is `num_bc_groups` here",
    "headdim head_dim": "it is `group_width` here",
}


class UnknownOption(TypeError, ValueError):
    """An option that the layer does not have: a `TypeError`, as Python raises, and a `ValueError`, as this library does."""

    def __init__(self, op: str, name: str, known: Iterable[str]) -> None:
        remedies = [remedy for names, remedy in _ELSEWHERE.items() if name in names.split()]
        if near := get_close_matches(name, known := list(known)):
            remedies.append(f"did you mean {' or '.join(map(repr, near))}?")
        remedies.append(f"expected one of {', '.join(known)}")
        super().__init__(f"{op}: `{name}` is not an option; {remedies[0]}")


@dataclass(frozen=True, slots=True)
class ShippoSpec:
    """How a `Shippo` layer is built, apart from its width."""

    d_state: int = 32
    """N, slots of the memory per group. Recall of 16 / 32 pairs: .92 / .56 with 16, .99 / .74 with 32 (seed 10,
    `results/defaults.json`, with a memory of 4,096 tokens)."""
    d_conv: int = 4
    """Taps of the short causal convolution."""
    expand: float = 2
    """D = expand d_model channels inside."""
    group_width: int = 4
    """P, channels per transport group; D must be a multiple of it."""
    right: str | RightAction = "orthogonal"
    """The right action: a word of `actions.FAMILIES` ("orthogonal", "dissipative", "split", "structured", "dense", "none"), or
    a family of width P."""
    _: KW_ONLY
    num_bc_groups: int | None = 1
    """Q, sets of write and read vectors, each shared by G / Q transport groups (Mamba-2's ngroups); `None` gives every
    transport group its own, as in the paper."""
    controller_rank: int | None = 16
    """Width of a linear bottleneck in front of the step, mix and gates of all groups, which saves a quarter of the weights;
    `None` projects them in full."""
    low_rank_right: bool = False
    """Whether the right coordinates pass that bottleneck as well: text does not mind, words of A5 fail on some seeds."""
    bounded: bool = True
    """Hold ||R||_2 <= 1 also in the families that can grow (split, structured, dense): a memory then cannot blow up."""
    write_rank: int = 1
    """r, sources per position and group; each has its own value channels and write."""
    controller_conv: int = 0
    """Taps of the controller's own causal convolution; 0 is the input-only controller."""
    learnable_initial_state: bool = True
    """Whether the memory starts from a learnable H_0 [G, N, P] instead of zeros: an anchor, from which the product of all
    right actions so far can be read."""
    initial_state_std: float = 0.3
    """Spread of H_0 at the start, in units of 1 / sqrt(N): enough to read products from, little beside what is written."""
    drift_init: str = "geometric"
    """Where the N drifts of every group start: "geometric", from -1 / memory_length to -1 in equal ratios; or "s4d-real", -1 to
    -N, the eigenvalues of LegS."""
    memory_length: float = 1e6
    """Tokens that the slowest slot remembers at a unit step, for "geometric". A product of right actions is read from a memory
    that fades: with 4,096 words of A5 are lost from some hundred elements on, however exact the actions are."""
    dt_min: float = 1.0
    """The smallest step at the start; steps start log-uniform over the groups. One is one token."""
    dt_max: float = 1.0
    """The largest step at the start."""
    in_init: str = "identity"
    """How the value part of the in-projection starts: "identity" (channels keep their neighbours, so that what stands together
    in the input shares a group) or "random"."""
    conv_init: str = "identity"
    """How the short convolution starts: as the "identity" of the present token; "staggered", the first d_model channels as the
    present token, the next d_model as the token before, and so on; or "random"."""
    read_init: str = "write"
    """How the read projection starts: as the "write" projection, so that a key finds what it wrote; as "next", so that it finds
    what was written one token later (with a "staggered" convolution); or "random"."""
    read_norm: bool = True
    """Whether what is read is RMS-normalised over D, before skip and gate: it then has a scale whatever the memory holds."""
    out_init: str = "transpose"
    """How the out-projection starts: as the scaled "transpose" of the value part of the in-projection, or "random"."""
    right_std: float = 0.02
    """Standard deviation of the right projection at the start; 0 starts at the identity exactly."""
    bias: bool = False
    """Whether in- and out-projection have a bias."""
    conv_bias: bool = True
    """Whether the short convolution has a bias."""
    backend: str = "auto"
    """Backend of the scan; "auto" takes the fastest for the device."""

    def __post_init__(self) -> None:
        sizes = ("d_state", "d_conv", "group_width", "write_rank")
        expect_fields("Shippo", self, sizes, ("num_bc_groups", "controller_rank"), WORDS)
        expect_size("Shippo", "controller_conv", self.controller_conv, "a number of taps, or 0 for none", 0)
        for name in ("expand", "dt_min", "dt_max"):
            expect_real("Shippo", name, getattr(self, name), "a number above 0", 0, open_end=True)
        for name in ("initial_state_std", "right_std"):
            expect_real("Shippo", name, getattr(self, name), "a standard deviation, 0 or more", 0)
        expect_real("Shippo", "memory_length", self.memory_length, "at least one token", 1)
        if self.low_rank_right and self.controller_rank is None:
            raise ValueError("Shippo: `low_rank_right` is True without `controller_rank`; expected the width of the bottleneck")
        if self.dt_min > self.dt_max:
            raise ValueError(f"Shippo: `dt_min`, `dt_max` are {self.dt_min}, {self.dt_max}; expected 0 < dt_min <= dt_max")
        if self.backend not in ("auto", *SCAN_BACKENDS):
            raise unknown_backend("Shippo", self.backend)

    def num_channels(self, d_model: int) -> int:
        """D = expand d_model, checked to be whole and a multiple of the group width."""
        expect_size("Shippo", "d_model", d_model)
        channels = int(self.expand * d_model)
        if channels < 1 or channels != self.expand * d_model:
            raise ValueError(f"Shippo: `expand` is {self.expand} with d_model = {d_model}; expected a whole number of channels")
        if channels % self.group_width:
            came = f"`group_width` is {self.group_width} with d_model * expand = {channels} channels"
            raise ValueError(f"Shippo: {came}; expected a divisor")
        return channels

    def num_sets(self, num_groups: int) -> int:
        """Q, the sets of write and read vectors of `num_groups` transport groups."""
        sets = self.num_bc_groups or num_groups
        if num_groups % sets:
            wanted = f"a divisor of {num_groups}, or None for one per group"
            raise ValueError(f"Shippo: `num_bc_groups` is {sets} with {num_groups} transport groups; expected {wanted}")
        return sets


def make_spec(op: str, preset: str | None, *args: Any, **options: Any) -> ShippoSpec:
    """The spec of a preset with `options` changed; an unknown option of `op` is named together with what to do instead."""
    if preset is not None and preset not in PRESETS:
        raise ValueError(f"{op}: `preset` is {preset!r}; expected one of {', '.join(map(repr, PRESETS))}")
    known = [entry.name for entry in fields(ShippoSpec)]
    for name in options:
        if name not in known:
            raise UnknownOption(op, name, known)
    preset_options = {name: value for name, value in PRESETS[preset or "tracking"].items() if name not in known[: len(args)]}
    return ShippoSpec(*args, **preset_options | options)

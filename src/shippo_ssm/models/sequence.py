"""The sequence model of the experiments: embedding, a stack of any mixer, and a head.

Data path: inputs pass the embedding (token ids [B, T], or vectors [B, T, d_model] without one), an input projection, n_layers
blocks of the chosen mixer, a final norm and an output projection, which gives features [B, T, d_model]. The head gives logits
[B, T, classes], or [B, T, heads, classes]. The states of all layers are a list.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, Unpack, overload

import torch
from torch import Tensor, nn

from shippo_ssm._expect import expect_fields, expect_real
from shippo_ssm.actions.families import FAMILIES
from shippo_ssm.layers import Block, CausalAttention, Shippo, ShippoSpec, Stack
from shippo_ssm.layers.attention import resolve_layer_types
from shippo_ssm.layers.linear import Linear
from shippo_ssm.layers.mixer import WHOLE, Segment, SegmentOptions, check_segment, last_positions
from shippo_ssm.layers.rows import RMSNorm
from shippo_ssm.models.baselines import FreeMixer, GRUMixer, LSTMMixer, MambaMixer, transformer_block

MIXERS = ("shippo", "free", "gru", "lstm", "mamba", "transformer")
WORDS = {
    "frame_init": ("identity", "random"),
    "head_init": ("random", "embedding"),
    "branch_init": ("unit", "depth"),
    "pool": (None, "last"),
    "mlp": ("gelu", "swiglu"),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class SequenceConfig(ShippoSpec):
    """The options of a `SequenceModel`: those of its layers, and those of embedding, projections and head."""

    mixer: str = "shippo"
    """"shippo", "free" (no right action, inside a static encoder and decoder), "gru", "lstm", "mamba" or "transformer"; the
    word of a right action, such as "dense", is short for "shippo" with that `right`."""
    d_model: int = 128
    n_layers: int = 4
    layer_types: tuple[str, ...] | None = None
    """The kind of every layer of a hybrid: "shippo" (which stands for `mixer`), "full_attention" or "sliding_attention"."""
    attention_every: int | None = None
    """Short for `layer_types` with attention in each `attention_every`-th layer."""
    sliding_window: int = 512
    """Tokens that a "sliding_attention" layer sees."""
    n_heads: int = 4
    """Attention heads of the Transformer and of hybrids."""
    mlp: str = "gelu"
    """What follows attention in the Transformer: "gelu" (an MLP, as in the committed results) or "swiglu"."""
    dropout: float = 0.0
    """Probability that a number of a residual branch is set to zero in training."""
    branch_init: str = "unit"
    """Scale of the residual branches at the start: "unit", or "depth" for 1 / sqrt(n_layers)."""
    vocab_size: int | None = None
    """Token ids of the default embedding; `None` for vector inputs or a custom embedding."""
    num_outputs: int = 1
    """Classifiers of the default head."""
    num_classes: int | None = None
    """Classes of each classifier; `None` is `vocab_size`, or no head if that is `None` too."""
    pool: str | None = None
    """`None` gives logits at every position; "last" at the last real position of every sequence, whatever padding follows."""
    tie_embeddings: bool = False
    """Whether the classifier's weight is that of the embedding."""
    norm_eps: float = 1e-5
    frame_init: str = "identity"
    """Initialisation of the input and output projections: "identity" or "random"."""
    head_init: str = "random"
    """Initialisation of the classifiers: "random", or the "embedding" of the tokens that they predict, for recall tasks."""

    def __post_init__(self) -> None:
        if isinstance(self.mixer, str) and self.mixer in FAMILIES:
            object.__setattr__(self, "right", self.mixer)
            object.__setattr__(self, "mixer", "shippo")
        # `super()` fails in a dataclass with slots, which is a new class.
        ShippoSpec.__post_init__(self)
        if not isinstance(self.mixer, str) or self.mixer not in MIXERS:
            words = ", ".join(map(repr, (*MIXERS, *FAMILIES)))
            raise ValueError(f"SequenceConfig: `mixer` is {self.mixer!r}; expected one of {words}")
        sizes = ("d_model", "n_layers", "n_heads", "num_outputs")
        expect_fields("SequenceConfig", self, sizes, ("vocab_size", "num_classes"), WORDS)
        for name, value in (("head_init", "embedding"), ("tie_embeddings", True)):
            if getattr(self, name) == value and (self.vocab_size is None or self.num_outputs > 1 or self.num_classes):
                raise ValueError(f"SequenceConfig: `{name}` is {value!r}; expected `vocab_size` and no other classes")
        expect_real("SequenceConfig", "norm_eps", self.norm_eps, "a small number, 0 or more", 0)
        if self.layer_types is not None:
            object.__setattr__(self, "layer_types", tuple(self.layer_types))
        resolve_layer_types("SequenceConfig", self.n_layers, self.layer_types, self.attention_every)

    @property
    def spec(self) -> ShippoSpec:
        """The options of a layer alone."""
        return ShippoSpec(**{field.name: getattr(self, field.name) for field in fields(ShippoSpec)})


def count_parameters(model: nn.Module) -> int:
    """The number of trainable parameters of `model`."""
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)


class Heads(nn.Module):
    """Linear classifiers: [.., d_model] -> [.., heads, classes], or [.., classes] for a single one."""

    def __init__(self, d_model: int, num_outputs: int, num_classes: int) -> None:
        super().__init__()
        self.num_outputs, self.num_classes = num_outputs, num_classes
        self.proj = Linear(d_model, num_outputs * num_classes)

    def forward(self, features: Tensor) -> Tensor:
        logits = self.proj(features)
        return logits if self.num_outputs == 1 else logits.unflatten(-1, (self.num_outputs, self.num_classes))


class SequenceModel(nn.Module):
    """logits = head(W_out norm(layers(W_in embedding(inputs)))).

    Args:
        config: a `SequenceConfig`.
        embedding: a module from inputs to [B, T, d_model]; default `nn.Embedding(config.vocab_size, d_model)`, or none.
        head: a module from features [.., d_model] to logits; default `Heads(d_model, config.num_outputs, config.num_classes)`.

    Example:
        >>> import torch
        >>> from shippo_ssm.models import SequenceConfig, SequenceModel
        >>> config = SequenceConfig(d_model=16, n_layers=1, d_state=8, vocab_size=11, backend="reference")
        >>> SequenceModel(config)(torch.zeros(2, 5, dtype=torch.int64)).shape
        torch.Size([2, 5, 11])
    """

    def __init__(self, config: SequenceConfig, embedding: nn.Module | None = None, head: nn.Module | None = None) -> None:
        super().__init__()
        self.config = config
        width = config.d_model
        if embedding is None and config.vocab_size is not None:
            embedding = nn.Embedding(config.vocab_size, width)
        num_classes = config.num_classes or config.vocab_size
        if head is None and num_classes is not None:
            head = Heads(width, config.num_outputs, num_classes)
        self.embedding = nn.Identity() if embedding is None else embedding
        self.in_proj = Linear(width, width)
        kinds = resolve_layer_types("SequenceModel", config.n_layers, config.layer_types, config.attention_every)
        self.layers = Stack(self._block(index, kind) for index, kind in enumerate(kinds))
        if config.branch_init == "depth":
            self.layers.scale_branches()
        self.norm = RMSNorm(width, eps=config.norm_eps)
        self.out_proj = Linear(width, width)
        self.head = nn.Identity() if head is None else head
        if config.frame_init == "identity":
            for projection in (self.in_proj, self.out_proj):
                nn.init.eye_(projection.weight)
                nn.init.zeros_(projection.bias)
        if isinstance(self.embedding, nn.Embedding) and isinstance(self.head, Heads):
            if config.head_init == "embedding":
                with torch.no_grad():
                    self.head.proj.weight.copy_(self.embedding.weight * width**-0.5)
                    self.head.proj.bias.zero_()
            if config.tie_embeddings:
                nn.init.normal_(self.embedding.weight, std=width**-0.5)
                self.head.proj.weight = self.embedding.weight

    @overload
    def forward(
        self, inputs: Any, states: Sequence[Any] | None = None, *, segment: Segment | None = None,
        output_state: Literal[False] = False, **options: Unpack[SegmentOptions],
    ) -> Tensor: ...  # fmt: skip
    @overload
    def forward(
        self, inputs: Any, states: Sequence[Any] | None = None, *, segment: Segment | None = None,
        output_state: Literal[True], **options: Unpack[SegmentOptions],
    ) -> tuple[Tensor, list[Any]]: ...  # fmt: skip
    def forward(
        self, inputs: Any, states: Sequence[Any] | None = None, *, segment: Segment | None = None,
        output_state: bool = False, **options: Unpack[SegmentOptions],
    ) -> Tensor | tuple[Tensor, list[Any]]:  # fmt: skip
        """Logits at every position, or with `config.pool` one per sequence.

        Args:
            inputs: the inputs of the embedding: ids [B, T], or vectors [B, T, d_model] without an embedding.
            states: the states of an earlier segment, one per layer; default the initial states.
            segment: mask, boundaries and the treatment of states as one record (see `Segment`).
            output_state: whether to return the states after the segment.
            options: `attention_mask`, `cu_seqlens`, `dt` and `group`, as in `Mixer.forward`, where the mixers take them.

        Returns:
            Logits [B, T, classes] or [B, T, heads, classes], without T for `pool="last"`; (logits, states) with
            `output_state=True`.
        """
        u = self.in_proj(self.embedding(inputs))
        if segment is None:
            segment = check_segment(self, u, **options)
        if self.config.pool is not None:
            segment = segment._replace(positions=last_positions(u, segment))
        u, after = self.layers.run(u, states, segment)
        logits = self.head(self.out_proj(self.norm(u)))
        return (logits, after) if output_state else logits

    def features(self, inputs: Any, asked: Tensor | None = None) -> Tensor:
        """The inputs of the head, for losses at few positions: `model.head(model.features(inputs, asked))`.

        Args:
            inputs: as in `forward`.
            asked: [B, T] bool, the positions to compute; default all.

        Returns:
            [B, T, d_model], or [n, d_model] at the n selected positions, in their order.
        """
        segment = WHOLE if asked is None else Segment(positions=asked.flatten().nonzero().squeeze(1))
        u, _ = self.layers.run(self.in_proj(self.embedding(inputs)), None, segment)
        return self.out_proj(self.norm(u))

    def step(
        self, inputs: Tensor, states: Sequence[Any] | None = None, *, dt: Tensor | None = None, in_place: bool = False
    ) -> tuple[Tensor, list[Any]]:
        """One position: `inputs`, `dt` and logits without the T dimension. `in_place` allows to overwrite `states`."""
        inputs = inputs.unsqueeze(1)
        segment = check_segment(self, inputs, dt=dt.unsqueeze(1) if isinstance(dt, Tensor) else dt)
        logits, after = self(inputs, states, segment=segment._replace(in_place=in_place), output_state=True)
        return logits if self.config.pool else logits.squeeze(1), after

    def init_state(self, batch_size: int) -> list[Any]:
        """The states of all layers before the first position."""
        return self.layers.init_state(batch_size)

    def _block(self, index: int, kind: str) -> Block:
        config, width = self.config, self.config.d_model
        if kind != "shippo":
            window = config.sliding_window if kind == "sliding_attention" else None
            mixer = CausalAttention(width, config.n_heads, window)
        elif config.mixer == "transformer":
            return transformer_block(width, config.n_heads, config.norm_eps, config.dropout, config.mlp)
        elif config.mixer == "free":
            mixer = FreeMixer(width, config.spec, index)
        elif config.mixer == "shippo":
            mixer = Shippo(width, spec=config.spec, layer_idx=index)
        else:
            mixer = {"gru": GRUMixer, "lstm": LSTMMixer, "mamba": MambaMixer}[config.mixer](width)
        return Block(mixer, norm_eps=config.norm_eps, dropout=config.dropout)

"""The sequence model of the experiments: one frame, six mixers.

Data path: inputs pass the embedding (token ids [B, T], or whatever a given embedding module takes, or vectors
[B, T, d_model] where there is none), an input projection, n_layers pre-norm residual layers of the chosen mixer, a last norm
and an output projection; the result [B, T, d_model] are the features. The head makes logits of them: [B, T, classes], or
[B, T, heads, classes]. The mixers are "split", "dense" and "none" (SHiPPO with these right actions), "free" (none, inside a
static encoder and decoder), "gru" and "transformer". States of all layers are a list, so that every model continues and
decodes by the same calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from shippo_ssm.layers import ShippoBlock
from shippo_ssm.models.controls import FreeMixer, GRUMixer
from shippo_ssm.models.transformer import TransformerBlock

MIXERS = ("split", "dense", "none", "free", "gru", "transformer")


@dataclass(frozen=True, kw_only=True, slots=True)
class SequenceConfig:
    """The geometry of a `SequenceModel`."""

    mixer: str = "split"
    """One of "split", "dense", "none", "free", "gru", "transformer"."""
    d_model: int = 128
    n_layers: int = 4
    d_state: int = 32
    """N, slots of the memory per group."""
    d_conv: int = 4
    expand: float = 2
    """D = expand d_model channels inside a layer."""
    group_width: int = 4
    """P, channels per transport group."""
    write_rank: int = 1
    controller_conv: int = 0
    """Taps of the controller's own causal convolution; 0 is the input-only controller."""
    learnable_initial_state: bool = False
    drift_init: str = "s4d-real"
    dt_min: float = 0.001
    dt_max: float = 0.1
    n_heads: int = 4
    """Attention heads of the Transformer."""
    vocab_size: int | None = None
    """Token ids of the default embedding; `None` for vectors as inputs or an embedding of one's own."""
    num_outputs: int = 1
    """Classifiers of the default head."""
    num_classes: int | None = None
    """Classes of each classifier; `None` takes `vocab_size`, or leaves features where that is `None` too."""
    norm_eps: float = 1e-5
    backend: str = "auto"
    """Backend of the scans."""

    def __post_init__(self) -> None:
        if self.mixer not in MIXERS:
            raise ValueError(f"SequenceConfig: `mixer` is {self.mixer!r}; expected one of {', '.join(map(repr, MIXERS))}")
        if self.n_layers < 1:
            raise ValueError(f"SequenceConfig: `n_layers` is {self.n_layers}; expected at least 1")

    @property
    def shippo_options(self) -> dict[str, Any]:
        """The arguments of `Shippo` other than d_model and right."""
        names = ("d_state", "d_conv", "expand", "group_width", "write_rank", "controller_conv")
        names += ("learnable_initial_state", "drift_init", "dt_min", "dt_max", "backend")
        return {name: getattr(self, name) for name in names}


class Heads(nn.Module):
    """Linear classifiers on the same features: [.., d_model] -> [.., heads, classes], or [.., classes] for a single one."""

    def __init__(self, d_model: int, num_outputs: int, num_classes: int) -> None:
        super().__init__()
        self.num_outputs, self.num_classes = num_outputs, num_classes
        self.proj = nn.Linear(d_model, num_outputs * num_classes)

    def forward(self, features: Tensor) -> Tensor:
        logits = self.proj(features)
        return logits if self.num_outputs == 1 else logits.unflatten(-1, (self.num_outputs, self.num_classes))


class SequenceModel(nn.Module):
    """logits = head(W_out norm(layers(W_in embedding(inputs)))).

    Args:
        config: a `SequenceConfig`.
        embedding: a module from inputs to [B, T, d_model]; by default an `nn.Embedding` of `config.vocab_size`, or none.
        head: a module from features [.., d_model] to logits; by default `Heads` of `config.num_outputs` x `config.num_classes`.

    Example:
        >>> import torch
        >>> from shippo_ssm.models import SequenceConfig, SequenceModel
        >>> config = SequenceConfig(mixer="none", d_model=16, n_layers=1, d_state=8, vocab_size=11, backend="reference")
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
        self.in_proj = nn.Linear(width, width)
        self.layers = nn.ModuleList(self._layer(index) for index in range(config.n_layers))
        self.norm = nn.RMSNorm(width, eps=config.norm_eps)
        self.out_proj = nn.Linear(width, width)
        self.head = nn.Identity() if head is None else head

    def forward(
        self,
        inputs: Any,
        states: Sequence[Any] | None = None,
        *,
        attention_mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        output_state: bool = False,
    ) -> Any:
        """Logits at every position.

        Args:
            inputs: what the embedding takes: ids [B, T], or vectors [B, T, d_model] where there is no embedding.
            states: the states of an earlier segment, one per layer; a fresh start by default.
            attention_mask: [B, T] of 0 and 1; SHiPPO mixers only.
            cu_seqlens: [num_sequences + 1] boundaries of packed sequences; SHiPPO mixers only.
            output_state: whether to return the states after the segment.

        Returns:
            Logits [B, T, classes] or [B, T, heads, classes], or (logits, states) with `output_state=True`.
        """
        call: dict[str, Any] = {"attention_mask": attention_mask, "cu_seqlens": cu_seqlens}
        if output_state:
            features, after = self.features(inputs, states, output_state=True, **call)
            return self.head(features), after
        return self.head(self.features(inputs, states, **call))

    def features(
        self,
        inputs: Any,
        states: Sequence[Any] | None = None,
        *,
        attention_mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        output_state: bool = False,
    ) -> Any:
        """[B, T, d_model] in front of the head, for losses at few positions: `model.head(model.features(inputs)[mask])`."""
        call: dict[str, Any] = {"output_state": output_state}
        given = {"attention_mask": attention_mask, "cu_seqlens": cu_seqlens}
        if self.config.mixer in ("gru", "transformer"):
            for name, argument in given.items():
                if argument is not None:
                    raise ValueError(
                        f"SequenceModel: `{name}` came with mixer {self.config.mixer!r}; expected `None`; SHiPPO mixers take it"
                    )
        else:
            call |= given
        if states is not None and len(states) != len(self.layers):
            raise ValueError(
                f"SequenceModel: `states` has {len(states)} entries; expected {len(self.layers)}, one per layer; the states "
                "belong to another model, make them with init_state(batch_size)"
            )
        u = self.in_proj(self.embedding(inputs))
        after = []
        for index, layer in enumerate(self.layers):
            u = layer(u, None if states is None else states[index], **call)
            if output_state:
                u, state = u
                after.append(state)
        features = self.out_proj(self.norm(u))
        return (features, after) if output_state else features

    def step(self, inputs: Any, states: Sequence[Any]) -> tuple[Tensor, list[Any]]:
        """One position: inputs without the T dimension and the states give logits without it and the next states."""
        u = self.in_proj(self.embedding(inputs))
        after = []
        for layer, state in zip(self.layers, states, strict=True):
            u, state = layer.step(u, state)  # pyright: ignore[reportCallIssue]
            after.append(state)
        return self.head(self.out_proj(self.norm(u))), after

    def init_state(self, batch_size: int) -> list[Any]:
        """The states of all layers before the first position."""
        return [layer.init_state(batch_size) for layer in self.layers]  # pyright: ignore[reportCallIssue]

    def _layer(self, index: int) -> nn.Module:
        config = self.config
        if config.mixer == "transformer":
            return TransformerBlock(config.d_model, config.n_heads, config.norm_eps)
        if config.mixer == "gru":
            return ShippoBlock(config.d_model, GRUMixer(config.d_model), norm_eps=config.norm_eps)
        options: dict[str, Any] = config.shippo_options | {"layer_idx": index}
        if config.mixer == "free":
            return ShippoBlock(config.d_model, FreeMixer(config.d_model, **options), norm_eps=config.norm_eps)
        return ShippoBlock(config.d_model, norm_eps=config.norm_eps, right=config.mixer, **options)

"""The sequence model of the experiments: one frame around a stack of any mixer.

Data path: inputs pass the embedding (token ids [B, T], or whatever a given embedding module takes, or vectors
[B, T, d_model] where there is none), an input projection, n_layers pre-norm residual blocks of the chosen mixer, a last norm
and an output projection; the result [B, T, d_model] are the features. The head makes logits of them: [B, T, classes], or
[B, T, heads, classes]. States of all layers are a list, so that every model continues and decodes by the same calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, overload

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from shippo_ssm._expect import expect_real, expect_size
from shippo_ssm.actions.families import FAMILIES
from shippo_ssm.layers import Block, Shippo, ShippoSpec, Stack
from shippo_ssm.layers.decode import Linear
from shippo_ssm.layers.mixer import OWNED, WHOLE, Segment, check_segment
from shippo_ssm.layers.norm import RMSNorm
from shippo_ssm.models.baselines import FreeMixer, GRUMixer, LSTMMixer, transformer_block

MIXERS = ("shippo", "free", "gru", "lstm", "transformer")


@dataclass(frozen=True, kw_only=True, slots=True)
class SequenceConfig(ShippoSpec):
    """The geometry of a `SequenceModel`: the options of its layers, and what stands around them."""

    mixer: str = "shippo"
    """"shippo", "free" (no right action, inside a static encoder and decoder), "gru", "lstm" or "transformer"; the word of a
    right action, such as "dense", is short for "shippo" with that `right`."""
    d_model: int = 128
    n_layers: int = 4
    n_heads: int = 4
    """Attention heads of the Transformer."""
    vocab_size: int | None = None
    """Token ids of the default embedding; `None` for vectors as inputs or an embedding of one's own."""
    num_outputs: int = 1
    """Classifiers of the default head."""
    num_classes: int | None = None
    """Classes of each classifier; `None` takes `vocab_size`, or leaves features where that is `None` too."""
    norm_eps: float = 1e-5
    frame_init: str = "identity"
    """How the projections in front of the layers and behind them start: as the "identity", so that a token is what its
    embedding says and an answer what the layers say, or "random"."""

    head_init: str = "random"
    """How the classifiers start: "random", or as the "embedding" of the tokens that they answer with, for tasks whose answers
    were read before."""

    def __post_init__(self) -> None:
        if isinstance(self.mixer, str) and self.mixer in FAMILIES:
            object.__setattr__(self, "right", self.mixer)
            object.__setattr__(self, "mixer", "shippo")
        # `super()` does not find its class where slots made a new one of it.
        ShippoSpec.__post_init__(self)
        if not isinstance(self.mixer, str) or self.mixer not in MIXERS:
            words = ", ".join(map(repr, (*MIXERS, *FAMILIES)))
            raise ValueError(f"SequenceConfig: `mixer` is {self.mixer!r}; expected one of {words}")
        if self.frame_init not in ("identity", "random"):
            raise ValueError(f"SequenceConfig: `frame_init` is {self.frame_init!r}; expected 'identity' or 'random'")
        if self.head_init not in ("random", "embedding"):
            raise ValueError(f"SequenceConfig: `head_init` is {self.head_init!r}; expected 'random' or 'embedding'")
        if self.head_init == "embedding" and (self.vocab_size is None or self.num_outputs > 1 or self.num_classes):
            raise ValueError("SequenceConfig: `head_init` is 'embedding'; expected answers that are tokens: `vocab_size` alone")
        for name in ("d_model", "n_layers", "n_heads", "num_outputs"):
            expect_size("SequenceConfig", name, getattr(self, name))
        for name in ("vocab_size", "num_classes"):
            if getattr(self, name) is not None:
                expect_size("SequenceConfig", name, getattr(self, name), "a positive integer, or None")
        expect_real("SequenceConfig", "norm_eps", self.norm_eps, "a small number, 0 or more", 0)

    @property
    def spec(self) -> ShippoSpec:
        """The options of a layer alone."""
        return ShippoSpec(**{field.name: getattr(self, field.name) for field in fields(ShippoSpec)})


class Heads(nn.Module):
    """Linear classifiers on the same features: [.., d_model] -> [.., heads, classes], or [.., classes] for a single one."""

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
        self.in_proj = Linear(width, width)
        self.layers = Stack(self._block(index) for index in range(config.n_layers))
        self.norm = RMSNorm(width, eps=config.norm_eps)
        self.out_proj = Linear(width, width)
        self.head = nn.Identity() if head is None else head
        if config.frame_init == "identity":
            for projection in (self.in_proj, self.out_proj):
                nn.init.eye_(projection.weight)
                nn.init.zeros_(projection.bias)
        if config.head_init == "embedding" and isinstance(self.embedding, nn.Embedding) and isinstance(self.head, Heads):
            with torch.no_grad():
                self.head.proj.weight.copy_(self.embedding.weight * width**-0.5)
                self.head.proj.bias.zero_()

    @overload
    def forward(
        self,
        inputs: Any,
        states: Sequence[Any] | None = None,
        *,
        attention_mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        segment: Segment | None = None,
        group: ProcessGroup | None = None,
        output_state: Literal[False] = False,
    ) -> Tensor: ...
    @overload
    def forward(
        self,
        inputs: Any,
        states: Sequence[Any] | None = None,
        *,
        attention_mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        segment: Segment | None = None,
        group: ProcessGroup | None = None,
        output_state: Literal[True],
    ) -> tuple[Tensor, list[Any]]: ...
    def forward(
        self,
        inputs: Any,
        states: Sequence[Any] | None = None,
        *,
        attention_mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        segment: Segment | None = None,
        group: ProcessGroup | None = None,
        output_state: bool = False,
    ) -> Tensor | tuple[Tensor, list[Any]]:
        """Logits at every position.

        Args:
            inputs: what the embedding takes: ids [B, T], or vectors [B, T, d_model] where there is no embedding.
            states: the states of an earlier segment, one per layer; a fresh start by default.
            attention_mask: [B, T] of 0 and 1; SHiPPO mixers only.
            cu_seqlens: [num_sequences + 1] boundaries of packed sequences; SHiPPO mixers only.
            segment: both as a record, in their place; it can also say what becomes of the states (see `Segment`).
            group: a process group whose ranks hold parts of the sequence, as in `Mixer.forward`; SHiPPO mixers only.
            output_state: whether to return the states after the segment.

        Returns:
            Logits [B, T, classes] or [B, T, heads, classes], or (logits, states) with `output_state=True`.
        """
        u = self.in_proj(self.embedding(inputs))
        if segment is None:
            segment = check_segment(self, u, attention_mask, cu_seqlens, group)
        features, after = self._run(u, states, segment)
        return (self.head(features), after) if output_state else self.head(features)

    def features(self, inputs: Any, asked: Tensor | None = None) -> Tensor:
        """What stands in front of the head, for losses at few positions: `model.head(model.features(inputs, asked))`.

        Args:
            inputs: as in `forward`.
            asked: [B, T] bool, the positions that are wanted; what only the others need is not computed. All by default.

        Returns:
            [B, T, d_model], or [n, d_model] at the n positions that are asked, in their order.
        """
        segment = WHOLE if asked is None else Segment(asked=asked.flatten().nonzero().squeeze(1))
        return self._run(self.in_proj(self.embedding(inputs)), None, segment)[0]

    def step(self, inputs: Tensor, states: Sequence[Any] | None = None, *, in_place: bool = False) -> tuple[Tensor, list[Any]]:
        """One position.

        Args:
            inputs: as in `forward`, without the T dimension.
            states: what an earlier call gave; a fresh start by default.
            in_place: whether `states` are the caller's alone and may be written over.

        Returns:
            Logits without the T dimension, and the next states.
        """
        logits, after = self(inputs.unsqueeze(1), states, segment=OWNED if in_place else WHOLE, output_state=True)
        return logits.squeeze(1), after

    def init_state(self, batch_size: int) -> list[Any]:
        """The states of all layers before the first position."""
        return self.layers.init_state(batch_size)

    def _run(self, u: Tensor, states: Sequence[Any] | None, segment: Segment) -> tuple[Tensor, list[Any]]:
        u, after = self.layers.run(u, states, segment)
        return self.out_proj(self.norm(u)), after

    def _block(self, index: int) -> Block:
        config = self.config
        if config.mixer == "transformer":
            return transformer_block(config.d_model, config.n_heads, config.norm_eps)
        if config.mixer == "gru":
            mixer = GRUMixer(config.d_model)
        elif config.mixer == "lstm":
            mixer = LSTMMixer(config.d_model)
        elif config.mixer == "free":
            mixer = FreeMixer(config.d_model, config.spec, index)
        else:
            mixer = Shippo(config.d_model, spec=config.spec, layer_idx=index)
        return Block(mixer, norm_eps=config.norm_eps)

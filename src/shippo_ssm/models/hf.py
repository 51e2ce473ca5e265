"""SHiPPO as a Hugging Face language model (the `hf` extra): configuration, backbone and causal language model.

Data path: token ids [B, T] are embedded to [B, T, hidden_size], pass num_hidden_layers pre-norm residual SHiPPO layers and a
last norm, and a linear head gives logits [B, T, vocab_size]. Between calls the recurrent states live in the library's
`DynamicCache` or `StaticCache`, one `ShippoState` per layer. Beam search reorders them as any other cache, gradients pass a
dynamic one, and assisted generation goes back to the last token that was accepted: states are kept while candidates are looked
at. Padding marked in `attention_mask` is the identity map, so that left-padded batches decode as if each row were alone.
Sequences packed into one row, as `DataCollatorWithFlattening` does, do not see each other.

`import shippo_ssm` is enough for `AutoConfig`, `AutoModel` and `AutoModelForCausalLM` to find these classes.
"""

from __future__ import annotations

import itertools
import logging
from collections import deque
from collections.abc import Callable
from dataclasses import fields
from typing import Any, NoReturn

import torch
from huggingface_hub.dataclasses import strict
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, DynamicCache, GenerationMixin, PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin, StaticLayer
from transformers.configuration_utils import PreTrainedConfig
from transformers.masking_utils import create_recurrent_attention_mask
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.modeling_utils import slice_logits_to_keep
from transformers.utils import can_return_tuple
from transformers.utils.import_utils import is_tracing
from transformers.utils.output_capturing import capture_outputs

from shippo_ssm._expect import expect_real, expect_size
from shippo_ssm.layers import (
    LANGUAGE_START,
    PAPER_START,
    Block,
    Controller,
    Shippo,
    ShippoSpec,
    ShippoState,
    ShortConv,
    Stack,
)
from shippo_ssm.layers.decode import Linear
from shippo_ssm.layers.mixer import Segment, check_segment
from shippo_ssm.layers.norm import RMSNorm
from shippo_ssm.layers.states import at
from shippo_ssm.scan.distributed import Part, agree

logger = logging.getLogger("shippo_ssm")

# Options of `ShippoSpec` that the library calls otherwise.
LIBRARY_NAMES = {
    "d_state": "state_size",
    "d_conv": "conv_kernel",
    "dt_min": "time_step_min",
    "dt_max": "time_step_max",
    "bias": "use_bias",
    "conv_bias": "use_conv_bias",
}
# The label of a position that counts for nothing.
IGNORED = -100
# What `ShippoConfig.layer_types` calls our layers, and the cache layer that belongs to them.
LAYER_TYPE = "shippo"
# Positions that a cache can go back by while it records the past: more than assisted generation proposes at once.
NUM_RECORDED = 64


class ShippoCacheLayer(CacheLayerMixin):
    """One layer of a `DynamicCache`: the `ShippoState` of a layer, and how many positions it has seen.

    The name `_layer_type` makes `DynamicCache(config=config)` build these layers. While the past is recorded
    (`activate_past_recording`), the states after the last positions are kept, so that `crop` can go back.
    """

    _layer_type = LAYER_TYPE
    supports_early_init = False

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.state: ShippoState | None = None
        self.num_seen = 0
        self.record_past = False
        # The states after the last positions, `state` at the end.
        self.past: deque[ShippoState] = deque(maxlen=NUM_RECORDED + 1)

    def store(self, state: ShippoState, num_new: int) -> None:
        """Keep `state`, reached after `num_new` more positions."""
        self.state = state
        self.num_seen += num_new
        if self.record_past:
            self.past.append(state)

    def activate_past_recording(self) -> None:
        """From now on, keep the states after the last positions."""
        self.record_past = True

    def crop(self, tokens_to_remove: int) -> None:
        """Go back by -`tokens_to_remove` positions, to a state that was recorded."""
        back = -tokens_to_remove
        if back < 0 or back >= max(1, len(self.past)):
            raise ValueError(
                f"ShippoCacheLayer: `tokens_to_remove` is {tokens_to_remove} with {len(self.past)} recorded states; expected a "
                f"number from {-max(0, len(self.past) - 1)} to 0; call activate_past_recording() first, and go back by at most "
                f"{NUM_RECORDED} positions"
            )
        if self.past:
            self.state = self.past[-1 - back]
            self.past = deque([self.state], maxlen=NUM_RECORDED + 1)
            self.num_seen -= back

    @property
    def is_croppable(self) -> bool:
        """Whether `crop` can go back."""
        return self.record_past

    def get_seq_length(self) -> int:
        """Positions seen, padding included."""
        return self.num_seen

    def get_max_length(self) -> int:
        """No limit: the state does not grow."""
        return -1

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Length and offset of what a mask for `query_length` more positions has to cover."""
        return self.num_seen + query_length, 0

    def update(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refused: there are no keys and values."""
        raise ValueError("ShippoCacheLayer: `update` is for keys and values; a SHiPPO layer keeps its state with `store`")

    lazy_initialization = update

    def reset(self) -> None:
        """Forget everything."""
        self.state, self.num_seen = None, 0
        self.past.clear()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Keep the rows `beam_idx`, with repeats as beam search wants them."""
        self._change(lambda state: state.select(beam_idx))

    batch_select_indices = reorder_cache

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row `repeats` times."""
        self._change(lambda state: state.repeat(repeats))

    def _change(self, change: Callable[[ShippoState], ShippoState]) -> None:
        if self.state is not None:
            self.state = change(self.state)
            self.past = deque([self.state] if self.record_past else [], maxlen=NUM_RECORDED + 1)


class ShippoStaticCacheLayer(ShippoCacheLayer, StaticLayer):
    """One layer of a `StaticCache`: the same, in tensors that stay where they are, as compiled graphs want them."""

    def store(self, state: ShippoState, num_new: int) -> None:
        """Copy `state` to where the first one was put."""
        if state.cell.memory.requires_grad:
            raise ValueError(
                "ShippoStaticCacheLayer: `state` has a gradient; expected none, a static cache is overwritten; "
                "take a DynamicCache(config=model.config), or torch.no_grad()"
            )
        if self.state is None or self.record_past:
            state = state.clone()
        else:
            for held, new in zip(self.state.tensors(), state.tensors()):
                held.copy_(new)
            state = self.state
        super().store(state, num_new)


@strict
class ShippoConfig(PreTrainedConfig):
    """Configuration of a SHiPPO language model: its size, and the options of its layers (the fields of `ShippoSpec`).

    Some options have the library's own names: `state_size` is d_state, `conv_kernel` d_conv, `time_step_min` and
    `time_step_max` are dt_min and dt_max, `use_bias` and `use_conv_bias` bias and conv_bias. `right` is a word.

    Args:
        vocab_size: number of tokens.
        hidden_size: d_model.
        num_hidden_layers: number of layers.
        layer_norm_epsilon: epsilon of the RMS norms.

    Example:
        >>> from shippo_ssm.models.hf import ShippoConfig
        >>> config = ShippoConfig(hidden_size=64, state_size=16)
        >>> config.spec.d_state, config.layer_types[0]
        (16, 'shippo')
    """

    model_type = "shippo"
    # A projection is cut by its outputs and what it gives is gathered: the recurrence runs whole on every rank.
    base_model_tp_plan = {  # noqa: RUF012
        "embed_tokens": "embedding_rowwise",
        "layers.*.mixer.in_proj": "colwise_gather_output",
        "layers.*.mixer.out_proj": "colwise_gather_output",
        "layers.*.mixer.controller.write_proj": "colwise_gather_output",
        "layers.*.mixer.controller.read_proj": "colwise_gather_output",
    }

    vocab_size: int = 32000
    hidden_size: int = 768
    num_hidden_layers: int = 24
    layer_norm_epsilon: float = 1e-5
    initializer_range: float = 0.02
    use_cache: bool = True
    tie_word_embeddings: bool = True
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None

    # The options of the layer stand in `ShippoSpec`, once; here they become fields of the configuration, with the start of a
    # language model.
    for _field in fields(ShippoSpec):
        __annotations__[LIBRARY_NAMES.get(_field.name, _field.name)] = "str" if _field.name == "right" else _field.type
        vars()[LIBRARY_NAMES.get(_field.name, _field.name)] = LANGUAGE_START.get(_field.name, _field.default)
    del _field

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """As the library's; a configuration that was saved before the layer had a norm of what is read gets its old start."""
        if "read_norm" not in config_dict and config_dict.get("model_type") == cls.model_type:
            logger.warning("ShippoConfig: a configuration of the first version; read with the start of that time, PAPER_START")
            old = {LIBRARY_NAMES.get(name, name): value for name, value in PAPER_START.items()}
            config_dict = old | config_dict
        return super().from_dict(config_dict, **kwargs)

    def validate_architecture(self) -> None:
        """Refuse sizes that are none, and what the cache cannot hold; `ShippoSpec` checks the rest."""
        for name in ("vocab_size", "hidden_size", "num_hidden_layers"):
            expect_size("ShippoConfig", name, getattr(self, name))
        expect_real("ShippoConfig", "layer_norm_epsilon", self.layer_norm_epsilon, "a small number, 0 or more", 0)
        if self.spec.d_conv < 2:
            raise ValueError(
                f"ShippoConfig: `conv_kernel` is {self.spec.d_conv}; expected at least 2, the cache holds its window"
            )
        if self.spec.controller_conv == 1 or self.spec.controller_conv < 0:
            raise ValueError(f"ShippoConfig: `controller_conv` is {self.spec.controller_conv}; expected 0 or at least 2")

    def validate_layer_type(self) -> None:
        """Nothing to check: the library's list of layer types knows only its own, and ours is not a user's choice."""

    @property
    def layer_types(self) -> list[str]:
        """What kind of cache each layer needs."""
        # The library asks before it validates.
        expect_size("ShippoConfig", "num_hidden_layers", self.num_hidden_layers)
        return [LAYER_TYPE] * self.num_hidden_layers

    @property
    def spec(self) -> ShippoSpec:
        """The options of a layer."""
        names = [field.name for field in fields(ShippoSpec)]
        return ShippoSpec(**{name: getattr(self, LIBRARY_NAMES.get(name, name)) for name in names})


def check_mask(u: Tensor, attention_mask: Tensor | None, num_seen: int) -> None:
    """A mask covers the positions of `u` [B, T, ..], or with a cache all positions so far; the library would guess."""
    if attention_mask is None or attention_mask.ndim != 2 or is_tracing(attention_mask):
        return
    (batch, length), (rows, covered) = u.shape[:2], attention_mask.shape
    if rows != batch or covered < length or (covered != length and not num_seen):
        expected = f"[B, T] = ({batch}, {length})" + (
            f", or up to ({batch}, {num_seen + length}) with the cache" * bool(num_seen)
        )
        raise ValueError(
            f"ShippoModel: `attention_mask` has shape ({rows}, {covered}); expected {expected}, one entry per position; "
            "take the mask that the tokenizer gave with these tokens"
        )


def padding_mask(config: ShippoConfig, u: Tensor, attention_mask: Tensor | None) -> Tensor | None:
    """[B, T] of 0 and 1 for the positions of `u` [B, T, ..] out of a mask of all positions so far; `None` without padding."""
    if attention_mask is None or attention_mask.ndim != 2 or u.shape[1] > 1 or is_tracing(attention_mask):
        return create_recurrent_attention_mask(config, u, attention_mask)
    # The library takes a single position for a generated token, but a prompt may be read one by one as well.
    last = attention_mask[:, -1:]
    return None if bool(last.all()) else last


def packed_bounds(u: Tensor, attention_mask: Tensor | None, said: dict[str, Any]) -> Tensor | None:
    """[num_sequences + 1] boundaries of the sequences packed into the row of `u` [1, T, ..]; `None` for whole rows.

    The library's collators say them as `cu_seq_lens_q`, as `seq_idx` [1, T], which changes, or as `position_ids` [1, T], which
    do not grow, from one sequence to the next.
    """
    if said.get("cu_seq_lens_q") is not None:
        return said["cu_seq_lens_q"]
    for name, starts_at in (("seq_idx", torch.ne), ("position_ids", torch.le)):
        ids = said.get(name)
        # A single position starts nothing; positions of more than one axis belong to pictures.
        if ids is None or ids.ndim != 2 or ids.shape[1] == 1:
            continue
        starts = starts_at(ids[:, 1:], ids[:, :-1])
        if attention_mask is not None:
            # Positions mean nothing at padding: a real one starts a sequence if it is not beyond all real ones before it.
            real = attention_mask.bool()
            starts = starts_at(ids, ids.masked_fill(~real, -1).cummax(1).values.roll(1, 1))[:, 1:] & real[:, 1:]
        if not bool(starts.any()):
            continue
        if len(u) > 1 or attention_mask is not None:
            raise ValueError(
                f"ShippoModel: `{name}` starts a sequence inside a row, with padding or B = {len(u)}; expected B = 1 and no "
                "padding where sequences are packed; put all of them into one row, as DataCollatorWithFlattening does"
            )
        return nn.functional.pad(starts[0], (1, 1), value=True).nonzero().squeeze(1)
    return None


class ShippoLayer(GradientCheckpointingLayer, Block):
    """A `Block` that the library's gradient checkpointing knows."""


class ShippoPreTrainedModel(PreTrainedModel):
    """What both models share: loading, saving and starting weights."""

    config: ShippoConfig
    config_class = ShippoConfig
    base_model_prefix = "model"
    _no_split_modules = ["ShippoLayer"]  # noqa: RUF012
    supports_gradient_checkpointing = True
    _can_record_outputs = {"hidden_states": ShippoLayer}  # noqa: RUF012

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Start a module's weights as the layers do; weights that came from a file keep their values."""
        if not isinstance(module, (Shippo, Controller, ShortConv)):
            super()._init_weights(module)
            return
        loaded = [(p, p.clone()) for p in module.parameters() if getattr(p, "_is_hf_initialized", False)]
        module.reset_parameters()
        for parameter, kept in loaded:
            parameter.copy_(kept)


class ShippoModel(ShippoPreTrainedModel):
    """Embedding, layers and last norm; returns hidden states.

    Example:
        >>> import torch
        >>> from shippo_ssm.models.hf import ShippoConfig, ShippoModel
        >>> model = ShippoModel(ShippoConfig(vocab_size=11, hidden_size=16, num_hidden_layers=1, state_size=8))
        >>> model(torch.zeros(2, 3, dtype=torch.int64)).last_hidden_state.shape
        torch.Size([2, 3, 16])
    """

    def __init__(self, config: ShippoConfig) -> None:
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, config.pad_token_id)
        spec, width, eps = config.spec, config.hidden_size, config.layer_norm_epsilon
        mixers = (Shippo(width, spec=spec, layer_idx=index) for index in range(config.num_hidden_layers))
        self.layers = Stack(ShippoLayer(mixer, norm_eps=eps) for mixer in mixers)
        self.norm = RMSNorm(width, eps=eps)
        # Which parameters a layer spares depends on its options; a norm is named by its module.
        spared = [name for name, parameter in self.layers.named_parameters() if getattr(parameter, "_no_weight_decay", False)]
        self._keep_in_fp32_modules_strict = {name.removesuffix(".weight").rpartition(".")[2] for name in spared}
        self.post_init()

    @capture_outputs
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | dict[str, Tensor | None] | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        group: ProcessGroup | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast:
        """Hidden states of a segment.

        Args:
            input_ids: [B, T] token ids, or `inputs_embeds` in their place.
            attention_mask: [B, T] or, with a cache, [B, all positions so far], of 0 and 1; padding is the identity map.
            past_key_values: a `DynamicCache(config=config)` or `StaticCache` to continue from and to update.
            inputs_embeds: [B, T, hidden_size].
            use_cache: whether to return a cache; on by default outside training.
            group: a process group whose ranks hold parts of the sequence, as in `Mixer.forward`; `input_ids` and the mask are
                this rank's, `cu_seq_lens_q` and the cache the same on every rank.
            kwargs: `output_hidden_states`, for the hidden states in front of every layer and after the last norm, or a list of
                layers; `return_dict`; and what says where sequences packed into one row begin: `cu_seq_lens_q`
                [num_sequences + 1], `seq_idx` [1, T], or `position_ids` [1, T] that start again.

        Returns:
            `BaseModelOutputWithPast`, or a tuple.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("ShippoModel: expected exactly one of `input_ids` and `inputs_embeds`")
        u = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        use_cache = use_cache if use_cache is not None else bool(self.config.use_cache and not self.training)
        use_cache = use_cache and not (self.training and self.is_gradient_checkpointing)
        if not use_cache:
            past_key_values = None
        elif past_key_values is None:
            past_key_values = DynamicCache(config=self.config)
        if isinstance(attention_mask, dict):
            attention_mask = attention_mask[LAYER_TYPE]
        bounds = kwargs.get("cu_seq_lens_q")
        caches = [] if past_key_values is None else self._caches(past_key_values)
        if group is None:
            check_mask(u, attention_mask, caches[0].num_seen if caches else 0)
            attention_mask = padding_mask(self.config, u, attention_mask)
            bounds = packed_bounds(u, attention_mask, kwargs)
        segment = check_segment(self, u, attention_mask, bounds, group)
        u = self._run(u, segment, caches, kwargs.get("output_hidden_states", self.config.output_hidden_states))
        return BaseModelOutputWithPast(last_hidden_state=self.norm(u), past_key_values=past_key_values)

    def _run(self, u: Tensor, segment: Segment, caches: list[ShippoCacheLayer], hidden: Any) -> Tensor:
        """The layers over a segment, with their states kept in `caches`: while these record the past, after every one of the
        last positions."""
        if segment.part is not None:
            # The parts of a sequence on several ranks run at once, empty ones too; what is kept is its end.
            states = [cache.state for cache in caches] if caches and caches[0].num_seen else None
            u, after = self.layers.run(u, states, segment)
            for cache, state in zip(caches, after):
                cache.store(state, segment.part.total)
            return u
        length, record = u.shape[1], bool(caches) and caches[0].record_past
        first = max(0, length - NUM_RECORDED) if record and segment.cu_seqlens is None else length
        # Padding is known to the scan alone, so that padded positions are recorded one by one.
        cuts = [0, first, length] if segment.whole or not record else [0, *range(first, length + 1)]
        parts = [(start, stop) for start, stop in itertools.pairwise(cuts) if start != stop]
        if hidden and len(parts) > 1:
            raise ValueError(
                f"ShippoModel: `output_hidden_states` came with {length} positions while the cache records the past; expected "
                f"at most {NUM_RECORDED} and no padding; ask for them before activate_past_recording()"
            )
        outputs = []
        for start, stop in parts:
            # The states in a cache are its own: without gradients they are written over.
            mask = None if segment.mask is None else segment.mask[:, start:stop]
            every, owned = record and start >= first and segment.whole, bool(caches) and not record
            part = segment._replace(mask=mask, every=every, owned=owned and not torch.is_grad_enabled())
            states = [cache.state for cache in caches] if caches and caches[0].num_seen else None
            y, after = self.layers.run(u[:, start:stop], states, part)
            outputs.append(y)
            for cache, state in zip(caches, after):
                for kept in [at(state, t) for t in range(stop - start)] if every else [state]:
                    cache.store(kept, 1 if every else stop - start)
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)

    @property
    def mixers(self) -> list[Shippo]:
        """The SHiPPO layers inside the blocks."""
        return [block.mixer for block in self.layers if isinstance(block.mixer, Shippo)]

    def _caches(self, past_key_values: Cache) -> list[ShippoCacheLayer]:
        """The cache's layers, checked to be ours."""
        caches = [cache for cache in past_key_values.layers if isinstance(cache, ShippoCacheLayer)]
        if len(caches) != len(self.layers):
            raise ValueError(
                f"ShippoModel: `past_key_values` holds {len(caches)} layers of ours; expected {len(self.layers)}; make a cache "
                "for this model, DynamicCache(config=model.config)"
            )
        return caches


class ShippoForCausalLM(ShippoPreTrainedModel, GenerationMixin):
    """A `ShippoModel` with a language-model head; `generate` works greedily, by sampling, with beams, on left-padded batches.

    Example:
        >>> import torch
        >>> from shippo_ssm.models.hf import ShippoConfig, ShippoForCausalLM
        >>> model = ShippoForCausalLM(ShippoConfig(vocab_size=11, hidden_size=16, num_hidden_layers=1, state_size=8)).eval()
        >>> ids = torch.tensor([[1, 2, 3]])
        >>> model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=2, do_sample=False).shape
        torch.Size([1, 5])
    """

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012
    _tp_plan = {"lm_head": "colwise_gather_output"}  # noqa: RUF012
    _fsdp_plan = {"lm_head": "keep_full_weight"}  # noqa: RUF012

    def __init__(self, config: ShippoConfig) -> None:
        super().__init__(config)
        self.model = ShippoModel(config)
        self.lm_head = Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | dict[str, Tensor | None] | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        group: ProcessGroup | None = None,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """Logits, and the next-token loss where there are labels; other arguments as in `ShippoModel.forward`.

        Args:
            labels: [B, T], the input ids; they are shifted inside, and -100 is left out.
            logits_to_keep: compute logits for the last so many positions only, or for the positions that a tensor names; 0 for
                all.
            group: as in `ShippoModel.forward`. The loss is that of the whole sequence on every rank; a rank's gradient is its
                own positions' share, so that gradients add up over the ranks.

        Returns:
            `CausalLMOutputWithPast`, or a tuple.
        """
        part = None
        if group is not None:
            facts = {"T": 0 if labels is None else labels.shape[1], "`labels` are there": labels is not None}
            part = agree("ShippoForCausalLM", group, lambda: facts)
        outputs = self.model(
            input_ids,
            attention_mask=attention_mask,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            return_dict=True,
            group=group,
            **kwargs,
        )
        logits = self.lm_head(slice_logits_to_keep(outputs.last_hidden_state, logits_to_keep))
        loss = None
        if labels is not None:
            if part is not None:
                kwargs = _shift_over_ranks(labels, part) | kwargs
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
            if part is not None:
                loss = loss + (part.gather(loss.detach())[0].sum() - loss.detach())
        return CausalLMOutputWithPast(
            loss=loss, logits=logits, past_key_values=outputs.past_key_values, hidden_states=outputs.hidden_states
        )

    def init_continuous_batching(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refused: it pages keys and values, and a recurrent state has no pages."""
        raise ValueError(
            "ShippoForCausalLM: continuous batching is for paged keys and values; a SHiPPO model has none; take `generate` on "
            "a left-padded batch"
        )


def _shift_over_ranks(labels: Tensor, part: Part) -> dict[str, Tensor]:
    """What the library's loss takes for labels that continue on the next rank: each position's next label, and their number."""
    first = labels[:, 0] if labels.shape[1] else labels.new_full(labels.shape[:1], IGNORED)
    firsts = part.gather(first)[0]
    later = [rank for rank in range(part.rank + 1, len(part.lengths)) if part.lengths[rank]]
    following = firsts[later[0]] if later else torch.full_like(first, IGNORED)
    shifted = torch.cat([labels, following.unsqueeze(1)], dim=1)[:, 1:].contiguous()
    return {"shift_labels": shifted, "num_items_in_batch": part.gather((shifted != IGNORED).sum())[0].sum()}


AutoConfig.register("shippo", ShippoConfig, exist_ok=True)
AutoModel.register(ShippoConfig, ShippoModel, exist_ok=True)
AutoModelForCausalLM.register(ShippoConfig, ShippoForCausalLM, exist_ok=True)

"""SHiPPO as a Hugging Face language model (the `hf` extra): configuration, backbone and causal language model.

Data path: token ids [B, T] are embedded to [B, T, hidden_size], pass num_hidden_layers pre-norm residual layers (SHiPPO, or
attention where `layer_types` says so) and a final norm, and a linear head gives logits [B, T, vocab_size]. Between calls a
`DynamicCache` or `StaticCache` holds one `ShippoState` per SHiPPO layer, beside the keys and values of attention layers.

Importing this module registers the classes with `AutoConfig`, `AutoModel` and `AutoModelForCausalLM`.
"""

from __future__ import annotations

from collections import deque
from dataclasses import fields
from typing import Any, NamedTuple, NoReturn

import torch
from huggingface_hub.dataclasses import strict
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, DynamicCache, GenerationMixin, PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin, StaticLayer
from transformers.configuration_utils import PreTrainedConfig
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, slice_logits_to_keep
from transformers.utils import can_return_tuple
from transformers.utils.import_utils import is_tracing
from transformers.utils.output_capturing import capture_outputs

from shippo_ssm._expect import expect_real, expect_size
from shippo_ssm.layers import PRESETS, Block, CausalAttention, Controller, Shippo, ShippoSpec, ShippoState, ShortConv, Stack
from shippo_ssm.layers.attention import resolve_layer_types
from shippo_ssm.layers.linear import Linear
from shippo_ssm.layers.mixer import Segment, check_segment
from shippo_ssm.layers.rows import RMSNorm
from shippo_ssm.layers.states import at
from shippo_ssm.scan.distributed import SequenceShard, negotiate_shards

# Options of `ShippoSpec` -> their names in transformers.
LIBRARY_NAMES = {"d_state": "state_size", "d_conv": "conv_kernel", "dt_min": "time_step_min", "dt_max": "time_step_max"}
LIBRARY_NAMES |= {"bias": "use_bias", "conv_bias": "use_conv_bias"}
# Version of `ShippoConfig`; another one is refused.
VERSION = 2
# The label of a position that the loss ignores.
IGNORED = -100
# The entry of `ShippoConfig.layer_types`, by which transformers finds the cache layer; and those of attention.
LAYER_TYPE = "shippo"
MASKS = {"full_attention": create_causal_mask, "sliding_attention": create_sliding_window_causal_mask}
# Positions that `crop` can remove while a cache records the past: more than assisted generation proposes at once.
NUM_RECORDED = 64


class ShippoCacheLayer(CacheLayerMixin):
    """One layer of a `DynamicCache`: a `ShippoState` and the number of positions it has seen.

    `DynamicCache(config=config)` finds this class by its `_layer_type`. After `activate_past_recording` the states after the
    last positions are kept, so that `crop` can return to them.
    """

    _layer_type = LAYER_TYPE
    supports_early_init = False

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.num_seen = 0
        # The states after the last positions: one, or as many as are recorded.
        self.past: deque[ShippoState] = deque(maxlen=1)

    @property
    def state(self) -> ShippoState | None:
        """The state after all positions; `None` before the first."""
        return self.past[-1] if self.past else None

    def store(self, state: ShippoState, num_new: int) -> None:
        """Keep the `state` after `num_new` more positions."""
        self.past.append(state)
        self.num_seen += num_new

    def activate_past_recording(self) -> None:
        self.is_croppable = True
        self.past = deque(self.past, maxlen=NUM_RECORDED + 1)

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last -`tokens_to_remove` positions: return to a recorded state."""
        back = -tokens_to_remove
        if back < 0 or back >= max(1, len(self.past)):
            came = f"`tokens_to_remove` is {tokens_to_remove} with {len(self.past)} recorded states"
            raise ValueError(f"ShippoCacheLayer: {came}; expected at most {NUM_RECORDED} after activate_past_recording()")
        for _ in range(back):
            self.past.pop()
        self.num_seen -= back

    def get_seq_length(self) -> int:
        return self.num_seen

    def get_max_length(self) -> int:
        return -1

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.num_seen + query_length, 0

    def update(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuse: a recurrent layer has no keys and values."""
        raise ValueError("ShippoCacheLayer: `update` is for keys and values; a SHiPPO layer keeps its state with `store`")

    lazy_initialization = update

    def reset(self) -> None:
        self.num_seen = 0
        self.past.clear()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.past = deque((state.select(beam_idx) for state in self.past), self.past.maxlen)

    batch_select_indices = reorder_cache

    def batch_repeat_interleave(self, repeats: int) -> None:
        self.past = deque((state.repeat(repeats) for state in self.past), self.past.maxlen)


class ShippoStaticCacheLayer(ShippoCacheLayer, StaticLayer):
    """One layer of a `StaticCache`: the same, in tensors of fixed address, as compiled graphs need them."""

    def store(self, state: ShippoState, num_new: int) -> None:
        if state.cell.memory.requires_grad:
            raise ValueError("ShippoStaticCacheLayer: `state` requires grad; a static cache is overwritten; use no_grad()")
        if self.state is None or self.is_croppable:
            state = state.clone()
        else:
            for held, new in zip(self.state.tensors(), state.tensors()):
                held.copy_(new)
            state = self.state
        super().store(state, num_new)


@strict
class ShippoConfig(PreTrainedConfig):
    """Configuration of a SHiPPO language model: its size, and the options of its layers (the fields of `ShippoSpec`).

    Some options have transformers' names: `state_size` is d_state, `conv_kernel` d_conv, `time_step_min` and
    `time_step_max` are dt_min and dt_max, `use_bias` and `use_conv_bias` bias and conv_bias. `right` is a word.

    A hybrid has `layer_types`, one of "shippo", "full_attention" and "sliding_attention" per layer, or for short
    `attention_every`. `num_attention_heads` is one per 64 channels by default, `sliding_window` is the number of tokens that a
    sliding layer sees, and `dropout` the probability of zeroing a number of a residual branch in training.

    Example:
        >>> from shippo_ssm.integrations.huggingface import ShippoConfig
        >>> config = ShippoConfig(hidden_size=64, state_size=16, num_hidden_layers=4, attention_every=4)
        >>> config.spec.d_state, config.layer_types
        (16, ['shippo', 'shippo', 'shippo', 'full_attention'])
    """

    model_type = "shippo"
    # Projections are split by their outputs and gathered: every rank runs the whole recurrence.
    base_model_tp_plan = {"embed_tokens": "embedding_rowwise"} | {
        f"layers.*.mixer.{name}_proj": "colwise_gather_output" for name in ("in", "out", "controller.write", "controller.read")
    }

    vocab_size: int = 32000
    hidden_size: int = 768
    num_hidden_layers: int = 24
    layer_types: list[str] | None = None
    attention_every: int | None = None
    num_attention_heads: int | None = None
    sliding_window: int = 512
    dropout: float = 0.0
    layer_norm_epsilon: float = 1e-5
    initializer_range: float = 0.02
    use_cache: bool = True
    tie_word_embeddings: bool = True
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    config_version: int = VERSION

    # The fields of `ShippoSpec` become fields of the configuration, with the initialisation of a language model.
    for _field in fields(ShippoSpec):
        __annotations__[LIBRARY_NAMES.get(_field.name, _field.name)] = "str" if _field.name == "right" else _field.type
        vars()[LIBRARY_NAMES.get(_field.name, _field.name)] = PRESETS["language"].get(_field.name, _field.default)
    del _field

    def __post_init__(self, **kwargs: Any) -> None:
        expect_size("ShippoConfig", "num_hidden_layers", self.num_hidden_layers)
        types, every = self.layer_types, self.attention_every
        self.layer_types = resolve_layer_types("ShippoConfig", self.num_hidden_layers, types, every)
        if self.num_attention_heads is None:
            self.num_attention_heads = max(1, self.hidden_size // 64)
        super().__post_init__(**kwargs)

    def validate_architecture(self) -> None:
        """Check the version, the sizes that are no layer's, and the windows that the cache holds."""
        if self.config_version != VERSION:
            came = f"`config_version` is {self.config_version}"
            raise ValueError(f"ShippoConfig: {came}; expected {VERSION}; use the release that saved it")
        for name in ("vocab_size", "hidden_size"):
            expect_size("ShippoConfig", name, getattr(self, name))
        expect_real("ShippoConfig", "layer_norm_epsilon", self.layer_norm_epsilon, "a small number, 0 or more", 0)
        spec = self.spec
        expect_size("ShippoConfig", "conv_kernel", spec.d_conv, "at least 2", 2)
        expect_size("ShippoConfig", "controller_conv", spec.controller_conv or 2, "0 or at least 2", 2)

    def validate_layer_type(self) -> None:
        """Skip the check against transformers' list of layer types, which has only its own."""

    @property
    def kinds(self) -> list[str]:
        """The kind of every layer: `layer_types`, which is given or made."""
        return self.layer_types or []

    @property
    def spec(self) -> ShippoSpec:
        """The options of a layer."""
        names = [field.name for field in fields(ShippoSpec)]
        return ShippoSpec(**{name: getattr(self, LIBRARY_NAMES.get(name, name)) for name in names})


def padding_mask(u: Tensor, attention_mask: Tensor | None, num_seen: int, hybrid: bool) -> Tensor | None:
    """The part [B, T] of a mask that belongs to `u` [B, T, ..]; `None` without padding.

    The mask may cover the `num_seen` positions in the cache too; attention, in a `hybrid`, needs them.
    """
    if attention_mask is None or attention_mask.ndim != 2:
        return None
    (batch, length), (rows, covered) = u.shape[:2], attention_mask.shape
    mask, alone = attention_mask[:, -length:].contiguous(), length == 1
    if is_tracing(attention_mask):
        # A traced single position is a generated one.
        return None if alone else mask
    least = length + num_seen if hybrid else length
    if rows != batch or covered < least or (covered != length and not num_seen):
        expected = f"[B, T] = ({batch}, {least})" + f", or up to ({batch}, {num_seen + length}) with the cache" * bool(num_seen)
        raise ValueError(f"ShippoModel: `attention_mask` has shape ({rows}, {covered}); expected {expected}")
    return None if bool(((mask if alone else attention_mask) == 1).all()) else mask


def packed_bounds(u: Tensor, attention_mask: Tensor | None, kwargs: dict[str, Any]) -> Tensor | None:
    """[num_sequences + 1] boundaries of the sequences packed into the row of `u` [1, T, ..]; `None` for whole rows.

    Transformers' collators give `cu_seq_lens_q`, or `seq_idx` [1, T], which changes at a boundary, or `position_ids` [1, T],
    which do not increase there.
    """
    if kwargs.get("cu_seq_lens_q") is not None:
        return kwargs["cu_seq_lens_q"]
    for name, starts_at in (("seq_idx", torch.ne), ("position_ids", torch.le)):
        ids = kwargs.get(name)
        # Positions with more than one axis belong to images.
        if ids is None or ids.ndim != 2 or ids.shape[1] == 1:
            continue
        starts = starts_at(ids[:, 1:], ids[:, :-1])
        if attention_mask is not None:
            # Ids at padding are arbitrary: compare with the largest id at real positions before.
            real = attention_mask.bool()
            starts = starts_at(ids, ids.masked_fill(~real, -1).cummax(1).values.roll(1, 1))[:, 1:] & real[:, 1:]
        if not bool(starts.any()):
            continue
        if len(u) > 1 or attention_mask is not None:
            came = f"`{name}` starts a sequence inside a row, with padding or B = {len(u)}"
            raise ValueError(f"ShippoModel: {came}; expected B = 1 and no padding; pack all sequences into one row")
        return nn.functional.pad(starts[0], (1, 1), value=True).nonzero().squeeze(1)
    return None


def attention_positions(
    u: Tensor, attention_mask: Tensor | None, bounds: Tensor | None, num_seen: int, position_ids: Tensor | None
) -> Tensor:
    """Rotary positions [B, T] of `u` [B, T, ..]: counted inside packed sequences, as given, or counted over real tokens."""
    places = torch.arange(num_seen, num_seen + u.shape[1], device=u.device)
    if bounds is not None:
        return (places - bounds[torch.searchsorted(bounds, places, right=True) - 1]).unsqueeze(0)
    if position_ids is not None and position_ids.ndim == 2:
        return position_ids.expand(len(u), -1)
    if attention_mask is not None and attention_mask.ndim == 2:
        return (attention_mask.cumsum(1) - 1).clamp_min(0)[:, -u.shape[1] :]
    return places.expand(len(u), -1)


class AttentionInputs(NamedTuple):
    """What an attention layer needs of a segment, in the place of a state: its cache, the mask and positions [B, T]."""

    cache: CacheLayerMixin | None
    mask: Tensor | None
    positions: Tensor


def eager_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float, **kwargs: Any
) -> tuple[Tensor, Tensor]:
    """Attention as two products, for `attn_implementation="eager"`; `mask` is additive."""
    scores = query @ key.mT * scaling
    weights = (scores if mask is None else scores + mask).softmax(-1)
    return (weights @ value).transpose(1, 2), weights


class ShippoAttention(CausalAttention):
    """`CausalAttention` by transformers' attention interface (`attn_implementation`), caches and masks."""

    is_causal = True

    def __init__(self, config: ShippoConfig, layer_idx: int) -> None:
        window = config.sliding_window if config.kinds[layer_idx] == "sliding_attention" else None
        super().__init__(config.hidden_size, config.num_attention_heads or 1, window)
        self.config, self.layer_idx = config, layer_idx
        for projection, scale in ((self.qkv_proj, 1.0), (self.out_proj, config.num_hidden_layers**-0.5)):
            vars(projection)["init_scale"] = scale

    def run(self, u: Tensor, state: AttentionInputs, segment: Segment) -> tuple[Tensor, None]:
        q, k, v = self.project(u, state.positions)
        if state.cache is not None:
            k, v = state.cache.update(k, v)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation or "eager", eager_attention)
        options = {"scaling": self.d_head**-0.5, "sliding_window": self.window, "position_ids": state.positions}
        y, _ = attend(self, q, k, v, state.mask, dropout=0.0, **options)
        y = self.out_proj(y.flatten(-2))
        return y if segment.mask is None else torch.where(segment.mask.unsqueeze(-1), y, 0), None


class ShippoLayer(GradientCheckpointingLayer, Block):
    """A `Block` with transformers' gradient checkpointing."""


class ShippoPreTrainedModel(PreTrainedModel):
    """Loading, saving and initialisation, shared by both models."""

    config: ShippoConfig
    config_class = ShippoConfig
    base_model_prefix = "model"
    _no_split_modules = ["ShippoLayer"]  # noqa: RUF012
    supports_gradient_checkpointing = True
    _supports_sdpa = _supports_flash_attn = _supports_attention_backend = True
    _can_record_outputs = {"hidden_states": ShippoLayer}  # noqa: RUF012

    @torch.no_grad()
    def _init_weights(self, module: Any) -> None:
        """Initialise as the layers do; weights loaded from a file keep their values."""
        # Transformers does not come by at modules without parameters of their own: attention marks its projections.
        scale = getattr(module, "init_scale", None)
        if scale is None and not isinstance(module, (Shippo, Controller, ShortConv)):
            super()._init_weights(module)
            return
        loaded = [(p, p.clone()) for p in module.parameters() if getattr(p, "_is_hf_initialized", False)]
        scaled: Any = getattr(module, "out_proj", None) if scale is None else module
        module.reset_parameters()
        if scaled is not None:
            # As `Stack.scale_branches`, which would scale loaded weights too.
            scaled.weight.mul_(self.config.num_hidden_layers**-0.5 if scale is None else scale)
        for parameter, kept in loaded:
            parameter.copy_(kept)


class ShippoModel(ShippoPreTrainedModel):
    """Embedding, layers and final norm; returns hidden states.

    Example:
        >>> import torch
        >>> from shippo_ssm.integrations.huggingface import ShippoConfig, ShippoModel
        >>> model = ShippoModel(ShippoConfig(vocab_size=11, hidden_size=16, num_hidden_layers=1, state_size=8))
        >>> model(torch.zeros(2, 3, dtype=torch.int64)).last_hidden_state.shape
        torch.Size([2, 3, 16])
    """

    def __init__(self, config: ShippoConfig) -> None:
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, config.pad_token_id)
        spec, width, eps = config.spec, config.hidden_size, config.layer_norm_epsilon
        mixers = (
            Shippo(width, spec=spec, layer_idx=index) if kind == LAYER_TYPE else ShippoAttention(config, index)
            for index, kind in enumerate(config.kinds)
        )
        self.layers = Stack(ShippoLayer(mixer, norm_eps=eps, dropout=config.dropout) for mixer in mixers)
        self.norm = RMSNorm(width, eps=eps)
        # The parameters without weight decay stay in float32; a norm is named by its module.
        names = [name for name, parameter in self.layers.named_parameters() if getattr(parameter, "_no_weight_decay", False)]
        self._keep_in_fp32_modules_strict = {name.removesuffix(".weight").rpartition(".")[2] for name in names}
        self.post_init()
        if set(config.kinds) & set(MASKS):
            self._tp_plan = {**(self._tp_plan or {}), "layers.*.mixer.qkv_proj": "colwise_gather_output"}

    @capture_outputs
    def forward(
        self, input_ids: Tensor | None = None, attention_mask: Tensor | None = None, past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None, use_cache: bool | None = None, time_deltas: Tensor | None = None,
        group: ProcessGroup | None = None, **kwargs: Any,
    ) -> BaseModelOutputWithPast:  # fmt: skip
        """Hidden states of a segment.

        Args:
            input_ids: [B, T] token ids; or pass `inputs_embeds`.
            attention_mask: [B, T] or, with a cache, [B, all positions so far], of 0 and 1; padding is the identity map.
            past_key_values: a `DynamicCache(config=config)` or `StaticCache` to continue from and to update.
            inputs_embeds: [B, T, hidden_size].
            use_cache: whether to return a cache; default outside training only.
            time_deltas: [B, T] times since the previous position, `dt` of `Mixer.forward`; attention layers do not use them.
                In `generate` those of the prompt, and of as many new tokens as are known; the rest are 1.
            group: a process group whose ranks hold parts of the sequence, as in `Mixer.forward`; every rank passes its own
                `input_ids`, mask and times, and the same `cu_seq_lens_q` and cache.
            kwargs: `output_hidden_states` (True or a list of layers), for the hidden states before every layer and after the
                final norm; `return_dict`; and for packed sequences `cu_seq_lens_q` [num_sequences + 1], `seq_idx` [1, T] or
                `position_ids` [1, T].
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("ShippoModel: expected exactly one of `input_ids` and `inputs_embeds`")
        u = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        use_cache = bool(self.config.use_cache and not self.training) if use_cache is None else use_cache
        if not use_cache or (self.training and self.is_gradient_checkpointing):
            past_key_values = None
        elif past_key_values is None:
            past_key_values = DynamicCache(config=self.config)
        caches = self._caches(past_key_values)
        recurrent = [cache for cache in caches if isinstance(cache, ShippoCacheLayer)]
        num_seen = recurrent[0].num_seen if recurrent else 0
        kinds, bounds, mask = self.config.kinds, kwargs.get("cu_seq_lens_q"), attention_mask
        hybrid = set(kinds) != {LAYER_TYPE}
        if group is None:
            mask = padding_mask(u, attention_mask, num_seen, hybrid)
            bounds = packed_bounds(u, mask, kwargs)
        segment = check_segment(self, u, mask, bounds, group, time_deltas)
        positions, length = None, u.shape[1]
        if hybrid:
            positions = attention_positions(u, attention_mask, bounds, num_seen, kwargs.get("position_ids"))
            if bounds is not None:
                if num_seen:
                    raise ValueError("ShippoModel: `past_key_values` is not empty; expected none with packing and attention")
                past_key_values, caches, recurrent = None, self._caches(None), []
        # While a cache records the past, the last positions are a part of their own, with the state after each of them.
        recording = any(cache.is_croppable for cache in recurrent)
        first = max(0, length - NUM_RECORDED) if recording and group is None and bounds is None else length
        parts = [(start, stop) for start, stop in ((0, first), (first, length)) if start != stop] or [(0, length)]
        if len(parts) > 1 and kwargs.get("output_hidden_states", self.config.output_hidden_states):
            raise ValueError(f"ShippoModel: `output_hidden_states` takes {NUM_RECORDED} positions while a cache records")
        # Nobody else holds the states in a cache: without gradients they are updated in place.
        in_place = bool(recurrent) and not recording and group is None and not torch.is_grad_enabled()
        num_new = None if segment.part is None else segment.part.total
        outputs = []
        for start, stop in parts:
            cut = slice(start, stop)
            mask, dt = (None if told is None else told[:, cut] for told in (segment.mask, segment.dt))
            every = start == first < length
            part = segment._replace(mask=mask, dt=dt, return_all_states=every, in_place=in_place)
            inputs: list[Any] = [cache.state if isinstance(cache, ShippoCacheLayer) else None for cache in caches]
            if positions is not None:
                args = self.config, u[:, cut], attention_mask, past_key_values, None if bounds is None else positions
                masks = {kind: MASKS[kind](*args, layer_idx=kinds.index(kind)) for kind in MASKS if kind in kinds}
                for index, kind in enumerate(kinds):
                    if kind in masks:
                        inputs[index] = AttentionInputs(caches[index], masks[kind], positions[:, cut])
            y, after = self.layers.run(u[:, cut], inputs, part)
            outputs.append(y)
            for cache, state in zip(caches, after):
                if isinstance(cache, ShippoCacheLayer):
                    for kept in [at(state, t) for t in range(stop - start)] if every else [state]:
                        cache.store(kept, 1 if every else num_new or stop - start)
        u = self.norm(outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1))
        return BaseModelOutputWithPast(last_hidden_state=u, past_key_values=past_key_values)

    def _caches(self, past_key_values: Cache | None) -> list[Any]:
        """The layers of the cache, checked; `None` for each without one."""
        if past_key_values is None:
            return [None] * len(self.layers)
        caches = past_key_values.layers
        recurrent = [isinstance(cache, ShippoCacheLayer) for cache in caches]
        if recurrent != [kind == LAYER_TYPE for kind in self.config.kinds]:
            came = f"`past_key_values` has {sum(recurrent)} SHiPPO layers of {len(caches)}"
            raise ValueError(f"ShippoModel: {came}; expected {self.config.kinds}; use DynamicCache(config=model.config)")
        return caches


class ShippoForCausalLM(ShippoPreTrainedModel, GenerationMixin):
    """A `ShippoModel` with a language-model head; `generate` supports sampling, beams and left-padded batches.

    Example:
        >>> import torch
        >>> from shippo_ssm.integrations.huggingface import ShippoConfig, ShippoForCausalLM
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
        self, input_ids: Tensor | None = None, attention_mask: Tensor | None = None, past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None, labels: Tensor | None = None, logits_to_keep: int | Tensor = 0,
        group: ProcessGroup | None = None, **kwargs: Any,
    ) -> CausalLMOutputWithPast:  # fmt: skip
        """Logits, and the next-token loss with `labels`; other arguments as in `ShippoModel.forward`.

        Args:
            labels: [B, T], the input ids; they are shifted inside, and -100 is ignored.
            logits_to_keep: number of last positions to compute logits for, or a tensor of positions; 0 for all.
            group: as in `ShippoModel.forward`. Every rank returns the loss of the whole sequence; its gradient covers its own
                positions, so that gradients add up over the ranks.
        """
        part = None
        if group is not None:
            facts = {"T": 0 if labels is None else labels.shape[1], "`labels` are given": labels is not None}
            part = negotiate_shards("ShippoForCausalLM", group, lambda: facts)
        options = kwargs | {"return_dict": True, "group": group}
        outputs = self.model(input_ids, attention_mask, past_key_values, inputs_embeds, **options)
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

    def prepare_inputs_for_generation(
        self, input_ids: Tensor, inputs_embeds: Any = None, time_deltas: Tensor | None = None, **kwargs: Any
    ) -> dict[str, Any]:
        """Cut `time_deltas` to the positions that run next."""
        # The library annotates `self` with a protocol that a model need not have.
        parent: Any = super()
        inputs = parent.prepare_inputs_for_generation(input_ids, inputs_embeds=inputs_embeds, **kwargs)
        if time_deltas is not None:
            if not isinstance(time_deltas, Tensor) or time_deltas.ndim != 2:
                came = getattr(time_deltas, "shape", type(time_deltas).__name__)
                expected = "a tensor [B, T], a time for each position of the prompt; what is generated has a time of one"
                raise ValueError(f"ShippoForCausalLM: `time_deltas` is {came}; expected {expected}")
            ids, cache = inputs["input_ids"], inputs.get("past_key_values")
            start = 0 if cache is None else int(cache.get_seq_length())
            length = (inputs["inputs_embeds"] if ids is None else ids).shape[1]
            known = time_deltas[:, start : start + length]
            inputs["time_deltas"] = nn.functional.pad(known, (0, length - known.shape[1]), value=1.0)
        return inputs

    def init_continuous_batching(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuse: continuous batching pages keys and values, which a recurrent model does not have."""
        raise ValueError("ShippoForCausalLM: continuous batching is for paged keys and values; use `generate` with padding")


def _shift_over_ranks(labels: Tensor, part: SequenceShard) -> dict[str, Tensor]:
    """The next label of each position, where labels continue on the next rank, and the number of labels: for the loss."""
    first = labels[:, 0] if labels.shape[1] else labels.new_full(labels.shape[:1], IGNORED)
    firsts = part.gather(first)[0]
    later = [rank for rank in range(part.rank + 1, len(part.lengths)) if part.lengths[rank]]
    following = firsts[later[0]] if later else torch.full_like(first, IGNORED)
    shifted = torch.cat([labels, following.unsqueeze(1)], dim=1)[:, 1:].contiguous()
    return {"shift_labels": shifted, "num_items_in_batch": part.gather((shifted != IGNORED).sum())[0].sum()}


AutoConfig.register("shippo", ShippoConfig, exist_ok=True)
AutoModel.register(ShippoConfig, ShippoModel, exist_ok=True)
AutoModelForCausalLM.register(ShippoConfig, ShippoForCausalLM, exist_ok=True)

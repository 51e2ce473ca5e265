"""SHiPPO as a Hugging Face language model (the `hf` extra): configuration, backbone and causal language model.

Data path: token ids [B, T] are embedded to [B, T, hidden_size], pass num_hidden_layers pre-norm residual SHiPPO layers and a
last norm, and a linear head gives logits [B, T, vocab_size]. Between calls the recurrent states live in the library's
`DynamicCache`, in one layer of its linear-attention kind per layer of the model. Beam search reorders them as any other cache,
and assisted generation goes back to the last token that was accepted: states are kept while candidates are looked at. Padding
marked in `attention_mask` is the identity map, so that left-padded batches decode as if each row were alone.

Importing this module registers the classes with `AutoConfig`, `AutoModel` and `AutoModelForCausalLM`.
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
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, DynamicCache, GenerationMixin, PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin, LinearAttentionLayer
from transformers.configuration_utils import PreTrainedConfig
from transformers.masking_utils import create_recurrent_attention_mask
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast

from shippo_ssm.layers import PAPER_START, Block, Controller, Shippo, ShippoSpec, ShippoState, ShortConv, Stack
from shippo_ssm.layers.decode import RMSNorm
from shippo_ssm.layers.mixer import WHOLE, Segment, check_gaps
from shippo_ssm.layers.states import at

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
# What `ShippoConfig.layer_types` calls our layers, and the cache layer that belongs to them.
LAYER_TYPE = "shippo"
# Positions that a cache can go back by while it records the past: more than assisted generation proposes at once.
NUM_RECORDED = 64


class ShippoCacheLayer(LinearAttentionLayer, CacheLayerMixin):
    """One layer of a `DynamicCache`: the `ShippoState` of a layer, and how many positions it has seen.

    `generate` asks a cache how long it is; the library's own linear-attention layer leaves that to attention layers beside it,
    and a purely recurrent model has none. The name `_layer_type` makes `DynamicCache(config=config)` build these layers. While
    the past is recorded (`activate_past_recording`), the states after the last positions are kept, so that `crop` can go back.
    """

    _layer_type = LAYER_TYPE

    def __init__(self, **kwargs: Any) -> None:
        CacheLayerMixin.__init__(self)
        LinearAttentionLayer.__init__(self, number_of_states=2)
        self.state: ShippoState | None = None
        self.num_seen = 0
        # The states after the last positions, `state` at the end.
        self.past: deque[ShippoState] = deque(maxlen=NUM_RECORDED + 1)

    def store(self, state: ShippoState, num_new: int) -> None:
        """Keep `state`, reached after `num_new` more positions."""
        self.state = state
        self.num_seen += num_new
        self.device, self.dtype = state.conv.device, state.conv.dtype
        if self.record_past:
            self.past.append(state)

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

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Length and offset of what a mask for `query_length` more positions has to cover."""
        return self.num_seen + query_length, 0

    def update(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refused: there are no keys and values."""
        raise ValueError("ShippoCacheLayer: `update` is for keys and values; a SHiPPO layer keeps its state with `store`")

    def reset(self) -> None:
        """Forget everything."""
        self.state, self.num_seen = None, 0
        self.past.clear()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Keep the rows `beam_idx`."""
        self._change(lambda state: state.select(beam_idx))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row `repeats` times."""
        self._change(lambda state: state.repeat(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the rows `indices`."""
        self._change(lambda state: state.select(indices))

    def offload(self) -> None:
        """Move the state to the CPU."""
        self._change(lambda state: state.to("cpu"))

    def prefetch(self) -> None:
        """Move the state back to its device."""
        self._change(lambda state: state.to(self.device or "cpu"))

    def _change(self, change: Callable[[ShippoState], ShippoState]) -> None:
        if self.state is not None:
            self.state = change(self.state)
            self.past = deque([self.state] if self.record_past else [], maxlen=NUM_RECORDED + 1)

    # What the library looks at in a linear-attention layer, as views of the state; time is the last axis of conv states.
    @property
    def conv_states(self) -> dict[int, Tensor | None]:
        """The convolution's window, and the last source with the controller's window, if any."""
        if self.state is None:
            return {0: None, 1: None}
        own = [] if self.state.controller is None else [self.state.controller]
        rest = [tensor.flatten(1) for tensor in (self.state.cell.write, self.state.cell.value, *own)]
        return {0: self.state.conv.mT, 1: torch.cat([tensor.to(rest[0].dtype) for tensor in rest], 1).unsqueeze(-1)}

    @property
    def recurrent_states(self) -> dict[int, Tensor | None]:
        """The memory [B, G, N, P]."""
        return {0: None if self.state is None else self.state.cell.memory, 1: None}

    @property
    def has_previous_state(self) -> dict[int, bool]:
        """Whether there is a state, by the number of a conv state."""
        return dict.fromkeys(range(2), self.state is not None)

    @property
    def is_conv_states_initialized(self) -> dict[int, bool]:
        """The same."""
        return self.has_previous_state

    @property
    def is_recurrent_states_initialized(self) -> dict[int, bool]:
        """The same, for the memory."""
        return {0: self.state is not None, 1: False}

    @conv_states.setter
    def conv_states(self, value: Any) -> None: ...
    @recurrent_states.setter
    def recurrent_states(self, value: Any) -> None: ...
    @has_previous_state.setter
    def has_previous_state(self, value: Any) -> None: ...
    @is_conv_states_initialized.setter
    def is_conv_states_initialized(self, value: Any) -> None: ...
    @is_recurrent_states_initialized.setter
    def is_recurrent_states_initialized(self, value: Any) -> None: ...


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

    # The options of the layer stand in `ShippoSpec`, once; here they become fields of the configuration.
    for _field in fields(ShippoSpec):
        __annotations__[LIBRARY_NAMES.get(_field.name, _field.name)] = "str" if _field.name == "right" else _field.type
        vars()[LIBRARY_NAMES.get(_field.name, _field.name)] = _field.default
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
        """Refuse what the cache cannot hold; `ShippoSpec` checks the rest."""
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
        return [LAYER_TYPE] * self.num_hidden_layers

    @property
    def spec(self) -> ShippoSpec:
        """The options of a layer."""
        names = [field.name for field in fields(ShippoSpec)]
        return ShippoSpec(**{name: getattr(self, LIBRARY_NAMES.get(name, name)) for name in names})


class ShippoPreTrainedModel(PreTrainedModel):
    """What both models share: loading, saving and starting weights."""

    config: ShippoConfig
    config_class = ShippoConfig
    base_model_prefix = "model"
    _no_split_modules = ["Block"]  # noqa: RUF012
    supports_gradient_checkpointing = True
    _keep_in_fp32_modules_strict = {"drift_log", "skip", "initial_memory", "read_norm", "scalar_bias", "right_bias"}  # noqa: RUF012

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
        self.layers = Stack(Block(mixer, norm_eps=eps) for mixer in mixers)
        self.norm = RMSNorm(width, eps=eps)
        self.post_init()

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | dict[str, Tensor | None] | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast | tuple[Any, ...]:
        """Hidden states of a segment.

        Args:
            input_ids: [B, T] token ids, or `inputs_embeds` in their place.
            attention_mask: [B, T] or, with a cache, [B, all positions so far], of 0 and 1; padding is the identity map.
            past_key_values: a `DynamicCache(config=config)` to continue from and to update.
            inputs_embeds: [B, T, hidden_size].
            use_cache: whether to return a cache; on by default outside training.
            output_hidden_states: whether to return the hidden states in front of every layer and after the last norm.
            return_dict: whether to return an output object rather than a tuple.

        Returns:
            `BaseModelOutputWithPast`, or a tuple.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("ShippoModel: expected exactly one of `input_ids` and `inputs_embeds`")
        u = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        use_cache = use_cache if use_cache is not None else bool(self.config.use_cache and not self.training)
        use_cache = use_cache and not (self.layers.gradient_checkpointing and self.training)
        if not use_cache:
            past_key_values = None
        elif past_key_values is None:
            past_key_values = DynamicCache(config=self.config)
        if isinstance(attention_mask, dict):
            attention_mask = attention_mask[LAYER_TYPE]
        attention_mask = create_recurrent_attention_mask(self.config, u, attention_mask, past_key_values)

        caches = [] if past_key_values is None else self._caches(past_key_values)
        states = [cache.state for cache in caches] if caches and caches[0].num_seen else None
        hidden = output_hidden_states if output_hidden_states is not None else self.config.output_hidden_states
        seen: list[Tensor] = []
        segment = WHOLE if attention_mask is None else check_gaps("ShippoModel", u, attention_mask, None)
        u = self._run(u, states, segment, caches, seen if hidden else None)
        u = self.norm(u)
        hidden_states: Any = (*seen, u)
        output = BaseModelOutputWithPast(
            last_hidden_state=u, past_key_values=past_key_values, hidden_states=hidden_states if hidden else None
        )
        return output if (self.config.return_dict if return_dict is None else return_dict) else output.to_tuple()

    def _run(
        self, u: Tensor, states: list[Any] | None, segment: Segment, caches: list[ShippoCacheLayer], seen: list[Tensor] | None
    ) -> Tensor:
        """The layers over a segment, with their states kept in `caches`: while these record the past, after every one of the
        last positions."""
        length, record = u.shape[1], bool(caches) and caches[0].record_past
        first = max(0, length - NUM_RECORDED) if record else length
        # Padding is known to the scan alone, so that padded positions are recorded one by one.
        cuts = [0, first, length] if segment.whole else [0, *range(first, length + 1)]
        outputs, entered = [], []
        for start, stop in itertools.pairwise(cuts):
            if start == stop:
                continue
            # The states in a cache are its own: without gradients they are written over.
            mask = None if segment.mask is None else segment.mask[:, start:stop]
            every, owned = record and start >= first and segment.whole, bool(caches) and not record
            part = segment._replace(mask=mask, every=every, owned=owned and not torch.is_grad_enabled())
            entered.append([] if seen is not None else None)
            y, after = self.layers.run(u[:, start:stop], states, part, entered[-1])
            outputs.append(y)
            for cache, state in zip(caches, after):
                for kept in [at(state, t) for t in range(stop - start)] if every else [state]:
                    cache.store(kept, 1 if every else stop - start)
            states = [cache.state for cache in caches]
        if seen is not None:
            seen += [torch.cat(parts, dim=1) for parts in zip(*entered)]
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

    def __init__(self, config: ShippoConfig) -> None:
        super().__init__(config)
        self.model = ShippoModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | dict[str, Tensor | None] | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        logits_to_keep: int = 0,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast | tuple[Any, ...]:
        """Logits, and the next-token loss where there are labels; other arguments as in `ShippoModel.forward`.

        Args:
            labels: [B, T], the input ids; they are shifted inside, and -100 is left out.
            logits_to_keep: compute logits for the last so many positions only; 0 for all.

        Returns:
            `CausalLMOutputWithPast`, or a tuple.
        """
        outputs = self.model(
            input_ids,
            attention_mask=attention_mask,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            output_hidden_states=output_hidden_states,
            return_dict=True,
        )
        logits = self.lm_head(outputs.last_hidden_state[:, -logits_to_keep:])
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        output = CausalLMOutputWithPast(
            loss=loss, logits=logits, past_key_values=outputs.past_key_values, hidden_states=outputs.hidden_states
        )
        return output if (self.config.return_dict if return_dict is None else return_dict) else output.to_tuple()


AutoConfig.register("shippo", ShippoConfig, exist_ok=True)
AutoModel.register(ShippoConfig, ShippoModel, exist_ok=True)
AutoModelForCausalLM.register(ShippoConfig, ShippoForCausalLM, exist_ok=True)

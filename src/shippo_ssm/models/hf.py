"""SHiPPO as a Hugging Face language model (the `hf` extra): configuration, backbone and causal language model.

Data path: token ids [B, T] are embedded to [B, T, hidden_size], pass num_hidden_layers pre-norm residual SHiPPO layers and a
last norm, and a linear head gives logits [B, T, vocab_size]. Between calls the recurrent states live in the library's
`DynamicCache`, in one layer of its linear-attention kind per layer of the model: the convolution window is its first conv
state, the last source (and the controller's window, if any) its second, the memory [B, G, N, P] its recurrent state. Beam
search reorders them as any other cache. Padding marked in `attention_mask` is the identity map, so that left-padded batches
decode as if each row were alone.

Importing this module registers the classes with `AutoConfig`, `AutoModel` and `AutoModelForCausalLM`.
"""

from __future__ import annotations

import logging
import math
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

from shippo_ssm.layers import PAPER_START, Block, CellState, Controller, Shippo, ShippoSpec, ShippoState, ShortConv, Stack
from shippo_ssm.layers.mixer import WHOLE, check_gaps

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


class ShippoCacheLayer(LinearAttentionLayer, CacheLayerMixin):
    """One layer of a `DynamicCache`: a linear-attention layer with two conv states that also counts the positions it has seen.

    `generate` asks a cache how long it is; the library's own linear-attention layer leaves that to attention layers beside it,
    and a purely recurrent model has none. The name `_layer_type` makes `DynamicCache(config=config)` build these layers.
    """

    _layer_type = LAYER_TYPE

    def __init__(self, **kwargs: Any) -> None:
        CacheLayerMixin.__init__(self)
        LinearAttentionLayer.__init__(self, number_of_states=2)
        self.num_seen = 0

    def load(self, mixer: Shippo) -> ShippoState | None:
        """The `ShippoState` held for `mixer`, or `None` before the first call."""
        window, rest, memory = self.conv_states[0], self.conv_states[1], self.recurrent_states[0]
        if not self.has_previous_state[0] or window is None or rest is None or memory is None:
            return None
        shapes = mixer.state_shapes(memory.shape[0])
        names = [name for name in ("write", "value", "controller") if name in shapes]
        parts = rest.squeeze(-1).split([math.prod(shapes[name][1:]) for name in names], dim=1)
        tensors = {name: part.reshape(shapes[name]) for name, part in zip(names, parts)}
        return ShippoState(window.mT, CellState(memory, tensors["write"], tensors["value"]), tensors.get("controller"))

    def store(self, state: ShippoState, num_new: int) -> None:
        """Keep `state`, reached after `num_new` more positions. Time is the last dimension of conv states."""
        rest = [state.cell.write, state.cell.value] + ([] if state.controller is None else [state.controller])
        self.update_conv_state(state.conv.mT, 0)
        self.update_conv_state(torch.cat([tensor.flatten(1).to(rest[0].dtype) for tensor in rest], dim=1).unsqueeze(-1), 1)
        self.update_recurrent_state(state.cell.memory, 0)
        self.num_seen += num_new

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
        super().reset()
        self.num_seen = 0

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row `repeats` times."""
        if self.device is not None:
            rows = self.recurrent_states[0].shape[0]  # pyright: ignore[reportOptionalMemberAccess]
            self.batch_select_indices(torch.arange(rows, device=self.device).repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the rows `indices`."""
        if self.device is not None:
            self.reorder_cache(indices)  # pyright: ignore[reportArgumentType]


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
    _is_stateful = True
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
        self.norm = nn.RMSNorm(width, eps=eps)
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

        caches = None if past_key_values is None else self._caches(past_key_values)
        states = None
        if caches is not None and caches[0].num_seen:
            states = [cache.load(mixer) for cache, mixer in zip(caches, self.mixers)]
        hidden = output_hidden_states if output_hidden_states is not None else self.config.output_hidden_states
        seen: list[Tensor] = []
        segment = WHOLE if attention_mask is None else check_gaps("ShippoModel", u, attention_mask, None)
        num_new = u.shape[1]
        u, states = self.layers.run(u, states, segment, seen if hidden else None)
        for cache, state in zip(caches or [], states):
            cache.store(state, num_new)
        u = self.norm(u)
        hidden_states: Any = (*seen, u)
        output = BaseModelOutputWithPast(
            last_hidden_state=u, past_key_values=past_key_values, hidden_states=hidden_states if hidden else None
        )
        return output if (self.config.return_dict if return_dict is None else return_dict) else output.to_tuple()

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

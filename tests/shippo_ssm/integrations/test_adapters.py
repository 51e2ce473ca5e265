"""The layer behind the calls of mamba_ssm and fla: blocks built the way those projects build them."""

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from shippo_ssm.integrations.fla import FlaShippo
from shippo_ssm.integrations.mamba_ssm import MambaShippo
from shippo_ssm.layers import Shippo

OPTIONS: dict[str, Any] = {"d_state": 4, "dtype": torch.float64}


class MambaBlock(nn.Module):
    """As in mamba_ssm: the block makes its mixer of a class, adds first, and hands on the residual beside the output."""

    def __init__(self, dim, mixer_cls, norm_cls=nn.LayerNorm):
        super().__init__()
        self.mixer, self.norm = mixer_cls(dim), norm_cls(dim, dtype=torch.float64)

    def forward(self, hidden_states, residual=None, inference_params=None, **mixer_kwargs):
        residual = hidden_states if residual is None else hidden_states + residual
        return self.mixer(self.norm(residual), inference_params=inference_params, **mixer_kwargs), residual

    def allocate_inference_cache(self, batch_size, max_seqlen, dtype=None, **kwargs):
        return self.mixer.allocate_inference_cache(batch_size, max_seqlen, dtype=dtype, **kwargs)


@dataclass
class InferenceParams:
    """As in mamba_ssm's generation: where each layer finds its cache."""

    max_seqlen: int
    max_batch_size: int
    seqlen_offset: int = 0
    key_value_memory_dict: dict[int, Any] = field(default_factory=dict)


def mamba_stack() -> tuple[Any, Any]:
    words: dict[str, Any] = {
        "d_conv": 4,
        "expand": 2,
        "dt_rank": "auto",
        "use_fast_path": True,
        "conv_bias": True,
        "bias": False,
    }
    layers = nn.ModuleList(MambaBlock(8, partial(MambaShippo, layer_idx=i, **words, **OPTIONS)) for i in range(2))

    def run(u, inference_params=None):
        residual = None
        for layer in layers:
            u, residual = layer(u, residual, inference_params=inference_params)
        return u + residual

    return layers, run


@pytest.mark.works_with("mamba_ssm's calls")
@pytest.mark.parametrize("allocated", [False, True])
def test_a_mamba_stack_decodes_from_its_cache(allocated):
    """Prefill, then one token after another: the whole sequence, with caches made before or on the way."""
    layers, run = mamba_stack()
    u = torch.randn(2, 7, 8, dtype=torch.float64)
    params = InferenceParams(max_seqlen=7, max_batch_size=2)
    if allocated:
        params.key_value_memory_dict = {i: layer.allocate_inference_cache(2, 7) for i, layer in enumerate(layers)}
    with torch.no_grad():
        whole = run(u)
        parts = [run(u[:, :4], params)]
        before = [id(part) for cache in params.key_value_memory_dict.values() for part in cache]
        for t in range(4, 7):
            params.seqlen_offset = t
            parts.append(run(u[:, t : t + 1], params))
    assert (torch.cat(parts, 1) - whole).abs().max() < 1e-9
    assert before == [id(part) for cache in params.key_value_memory_dict.values() for part in cache]


@pytest.mark.works_with("mamba_ssm's calls")
def test_both_take_the_times_of_samples():
    u, dt = torch.randn(2, 5, 8, dtype=torch.float64), 2 * torch.rand(2, 5, dtype=torch.float64)
    mamba, fla = MambaShippo(8, layer_idx=0, **OPTIONS), FlaShippo(8, layer_idx=0, **OPTIONS)
    whole = mamba(u, dt=dt)
    assert (whole - mamba(u)).abs().max() > 1e-3
    with torch.no_grad():
        params = InferenceParams(5, 2)
        parts = [mamba(u[:, :3], params, dt=dt[:, :3])]
        params.seqlen_offset = 3
        parts.append(mamba(u[:, 3:4], params, dt=dt[:, 3:4]))
        parts.append(mamba.step(u[:, 4:], *params.key_value_memory_dict[0], dt=dt[:, 4:])[0])
    assert (torch.cat(parts, 1) - whole).abs().max() < 1e-9
    cache, whole = FlaCache(), fla(u, dt=dt)[0]
    assert (whole - fla(u)[0]).abs().max() > 1e-3
    parts = [fla(u[:, cut], past_key_values=cache, dt=dt[:, cut])[0] for cut in (slice(0, 3), slice(3, 5))]
    assert (torch.cat(parts, 1) - whole).abs().max() < 1e-9


def test_mamba_steps_write_the_two_tensors():
    layer = MambaShippo(8, write_rank=2, **OPTIONS)
    u = torch.randn(2, 5, 8, dtype=torch.float64)
    conv_state, ssm_state = layer.allocate_inference_cache(2, 5)
    outputs = []
    for t in range(5):
        y, conv, ssm = layer.step(u[:, t : t + 1], conv_state, ssm_state)
        assert conv is conv_state
        assert ssm is ssm_state
        outputs.append(y)
    whole = layer(u)
    assert (torch.cat(outputs, 1) - whole).abs().max() < 1e-9
    whole.sum().backward()
    assert MambaShippo(8, use_fast_path=False).mixer.spec.backend == "reference"
    with pytest.raises(ValueError, match="`layer_idx` is None"):
        layer(u, InferenceParams(5, 2))
    with pytest.raises(ValueError, match="`controller_conv` is set"):
        MambaShippo(8, controller_conv=3)


class FlaCache:
    """As in fla: one dictionary of states per layer, updated by name."""

    def __init__(self):
        self.states: list[dict[str, Any]] = []
        self.seen = 0

    def __len__(self):
        return len(self.states)

    def __getitem__(self, layer_idx):
        return self.states[layer_idx]

    def update(self, recurrent_state=None, attn_state=None, conv_state=None, ffn_state=None, layer_idx=0, offset=1):
        state = {"recurrent_state": recurrent_state, "attn_state": attn_state, "conv_state": conv_state, "ffn_state": ffn_state}
        self.states[layer_idx : layer_idx + 1] = [state]
        self.seen += offset if layer_idx == 0 else 0
        return state

    def reorder(self, index):
        def pick(value):
            return tuple(map(pick, value)) if isinstance(value, tuple) else value if value is None else value[index]

        self.states = [{name: pick(value) for name, value in state.items()} for state in self.states]


class FlaBlock(nn.Module):
    """As in fla: attention by keyword, a triple back, and an MLP."""

    def __init__(self, hidden_size, layer_idx, **options):
        super().__init__()
        self.attn_norm, self.mlp_norm = (nn.RMSNorm(hidden_size, dtype=torch.float64) for _ in range(2))
        self.attn = FlaShippo(hidden_size=hidden_size, layer_idx=layer_idx, **options)
        self.mlp = nn.Linear(hidden_size, hidden_size, dtype=torch.float64)

    def forward(self, hidden_states, attention_mask=None, past_key_values=None, use_cache=False, **kwargs):
        residual = hidden_states
        hidden_states, attentions, past_key_values = self.attn(
            hidden_states=self.attn_norm(hidden_states),
            attention_mask=attention_mask,
            past_key_values=past_key_values,
            use_cache=use_cache,
            output_attentions=False,
            **kwargs,
        )
        hidden_states = residual + hidden_states
        return hidden_states + self.mlp(self.mlp_norm(hidden_states)), attentions, past_key_values


@pytest.mark.works_with("fla's calls")
@pytest.mark.parametrize("options", [{}, {"controller_conv": 3}])
def test_an_fla_stack_decodes_padded_and_packed(options):
    """A left-padded batch by prefill and steps on their cache, rows picked for beams, and the same rows packed."""
    layers = nn.ModuleList(FlaBlock(8, i, **options, **OPTIONS) for i in range(2))

    def run(u, **kwargs):
        for layer in layers:
            u, attentions, _ = layer(u, **kwargs)
            assert attentions is None
        return u

    u = torch.randn(2, 6, 8, dtype=torch.float64)
    mask = torch.tensor([[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1]])
    whole = run(u, attention_mask=mask)
    alone = run(u[:1, 2:])
    assert (whole[:1, 2:] - alone).abs().max() < 1e-9
    cache = FlaCache()
    parts = [run(u[:, :4], attention_mask=mask[:, :4], past_key_values=cache, use_cache=True)]
    parts.append(run(u[:, 4:5], attention_mask=mask[:, :5], past_key_values=cache, use_cache=True))
    cache.reorder(torch.tensor([1, 0]))
    parts.append(run(u[:, 5:].flip(0), past_key_values=cache, use_cache=True).flip(0))
    real = mask.bool()
    assert (torch.cat(parts, 1)[real] - whole[real]).abs().max() < 1e-9
    assert cache.seen == 6
    packed = run(u[real].unsqueeze(0), cu_seqlens=torch.tensor([0, 4, 10]))
    assert (packed[0] - whole[real]).abs().max() < 1e-9
    with pytest.raises(ValueError, match="`layer_idx` is None"):
        FlaShippo(8)(u.float(), past_key_values=cache)


def test_adapters_hold_the_layer_and_nothing_else():
    for adapter in (MambaShippo(8, d_state=4), FlaShippo(8, d_state=4)):
        names = {name.removeprefix("mixer.") for name in adapter.state_dict()}
        assert names == set(Shippo(8, d_state=4).state_dict())

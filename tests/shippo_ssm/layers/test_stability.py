"""The layer cannot blow up: bounded memories over a million tokens, bounded families at any scale, training at a wild rate."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from shippo_ssm.layers import Shippo
from shippo_ssm.layers.controller import SCALARS
from shippo_ssm.models import SequenceConfig, SequenceModel

STABLE = ("orthogonal", "dissipative")
BOUNDED = ("split", "structured", "dense")


def wild(right: str, **options) -> Shippo:
    """A layer whose right weights are a hundred times too large."""
    layer = Shippo(8, d_state=4, expand=1, right=right, **options)
    with torch.no_grad():
        assert layer.controller.right_proj is not None
        layer.controller.right_proj.weight.mul_(100)
    return layer


@torch.no_grad()
def largest_memory(layer: Shippo, num_tokens: int, segment: int = 1 << 16) -> tuple[float, float]:
    """The norm of the memory after `num_tokens`, and the bound: the first memory and all sources, none of them lengthened."""
    state, total, emissions = None, 0.0, []
    handle = layer.controller.register_forward_hook(lambda module, given, output: emissions.append(output[0]))
    for start in range(0, num_tokens, segment):
        u = torch.randn(1, min(segment, num_tokens - start), layer.d_model, generator=torch.Generator().manual_seed(start))
        _, state = layer(u, state, output_state=True)
        emission = emissions.pop()
        value = F.silu(layer.in_proj(u)[..., : layer.d_inner]).unflatten(-1, (layer.num_groups, -1))
        source = emission.step * emission.write[..., 0, :].norm(dim=-1) * value.norm(dim=-1)
        total += float(source.sum(1).square().sum().sqrt())
    handle.remove()
    assert state is not None
    first = 0.0 if layer.initial_memory is None else float(layer.initial_memory.norm())
    return float(state.cell.memory.norm()), first + total


@pytest.mark.parametrize("right", STABLE)
def test_a_million_tokens_with_right_weights_a_hundred_times_too_large(right):
    norm, bound = largest_memory(wild(right), 1_000_000)
    assert norm <= bound
    # Far below it: what was written is forgotten, and directions cancel.
    assert norm < 1e4


@pytest.mark.parametrize("right", BOUNDED)
def test_bounded_families_stay_finite_and_unbounded_ones_do_not(right):
    norm, bound = largest_memory(wild(right), 8192)
    assert norm <= bound
    grown = wild(right, bounded=False)
    with torch.no_grad():
        assert not torch.isfinite(grown(torch.randn(1, 8192, 8))).all()


@pytest.mark.parametrize("right", [*STABLE, *BOUNDED, "none"])
def test_training_at_ten_times_the_rate_stays_finite(right):
    torch.manual_seed(0)
    model = SequenceModel(SequenceConfig(d_model=16, n_layers=1, d_state=8, vocab_size=11, right=right))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-2)
    for _ in range(30):
        ids = torch.randint(0, 11, (4, 64))
        loss = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        assert torch.isfinite(loss)
    assert all(torch.isfinite(parameter).all() for parameter in model.parameters())


def test_a_wiped_memory_is_not_blown_up():
    """Nothing is written, so the norm sees rounding at most: its gradients stay within reach of those of a live memory."""
    torch.manual_seed(0)
    layer = Shippo(16, d_state=8, preset="language")
    memory = layer.initial_memory
    assert memory is not None
    with torch.no_grad():
        memory.zero_()
        layer.controller.scalar_bias[SCALARS.index("write_gate")] = -20.0
    layer(torch.randn(2, 32, 16)).square().sum().backward()
    # A live memory has 13 here.
    assert memory.grad is not None
    assert memory.grad.norm() < 10_000

"""A GRU that starts as a memory for keys: what such a model can hold, before it is asked what it can learn.

Every key belongs to one of a few slots, a slot to units of one layer. In the channels of `EventEmbedding.start_apart` the first
half of the units reads and the second half stores; unit i of both belongs to channel i of the values:

    storing   h <- (1 - z) tanh(SMALL x_i) + z h      z opens where a key of the slot is bound,
    reading   h <- tanh(r LOUD h_stored)              r opens where a key of the slot is asked, and h is zero elsewhere.

A layer adds its units to the stream, so what is read stands where the classifiers look for it. What is stored stands in the
channels of the keys, where later layers would take it for another key: it is kept small, and made loud when it is read. The
gates are classifiers of single events, fitted with noise of the size of what is stored. A binding is lost when another key of
its slot is bound.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shippo_ssm.tasks.mqar import BIND, MODULUS, OP, QUERY, WIDTH, TransportMQAR

# What is stored of a value, and what of it is read; how sharply a gate opens.
SMALL, LOUD, SHARP = 0.2, 7.5, 1.5
# Noise that gates are fitted with, copies of every event, and how often keys choose their slot.
NOISE, COPIES, ROUNDS = 0.35, 8, 3
# Of a gate that is always open.
OPEN = 6.0


def single_events(task: TransportMQAR) -> Tensor:
    """Tokens [2 num_keys + num_operations, 7]: every key bound, every key asked, every operation."""
    nothing = [task.num_keys, task.num_operations, *[MODULUS] * WIDTH]
    bound = [[BIND, key, nothing[1], *[0] * WIDTH] for key in range(task.num_keys)]
    asked = [[QUERY, key, *nothing[1:]] for key in range(task.num_keys)]
    return torch.tensor(bound + asked + [[OP, nothing[0], number, *nothing[2:]] for number in range(task.num_operations)])


def fit_gates(x: Tensor, opens: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Weights [gates, channels] and biases [gates] of logistic classifiers that open where they should, under noise.

    Args:
        x: [events, channels].
        opens: [events, gates] of 0 and 1.
    """
    x, opens = x.repeat(COPIES, 1), opens.repeat(COPIES, 1).to(x)
    x = x + NOISE * torch.randn(x.shape, generator=generator)
    weight, bias = x.new_zeros(opens.shape[1], x.shape[1]), x.new_zeros(opens.shape[1])
    optimiser = torch.optim.LBFGS([weight.requires_grad_(), bias.requires_grad_()], max_iter=200)

    def loss() -> Tensor:
        optimiser.zero_grad()
        value = F.binary_cross_entropy_with_logits(x @ weight.T + bias, opens) + 1e-6 * weight.square().sum()
        value.backward()
        return value

    with torch.enable_grad():
        optimiser.step(loss)
    return weight.detach(), bias.detach()


@torch.no_grad()
def start_slots(layers: list[nn.GRU], x: Tensor, task: TransportMQAR, num_slots: int, seed: int) -> None:
    """Start the GRUs of a model, one per layer, as `num_slots` slots.

    Args:
        x: [events, d_model], the events of `single_events` as the first layer sees them.
    """
    width = x.shape[1]
    half = width // 2
    generator = torch.Generator().manual_seed(seed)
    x, num_keys = x[:, half:], task.num_keys
    slot = torch.randperm(num_keys, generator=generator) % num_slots
    for _ in range(ROUNDS):
        # Keys move to the slot that takes them for its own, so that slots are easy to tell apart.
        weight, bias = fit_gates(x[:num_keys], F.one_hot(slot, num_slots), generator)
        slot = (x[:num_keys] @ weight.T + bias).argmax(1)
    own, never = F.one_hot(slot, num_slots), torch.zeros(num_keys, num_slots, dtype=torch.int64)
    no_operation = never[: task.num_operations]
    store_weight, store_bias = fit_gates(x, torch.cat([own, never, no_operation]), generator)
    read_weight, read_bias = fit_gates(x, torch.cat([never, own, no_operation]), generator)
    slot_of_unit = (torch.arange(len(layers) * half) * num_slots // (len(layers) * half)).view(len(layers), half)
    for gru, slots in zip(layers, slot_of_unit):
        weights = dict(gru.named_parameters())
        for parameter in weights.values():
            parameter.zero_()
        # Rows of torch's GRU are r, z and n, each for all units.
        (r, z, n), (r_bias, z_bias, _) = (weights[name].view(3, width, -1) for name in ("weight_ih_l0", "bias_ih_l0"))
        r[:half, half:], r_bias[:half, 0] = SHARP * read_weight[slots], SHARP * read_bias[slots]
        z[half:, half:], z_bias[half:, 0] = -SHARP * store_weight[slots], -SHARP * store_bias[slots]
        z_bias[:half] = -OPEN
        n[half:, :half] = SMALL * torch.eye(half)
        weights["weight_hh_l0"].view(3, width, width)[2, :half, half:] = LOUD * torch.eye(half)

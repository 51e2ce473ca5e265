"""Banks: the independent recurrences of a collapsed one give the same outputs and states as the whole."""

from __future__ import annotations

import pytest
import torch

from shippo_ssm.actions import Lie
from shippo_ssm.collapse import bank, collapse
from shippo_ssm.scan import transport_scan


def hidden_family(sizes):
    """Generators [3, P, P] that are block diagonal in a hidden basis."""
    parts = [torch.stack([0.4 * torch.randn(n, n, dtype=torch.float64) for _ in range(3)]) for n in sizes]
    plain = torch.stack([torch.block_diag(*[part[m] for part in parts]) for m in range(3)])
    basis = torch.randn(len(plain[0]), len(plain[0]), dtype=torch.float64)
    basis = torch.linalg.qr(basis).Q @ torch.diag(torch.linspace(1.0, 3.0, len(basis), dtype=torch.float64))
    return basis @ plain @ torch.linalg.inv(basis)


def recurrence(family, rank=None):
    shape, width, order = (2, 11, 3), family.width, 5
    middle = () if rank is None else (rank,)
    coords = torch.randn(*shape, family.num_coordinates, dtype=torch.float64)
    step = torch.rand(shape, dtype=torch.float64)
    return (
        torch.randn(*shape, *middle, width, dtype=torch.float64),
        torch.randn(*shape, *middle, order, dtype=torch.float64),
        torch.randn(*shape, order, dtype=torch.float64),
        step,
        -torch.rand(3, order, dtype=torch.float64),
        family.dense(coords, step).detach(),
    )


@pytest.mark.parametrize("rank", [None, 2])
@pytest.mark.parametrize("sizes", [(3, 2), (1, 1, 2)])
def test_banks_equal_the_whole(sizes, rank):
    family = Lie(hidden_family(sizes))
    reduction = collapse(family.generators)
    assert reduction.blocks == tuple(sorted(sizes, reverse=True))
    operands = recurrence(family, rank)
    start = torch.randn(2, 3, 5, family.width, dtype=torch.float64)
    whole, last = transport_scan(*operands, initial_state=start, output_final_state=True, backend="reference")
    banks = bank(operands, reduction)
    parts = [
        transport_scan(*part[:6], initial_state=state, output_final_state=True, backend="reference")
        for part, state in zip(banks.recurrences, banks.split(start))
    ]
    torch.testing.assert_close(banks.join([y for y, _ in parts]), whole, rtol=1e-9, atol=1e-10)
    states = [state for _, state in parts if state is not None]
    torch.testing.assert_close(banks.join(states), last, rtol=1e-9, atol=1e-10)


def test_a_family_of_generators_becomes_one_family_per_block():
    family = Lie(hidden_family((3, 2)))
    reduction = collapse(family.generators)
    coords, step = torch.randn(7, 3, dtype=torch.float64), torch.rand(7, dtype=torch.float64)
    parts = [part.dense(coords, step) for part in bank(family, reduction)]
    joined = torch.stack([torch.block_diag(*blocks) for blocks in zip(*parts)])
    basis = reduction.basis
    torch.testing.assert_close(basis @ joined @ torch.linalg.inv(basis), family.dense(coords, step), rtol=1e-9, atol=1e-9)


def test_a_reduction_of_something_else_is_refused():
    family, other = Lie(hidden_family((3, 2))), collapse(hidden_family((3, 2)))
    with pytest.raises(ValueError, match="`right` does not collapse along this reduction"):
        bank(recurrence(family), other)
    with pytest.raises(ValueError, match="`generators` does not collapse"):
        bank(family, other)


def test_bad_shapes_are_refused():
    reduction = collapse(hidden_family((2, 1)))
    operands = recurrence(Lie(hidden_family((3, 2))))
    with pytest.raises(ValueError, match="`value` has shape"):
        bank(operands, reduction)
    with pytest.raises(ValueError, match="`right` is None"):
        bank(operands[:5], reduction)
    banks = bank(recurrence(Lie(torch.zeros(1, 3, 3, dtype=torch.float64))), collapse(torch.zeros(1, 3, 3)))
    with pytest.raises(ValueError, match="widths of the blocks"):
        banks.join([torch.zeros(2, 2), torch.zeros(2, 1)])

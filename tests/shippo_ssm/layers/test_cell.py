"""The two-point cell against the paper's recurrence written out as a loop, and its laws."""

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from shippo_ssm.layers import CellState, shippo_cell, shippo_cell_step
from shippo_ssm.layers.rows import scaled
from shippo_ssm.scan import Recurrence


def operands(B=2, T=9, G=2, Q=None, N=5, P=3, rank=None, seed=0):
    random = torch.Generator().manual_seed(seed)
    ranks, sets = () if rank is None else (rank,), G if Q is None else Q

    def normal(*shape):
        return torch.randn(*shape, generator=random, dtype=torch.float64)

    def uniform(*shape):
        return torch.rand(*shape, generator=random, dtype=torch.float64)

    right = torch.linalg.matrix_exp(0.3 * normal(B, T, G, P, P))
    vectors = normal(B, T, sets, *ranks, N), normal(B, T, sets, N)
    arguments = (normal(B, T, G, *ranks, P), *vectors, uniform(B, T, G), uniform(B, T, G))
    state = CellState(normal(B, G, N, P), normal(B, sets, *ranks, N), normal(B, G, *ranks, P))
    return (*arguments, -uniform(G, N), right), state


def run_cell(*arguments, **options) -> tuple[Tensor, CellState]:
    """`shippo_cell` with the state after it."""
    y, after = shippo_cell(*arguments, output_final_state=True, **options)
    assert after is not None
    return y, after


def paper(value, write, read, step, mix, drift, right, state):
    """Equation "discrete-shippo-cell": H_t = L H R + (1 - mix) step L U_{t-1} R + mix step U_t."""
    if value.ndim == 4:
        value, write = value.unsqueeze(-2), write.unsqueeze(-2)
        state = CellState(state.memory, state.write.unsqueeze(-2), state.value.unsqueeze(-2))
    shared = value.shape[2] // write.shape[2]
    write, read = (tensor.repeat_interleave(shared, dim=2) for tensor in (write, read))
    memory, source = state.memory, state.write.repeat_interleave(shared, dim=1).mT @ state.value
    outputs = []
    for t in range(read.shape[1]):
        left = torch.diag_embed(torch.exp(step[:, t, :, None] * drift))
        action = torch.eye(value.shape[-1], dtype=value.dtype) if right is None else right[:, t]
        update = write[:, t].mT @ value[:, t]
        late, early = (mix * step)[:, t, :, None, None], ((1 - mix) * step)[:, t, :, None, None]
        memory = left @ memory @ action + early * (left @ source @ action) + late * update
        source = update
        outputs.append(torch.einsum("bgn,bgnp->bgp", read[:, t], memory))
    return torch.stack(outputs, 1), memory


@pytest.mark.parametrize("backend", ["reference", "associative", "chunked", "fused"])
@pytest.mark.parametrize(("rank", "sets"), [(None, 4), (2, 4), (None, 1), (2, 2)])
def test_cell_is_the_papers_recurrence(backend, rank, sets):
    arguments, state = operands(G=4, Q=sets, rank=rank)
    y, after = run_cell(*arguments, initial_state=state, backend=backend)
    expected, memory = paper(*arguments, state)
    torch.testing.assert_close(y, expected, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(after.memory, memory, rtol=1e-10, atol=1e-10)
    assert torch.equal(after.write, arguments[1][:, -1])
    assert torch.equal(after.value, arguments[0][:, -1])


def test_without_right_and_state():
    (value, write, read, step, mix, drift, _), state = operands()
    y, after = shippo_cell(value, write, read, step, mix, drift, backend="associative")
    expected, _ = paper(value, write, read, step, mix, drift, None, CellState(*(torch.zeros_like(part) for part in state)))
    assert after is None
    torch.testing.assert_close(y, expected, rtol=1e-10, atol=1e-10)


def test_p_1_mix_1_is_the_mamba_update():
    """h_t = exp(step a) h_{t-1} + step b x, y = c h: the exponential-Euler selective update of one channel."""
    (value, write, read, step, mix, drift, _), _ = operands(P=1)
    y, _ = shippo_cell(value, write, read, step, torch.ones_like(mix), drift, backend="associative")
    h, expected = torch.zeros(2, 2, 5, dtype=torch.float64), []
    for t in range(9):
        h = torch.exp(step[:, t, :, None] * drift) * h + step[:, t, :, None] * write[:, t] * value[:, t]
        expected.append((read[:, t] * h).sum(-1, keepdim=True))
    torch.testing.assert_close(y, torch.stack(expected, 1), rtol=1e-12, atol=1e-12)


def test_identity_right_is_the_one_sided_cell():
    (value, write, read, step, mix, drift, right), state = operands()
    eye = torch.eye(3, dtype=torch.float64).expand_as(right)
    with_eye, _ = shippo_cell(value, write, read, step, mix, drift, eye, initial_state=state, backend="reference")
    without, _ = shippo_cell(value, write, read, step, mix, drift, None, initial_state=state, backend="reference")
    assert torch.equal(with_eye, without)


@pytest.mark.parametrize(("rank", "sets"), [(None, 4), (2, 4), (None, 1), (2, 2)])
def test_step_by_step(rank, sets):
    arguments, state = operands(G=4, Q=sets, rank=rank)
    *series, drift, right = arguments
    y, after = run_cell(*arguments, initial_state=state)
    for t in range(9):
        value, write, read, step, mix = (tensor[:, t : t + 1] for tensor in series)
        y_t, state = shippo_cell_step(Recurrence(value, write, read, step, drift, right[:, t : t + 1]), mix, state)
        torch.testing.assert_close(y_t[:, 0], y[:, t], rtol=1e-10, atol=1e-10)
    for got, expected in zip(state, after):
        torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-10)


def test_masked_positions_are_the_identity_map_anywhere():
    """Real positions scattered among padding of any content give what they give alone, with gradients."""
    arguments, state = operands(T=6, Q=1)
    *series, drift, right = arguments
    mask = torch.zeros(2, 11, dtype=torch.bool)
    mask[0, [0, 2, 3, 7, 8, 10]] = True
    mask[1, 5:] = True
    spread = [torch.randn(2, 11, *tensor.shape[2:], dtype=torch.float64) for tensor in (*series, right)]
    for wide, tensor in zip(spread, (*series, right)):
        wide[mask] = tensor.flatten(0, 1)
    spread = [tensor.requires_grad_() for tensor in spread]
    state = CellState(*(part.requires_grad_() for part in state))
    y, after = run_cell(*arguments, initial_state=state)
    y_wide, after_wide = run_cell(*spread[:5], drift, spread[5], initial_state=state, mask=mask)
    torch.testing.assert_close(y_wide[mask], y.flatten(0, 1), rtol=1e-11, atol=1e-11)
    for got, expected in zip(after_wide, after):
        torch.testing.assert_close(got, expected, rtol=1e-11, atol=1e-11)
    grads = torch.autograd.grad((y_wide[mask] ** 2).sum() + sum((part**2).sum() for part in after_wide), spread)
    for grad in grads:
        assert torch.equal(grad[~mask], torch.zeros_like(grad[~mask]))
        assert grad[mask].abs().sum() > 0


def test_a_row_of_padding_keeps_its_state():
    arguments, state = operands(T=4)
    mask = torch.zeros(2, 4, dtype=torch.bool)
    _, after = run_cell(*arguments, initial_state=state, mask=mask)
    for got, expected in zip(after, state):
        assert torch.equal(got, expected)


def test_packed_sequences_with_empty_ones():
    arguments, _ = operands(B=1, T=10, Q=1)
    *series, drift, right = arguments
    bounds = [0, 0, 4, 4, 10, 10]
    state = CellState(torch.randn(5, 2, 5, 3).double(), torch.randn(5, 1, 5).double(), torch.randn(5, 2, 3).double())
    y, after = run_cell(*arguments, initial_state=state, cu_seqlens=torch.tensor(bounds))
    for index, (low, high) in enumerate(pairwise(bounds)):
        own = CellState(*(part[index : index + 1] for part in state))
        alone = [tensor[:, low:high] for tensor in series]
        y_alone, after_alone = run_cell(*alone, drift, right[:, low:high], initial_state=own)
        torch.testing.assert_close(y[:, low:high], y_alone, rtol=1e-11, atol=1e-11)
        for got, expected in zip(after, after_alone):
            torch.testing.assert_close(got[index], expected[0], rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("backend", ["reference", "fused"])
def test_an_empty_sequence_keeps_its_state_before_a_nan(backend):
    arguments, _ = operands(B=1, T=4, Q=1)
    arguments[3][:, 0] = torch.nan
    state = CellState(torch.randn(2, 2, 5, 3).double(), torch.randn(2, 1, 5).double(), torch.randn(2, 2, 3).double())
    _, after = run_cell(*arguments, initial_state=state, cu_seqlens=torch.tensor([0, 0, 4]), backend=backend)
    for got, expected in zip(after, state):
        assert torch.equal(got[0], expected[0])
    assert after.memory[1].isnan().all()


def test_gradcheck():
    arguments, state = operands(B=1, T=4, G=2, Q=1, N=2, P=2)
    inputs = [tensor.requires_grad_() for tensor in (*arguments, *state)]

    def run(*given):
        y, after = run_cell(*given[:7], initial_state=CellState(*given[7:]), backend="associative")
        return (y, *after)

    assert torch.autograd.gradcheck(run, inputs)


def test_half_precision_computes_in_float32():
    arguments, state = operands()
    low = [tensor.to(torch.bfloat16) for tensor in arguments]
    state = CellState(*(part.to(torch.bfloat16) for part in state))
    y, after = run_cell(*low, initial_state=state, backend="associative")
    assert y.dtype == torch.bfloat16
    assert all(part.dtype == torch.float32 for part in after)
    state = CellState(*(part.double() for part in state))
    exact, _ = shippo_cell(*(tensor.double() for tensor in low), initial_state=state, backend="associative")
    torch.testing.assert_close(y.double(), exact, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mask": torch.ones(2, 9)}, "`mask` has dtype"),
        ({"mask": torch.ones(2, 8, dtype=torch.bool)}, "`mask` has T = 8"),
        ({"mask": torch.ones(2, 9, dtype=torch.bool), "cu_seqlens": torch.tensor([0, 9])}, "`mask` came with `cu_seqlens`"),
        ({"cu_seqlens": torch.tensor([0, 9])}, "expected B = 1"),
        ({"initial_state": CellState(*(torch.zeros(2, 2, 4, 3),) * 3)}, r"`initial_state.memory` has shape \(2, 2, 4, 3\)"),
        (
            {"initial_state": CellState(torch.zeros(2, 2, 5, 3), torch.zeros(2, 1, 5), torch.zeros(2, 2, 3))},
            r"`initial_state.write` has shape \(2, 1, 5\); expected \(2, 2, 5\)",
        ),
        ({"initial_state": torch.zeros(2, 2, 5, 3)}, "`initial_state` is a Tensor; expected a CellState"),
    ],
)
def test_bad_arguments(change, message):
    arguments, _ = operands()
    with pytest.raises(ValueError, match=message):
        shippo_cell(*arguments, **change)


def scaled_case(shape: tuple[int, ...], axes: int, num_weights: int, dtype: torch.dtype):
    """Rows, weights that lack the last `axes` of their axes, and cotangents."""
    random = torch.Generator().manual_seed(0)

    def draw(size: tuple[int, ...]) -> Tensor:
        return torch.randn(size, generator=random, dtype=torch.float64).to(dtype)

    leaves = [draw(shape), *(draw(shape[:-axes]) for _ in range(num_weights))]
    return [leaf.requires_grad_() for leaf in leaves], [draw(shape) for _ in range(num_weights)]


@pytest.mark.parametrize(
    ("shape", "axes"), [((2, 5, 3, 1, 4), 2), ((40, 2), 1), ((3, 11, 2, 5), 2), ((33, 1), 1), ((3, 16), 1)]
)
@pytest.mark.parametrize("num_weights", [1, 2])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.float64, 1e-14)])
def test_scaled_rows_and_their_gradients_are_those_of_the_formula(shape, axes, num_weights, dtype, tolerance):
    leaves, cotangents = scaled_case(shape, axes, num_weights, dtype)
    products = scaled(*leaves)
    assert products[0].grad_fn is not None
    assert "Scaled" in products[0].grad_fn.name()
    doubles = [leaf.detach().double().requires_grad_() for leaf in leaves]
    true = [weight[(...,) + (None,) * axes] * doubles[0] for weight in doubles[1:]]
    found = torch.autograd.grad(products, leaves, cotangents)
    wanted = torch.autograd.grad(true, doubles, [cotangent.double() for cotangent in cotangents])
    for ours, theirs in zip((*products, *found), (*true, *wanted), strict=True):
        assert (ours.double() - theirs).norm() <= tolerance * (1 + theirs.norm())


def test_scaled_rows_leave_to_torch_what_is_torchs():
    leaves, cotangents = scaled_case((6, 3), 1, 2, torch.float64)
    assert torch.autograd.gradgradcheck(scaled, leaves)
    (first, _), expected = scaled(*leaves), leaves[1].unsqueeze(-1) * leaves[0]
    slope = torch.func.grad(lambda x: (scaled(x, leaves[1].detach())[0] * cotangents[0]).sum())(leaves[0].detach())
    torch.testing.assert_close(slope, torch.autograd.grad(expected, leaves[0], cotangents[0], retain_graph=True)[0])
    torch.testing.assert_close(torch.func.vmap(lambda x, weight: scaled(x, weight)[0])(*leaves[:2]), expected)
    torch.testing.assert_close(scaled(leaves[0].mT.contiguous().mT, leaves[1])[0], first)
    wide = torch.randn(2, 17)
    assert torch.equal(scaled(wide, torch.ones(2))[0], wide)
    assert scaled(torch.randn(0, 3), torch.randn(0))[0].shape == (0, 3)

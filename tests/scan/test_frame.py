"""The moving frame of the backward pass: rotations are run in it, everything else is found out and is not."""

import pytest
import torch

from shippo_ssm.scan import fused
from shippo_ssm.scan._frame_kernels import FRAMED

# Three chunks, the last of them short.
LENGTH = 37


def rotations(recurrence):
    """The record with its right actions as rotations to the last digit of its dtype."""
    raw = torch.randn(recurrence.right.shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    turns = torch.linalg.matrix_exp(0.3 * (raw - raw.mT))
    # The exponential is a few roundings away from a rotation; a step of Newton's takes them off.
    turns = turns + 0.5 * turns @ (torch.eye(turns.shape[-1]).double() - turns.mT @ turns)
    return recurrence._replace(right=turns.to(recurrence.right.dtype))


@pytest.fixture
def without_frame(monkeypatch):
    """Runs of the kernels that know no frame."""

    def run(helpers, *arguments, **options):
        make = fused._make_case
        with monkeypatch.context() as patch:
            patch.setattr(fused, "_make_case", lambda *sizes: make(*sizes)._replace(framed=False))
            return helpers.run_with_gradients(*arguments, backend="fused", **options)

    return run


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    "case",
    [{}, {"seen": True, "rank": 2}, {"varying": True, "regime": "strong decay"}, {"regime": "near-unit", "N": 16}],
    ids=str,
)
@pytest.mark.parametrize("width", FRAMED)
def test_rotations_are_run_in_the_frame(helpers, without_frame, width, case, dtype):
    recurrence, state = helpers.make_recurrence(P=width, T=LENGTH, dtype=dtype, **case)
    recurrence = rotations(recurrence)
    double = recurrence.map(lambda tensor: tensor.double())
    expected = helpers.run_with_gradients(double, state.double(), backend="reference")
    got = helpers.run_with_gradients(recurrence, state, backend="fused")
    helpers.assert_agree(got, expected, helpers.TOLERANCE[dtype])
    # By another way to the same gradients: what would be equal to the last bit was not run in a frame.
    direct = without_frame(helpers, recurrence, state)
    assert not torch.equal(got["gradient of value"], direct["gradient of value"])


def stretched(right):
    return 0.9 * right


def one_position(right):
    return torch.where(torch.arange(LENGTH).view(1, -1, 1, 1, 1) == 20, 1.001 * right, right)


def undone(right):
    """Every second position stretches a channel, and the next one takes it back: whole chunks are rotations."""
    factors = torch.ones(LENGTH, right.shape[-1], dtype=right.dtype)
    factors[0:-1:2, 0], factors[1::2, 0] = 2.0, 0.5
    return torch.diag_embed(factors)[None, :, None].expand_as(right).clone()


def of_norm(right):
    """Two channels stretched and shrunk so that |R|^2 stays P."""
    factors = torch.ones(right.shape[-1], dtype=right.dtype)
    factors[0], factors[1] = 1.2, 0.56**0.5
    return right * factors


@pytest.mark.parametrize("change", [stretched, one_position, undone, of_norm], ids=lambda change: change.__name__)
@pytest.mark.parametrize("width", FRAMED)
def test_what_is_no_rotation_is_found_out(helpers, without_frame, width, change):
    recurrence, state = helpers.make_recurrence(P=width, T=LENGTH, regime="near-unit")
    recurrence = rotations(recurrence)
    recurrence = recurrence._replace(right=change(recurrence.right))
    expected = helpers.run_with_gradients(recurrence, state, backend="reference")
    got = helpers.run_with_gradients(recurrence, state, backend="fused")
    helpers.assert_agree(got, expected, 1e-10)
    if change is not one_position:
        # No chunk of these is run in a frame.
        for name, tensor in without_frame(helpers, recurrence, state).items():
            assert torch.equal(tensor, got[name]), name


def test_a_group_that_is_no_rotation_leaves_the_others_in_the_frame(helpers, without_frame):
    recurrence, state = helpers.make_recurrence(P=8, T=LENGTH, G=3, dtype=torch.float32)
    recurrence = rotations(recurrence)
    recurrence.right[:, :, 1] *= 0.9
    got = helpers.run_with_gradients(recurrence, state, backend="fused")["gradient of right"]
    direct = without_frame(helpers, recurrence, state)["gradient of right"]
    assert [torch.equal(got[:, :, g], direct[:, :, g]) for g in range(3)] == [False, True, False]


def test_a_small_stretch_that_is_taken_back_is_found_out(helpers, without_frame):
    """Of norm P to the last digit of float32, and undone by the next position: neither norms nor whole chunks show it."""
    recurrence, state = helpers.make_recurrence(P=8, T=LENGTH, regime="near-unit", dtype=torch.float32)
    stretch = torch.zeros(LENGTH, 8)
    stretch[0:-1:2, 0], stretch[0:-1:2, 1], stretch[1::2, 0], stretch[1::2, 1] = 3e-4, -3e-4, -3e-4, 3e-4
    right = torch.diag_embed(stretch.exp())[None, :, None].expand_as(recurrence.right).clone()
    recurrence = recurrence._replace(right=right)
    got = helpers.run_with_gradients(recurrence, state, backend="fused")
    for name, tensor in without_frame(helpers, recurrence, state).items():
        assert torch.equal(tensor, got[name]), name

"""Segments: summaries against the reference loop, a cut sequence against a whole one."""

import functools

import pytest
import torch

from shippo_ssm.scan import BACKENDS, Recurrence, chunked, fused, reference, segments
from shippo_ssm.scan.algebra import Affine, apply, compose
from tests.shippo_ssm.scan.conftest import REGIMES, VARIANTS

RUNS = pytest.mark.parametrize("run", [fused.run, chunked.run, reference.run], ids=["fused", "chunked", "reference"])


def adjoint(recurrence, start, dy, dlast, bounds=None):
    """dLoss/dH_0 by the reference loop's own backward pass."""
    state = start.clone().requires_grad_()
    y, last = reference.run(recurrence, state, bounds)
    return torch.autograd.grad((y * dy).sum() + (last * dlast).sum(), state)[0]


CASES = [*({"regime": regime, "T": 100} for regime in REGIMES), *VARIANTS, {"T": 0}, {"T": 1}]


@RUNS
@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_summary_is_the_segment(helpers, run, case):
    """A summary applied to a state is the recurrence from that state; its mirror does the same for the adjoint."""
    recurrence, state = helpers.make_recurrence(**case)
    expected = reference.run(recurrence, state)[1]
    dy, dlast = torch.randn(recurrence.value[..., 0, :].shape, dtype=torch.float64), torch.randn_like(state)
    expected_adjoint = adjoint(recurrence, state, dy, dlast)
    for dtype, tolerance in helpers.TOLERANCE.items():
        operands = recurrence.map(functools.partial(torch.Tensor.to, dtype=dtype))
        summary = segments.summarise(run, operands)
        assert helpers.rms_ratio(apply(summary, state.to(dtype)), expected) <= tolerance
        update = segments.summarise_adjoint(run, operands, dy.to(dtype))
        mirrored = Affine(summary.left, None if summary.right is None else summary.right.mT, update)
        assert helpers.rms_ratio(apply(mirrored, dlast.to(dtype)), expected_adjoint) <= tolerance


@RUNS
def test_summaries_of_packed_sequences(helpers, run):
    bounds = torch.tensor([0, 0, 3, 3, 40, 70, 70])
    recurrence, state = helpers.make_recurrence(B=1, T=70, states=6)
    summary = segments.summarise(run, recurrence, bounds)
    torch.testing.assert_close(apply(summary, state), reference.run(recurrence, state, bounds)[1])
    dy, dlast = torch.randn(1, 70, 2, 3, dtype=torch.float64), torch.randn_like(state)
    update = segments.summarise_adjoint(run, recurrence, dy, bounds)
    assert summary.right is not None
    got = apply(Affine(summary.left, summary.right.mT, update), dlast)
    torch.testing.assert_close(got, adjoint(recurrence, state, dy, dlast, bounds))


@RUNS
def test_what_is_forgotten_does_not_reach_a_summary(helpers, run):
    """Forgotten right actions whose product overflows do not reach the summary; a NaN does, as in the recurrence."""
    recurrence, state = helpers.make_recurrence(regime="strong decay", B=1, T=300)
    expected = segments.summarise(run, recurrence)
    old = recurrence.map_time(lambda tensor: tensor.clone())
    assert old.right is not None
    old.right[:, :100] *= 1e30
    summary = segments.summarise(run, old)
    torch.testing.assert_close(apply(summary, state), apply(expected, state))
    torch.testing.assert_close(apply(summary, 2 * state), apply(summary, state))
    for name in ("value", "write", "step", "right"):
        bad = recurrence.map_time(lambda tensor: tensor.clone())
        getattr(bad, name)[:, 10] = torch.nan
        assert apply(segments.summarise(run, bad), state).isnan().all(), name


def test_the_prefix_is_the_composition_law(helpers):
    recurrence, start = helpers.make_recurrence(T=12)
    parts = [segments.summarise(fused.run, recurrence.between(low, low + 3)) for low in range(0, 12, 3)]
    maps = Affine(*(torch.stack(tensors) for tensors in zip(*parts)))
    entering, final = segments.prefix(maps, start)
    whole = functools.reduce(compose, parts)
    torch.testing.assert_close(final, apply(whole, start))
    torch.testing.assert_close(final, reference.run(recurrence, start)[1])
    for k in range(4):
        torch.testing.assert_close(entering[k], reference.run(recurrence.between(0, 3 * k), start)[1])


@pytest.mark.parametrize("num_segments", [1, 3, 40])
@RUNS
@pytest.mark.parametrize("bounds", [None, (0, 0, 3, 3, 26, 37)])
def test_segments_in_place_equal_the_whole(helpers, monkeypatch, run, num_segments, bounds):
    """Outputs, last states and all gradients, with segments that are longer than the sequence is, too."""
    cut = functools.partial(segments.scan_in_place, run, num_segments=num_segments)
    monkeypatch.setitem(BACKENDS, "segmented", lambda recurrence, state, cu_seqlens: cut(recurrence, cu_seqlens, state))
    case = {"T": 37, "seen": True} | ({} if bounds is None else {"B": 1, "states": 5, "cu_seqlens": bounds})
    helpers.check_backend("segmented", **case)


def test_there_is_no_second_derivative(helpers):
    recurrence, state = helpers.make_recurrence(T=8)
    state.requires_grad_()
    y, _ = segments.scan_in_place(reference.run, recurrence, None, state, 2)
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(y.sum(), state, create_graph=True)


def test_a_record_without_right_has_no_right_summary(helpers):
    recurrence, _ = helpers.make_recurrence(T=4, right=False)
    assert isinstance(recurrence, Recurrence)
    assert segments.summarise(fused.run, recurrence).right is None

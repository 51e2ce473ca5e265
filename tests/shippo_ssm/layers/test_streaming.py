"""The streaming memory as a layer: equal to `StreamingMemory`, with gradients of samples and turns."""

import numpy as np
import pytest
import torch

from shippo_ssm.layers import StreamingLayer
from shippo_ssm.projection import Fourier, LagT, LegS, LegT, StreamingMemory


@pytest.mark.parametrize("measure", [LegS(6), LegT(6, 0.5), LagT(6), Fourier(5, 0.5)], ids=repr)
def test_equals_the_streaming_memory(measure):
    rng = np.random.default_rng(0)
    sample, turn = rng.normal(size=(2, 40, 6)), 0.2 * rng.normal(size=(2, 40, 3))
    sample[0, 10:13, 2] = np.nan
    sample[1, 0] = np.nan
    dt = rng.uniform(0.01, 0.03, (2, 40))
    layer = StreamingLayer(measure, 6, rate=50.0)
    for given, turned in ((dt, turn), (None, turn), (None, None)):
        memory = StreamingMemory(measure, 6, rate=50.0, batch_size=2)
        wanted = memory.update(sample, given, turned, return_all_states=True)
        found = layer(torch.tensor(sample), given, None if turned is None else torch.tensor(turned))
        assert np.abs(found.numpy() - wanted).max() < 1e-12
    # No time before the first samples, and gaps longer than the memory.
    late = dt.copy()
    late[0, 0], late[1, :3], late[0, 20], late[1, 30] = 0.0, 0.0, 7.0, 300.0
    memory = StreamingMemory(measure, 6, batch_size=2)
    wanted = memory.update(sample, late, turn, return_all_states=True)
    assert np.abs(layer(torch.tensor(sample), late, torch.tensor(turn)).numpy() - wanted).max() < 1e-12
    single = layer(torch.tensor(sample).float(), dt, torch.tensor(turn).float())
    assert single.dtype == torch.float32
    memory = StreamingMemory(measure, 6, batch_size=2)
    assert np.abs(single.numpy() - memory.update(sample, dt, turn, return_all_states=True)).max() < 1e-5


@pytest.mark.parametrize("measure", [LegS(3), LegT(3, 0.2)], ids=repr)
def test_gradients(measure):
    torch.manual_seed(0)
    sample = torch.randn(1, 5, 3, dtype=torch.float64, requires_grad=True)
    turn = (0.3 * torch.randn(1, 5, 3, dtype=torch.float64)).requires_grad_()
    layer = StreamingLayer(measure, 3)
    assert torch.autograd.gradcheck(lambda f, v: layer(f, [0.01, 0.03, 0.02, 0.0, 0.05], v), (sample, turn))
    # A missing sample gets none.
    missing = torch.tensor([[[1.0], [torch.nan], [2.0]]], requires_grad=True)
    StreamingLayer(measure, 1, rate=50.0)(missing).sum().backward()
    assert missing.grad is not None
    assert missing.grad[0, 1] == 0
    assert missing.grad.isfinite().all()


def test_wrong_use_is_refused():
    layer, sample = StreamingLayer(LegT(4, 1.0), 3), torch.zeros(2, 5, 3)
    for arguments in (
        (sample,),
        (sample[0], 0.1),
        (sample[:, :0], 0.1),
        (sample, -0.1),
        (sample, 0.1, torch.zeros(2, 5, 2)),
        (sample, 0.1, torch.zeros(2, 5, 2, 2)),
    ):
        with pytest.raises(ValueError, match="expected"):
            layer(*arguments)

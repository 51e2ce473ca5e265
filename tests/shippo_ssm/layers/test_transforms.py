"""`torch.func` and forward mode through the layer: equal to backward mode, or refused in words; never a wrong number."""

import pytest
import torch
from torch.autograd import forward_ad
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, vmap

from shippo_ssm.layers import Shippo
from shippo_ssm.scan import resolve_backend

RIGHTS = ("orthogonal", "dissipative", "split", "structured", "dense", "none")


def problem(tools, right, **options):
    """A layer, its parameters, inputs, and a scalar function of the two."""
    layer = tools.make_layer(right, d_model=4, d_state=3, **options)
    u = torch.randn(2, 5, 4, dtype=torch.float64)

    def loss(parameters, u):
        return functional_call(layer, parameters, (u,)).square().sum()

    return layer, {name: parameter.detach() for name, parameter in layer.named_parameters()}, u, loss


@pytest.mark.works_with("torch.func")
@pytest.mark.parametrize("right", RIGHTS)
def test_every_parameter_has_the_same_derivative_both_ways(tools, right):
    """jvp by each parameter alone, and grad, equal backward mode with the compiled kernels."""
    layer, parameters, u, loss = problem(tools, right)
    want = dict(zip(parameters, torch.autograd.grad(layer(u).square().sum(), list(layer.parameters()))))
    slopes = grad(loss)(parameters, u)
    for name, parameter in parameters.items():
        torch.testing.assert_close(slopes[name], want[name], rtol=1e-8, atol=1e-9)
        tangent = torch.randn_like(parameter)
        slope = jvp(lambda p, name=name: loss(parameters | {name: p}, u), (parameter,), (tangent,))[1]
        torch.testing.assert_close(slope, (tangent * want[name]).sum(), rtol=1e-8, atol=1e-9)


@pytest.mark.works_with("torch.func")
@pytest.mark.parametrize("right", ["orthogonal", "dense"])
def test_gradients_per_example_jacobians_and_hessians(tools, right):
    layer, parameters, u, loss = problem(tools, right)
    single = vmap(grad(lambda p, row: loss(p, row[None])), (None, 0))(parameters, u)
    whole = grad(loss)(parameters, u)
    for name in parameters:
        torch.testing.assert_close(single[name].sum(0), whole[name], rtol=1e-8, atol=1e-9)
    torch.testing.assert_close(jacrev(layer)(u), jacfwd(layer)(u), rtol=1e-8, atol=1e-9)

    def by_drift(drift_log):
        return loss(parameters | {"drift_log": drift_log}, u)

    drift_log, step = parameters["drift_log"], 1e-5
    curvature = hessian(by_drift)(drift_log).flatten(0, 1).flatten(1)
    moved = torch.zeros_like(drift_log).flatten()
    moved[1] = step
    moved = moved.view_as(drift_log)
    numeric = (grad(by_drift)(drift_log + moved) - grad(by_drift)(drift_log - moved)).flatten() / (2 * step)
    torch.testing.assert_close(curvature[1], numeric, rtol=1e-5, atol=1e-8)


def test_dual_numbers_of_forward_ad(tools):
    layer, parameters, u, _ = problem(tools, "split")
    tangent = torch.randn_like(layer.drift_log)
    want = jvp(lambda d: functional_call(layer, parameters | {"drift_log": d}, (u,)), (parameters["drift_log"],), (tangent,))[1]
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(parameters["drift_log"], tangent)
        y = functional_call(layer, parameters | {"drift_log": dual}, (u,))
        got = forward_ad.unpack_dual(y).tangent
    assert got is not None
    assert torch.equal(got, want)
    assert want.abs().max() > 1e-3


def test_states_carry_derivatives_too(tools):
    """The state alone is differentiated, over two segments."""
    layer, _, u, _ = problem(tools, "orthogonal")
    state = layer(u, output_state=True)[1].detach()

    def after(memory):
        return layer(u, state._replace(cell=state.cell._replace(memory=memory)))

    memory, tangent = state.cell.memory, torch.randn_like(state.cell.memory)
    slope = jvp(after, (memory,), (tangent,))[1]
    numeric = (after(memory + 1e-5 * tangent) - after(memory - 1e-5 * tangent)) / 2e-5
    torch.testing.assert_close(slope, numeric, rtol=1e-5, atol=1e-7)


def test_kernels_asked_for_by_name_refuse(tools):
    layer, parameters, u, loss = problem(tools, "none", backend="fused")
    for transform in (lambda: grad(loss)(parameters, u), lambda: jvp(layer, (u,), (u,))):
        with pytest.raises(ValueError, match=r"'fused' with a transform of torch\.func; use backend='associative' or 'auto'"):
            transform()
    with forward_ad.dual_level(), pytest.raises(ValueError, match="'fused' with forward-mode differentiation"):
        layer(forward_ad.make_dual(u, u))
    reasons = []
    vmap(lambda value: reasons.append(resolve_backend(value)) or value)(torch.zeros(2, 1, 4, 2, 4))
    grad(lambda value: reasons.append(resolve_backend(value)) or value.sum())(torch.zeros(1, 4, 2, 4))
    assert [str(reason) for reason in reasons] == ["fused", "associative"]
    assert "torch.func" in reasons[1].reason


def test_a_compiled_transform_gives_the_same(tools):
    layer, parameters, u, loss = problem(tools, "orthogonal")
    tangent = torch.randn_like(layer.drift_log)

    def slope(drift_log):
        return jvp(lambda d: loss(parameters | {"drift_log": d}, u), (drift_log,), (tangent,))[1]

    compiled = torch.compile(slope, backend="aot_eager")(parameters["drift_log"])
    torch.testing.assert_close(compiled, slope(parameters["drift_log"]))


def test_ensembles_by_vmap_keep_the_kernels():
    """Stacked parameters of several layers, each as if it were alone."""
    layers = [Shippo(8, d_state=4) for _ in range(3)]
    u = torch.randn(2, 9, 8)
    parameters, _ = torch.func.stack_module_state(layers)  # pyright: ignore[reportArgumentType]
    ys = vmap(lambda p: functional_call(layers[0], p, (u,)))(parameters)
    torch.testing.assert_close(ys, torch.stack([layer(u) for layer in layers]), rtol=1e-5, atol=1e-6)

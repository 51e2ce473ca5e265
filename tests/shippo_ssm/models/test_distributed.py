"""The cell, the layer, the backbone and the models over gloo processes are those of one process, up to the gradients."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

from shippo_ssm.layers import Shippo, ShippoBackbone, lift, shippo_cell
from shippo_ssm.models import GRUMixer, SequenceConfig, SequenceModel
from tests.distributed import Pool, cut
from tests.shippo_ssm.layers.conftest import worst

RIGHTS = ("split", "dense", "none")


@pytest.fixture(scope="module")
def pool():
    pool = Pool()
    yield pool
    pool.close()


def here(group, length, kind="equal"):
    rank = dist.get_rank(group)
    return slice(*cut(length, dist.get_world_size(group), kind)[rank : rank + 2])


def differences(group, module, run, length, kind):
    """Outputs, states and the gradients of all parameters: `run(module, slice, group)` -> (loss terms, what is shared)."""
    own = here(group, length, kind)
    outputs, shared = run(module, slice(0, length), None)
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    weights = torch.randn(outputs.shape, generator=torch.Generator().manual_seed(3), dtype=outputs.dtype)
    loss = (outputs * weights).sum() + sum(tensor.square().sum() for tensor in shared)
    expected = torch.autograd.grad(loss, parameters, materialize_grads=True)
    got, got_shared = run(module, own, group)
    loss = (got * weights[:, own]).sum()
    if dist.get_rank(group) == 0:
        loss = loss + sum(tensor.square().sum() for tensor in got_shared)
    gradients = torch.autograd.grad(loss, parameters, materialize_grads=True)
    for gradient in gradients:
        dist.all_reduce(gradient, group=group)
    scale = max(float(gradient.abs().max()) for gradient in expected)
    return max(
        worst(got, outputs[:, own]),
        max(worst(one, two) for one, two in zip(got_shared, shared)),
        max(worst(one, two) for one, two in zip(gradients, expected)) / scale,
    )


def leaves(state):
    """The tensors of a nested state."""
    if isinstance(state, torch.Tensor):
        return [state]
    return [leaf for part in state if part is not None for leaf in leaves(part)]


def make(right, **options):
    settings = {"d_state": 8, "dt_min": 0.1, "dt_max": 1.0, "conv_init": "random", "learnable_initial_state": True} | options
    model = ShippoBackbone(8, 2, right=right, dtype=torch.float64, **settings)
    for name, parameter in model.named_parameters():
        if "proj" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    return model


def check_backbone(group):
    found = {}
    for right in RIGHTS:
        options = {"controller_conv": 3} if right == "dense" else {}
        for length, kind in ((1, "equal"), (7, "empty middle"), (64, "empty first"), (300, "equal"), (1025, "empty last")):
            torch.manual_seed(1)
            model = make(right, **options)
            u = torch.randn(2, length, 8, dtype=torch.float64)
            mask = torch.rand(2, length) > 0.4
            bounds, dt = torch.tensor([0, length // 3, length // 3, length]), torch.rand(2, length, dtype=torch.float64)

            def plain(model, own, group, u=u):
                y, state = model(u[:, own], group=group, output_state=True)
                return y, leaves(state)

            def padded(model, own, group, u=u, mask=mask, dt=dt):
                y, state = model(u[:, own], attention_mask=mask[:, own], dt=dt[:, own], group=group, output_state=True)
                return y, leaves(state)

            def packed(model, own, group, u=u, bounds=bounds, dt=dt):
                y, state = model(u[:1, own], cu_seqlens=bounds, dt=dt[:1, own], group=group, output_state=True)
                return y, leaves(state)

            def continued(model, own, group, u=u):
                _, state = model(u.flip(1), output_state=True)
                y, state = model(u[:, own], state, group=group, output_state=True)
                return y, leaves(state)

            # Long parts add time, not ways to go wrong.
            for run in (plain, packed) if length >= 300 else (plain, padded, packed, continued):
                found[right, length, kind, run.__name__] = differences(group, model, run, length, kind)
    return found


def test_the_backbone(pool):
    for found in pool.run(check_backbone, 3):
        assert max(found.values()) < 1e-10, found


def check_checkpointed(group):
    """Blocks that are computed again in the backward pass exchange their messages again."""
    config = SequenceConfig(vocab_size=11, d_model=8, n_layers=2, d_state=8)
    model = SequenceModel(config).double()
    ids = torch.randint(11, (2, 30))

    def run(model, own, group):
        return model(ids[:, own], group=group), [torch.zeros(())]

    plain = differences(group, model, run, 30, "equal")
    model.layers.recompute = True
    return max(plain, differences(group, model.train(), run, 30, "empty middle"))


def test_the_sequence_model_with_activation_checkpointing(pool):
    assert max(pool.run(check_checkpointed, 3)) < 1e-9


def check_cell(group):
    sizes = (2, 9, 3)
    value, write, read = torch.randn(*sizes, 4), torch.randn(*sizes, 5), torch.randn(*sizes, 5)
    step, mix, drift = torch.rand(*sizes), torch.rand(*sizes), -torch.rand(3, 5).double()
    mask = torch.rand(2, 9) > 0.5
    own = here(group, 9)

    def call(span, mix=mix, **options):
        named = {"value": value, "write": write, "read": read, "step": step, "mix": mix}
        operands: dict[str, Any] = {name: tensor[:, span].double() for name, tensor in named.items()}
        return shippo_cell(**operands, drift=drift, mask=mask[:, span], output_final_state=True, **options)

    y, state = call(slice(0, 9))
    got, got_state = call(own, group=group)
    try:
        call(own, mix if dist.get_rank(group) else mix[:1], group=group)
    except ValueError as error:
        return worst(got, y[:, own]), worst(got_state, state), str(error)
    return "ran"


def test_the_cell(pool):
    for on_y, on_state, said in pool.run(check_cell, 3):
        assert max(on_y, on_state) < 1e-12
        assert "`mix`" in said


def check_hf(group, kind):
    from shippo_ssm.integrations.huggingface import ShippoConfig, ShippoForCausalLM

    sizes: dict[str, Any] = {"vocab_size": 17, "hidden_size": 8, "num_hidden_layers": 2, "state_size": 8}
    config = ShippoConfig(**sizes)
    model = ShippoForCausalLM(config).double().train()
    ids = torch.randint(17, (2, 40))
    labels = torch.where(torch.rand(2, 40) > 0.2, ids, -100)
    mask = (torch.arange(40) >= torch.tensor([[3], [0]])).long()
    expected = model(ids, attention_mask=mask, labels=labels)
    gradients = torch.autograd.grad(expected.loss, list(model.parameters()))
    own = here(group, 40, kind)
    got = model(ids[:, own], attention_mask=mask[:, own], labels=labels[:, own], group=group)
    own_gradients = torch.autograd.grad(got.loss, list(model.parameters()))
    for gradient in own_gradients:
        dist.all_reduce(gradient, group=group)
    with torch.no_grad():
        whole = model.eval()(ids, use_cache=True).past_key_values
        parts = model(ids[:, own], use_cache=True, group=group).past_key_values
        steps = [model(ids[:, :1], past_key_values=cache, use_cache=True).logits for cache in (whole, parts)]
    return (
        abs(got.loss.item() - expected.loss.item()),
        worst(got.logits, expected.logits[:, own]),
        worst(own_gradients, gradients),
        worst(*steps),
        parts.get_seq_length() - whole.get_seq_length(),
    )


@pytest.mark.parametrize(("size", "kind"), [(1, "equal"), (3, "empty middle")])
def test_the_hugging_face_model(pool, size, kind):
    """Loss, logits and all gradients; and every rank can decode from the cache that the ranks made together."""
    for on_loss, on_logits, on_gradients, on_step, on_length in pool.run(check_hf, size, kind):
        # The library computes the loss in float32.
        assert on_loss < 1e-5
        assert max(on_logits, on_gradients, on_step) < 1e-9
        assert on_length == 0


def refusals(group):
    """Errors of layers and models, alike on every rank."""
    first = dist.get_rank(group) == 0
    u = torch.randn(1, 3, 8)
    calls = {
        "u": lambda: Shippo(8, d_state=4)(u if first else u[..., :4], group=group),
        "parameters": lambda: Shippo(8, d_state=4 if first else 8)(u, group=group),
        "cu_seqlens": lambda: Shippo(8, d_state=4)(u, cu_seqlens=torch.tensor([0, 3]), group=group),
        "B": lambda: SequenceModel(SequenceConfig(d_model=8, n_layers=1, d_state=4))(u if first else u[:0], group=group),
        "gru": lambda: GRUMixer(8)(u, group=group),
        "lift": lambda: lift("legs", d_model=8, d_state=4)(u, group=group),
    }
    said = {}
    for name, call in calls.items():
        try:
            call()
        except ValueError as error:
            said[name] = str(error)
    return said


def test_layers_refuse_on_every_rank(pool):
    for said in pool.run(refusals, 2):
        assert "`u` is shape" in said["u"]
        assert "the parameters' shapes" in said["parameters"]
        assert "`cu_seqlens` ends at 3; expected 6" in said["cu_seqlens"]
        assert "`u` has B" in said["B"]
        assert "GRUMixer: `group` came" in said["gru"]
        assert "LiftedMemory: `group` came" in said["lift"]

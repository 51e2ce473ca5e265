"""End to end: a training step of the Transport-MQAR models, decoding at long context, and the speed of the data.

Data path: the paper's geometry (d_model 128, four layers) on batches of Transport-MQAR events [B, T, 7]. A training step is
forward, cross-entropy at the queries, backward and AdamW; beside it stand its own matrix products alone, on operands of the
same sizes and layouts. Decoding feeds one token after another to `model.step`: a SHiPPO
model from a state of fixed size, the Transformer from a cache of the context's length, filled with random keys and values
instead of a prefill, and kept in place so that a token costs no copy of it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.gate import check
from benchmarks.timer import first_call, interleave
from shippo_lab.experiments.mqar.scoring import query_loss

if TYPE_CHECKING:
    from shippo_ssm.models import SequenceModel

# Logits and gradients of four layers in float32.
_TOLERANCE = 1e-3


def make_model(name: str, **changes: Any) -> SequenceModel:
    """A model of the paper's comparison by name, from a fixed seed, with `changes` to its configuration."""
    from shippo_lab.experiments.mqar.experiment import PAPER, rows
    from shippo_lab.experiments.mqar.model import EventEmbedding
    from shippo_lab.tasks.mqar import TransportMQAR
    from shippo_ssm.models import SequenceModel

    config = replace(next(row.geometry for row in rows(PAPER) if row.label == name), **changes)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return SequenceModel(config, embedding=EventEmbedding(TransportMQAR(), config.d_model))


def check_model(name: str, model: Any, events: Any) -> float:
    """Largest RMS error ratio of loss and gradients against the same model in float64 on the reference scan."""

    def results(model: Any) -> dict[str, Tensor]:
        loss = query_loss(model, events)
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        return {"loss": loss.detach(), "gradient": torch.cat([gradient.flatten() for gradient in gradients])}

    double = make_model(name, n_layers=model.config.n_layers, backend="reference").double()
    double.load_state_dict(model.state_dict())
    return max(check(name, results(model), results(double), _TOLERANCE).values())


def training(names: list[str], *, batch: int, length: int, rounds: int, budget: float, n_layers: int = 4) -> dict[str, Any]:
    """Seconds of a training step and tokens per second of each model, taken in turn on the same batch.

    Args:
        names: models of the paper's comparison.
        batch: B.
        length: T.
        rounds: steps of each model at most.
        budget: seconds per model.
        n_layers: layers of each model.
    """
    from shippo_lab.harness.malloc import keep_freed_memory
    from shippo_lab.tasks.mqar import TransportMQAR

    # As a worker of a run does.
    keep_freed_memory()
    task = TransportMQAR(length=length)
    events = task.batch(range(batch))
    small = TransportMQAR(length=min(length, 48)).batch(range(2))
    records: dict[str, Any] = {}
    steps: dict[str, Callable[[], None]] = {}
    for name in names:
        model = make_model(name, n_layers=n_layers)
        error = check_model(name, model, small)
        steps[name] = partial(train_once, model, torch.optim.AdamW(model.parameters(), lr=1e-4), events)
        products = Products()
        with products:
            _, seconds = first_call(steps[name])
        # A second one: AdamW's moments are new in the first, and the heap has still to grow.
        steps[name]()
        steps[f"{name}, products"] = products.replay
        parameters = sum(parameter.numel() for parameter in model.parameters())
        records[name] = {"parameters": parameters, "error": error, "first_call": seconds}
    timings = interleave(steps, rounds=rounds, budget=budget)
    for name, record in records.items():
        timing, products = timings[name], timings[f"{name}, products"]
        record |= timing.as_dict() | {"tokens_per_second": batch * length / timing.median}
        record |= {"products": products.as_dict(), "over_products": timing.median / products.median}
    result: dict[str, Any] = {"batch": batch, "length": length, "models": records, "threads": torch.get_num_threads()}
    generate = {"generator": lambda: task.batch(range(batch))}
    timing = interleave(generate, rounds=max(rounds, 3), budget=budget)["generator"]
    result["generator"] = timing.as_dict() | {"tokens_per_second": batch * length / timing.median}
    return result


class Products(TorchDispatchMode):
    """Notes the matrix products of what runs inside it, and can do them again by themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.pairs: list[tuple[Tensor, Tensor]] = []
        self._kept: dict[tuple[Any, ...], Tensor] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
            self.pairs.append((self._like(args[-2]), self._like(args[-1])))
        return func(*args, **(kwargs or {}))

    def _like(self, tensor: Tensor) -> Tensor:
        """Numbers of our own in the same layout; one tensor serves all that are laid out alike."""
        key = (tuple(tensor.shape), tensor.stride(), tensor.dtype)
        if key not in self._kept:
            extent = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))
            self._kept[key] = torch.randn(extent, dtype=tensor.dtype).as_strided(tensor.shape, tensor.stride())
        return self._kept[key]

    def replay(self) -> None:
        """All products, in their order."""
        for a, b in self.pairs:
            torch.mm(a, b)


def train_once(model: SequenceModel, optimizer: torch.optim.Optimizer, events: Any) -> None:
    """One step of training."""
    optimizer.zero_grad(set_to_none=True)
    query_loss(model, events).backward()
    optimizer.step()


class CachedTransformer:
    """Decodes with a Transformer whose key-value cache is allocated once, for `context` earlier tokens and `room` more."""

    def __init__(self, model: Any, batch: int, context: int, room: int) -> None:
        from shippo_ssm.layers.attention import rotate

        self.model, self.rotate, self.used = model, rotate, context
        attention = model.layers[0].mixer
        size = (len(model.layers), 2, batch, attention.n_heads, context + room, attention.d_head)
        self.cache = torch.randn(size, generator=torch.Generator().manual_seed(0))

    def step(self, tokens: Tensor) -> Tensor:
        """Logits of one more token [B, 7]."""
        model, now = self.model, self.used
        place = torch.full((len(tokens), 1), now)
        u = model.in_proj(model.embedding(tokens))
        for layer, (keys, values) in zip(model.layers, self.cache):
            attention = layer.mixer
            qkv = attention.qkv_proj(layer.norm(u)).unflatten(-1, (3, attention.n_heads, 1, attention.d_head))
            q, k, v = qkv.unbind(1)
            keys[:, :, now : now + 1], values[:, :, now : now + 1] = self.rotate(k, place), v
            y = F.scaled_dot_product_attention(self.rotate(q, place), keys[:, :, : now + 1], values[:, :, : now + 1])
            u = u + attention.out_proj(y.flatten(1))
            u = u + layer.mlp(layer.mlp_norm(u))
        self.used += 1
        return model.head(model.out_proj(model.norm(u)))


def check_decoding(model: Any, decode: Callable[[Tensor], Tensor], tokens: Tensor) -> float:
    """RMS error ratio of token-by-token logits against the whole sequence at once, tokens [B, T, 7]."""
    logits = torch.stack([decode(token) for token in tokens.unbind(1)], dim=1)
    return check("decoding", {"y": logits}, {"y": model(tokens)}, _TOLERANCE)["y"]


class Recurrent:
    """Decodes with a model whose state has a fixed size."""

    def __init__(self, model: Any, batch: int) -> None:
        self.model, self.states = model, model.init_state(batch)

    def step(self, tokens: Tensor) -> Tensor:
        """Logits of one more token [B, 7]."""
        logits, self.states = self.model.step(tokens, self.states, in_place=True)
        return logits


@torch.no_grad()
def decoding(contexts: list[int], *, batch: int = 1, tokens: int = 8, rounds: int, budget: float) -> dict[str, Any]:
    """Tokens per second of each model at each context length.

    Args:
        contexts: tokens before the first decoded one.
        batch: sequences decoded side by side.
        tokens: decoded in one timed call.
        rounds: timed calls of each at most.
        budget: seconds for each.
    """
    from shippo_lab.tasks.mqar import TransportMQAR

    feed = TransportMQAR(length=max(tokens, 16)).batch(range(batch)).tokens
    models: dict[str, Any] = {name: make_model(name).eval() for name in ("StructGen-Split", "No-right", "Transformer")}
    errors, decoders, calls = {}, {}, {}
    for name, model in models.items():
        fresh = CachedTransformer(model, batch, 0, feed.shape[1]) if name == "Transformer" else Recurrent(model, batch)
        errors[name] = check_decoding(model, fresh.step, feed)
        for context in contexts:
            if name == "Transformer":
                decoder: Any = CachedTransformer(model, batch, context, tokens)
            else:
                # The state after any context is this one in size and kind: the cost of a token cannot depend on it.
                decoder = fresh
            decoders[name, context] = decoder
            calls[f"{name} {context}"] = partial(_decode, decoder, context, feed[:, :tokens])
    for call in calls.values():
        call()
    timings = interleave(calls, rounds=rounds, budget=budget)
    records = []
    for name, context in decoders:
        timing = timings[f"{name} {context}"]
        record = {"model": name, "context": context, "tokens_per_second": batch * tokens / timing.median}
        records.append(record | {"seconds": timing.as_dict()})
    return {"batch": batch, "threads": torch.get_num_threads(), "errors": errors, "rates": records}


def _decode(decoder: Any, context: int, feed: Tensor) -> None:
    if isinstance(decoder, CachedTransformer):
        decoder.used = context
    for token in feed.unbind(1):
        decoder.step(token)

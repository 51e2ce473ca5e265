"""Decoding against the bytes that it has to read: `python -m benchmarks.decode [--out FILE]`, ratios of one run on two threads.

Data path: the StructGen-Split model of the MQAR comparison, the Transformer of its width with a filled cache, the same model in
bfloat16 and in int8, and a Hugging Face model of its size decode in turn, 32 tokens at a time, so that whatever disturbs the
machine disturbs all.
A line of the table is a ratio of two medians, or a count; its targets are in `TARGETS`. The time to read the weights is half
of that of a copy of a buffer of their size.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.models import CachedTransformer, Recurrent, make_model
from benchmarks.timer import interleave

THREADS = 2
DEFAULT_OUT = Path("runs", "decode.json")


class Target(NamedTuple):
    """A line of the table: name, required value and goal; `more` where larger is better."""

    name: str
    required: float
    goal: float
    more: bool = False


TARGETS = {
    "weights": Target("batch 1: token over the time to read the weights", 4.5, 2.5),
    "calls": Target("ATen calls of a token", 160, 90),
    "batch_16": Target("batch 16: tokens/s over the Transformer at context 4,096", 3, 6, more=True),
    "context": Target("batch 1: tokens/s over the Transformer at context 65,536", 8, 15, more=True),
    "generate": Target("Hugging Face generate over the bare step loop", 1.3, 1.1),
    "bfloat16": Target("bfloat16 over float32 weights, batch 1", 0.7, 0.55),
    "int8": Target("int8 over float32 weights, batch 1", 1.0, 0.7),
}


def count_calls(step: Callable[[], Any]) -> int:
    """ATen calls of one call of `step`, those inside others included, as the profiler sees them."""
    from torch.profiler import ProfilerActivity, profile

    step()
    with profile(activities=[ProfilerActivity.CPU]) as trace:
        step()
    return sum(event.name.startswith("aten::") for event in trace.events() or ())


def weight_bytes(model: torch.nn.Module) -> int:
    """Bytes of the matrices that a token reads: everything but embeddings."""
    tables = (torch.nn.Embedding, torch.nn.EmbeddingBag)
    skipped = {id(p) for module in model.modules() if isinstance(module, tables) for p in module.parameters()}
    return sum(p.numel() * p.element_size() for p in model.parameters() if id(p) not in skipped)


def language_model(config: Any) -> Any:
    """A Hugging Face model with the layers of a `SequenceModel`, 256 tokens, random weights."""
    from dataclasses import fields

    from shippo_ssm.integrations.huggingface import LIBRARY_NAMES, ShippoConfig, ShippoForCausalLM
    from shippo_ssm.layers import ShippoSpec

    options = {LIBRARY_NAMES.get(f.name, f.name): getattr(config, f.name) for f in fields(ShippoSpec)}
    sizes = {"vocab_size": 256, "hidden_size": config.d_model, "num_hidden_layers": config.n_layers}
    torch.manual_seed(0)
    return ShippoForCausalLM(ShippoConfig(**sizes, **options)).eval()


def bare_loop(model: Any, ids: Tensor, num_tokens: int) -> Tensor:
    """Greedy decoding of a Hugging Face model without its `generate`: prefill, then embedding, layers, norm and head."""
    from shippo_ssm.layers.mixer import IN_PLACE, WHOLE

    inner, added = model.model, []
    states, u = None, inner.embed_tokens(ids)
    for _ in range(num_tokens):
        u, states = inner.layers.run(u, states, WHOLE if states is None else IN_PLACE)
        token = model.lm_head(inner.norm(u[:, -1])).argmax(-1)
        added.append(token)
        u = inner.embed_tokens(token).unsqueeze(1)
    return torch.stack(added, 1)


def quantised(name: str) -> Any:
    """The model with int8 weights; `None` where the library for them is not there."""
    model = make_model(name)
    try:
        from torchao.quantization import Int8WeightOnlyConfig, quantize_
    except ImportError:
        return None
    quantize_(model, Int8WeightOnlyConfig())
    return model.eval()


def error(model: Any, exact: Any, tokens: Tensor) -> float:
    """RMS ratio of the difference of logits after some tokens, stepped."""

    def last(model: Any) -> Tensor:
        decoder = Recurrent(model, tokens.shape[0])
        logits = [decoder.step(token) for token in tokens.unbind(1)]
        return logits[-1].float()

    theirs = last(exact)
    return float((last(model) - theirs).norm() / theirs.norm())


def measure(*, tokens: int = 32, rounds: int = 15, budget: float = 6.0, num_generated: int = 64) -> dict[str, Any]:
    """All lines of the table and the times behind them."""
    name = "StructGen-Split"
    model, transformer = make_model(name).eval(), make_model("Transformer").eval()
    half, whole, speaker = make_model(name).bfloat16().eval(), quantised(name), language_model(model.config)
    with torch.inference_mode():
        return _measure(model, transformer, half, whole, speaker, tokens, rounds, budget, num_generated)


def _measure(
    model: Any,
    transformer: Any,
    half: Any,
    whole: Any,
    speaker: Any,
    tokens: int,
    rounds: int,
    budget: float,
    num_generated: int,
) -> dict[str, Any]:
    from shippo_lab.tasks.mqar import TransportMQAR

    feed = {batch: TransportMQAR(length=max(16, tokens)).batch(range(batch)).tokens for batch in (1, 4, 16)}

    def decode(decoder: Any, batch: int, context: int = 0) -> None:
        if isinstance(decoder, CachedTransformer):
            decoder.used = context
        for token in feed[batch][:, :tokens].unbind(1):
            decoder.step(token)

    calls: dict[str, Callable[[], Any]] = {f"ours {b}": partial(decode, Recurrent(model, b), b) for b in (1, 4, 16)}
    for batch, context in ((1, 4096), (1, 65536), (16, 4096)):
        decoder = CachedTransformer(transformer, batch, context, tokens)
        calls[f"transformer {batch} {context}"] = partial(decode, decoder, batch, context)
    calls["bfloat16 1"] = partial(decode, Recurrent(half, 1), 1)
    if whole is not None:
        calls["int8 1"] = partial(decode, Recurrent(whole, 1), 1)
    numbers = torch.ones(weight_bytes(model) // 4)
    target = torch.empty_like(numbers)
    calls["copy"] = partial(target.copy_, numbers)
    # Prompt reading: one scan, then steps.
    prompt = TransportMQAR(length=512).batch(range(1)).tokens
    calls["prefill 512"] = partial(model, prompt, output_state=True)
    ids = torch.randint(0, 256, (1, 16), generator=torch.Generator().manual_seed(0))
    options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": num_generated, "do_sample": False}
    calls["generate"] = partial(speaker.generate, ids, **options)
    calls["bare loop"] = partial(bare_loop, speaker, ids, num_generated)
    same = torch.equal(calls["generate"]()[:, 16:], calls["bare loop"]())
    for call in calls.values():
        call()
    times = {key: timing.as_dict() for key, timing in interleave(calls, rounds=rounds, budget=budget).items()}
    median = {key: timing["median"] for key, timing in times.items()}
    decoder = Recurrent(model, 1)
    lines: dict[str, float] = {
        "weights": median["ours 1"] / tokens / (median["copy"] / 2),
        "calls": count_calls(lambda: decoder.step(feed[1][:, 0])),
        "batch_16": median["transformer 16 4096"] / median["ours 16"],
        "context": median["transformer 1 65536"] / median["ours 1"],
        "generate": median["generate"] / median["bare loop"],
        "bfloat16": median["bfloat16 1"] / median["ours 1"],
    }
    errors = {"bfloat16": error(half, model, feed[1])}
    if whole is not None:
        lines["int8"] = median["int8 1"] / median["ours 1"]
        errors["int8"] = error(whole, model, feed[1])
    rates = {
        key: int(key.split()[1]) * tokens / value for key, value in median.items() if key[0] in "otbi" and key[-1].isdigit()
    }
    return {
        "threads": torch.get_num_threads(),
        "bytes": weight_bytes(model),
        "lines": lines,
        "errors": errors,
        "generate_is_greedy": same,
        "tokens_per_second": rates,
        "prefill_tokens_per_second": 512 / median["prefill 512"],
        "seconds": times,
    }


def table(run: dict[str, Any]) -> str:
    """The lines of a run with their targets, as Markdown."""
    rows = ["| what | measured | required | goal | status |", "|---|---|---|---|---|"]
    for key, target in TARGETS.items():
        if key not in run["lines"]:
            continue
        value = run["lines"][key]
        sign = -1 if target.more else 1
        met = {"goal": sign * value <= sign * target.goal, "required": sign * value <= sign * target.required, "missed": True}
        status = next(name for name, holds in met.items() if holds)
        rows.append(f"| {target.name} | {value:.3g} | {target.required:g} | {target.goal:g} | {status} |")
    rows += [f"| logits of {key} against float32, RMS ratio | {value:.1e} | | | |" for key, value in run["errors"].items()]
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=DEFAULT_OUT, help="where the JSON goes")
    parser.add_argument("--smoke", action="store_true", help="one round, to see that it runs")
    options = parser.parse_args()
    torch.set_num_threads(THREADS)
    effort = {"tokens": 2, "rounds": 1, "budget": 0.1, "num_generated": 4} if options.smoke else {}
    run = measure(**effort)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(run, indent=2) + "\n")
    sys.stdout.write(table(run) + "\n")
    for key, rate in run["tokens_per_second"].items():
        sys.stdout.write(f"{key}: {rate:,.0f} tokens/s\n")


if __name__ == "__main__":
    main()

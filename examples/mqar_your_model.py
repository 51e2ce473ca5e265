"""Evaluate your own model on Transport-MQAR: any callable from tokens [B, T, 7] to logits [B, T, 4, 31].

The task interleaves BIND(key, value), OP(id) and QUERY(key) events; an operation multiplies every stored value of
F_31^4 by an invertible matrix. `YourModel` below stands for a model of yours: an embedding, some sequence layer, four
classifiers. It is trained briefly on a small instance and scored beside a predictor that knows exactly the coordinates
no operation has touched: a model above that line has learned to apply operations.

    python examples/mqar_your_model.py                     # an nn.GRU in the middle
    python examples/mqar_your_model.py --layer shippo --steps 200    # the same model with SHiPPO layers
"""

import argparse

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from shippo_lab.tasks.mqar import TransportMQAR
from shippo_ssm import ShippoBackbone


class YourModel(nn.Module):
    """tokens [B, T, 7] (kind, key, operation, four values) -> logits [B, T, 4, 31]."""

    def __init__(self, task: TransportMQAR, layer: str, width: int = 64) -> None:
        super().__init__()
        # An event that has no key, operation or value holds one more than the largest index.
        sizes = (3, task.num_keys + 1, task.num_operations + 1, 32, 32, 32, 32)
        self.tables = nn.ModuleList(nn.Embedding(size, width) for size in sizes)
        self.layer = nn.GRU(width, width, batch_first=True) if layer == "gru" else ShippoBackbone(width, n_layers=2, d_state=16)
        self.heads = nn.Linear(width, 4 * 31)

    def forward(self, tokens):
        features = sum(table(tokens[..., place]) for place, table in enumerate(self.tables))
        features = self.layer(features)
        if isinstance(features, tuple):
            features = features[0]
        return self.heads(features).unflatten(-1, (4, 31))


def train(model: nn.Module, task: TransportMQAR, num_steps: int, batch_size: int = 32) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(num_steps):
        events = task.batch(range(step * batch_size, (step + 1) * batch_size), split="train")
        logits = model(events.tokens)
        # Where nothing is asked, the target is -100, which cross_entropy ignores.
        loss = cross_entropy(logits.flatten(0, -2), events.target.flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % max(1, num_steps // 10) == 0:
            print(f"step {step:4d}  loss {loss.item():.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--layer", choices=("gru", "shippo"), default="gru")
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--smoke", action="store_true", help="a few steps on short examples")
    options = parser.parse_args()
    torch.manual_seed(0)
    task = TransportMQAR(length=16 if options.smoke else 48, num_keys=4, num_active=2, p_bind=0.3, p_op=0.2, p_query=0.5)
    model = YourModel(task, options.layer)
    train(model, task, 3 if options.smoke else options.steps)

    scores = task.evaluate(model.eval(), num_examples=32 if options.smoke else 320)
    print(f"\n{scores.num_queries} queries; exact: all four coordinates right")
    print(f"{'operations since binding':>24} {'queries':>8} {'exact':>7} {'untouched known':>16}")
    for line in scores.bins:
        if line["num_queries"]:
            edge, count = int(line["from_operations"]), int(line["num_queries"])
            print(f"{edge:>22}..  {count:>7} {line['exact']:7.3f} {line['untouched_exact']:16.3f}")
    print(f"{'all':>24} {scores.num_queries:>8} {scores.exact:7.3f} {scores.untouched_exact:16.3f}")


if __name__ == "__main__":
    main()

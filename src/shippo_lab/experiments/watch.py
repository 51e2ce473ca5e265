"""A watch on a wrist it has never seen.

Claim: Invariants of a memory in the body frame and of one driven by the gyroscope classify movements in any mounting.
Protocol: smartwatch recordings of `seglearn`, windows of 2 s, folds of unseen subjects; as recorded and worn differently
Time: about 7 minutes on one free CPU core; the committed run shared its machine and took 93 minutes

`docs/results/watch.md` has the protocol, how the settings were chosen, and what is published for these data.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shippo_lab.harness import experiment as lab
from shippo_lab.tasks import watch
from shippo_ssm.layers import Shippo

Predict = Callable[[np.ndarray], np.ndarray]
FOLDS = ((1, 2), (3, 4), (5, 6), (7, 8), (9, 10))
OURS, OTHERS = ("invariants", "forest-invariants", "committee"), ("forest", "gru", "cnn", "cnn-turned")
ROWS = {
    "forest": ("Random forest on statistics", "statistics"),
    "gru": ("GRU", "samples"),
    "cnn": ("1-D CNN", "samples"),
    "cnn-turned": ("1-D CNN, trained on random rotations", "samples"),
    "none": ("SHiPPO, no right action", "samples"),
    "learned": ("SHiPPO, learned right action", "samples"),
    "gyroscope": ("SHiPPO, right action given by the gyroscope", "memory"),
    "forest-invariants": ("Random forest on invariants of both memories", "gram"),
    "invariants": ("SHiPPO, network on invariants of both memories", "invariants"),
    "committee": ("SHiPPO, three such networks voting", "invariants"),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class WatchConfig(lab.RowConfig):
    """A row: a classifier of windows."""

    features: Literal["statistics", "samples", "memory", "gram", "invariants"] = "samples"
    steps: int = 240
    """Training steps per fold."""
    num_seeds: int = 3
    batch: int = 128
    learning_rate: float = 4e-3
    weight_decay: float = 0.05
    width: int = 48
    folds: int = 5
    networks: int = 1
    """Networks that vote."""
    trees: int = 100


SMOKE = WatchConfig(steps=2, num_seeds=1, batch=16, folds=1, trees=3)


def rows(base: WatchConfig) -> tuple[WatchConfig, ...]:
    """All classifiers."""
    found = (replace(base, name=name, label=label, features=kind) for name, (label, kind) in ROWS.items())
    return tuple(replace(row, networks=3) if row.name == "committee" else row for row in found)


class Convolutions(nn.Module):
    """Three convolutions of stride 2 over time, then mean and maximum: [B, T, F] -> [B, 7]."""

    def __init__(self, features: int, width: int) -> None:
        super().__init__()
        self.scale = nn.BatchNorm1d(features, affine=False)
        sizes = ((features, width), (width, width), (width, width))
        parts = ((nn.Conv1d(a, b, 5, 2, 2), nn.BatchNorm1d(b), nn.GELU(), nn.Dropout(0.3)) for a, b in sizes)
        self.net = nn.Sequential(*(layer for part in parts for layer in part))
        self.head = nn.Linear(2 * width, watch.CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.net(self.scale(x.transpose(1, 2)))
        return self.head(torch.cat([hidden.mean(-1), hidden.amax(-1)], -1))


class Recurrent(nn.Module):
    """A recurrent layer between two linear maps, its mean over time at the end: [B, T, F] -> [B, 7]."""

    def __init__(self, features: int, width: int, right: str | None) -> None:
        super().__init__()
        self.scale = nn.BatchNorm1d(features, affine=False)
        self.embed = nn.Linear(features, width)
        gru = right is None
        self.layer = nn.GRU(width, width, batch_first=True) if gru else Shippo(width, d_state=16, expand=1, right=right)
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Dropout(0.3), nn.Linear(width, watch.CLASSES))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.embed(self.scale(x.transpose(1, 2)).transpose(1, 2))
        found = self.layer(hidden)
        return self.head((hidden + (found[0] if isinstance(found, tuple) else found)).mean(1))


def build(config: WatchConfig, features: int) -> nn.Module:
    """The network of a row."""
    if config.features == "memory":
        layers = nn.BatchNorm1d(features, affine=False), nn.Linear(features, 256), nn.GELU(), nn.Dropout(0.3), nn.Linear(256, 7)
        return nn.Sequential(nn.Flatten(), *layers)
    if config.name in ("gru", "none", "learned"):
        return Recurrent(features, config.width, {"gru": None, "none": "none", "learned": "orthogonal"}[config.name])
    return Convolutions(features, config.width)


def prepare(kind: str, values: np.ndarray) -> np.ndarray:
    """The features of windows [M, 100, 6] that a row of this kind sees."""
    if kind in ("samples", "invariants"):
        series = values if kind == "samples" else watch.invariants(values)[0]
        # Means over four samples: 25 steps.
        return series.reshape(len(values), -1, 4, series.shape[-1]).mean(2)
    if kind == "memory":
        return watch.memories(values, 16, True).reshape(len(values), -1)
    return watch.statistics(values) if kind == "statistics" else watch.gram(values, 8)


@lru_cache(maxsize=2)
def data(kind: str, seed: int, hop: int) -> tuple[np.ndarray, ...]:
    """Features, labels and subjects for training, then the same as recorded, then features of the turned tests."""
    training, test = watch.windows(hop // 2), watch.windows(hop)
    found = [prepare(kind, part.values).astype(np.float32) for part in (training, test, watch.turned(test, 100 + seed))]
    return found[0], training.label, training.subject, found[1], test.label, test.subject, found[2]


def turn_all(x: Tensor) -> Tensor:
    """Each window [B, T, 6] mounted by a random rotation."""
    frame, upper = torch.linalg.qr(torch.randn(len(x), 3, 3))
    frame = frame * upper.diagonal(dim1=-2, dim2=-1).sign().unsqueeze(-2)
    frame = frame * torch.linalg.det(frame)[:, None, None]
    return (x.unflatten(-1, (2, 3)) @ frame[:, None]).flatten(-2)


def fit_network(config: WatchConfig, x: np.ndarray, label: np.ndarray, seed: int) -> tuple[Predict, int]:
    """Train a network; its votes [M, 7] as a function, and its number of parameters."""
    torch.manual_seed(seed)
    inputs, targets = torch.from_numpy(x), torch.from_numpy(label)
    model = build(config, inputs[0].numel() if config.features == "memory" else inputs.shape[-1])
    signs = None
    if config.features == "invariants":
        signs = torch.tensor(watch.invariants(np.zeros((1, watch.LENGTH, 6)))[1]).float()
    optimiser = torch.optim.AdamW(model.parameters(), config.learning_rate, weight_decay=config.weight_decay)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, config.learning_rate, total_steps=max(config.steps, 2))
    order = torch.cat([torch.randperm(len(x)) for _ in range(1 + config.steps * config.batch // len(x))])
    for step in range(config.steps):
        rows = order[step * config.batch : (step + 1) * config.batch]
        batch = inputs[rows]
        if config.name == "cnn-turned":
            batch = turn_all(batch)
        if signs is not None:
            batch = torch.where(torch.rand(len(rows), 1, 1) < 0.5, batch * signs, batch)
        loss = F.cross_entropy(model(batch), targets[rows], label_smoothing=0.1)
        optimiser.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        schedule.step()
    model.eval()

    @torch.no_grad()
    def vote(test: np.ndarray) -> np.ndarray:
        found = torch.from_numpy(test)
        votes = model(found).softmax(-1)
        return (votes if signs is None else votes + model(found * signs).softmax(-1)).numpy()

    return vote, sum(weight.numel() for weight in model.parameters())


def fit(config: WatchConfig, x: np.ndarray, label: np.ndarray, seed: int) -> tuple[Predict, int]:
    """Train the forest or the networks of a row; their common prediction, and their parameters: a forest has none to count."""
    if config.name.startswith("forest"):
        from sklearn.ensemble import RandomForestClassifier

        return RandomForestClassifier(config.trees, random_state=seed).fit(x, label).predict, 0
    found = [fit_network(config, x, label, seed + 1000 * index) for index in range(config.networks)]
    return lambda test: np.sum([vote(test) for vote, _ in found], axis=0).argmax(-1), sum(size for _, size in found)


def train(config: WatchConfig, seeds: tuple[int, ...], session: lab.Session) -> lab.RowResult:
    """Train and test one seed of a row, fold by fold; accuracies are over all test windows."""
    (seed,) = seeds
    hop = watch.LENGTH if config.folds == len(FOLDS) else 1000
    x, label, subject, recorded, target, whose, turned = data(config.features, seed, hop)
    right: dict[str, list[np.ndarray]] = {"recorded": [], "turned": []}
    size = 0
    for index, fold in enumerate(FOLDS[: config.folds]):
        keep, test = ~np.isin(subject, fold), np.isin(whose, fold)
        predict, size = fit(config, x[keep], label[keep], seed)
        for name, features in (("recorded", recorded), ("turned", turned)):
            right[name].append(predict(features[test]) == target[test])
        session.report(index + 1, config.folds, **{name: float(np.concatenate(found).mean()) for name, found in right.items()})
    metrics = {name: [float(np.concatenate(found).mean())] for name, found in right.items()}
    return lab.RowResult(metrics, notes={"parameters": size})


def judge(result: lab.Result) -> dict[str, lab.Verdict]:
    """Worn differently: 0.82. As recorded: within 0.02 of the best other row."""
    rows = result.rows
    others = max((rows[name].mean("recorded") for name in OTHERS if name in rows), default=1.0)
    text = "at least 0.82 worn differently, and within 0.02 of the best other row as recorded"
    holds = {name: row.mean("turned") >= 0.82 and row.mean("recorded") >= others - 0.02 for name, row in rows.items()}
    return {name: lab.Verdict(holds[name], text) for name in rows if name in OURS}


EXPERIMENT = lab.Experiment(
    name="watch",
    **lab.described(__doc__),
    presets={"full": partial(rows, WatchConfig()), "smoke": partial(rows, SMOKE)},
    train=train,
    columns=(lab.accuracy("recorded", "as recorded"), lab.accuracy("turned", "worn differently")),
    judge=judge,
)

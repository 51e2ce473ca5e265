"""What predictors of known skill score in Transport-MQAR: upper bounds to compare models with.

Each predictor knows some coordinates of an answer and guesses the others. A memory that transports nothing loses a
bound value within some twenty events; to know more a model has to carry operations out, one, two or three in a row.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from shippo_lab.tasks.mqar import Events, TransportMQAR, expected_right

PREDICTORS: dict[str, tuple[str, Callable[[Events], Tensor]]] = {
    "untouched": ("untouched coordinates", lambda events: events.untouched),
    "unmixed": ("and multiples of them", lambda events: events.unmixed),
    **{
        f"within_{count}": (
            f"untouched, and all after at most {number}",
            lambda events, count=count: events.untouched | (events.operations_since <= count).unsqueeze(-1),
        )
        for count, number in ((1, "one operation"), (2, "two operations"), (3, "three operations"))
    },
}
"""Name -> words, and which coordinates [B, T, 4] are known at the queries of some events."""
TOKENS = 65_536


def ceilings(task: TransportMQAR, num_examples: int) -> dict[str, float]:
    """Expected accuracies of every predictor on the evaluation split: `within_2_exact_512: number`, and so on."""
    sums = torch.zeros(len(PREDICTORS), 2, dtype=torch.float64)
    num_queries, size = 0, max(1, TOKENS // task.length)
    for start in range(0, num_examples, size):
        events = task.batch(range(start, min(num_examples, start + size)), split="eval")
        num_queries += int(events.asked.sum())
        for row, (_, knows) in zip(sums, PREDICTORS.values()):
            right = expected_right(knows(events)[events.asked])
            row += torch.stack([right.mean(-1).sum(), right.prod(-1).sum()])
    return {
        f"{name}_{accuracy}_{task.length}": float(total / num_queries)
        for name, row in zip(PREDICTORS, sums)
        for accuracy, total in zip(("coordinate", "exact"), row)
    }

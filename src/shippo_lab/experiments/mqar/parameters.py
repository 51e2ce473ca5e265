"""The parameters of the paper's Transport-MQAR models ("Controls and realization geometry"), ours beside the paper's.

The paper gives totals; how they divide is our reading. Embedding: one table of 3 event types, 256 keys, 13 operations and
4 x 31 values; heads: 4 x 31 classes; input and output projections d_model x d_model.
"""

import torch

from shippo_lab.experiments.mqar.experiment import MODELS, rows
from shippo_lab.experiments.mqar.model import build_model
from shippo_lab.experiments.paper import paper_numbers
from shippo_ssm.models import count_parameters

PAPER_CONFIGS = {row.label: row.geometry for row in rows() if row.name in MODELS}
"""Label of a model -> its geometry."""


def parameter_counts() -> dict[str, tuple[float, float]]:
    """Label of a model -> its parameters and the paper's, in millions; ours are counted on models without storage."""
    found, paper = {}, paper_numbers()["mqar-parameters"].rows
    for row in rows():
        if row.name in MODELS:
            with torch.device("meta"):
                model = build_model(row, 0)
            # The embedding's row of zeros, for what an event does not have, is never trained.
            count = count_parameters(model) - row.d_model
            found[row.label] = count / 1e6, paper[row.name]["parameters"][0] / 1e6
    return found

"""What a set of right actions can do: its finest common block form, the banks of that form, and the audit of a model."""

from __future__ import annotations

from shippo_ssm.collapse.audit import ActionRow, collapse_of_model, realised_actions
from shippo_ssm.collapse.banks import Banks, bank
from shippo_ssm.collapse.reduction import Reduction, collapse
from shippo_ssm.collapse.rounding import Representation, exact_right, nearest_representation

__all__ = [
    "ActionRow", "Banks", "Reduction", "Representation", "bank", "collapse", "collapse_of_model", "exact_right",
    "nearest_representation", "realised_actions",
]  # fmt: skip

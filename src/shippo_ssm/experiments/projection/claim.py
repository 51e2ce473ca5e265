"""Transported projection (paper: tab:transported-projection): predict the final coefficients of a transported LegS memory.

Claim. A memory with right transport predicts transported coefficients better than one with a rank-4 source alone;
in the paper learned transport, which may choose its own channel coordinates, best of all. Auxiliary evidence: no paired
intervention.

Protocol. d = N = K = 16, length 256, generators from seed 321 (8 skew, 8 nilpotent), coefficients in +-0.15, epsilon
0.05; fixed left operator, source rank 4; AdamW 3e-4, weight decay 1e-2, clipping 1, 20,000 steps of 32 fresh
sequences, 5 seeds; the last step, evaluated on 256 sequences.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from shippo_ssm.experiments.paper import paper_tables
from shippo_ssm.experiments.projection.model import Projection, ProjectionConfig
from shippo_ssm.lab.experiment import Column, Experiment, FinishedRow, Highlight, Result, RowResult, Session, Verdict, by_row
from shippo_ssm.lab.stacked import train_stack

SMOKE = ProjectionConfig(steps=20, num_seeds=2, batch=8, eval_batches=2, eval_every=10, length=32)


def rows(base: ProjectionConfig | None = None) -> tuple[ProjectionConfig, ...]:
    """The three rows of the paper's table."""
    base = base or ProjectionConfig()
    return (
        replace(base, name="no-right", label="No-right r = 4"),
        replace(base, name="learned-true", label="SHiPPO learned R (true start)", right="learned"),
        replace(base, name="oracle", label="SHiPPO oracle R", right="oracle"),
    )


def train(config: ProjectionConfig, seeds: tuple[int, ...], session: Session) -> RowResult:
    """Train one row for all its seeds."""
    return train_stack(Projection(config, seeds), config, seeds, session)


@by_row
def judge(row: FinishedRow, result: Result) -> Verdict | None:
    """Both transported rows below no-right, as in the paper."""
    blind = result.rows.get("no-right")
    if row.name == "no-right":
        return Verdict(3e-4 < row.mean("nmse") < 3e-3, "stays near the error of ignoring the transport (1.2e-3)")
    return None if blind is None else Verdict(row.mean("nmse") < blind.mean("nmse"), "below no-right")


EXPERIMENT = Experiment(
    name="projection",
    title="Transported projection",
    claim="A memory with right transport predicts transported coefficients that a rank-4 source cannot.",
    protocol="d = N = K = 16, length 256, fixed left operator; AdamW 3e-4, 20,000 steps of 32 sequences, 5 seeds, last step",
    tables=paper_tables("projection"),
    wall_time="30 minutes on two cores",
    presets={"full": rows, "smoke": partial(rows, SMOKE)},
    train=train,
    columns=(
        Column(key="nmse", label="Eval NMSE"),
        Column(key="r2", label="Eval R^2", better="higher", format=".4f"),
    ),
    judge=judge,
    # Seeds go through a step one after another here, so that a row costs as much in two parts; six parts keep two cores busy.
    stack=3,
    highlights=(
        Highlight("no-right", "nmse", "transported coefficients, rank-4 source: error"),
        Highlight("learned-true", "nmse", "transported coefficients, learned right action: error"),
    ),
)

"""A memory that only writes and one that also transports, trained on the same task: three rows of `paired`."""

from dataclasses import replace
from pathlib import Path

from rich.console import Console

from shippo_lab.experiments.paired import experiment as paired
from shippo_lab.experiments.paired.figure import falling_errors
from shippo_lab.experiments.paired.matrix_state import PairedConfig
from shippo_lab.harness import experiment as lab
from shippo_lab.harness.progress import clock
from shippo_lab.harness.runner import run
from shippo_lab.harness.tables import show

# Points of the curves in the picture.
EVALUATIONS = 30
ROWS = ("no-right-r8", "learned-zero", "selective")


@lab.by_row
def judge(row: lab.FinishedRow, result: lab.Result) -> lab.Verdict:
    """At this budget: blind without a right action, nine tenths of the difference found with one, none of it under R -> I."""
    pair = row.mean("pair_nmse")
    if row.name.startswith("no-right"):
        return lab.Verdict(abs(pair - 1) < 1e-5, "cannot tell ab from ba")
    back = row.mean("identity_pair_nmse")
    return lab.Verdict(pair < 0.1 and abs(back - 1) < 1e-5, "tells ab from ba; R -> I makes it blind again")


def experiment(steps: int, preset: str = "demo") -> lab.Experiment:
    """The demonstration as an experiment of its own, so that it runs and prints like the others."""
    base = PairedConfig(steps=steps, num_seeds=2, eval_every=max(1, steps // EVALUATIONS))
    return replace(
        paired.EXPERIMENT,
        name="demo",
        title="Write ab, write ba: which memory can tell?",
        presets={preset: lambda: tuple(row for row in paired.rows(base) if row.name in ROWS)},
        judge=judge,
        figure=None,
    )


def main(out: Path, *, console: Console, quick: bool = False, wide: bool = False) -> lab.Result:
    """Train, print the table beside the paper's numbers, save the picture, say what to try next."""
    time = "a few seconds" if quick else "about a minute"
    console.print(
        f"[bold]SHiPPO in {time}.[/] A vector is written into memory; two operations act on it, a then b or b then a. "
        "Operations write nothing. A memory that only writes, however much, answers the same for ab and ba: "
        "its error on the difference is 1. A memory with a right action, H_t = L_t H_{t-1} R_t + U_t, tells them apart.\n"
    )
    demo = experiment(60, "quick") if quick else experiment(3000)
    result = run(demo, out=out, jobs=1, force=True)
    show(console, demo, result, wide=wide)
    for row in result.rows.values():
        if "identity_pair_nmse" in row.metrics:
            before, after = row.mean("pair_nmse"), row.mean("identity_pair_nmse")
            console.print(f"{row.label}: pair error {before:.2g}; the same weights with R_t -> I: {after:.6f}", highlight=False)
    picture = out / "demo.png"
    try:
        falling_errors(result, picture)
        drawn = f"picture: {picture}"
    except ModuleNotFoundError:
        drawn = "no picture: matplotlib is not installed; `pip install 'shippo-ssm[plot]'` brings it"
    console.print(f"\ntrained in {clock(result.seconds)}; {drawn}", markup=False, highlight=False, soft_wrap=True)
    console.print(
        "next:  [bold]shippo table paired[/]  the full protocol beside the paper's numbers\n"
        "       [bold]shippo run paired[/]    the same, trained here\n"
        "       [bold]shippo verify[/]        the paper's propositions, executed\n"
        "       [bold]shippo list[/]          everything else"
    )
    return result

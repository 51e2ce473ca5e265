"""This checkout against an earlier commit, in one run: `shippo bench --against REV`.

Data path: REV is checked out into a temporary worktree -> `cases` runs in a process of its own with our measuring code and one
of the two packages on its path, turn by turn, ours and theirs -> for each case and pass the median over the turns, and their
ratio. A case that a package cannot run, because it is younger, says so and has no ratio.
"""

from __future__ import annotations

import contextlib
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PASSES = ("forward", "both")
TURNS = 3
# Without a right action, with a split one, with a dense one.
MODELS = ("No-right", "StructGen-Split", "DirectGen-SingleExp")


@dataclass(frozen=True, kw_only=True, slots=True)
class Calls:
    """The passes of a case; a training step has one."""

    both: Callable[[], Any]
    forward: Callable[[], Any] | None = None
    check: Callable[[], Any] | None = None
    """Raises where the result is wrong."""


def scan_case(short: bool = False, **sizes: int) -> Calls:
    """One scan, on bfloat16 operands if `short`."""
    import torch

    from benchmarks.halves import rounded
    from benchmarks.peers import peers
    from benchmarks.problem import Shape, make_inputs
    from benchmarks.sweeps import check_corner

    (fused,) = (peer for peer in peers() if peer.name == "shippo fused")
    inputs, cotangent = make_inputs(Shape(**sizes))
    if short:
        candidate = fused.prepare(rounded(inputs, torch.bfloat16), cotangent.bfloat16())
        check = None
    else:
        candidate, check = fused.prepare(inputs, cotangent), partial(check_corner, fused, inputs, cotangent)
    assert candidate.both is not None
    return Calls(forward=candidate.forward, both=candidate.both, check=check)


def action_case(kind: str, width: int) -> Calls:
    """Right actions of one width, the same number of entries at every width."""
    import torch

    from benchmarks.expm import value_and_gradients
    from shippo_ssm import actions

    count, generator = 2**21 // width**2, torch.Generator().manual_seed(0)
    cotangent = torch.randn(count, width, width, generator=generator)
    if kind == "expm":
        function, inputs = actions.expm, (0.3 * torch.randn(count, width, width, generator=generator),)
    else:
        function = getattr(actions, kind)(width)
        coords = 0.3 * torch.randn(count, function.num_coordinates, generator=generator)
        inputs = (coords, torch.rand(count, generator=generator))

    def forward() -> Any:
        with torch.no_grad():
            return function(*inputs)

    return Calls(forward=forward, both=lambda: value_and_gradients(function, inputs, cotangent))


def training_case(name: str, length: int = 512) -> Calls:
    """A training step on Transport-MQAR at the paper's geometry."""
    import torch

    from benchmarks.models import make_model, train_once
    from shippo_lab.tasks.mqar import TransportMQAR

    model = make_model(name)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    return Calls(both=partial(train_once, model, optimizer, TransportMQAR(length=length).batch(range(16))))


CASES: dict[str, Callable[[], Calls]] = {
    **{f"scan, P = {width}": partial(scan_case, groups=256 // width, width=width) for width in (1, 2, 4, 8, 16)},
    "scan, P = 4, one sequence": partial(scan_case, batch=1, length=8192),
    "scan, P = 4, bfloat16 operands": partial(scan_case, short=True),
    **{f"expm, P = {width}": partial(action_case, "expm", width) for width in (4, 8, 16)},
    "Orthogonal, P = 4": partial(action_case, "Orthogonal", 4),
    "Dissipative, P = 4": partial(action_case, "Dissipative", 4),
    **{f"training step, {name}": partial(training_case, name) for name in MODELS},
}


def cases(*, rounds: int, budget: float, checked: bool, source: str, names: list[str] | None = None) -> dict[str, Any]:
    """Seconds of every case with the package in `source`, one case after another.

    Args:
        rounds: calls of each pass at most.
        budget: seconds of each pass.
        checked: whether results are held against the reference first.
        source: the folder that `shippo_ssm` must come from.
        names: cases to take; all by default.
    """
    import shippo_ssm
    from benchmarks.timer import interleave

    if not Path(shippo_ssm.__file__).is_relative_to(source):
        raise RuntimeError(f"`shippo_ssm` comes from {shippo_ssm.__file__}; expected {source}")
    found: dict[str, Any] = {}
    for name in names or CASES:
        try:
            calls = CASES[name]()
            if checked and calls.check is not None:
                calls.check()
            passes = {key: call for key in PASSES if (call := getattr(calls, key)) is not None}
            for call in passes.values():
                call()
        # An earlier commit may lack what a case asks for, in whatever way.
        except Exception as error:
            found[name] = {"failed": f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"}
            continue
        found[name] = {key: timing.median for key, timing in interleave(passes, rounds=rounds, budget=budget).items()}
    return found


def git(*arguments: str) -> str:
    """What git says in this checkout. Raises `ValueError` where there is no git or no repository."""
    try:
        done = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise ValueError("bench: `against` needs git, and there is none on the path; install it") from None
    if done.returncode != 0:
        raise ValueError(done.stderr.strip() or f"git {arguments[0]} failed")
    return done.stdout.strip()


def resolve(rev: str) -> str:
    """The commit that `rev` names."""
    try:
        inside = git("rev-parse", "--show-toplevel")
    except ValueError as error:
        raise error if "needs git" in str(error) else ValueError(_no_checkout()) from None
    if Path(inside).resolve() != ROOT:
        raise ValueError(_no_checkout())
    try:
        return git("rev-parse", "--verify", "--quiet", f"{rev}^{{commit}}")
    except ValueError:
        raise ValueError(
            f"bench: `against` is {rev!r}, which this repository does not have; expected a commit, branch or tag; "
            "`git log --oneline` lists commits"
        ) from None


def _no_checkout() -> str:
    return "bench: `against` needs a git checkout, and the sources here are none; clone the repository and run it there"


@contextlib.contextmanager
def worktree(commit: str) -> Iterator[Path]:
    """A temporary checkout of `commit`."""
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder, "tree")
        git("worktree", "add", "--detach", "--quiet", str(place), commit)
        try:
            yield place
        finally:
            git("worktree", "remove", "--force", str(place))


def combine(turns: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Seconds and ratios, ours over theirs, of every case and pass from the turns of "ours" and "theirs".

    Example:
        >>> combine({"ours": [{"x": {"both": 1.0}}], "theirs": [{"x": {"both": 4.0}}]})["x"]["both"]["ratio"]
        0.25
    """
    rows: dict[str, Any] = {}
    for name, first in turns["ours"][0].items():
        rows[name] = {}
        failed = {who: turn[name]["failed"] for who, list_ in turns.items() for turn in list_ if "failed" in turn[name]}
        if failed:
            rows[name] = {"failed": failed}
            continue
        for key in first:
            seconds = {who: [turn[name][key] for turn in list_] for who, list_ in turns.items()}
            ours, theirs = (median(seconds[who]) for who in ("ours", "theirs"))
            rows[name][key] = {"ours": ours, "theirs": theirs, "ratio": ours / theirs, "turns": seconds}
    return rows


def measure(rev: str, spawn: Callable[..., dict[str, Any]], *, quick: bool = True, threads: int = 2) -> dict[str, Any]:
    """Every case of this checkout and of `rev`, turn by turn.

    Args:
        rev: the commit to compare with.
        spawn: runs a section in a process (`run.spawn`).
        quick: fewer calls.
        threads: of each process.
    """
    effort = {"rounds": 7, "budget": 1.0} if quick else {"rounds": 11, "budget": 2.0}
    commit = resolve(rev)
    turns: dict[str, list[dict[str, Any]]] = {"ours": [], "theirs": []}
    with worktree(commit) as place:
        sources = {"ours": ROOT / "src", "theirs": place / "src"}
        for turn in range(TURNS):
            # Who goes first changes, so that a machine that grows slower favours nobody.
            for who in ("ours", "theirs") if turn % 2 == 0 else ("theirs", "ours"):
                arguments = effort | {"checked": turn == 0, "source": str(sources[who])}
                turns[who].append(spawn("cases", threads, arguments, source=sources[who]))
    return {"rev": rev, "commit": commit[:12], "threads": threads, "cases": combine(turns)}

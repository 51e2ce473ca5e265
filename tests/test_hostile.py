"""Hostile inputs in processes of their own: no signal, and no exception but a refusal."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests import hostile

# How many inputs each group has to refuse at least: a group that answers everything checks nothing.
REFUSED = {"states": 50, "bounds": 50, "compiled": 20, "weights": 50, "tokens": 100, "exported": 60}


@pytest.mark.parametrize("group", hostile.GROUPS)
def test_hostile_inputs_end_in_no_signal(group):
    # glibc fills freed memory, so that reading it shows.
    environment = os.environ | {"MALLOC_PERTURB_": "165", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.hostile", group],
        cwd=Path(__file__).parents[1],
        env=environment,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    lines = done.stdout.splitlines() or [""]
    if done.returncode < 0:
        pytest.fail(f"{signal.Signals(-done.returncode).name} at {lines[-1]}\n{done.stderr[-2000:]}")
    wrong = [line for line in lines if " WRONG " in line]
    assert done.returncode == 0, "\n".join(wrong) or done.stderr[-2000:]
    counted = re.match(r"(\d+) answered, (\d+) refused, 0 wrong", lines[-1])
    assert counted, lines[-1]
    assert int(counted[2]) >= REFUSED[group]

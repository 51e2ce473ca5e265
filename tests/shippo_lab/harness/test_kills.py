"""Twenty random kills: a run that is resumed after each ends with the numbers of an undisturbed one, and leaves no halves."""

import json
import subprocess
import sys
from pathlib import Path

from tests.shippo_lab.harness.killed import KILLS, KINDS


def test_twenty_random_kills_change_no_number(tmp_path):
    script = Path(__file__).with_name("killed.py")
    output = subprocess.run([sys.executable, str(script), str(tmp_path)], capture_output=True, text=True, check=True).stdout
    outcomes = [json.loads(line) for line in output.splitlines()]
    assert len(outcomes) == 2
    for outcome in outcomes:
        assert outcome["equal"]
        assert sum(outcome["kinds"].values()) == KILLS
        assert not [name for name in outcome["left"] if ".tmp" in name or "checkpoints" in name]
    # Kills fell into training and into writes, else nothing was tried.
    assert set(outcomes[0]["kinds"]) | set(outcomes[1]["kinds"]) == set(KINDS)

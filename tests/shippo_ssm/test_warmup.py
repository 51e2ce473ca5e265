"""`warmup` fills the cache: a later process compiles nothing, and says nothing."""

import os
import subprocess
import sys

SCRIPT = """
import sys
from shippo_ssm import warmup
warmup(16, d_state=8, training=False, decoding=False)
print("torch._dynamo" in sys.modules)
"""


def test_a_later_process_finds_every_kernel(tmp_path):
    """Kernels that allocate memory too; and no call imports torch's compiler, which takes a second."""
    environment = os.environ | {"SHIPPO_CACHE_DIR": str(tmp_path / "cache")}
    environment.pop("SHIPPO_QUIET", None)
    said = []
    for _ in range(2):
        command = [sys.executable, "-c", SCRIPT]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=250, check=True)
        assert done.stdout.strip() == "False"
        said.append(done.stderr.count("compiling CPU kernels"))
    assert said == [1, 0]

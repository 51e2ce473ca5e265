"""Read an endless stream with constant memory, save the state, be killed, and go on as if nothing had happened.

The model reads one token after another. Its state has a fixed size, so memory does not grow, and it is all that a later process
needs: every 50 tokens it goes to a file, together with the position. Run it, stop it at any time, run it again:

    python examples/stream.py --state session.safetensors

    python examples/stream.py --tokens 300                                              # in one go
    python examples/stream.py --tokens 300 --state s.safetensors --stop-after 120       # killed in between
    python examples/stream.py --tokens 300 --state s.safetensors                        # the same last line
"""

from __future__ import annotations

import argparse
import itertools
import os
from pathlib import Path

import torch

from shippo_ssm.layers import states
from shippo_ssm.models import SequenceConfig, SequenceModel


def stream(start: int):
    """An endless stream of tokens that can be entered anywhere; a socket or a log file in real life."""
    for position in itertools.count(start):
        yield position, (position * position + 3 * position) % 97


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=1000, help="end after so many tokens of the stream")
    parser.add_argument("--state", type=Path, help="file of the session; read at the start if it is there")
    parser.add_argument("--stop-after", type=int, help="be killed after so many tokens, without a chance to save")
    options = parser.parse_args()

    torch.manual_seed(0)
    model = SequenceModel(SequenceConfig(d_model=32, n_layers=2, d_state=8, vocab_size=97)).eval()
    # What a session is: where it stands, what it has seen, and a running number that depends on all of it.
    session = (torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.float64), model.init_state(1))
    if options.state and options.state.exists():
        session = states.load(options.state, like=session)
        print(f"goes on at token {int(session[0])}")
    position, surprise, memory = session
    for place, token in stream(int(position)):
        if place == options.tokens:
            break
        if place == options.stop_after:
            print(f"killed at token {place}", flush=True)
            os._exit(0)
        logits, memory = model.step(torch.tensor([token]), memory, in_place=True)
        surprise += logits.double().logsumexp(-1)
        position += 1
        if options.state and (place + 1) % 50 == 0:
            states.save((position, surprise, memory), options.state)
    print(f"{int(position)} tokens, state of {states.num_bytes(memory):,} bytes, sum {surprise.item():.6f}")


if __name__ == "__main__":
    main()

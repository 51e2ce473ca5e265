"""One of two processes that train a small stack together; `test_routes.py` starts them. Usage: ranks.py RANK FOLDER.

Every rank takes its half of the batch. What comes out, per route, is the largest difference between its gradients and those
of one process with the whole batch, and what decoding gives.
"""

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from shippo_ssm import ShippoBackbone

WORLD = 2


def make() -> ShippoBackbone:
    torch.manual_seed(0)
    return ShippoBackbone(8, 2, d_state=4)


def gradients(model: torch.nn.Module, u: torch.Tensor) -> list[torch.Tensor]:
    model(u).square().mean().backward()
    found = []
    for parameter in model.parameters():
        assert parameter.grad is not None
        found.append(parameter.grad.full_tensor() if isinstance(parameter.grad, DTensor) else parameter.grad)
    return found


def main(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder / 'store'}", rank=rank, world_size=WORLD)
    whole = torch.randn(4, 6, 8, generator=torch.Generator().manual_seed(1))
    mine, alone = whole.chunk(WORLD)[rank], make()
    want = gradients(alone, whole)

    sharded = make()
    for block in sharded.layers:
        fully_shard(block, mesh=dist.init_device_mesh("cpu", (WORLD,)))
    fully_shard(sharded, mesh=dist.init_device_mesh("cpu", (WORLD,)))
    result = {}
    for route, model in (("DDP", DistributedDataParallel(make())), ("FSDP2", sharded)):
        got = gradients(model, mine)
        result[route] = max((a - b).abs().max().item() for a, b in zip(got, want, strict=True))
    result["split"] = any(isinstance(parameter, DTensor) for parameter in sharded.parameters())
    with torch.no_grad():
        y, state = sharded(mine, output_state=True)
        expected, expected_state = alone(mine, output_state=True)
        result["outputs"] = (y - expected).abs().max().item()
        # Weights are whole only inside a call, so that a step has to be one.
        result["steps"] = 0.0
        for position in mine[:, :2].unbind(1):
            after, state = sharded.step(position, state)
            wanted, expected_state = alone.step(position, expected_state)
            result["steps"] = max(result["steps"], (after - wanted).abs().max().item())
    (folder / f"{rank}.json").write_text(json.dumps(result))
    # A rank that leaves early takes its sockets from under the threads of the other.
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))

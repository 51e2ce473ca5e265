"""Train a language model over several processes or machines: parts of a sequence and parts of a batch on different ranks.

The ranks form a mesh of data x sequence: the ranks of a row hold contiguous parts of the same sequences, and rows hold
different sequences. Parameters, their gradients and the optimizer's state are sharded over all ranks (FSDP2). Every few steps
`torch.distributed.checkpoint` writes all of it; a run that is started again, also on another number of ranks, goes on from the
last checkpoint. The text is the language reference that comes with Python, one token per character.

    python examples/train_distributed.py --smoke
    torchrun --nproc-per-node 4 --max-restarts 2 examples/train_distributed.py --sequence 2 --length 4096
"""

import argparse
import contextlib
import os
import signal
import time
import warnings
from pathlib import Path
from pydoc_data.topics import topics

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.rendezvous import rendezvous
from torch.nn.functional import cross_entropy

from shippo_ssm.layers import weight_decay_groups
from shippo_ssm.models import SequenceConfig, SequenceModel


def corpus() -> torch.Tensor:
    """The reference as character codes [num_characters], all of them below 128."""
    text = "\n".join(topics[name] for name in sorted(topics))
    return torch.tensor(list(text.encode("ascii", "ignore")))


def batch(text: torch.Tensor, step: int, options: argparse.Namespace) -> torch.Tensor:
    """Windows [batch, length + 1] of one step: a function of the step alone, so that a resumed run sees what it would have."""
    rng = torch.Generator().manual_seed(step)
    starts = torch.randint(len(text) - options.length - 1, (options.batch, 1), generator=rng)
    return text[starts + torch.arange(options.length + 1)]


def last_checkpoint(folder: Path) -> Path | None:
    """The newest checkpoint that was written to its end; torch writes `.metadata` last."""
    done = [path for path in folder.glob("step-*") if (path / ".metadata").exists()]
    return max(done, key=lambda path: int(path.name.removeprefix("step-")), default=None)


def train(options: argparse.Namespace) -> float:
    """All steps that are left; returns the last loss."""
    world = dist.get_world_size()
    mesh = init_device_mesh("cpu", (world // options.sequence, options.sequence), mesh_dim_names=("data", "sequence"))
    group, row, column = mesh["sequence"].get_group(), mesh.get_local_rank("data"), mesh.get_local_rank("sequence")
    torch.manual_seed(0)
    model = SequenceModel(
        SequenceConfig(vocab_size=128, d_model=options.width, n_layers=options.layers, d_state=16, group_width=4)
    )
    model.layers.recompute = True
    shards = init_device_mesh("cpu", (world,))
    for block in model.layers:
        fully_shard(block, mesh=shards)
    fully_shard(model, mesh=shards)
    optimizer = torch.optim.AdamW(weight_decay_groups(model, 0.01), lr=options.rate)

    done, kept = 0, last_checkpoint(options.out)
    if kept is not None:
        model_state, optimizer_state = get_state_dict(model, optimizer)
        content = {"model": model_state, "optimizer": optimizer_state, "step": 0}
        dcp.load(content, checkpoint_id=kept)
        set_state_dict(model, optimizer, model_state_dict=content["model"], optim_state_dict=content["optimizer"])
        done = content["step"]
        say(f"resumed after step {done} from {kept}")

    # The first step compiles kernels and is left out of the speed.
    text, loss, began, first = corpus(), torch.zeros(()), time.monotonic(), done + 1
    lower = torch.autocast("cpu", torch.bfloat16) if options.bf16 else contextlib.nullcontext()
    # This rank's rows and positions; parts may have any lengths.
    rows = slice(row * options.batch // mesh.size(0), (row + 1) * options.batch // mesh.size(0))
    part = slice(column * options.length // options.sequence, (column + 1) * options.length // options.sequence)
    for step in range(done + 1, options.steps + 1):
        windows = batch(text, step, options)[rows]
        with lower:
            logits = model(windows[:, :-1][:, part], group=group)
        total = cross_entropy(logits.flatten(0, 1).float(), windows[:, 1:][:, part].flatten(), reduction="sum")
        loss = total / (options.batch * options.length)
        # The loss is the sum over all ranks; FSDP takes the mean of their gradients.
        (loss * world).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        die(step, options)
        loss = loss.detach().clone()
        dist.all_reduce(loss)
        if step % options.save_every == 0 or step == options.steps:
            model_state, optimizer_state = get_state_dict(model, optimizer)
            content = {"model": model_state, "optimizer": optimizer_state, "step": step}
            dcp.save(content, checkpoint_id=options.out / f"step-{step}")
        if step == first:
            began = time.monotonic()
        speed = (step - first) * options.batch * options.length / max(1e-9, time.monotonic() - began)
        if step % max(1, options.steps // 10) == 0 or step == options.steps:
            say(f"step {step:4d}  loss {loss.item():.6f} nats per character  {speed:.0f} tokens per second")
    return loss.item()


def die(step: int, options: argparse.Namespace) -> None:
    """For trying the restart out: the last rank ends itself after step `--kill-at`, once per folder."""
    mark = options.out / "killed"
    if step == options.kill_at and dist.get_rank() == dist.get_world_size() - 1 and not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)


def say(line: str) -> None:
    if dist.get_rank() == 0:
        print(line, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("runs/distributed"), help="folder of the checkpoints")
    parser.add_argument("--sequence", type=int, default=None, help="ranks that share a sequence; all of them by default")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batch", type=int, default=8, help="sequences of a step, over all ranks")
    parser.add_argument("--length", type=int, default=1024, help="positions of a sequence, over the ranks that share it")
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--rate", type=float, default=4e-3)
    parser.add_argument("--save-every", type=int, default=10)
    parser.add_argument("--kill-at", type=int, default=None, help="end one rank after this step, once")
    parser.add_argument("--bf16", action="store_true", help="projections in bfloat16; the recurrence stays in float32")
    parser.add_argument("--smoke", action="store_true", help="a tiny model and six steps")
    options = parser.parse_args()
    if options.smoke:
        options.steps, options.batch, options.length, options.width, options.layers, options.save_every = 6, 4, 96, 16, 1, 2
    # Blocks give views, which FSDP warns of because of changes in place; there are none here.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module")
    options.out.mkdir(parents=True, exist_ok=True)
    if "RANK" in os.environ:
        # torchrun keeps one store over its restarts: under a name of its own, a new start does not find the addresses of the
        # ranks before it.
        store, rank, size = next(rendezvous("env://"))
        attempt = dist.PrefixStore(f"start {os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", store)
        dist.init_process_group("gloo", store=attempt, rank=rank, world_size=size)
    else:
        # One process without torchrun: a group of one.
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    options.sequence = options.sequence or dist.get_world_size()
    if dist.get_world_size() % options.sequence:
        raise SystemExit(f"--sequence {options.sequence} does not divide the {dist.get_world_size()} ranks")
    try:
        loss = train(options)
        say(f"final loss {loss:.9f}")
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""Train a SHiPPO language model on your own text files, watch it write, stop, and continue.

Tokens are bytes unless you name a tokenizer. Without files the text is the source of Python's standard library. The model is
the Hugging Face `ShippoForCausalLM` with its default options; `--attention-every 4` makes a hybrid of it. A sample is printed
every minute. The folder holds the model (`AutoModelForCausalLM.from_pretrained` reads it) and what `--resume` needs.

    python examples/train_language_model.py notes/*.txt --out runs/language
    python examples/train_language_model.py notes/*.txt --out runs/language --resume --steps 4000
    torchrun --nproc-per-node 2 examples/train_language_model.py notes/*.txt --out runs/language
"""

import argparse
import math
import os
import sysconfig
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from shippo_ssm.integrations.huggingface import ShippoConfig, ShippoForCausalLM
from shippo_ssm.layers import weight_decay_groups


class Bytes:
    """The tokenizer that needs no file: a token is a byte."""

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, ids: list[int]) -> str:
        return bytes(ids).decode(errors="replace")

    def __len__(self) -> int:
        return 256


def read_tokens(files: list[Path], tokenizer) -> Tensor:
    """All files as one row of tokens [n]."""
    files = files or sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    if isinstance(tokenizer, Bytes):
        return torch.frombuffer(bytearray(b"\n".join(file.read_bytes() for file in files)), dtype=torch.uint8)
    return torch.tensor([token for file in files for token in tokenizer.encode(file.read_text(errors="replace"))])


def windows(tokens: Tensor, seed: int, count: int, length: int) -> Tensor:
    """`count` windows [count, length] of `tokens`, a function of the seed."""
    starts = torch.randint(len(tokens) - length, (count, 1), generator=torch.Generator().manual_seed(seed))
    return tokens[starts + torch.arange(length)].long()


@torch.no_grad()
def sample(model, tokenizer, prompt: str, num_tokens: int) -> str:
    """Continue a prompt."""
    model.eval()
    ids = torch.tensor([tokenizer.encode(prompt)], device=model.device)
    options = {"max_new_tokens": num_tokens, "do_sample": True, "temperature": 0.7, "top_k": 50, "pad_token_id": 0}
    written = model.generate(ids, attention_mask=torch.ones_like(ids), **options)[0].tolist()
    model.train()
    return tokenizer.decode(written)


@torch.no_grad()
def held_out_bits(model, tokens: Tensor, batch: int, length: int) -> float:
    """Bits per token of 8 batches of text that is not trained on."""
    model.eval()
    losses = [model(ids, labels=ids).loss for ids in (windows(tokens, n, batch, length).to(model.device) for n in range(8))]
    model.train()
    return float(torch.stack(losses).mean()) / math.log(2)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("files", nargs="*", type=Path, help="text files; default Python's standard library")
    parser.add_argument("--out", type=Path, default=Path("runs/language"), help="folder of the model")
    parser.add_argument("--tokenizer", help="a tokenizer for transformers' AutoTokenizer; default bytes")
    parser.add_argument("--resume", action="store_true", help="continue the model in --out")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--rate", type=float, default=2e-3, help="learning rate")
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--attention-every", type=int, help="one attention layer in so many; default none")
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--prompt", default="def ")
    parser.add_argument("--sample-seconds", type=float, default=60.0, help="seconds between samples")
    parser.add_argument("--smoke", action="store_true", help="a tiny model and four steps")
    options = parser.parse_args()
    if options.smoke:
        options.steps, options.hidden, options.layers, options.batch, options.length = 4, 16, 2, 2, 32

    # `torchrun` sets RANK; every process then takes windows of its own, and gradients are averaged.
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    cuda = torch.cuda.is_available()
    if world > 1:
        dist.init_process_group("nccl" if cuda else "gloo")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if cuda else torch.device("cpu")

    tokenizer = Bytes()
    if options.tokenizer:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(options.tokenizer)
    tokens = read_tokens(options.files, tokenizer)
    held_out = tokens[-max(len(tokens) // 20, 2 * options.length) :]
    tokens = tokens[: len(tokens) - len(held_out)]
    if len(tokens) <= options.length:
        raise SystemExit(f"the files have {len(tokens)} tokens; expected more than --length; give more text")

    torch.manual_seed(0)
    if options.resume:
        model = ShippoForCausalLM.from_pretrained(options.out)
    else:
        sizes = {"hidden_size": options.hidden, "num_hidden_layers": options.layers, "attention_every": options.attention_every}
        model = ShippoForCausalLM(ShippoConfig(vocab_size=len(tokenizer), dropout=options.dropout, **sizes))
    torch.nn.Module.to(model, device).train()
    optimizer = torch.optim.AdamW(weight_decay_groups(model, 0.1), lr=options.rate, betas=(0.9, 0.95))
    first = 0
    if options.resume:
        kept = torch.load(options.out / "optimizer.pt", weights_only=True)
        optimizer.load_state_dict(kept["optimizer"])
        first = kept["step"]
    trained = DistributedDataParallel(model) if world > 1 else model

    def save(step: int) -> None:
        model.save_pretrained(options.out)
        if not isinstance(tokenizer, Bytes):
            tokenizer.save_pretrained(options.out)
        torch.save({"optimizer": optimizer.state_dict(), "step": step}, options.out / "optimizer.pt")

    if rank == 0:
        print(f"{len(tokens):,} tokens, {sum(p.numel() for p in model.parameters()):,} parameters, step {first}")
    begun = shown = time.monotonic()
    for step in range(first, options.steps):
        factor = min(1.0, (step + 1) / 50) * 0.5 * (1 + math.cos(math.pi * step / options.steps))
        for group in optimizer.param_groups:
            group["lr"] = options.rate * factor
        ids = windows(tokens, step * world + rank, options.batch, options.length).to(device)
        loss = trained(ids, labels=ids, use_cache=False).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        now, done = time.monotonic(), step + 1 == options.steps
        if rank == 0 and (done or now - shown > options.sample_seconds):
            shown = now
            found = held_out_bits(model, held_out, options.batch, options.length)
            bits = f"train {loss.item() / math.log(2):.3f}, held out {found:.3f} bits per token"
            print(f"step {step + 1}: {bits}, {now - begun:.0f} s")
            print(sample(model, tokenizer, options.prompt, 16 if options.smoke else 200), end="\n\n", flush=True)
            save(step + 1)
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()

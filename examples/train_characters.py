"""Train a character model on text that comes with Python, save it, load it, and let it write.

The text is the language reference that `help()` prints (`pydoc_data.topics`), one token per ASCII character. The model
is two SHiPPO layers; generation is one `step` per character from a state that does not grow. The saved folder holds
safetensors and JSON, and `shippo inspect FOLDER` reads its right actions.

    python examples/train_characters.py --out runs/characters
"""

import argparse
import time
from pathlib import Path
from pydoc_data.topics import topics

import torch
from torch.nn.functional import cross_entropy

from shippo_ssm.layers import weight_decay_groups
from shippo_ssm.models import SequenceConfig, SequenceModel, load_checkpoint, save_checkpoint


def corpus() -> torch.Tensor:
    """The reference as character codes [num_characters], all of them below 128."""
    text = "\n".join(topics[name] for name in sorted(topics))
    return torch.tensor(list(text.encode("ascii", "ignore")))


def train(model: SequenceModel, text: torch.Tensor, num_steps: int, batch_size: int = 16, length: int = 128) -> None:
    """Next-character prediction on random windows; the last tenth of the text is held out."""
    held_out = len(text) * 9 // 10
    optimizer = torch.optim.AdamW(weight_decay_groups(model, 0.01), lr=4e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 4e-3, total_steps=num_steps, pct_start=0.1)
    rng = torch.Generator().manual_seed(0)

    def loss_on(low: int, high: int) -> torch.Tensor:
        starts = torch.randint(low, high - length - 1, (batch_size, 1), generator=rng)
        windows = text[starts + torch.arange(length + 1)]
        return cross_entropy(model(windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten())

    began = time.monotonic()
    for step in range(1, num_steps + 1):
        loss = loss_on(0, held_out)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % max(1, num_steps // 8) == 0:
            with torch.no_grad():
                unseen = torch.stack([loss_on(held_out, len(text)) for _ in range(4)]).mean()
            seconds = time.monotonic() - began
            print(f"step {step:4d}  train {loss.item():.2f}  held out {unseen.item():.2f} nats per character  {seconds:.0f} s")


@torch.no_grad()
def generate(model: SequenceModel, prompt: str, num_characters: int, temperature: float = 0.6) -> str:
    """Continue `prompt`, one step per character."""
    rng = torch.Generator().manual_seed(1)
    codes = list(prompt.encode("ascii"))
    logits, states = model(torch.tensor([codes]), output_state=True)
    logits = logits[:, -1]
    for _ in range(num_characters):
        chosen = torch.multinomial((logits / temperature).softmax(-1), 1, generator=rng)[:, 0]
        codes.append(int(chosen))
        logits, states = model.step(chosen, states)
    return bytes(codes).decode("ascii")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("runs/characters"), help="folder of the saved model")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--smoke", action="store_true", help="a tiny model and four steps")
    options = parser.parse_args()
    torch.manual_seed(0)
    d_model, n_layers = (16, 1) if options.smoke else (64, 2)
    model = SequenceModel(SequenceConfig(vocab_size=128, d_model=d_model, n_layers=n_layers, d_state=16))
    text = corpus()
    print(f"{len(text)} characters, {sum(p.numel() for p in model.parameters())} parameters")
    if options.smoke:
        train(model, text, num_steps=4, batch_size=2, length=32)
    else:
        train(model, text, options.steps)

    save_checkpoint(model, options.out, notes={"text": "pydoc_data.topics"})
    again = load_checkpoint(options.out).eval()
    prompt = "The import statement "
    written = generate(again, prompt, 20 if options.smoke else 300)
    assert written == generate(model.eval(), prompt, 20 if options.smoke else 300), "the loaded model must be the saved one"
    print(f"saved to {options.out}; loaded again, it writes:\n\n{written}")


if __name__ == "__main__":
    main()

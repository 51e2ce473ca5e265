"""A cache of prefixes: continue from the state after the longest prefix that was read before.

The Hugging Face model decodes by `generate` and its cache instead, which also check the tokens that an assistant proposes.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from shippo_ssm.layers import states as values


class PrefixCache:
    """model(prompt), continued from the state after the longest prefix that was read before.

    The states at the ends of prompts are kept; above `max_bytes` in total the least recently used ones are dropped. Attributes
    `num_read` and `num_known` count the tokens that went through the model and those that did not have to, `num_bytes` the
    bytes of all kept states.

    Args:
        model: a `SequenceModel` (or one with its calls) that reads token ids [B, T].
        max_bytes: bound of all kept states together.

    Example:
        >>> import torch
        >>> from shippo_ssm.models import PrefixCache, SequenceConfig, SequenceModel
        >>> config = SequenceConfig(d_model=16, n_layers=1, d_state=8, vocab_size=11, backend="reference")
        >>> cache = PrefixCache(SequenceModel(config).eval())
        >>> _ = cache.read([1, 2, 3])
        >>> logits, states = cache.read([1, 2, 3, 4, 5])
        >>> cache.num_known, cache.num_read
        (3, 5)
    """

    def __init__(self, model: Any, max_bytes: int = 1 << 28) -> None:
        self.model, self.max_bytes = model, max_bytes
        self.num_read = self.num_known = self.num_bytes = 0
        # Tokens -> (logits at the last of them, states after it), the most recently used at the end.
        self._kept: OrderedDict[tuple[int, ...], tuple[Tensor, list[Any]]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._kept)

    @torch.no_grad()
    def read(self, prompt: Sequence[int] | Tensor) -> tuple[Tensor, list[Any]]:
        """Logits [1, classes] at the last token of a prompt [T], and a copy of the states after it."""
        tokens = tuple(torch.as_tensor(prompt).flatten().tolist())
        if not tokens:
            raise ValueError("PrefixCache.read: `prompt` is empty; expected at least one token")
        lengths = sorted({len(kept) for kept in self._kept if len(kept) <= len(tokens)}, reverse=True)
        known, logits, after = next((length for length in lengths if tokens[:length] in self._kept), 0), torch.empty(0), None
        if known:
            logits, after = self._kept[tokens[:known]]
            self._kept.move_to_end(tokens[:known])
        if known < len(tokens):
            ids = torch.tensor([tokens[known:]], device=next(iter(self.model.parameters())).device)
            logits, after = self.model(ids, after, output_state=True)
            logits = logits[:, -1].clone()
            self._keep(tokens, logits, after)
        self.num_known += known
        self.num_read += len(tokens) - known
        assert after is not None
        return logits.clone(), values.clone(after)

    def _keep(self, tokens: tuple[int, ...], logits: Tensor, after: list[Any]) -> None:
        size = values.num_bytes((logits, after))
        if size > self.max_bytes:
            return
        self._kept[tokens] = (logits, after)
        self.num_bytes += size
        while self.num_bytes > self.max_bytes:
            self.num_bytes -= values.num_bytes(self._kept.popitem(last=False)[1])

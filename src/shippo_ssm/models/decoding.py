"""Decoding with states: continue from the longest known prefix, and check several proposed tokens in one call.

Both work with any model that has the calls of `SequenceModel`. The Hugging Face model uses `generate` and its cache instead.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shippo_ssm.layers import states as values
from shippo_ssm.layers.mixer import ALL_STATES


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
        known = max((len(kept) for kept in self._kept if kept == tokens[: len(kept)]), default=0)
        logits, after = torch.empty(0), None
        if known:
            logits, after = self._kept[tokens[:known]]
            self._kept.move_to_end(tokens[:known])
        if known < len(tokens):
            ids = torch.tensor([tokens[known:]], device=next(iter(self.model.parameters())).device)
            logits, after = self.model(ids, after, output_state=True)
            logits = logits[:, -1].clone()
            if (size := values.num_bytes((logits, after))) <= self.max_bytes:
                self._kept[tokens] = (logits, after)
                self.num_bytes += size
            while self.num_bytes > self.max_bytes:
                self.num_bytes -= values.num_bytes(self._kept.popitem(last=False)[1])
        self.num_known += known
        self.num_read += len(tokens) - known
        assert after is not None
        return logits.clone(), values.clone(after)


class Verdict(NamedTuple):
    """The result of `verify`."""

    accepted: int
    """How many of the proposed tokens, from the first on, are the model's greedy choices."""
    following: Tensor
    """[1], its choice after those."""
    states: list[Any]
    """The states after the last accepted token."""


@torch.no_grad()
def verify(model: Any, last: Tensor, proposed: Tensor, states: Sequence[Any]) -> Verdict:
    """Compare `proposed` tokens with the model's greedy choices, in one call.

    Args:
        model: a `SequenceModel` (or one with its calls) that reads token ids.
        last: [1], the last accepted token, not yet in `states`.
        proposed: [K], the proposed continuation.
        states: the states before `last`, of one sequence.
    """
    ids = torch.cat([last, proposed.to(last)]).unsqueeze(0)
    logits, every = model(ids, states, segment=ALL_STATES, output_state=True)
    choices = logits[0].argmax(-1)
    accepted = int((choices[:-1] == ids[0, 1:]).int().cumprod(0).sum())
    return Verdict(accepted, choices[accepted : accepted + 1], values.at(every, accepted))


@torch.no_grad()
def speculate(model: Any, assistant: Any, prompt: Tensor, num_tokens: int, num_proposed: int = 4) -> Tensor:
    """Greedy decoding with an assistant: the same tokens [num_tokens] as without it, in fewer calls of `model`.

    Args:
        model: a `SequenceModel` over token ids.
        assistant: a cheaper one over the same ids, which proposes.
        prompt: [T], T >= 1.
        num_tokens: number of tokens to generate.
        num_proposed: K, tokens proposed at a time.
    """
    head, last = prompt[:-1].unsqueeze(0), prompt[-1:]
    ours, theirs = (m(head, output_state=True)[1] if head.shape[1] else m.init_state(1) for m in (model, assistant))
    added: list[Tensor] = []
    while sum(map(len, added)) < num_tokens:
        token, proposed, visited = last, [], []
        for _ in range(num_proposed):
            logits, theirs = assistant.step(token, theirs)
            token = logits.argmax(-1)
            proposed.append(token)
            visited.append(theirs)
        verdict = verify(model, last, torch.cat(proposed), ours)
        added += [*proposed[: verdict.accepted], verdict.following]
        ours, last = verdict.states, verdict.following
        if verdict.accepted < num_proposed:
            theirs = visited[verdict.accepted]
        else:
            _, theirs = assistant.step(proposed[-1], theirs)
    return torch.cat(added)[:num_tokens]

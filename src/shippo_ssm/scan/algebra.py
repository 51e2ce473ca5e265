"""The algebra of the recurrence: two-sided affine maps H -> left H right + update, and their composition.

An `Affine` holds one map or a whole batch of them. `left` is [.., N] (a diagonal) or [.., N, N], `right` is [.., P, P] or
`None` for the identity, `update` is [.., N, P]. The composition law of proposition "Exact block-affine scan closure" stands
in this file and nowhere else: left factors multiply from the left, right factors from the right, in time order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from shippo_ssm.dispatch import compute_dtype


class Affine(NamedTuple):
    """The map H -> left H right + update.

    Args:
        left: [.., N] for a diagonal left factor or [.., N, N] for a dense one.
        right: [.., P, P], or `None` for the identity.
        update: [.., N, P].

    Example:
        >>> import torch
        >>> step = Affine(torch.full((3,), 0.5), None, torch.ones(3, 2))
        >>> apply(step, torch.ones(3, 2))[0].tolist()
        [1.5, 1.5]
    """

    left: Tensor
    right: Tensor | None
    update: Tensor

    @property
    def diagonal(self) -> bool:
        """Whether `left` is a diagonal, [.., N], rather than dense, [.., N, N]."""
        return self.left.ndim == self.update.ndim - 1


class Recurrence(NamedTuple):
    """The operands of H_t = exp(step_t drift_t) H_{t-1} right_t + write_t value_t^T, y_t = read_t^T H_t, as one record.

    A record inside the package is normalised: the rank axis is there, all tensors have one floating dtype and device.
    `normalised` makes one of what the public calls take.

    Args:
        value: [B, T, G, r, P].
        write: [B, T, Q, r, N]; Q divides G, and group g uses set g // (G / Q).
        read: [B, T, Q, N].
        step: [B, T, G].
        drift: [G, N] (constant) or [B, T, G, N].
        right: [B, T, G, P, P], or `None` for the identity.
        seen: [B, T, G, r, P], what y_t sees of its own source in the place of `value`: y_t = read_t^T (L_t H_{t-1} R_t +
            write_t seen_t^T); `None` for `value` itself. The two-point cell stores more of a source than it shows at once.
    """

    value: Tensor
    write: Tensor
    read: Tensor
    step: Tensor
    drift: Tensor
    right: Tensor | None = None
    seen: Tensor | None = None

    def map(self, function: Callable[[Tensor], Tensor]) -> Recurrence:
        """`function` over every tensor of the record."""
        return self._make(None if tensor is None else function(tensor) for tensor in self)

    def map_time(self, function: Callable[[Tensor], Tensor]) -> Recurrence:
        """`function` over every tensor that has a time axis, that is, all but a constant drift."""
        return self.map(lambda tensor: tensor if tensor.ndim == 2 else function(tensor))

    def between(self, start: int, stop: int) -> Recurrence:
        """The positions start .. stop - 1."""
        return self.map_time(lambda tensor: tensor[:, start:stop])

    def normalised(self, cast: bool = True) -> Recurrence:
        """The same recurrence with a rank axis, in the dtype that states are kept in unless a backend casts what it loads."""
        dtype, rank = compute_dtype(self.value.dtype), self.value.ndim == 5
        value, write, read, step, drift, right, seen = self.map(lambda tensor: tensor.to(dtype)) if cast else self
        if not rank:
            value, write, seen = value.unsqueeze(-2), write.unsqueeze(-2), None if seen is None else seen.unsqueeze(-2)
        return Recurrence(value, write, read, step, drift, right, seen)

    def per_group(self) -> Recurrence:
        """The same recurrence with one write and read for every group, Q = G, for what computes in torch."""
        groups = self.value.shape[2]
        return self._replace(write=per_group(self.write, groups, 2), read=per_group(self.read, groups, 2))

    def zero_state(self) -> Tensor:
        """The state [B, G, N, P] before anything was written."""
        batch, _, groups, _, width = self.value.shape
        return self.value.new_zeros(batch, groups, self.read.shape[-1], width)


def identity_affine(
    num_rows: int,
    num_columns: int,
    *,
    batch_shape: tuple[int, ...] = (),
    dense: bool = False,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
) -> Affine:
    """The map H -> H on [N, P] = [num_rows, num_columns]: composing with it on either side changes nothing."""
    left = torch.ones(*batch_shape, num_rows, dtype=dtype, device=device)
    if dense:
        left = torch.diag_embed(left)
    right = torch.eye(num_columns, dtype=dtype, device=device).expand(*batch_shape, num_columns, num_columns)
    return Affine(left, right, torch.zeros(*batch_shape, num_rows, num_columns, dtype=dtype, device=device))


def apply(element: Affine, state: Tensor) -> Tensor:
    """left state right + update, for `state` [.., N, P]."""
    moved = state if element.right is None else state @ element.right
    moved = element.left.unsqueeze(-1) * moved if element.diagonal else element.left @ moved
    return moved + element.update


def compose(first: Affine, second: Affine) -> Affine:
    """The map that applies `first`, then `second`: (L2 L1, R1 R2, L2 U1 R2 + U2). Not commutative.

    Args:
        first: the earlier map.
        second: the later map, with the same N, P and the same kind of left factor.

    Returns:
        The composite as an `Affine`.

    Example:
        >>> import torch
        >>> halve, add = Affine(torch.full((1,), 0.5), None, torch.zeros(1, 1)), Affine(torch.ones(1), None, torch.ones(1, 1))
        >>> apply(compose(halve, add), torch.ones(1, 1)).item(), apply(compose(add, halve), torch.ones(1, 1)).item()
        (1.5, 1.0)
    """
    if first.diagonal != second.diagonal or first.update.shape[-2:] != second.update.shape[-2:]:
        raise ValueError(
            f"compose: `first` maps {_describe(first)} and `second` maps {_describe(second)}; expected the same N, P and the "
            "same kind of left factor; use torch.diag_embed to turn a diagonal left factor into a dense one"
        )
    left = second.left * first.left if second.diagonal else second.left @ first.left
    if first.right is None or second.right is None:
        right = second.right if first.right is None else first.right
    else:
        right = first.right @ second.right
    return Affine(left, right, apply(second, first.update))


def balance(element: Affine) -> Affine:
    """The same map with the largest entry of `right` between 1 and 2: powers of two, which are exact, move into `left`.

    A long product of right factors can overflow while that of the left factors underflows and the map itself is finite.
    """
    if element.right is None or not element.right.shape[-1]:
        return element
    exponent = element.right.detach().abs().amax((-2, -1), keepdim=True).log2().floor()
    # A power of two whose inverse is finite; 1 for a factor that is zero or not finite.
    most = 100.0 if exponent.dtype == torch.float32 else 1000.0
    scale = torch.where(exponent.isfinite(), exponent.clamp(-most, most), 0.0).exp2()
    left = element.left * (scale.squeeze(-1) if element.diagonal else scale)
    return element._replace(left=left, right=element.right / scale)


def map_tensors(function: Callable[..., Tensor], *elements: Affine) -> Affine:
    """`function` over the lefts, the rights and the updates of `elements`; an identity right (`None`) stays one."""
    right = None if elements[0].right is None else function(*(element.right for element in elements))
    return Affine(function(*(element.left for element in elements)), right, function(*(element.update for element in elements)))


def per_group(shared: Tensor, groups: int, dim: int) -> Tensor:
    """[.., Q, ..] -> [.., G, ..] along `dim`: the set of every group, g // (G / Q); a view where Q is 1 or G."""
    sets = shared.shape[dim]
    if sets == groups:
        return shared
    sizes = (*shared.shape[: dim + 1], groups // sets, *shared.shape[dim + 1 :])
    return shared.unsqueeze(dim + 1).expand(sizes).flatten(dim, dim + 1)


def outer(write: Tensor, value: Tensor) -> Tensor:
    """The source U = sum over rank of write_r value_r^T: [.., N, P] from [.., r, N] and [.., r, P]."""
    return write.mT @ value


def read_source(read: Tensor, write: Tensor, value: Tensor) -> Tensor:
    """read^T (sum over rank of write_r value_r^T), [.., P], without the source itself: [.., N], [.., r, N] and [.., r, P]."""
    return ((read.unsqueeze(-2) * write).sum(-1, keepdim=True) * value).sum(-2)


def _describe(element: Affine) -> str:
    kind = "diagonal" if element.diagonal else "dense"
    return f"[N, P] = {tuple(element.update.shape[-2:])} with a {kind} left factor"

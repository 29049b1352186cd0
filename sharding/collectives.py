"""What devices tell each other inside one pass of the model; on one device, nothing."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Self

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh
from jaxtyping import Array, Float, Int, Shaped

from sharding.mesh import group_size, mesh_axes, sequence_switch

# Splitting tokens saves work in proportion to them but makes two collectives of each sum, which few
# tokens do not pay for: sp=auto asks for this many rows × tokens.
AUTO_TOKENS = 1024

# Which part of a ring of slots a device has: (its first slot, how many slots the ring has).
Part = tuple[Int[Array, ""] | int, int]


def splits_tokens(
    sizes: Mapping[str, int], shape: tuple[int, ...], halo: int, max_block: int
) -> bool:
    """Tells whether a call splits its tokens over the devices of `ep` and `tp`.

    `sp=on` splits every call that cannot be taken back (so prefill, never a step or a verification)
    and that leaves each device a neighbour's halo of tokens; `sp=auto` those of them with at least
    `AUTO_TOKENS` tokens in the rows of a device; without `tp` there is nothing to split.

    Args:
      sizes: `mesh.shape`.
      shape: rows and tokens of the call, (B, T).
      halo: tokens before its own that a device needs.
      max_block: the longest call that the cache can take back.
    """
    (rows, tokens), switch, tp = shape, sequence_switch(sizes), group_size(sizes, "tp")
    if switch == "off" or tp == 1 or tokens <= max_block:
        return False
    if tokens < halo * tp * group_size(sizes, "ep"):
        return False
    return switch == "on" or tokens * rows >= AUTO_TOKENS * group_size(sizes, "dp")


@dataclasses.dataclass(frozen=True)
class Collectives:
    """The communication of a model under `shard_map`.

    Attributes:
      tp: mesh axes over which heads, expert columns and vocabulary are split.
      ep: mesh axes over which experts are split.
      cp: mesh axes over which the slots of full layers' caches are split.
      sp: mesh axes over which tokens are split outside attention and experts: slice i of all lies
        with device i. What is summed is then summed for each device's own tokens only.
    """

    tp: tuple[str, ...] = ()
    ep: tuple[str, ...] = ()
    cp: tuple[str, ...] = ()
    sp: tuple[str, ...] = ()

    @classmethod
    def of(cls, mesh: AbstractMesh, split_tokens: bool = False) -> Self:
        """Returns the communication that a mesh needs."""
        tp, ep, cp = (mesh_axes(mesh.shape, group) for group in ("tp", "ep", "cp"))
        return cls(tp, ep, cp, ep + tp if split_tokens else ())

    def sum(self, x: Float[Array, "B T D"], axes: tuple[str, ...]) -> Float[Array, "B t D"]:
        """Adds up what the devices of `axes` contribute: of `tp` their heads, with `ep` experts."""
        if not self.sp:
            return jax.lax.psum(x, axes) if axes else x
        # The other devices of `sp` have the same, so none sums it twice.
        part = _slice(x, tuple(axis for axis in self.sp if axis not in axes))
        return jax.lax.psum_scatter(part, axes, scatter_dimension=1, tiled=True)

    def lookup(
        self, table: Float[Array, "V D"], tokens: Int[Array, "B T"]
    ) -> Float[Array, "B t D"]:
        """Returns the tokens' rows of a table whose rows are split over `tp`."""
        if not self.tp:
            return table[tokens]
        row = tokens - jax.lax.axis_index(self.tp) * table.shape[0]
        mine = (row >= 0) & (row < table.shape[0])
        found = table[jnp.clip(row, 0, table.shape[0] - 1)]
        return self.sum(jnp.where(mine[..., None], found, 0), self.tp)

    def gather_vocabulary(self, logits: Float[Array, "... v"]) -> Float[Array, "... V"]:
        """Returns the logits of the whole vocabulary, in the order of the ids."""
        if not self.tp:
            return logits
        return jax.lax.all_gather(logits, self.tp, axis=logits.ndim - 1, tiled=True)

    def pad_tokens(self, x: Shaped[Array, "B T"]) -> Shaped[Array, "B U"]:
        """Fills rows up on the right, so that each device has equally many tokens."""
        missing = -x.shape[1] % jax.lax.axis_size(self.sp) if self.sp else 0
        return jnp.pad(x, ((0, 0), (0, missing)))

    def own_tokens(self, x: Shaped[Array, "B T ..."]) -> Shaped[Array, "B t ..."]:
        """Returns this device's slice of what every device has."""
        return _slice(x, self.sp)

    def gather_tokens(self, x: Shaped[Array, "B t D"]) -> Shaped[Array, "B T D"]:
        """Returns all tokens of what each device has a slice of."""
        return jax.lax.all_gather(x, self.sp, axis=1, tiled=True) if self.sp else x

    def halo(
        self, x: Shaped[Array, "B t ..."], before: Shaped[Array, "B n ..."]
    ) -> Shaped[Array, "B n ..."]:
        """Returns the n tokens before this device's own: the neighbour's last.

        Args:
          x: the own tokens, at least n.
          before: the n tokens before all of them.
        """
        if not self.sp:
            return before
        pairs = [(i, i + 1) for i in range(jax.lax.axis_size(self.sp) - 1)]
        last = jax.lax.ppermute(x[:, x.shape[1] - before.shape[1] :], self.sp, pairs)
        return jnp.where(jax.lax.axis_index(self.sp) == 0, before, last)

    def last_tokens(
        self, x: Shaped[Array, "B t ..."], count: Int[Array, " B"], n: int
    ) -> tuple[Shaped[Array, "B m ..."], Int[Array, " B"]]:
        """Returns the end of each row on every device: its last n tokens, fewer where it has fewer.

        Args:
          x: the own tokens.
          count: how many tokens of each row are real.

        Returns:
          Rows with the end in front (all of it where tokens are not split), its length.
        """
        if not self.sp:
            return x, count
        kept = jnp.minimum(count, n)
        first = jax.lax.axis_index(self.sp) * x.shape[1]
        place = (count - kept)[:, None] + jnp.arange(n) - first
        mine = (place >= 0) & (place < x.shape[1])
        found = x[jnp.arange(x.shape[0])[:, None], jnp.clip(place, 0, x.shape[1] - 1)]
        mine = mine.reshape(*mine.shape, *(1,) * (x.ndim - 2))
        with jax.named_scope("last_tokens"):
            return jax.lax.psum(jnp.where(mine, found, 0), self.sp), kept

    def own_slots(self, n: int) -> Part:
        """Returns which part of a full layer's ring the n slots of this device are."""
        if not self.cp:
            return 0, n
        return jax.lax.axis_index(self.cp) * n, jax.lax.axis_size(self.cp) * n

    def sum_softmax(
        self,
        values: Float[Array, "B T H d"],
        total: Float[Array, "B T H"],
        top: Float[Array, "B T H"],
    ) -> tuple[Float[Array, "B T H d"], Float[Array, "B T H"], Float[Array, "B T H"]]:
        """Joins the softmax over each device's slots to the one over all of them.

        Args:
          values, total: Σ weight · value and Σ weight, of the weights exp(score - top).
          top: what the device's scores do not exceed.

        Returns:
          The same of all slots, for the highest `top`.
        """
        if not self.cp:
            return values, total, top
        with jax.named_scope("softmax"):
            highest = jax.lax.pmax(top, self.cp)
            scale = jnp.exp(top - highest)
            values, total = jax.lax.psum((values * scale[..., None], total * scale), self.cp)
        return values, total, highest

    def own_experts(self, experts: Callable[..., Array]) -> Callable[..., Array]:
        """Makes a function of routed experts one that computes this device's share of the sum.

        Args:
          experts: takes (tokens, picks, weights, w13, w2, …); a pick of n is no expert.
        """
        if not self.ep:
            return experts

        def local(z, picks, weights, w13, w2, *caps):
            return experts(z, *self._own_picks(picks, weights, w13.shape[0]), w13, w2, *caps)

        return local

    def _own_picks(
        self, picks: Int[Array, "N k"], weights: Float[Array, "N k"], n: int
    ) -> tuple[Int[Array, "N k"], Shaped[Array, "N k"]]:
        """Renumbers picks by the n experts of this device; others become n, of weight 0."""
        own = picks - jax.lax.axis_index(self.ep) * n
        mine = (own >= 0) & (own < n)
        return jnp.where(mine, own, n), jnp.where(mine, weights, 0.0)


ALONE = Collectives()


def _slice(x: Shaped[Array, "B T ..."], axes: tuple[str, ...]) -> Shaped[Array, "B t ..."]:
    """Returns the part of the tokens that belongs to this device's place in `axes`."""
    if not axes:
        return x
    size = x.shape[1] // jax.lax.axis_size(axes)
    return jax.lax.dynamic_slice_in_dim(x, jax.lax.axis_index(axes) * size, size, axis=1)

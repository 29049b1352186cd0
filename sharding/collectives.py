"""What devices tell each other inside one pass of the model; on one device, nothing."""

import dataclasses
from collections.abc import Callable
from typing import Self

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh
from jaxtyping import Array, Float, Int, Shaped

from sharding.mesh import mesh_axes


@dataclasses.dataclass(frozen=True)
class Collectives:
    """The communication of a model under `shard_map`.

    Attributes:
      tp: mesh axes over which heads, expert columns and vocabulary are split.
      ep: mesh axes over which experts are split.
    """

    tp: tuple[str, ...] = ()
    ep: tuple[str, ...] = ()

    @classmethod
    def of(cls, mesh: AbstractMesh) -> Self:
        """Returns the communication that a mesh needs."""
        return cls(*(mesh_axes(mesh.shape, group) for group in ("tp", "ep")))

    def sum_heads(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        """Adds up what each device's heads contribute."""
        return jax.lax.psum(x, self.tp) if self.tp else x

    def sum_experts(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        """Adds up what each device's experts, or columns of them, contribute."""
        axes = self.ep + self.tp
        return jax.lax.psum(x, axes) if axes else x

    def lookup(
        self, table: Float[Array, "V D"], tokens: Int[Array, "B T"]
    ) -> Float[Array, "B T D"]:
        """Returns the tokens' rows of a table whose rows are split over `tp`."""
        if not self.tp:
            return table[tokens]
        row = tokens - jax.lax.axis_index(self.tp) * table.shape[0]
        mine = (row >= 0) & (row < table.shape[0])
        found = table[jnp.clip(row, 0, table.shape[0] - 1)]
        return jax.lax.psum(jnp.where(mine[..., None], found, 0), self.tp)

    def gather_vocabulary(self, logits: Float[Array, "... v"]) -> Float[Array, "... V"]:
        """Returns the logits of the whole vocabulary, in the order of the ids."""
        if not self.tp:
            return logits
        return jax.lax.all_gather(logits, self.tp, axis=logits.ndim - 1, tiled=True)

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

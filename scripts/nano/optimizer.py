"""Muon for matrices, Adam for the rest, as one optax transformation of unit learning rate."""

import functools
import math
from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float

Params = Mapping[str, Float[Array, "..."]]

_MUON = ("attn/wq", "attn/wk", "attn/wv", "attn/wr", "attn/gate", "attn/wo", "moe/w13", "moe/w2")
_VISION_MUON = (
    "attn/q",
    "attn/k",
    "attn/v",
    "attn/out",
    "mlp/fc",
    "mlp/proj",
    "proj_in",
    "proj_out",
)
_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_STEPS = 5
_UPDATE_RMS = 0.2  # about that of Adam, so that both share a learning rate
_EMBEDDINGS = ("embed/weight", "unembed/weight")


class MuonState(NamedTuple):
    """Running sums of gradients."""

    momentum: Params


def make_optimizer(params: Params, weight_decay: float = 0.1) -> optax.GradientTransformation:
    """Returns the optimizer of parameters by path; updates are for a learning rate of 1."""
    kinds = {path: _kind(path) for path in params}
    adam = optax.scale_by_adam(b1=0.9, b2=0.98, eps=1e-10)
    decay = optax.add_decayed_weights(weight_decay)
    return optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.partition(
            {
                "muon": optax.chain(muon(), decay, optax.scale(-1.0)),
                "adam": optax.chain(adam, optax.scale(-1.0)),
                "embedding": optax.chain(adam, optax.scale(-1.0)),
            },
            kinds,
        ),
    )


def _kind(path: str) -> str:
    if path in _EMBEDDINGS:
        return "embedding"
    if path.startswith("vision/"):
        name = path.removesuffix("/weight")
        matrix = (name != path and name.endswith(_VISION_MUON)) or name == "vision/patch_embedding"
        return "muon" if matrix else "adam"
    return "muon" if path.endswith(_MUON) else "adam"


def muon(beta: float = 0.95) -> optax.GradientTransformation:
    """Momentum with its singular values brought to one (Newton-Schulz), scaled to a common RMS.

    Matrices of one shape are stacked: the program has one iteration a shape, not one a matrix.
    """

    def init(params):
        return MuonState(jax.tree.map(jnp.zeros_like, params))

    def update(updates, state, params=None):
        del params
        momentum = jax.tree.map(lambda m, g: beta * m + g, state.momentum, updates)
        ahead = jax.tree.map(lambda m, g: beta * m + g, momentum, updates)
        flat, tree = jax.tree_util.tree_flatten_with_path(ahead)
        groups: dict[tuple[int, ...], list[int]] = {}
        matrices = [_matrices(str(path[-1].key), leaf) for path, leaf in flat]
        for i, m in enumerate(matrices):
            groups.setdefault(m.shape[-2:], []).append(i)
        out = [leaf for _, leaf in flat]
        for members in groups.values():
            stacked = orthogonalize(jnp.concatenate([matrices[i] for i in members]))
            at = 0
            for i in members:
                n = matrices[i].shape[0]
                out[i] = stacked[at : at + n].reshape(out[i].shape)
                at += n
        return jax.tree.unflatten(tree, out), MuonState(momentum)

    return optax.GradientTransformation(init, update)


def _matrices(path: str, x: Float[Array, "..."]) -> Float[Array, "n r c"]:
    """Views a parameter as matrices [out, in]: heads are joined, experts are not."""
    if "/moe/" in path:
        return x
    if path.endswith("attn/wo"):
        return x.reshape(1, x.shape[0], -1)
    return x.reshape(1, -1, x.shape[-1])


@functools.partial(jax.jit, inline=True)
def orthogonalize(x: Float[Array, "n r c"]) -> Float[Array, "n r c"]:
    """Brings all singular values near one and the RMS of a full-rank result to `_UPDATE_RMS`."""
    r, c = x.shape[-2:]
    y = x.astype(jnp.bfloat16)
    y = y.mT if r > c else y
    norm = jnp.sqrt(jnp.sum(jnp.square(y.astype(jnp.float32)), axis=(1, 2), keepdims=True))
    y = (y.astype(jnp.float32) / (norm + 1e-12)).astype(jnp.bfloat16)
    a, b, d = _COEFFICIENTS
    for _ in range(_STEPS):
        gram = y @ y.mT
        y = (a * y + (b * gram + d * (gram @ gram)) @ y).astype(jnp.bfloat16)
    y = y.mT if r > c else y
    return y.astype(jnp.float32) * (_UPDATE_RMS * math.sqrt(max(r, c)))

"""One training step: float32 masters, bfloat16 computation, balanced routing, rounded experts."""

import contextlib
import functools
import math
from collections.abc import Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jaxtyping import Array, Float, Int

from inkling_jax import attention, cache, model, quant, residual
from inkling_jax.config import Config
from inkling_jax.layers import softcap
from nano import batches, recipe
from nano.batches import Batch
from nano.optimizer import Params

BALANCE_STEP = 1e-3
MAX_ANSWERS = 96  # of a row
_QUANTIZE = {"nvfp4": jax.jit(quant.quantize_nvfp4), "mxfp8": jax.jit(quant.quantize_mxfp8)}


class Counts(NamedTuple):
    """Sums per task: losses, predicted tokens, their bytes, answers, and answers without error."""

    nll: Float[Array, " tasks"]
    tokens: Float[Array, " tasks"]
    bytes: Float[Array, " tasks"]
    answers: Float[Array, " tasks"]
    exact: Float[Array, " tasks"]

    def __add__(self, other: "Counts") -> "Counts":  # type: ignore[override]
        return Counts(*(a + b for a, b in zip(self, other, strict=True)))


class TrainState(NamedTuple):
    """Float32 master parameters and the optimizer's moments."""

    params: Params
    optimizer: optax.OptState


def compute_dtype() -> jnp.dtype:
    """Returns bfloat16, or float32 where products of bfloat16 are not implemented."""
    return jnp.dtype("float32" if jax.default_backend() == "cpu" else "bfloat16")


def init_params(config: Config, seed: int) -> Params:
    """Draws float32 parameters by path, output projections by their whole fan-in."""
    state = model.init_params(config, jax.random.key(seed))
    params = to_flat(state)
    return {
        path: value / math.sqrt(value.shape[1]) if path.endswith("attn/wo") else value
        for path, value in params.items()
    }


def to_flat(state: nnx.State) -> Params:
    """Returns parameters by path, "layers/0/attn/wq" say."""
    flat = nnx.to_flat_state(state)
    return {"/".join(map(str, path)): variable.get_value() for path, variable in flat}


def to_state(config: Config, params: Params, dtype: jnp.dtype) -> nnx.State:
    """Returns the model's state; parameters that the model keeps in float32 stay so."""
    template = nnx.to_flat_state(model.abstract_params(config, dtype))

    def leaf(path, variable):
        value = params["/".join(map(str, path))]
        return variable.replace(value.astype(variable.get_value().dtype))

    return nnx.from_flat_state([(path, leaf(path, v)) for path, v in template])


def rounded(params: Params, amount: Float[Array, ""] | float = 1.0) -> Params:
    """Moves experts by `amount` towards what their packed form holds; gradients pass through."""

    def one(path: str, w: Array) -> Array:
        if not path.endswith(("moe/w13", "moe/w2")):
            return w
        packed = pack(path, jax.lax.stop_gradient(w))
        return w + amount * jax.lax.stop_gradient(quant.dequantize(packed, w.dtype) - w)

    return {path: one(path, w) for path, w in params.items()}


def pack(path: str, w: Float[Array, "n R C"]) -> quant.QuantTensor:
    """Packs the experts of a path in their layer's format."""
    return _QUANTIZE[recipe.expert_format(int(path.split("/")[1]))](w)


@contextlib.contextmanager
def _fast_gradients() -> Iterator[None]:
    """Changes two products of the model while a training step is traced; the values stay the same.

    Attention's bfloat16 products with float32 results would be float32 in the backward pass. The
    residuals' mixing, a tiny product per token, is faster as a sum that fuses.
    """

    def half(equation, *operands):
        return jnp.einsum(equation, *operands).astype(jnp.float32)

    def mixing(equation, a, sources):
        if equation == "...d,sbtd->...sbt":
            return jnp.sum(a[..., None, None, None, :] * sources, axis=-1)
        return jnp.sum(a[..., None] * sources, axis=-4)

    exact = attention.einsum, residual.einsum
    attention.einsum, residual.einsum = half, mixing
    try:
        yield
    finally:
        attention.einsum, residual.einsum = exact


def dense_experts(z, picks, weights, w13, w2, gate_cap, up_cap):
    """`moe.experts` with a gradient: every expert for every token, weighted by 0 if not picked."""
    w13, w2 = (quant.dequantize(w, z.dtype) for w in (w13, w2))
    chosen = jax.nn.one_hot(picks, w13.shape[0], dtype=jnp.float32)
    combine = jnp.sum(chosen * weights[..., None], axis=1)
    g = jnp.einsum("td,nfd->tnf", z, w13[:, 0::2]).astype(jnp.float32)
    u = jnp.einsum("td,nfd->tnf", z, w13[:, 1::2]).astype(jnp.float32)
    act = softcap(g, gate_cap) * jax.nn.sigmoid(g) * softcap(u, up_cap)
    act = (act * combine[..., None]).astype(z.dtype)
    return jnp.einsum("tnf,ndf->td", act, w2).astype(jnp.float32)


def _encode(params: nnx.State, config: Config, batch: Batch) -> Float[Array, "P D"]:
    """Returns the features of all tiles of a batch, six a picture."""
    tiles = (batch.tiles.astype(jnp.float32) / 255 - 0.5) / 0.5
    encode = jax.vmap(lambda t, g: model.encode_image(params, config, t, g))
    return encode(tiles, batch.grid).reshape(-1, config.text.hidden_size)


def count(
    params: nnx.State,
    config: Config,
    hidden: Float[Array, "B T D"],
    batch: Batch,
    token_bytes: Int[Array, " V"],
) -> Counts:
    """Sums losses and exact answers by task."""
    logits = model.unembed(params, config, hidden[:, :-1])
    target, task, answer = (x[:, 1:] for x in (batch.tokens, batch.task, batch.answer))
    nll = optax.softmax_cross_entropy_with_integer_labels(logits, target)
    wrong = (jnp.argmax(logits, axis=-1) != target).astype(jnp.float32)
    member = jax.nn.one_hot(task, len(batches.TASKS))
    total = functools.partial(jnp.einsum, "bt,btk->k")
    of_answer = jax.nn.one_hot(answer, MAX_ANSWERS)
    faults = jnp.einsum("bt,bta->ba", wrong, of_answer)
    kinds = jnp.einsum("btk,bta->bak", member, of_answer) > 0
    return Counts(
        total(nll, member),
        jnp.sum(member, axis=(0, 1)),
        total(token_bytes[target].astype(jnp.float32), member),
        jnp.sum(kinds, axis=(0, 1)).astype(jnp.float32),
        jnp.sum(kinds & (faults == 0)[..., None], axis=(0, 1)).astype(jnp.float32),
    )


def evaluate(
    params: nnx.State, config: Config, batch: Batch, token_bytes: Int[Array, " V"]
) -> tuple[Counts, Float[Array, "layers n"]]:
    """Returns the counts of a batch and how often each layer picked each expert."""
    loads = []

    def experts(z, picks, weights, w13, w2, gate_cap, up_cap):
        loads.append(jnp.sum(jax.nn.one_hot(picks, w13.shape[0]), axis=(0, 1)))
        return dense_experts(z, picks, weights, w13, w2, gate_cap, up_cap)

    features = _encode(params, config, batch)
    dtype = params["embed"]["weight"][...].dtype
    empty = cache.init_cache(config.text, *batch.tokens.shape, 1, dtype)
    out = model.forward(
        params,
        config,
        batch.tokens,
        batch.lengths,
        empty,
        features,
        batch.image_index,
        experts=experts,
    )
    return count(params, config, out.hidden, batch, token_bytes), jnp.stack(loads)


def train_step(
    state: TrainState,
    batch: Batch,
    rate: Float[Array, ""],
    rounding: Float[Array, ""],
    weights: Float[Array, " tasks"],
    config: Config,
    optimizer: optax.GradientTransformation,
    token_bytes: Int[Array, " V"],
) -> tuple[TrainState, Counts, Float[Array, ""]]:
    """Returns the new state, the batch's counts and the imbalance (largest load over the mean)."""
    keep = jax.checkpoint_policies.dots_with_no_batch_dims_saveable

    @functools.partial(jax.checkpoint, policy=keep)
    def run(params):
        with _fast_gradients():
            return evaluate(to_state(config, params, compute_dtype()), config, batch, token_bytes)

    def loss(params):
        counts, load = run(rounded(params, rounding))
        means = counts.nll / jnp.maximum(counts.tokens, 1)
        return jnp.sum(weights * means), (counts, load)

    gradients, (counts, load) = jax.grad(loss, has_aux=True)(state.params)
    updates, opt_state = optimizer.update(gradients, state.optimizer, state.params)
    params = {p: w + rate * updates[p] for p, w in state.params.items()}
    peak = jnp.max(rate_of_load := load / jnp.mean(load, axis=1, keepdims=True))
    for i in range(config.text.num_hidden_layers):
        path = f"layers/{i}/moe/bias"
        params[path] = state.params[path] + BALANCE_STEP * jnp.sign(1 - rate_of_load[i])
    return TrainState(params, opt_state), counts, peak

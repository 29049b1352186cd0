"""A step of a drafter's training: the target reads, the drafter drafts at random anchors.

Parameters are float32 masters by path (`flatten`); `unflatten` makes of them what computes.
"""

from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from nano.step import compute_dtype, dense_experts

from checkpoints.safetensors_writer import write_published
from drafting import data, loss
from inkling_jax.cache import init_cache
from inkling_jax.config import Config
from inkling_jax.drafter import abstract_drafter
from inkling_jax.drafter_config import DrafterConfig
from inkling_jax.load_drafter import config_json, published
from inkling_jax.model import Forward, encode_image, forward
from inkling_jax.quant import QuantTensor, dequantize

ANCHORS_LONG, ANCHORS_SHORT = 96, 40  # of a row


class TrainState(NamedTuple):
    """Float32 master parameters by path, and the optimizer's moments."""

    params: dict[str, jax.Array]
    optimizer: optax.OptState


def drafter_config(config: Config, block_size: int, mask_token: int) -> DrafterConfig:
    """Returns a drafter of 4 layers that shares the target's embedding and head."""
    text = config.text
    last = text.num_hidden_layers - 2
    taps = sorted({round(last * i / 4) for i in range(5)})
    return DrafterConfig(
        vocab_size=text.unpadded_vocab_size,
        hidden_size=text.hidden_size,
        intermediate_size=4 * text.hidden_size,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        block_size=block_size,
        mask_token_id=mask_token,
        target_layer_ids=tuple(taps),
        num_target_layers=text.num_hidden_layers,
        markov_rank=64,
        markov_head_type="gated",
        enable_confidence_head=True,
        confidence_head_with_markov=True,
        final_logit_softcapping=text.final_logit_softcapping,
        own_embedding=False,
        own_head=False,
    )


def unpacked(params: nnx.State) -> nnx.State:
    """Returns parameters with plain experts, which are faster in large batches."""
    return jax.tree.map(
        lambda w: dequantize(w, compute_dtype()) if isinstance(w, QuantTensor) else w,
        params,
        is_leaf=lambda w: isinstance(w, QuantTensor),
    )


def flatten(params: nnx.State) -> dict[str, jax.Array]:
    """Returns parameters by path in float32."""
    flat = nnx.to_flat_state(params)
    return {"/".join(map(str, p)): v.get_value().astype(jnp.float32) for p, v in flat}


def unflatten(config: DrafterConfig, params: dict[str, Any], dtype: jnp.dtype) -> nnx.State:
    """Undoes `flatten`, in the dtype to compute with."""
    flat = nnx.to_flat_state(abstract_drafter(config, dtype))
    return nnx.from_flat_state(
        [(p, v.replace(params["/".join(map(str, p))].astype(dtype))) for p, v in flat]
    )


def read(target: nnx.State, config: Config, drafter: DrafterConfig, batch: data.Batch) -> Forward:
    """Lets the target read a batch, with the drafter's taps."""
    tiles = (batch.tiles.astype(jnp.float32) / 255 - 0.5) / 0.5
    features = jax.vmap(lambda t, g: encode_image(target, config, t, g))(tiles, batch.grid)
    features = features.reshape(-1, config.text.hidden_size)
    rows, width = batch.tokens.shape
    empty = init_cache(config.text, rows, width, 1, features.dtype)
    out = forward(
        target, config, batch.tokens, batch.lengths, empty, features, batch.image_index,
        taps=drafter.target_layer_ids, experts=dense_experts,
    )  # fmt: skip
    return jax.lax.stop_gradient(out)


def draft_blocks(params, drafter, target, config, batch, key, anchors) -> loss.Blocks:
    """Drafts at random anchors of a batch."""
    out = read(target, config, drafter, batch)
    chosen, real = loss.choose_anchors(batch.mask, key, anchors)
    return loss.blocks(
        unflatten(drafter, params, out.hidden.dtype), drafter, target, config, out,
        batch.tokens, batch.mask, batch.lengths, chosen, real,
    )  # fmt: skip


def make_optimizer() -> optax.GradientTransformation:
    """Adam with decay, for a learning rate of 1."""
    return optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.scale_by_adam(b1=0.9, b2=0.98),
        optax.add_decayed_weights(0.01),
        optax.scale(-1.0),
    )


def train_step(state, target, batch, seed, rate, *, drafter, config, optimizer, anchors):
    """Returns the new state and a summary of the batch."""

    def objective(params):
        key = jax.random.key(seed)
        found = draft_blocks(params, drafter, target, config, batch, key, anchors)
        return loss.loss(found), loss.summary(found)

    (value, found), gradients = jax.value_and_grad(objective, has_aux=True)(state.params)
    updates, moments = optimizer.update(gradients, state.optimizer, state.params)
    params = jax.tree.map(lambda w, u: w + rate * u, state.params, updates)
    return TrainState(params, moments), {"loss": value, **found}


def anchors_of(batch: data.Batch) -> int:
    """Returns how many anchors a row of a batch gets."""
    return ANCHORS_LONG if batch.tokens.shape[1] > data.PROMPT + data.REPLY else ANCHORS_SHORT


def export(folder: Path, config: DrafterConfig, params: dict[str, Any]) -> None:
    """Writes the drafter in DeepSpec's layout, bfloat16."""
    tensors = published(unflatten(config, params, jnp.dtype(jnp.bfloat16)))
    write_published(folder, tensors.items(), config_json(config))

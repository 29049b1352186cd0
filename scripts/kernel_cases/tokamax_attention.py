"""tokamax's flash attention on the inputs of decode attention, where JAX has a GPU."""

import dataclasses

import jax
import jax.numpy as jnp


def attend(
    q, r, k, v, proj, sink, gate, start, lengths, *, implementation: str, splits: int | None = None
) -> jax.Array:
    """`rel_attention_decode` of one sequence by tokamax, given the bias as a tensor of all scores.

    Args:
      k, v: the linear cache up to the last query, no slot more: a slice of it would be a copy.
      start, lengths: told by `k` and `q` already.
      implementation: "mosaic" or "triton".
      splits: parts of the keys, with the query heads of a KV head side by side as more queries;
        None: what tokamax does by itself, one program per head over all keys.

    Raises:
      ImportError: tokamax is not installed or JAX has no GPU.
    """
    from tokamax.ops import gpu

    if jax.default_backend() != "gpu":
        raise ImportError("tokamax's kernels run on a GPU")
    ops = {"mosaic": gpu.PallasMosaicFlashAttention, "triton": gpu.PallasTritonFlashAttention}
    return attend_with(ops[implementation](), q, r, k, v, proj, sink, gate, splits)


def attend_with(op, q, r, k, v, proj, sink, gate, splits: int | None) -> jax.Array:
    """`attend` by any of tokamax's ops for attention."""
    tokens, heads, dim = q.shape[1:]
    rows = k.shape[2] if splits else heads  # the heads that are left as heads
    groups = heads // rows
    folded = q.reshape(tokens, rows, groups, dim).swapaxes(1, 2).reshape(1, -1, rows, dim)
    bias = _bias(r.reshape(tokens, rows, groups, -1), proj, k.shape[1])
    if splits:
        bound = op.bind(folded, k, v, bias=bias, return_residuals=True)
        op = op.replace(config=dataclasses.replace(bound.heuristics_config, split_k=splits))
    out, (largest, total) = op(folded, k, v, bias=bias, return_residuals=True)
    out = out.reshape(tokens, groups, rows, dim).swapaxes(1, 2).reshape(q.shape)
    lse = (largest + jnp.log(total)).reshape(rows, tokens, groups)
    lse = lse.swapaxes(0, 1).reshape(sink.shape)
    # The sink is one more key without a value.
    kept = jax.nn.sigmoid(lse - sink)[..., None]
    return out * kept * jax.nn.sigmoid(gate.astype(jnp.float32))


def _bias(r, proj, keys):
    """The bias of every score, heads first: 0 beyond the extent, -inf for keys after the query."""
    tokens, rows, groups, _ = r.shape
    extent = proj.shape[1]
    near = jnp.einsum("thgr,re->thge", r, proj, preferred_element_type=jnp.float32)
    near = near.astype(r.dtype)[..., ::-1]  # the farthest key first

    def row(token):
        after = tokens - 1 - token
        seen = jnp.pad(near[token], ((0, 0), (0, 0), (keys - extent - after, 0)))
        return jnp.pad(seen, ((0, 0), (0, 0), (0, after)), constant_values=-jnp.inf)

    bias = jnp.stack([row(token) for token in range(tokens)], axis=1)
    return bias.reshape(1, rows, tokens * groups, keys)

"""The image tower in PyTorch, as one would write it there, for bench_vision.py."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
import torch.nn.functional as F
from flax import nnx

from inkling_jax.config import VisionConfig
from inkling_jax.vision import VisionTower, _axial_angles, _patch_positions


class TorchTower:
    """Encodes pictures of one size. Position embeddings and angles are made by ours, once."""

    version = f"torch {torch.__version__}, {'cuda' if torch.cuda.is_available() else 'cpu'}"

    def __init__(self, params: Any, config: VisionConfig, rows: int, columns: int):
        self.config, self.device = config, "cuda" if torch.cuda.is_available() else "cpu"
        tower = nnx.merge(nnx.split(VisionTower(config, jnp.bfloat16))[0], params)
        row, col = _patch_positions(rows * columns, config.spatial_merge_size, jnp.array(columns))
        size = jnp.array((rows, columns)) * config.spatial_merge_size
        self.positions = self.put(tower._positions(row, col, size))
        zero = jnp.zeros(1, row.dtype)
        angles = _axial_angles(*(jnp.concatenate((zero, x + 1)) for x in (row, col)), config)
        self.cos, self.sin = (self.put(f(angles))[:, None].float() for f in (jnp.cos, jnp.sin))
        self.weights = {
            "/".join(map(str, path)): self.put(v.get_value())
            for path, v in nnx.to_flat_state(params)
        }

    def put(self, x: Any) -> torch.Tensor:
        """An array as a bfloat16 tensor on the device."""
        copy = np.array(jax.device_get(x), np.float32)
        return torch.from_numpy(copy).to(self.device, torch.bfloat16)

    def wait(self, x: torch.Tensor) -> torch.Tensor:
        """Waits until it is computed."""
        if self.device == "cuda":
            torch.cuda.synchronize()
        return x

    def to_numpy(self, x: torch.Tensor) -> np.ndarray:
        """A tensor as float32 on the host."""
        return x.float().cpu().numpy()

    def _linear(self, x, name):
        return F.linear(x, self.weights[f"{name}/weight"], self.weights.get(f"{name}/bias"))

    def _norm(self, x, name):
        weight, bias = self.weights[f"{name}/weight"], self.weights[f"{name}/bias"]
        return F.layer_norm(x, x.shape[-1:], weight, bias, self.config.layer_norm_eps)

    def _rotate(self, x):
        pairs = x.float().unflatten(-1, (-1, 2))
        turned = torch.stack((-pairs[..., 1], pairs[..., 0]), -1).flatten(-2)
        return (x * self.cos + turned * self.sin).to(x.dtype)

    @torch.inference_mode()
    def __call__(self, tiles: torch.Tensor) -> torch.Tensor:
        """Encodes tiles [n, P, t, t, 3] into [n, P, D]."""
        (n, count), m, p = tiles.shape[:2], self.config.spatial_merge_size, self.config.patch_size
        heads, weights = self.config.num_attention_heads, self.weights
        patches = tiles.reshape(n, count, m, p, m, p, 3).transpose(3, 4).reshape(n, -1, 3 * p * p)
        x = F.linear(patches, weights["patch_embedding"]) + self.positions
        first = weights["class_embedding"] + weights["class_position"]
        x = self._norm(torch.cat((first.expand(n, 1, -1), x), 1), "ln_pre")
        for i in range(self.config.num_hidden_layers):
            at = f"layers/{i}"
            y = self._norm(x, f"{at}/ln_1")
            q, k, v = (
                self._linear(y, f"{at}/attn/{name}").unflatten(-1, (heads, -1)) for name in "qkv"
            )
            q, k, v = (z.transpose(1, 2) for z in (self._rotate(q), self._rotate(k), v))
            y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
            x = x + weights[f"{at}/ls_1"] * self._linear(y, f"{at}/attn/out")
            y = F.gelu(self._linear(self._norm(x, f"{at}/ln_2"), f"{at}/mlp/fc"))
            x = x + weights[f"{at}/ls_2"] * self._linear(y, f"{at}/mlp/proj")
        merged = x[:, 1:].reshape(n, count, -1)
        return self._linear(F.gelu(self._linear(merged, "proj_in")), "proj_out")

"""What a model directory holds and what memory it needs, told from its headers alone."""

import collections
import dataclasses
import functools
import math
from pathlib import Path

import jax
import jax.numpy as jnp
from flax import nnx

from checkpoints.convert import is_converted
from inkling_jax.cache import init_cache
from inkling_jax.config import Config
from inkling_jax.hub import resolve
from inkling_jax.loading import checkpoint_params
from inkling_jax.quant import QuantTensor
from pallas_kernels.moe_experts import PackedExperts

DEFAULT_CONTEXT = 8192


@dataclasses.dataclass(frozen=True)
class Share:
    """How much of a model is in one format; packed experts with their scales."""

    parameters: int
    nbytes: int


@dataclasses.dataclass(frozen=True)
class Inspection:
    """What a directory holds.

    Attributes:
      directory: where it lies.
      converted: an Orbax checkpoint of ours, not a published directory.
      config: the architecture.
      formats: parameters and bytes by format, the largest first.
      expert_formats: of each layer's routed experts.
      tokenizer, template: whether texts and chats can be read.
      context: tokens for which `cache_bytes` is counted.
      cache_bytes: what one sequence of that many tokens adds, in bfloat16.
    """

    directory: str
    converted: bool
    config: Config
    formats: dict[str, Share]
    expert_formats: tuple[str, ...]
    tokenizer: bool
    template: bool
    context: int
    cache_bytes: int

    @property
    def parameters(self) -> int:
        """Parameters in all formats."""
        return sum(share.parameters for share in self.formats.values())

    @property
    def nbytes(self) -> int:
        """Bytes in all formats, scales included."""
        return sum(share.nbytes for share in self.formats.values())


def inspect(
    model: str | Path, revision: str | None = None, context: int | None = None
) -> Inspection:
    """Looks at a model without reading its tensors.

    Args:
      model: a published or a converted directory, or a hub id.
      revision: branch, tag or commit of a hub id.
      context: tokens of the sequence whose cache is counted, 8,192 or what the model reads at most.

    Raises:
      InputError: the directory does not hold a model, or tensors and configuration disagree.
    """
    directory = resolve(model, revision)
    config = Config.from_file(directory / "config.json")
    if context is None:
        context = min(DEFAULT_CONTEXT, config.text.max_position_embeddings)
    config.text.check_context(context)
    params = dict(nnx.to_flat_state(checkpoint_params(directory, config)))
    parameters, nbytes = collections.Counter(), collections.Counter()
    for variable in params.values():
        value = variable.get_value()
        parameters[format_of(value)] += math.prod(value.shape)
        nbytes[format_of(value)] += sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(value))
    layers = range(config.text.num_hidden_layers)
    cache = jax.eval_shape(
        functools.partial(init_cache, config.text, 1, context, 1, jnp.dtype(jnp.bfloat16))
    )
    return Inspection(
        directory=str(directory),
        converted=is_converted(directory),
        config=config,
        formats={name: Share(parameters[name], size) for name, size in nbytes.most_common()},
        expert_formats=tuple(
            format_of(params["layers", i, "moe", "w13"].get_value()) for i in layers
        ),
        tokenizer=(directory / "tokenizer.json").is_file(),
        template=(directory / "chat_template.jinja").is_file(),
        context=context,
        cache_bytes=sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(cache)),
    )


def format_of(value: jax.ShapeDtypeStruct | QuantTensor | PackedExperts) -> str:
    """Returns the name of a format, packed or not."""
    if isinstance(value, QuantTensor | PackedExperts):
        return value.format
    return value.dtype.name

"""Which published tensor becomes which parameter: a table, and a plan that accounts for every key.

Source: spec checkpoint.md, "The published checkpoint layout" and "Expert formats".
"""

import dataclasses
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol, runtime_checkable

import numpy as np

from checkpoints.safetensors_reader import NUMPY_DTYPES, TensorInfo
from checkpoints.transforms import (
    BYTE,
    E4M3,
    FLOAT32,
    FLOATS,
    Leaf,
    Path,
    Shape,
    bits,
    cast,
    experts,
    heads_first,
    heads_last,
    outer_scale,
    same,
    scales,
    taps,
)
from inkling_jax.errors import InputError, report

Transform = Callable[[Shape], Shape]
Table = Mapping[str, tuple[str, Transform]]

_LLM, _LAYER = "model.llm", "model.llm.layers.{i}"
_VISUAL, _BLOCK = "model.visual.backbone", "model.visual.backbone.layers.{i}"

# Parameter -> published name and shape transform. {i} is the layer, {below} the layer before it.
PUBLISHED: Table = {
    "embed/weight": (f"{_LLM}.embed.weight", same),
    "embed_norm/weight": (f"{_LLM}.embed_norm.weight", same),
    "norm/weight": (f"{_LLM}.norm.weight", same),
    "unembed/weight": (f"{_LLM}.unembed.weight", same),
    "output_query": (f"{_LLM}.attn_res.output_query", same),
    "layers/{i}/attn_query": (f"{_LLM}.attn_res.attn_queries.{{below}}", same),
    "layers/{i}/mlp_query": (f"{_LLM}.attn_res.mlp_queries.{{i}}", same),
    "layers/{i}/attn/wq": (f"{_LAYER}.attn.wq_du.weight", heads_first),
    "layers/{i}/attn/wk": (f"{_LAYER}.attn.wk_dv.weight", heads_first),
    "layers/{i}/attn/wv": (f"{_LAYER}.attn.wv_dv.weight", heads_first),
    "layers/{i}/attn/wr": (f"{_LAYER}.attn.wr_du.weight", heads_first),
    "layers/{i}/attn/gate": (f"{_LAYER}.attn.gate_attn.weight", heads_first),
    "layers/{i}/attn/sink": (f"{_LAYER}.attn.attn_sink_proj.weight", same),
    "layers/{i}/attn/wo": (f"{_LAYER}.attn.wo_ud.weight", heads_last),
    "layers/{i}/attn/q_scale": (f"{_LAYER}.attn.q_l2_clip.scale", same),
    "layers/{i}/attn/r_scale": (f"{_LAYER}.attn.rel_l2_clip.scale", same),
    "layers/{i}/attn/rel_proj": (f"{_LAYER}.attn.rel_logits_proj.proj", same),
    "layers/{i}/attn/k_conv/weight": (f"{_LAYER}.attn.k_sconv.weight", taps),
    "layers/{i}/attn/v_conv/weight": (f"{_LAYER}.attn.v_sconv.weight", taps),
    "layers/{i}/attn/k_conv/static": (f"{_LAYER}.attn.k_sconv.static_w", heads_last),
    "layers/{i}/attn/v_conv/static": (f"{_LAYER}.attn.v_sconv.static_w", heads_last),
    "layers/{i}/attn/k_conv/dynamic": (f"{_LAYER}.attn.k_sconv.weight_proj", heads_first),
    "layers/{i}/attn/v_conv/dynamic": (f"{_LAYER}.attn.v_sconv.weight_proj", heads_first),
    "layers/{i}/attn_norm/weight": (f"{_LAYER}.attn_norm.weight", same),
    "layers/{i}/q_norm/weight": (f"{_LAYER}.q_input_norm.weight", same),
    "layers/{i}/k_norm/weight": (f"{_LAYER}.k_input_norm.weight", same),
    "layers/{i}/v_norm/weight": (f"{_LAYER}.v_input_norm.weight", same),
    "layers/{i}/mlp_norm/weight": (f"{_LAYER}.mlp_norm.weight", same),
    "layers/{i}/attn_conv/weight": (f"{_LAYER}.attn_sconv.weight", taps),
    "layers/{i}/mlp_conv/weight": (f"{_LAYER}.mlp_sconv.weight", taps),
    "layers/{i}/moe/gate": (f"{_LAYER}.mlp.gate.weight", same),
    "layers/{i}/moe/bias": (f"{_LAYER}.mlp.gate.bias", same),
    "layers/{i}/moe/w13": (f"{_LAYER}.mlp.experts.w13_weight", experts),
    "layers/{i}/moe/w2": (f"{_LAYER}.mlp.experts.w2_weight", experts),
    "vision/patch_embedding": (f"{_VISUAL}.embeddings.patch_embedding.weight", same),
    "vision/position_embedding": (f"{_VISUAL}.embeddings.position_embedding", same),
    "vision/class_embedding": (f"{_VISUAL}.embeddings.class_embedding", same),
    "vision/class_position": (f"{_VISUAL}.embeddings.cls_position_embedding", same),
    "vision/layers/{i}/ls_1": (f"{_BLOCK}.ls_1.gamma", same),
    "vision/layers/{i}/ls_2": (f"{_BLOCK}.ls_2.gamma", same),
    **{
        f"{ours}/{part}": (f"{theirs}.{part}", same)
        for part in ("weight", "bias")
        for ours, theirs in {
            "vision/ln_pre": f"{_VISUAL}.ln_pre",
            "vision/layers/{i}/ln_1": f"{_BLOCK}.ln_1",
            "vision/layers/{i}/ln_2": f"{_BLOCK}.ln_2",
            "vision/layers/{i}/attn/q": f"{_BLOCK}.self_attn.q_proj",
            "vision/layers/{i}/attn/k": f"{_BLOCK}.self_attn.k_proj",
            "vision/layers/{i}/attn/v": f"{_BLOCK}.self_attn.v_proj",
            "vision/layers/{i}/attn/out": f"{_BLOCK}.self_attn.out_proj",
            "vision/layers/{i}/mlp/fc": f"{_BLOCK}.mlp.c_fc",
            "vision/layers/{i}/mlp/proj": f"{_BLOCK}.mlp.c_proj",
            "vision/proj_in": "model.visual.proj_in",
            "vision/proj_out": "model.visual.proj_out",
        }.items()
    },
}

# Published names that no parameter is made of, and why.
IGNORED: Mapping[str, str] = {
    r"model\.visual\..*\.inv_freq": "rotary frequencies are computed from rope_theta",
}


@runtime_checkable
class ShapeDtype(Protocol):
    """What the model declares of a parameter, as `jax.ShapeDtypeStruct` has it."""

    @property
    def shape(self) -> Shape: ...

    @property
    def dtype(self) -> Any: ...


@dataclasses.dataclass(frozen=True)
class Plan:
    """What to read: all leaves of the parameter tree, and the keys left out with the reasons."""

    leaves: tuple[Leaf, ...]
    ignored: Mapping[str, str]

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return sum(leaf.nbytes for leaf in self.leaves)


def make_plan(
    index: Mapping[str, TensorInfo],
    expected: Mapping[Path, ShapeDtype],
    dtype: Any = None,
    where: str = "checkpoint",
    table: Table = PUBLISHED,
    ignored: Mapping[str, str] = IGNORED,
) -> Plan:
    """Maps published tensors to parameters; every one is used once or listed as ignored.

    Args:
      index: published tensors by name, from `read_index`.
      expected: shape and dtype of every parameter, by its path, experts unpacked ([n, R, C]). One
        declared as float32 gets float32; any other takes `dtype`.
      dtype: of the other float parameters; None keeps each as it is published.
      where: names the checkpoint in errors.
      table, ignored: the layout, Inkling 2's by default.

    Returns:
      The plan; a packed expert is several leaves: `values`, `scales` and, for NVFP4, `outer`.

    Raises:
      InputError: one report of all tensors that are missing, unknown, misshapen or of a wrong
        dtype.
    """
    leaves: list[Leaf] = []
    problems: list[str] = []
    used: set[str] = set()
    for path, want in expected.items():
        for leaf, needs in _leaves(path, want, dtype, table, index):
            faults = [fault for need in needs if (fault := _fault(need, index, path))]
            used.update(need.name for need in needs)
            problems += faults
            if not faults:
                names = tuple(need.name for need in needs)
                sources = tuple(index[name] for name in names)
                leaves.append(dataclasses.replace(leaf, names=names, sources=sources))
    left: dict[str, str] = {}
    for name in sorted(index.keys() - used):
        reason = next((why for key, why in ignored.items() if re.fullmatch(key, name)), None)
        if reason is None:
            problems.append(f"unknown: {name}, no parameter is made of it")
        else:
            left[name] = reason
    if problems:
        raise report(where, "in its tensors", sorted(problems))
    return Plan(tuple(leaves), left)


@dataclasses.dataclass(frozen=True)
class _Need:
    """A published tensor as a leaf needs it."""

    name: str
    dtypes: tuple[str, ...]
    shape: Shape


def _leaves(
    path: Path, want: ShapeDtype, dtype: Any, table: Table, index: Mapping[str, TensorInfo]
) -> Iterator[tuple[Leaf, tuple[_Need, ...]]]:
    """Yields the leaves that a parameter consists of, and the tensors that each is made of."""
    layer = next((part for part in path if isinstance(part, int)), 0)
    pattern = "/".join("{i}" if isinstance(part, int) else part for part in path)
    source, transform = table[pattern]
    name = source.format(i=layer, below=layer - 1)
    published = index[name].dtype if name in index else "F32"
    shape = tuple(want.shape)

    if transform is experts and published == "F8_E4M3":
        yield from _mxfp8(path, name, shape)
    elif transform is experts and published == "U8":
        yield from _nvfp4(path, name, shape)
    else:
        kept = NUMPY_DTYPES[published] if published in FLOATS else np.float32
        target = np.dtype(np.float32 if want.dtype == np.float32 else dtype or kept)
        yield Leaf(path, shape, target, cast), (_Need(name, FLOATS, transform(shape)),)


def _mxfp8(path: Path, name: str, shape: Shape) -> Iterator[tuple[Leaf, tuple[_Need, ...]]]:
    blocks = _blocks(name, shape, 32)
    yield Leaf((*path, "values"), shape, E4M3, bits), (_Need(name, ("F8_E4M3",), shape),)
    need = _Need(f"{name}_scale", ("U8", "F8_E8M0"), blocks)
    yield Leaf((*path, "scales"), blocks, BYTE, scales), (need,)


def _nvfp4(path: Path, name: str, shape: Shape) -> Iterator[tuple[Leaf, tuple[_Need, ...]]]:
    blocks, pairs = _blocks(name, shape, 16), _blocks(name, shape, 2)
    yield Leaf((*path, "values"), pairs, BYTE, bits), (_Need(name, ("U8",), pairs),)
    need = _Need(f"{name}_scale", ("F8_E4M3",), blocks)
    yield Leaf((*path, "scales"), blocks, E4M3, scales), (need,)
    amax = _Need(f"{name}_amax", FLOATS, shape[:1])
    denominator = _Need(f"{name}_outer_scale_denominator", FLOATS, ())
    yield Leaf((*path, "outer"), shape[:1], FLOAT32, outer_scale), (amax, denominator)


def _blocks(name: str, shape: Shape, size: int) -> Shape:
    """Returns the shape of what has one entry per `size` columns."""
    *rows, columns = shape
    if columns % size:
        raise InputError(
            f"tensor {name} is packed in blocks of {size}, which do not divide its columns, "
            f"{columns}"
        )
    return (*rows, columns // size)


def _fault(need: _Need, index: Mapping[str, TensorInfo], path: Path) -> str | None:
    """Returns what is wrong with a needed tensor, or None."""
    info = index.get(need.name)
    if info is None:
        return f"missing: {need.name}, for {'/'.join(map(str, path))}"
    if info.dtype not in need.dtypes:
        return f"wrong dtype: {need.name} is {info.dtype}, it must be {' or '.join(need.dtypes)}"
    if info.shape != need.shape:
        return f"misshapen: {need.name} is {list(info.shape)}, it must be {list(need.shape)}"
    return None

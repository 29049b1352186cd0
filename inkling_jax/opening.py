"""Opens a model's directory: reads settings, tokenizer, weights and drafter into an `Engine`."""

import dataclasses
import functools
from pathlib import Path
from typing import Literal

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from inkling_jax.config import Config
from inkling_jax.drafting import open_speculator, with_costs
from inkling_jax.engine import Engine, on
from inkling_jax.errors import InputError
from inkling_jax.hub import resolve
from inkling_jax.loading import load_params, mesh_mistakes, pack_for_kernels
from inkling_jax.model import param_shardings
from inkling_jax.settings import read_settings
from sharding.hosts import agree_on, join_hosts, together
from sharding.mesh import MeshConfig, make_mesh


def load(
    model: str | Path,
    *,
    dtype: DTypeLike | None = None,
    context: int | None = None,
    revision: str | None = None,
    drafter: str | Path | None = None,
    draft_tokens: int | Literal["auto"] | None = None,
    mesh: str | None = None,
) -> Engine:
    """Loads a model, ready to generate.

    Args:
      model: a published or a converted directory, or a hub id.
      dtype: of activations and unpacked weights; by default bfloat16 on a GPU, float32 on a CPU.
      context: the most tokens of prompt and reply, a fixed cache; None grows with the requests.
      revision: branch, tag or commit of a hub id.
      drafter: directory of a DSpark drafter, "auto" for the one in the model's directory if it has
        one, None (or "none") to decode without.
      draft_tokens: how many drafts each round verifies; "auto" as many as pay, which is the default
        where the drafter has a confidence head.
      mesh: devices to spread the model over, such as `tp=4,cp=2`, a preset or a YAML file, see
        `sharding.mesh`; by default it runs on one device. Several processes meet first, see
        `sharding.hosts`.

    Raises:
      InputError: the model cannot be found, is damaged, or does not fit the device, the mesh or the
        drafter.
    """
    read = functools.partial(_load, model, dtype, context, revision, drafter, draft_tokens)
    if mesh is None:
        return _prepared(read(None))
    with mesh_mistakes():
        config = MeshConfig.parse(mesh)
        join_hosts()
        agree_on(config)
        devices = make_mesh(config)
        with together("loading"):
            engine = read(devices)
        return _prepared(engine)


def _activations_dtype(dtype: DTypeLike | None) -> jnp.dtype:
    on_cpu = jax.default_backend() == "cpu"
    try:
        chosen = jnp.dtype(dtype or ("float32" if on_cpu else "bfloat16"))
    except TypeError as e:
        raise InputError(f"dtype is {dtype!r}, it must be float32 or bfloat16") from e
    if chosen not in (jnp.dtype("float32"), jnp.dtype("bfloat16")):
        raise InputError(f"dtype is {dtype!r}, it must be float32 or bfloat16")
    if on_cpu and chosen == jnp.bfloat16:
        raise InputError("dtype is bfloat16, on a CPU it must be float32")
    return chosen


def _load(model, dtype, context, revision, drafter, draft_tokens, mesh: Mesh | None) -> Engine:
    directory = resolve(model, revision)
    config = Config.from_file(directory / "config.json")
    if context is not None:
        config.text.check_context(context)
        context = int(context)
    settings = read_settings(directory, config)
    dtype = _activations_dtype(dtype)
    speculator = open_speculator(directory, config, dtype, drafter, draft_tokens)
    shardings = mesh and functools.partial(param_shardings, mesh=mesh)
    params = load_params(directory, config, dtype, shardings)
    return Engine(
        params, config, settings.tokenizer, settings.defaults, settings.stop_ids, context,
        speculator, mesh,
    )  # fmt: skip


def _prepared(engine: Engine) -> Engine:
    """Packs experts and times the drafter: what all devices do together, once all have loaded."""
    mesh, speculator = engine.mesh, engine.speculator
    with on(mesh):
        params = pack_for_kernels(engine.params, engine.config)
        if speculator is not None:
            if mesh is not None:  # a drafter is small: every device has all of it
                speculator = jax.device_put(speculator, NamedSharding(mesh, PartitionSpec()))
            speculator = with_costs(params, engine.config, speculator)
    return dataclasses.replace(engine, params=params, speculator=speculator)

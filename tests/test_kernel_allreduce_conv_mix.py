"""allreduce_conv_mix without a GPU: its protocol, its order of steps, its plain version."""

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_kernel_conv_mix as mixing
from jax.extend.core import jaxprs_in_params
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from pallas_kernels import allreduce_conv_mix as contract
from pallas_kernels.allreduce_conv_mix import protocol
from pallas_kernels.allreduce_conv_mix.reference import allreduce_conv_mix as reference
from pallas_kernels.conv_mix.reference import conv_mix as conv_mix_reference

WHERE = {"start": jnp.array([3, 0], jnp.int32), "lengths": jnp.array([2, 1], jnp.int32)}


@pytest.mark.parametrize(("ranks", "calls"), [(2, 6), (3, 4), (4, 3)])
def test_every_interleaving_reads_the_right_summands_and_ends(ranks, calls):
    orders_of_one_device = calls * (6 + 2 * ranks) + 1
    assert protocol.explore(ranks, calls) > ranks * orders_of_one_device


@pytest.mark.parametrize(
    ("removed", "what_happens"),
    [
        ({"clear"}, "told too often|reads"),
        ({"arrive", "leave"}, "reads"),
        ({"leave"}, "reads"),
        ({"arrive"}, "waits"),
        ({"wait"}, "reads"),
        ({"tell"}, "waits"),
    ],
)
@pytest.mark.parametrize("ranks", [2, 3])
def test_a_protocol_without_one_of_its_steps_goes_wrong(removed, what_happens, ranks):
    steps = tuple(step for step in protocol.STEPS if step not in removed)
    with pytest.raises(protocol.ProtocolError, match=what_happens):
        protocol.explore(ranks, 3, steps)


def test_telling_before_reading_goes_wrong():
    order = ("write", "clear", "arrive", "leave", "tell", "read", "wait", "reuse")
    with pytest.raises(protocol.ProtocolError, match="reads -1"):
        protocol.explore(2, 3, order)


def mesh_of(sizes):
    """Simulated devices with these axes."""
    devices = jax.devices()[: math.prod(sizes.values())]
    return Mesh(np.reshape(devices, tuple(sizes.values())), tuple(sizes))


def on_devices(fn, mesh, inputs):
    """Runs fn(u, other inputs) with one summand a device; the results of each device."""
    given = {**inputs, **WHERE}
    summands = given.pop("u")
    return jax.jit(jax.shard_map(
        lambda u, given: jax.tree.map(lambda x: x[None], fn(u[0], **given)),
        mesh=mesh, in_specs=(P(mesh.axis_names), P()), out_specs=P(mesh.axis_names),
        check_vma=False,
    ))(summands, given)  # fmt: skip


def make_inputs(ranks, tokens=2):
    """Inputs whose `u` are `ranks` summands."""
    inputs = mixing.make_inputs(1, 2, tokens, 1, 2)
    u = jax.random.normal(jax.random.key(7), (ranks, *inputs["u"].shape))
    return {**inputs, "u": u}


def test_the_plain_version_adds_up_first():
    mesh = mesh_of({"tp0": 2, "tp1": 2})
    options = {"dtypes": (jnp.float32,), **mixing.EPS}
    inputs = make_inputs(4)
    whole = conv_mix_reference(**{**inputs, "u": inputs["u"].sum(axis=0)}, **WHERE, **options)
    parts = on_devices(
        lambda u, **given: reference(u, axes=("tp0", "tp1"), **given, **options), mesh, inputs
    )
    for part, expected in zip(jax.tree.leaves(parts), jax.tree.leaves(whole), strict=True):
        np.testing.assert_allclose(part, np.broadcast_to(expected, part.shape), atol=1e-5)


def communication(jaxpr):
    """Yields what a kernel does with its peers, in order."""
    for equation in jaxpr.eqns:
        name = equation.primitive.name
        if name in ("semaphore_signal", "semaphore_wait"):
            yield {"semaphore_signal": "tell", "semaphore_wait": "wait"}[name]
        elif name == "load" and "PeerMemRef" in str(equation.params["tree"]):
            yield "read"
        for inner in jaxprs_in_params(equation.params):
            yield from communication(inner)


@pytest.mark.parametrize("tokens", [1, 2])
def test_the_kernel_keeps_the_order_of_the_protocol(tokens):
    mesh = mesh_of({"dp": 1, "tp0": 2, "tp1": 2})

    def run(u, **given):
        options = {"dtypes": (jnp.float32,), **mixing.EPS}
        return contract.allreduce_conv_mix(u, axes=("tp0", "tp1"), **given, **options)

    program = jax.make_jaxpr(lambda inputs: on_devices(run, mesh, inputs))(make_inputs(4, tokens))
    steps = [
        (step, len(list(same))) for step, same in itertools.groupby(communication(program.jaxpr))
    ]
    order = tuple(step for step in protocol.STEPS if step in ("read", "tell", "wait"))
    assert steps == list(zip(order, (4 * tokens, 4, 1), strict=True))


def test_refusals_name_the_value():
    assert contract.unsupported({"dp": 9, "tp": 8}, ("tp",)) is None
    assert contract.unsupported({"ep": 2, "tp": 8}, ("ep", "tp")).startswith("16 devices")

"""The all-reduce in front of conv_mix in plain JAX: the kernel's specification, and its peer."""

import jax

from pallas_kernels.conv_mix.reference import conv_mix


def allreduce_conv_mix(u, *args, axes, **options):
    """Arguments and results as `pallas_kernels.allreduce_conv_mix.allreduce_conv_mix`."""
    return conv_mix(jax.lax.psum(u, tuple(axes)), *args, **options)

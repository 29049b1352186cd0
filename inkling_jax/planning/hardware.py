"""Devices to plan for: one table, with where its figures come from.

Memory and `peak` are the vendor's data sheets (dense bfloat16; NVLink per direction). `reachable`
was measured on H200s with JAX 0.11.2:

- read: the sum over 4 GB, 4.58 TB/s (scripts/results/decode_h200.json).
- products: a bfloat16 8192³ product through XLA, 670 TFLOP/s.
- experts: both grouped products at 8,192 tokens, 371 TFLOP/s, of a peer's kernel (triton_kernels).
  Ours has since reached 456 to 509, and 341 to 361 with a TP4 rank's columns
  (scripts/results/kernels_h200.json).
- attention: a prototype kernel with the relative bias, 8,192 tokens: 288 to 333 TFLOP/s where
  layers slide, 573 to 611 where they are full; the lower figure stands for both.
- reduce, gather: 8,192 × 4,608 bfloat16 between two devices by NCCL: all-reduce 390 µs,
  reduce-scatter and all-gather 440 µs together. More devices are assumed to reach the same.
- hop: a small all-reduce by NCCL inside a compiled loop, 16.5 µs. Since then a decode step of six
  layers over two H200s has taken 13 µs more a collective than a device's share without them
  (scripts/results/sharded_h200.json).

What a launch costs beside its bytes is not in them: some 3 µs in a decode step of a TP4 rank
(scripts/results/decode_rank_h200.json), of which a layer has 13.

Other devices were not measured: they are assumed to reach the same shares of their peaks.
"""

import dataclasses

# The fields of XLA's GpuTargetConfigProto that code generation asks for.
TARGET_CONFIG = """
gpu_device_info {{
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: 233472
  threads_per_core_limit: 2048
  core_count: {cores}
  fpus_per_core: 128
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: {bandwidth}
  l2_cache_size: 52428800
  clock_rate_ghz: 1.98
  device_memory_size: {memory}
  shared_memory_per_block_optin: 232448
  cuda_compute_capability {{ major: {capability} }}
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
}}
runtime_version {{ major: 13 }}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 }}
device_description_str: "{device}"
"""


@dataclasses.dataclass(frozen=True)
class Rates:
    """How fast one device works.

    Attributes:
      read: bytes a second from its own memory.
      products, experts, attention: FLOP a second of these.
      reduce, gather: bytes a second that a device sends in all-reduces and in the others.
      hop: seconds that any collective takes at least.
    """

    read: float
    products: float
    experts: float
    attention: float
    reduce: float
    gather: float
    hop: float


@dataclasses.dataclass(frozen=True)
class Hardware:
    """One kind of device.

    Attributes:
      device: its name, as the CUDA driver reports it.
      capability, cores: compute capability and multiprocessors, for the compiler.
      memory: bytes.
      peak, reachable: rates of the data sheet, and those that programs reach.
    """

    device: str
    capability: int
    cores: int
    memory: float
    peak: Rates
    reachable: Rates

    @property
    def target_config(self) -> str:
        """The device as XLA's compiler wants it described."""
        return TARGET_CONFIG.format(
            device=self.device,
            capability=self.capability,
            cores=self.cores,
            bandwidth=round(self.peak.read),
            memory=round(self.memory * REPORTED),
        )


REPORTED = 151397597184 / 141e9  # an H200 has more bytes than its name says; so may others
SENT = 8192 * 4608 * 2  # by each of two devices in the measured all-reduce
MEASURED = Rates(
    read=4.58e12,
    products=670e12,
    experts=371e12,
    attention=288e12,
    reduce=SENT / 390e-6,
    gather=SENT / 440e-6,
    hop=16.5e-6,
)


def _peak(read: float, compute: float, link: float) -> Rates:
    return Rates(read, compute, compute, compute, link, link, 0.0)


_H200 = _peak(4.8e12, 989e12, 450e9)


def _as_h200(peak: Rates) -> Rates:
    """The shares of its peaks that an H200 reaches, of other peaks; what a hop takes is kept."""
    names = ("read", "products", "experts", "attention", "reduce", "gather")
    shares = {n: getattr(peak, n) * getattr(MEASURED, n) / getattr(_H200, n) for n in names}
    return Rates(**shares, hop=MEASURED.hop)


_H100, _GB200 = _peak(3.35e12, 989e12, 450e9), _peak(8e12, 2500e12, 900e9)
HARDWARE = {
    "h100": Hardware("NVIDIA H100", 9, 132, 80e9, _H100, _as_h200(_H100)),
    "h200": Hardware("NVIDIA H200", 9, 132, 141e9, _H200, MEASURED),
    "gb200": Hardware("NVIDIA GB200", 10, 152, 186e9, _GB200, _as_h200(_GB200)),
}

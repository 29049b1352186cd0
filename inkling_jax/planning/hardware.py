"""Devices to plan for: one table, with where its figures come from.

Memory and `peak` are the vendor's data sheets (dense bfloat16; NVLink per direction). `reachable`
was measured on H200s with JAX 0.11.2; files are under scripts/results:

- read: the sum over 4 GB (decode_h200.json; 4.3 to 4.7 TB/s on other days and devices).
- read_experts, launch: what makes a decoding step as long as it was, both fitted to the twelve rows
  of kernels in decode_h200.json and decode_rank_h200.json: twelve layers and a TP4 rank's share of
  48, 1, 4 and 8 tokens, 8 K and 100 K of context. These are met within 4 %, and two H200s' steps
  (sharded_h200_decode.json) within 2 %.
- products: a bfloat16 8192³ product through XLA, 648 to 682 TFLOP/s (prefill_h200.json,
  prefill_more_h200.json, kernels_h200.json).
- experts: what six layers over two devices take for 8,192 tokens beyond the same without experts,
  405 to 410 TFLOP/s (sharded_h200.json), 385 to 398 in the run before, which the rate is of. The
  kernels alone reach 455 to 486, a TP4 rank's columns 324 to 337, and with 2,048 tokens 237
  (kernels_h200.json): shorter prefills are slower than planned, 2,200 tokens of a TP4
  rank's twelve layers by half (prefill_more_h200.json).
- attention: 191 TFLOP/s where layers slide, 416 where they are full (of an early run beside another
  benchmark; alone 305 and 557, kernels_h200.json), in the proportion of a prefill of 8,192
  tokens.
- hop: what NCCL's sum in front of `conv_mix` adds to a decoding step, 14 µs between two devices
  (sharded_h200_decode.json).
- peers: what `allreduce_conv_mix` takes between two devices beyond `conv_mix`: 6.3 µs of one row to
  8.6 of eight, and 8.8 of one row within a decoding step (sharded_h200_decode.json).
- reduce, gather: 8,192 × 4,608 bfloat16 between two devices by NCCL: all-reduce 390 µs,
  reduce-scatter and all-gather 440 µs together. No committed file has these alone; with them, a
  prefill over two H200s is met within 7 %, without experts within 20 % (sharded_h200.json).

Assumed: that one process runs a mesh of up to 8 devices, that 4 or 8 exchange as fast as two, and
that other devices, none of which was measured, reach the same shares of their peaks and take as
long for launches and exchanges.
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
      read, read_experts: bytes a second from its own memory; of experts, in a decoding step.
      products, experts, attention: FLOP a second of these.
      reduce, gather: bytes a second that a device sends in all-reduces and in the others.
      hop: seconds that any collective takes at least.
      peers: seconds that a sum of few rows takes within the kernel that ends a sublayer.
      launch: seconds that a kernel takes beside its bytes.
    """

    read: float
    read_experts: float
    products: float
    experts: float
    attention: float
    reduce: float
    gather: float
    hop: float
    peers: float
    launch: float


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
    read=4.65e12,
    read_experts=3.83e12,
    products=650e12,
    experts=385e12,
    attention=255e12,
    reduce=SENT / 390e-6,
    gather=SENT / 440e-6,
    hop=13.8e-6,
    peers=9.0e-6,
    launch=3.3e-6,
)


def peak_rates(read: float, compute: float, link: float) -> Rates:
    """Returns the rates at which nothing is lost."""
    return Rates(read, read, compute, compute, compute, link, link, hop=0, peers=0, launch=0)


_H200 = peak_rates(4.8e12, 989e12, 450e9)


def _as_h200(peak: Rates) -> Rates:
    """The shares of its peaks that an H200 reaches, of other peaks."""
    names = ("read", "read_experts", "products", "experts", "attention", "reduce", "gather")
    shares = {n: getattr(peak, n) * getattr(MEASURED, n) / getattr(_H200, n) for n in names}
    return dataclasses.replace(MEASURED, **shares)


_H100, _GB200 = peak_rates(3.35e12, 989e12, 450e9), peak_rates(8e12, 2500e12, 900e9)
HARDWARE = {
    "h100": Hardware("NVIDIA H100", 9, 132, 80e9, _H100, _as_h200(_H100)),
    "h200": Hardware("NVIDIA H200", 9, 132, 141e9, _H200, MEASURED),
    "gb200": Hardware("NVIDIA GB200", 10, 152, 186e9, _GB200, _as_h200(_GB200)),
}

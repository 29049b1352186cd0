"""What one device has to do in a step, by arithmetic: bytes to move, products, collectives.

Assumed throughout: tokens pick experts evenly and each by itself, weights are read once a step, a
step's queries share one reading of the keys, activations between attention and experts are touched
once per sublayer (a fused convolution, residual, mix and norm), and nothing overlaps.
"""

import dataclasses
import math

from inkling_jax import ops
from inkling_jax.config import TextConfig
from inkling_jax.planning.hardware import Rates
from pallas_kernels.allreduce_conv_mix import MAX_RANKS
from sharding.mesh import MeshConfig

ACTIVATION, SUM = 2, 4  # bytes: what products read is bfloat16, sums are float32
BLOCK = 8  # tokens of the widest verification, which can be taken back
ENDS = "attention/last_tokens + moe/last_tokens"  # convolution states, made known to all
# Of a decoding step of one token (scripts/results/decode_h200.json).
LAUNCHES_A_LAYER, LAUNCHES_BESIDE = 11, 13
QKV = 3  # inputs of a full layer's attention, each with a mix and a norm of its own


@dataclasses.dataclass(frozen=True)
class Weights:
    """Part of the parameters, as one device has it.

    Attributes:
      part: what they are for; "experts", "head", "embedding", "image tower" or another name.
      format: of their values.
      nbytes, elements: scales count as bytes, not as elements.
    """

    part: str
    format: str
    nbytes: int
    elements: int


@dataclasses.dataclass(frozen=True)
class Shard:
    """What one device of a mesh has of a model."""

    text: TextConfig
    mesh: MeshConfig
    weights: tuple[Weights, ...]

    @property
    def slices(self) -> int:
        """How many devices tokens are split over, where they are."""
        return self.mesh.tp * self.mesh.ep

    def total(self, *parts: str) -> tuple[int, int]:
        """Returns (bytes, elements) of parts of the weights, by default of all."""
        chosen = [w for w in self.weights if not parts or w.part in parts]
        return sum(w.nbytes for w in chosen), sum(w.elements for w in chosen)


@dataclasses.dataclass(frozen=True)
class Collective:
    """Collectives of one kind in a step.

    Attributes:
      kind: such as all-reduce; `ops.REDUCE_MIX` is one within a kernel.
      where: the model's named scope.
      count: how many in a step.
      nbytes: of one, the whole array.
      devices: that take part in one.
    """

    kind: str
    where: str
    count: int
    nbytes: int
    devices: int

    @property
    def sent(self) -> float:
        """Bytes that each device sends in one, by the ring algorithm."""
        if self.kind == "collective-permute":
            return self.nbytes
        passes = 2 if self.kind == "all-reduce" else 1
        return passes * self.nbytes * (self.devices - 1) / self.devices


@dataclasses.dataclass(frozen=True)
class Part:
    """Bytes from and to the device's memory, and floating-point operations."""

    nbytes: float
    flops: float


@dataclasses.dataclass(frozen=True)
class Work:
    """One step of one device.

    Attributes:
      name: of the step.
      tokens: new ones, of all rows that the device sees.
      hit: distinct experts that they are expected to pick, in each layer and over all devices.
      parts: "products" (attention's projections, router, head, everything small), "experts",
        "attention" (queries with keys and values), "rows" (convolutions, residuals, mixes, norms).
      launches: kernels and copies of a decoding step; a prefill, where they weigh little, is taken
        to have as many.
      collectives: as the model asks for them.
    """

    name: str
    tokens: int
    hit: float
    parts: dict[str, Part]
    launches: int
    collectives: tuple[Collective, ...]

    @property
    def nbytes(self) -> float:
        return sum(part.nbytes for part in self.parts.values())

    @property
    def flops(self) -> float:
        return sum(part.flops for part in self.parts.values())

    def byte_floor(self, rates: Rates) -> float:
        """Seconds that the bytes alone take."""
        return self.nbytes / rates.read

    def flop_floor(self, rates: Rates) -> float:
        """Seconds that the operations alone take."""
        return sum(_computing(name, part, rates) for name, part in self.parts.items())

    def communication(self, rates: Rates) -> float:
        """Seconds that the collectives take, one after the other."""
        return sum(c.count * _exchanging(c, rates) for c in self.collectives)

    def expected(self, rates: Rates) -> float:
        """Seconds of the step: of each part whichever takes longer, launches, collectives."""
        bound = (
            max(_reading(name, part, rates), _computing(name, part, rates))
            for name, part in self.parts.items()
        )
        return sum(bound) + self.launches * rates.launch + self.communication(rates)


def _reading(name: str, part: Part, rates: Rates) -> float:
    return part.nbytes / (rates.read_experts if name == "experts" else rates.read)


def _computing(name: str, part: Part, rates: Rates) -> float:
    return part.flops / getattr(rates, name) if part.flops else 0.0


def _exchanging(collective: Collective, rates: Rates) -> float:
    if collective.kind == ops.REDUCE_MIX:
        return rates.peers
    rate = rates.reduce if collective.kind == "all-reduce" else rates.gather
    return rates.hop + collective.sent / rate


def distinct_experts(experts: int, picks: int, tokens: int) -> float:
    """Returns how many experts tokens are expected to hit."""
    return experts * (1 - (1 - picks / experts) ** tokens)


def visible_pairs(start: int, tokens: int, window: int | None) -> int:
    """Returns how many keys the queries at positions start, …, start + tokens - 1 see together."""

    def before(n: int) -> int:
        ramp = n if window is None else min(n, window)
        return ramp * (ramp + 1) // 2 + (n - ramp) * (window or 0)

    return before(start + tokens) - before(start)


def step(
    name: str,
    shard: Shard,
    rows: int,
    start: int,
    tokens: int,
    logits: int,
    split_tokens: bool = False,
) -> Work:
    """Returns the work of reading new tokens.

    Args:
      name: of the step.
      shard: the device's.
      rows: of the batch that the device sees.
      start: tokens of each row read before.
      tokens: new ones of each row.
      logits: tokens of each row whose logits are wanted.
      split_tokens: whether each device has a slice of the tokens between collectives (sp).
    """
    text, new = shard.text, rows * tokens
    hit = distinct_experts(text.n_routed_experts, text.num_experts_per_tok, new)
    experts, experts_elements = shard.total("experts")
    head, head_elements = shard.total("head")
    dense, dense_elements = shard.total("attention", "other")
    router, router_elements = shard.total("router")
    slices = shard.slices if split_tokens else 1
    picked = text.num_experts_per_tok / text.n_routed_experts * experts_elements
    parts = {
        "products": Part(
            dense + router + head,
            2 * new * (dense_elements + router_elements / slices)
            + 2 * rows * logits * head_elements,
        ),
        "experts": Part(hit / text.n_routed_experts * experts, 2 * new * picked),
        "attention": _attention(shard, rows, start, tokens),
        "rows": Part(new / slices * _row_bytes(text), 0.0),
    }
    collectives = _collectives(shard, rows, tokens, logits, split_tokens)
    launches = LAUNCHES_A_LAYER * text.num_hidden_layers + LAUNCHES_BESIDE
    return Work(name, new, hit, parts, launches, collectives)


def activation_bytes(shard: Shard, tokens: int, split_tokens: bool) -> int:
    """Returns what a device holds of so many tokens between two collectives of the last layer.

    That is the finished blocks and the running sum, the sum just received, the next running sum and
    a mix, all of them float32.
    """
    text = shard.text
    blocks = sum(text.starts_block(i) for i in range(text.num_hidden_layers))
    held = -(-tokens // shard.slices) if split_tokens else tokens
    return held * text.hidden_size * (blocks + 1 + 3) * SUM


def _attention(shard: Shard, rows: int, start: int, tokens: int) -> Part:
    text, tp = shard.text, shard.mesh.tp
    nbytes = flops = 0.0
    for i in range(text.num_hidden_layers):
        shape = text.attention(i)
        parts = 1 if shape.sliding else shard.mesh.cp
        keys = min(start + tokens, (shape.window or math.inf) + tokens - 1)
        local = max(1, shape.kv_heads / tp)  # fewer than devices are repeated
        nbytes += rows * keys / parts * 2 * local * shape.head_dim * ACTIVATION
        pairs = rows * visible_pairs(start, tokens, shape.window) / parts
        flops += 4 * shape.head_dim * shape.heads / tp * pairs
    return Part(nbytes, flops)


def _row_bytes(text: TextConfig) -> int:
    """Bytes per token between the collectives of all layers.

    Each sublayer reads the sum, the running sum and the finished blocks, and writes the new running
    sum, all float32, and the input of what comes next.
    """
    total, blocks = 0, 0
    for i in range(text.num_hidden_layers):
        blocks += text.starts_block(i)
        inputs = 1 if text.attention(i).sliding else QKV
        total += 2 * (3 + blocks) * SUM + inputs * ACTIVATION + SUM
    return text.hidden_size * total


def _collectives(
    shard: Shard, rows: int, tokens: int, logits: int, split_tokens: bool
) -> tuple[Collective, ...]:
    text, mesh, everyone = shard.text, shard.mesh, shard.slices
    layers, new, row = text.num_hidden_layers, rows * tokens, rows * text.hidden_size
    wide = new * text.hidden_size
    full = [text.attention(i) for i in range(layers) if not text.attention(i).sliding]
    queries = new * text.num_attention_heads // mesh.tp
    add = "reduce-scatter" if split_tokens else "all-reduce"
    own = wide // mesh.ep if split_tokens else wide  # the parts of ep have the same sums
    few = new <= ops.REDUCED_ROWS and not split_tokens
    end = ops.REDUCE_MIX if few and mesh.devices <= MAX_RANKS else add
    found = [
        Collective(add, "embed", 1, own * ACTIVATION, mesh.tp),
        Collective(end, "attention", layers, own * SUM, mesh.tp),
        Collective(end, "moe", layers, wide * SUM, everyone),
        Collective("all-gather", "unembed", 1, rows * logits * text.vocab_size * SUM, mesh.tp),
        Collective("all-reduce", "attention/softmax", len(full), queries * SUM, mesh.cp),
        Collective(
            "all-reduce",
            "attention/softmax",
            len(full),
            queries * (text.head_dim + 1) * SUM,
            mesh.cp,
        ),
    ]
    if split_tokens:
        inputs, halo = layers + (QKV - 1) * len(full), text.conv_kernel_size - 1
        ends = 2 * layers * (halo + BLOCK) * row  # of all layers, combined by the compiler
        picks = new * text.num_experts_per_tok
        found += [
            Collective("all-gather", "attention", inputs, wide * ACTIVATION, everyone),
            Collective("all-gather", "moe", layers, wide * ACTIVATION, everyone),
            Collective("all-gather", "moe", 2 * layers, picks * SUM, everyone),
            Collective("all-gather", "model", 1, wide * ACTIVATION, everyone),
            Collective("collective-permute", "attention", layers, halo * row * SUM, 2),
            Collective("collective-permute", "moe", layers, halo * row * SUM, 2),
            Collective("all-reduce", ENDS, 1, ends * SUM, everyone),
        ]
    return tuple(c for c in found if c.devices > 1)

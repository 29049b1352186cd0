"""A plan: does a model fit a mesh, with which batch and context, and how fast can it be."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import jax
from rich.console import Console

from inkling_jax.config import TextConfig
from inkling_jax.errors import InputError
from inkling_jax.loading import mesh_mistakes, packed_shapes
from inkling_jax.planning import floors
from inkling_jax.planning.floors import BLOCK, Shard, Weights, Work
from inkling_jax.planning.hardware import HARDWARE, Hardware
from inkling_jax.planning.programs import Program, Target, compile_program, default_target, devices
from inkling_jax.planning.shapes import abstract_model, device_cache, device_weights
from sharding.collectives import splits_tokens
from sharding.mesh import MeshConfig, Switch, abstract_mesh, make_mesh

PREFILL_TOKENS = 8192
DEFAULT_HARDWARE = "h200"
ACCEPTANCE = 3.5  # of the published single-user figure
MOST_ROWS = 2**16
MOST_DEVICES = 2**10
LAYER_SECONDS = 10  # most that a layer took to compile on two cores: plan_h200_tp4.json


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes of one device.

    Attributes:
      weights: by part and format.
      keys_values, convolutions: of the cache.
      temporaries: of the program that needs most; planned by the compiler for the GPU, or else, if
        `analytic`, only what a prefill holds between two collectives.
      capacity: what the device has.
    """

    weights: tuple[Weights, ...]
    keys_values: int
    convolutions: int
    temporaries: int
    analytic: bool
    capacity: float

    @property
    def total(self) -> int:
        weights = sum(w.nbytes for w in self.weights)
        return weights + self.keys_values + self.convolutions + self.temporaries


@dataclasses.dataclass(frozen=True)
class Step:
    """How long a step takes, in seconds.

    Attributes:
      work: what one device does.
      byte_floor, flop_floor: at the data sheet's rates.
      expected: at the rates that programs reach, with what launches cost.
      communication: the part of `expected` that goes into collectives.
    """

    work: Work
    byte_floor: float
    flop_floor: float
    expected: float
    communication: float


@dataclasses.dataclass(frozen=True)
class Plan:
    """What `plan` found.

    Attributes:
      model, mesh, hardware, context: what was asked.
      batch: what was asked, filled up so that all parts of it are equal.
      target: what the programs were compiled for.
      programs: a decoding step and a prefill, this with tokens split (sp=on) and not.
      splits: whether the mesh splits the prefill's tokens.
      memory: of one device.
      largest_batch, largest_context: that fit with the other one as asked, 0 if none; temporaries
        are taken to grow with the batch and not with the context, so plan again with what is found.
      between_collectives: bytes of activations that a prefill holds there, by `sp`.
      steps: decoding by number of tokens verified, and prefill as in `programs`.
      acceptance: tokens that a round of speculative decoding gives.
      tokens_per_second: projected for all rows; a round verifies `BLOCK` tokens in the expected
        time, and drafting them takes none.
    """

    model: str
    mesh: str
    hardware: str
    context: int
    batch: int
    target: str
    programs: tuple[Program, ...]
    splits: bool
    memory: Memory
    largest_batch: int
    largest_context: int
    between_collectives: dict[Switch, int]
    steps: tuple[Step, ...]
    acceptance: float
    tokens_per_second: float

    @property
    def fits(self) -> bool:
        return self.memory.total <= self.memory.capacity

    @property
    def split_saves(self) -> float | None:
        """The share of a prefill's expected time that splitting tokens saves."""
        times = [s.expected for s in self.steps if s.work.name.startswith("prefill")]
        return 1 - times[1] / times[0] if len(times) > 1 else None


def plan(
    model: str | Path,
    mesh: str,
    context: int,
    batch: int = 1,
    *,
    hardware: str | None = None,
    prefill_tokens: int | None = None,
    acceptance: float = ACCEPTANCE,
    target: Target | None = None,
    progress: bool = True,
) -> Plan:
    """Plans a model on a mesh of devices, neither of which need be there.

    Call it before JAX is used: it has as many devices simulated as the mesh needs only then.

    Args:
      model: "small" for Inkling 2 Small, or a published or converted directory, or a hub id.
      mesh: as `load` takes it.
      context, batch: tokens of a row and rows of the cache.
      hardware: a name of `HARDWARE`; by default what the mesh's preset is named after, or H200s.
      prefill_tokens: of each row, by default 8,192, or the context where that is less.
      acceptance: tokens that a round of speculative decoding is taken to give.
      target: what to compile for, by default the GPU where JAX's CUDA plugin is installed.
      progress: say on stderr what is being compiled.

    Raises:
      InputError: something of this cannot be; it is named.
    """
    with mesh_mistakes():
        wanted = MeshConfig.parse(mesh)
    if wanted.devices > MOST_DEVICES:  # simulated ones take memory
        raise InputError(f"mesh has {wanted.devices} devices, a plan is of up to {MOST_DEVICES}")
    kind, target = _hardware(hardware, mesh), target or default_target()
    device = HARDWARE[kind]
    with mesh_mistakes():
        found = devices(target, device, wanted.devices)
        placed = make_mesh(wanted, found)  # refuses before anything takes time
    config, params = abstract_model(model)
    text, shape = config.text, abstract_mesh(wanted)
    tokens = min(PREFILL_TOKENS, context) if prefill_tokens is None else prefill_tokens
    _check(text, context, batch, tokens, acceptance)
    local = -(-batch // wanted.dp)
    rows = local * wanted.dp
    with mesh_mistakes(), jax.set_mesh(placed):
        params = packed_shapes(params, config)
        shard = Shard(text, wanted, device_weights(params, shape))
        cache = device_cache(text, rows, context, shape)
    switched, used = _switched(wanted, text, rows, tokens)

    steps = tuple(_step(work, device) for work in _works(shard, local, context, tokens, switched))
    verify = next(step for step in steps if step.work.name == f"verify {BLOCK}")
    held: dict[Switch, int] = {
        sp: floors.activation_bytes(shard, local * tokens, sp == "on") for sp in switched
    }
    machine = f"{device.device}, without one" if target == "cuda" else "simulated CPU devices"

    def compiled(name: str, sp: Switch, new: int) -> Program:
        made, layers = make_mesh(switched[sp], found), text.num_hidden_layers
        what = f"compiling {name} for {machine}: {layers} layers, up to {LAYER_SECONDS} s each"
        with _telling(what, progress):
            return compile_program(name, config, params, made, target, rows, context, new)

    decode = compiled("decode", "off", 1)
    prefills = {sp: compiled(f"prefill, sp={sp}", sp, tokens) for sp in switched}
    temporaries = held[used]
    if target == "cuda":
        temporaries = max(decode.temporaries, prefills[used].temporaries)

    def fits(some_rows: int, some_context: int) -> bool:
        growth = max(1.0, some_rows / rows)
        cached = sum(device_cache(text, some_rows, some_context, shape))
        return shard.total()[0] + cached + growth * temporaries <= device.memory

    return Plan(
        model=str(model),
        mesh=str(wanted),
        hardware=kind,
        context=context,
        batch=rows,
        target=machine,
        programs=(decode, *prefills.values()),
        splits=used == "on",
        memory=Memory(shard.weights, *cache, temporaries, target != "cuda", device.memory),
        largest_batch=wanted.dp * _largest(lambda n: fits(n * wanted.dp, context), MOST_ROWS),
        largest_context=_largest(lambda n: fits(rows, n), text.max_position_embeddings),
        between_collectives=held,
        steps=steps,
        acceptance=acceptance,
        tokens_per_second=rows * acceptance / verify.expected,
    )


def _hardware(name: str | None, mesh: str) -> str:
    if name is None:
        preset = mesh.partition("-")[0]
        return preset if preset in HARDWARE else DEFAULT_HARDWARE
    if name not in HARDWARE:
        raise InputError(f"hardware is {name!r}, it can be {', '.join(HARDWARE)}")
    return name


def _check(text: TextConfig, context: int, batch: int, tokens: int, acceptance: float) -> None:
    text.check_context(context)
    if not 1 <= tokens <= context:
        raise InputError(f"prefill is {tokens} tokens, with this context it can be 1 to {context}")
    if not 1 <= batch <= MOST_ROWS:
        raise InputError(f"batch is {batch}, it can be 1 to {MOST_ROWS}")
    if not 1 <= acceptance <= BLOCK:
        raise InputError(f"acceptance is {acceptance}, a round gives 1 to {BLOCK} tokens")


def _switched(
    mesh: MeshConfig, text: TextConfig, rows: int, tokens: int
) -> tuple[dict[Switch, MeshConfig], Switch]:
    """Returns the mesh by what `sp` can be for a prefill, and which of them it is."""

    def splits(config: MeshConfig) -> bool:
        halo = text.conv_kernel_size - 1
        return splits_tokens(config.axes, (rows, tokens), halo, BLOCK)

    found: dict[Switch, MeshConfig] = {"off": dataclasses.replace(mesh, sp="off")}
    if mesh.tp > 1 and splits(on := dataclasses.replace(mesh, sp="on")):
        found["on"] = on
    return found, "on" if splits(mesh) else "off"


def _works(
    shard: Shard, rows: int, context: int, tokens: int, switched: Iterable[Switch]
) -> Iterator[Work]:
    """Yields steps that read 1, 2, 4, … tokens at the end of the context, then the prefills."""
    widths = {"decode": 1, **{f"verify {n}": n for n in range(2, BLOCK + 1, 2)}}
    for name, n in widths.items():
        yield floors.step(name, shard, rows, max(context - n, 0), n, n)
    for sp in switched:
        yield floors.step(f"prefill, sp={sp}", shard, rows, 0, tokens, 1, split_tokens=sp == "on")


def _step(work: Work, hardware: Hardware) -> Step:
    peak, reachable = hardware.peak, hardware.reachable
    return Step(
        work,
        work.byte_floor(peak),
        work.flop_floor(peak),
        work.expected(reachable),
        work.communication(reachable),
    )


def _largest(fits: Callable[[int], bool], most: int) -> int:
    """Returns the largest number up to `most` that fits, 0 for none; what is larger fits less."""
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


def _telling(what: str, progress: bool) -> contextlib.AbstractContextManager[object]:
    """Says on stderr what takes its time, on a terminal until it is done."""
    console = Console(stderr=True, quiet=not progress)
    if console.is_terminal:
        return console.status(what)
    console.print(what, soft_wrap=True, highlight=False)
    return contextlib.nullcontext()

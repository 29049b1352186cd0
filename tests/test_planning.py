"""Plans: the arithmetic by hand, and against what the compiler says of the same programs."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import pytest

import inkling_jax as ij
from inkling_jax import cli, ops
from inkling_jax.config import inkling2_small
from inkling_jax.planning import floors, report, shapes
from inkling_jax.planning.floors import Collective
from inkling_jax.planning.hardware import HARDWARE
from inkling_jax.planning.programs import read_collectives
from inkling_jax.planning.report import _largest
from scripts.decode_step.parts import full_size
from scripts.prefill_step.calls import alone
from scripts.sharded_parts.slices import some_layers
from sharding.mesh import MeshConfig, abstract_mesh

FIXTURES = Path(__file__).parent / "fixtures"
RESULTS = Path(__file__).parents[1] / "scripts/results"
H200 = HARDWARE["h200"]
TP4 = MeshConfig(tp=4)
SMALL = (FIXTURES / "small/checkpoint", "tp=2,cp=2,dp=2", 63, 3)
ON_CPUS: dict[str, Any] = {"prefill_tokens": 32, "target": "cpu"}


@pytest.fixture(scope="module")
def small():
    """What each of four devices has of Inkling 2 Small."""
    config, params = shapes.abstract_model("small")
    assert config == inkling2_small()
    return floors.Shard(config.text, TP4, shapes.device_weights(params, abstract_mesh(TP4)))


@pytest.fixture(scope="module")
def plan():
    """A checkpoint of five layers on 2 × 2 × 2 simulated devices, 3 rows filled up to 4."""
    return ij.plan(*SMALL, **ON_CPUS)


def decode(small, tokens, context=1024):
    return floors.step("", small, 1, context - tokens, tokens, tokens)


@pytest.mark.parametrize(("tokens", "ms"), [(1, 1.07), (4, 2.24), (6, 2.98), (8, 3.69)])
def test_weights_take_the_known_time_to_read(small, tokens, ms):
    """The figures of four devices, of data sheet rates, weights alone."""
    parts = decode(small, tokens).parts
    seconds = (parts["products"].nbytes + parts["experts"].nbytes) / H200.peak.read
    assert seconds == pytest.approx(ms * 1e-3, abs=1e-5)


def test_a_shard_has_the_known_size(small):
    """40 layers of NVFP4 experts, 8 of MXFP8."""
    assert {w.format for w in small.weights if w.part == "experts"} == {"nvfp4", "mxfp8"}
    decoder = small.total()[0] - small.total("image tower")[0]
    assert decoder == pytest.approx(97.6e9, rel=1e-3)


def test_long_contexts_cost_what_their_keys_weigh(small):
    """4 KB a token and full layer, of which there are 8, a quarter of it on each device."""
    longer, shorter = (decode(small, 1, n).byte_floor(H200.reachable) for n in (101_024, 1024))
    nbytes = 100_000 * 8 * 4096 / 4
    assert longer - shorter == pytest.approx(nbytes / H200.reachable.read, rel=1e-3)


def test_a_prefill_multiplies_with_the_active_weights(small):
    """17 B without embedding and head, on four devices of which each has the whole router."""
    parts = floors.step("", small, 1, 0, 8192, 1).parts
    flops = parts["products"].flops + parts["experts"].flops
    router = small.total("router")[1]
    assert flops / 2 / 8192 == pytest.approx((17e9 + 3 * router) / 4, rel=0.01)


def test_experts_are_hit_by_chance():
    assert floors.distinct_experts(384, 8, 1) == pytest.approx(8)
    assert floors.distinct_experts(4, 2, 2) == pytest.approx(3)  # of 2 others, one on average
    assert floors.distinct_experts(384, 8, 8) == pytest.approx(59.5, abs=0.05)


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize(("start", "tokens"), [(0, 7), (1, 4), (5, 2)])
def test_pairs_of_queries_and_keys_are_counted(window, start, tokens):
    pairs = [
        (q, k)
        for q in range(start, start + tokens)
        for k in range(q + 1)
        if window is None or q - k < window
    ]
    assert floors.visible_pairs(start, tokens, window) == len(pairs)


def test_what_a_device_sends():
    sent = {kind: Collective(kind, "", 1, 100, 4).sent for kind in ("all-reduce", "all-gather")}
    assert sent == {"all-reduce": 150, "all-gather": 75}


def test_split_tokens_leave_a_share_of_the_activations(small):
    """8 blocks, two running sums, a sum and a mix in float32, 8,192 tokens of 4,608."""
    whole, split = (floors.activation_bytes(small, 8192, s) for s in (False, True))
    assert whole == 4 * split == 8192 * 4608 * (8 + 4) * 4
    eight = dataclasses.replace(small, mesh=MeshConfig(tp=8))
    assert 1 - floors.activation_bytes(eight, 8192, True) / whole >= 0.8


@pytest.mark.parametrize("tp", [4, 8])
def test_splitting_tokens_is_expected_to_pay(small, tp):
    shard = dataclasses.replace(small, mesh=MeshConfig(tp=tp))
    whole, split = (floors.step("", shard, 1, 0, 8192, 1, s) for s in (False, True))
    assert split.parts["rows"].nbytes * tp == whole.parts["rows"].nbytes
    for hardware in HARDWARE.values():
        assert split.expected(hardware.reachable) < whole.expected(hardware.reachable)


def test_rows_are_summed_within_kernels_where_one_process_has_the_mesh(small):
    """Up to eight devices, of up to eight rows."""

    def kinds(rows, **sizes):
        shard = dataclasses.replace(small, mesh=MeshConfig(**sizes))
        work = floors.step("", shard, rows, 0, 1, 1)
        return {c.kind for c in work.collectives if c.where in ("attention", "moe")}

    assert kinds(8, tp=4, dp=2) == {ops.REDUCE_MIX}
    assert kinds(9, tp=4, dp=2) == kinds(8, tp=4, dp=4) == {"all-reduce"}


def measured(name, **named):
    """The rows of a committed result that say so."""
    rows = json.loads((RESULTS / f"{name}.json").read_text())["rows"]
    return [row for row in rows if named.items() <= row.items()]


def step_of(shard, *args, **options):
    """Milliseconds that a step is expected to take on H200s."""
    return 1e3 * floors.step("", shard, 1, *args, **options).expected(H200.reachable)


@pytest.mark.parametrize(("part", "name"), [(0, "decode_h200"), (1, "decode_rank_h200")])
def test_decoding_is_expected_to_take_what_it_took(part, name):
    """Twelve layers, and a rank's share of all; 1, 4 and 8 tokens, 8 K and 100 K of context."""
    shard, rows = alone(full_size()[part]), measured(name, path="kernels")
    assert len(rows) == 6
    for row in rows:
        tokens = row["tokens"]
        assert step_of(shard, row["context"], tokens, tokens) == pytest.approx(row["ms"], rel=0.1)


def test_two_devices_are_expected_to_take_what_they_took(monkeypatch):
    six_layers = some_layers(jax.devices()[:2], small=False).shard()
    [decoded] = measured("sharded_h200_decode", path="kernels", where="tp=2")
    assert step_of(six_layers, 8192, 1, 1) == pytest.approx(decoded["ms"], rel=0.1)
    monkeypatch.setattr(ops, "REDUCED_ROWS", 0)
    [decoded] = measured("sharded_h200_decode", path="kernels, psum", where="tp=2")
    assert step_of(six_layers, 8192, 1, 1) == pytest.approx(decoded["ms"], rel=0.1)
    [read] = measured("sharded_h200", experts="of the model")
    split, whole = (step_of(six_layers, 0, 8192, 1, on) for on in (True, False))
    assert split == pytest.approx(read["sp=on"]["ms"], rel=0.1)
    assert whole == pytest.approx(read["sp=off"]["ms"], rel=0.1)
    assert 1 - split / whole == pytest.approx(read["saved"], abs=0.03)


def test_a_prefill_is_expected_to_take_what_it_took():
    [row] = measured("prefill_h200", path="kernels")
    shard = alone(full_size()[0])
    assert step_of(shard, 0, row["tokens"], 1) == pytest.approx(row["ms"], rel=0.1)


@pytest.mark.parametrize(
    ("line", "found"),
    [
        (
            "%a = ((f32[2,3]{1,0}), f32[2,3]{1,0}) all-reduce-start(%x), replica_groups="
            "mesh['dp'=2,'tp0'=2,'tp1'=3] {'tp0','tp1'}, "
            'metadata={op_name="jit(f)/shard_map/layer_11/moe/psum" x=1}',
            ("all-reduce", "moe", 24, 6),
        ),
        (
            "%b = ((f32[5]{0}), f32[20]{0}) all-gather-start(%x), replica_groups=[2,4]<=[8], "
            'metadata={op_name="jit(f)/shard_map/all_gather"}',
            ("all-gather", "model", 80, 4),
        ),
        (
            "ROOT %c = bf16[4,2]{1,0} reduce-scatter(%x), replica_groups={{0,1,2},{3,4,5}}, "
            'metadata={op_name="jit(f)/embed/psum_scatter"}',
            ("reduce-scatter", "embed", 48, 3),
        ),
        (
            "%d = (f32[3]{0}, pred[2]{0}) all-reduce(%x, %y), replica_groups={{0,1}}, metadata="
            '{op_name="(layer_0/a/last/psum:layer_0/b/last/psum:layer_1/a/last/psum)"}',
            ("all-reduce", "a/last + b/last", 14, 2),
        ),
        (
            "%e = (bf16[1,36,128]{2,1,0}, f32[1,36,128]{2,1,0}, f32[1]{0}, f32[1,4,36,128]{0}) "
            'custom-call(%x), custom_call_target="mosaic_gpu_v2", metadata={op_name="jit(decode)/'
            'shard_map/layer_0/moe/jit(allreduce_conv_mix)/allreduce_conv_mix/mpmd_map"}, '
            'backend_config={module = "\\00", xla_replica_ids = "0,1"}',
            ("allreduce_conv_mix", "moe", 18432, 2),
        ),
    ],
)
def test_collectives_are_read_from_any_notation(line, found):
    kind, where, nbytes, devices = found
    assert read_collectives(line) == (Collective(kind, where, 1, nbytes, devices),)
    assert read_collectives(f"{line}\n{line}")[0].count == 2


def test_other_operations_are_no_collectives():
    assert not read_collectives("%e = f32[2] all-reduce-done(%a)\n%f = f32[2] add(%a, %b)")


def test_the_compiler_counts_the_same_arguments(plan):
    """What lies on a device is what its program is given, but for the image tower and the ids."""
    memory = plan.memory
    weights = sum(w.nbytes for w in memory.weights if w.part != "image tower")
    held = weights + memory.keys_values + memory.convolutions
    for program in plan.programs:
        assert 0 < program.arguments - held < 1024, program.name


def test_the_compiler_exchanges_what_the_arithmetic_says(plan):
    """A CPU exchanges bfloat16, here rows of the hidden size, 32, as float32; it has no kernels."""
    works = {step.work.name: step.work for step in plan.steps}
    for program in plan.programs:
        work = works[program.name]

        def on_a_cpu(c, tokens=work.tokens):
            kind = "all-reduce" if c.kind == ops.REDUCE_MIX else c.kind
            factor = 2 if c.nbytes == tokens * 32 * 2 else 1
            return dataclasses.replace(c, kind=kind, nbytes=factor * c.nbytes)

        assert set(program.collectives) == set(map(on_a_cpu, work.collectives)), program.name


def test_a_plan_is_of_whole_parts_and_says_what_it_knows(plan):
    assert plan.batch == 4 and plan.fits and not plan.splits  # 32 tokens are few
    assert plan.memory.analytic and plan.memory.temporaries == plan.between_collectives["off"]
    assert [p.name for p in plan.programs] == ["decode", "prefill, sp=off", "prefill, sp=on"]
    verify = next(step for step in plan.steps if step.work.name == "verify 8")
    assert plan.tokens_per_second == pytest.approx(4 * 3.5 / verify.expected)


def test_what_takes_minutes_is_said_on_stderr(plan, monkeypatch, capsys):
    monkeypatch.setattr(report, "compile_program", lambda *_: plan.programs[0])
    ij.plan(*SMALL, **ON_CPUS)
    for program, line in zip(plan.programs, capsys.readouterr().err.splitlines(), strict=True):
        assert line.startswith(f"compiling {program.name} for simulated CPU devices: 5 layers")
    ij.plan(*SMALL, **ON_CPUS, progress=False)
    assert not capsys.readouterr().err


def test_the_largest_that_fits_is_found():
    assert [_largest(lambda n, most=most: n <= most, 100) for most in (0, 1, 57, 100, 200)] == [
        0, 1, 57, 100, 100,
    ]  # fmt: skip


def test_the_command_prints_the_plan_and_draws_it(plan, tmp_path, capsys, monkeypatch):
    asked = []
    monkeypatch.setattr(ij, "plan", lambda *args, **named: asked.append((args, named)) or plan)
    picture = tmp_path / "plan.png"
    command = ["plan", "--model", "small", "--mesh", "tp=2,dp=2", "--context", "64"]
    command += ["--batch", "3", "--prefill", "32", "--hardware", "gb200", "--plot", str(picture)]
    assert cli.main(command) == 0
    text = capsys.readouterr().out
    assert cli.main([*command, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    named = {"hardware": "gb200", "prefill_tokens": 32, "acceptance": 3.5}
    assert asked == [
        (("small", "tp=2,dp=2", 64, 3), {**named, "progress": shown}) for shown in (True, False)
    ]
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert found["fits"] and found["bytes"] == plan.memory.total and len(found["steps"]) == 7
    for part in ("experts, bfloat16", "analytic", "reduce-scatter", "verify 8", "nothing was run"):
        assert part in text


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--mesh", "np=2"], "mesh: 'np=2' is not understood"),
        (["--mesh", "tp=2"], "tp can be 1"),
        (["--mesh", "ep=16"], "needs 16 devices, 8 are there"),
        (["--mesh", "dp=2048"], "mesh has 2048 devices, a plan is of up to 1024"),
        (["--hardware", "abacus"], "hardware is 'abacus', it can be h100, h200, gb200"),
        (
            ["--context", "0"],
            "context is 0, it must be a whole number: this model reads 1 to 1048576",
        ),
        (["--batch", "0"], "batch is 0, it can be 1 to"),
        (["--prefill", "65"], "prefill is 65 tokens, with this context it can be 1 to 64"),
        (["--acceptance", "9"], "a round gives 1 to 8 tokens"),
        (["--model", "absent"], "'absent': is neither a directory"),
        (["--plot", "plan.bmp"], "a picture ends in .png"),
        (["--plot", "absent/plan.png"], "the directory is missing"),
    ],
)
def test_mistakes_are_one_sentence(flags, says, capsys, monkeypatch):
    monkeypatch.setattr("inkling_jax.planning.report.default_target", lambda: "cpu")
    command = ["plan", "--model", str(FIXTURES / "packed/checkpoint"), "--mesh", "ep=2"]
    assert cli.main([*command, "--context", "64", *flags]) == 2
    error = capsys.readouterr().err
    assert says in error and error.count("\n") == 1


def test_a_mesh_is_a_text():
    mesh: Any = 4
    with pytest.raises(ij.InputError, match="mesh is 4, it must be a text"):
        ij.plan("small", mesh, 64)


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_the_full_size_compiles_as_users_call_it():
    """All 48 layers for four simulated devices, 1 M tokens; on a GPU's compiler where it is."""
    plan = ij.plan("small", "h200-tp4", 1048576, target="cpu")
    per_layer = [c.count for c in plan.programs[0].collectives if c.where in ("attention", "moe")]
    assert per_layer == [48, 48] and plan.splits and plan.fits
    split = {c.kind for c in plan.programs[2].collectives if c.nbytes > 8192 * 4608}
    assert split == {"reduce-scatter", "all-gather"}

"""Conversion to Orbax: bytes kept, one directory or none, resumable, restored on any devices."""

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from helpers_checkpoints import TINY, config_json, expected, published, write_shards

import checkpoints.convert
from checkpoints import orbax_store
from checkpoints.convert import convert, is_converted
from checkpoints.key_map import make_plan
from checkpoints.safetensors_reader import read_index
from checkpoints.safetensors_writer import write_published
from inkling_jax.errors import InputError

TEXTS = ("generation_config.json", "tokenizer.json", "chat_template.jinja")


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    directory = write_shards(tmp_path_factory.mktemp("published"))
    (directory / "generation_config.json").write_text("{}")
    (directory / "chat_template.jinja").write_text("a template\n")
    (directory / "drafter").mkdir()
    (directory / "drafter/model.safetensors").write_bytes(b"weights of a drafter")
    (directory / "drafter/notes/old").mkdir(parents=True)
    (directory / "drafter/notes/old/one.txt").write_text("kept")
    (directory / "optimizer.bin").write_bytes(b"not ours")
    return directory


@pytest.fixture(scope="module")
def converted(source, tmp_path_factory):
    target = tmp_path_factory.mktemp("out") / "model"
    convert(source, target, expected(TINY), progress=False)
    return target


def leaves_of(source):
    return make_plan(read_index(source), expected(TINY)).leaves


def contents(directory):
    files = (file for file in directory.rglob("*") if file.is_file())
    return {str(file.relative_to(directory)): file.read_bytes() for file in files}


def sharded_specs(source, count):
    """Specs on `count` devices, split along the first axis that divides."""
    mesh = jax.make_mesh((count,), ("x",), devices=jax.devices()[:count])

    def spec(leaf):
        axis = next((a for a, n in enumerate(leaf.shape) if n % count == 0), None)
        parts = [None] * len(leaf.shape)
        if axis is not None:
            parts[axis] = "x"
        sharding = jax.NamedSharding(mesh, jax.P(*parts))
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    return {leaf.path: spec(leaf) for leaf in leaves_of(source)}


def test_the_directory_is_complete(source, converted):
    names = {file.name for file in converted.iterdir()}
    assert names == {"config.json", *TEXTS, "drafter", "manifest.json", "params"}
    assert is_converted(converted) and not is_converted(source)
    assert (converted / "chat_template.jinja").read_text() == "a template\n"
    assert (converted / "drafter/notes/old/one.txt").read_text() == "kept"
    manifest = json.loads((converted / "manifest.json").read_text())
    assert manifest["arrays"].keys() == {orbax_store.array_name(x.path) for x in leaves_of(source)}
    w2 = manifest["arrays"]["layers.0.moe.w2.values"]
    assert w2["made_of"] == ["model.llm.layers.0.mlp.experts.w2_weight"]
    assert w2["dtype"] == "uint8" and len(w2["xxh3_128"]) == 32
    used = [name for array in manifest["arrays"].values() for name in array["made_of"]]
    assert sorted([*used, *manifest["ignored"]]) == sorted(read_index(source))


def test_plain_orbax_opens_it(source, converted):
    with ocp.StandardCheckpointer() as checkpointer:
        tree = checkpointer.restore(converted / "params")
    for leaf in leaves_of(source):
        array = tree
        for key in leaf.path:
            array = array[str(key)]
        assert array.dtype == leaf.dtype
        np.testing.assert_array_equal(array.view(np.uint8), leaf[()].view(np.uint8))


@pytest.mark.parametrize("count", [1, 4, 8])
def test_restores_on_any_number_of_devices(source, converted, count):
    specs = sharded_specs(source, count)
    restored = orbax_store.restore(converted / "params", specs)
    for leaf in leaves_of(source):
        array = restored[leaf.path]
        assert array.sharding == specs[leaf.path].sharding and array.dtype == leaf.dtype
        np.testing.assert_array_equal(np.asarray(array).view(np.uint8), leaf[()].view(np.uint8))


def test_a_wrong_dtype_or_shape_is_refused_in_one_report(source, converted):
    specs = sharded_specs(source, 1)
    wq, norm, scales = (
        ("layers", 0, "attn", "wq"), ("norm", "weight"), ("layers", 0, "moe", "w2", "scales")
    )  # fmt: skip
    specs[wq] = specs[wq].update(dtype=np.dtype(np.float32))
    specs[norm] = specs[norm].update(shape=(65,))
    specs[scales] = specs[scales].update(dtype=np.dtype(np.float32))
    specs["extra",] = specs.pop(("embed", "weight"))
    with pytest.raises(InputError, match="5 faults") as error:
        orbax_store.restore(converted / "params", specs)
    assert str(error.value).splitlines()[1:] == [
        "  misshapen: norm.weight is [64], asked for [65]",
        "  missing: extra",
        "  not asked for: embed.weight",
        "  wrong dtype: layers.0.attn.wq is bfloat16, asked for float32",
        "  wrong dtype: layers.0.moe.w2.scales is float8_e4m3fn, asked for float32",
    ]
    with pytest.raises(InputError, match="4 faults"):  # floats may be cast, codes never
        orbax_store.restore(converted / "params", specs, cast=True)


@pytest.mark.parametrize("damage", ["cut", "removed", "no metadata", "no description"])
def test_a_damaged_array_is_named(source, converted, tmp_path, damage):
    model = tmp_path / "m"
    shutil.copytree(converted, model)
    chunk = model / "params/embed.weight/c.0.0"
    match damage:
        case "cut":
            chunk.write_bytes(chunk.read_bytes()[:-1])
        case "removed":
            chunk.unlink()
        case "no metadata":
            (model / "params/_METADATA").unlink()
        case "no description":
            (model / "params/embed.weight/zarr.json").write_text("{}")
    with pytest.raises(
        InputError, match="_METADATA" if damage == "no metadata" else "embed.weight"
    ):
        orbax_store.restore(model / "params", sharded_specs(source, 1))


def test_targets_that_cannot_be_made_are_refused_before(source, tmp_path):
    (tmp_path / "file").write_text("")
    (tmp_path / "link").symlink_to("/nowhere")
    for target in ("file/sub", "link"):
        with pytest.raises(InputError, match=r"directory|exists already"):
            convert(source, tmp_path / target, expected(TINY), dry_run=True, progress=False)


def test_arrays_larger_than_a_chunk_or_a_piece(source, tmp_path, monkeypatch):
    monkeypatch.setattr(orbax_store, "CHUNK_BYTES", 1000)
    monkeypatch.setattr(orbax_store, "PIECE_BYTES", 96)
    convert(source, tmp_path / "m", expected(TINY), progress=False)
    chunks = list((tmp_path / "m/params/embed.weight").glob("c.*"))
    assert len(chunks) == 11  # 7 rows of 128 bytes each, the last one padded
    restored = orbax_store.restore(tmp_path / "m/params", sharded_specs(source, 4))
    for leaf in leaves_of(source):
        array = np.asarray(restored[leaf.path])
        np.testing.assert_array_equal(array.view(np.uint8), leaf[()].view(np.uint8))
        assert orbax_store.is_intact(tmp_path / "m/params" / orbax_store.array_name(leaf.path))


def test_a_dry_run_writes_nothing(source, tmp_path):
    done = convert(source, tmp_path / "m", expected(TINY), dry_run=True, progress=False)
    assert done.arrays == len(leaves_of(source)) and done.nbytes > 100_000
    assert not list(tmp_path.iterdir())


def test_converting_again_changes_nothing(source, converted):  # LD-06
    before = contents(converted)
    again = convert(source, converted, expected(TINY), progress=False)
    assert again.kept == again.arrays and contents(converted) == before
    with pytest.raises(InputError, match="is a converted checkpoint already"):
        convert(converted, converted.with_name("twice"), expected(TINY), progress=False)


@pytest.mark.parametrize("changed", ["tokenizer.json", "config.json", "drafter/model.safetensors"])
def test_another_version_of_a_copied_file_is_another_source(source, converted, tmp_path, changed):
    shutil.copytree(source, tmp_path / "source")  # times are kept
    file = tmp_path / "source" / changed
    file.write_bytes(file.read_bytes() + b" ")
    with pytest.raises(InputError, match="exists already"):
        convert(tmp_path / "source", converted, expected(TINY), progress=False)


def test_what_stands_in_the_way_stays(source, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/work.txt").write_text("precious")
    with pytest.raises(InputError, match="mine: exists already"):
        convert(source, tmp_path / "mine", expected(TINY), progress=False)
    (tmp_path / "m.partial/params").mkdir(parents=True)
    with pytest.raises(InputError, match=r"m\.partial: is not of a conversion"):
        convert(source, tmp_path / "m", expected(TINY), progress=False)
    assert contents(tmp_path) == {"mine/work.txt": b"precious"}


def interrupted(source, target, monkeypatch, after):
    """Runs a conversion whose process dies, as it were, when `after` arrays are written."""
    written = []

    def write(directory, leaf, advance):
        if len(written) == after:
            (directory / orbax_store.array_name(leaf.path)).mkdir()
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written.append(leaf)
        orbax_store.write_array(directory, leaf, advance)

    with monkeypatch.context() as patch:
        patch.setattr(checkpoints.convert, "write_array", write)
        patch.setattr(checkpoints.convert, "ThreadPoolExecutor", lambda _: ThreadPoolExecutor(1))
        with pytest.raises(InputError, match="No space left on device; make room and run the same"):
            convert(source, target, expected(TINY), progress=False)


def test_a_full_disk_loses_nothing(source, converted, tmp_path, monkeypatch):
    target = tmp_path / "m"
    interrupted(source, target, monkeypatch, after=20)
    assert [file.name for file in tmp_path.iterdir()] == ["m.partial"]
    done = convert(source, target, expected(TINY), progress=False)
    assert done.kept == 20
    assert contents(target) == contents(converted)


def test_a_kept_array_that_was_damaged_is_written_again(source, converted, tmp_path, monkeypatch):
    target = tmp_path / "m"
    interrupted(source, target, monkeypatch, after=20)
    params = target.with_name("m.partial") / "params"
    kept = sorted(file.parent for file in params.glob("*/zarr.json"))
    next(kept[0].glob("c.*")).write_bytes(b"")
    next(kept[1].glob("c.*")).unlink()
    assert convert(source, target, expected(TINY), progress=False).kept == 18
    assert contents(target) == contents(converted)


def test_an_unfinished_conversion_of_another_source(source, tmp_path, monkeypatch):
    interrupted(source, tmp_path / "m", monkeypatch, after=3)
    other = tmp_path / "other"
    write_published(other, published(TINY, seed=1), config_json(TINY))
    with pytest.raises(InputError, match="was begun from another source"):
        convert(other, tmp_path / "m", expected(TINY), progress=False)


def test_too_little_room_is_seen_before(source, tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(checkpoints.convert.shutil, "disk_usage", lambda _: usage)
    with pytest.raises(InputError, match=r"the conversion needs .* MB, only 1\.0 kB are free"):
        convert(source, tmp_path / "m", expected(TINY), progress=False)
    assert not list(tmp_path.iterdir())


def test_a_fault_in_the_tensors_ends_it_unfinished(tmp_path):  # QZ-01
    named = dict(published(TINY))
    name = "model.llm.layers.2.mlp.experts.w2_weight_scale"
    named[name] = np.where(np.arange(4)[:, None, None] == 2, np.uint8(255), named[name])
    write_published(tmp_path / "src", named.items(), config_json(TINY))
    with pytest.raises(InputError, match=f"{name} has 64 block scales that are NaN"):
        convert(tmp_path / "src", tmp_path / "m", expected(TINY), progress=False)
    assert not (tmp_path / "m").exists()


def test_one_conversion_at_a_time(source, tmp_path):
    with (
        checkpoints.convert._locked(tmp_path / "m.partial"),
        pytest.raises(InputError, match="another conversion is writing it"),
    ):
        convert(source, tmp_path / "m", expected(TINY), progress=False)


def start(source, target):
    """Starts a conversion in a process of its own."""
    code = (
        "import sys; from pathlib import Path\n"
        "from inkling_jax.loading import convert\n"
        "convert(Path(sys.argv[1]), Path(sys.argv[2]))"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent)}
    return subprocess.Popen(
        [sys.executable, "-c", code, str(source), str(target)],
        env=environment,
        stderr=subprocess.PIPE,
        text=True,
    )


def kill_when(process, done, timeout=120):
    """Kills the process as soon as `done()`; tells whether it was still running."""
    end = time.monotonic() + timeout
    while process.poll() is None and not done() and time.monotonic() < end:
        time.sleep(0.001)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    return process.returncode == -signal.SIGKILL


def test_killed_and_resumed_gives_the_same_bytes(source, converted, tmp_path):
    target, params = tmp_path / "m", tmp_path / "m.partial/params"
    process = start(source, target)
    assert kill_when(process, lambda: len(list(params.glob("*/zarr.json"))) >= 10)
    assert not target.exists()
    process = start(source, target)
    _, bar = process.communicate()
    assert process.returncode == 0, bar
    assert "converting" in bar and "B/s" in bar
    assert contents(target) == contents(converted)
    assert not params.parent.exists()

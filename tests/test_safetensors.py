"""The reader and writer of safetensors: bits kept, only what is asked for read, faults named."""

import json
import struct

import ml_dtypes
import numpy as np
import pytest
import safetensors
import safetensors.numpy

from checkpoints.safetensors_reader import INDEX, SINGLE, read_index, read_tensor
from checkpoints.safetensors_writer import write_file, write_published
from inkling_jax.errors import InputError


def raw(path, entries, data, header=None):
    """Writes a file as stated, right or wrong."""
    text = json.dumps(entries) if isinstance(entries, dict) else entries
    length = len(text) if header is None else header
    path.write_bytes(struct.pack("<Q", length) + text.encode() + data)
    return path


def entry(start, stop, shape=None, dtype="U8"):
    return {"dtype": dtype, "shape": shape or [stop - start], "data_offsets": [start, stop]}


def test_reads_what_the_library_writes(tmp_path):
    arrays = {
        "a": np.arange(24, dtype=np.float32).reshape(2, 3, 4),
        "b": np.arange(7, dtype=np.int64),
        "flag": np.array([True, False, True]),
        "scalar": np.array(3.5, np.float16),
        "empty": np.zeros((0, 4), np.uint8),
    }
    safetensors.numpy.save_file(arrays, tmp_path / "f.safetensors", {"format": "pt"})
    index = read_index(tmp_path / "f.safetensors")
    assert index.keys() == arrays.keys()
    for name, array in arrays.items():
        read = read_tensor(index[name])
        assert read.dtype == array.dtype and read.shape == array.shape
        np.testing.assert_array_equal(read, array)


def test_slices_of_any_axis_in_any_shape(tmp_path):
    a = np.arange(60, dtype=np.float32).reshape(5, 12)
    write_file(tmp_path / "f.safetensors", {"odd": np.zeros(3, np.uint8), "a": a})
    info = read_index(tmp_path / "f.safetensors")["a"]
    assert info.start % 4  # the tensor is not aligned
    for index in (slice(1, 3), (slice(None), slice(4, 9)), (slice(0, 5, 2), slice(11, 12))):
        read = read_tensor(info, index)
        np.testing.assert_array_equal(read, a[index])
        assert read.flags.c_contiguous and read.flags.aligned and read.flags.writeable
    split = read_tensor(info, (slice(None), slice(2, 3)), (5, 3, 4))
    np.testing.assert_array_equal(split, a.reshape(5, 3, 4)[:, 2:3])


def test_a_slice_reads_only_its_bytes(tmp_path):
    # A sparse terabyte: reading more than the slice would not come back.
    path = raw(tmp_path / "f.safetensors", {"a": entry(0, 1 << 40, [1 << 20, 1 << 20])}, b"")
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size + (1 << 40))
    info = read_index(path)["a"]
    assert not read_tensor(info, (slice(7, 9), slice(5, 8))).any()


def test_float8_and_packed_4_bit_keep_their_bits(tmp_path):  # LD-03
    path = tmp_path / "f.safetensors"
    entries = {
        "e8m0": entry(0, 4, [4], "F8_E8M0"),
        "e4m3": entry(4, 6, [2], "F8_E4M3"),
        "e2m1": entry(6, 10, [8], "F4"),
    }
    text = json.dumps({"__metadata__": {"format": "pt"}, **entries}, separators=(",", ":"))
    text += " " * (-len(text) % 8)
    raw(path, text, bytes([0, 127, 134, 255, 0x7E, 0x38, 0x10, 0x32, 0xDC, 0x7F]))
    index = read_index(path)
    read = {name: read_tensor(info) for name, info in index.items()}
    as_float = {name: array.astype(np.float32).tolist() for name, array in read.items()}
    assert as_float["e8m0"][:3] == [2.0**-127, 1.0, 128.0] and np.isnan(as_float["e8m0"][3])
    assert as_float["e4m3"] == [448.0, 1.0]
    assert as_float["e2m1"] == [0.0, 0.5, 1.0, 1.5, -2.0, -3.0, -6.0, 6.0]
    assert read["e2m1"].shape == index["e2m1"].shape == (8,)
    write_file(tmp_path / "again.safetensors", read)
    assert (tmp_path / "again.safetensors").read_bytes() == path.read_bytes()


def test_every_e4m3_code(tmp_path):  # QZ-02
    codes = np.arange(256, dtype=np.uint8)
    write_file(tmp_path / "f.safetensors", {"a": codes.view(ml_dtypes.float8_e4m3fn)})
    exponent, mantissa = (codes >> 3 & 15).astype(int), (codes & 7) / 8
    size = np.where(exponent, (1 + mantissa) * 2.0 ** (exponent - 7), mantissa * 2.0**-6)
    size = np.where(codes & 127 == 127, np.nan, size)
    read = read_tensor(read_index(tmp_path / "f.safetensors")["a"]).astype(np.float32)
    np.testing.assert_array_equal(read, np.where(codes > 127, -size, size))
    assert np.signbit(read[0x80]) and read[0x7E] == 448 and read[1] == 2**-9


@pytest.mark.parametrize(
    "array",
    [
        np.arange(12, dtype=np.float32).reshape(3, 4).T,
        np.arange(24, dtype=np.int16).reshape(4, 6)[::2, ::3],
        np.arange(5, dtype=">f4"),
        np.broadcast_to(np.arange(3, dtype=np.float64), (2, 3)),
        np.arange(12, dtype=ml_dtypes.bfloat16).reshape(3, 4).T,
        np.array(2.5, np.float32),
    ],
    ids=["transposed", "strided", "big-endian", "broadcast", "bf16", "scalar"],
)
def test_any_memory_order_is_saved_by_element(tmp_path, array):  # LD-04
    write_file(tmp_path / "f.safetensors", {"a": array})
    read = read_tensor(read_index(tmp_path / "f.safetensors")["a"])
    assert read.shape == array.shape
    np.testing.assert_array_equal(read, array.astype(read.dtype))
    if array.dtype != ml_dtypes.bfloat16:
        library = safetensors.numpy.load_file(tmp_path / "f.safetensors")["a"]
        np.testing.assert_array_equal(library, array.astype(read.dtype))


def test_the_writer_refuses_what_the_format_cannot_hold(tmp_path):
    with pytest.raises(ValueError, match="tensor c has dtype complex64"):
        write_file(tmp_path / "f.safetensors", {"c": np.zeros(2, np.complex64)})
    twice = [("a", np.zeros(2)), ("a", np.zeros(2))]
    with pytest.raises(ValueError, match="a was given twice"):
        write_published(tmp_path, twice, {})


TWO = {"a": entry(0, 8), "b": entry(8, 16)}
REPEATED = json.dumps(TWO).replace('"b"', '"a"')
DAMAGED = {  # LD-01, and what else the library refuses
    "cut": (TWO, 12, None, "is cut short"),
    "padded": (TWO, 20, None, "bytes that belong to no tensor"),
    "overlap": ({"a": entry(0, 8), "b": entry(4, 16)}, 16, None, "b overlaps"),
    "hole": ({"a": entry(0, 8), "b": entry(12, 16)}, 16, None, "b follows a hole"),
    "repeated": (REPEATED, 16, None, "names 'a' more than once"),
    "header": (TWO, 16, 1 << 40, "header of 1099511627776 bytes"),
    "size": ({"a": entry(0, 8, [3], "F32")}, 8, None, "a states 8 bytes, .* needs 12"),
    "dtype": ({"a": entry(0, 8, [8], "F7")}, 8, None, "a has dtype 'F7'"),
    "negative": ({"a": entry(0, 8, [-8])}, 8, None, r"a has shape \[-8\]"),
    "json": ("{not json", 0, None, "cannot be parsed"),
    "array": ("[]", 0, None, "must hold an object"),
    "no offsets": ({"a": {"dtype": "U8"}}, 0, None, "a must have dtype, shape and data_offsets"),
}


@pytest.mark.parametrize("fault", DAMAGED)
def test_a_damaged_file_is_refused_by_name_and_reason(tmp_path, fault):
    entries, size, header, reason = DAMAGED[fault]
    path = raw(tmp_path / "f.safetensors", entries, bytes(size), header)
    with pytest.raises(InputError, match=f"{path}: .*{reason}"):
        read_index(path)
    with pytest.raises(safetensors.SafetensorError), safetensors.safe_open(path, "np"):
        pass  # the library, for comparison


def test_a_file_without_room_for_a_header(tmp_path):
    (tmp_path / "f.safetensors").write_bytes(b"1234")
    with pytest.raises(InputError, match="is cut short, 4 bytes"):
        read_index(tmp_path / "f.safetensors")


def test_a_file_cut_after_it_was_opened(tmp_path):
    write_file(tmp_path / "f.safetensors", {"a": np.zeros(8192)})
    info = read_index(tmp_path / "f.safetensors")["a"]
    with (tmp_path / "f.safetensors").open("r+b") as file:
        file.truncate(4096)
    with pytest.raises(InputError, match="cut short while"):
        read_tensor(info)


@pytest.fixture
def sharded(tmp_path):
    arrays = {f"t{i}": np.full(4, i, np.float32) for i in range(5)}
    write_published(tmp_path, arrays.items(), {"model_type": "inkling2"}, shard_bytes=32)
    return tmp_path


def edit_index(directory, change):
    index = json.loads((directory / INDEX).read_text())
    change(index["weight_map"])
    (directory / INDEX).write_text(json.dumps(index))


def test_shards_and_index(sharded):
    names = sorted(f.name for f in sharded.iterdir())
    assert names == [
        "config.json",
        *(f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)),
        INDEX,
    ]
    assert json.loads((sharded / INDEX).read_text())["metadata"]["total_size"] == 80
    index = read_index(sharded)
    assert [read_tensor(index[f"t{i}"])[0] for i in range(5)] == [0, 1, 2, 3, 4]


def test_writing_again_leaves_nothing_of_the_old(sharded):
    write_published(sharded, [("only", np.zeros(2))], {})
    assert sorted(f.name for f in sharded.iterdir()) == ["config.json", SINGLE]
    assert read_index(sharded).keys() == {"only"}


def test_index_and_shards_that_disagree_are_one_report(sharded):  # LD-02 a, b, c
    (sharded / "model-00003-of-00003.safetensors").unlink()
    edit_index(sharded, lambda m: (m.update(ghost=m["t0"]), m.pop("t2")))
    with pytest.raises(InputError, match="3 faults") as error:
        read_index(sharded)
    assert "shard model-00003-of-00003.safetensors is listed and absent" in str(error.value)
    assert "tensor ghost is listed in model-00001-of-00003" in str(error.value)
    assert "tensor t2 is in model-00002-of-00003" in str(error.value)


def test_one_fault_is_one(sharded):
    (sharded / "model-00003-of-00003.safetensors").unlink()
    with pytest.raises(InputError, match=f"{INDEX}: 1 fault against the files:\n  shard"):
        read_index(sharded)


def test_stray_files_are_ignored(sharded):  # LD-02 d
    write_file(sharded / "extra.safetensors", {"t0": np.full(4, 99, np.float32)})
    (sharded / "training_args.bin").write_bytes(b"pickle")
    assert read_tensor(read_index(sharded)["t0"])[0] == 0


@pytest.mark.parametrize(
    "shard", ["../w.safetensors", "/w.safetensors", "a\\w.safetensors", "w.bin"]
)
def test_shard_names_stay_in_the_directory(sharded, shard):
    edit_index(sharded, lambda m: m.update(t0=shard))
    with pytest.raises(InputError, match="is not the name of a"):
        read_index(sharded)


def test_pickles_remote_code_and_empty_directories(tmp_path):
    with pytest.raises(InputError, match="no such file or directory"):
        read_index(tmp_path / "nowhere")
    with pytest.raises(InputError, match="holds neither"):
        read_index(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(InputError, match=r"holds pickles \(pytorch_model.bin\)"):
        read_index(tmp_path)
    write_published(tmp_path, [("a", np.zeros(1))], {"auto_map": {"AutoModel": "evil.Model"}})
    with pytest.raises(InputError, match="auto_map asks for code"):
        read_index(tmp_path)

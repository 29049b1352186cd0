"""Streams of text: pieces join to the whole, characters stay whole, stop strings never show."""

import random
from pathlib import Path

import pytest

from inkling_jax.streaming import Detokenizer, StopStrings
from inkling_jax.text import Tokenizer

TOKENIZER = Tokenizer.load(Path(__file__).parent / "fixtures" / "chat")
FAMILY = "a👩‍👩‍👧‍👦 한국어 e\u0301 ￿ \ufffd 🏳️‍🌈"
BYTE = {}  # ids of single bytes: the tokenizer's alphabet, through characters of two bytes
for code in range(0x80, 0x800):
    lead, trail = TOKENIZER.encode(chr(code))
    BYTE[chr(code).encode()[0]], BYTE[chr(code).encode()[1]] = lead, trail

STREAMS = {
    "text": TOKENIZER.encode(FAMILY),
    "invalid byte": [*TOKENIZER.encode("ab"), BYTE[0x9F], *TOKENIZER.encode("cd")],
    "invalid end": [*TOKENIZER.encode("ab"), BYTE[0x9F]],
    "cut character": TOKENIZER.encode("ab👩")[:-1],
    "cut in the middle": [*TOKENIZER.encode("👩")[:-1], *TOKENIZER.encode("x👩")],
    "markers": [TOKENIZER.control["<|end_message|>"], *TOKENIZER.encode("é"), 306],
    "nothing": [],
}


def stream(ids, step):
    detokenizer = Detokenizer(TOKENIZER)
    pieces = [detokenizer.add(ids[i : i + step]) for i in range(0, len(ids), step)]
    return [*pieces, detokenizer.finish()]


@pytest.mark.parametrize("step", [1, 2, 3, 7, 1000])
@pytest.mark.parametrize("name", STREAMS)
def test_pieces_join_to_the_full_decode(name, step):  # TX-03
    ids = STREAMS[name]
    pieces, full = stream(ids, step), TOKENIZER.decode(ids)
    assert "".join(pieces) == full
    assert "".join(pieces).count("\ufffd") == full.count("\ufffd")


def test_text_is_shown_as_soon_as_it_is_certain():
    ids = TOKENIZER.encode("ab👩c")
    assert stream(ids, 1) == ["a", "b", "", "", "", "👩", "c", ""]


def test_random_bytes_stream_like_they_decode():
    rng = random.Random(0)
    for _ in range(200):
        ids = rng.choices(list(BYTE.values()) + TOKENIZER.encode("ab 한"), k=12)
        assert "".join(stream(ids, rng.randrange(1, 5))) == TOKENIZER.decode(ids)


def run(stops, text, step):
    strings, out = StopStrings(stops), ""
    for i in range(0, len(text), step):
        out += strings.add(text[i : i + step])
        assert not any(stop in out for stop in stops)
    return out + strings.finish(), strings.stopped


@pytest.mark.parametrize("step", [1, 2, 3, 100])
def test_stop_strings_end_the_text_and_never_show(step):
    assert run(["STOP"], "one STOP two", step) == ("one ", True)
    assert run(["STOP"], "one STO two STOQ", step) == ("one STO two STOQ", False)
    assert run(["STOP"], "SSTSTOSTOP!", step) == ("SSTSTO", True)
    assert run(["ab", "xaby"], "xaby", step) == ("x", True)  # "ab" is complete first
    assert run(["b", "ab"], "xab", step) == ("x", True)  # both are: the longer one
    assert run([], "anything", step) == ("anything", False)


def test_stop_string_over_three_tokens_is_held_back():  # TX-03
    strings = StopStrings(["\n\nUser:"])
    assert strings.add("Fine.") == "Fine."
    assert strings.add("\n") == "" and strings.add("\nUs") == ""
    assert strings.add("e") == ""
    assert strings.add("ful") == "\n\nUseful"  # a near match comes out whole
    assert strings.add("\n\nUser") == "" and not strings.stopped
    assert strings.add(": hello") == "" and strings.stopped
    assert strings.add("more") == strings.finish() == ""

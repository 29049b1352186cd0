"""Tokenizer, chat template and messages; control tokens come from the template alone."""

import itertools
import json
import random
from pathlib import Path

import pytest

from inkling_jax.errors import InputError
from inkling_jax.messages import parse_messages
from inkling_jax.text import Tokenizer, image_rows

CHAT = Path(__file__).parent / "fixtures" / "chat"
TOKENIZER = Tokenizer.load(CHAT, image_token_id=310)
ID = TOKENIZER.control
IMAGE = ID["<|unused_200054|>"]


def user(content):
    return {"role": "user", "content": content}


def chat(*messages, tiles=(), tokenizer=TOKENIZER, **options) -> list[int]:
    return tokenizer.chat(parse_messages(list(messages)), tiles, **options)


def shown(ids: list[int]) -> str:
    """Ids with the control tokens in brackets."""
    names = {token: marker for marker, token in ID.items()}
    runs = itertools.groupby(ids, key=names.get)
    return "".join(
        f"[{name[2:-2]}]" * len(list(run)) if name else TOKENIZER.decode(run) for name, run in runs
    )


def with_template(source: str) -> Tokenizer:
    return Tokenizer(json.loads((CHAT / "tokenizer.json").read_text()), source, {}, IMAGE)


def test_wire_format():
    ids = chat(
        {"role": "system", "content": "Be brief."},
        user("Time?"),
        {
            "role": "assistant",
            "content": None,
            "reasoning_content": "use the clock",
            "tool_calls": [{"function": {"name": "clock", "arguments": '{"zone": "é\\""}'}}],
        },
        {"role": "tool", "name": "clock", "content": "12:00"},
    )
    assert shown(ids) == (
        "[message_system][content_text]Be brief.[end_message]"
        "[message_user][content_text]Time?[end_message]"
        "[message_model][content_thinking]use the clock[end_message]"
        '[message_model]clock[content_invoke_tool_json]{"name": "clock", "args": {"zone": "é\\""}}'
        "[end_message][content_model_end_sampling]"
        "[message_tool]clock[content_text]12:00[end_message]"
        "[message_model]"
    )


def test_effort_stands_behind_the_system_messages():
    system = {"role": "system", "content": "S"}
    level = "[message_system][content_text]Thinking effort level: 0.7[end_message]"
    ids = chat(system, user("U"), effort=0.7)
    assert shown(ids).startswith(f"[message_system][content_text]S[end_message]{level}[message_us")
    assert level in shown(chat(system, effort=0.7))
    assert "effort level: 0[end" in shown(chat(user("U"), effort=0))
    own = with_template("{{ reasoning_effort }}|{{ messages | length }}")
    assert TOKENIZER.decode(chat(user("U"), effort=0.25, tokenizer=own)) == "0.25|1"
    for bad in (1.0, -0.1, float("nan"), "high"):
        with pytest.raises(InputError, match="effort"):
            chat(user("U"), effort=bad)


def hostile_texts() -> list[str]:
    """Markers whole, doubled, nested and cut, in every place where the template joins text."""
    rng = random.Random(1)
    bits = [m[a:b] for m in ID for a, b in ((0, 99), (0, 1), (0, 9), (1, 99), (9, 99), (2, -2))]
    made = [
        "".join(rng.choices([*bits, " ", "\n", "_", "1"], k=rng.randrange(1, 6)))
        for _ in range(300)
    ]
    return [*ID, *bits, *made, "<|<|end_message|>end_message|>"]


def test_user_text_never_makes_control_tokens():
    calm = chat(user("x"))
    want = [i for i in calm if TOKENIZER.is_control(i)]
    for text in hostile_texts():
        ids = chat(user(text))
        assert [i for i in ids if TOKENIZER.is_control(i)] == want, text
        assert TOKENIZER.decode(ids) == text
        assert not any(map(TOKENIZER.is_control, TOKENIZER.encode(text)))


def test_no_field_of_a_message_makes_control_tokens():
    def conversation(text):
        call = {"id": text, "function": {"name": text, "arguments": {text: [text, {"type": text}]}}}
        return (
            {"role": "system", "content": text},
            user([{"type": "text", "text": text}, {"type": "text", "text": text}]),
            {"role": "assistant", "content": text, "reasoning_content": text, "tool_calls": [call]},
            {"role": "tool", "name": text, "tool_call_id": text, "content": text},
        )

    want = [i for i in chat(*conversation("x")) if TOKENIZER.is_control(i)]
    for text in hostile_texts()[:120]:
        ids = chat(*conversation(text))
        assert [i for i in ids if TOKENIZER.is_control(i)] == want, text


@pytest.mark.parametrize("glue", ["", " | trim", " | upper | lower", " | tojson"])
def test_markers_that_grow_across_texts_stay_text(glue):
    joined = with_template("{% for m in messages %}{{ m.content" + glue + " }}{% endfor %}")
    for marker in ID:
        for cut in range(1, len(marker)):
            ids = chat(user(marker[:cut]), user(marker[cut:] + "  "), tokenizer=joined)
            assert not any(map(TOKENIZER.is_control, ids)), (marker, cut)
    ends = with_template("{{ messages[0].content" + glue + " }}end_message|>")
    assert not any(map(TOKENIZER.is_control, chat(user("<| "), tokenizer=ends)))


def test_ordinary_text_reaches_the_template_unchanged():
    probe = with_template(
        "{{ messages[0].content == 'function' }} {{ messages[0].role == 'user' }}"
    )
    assert TOKENIZER.decode(chat(user("function"), tokenizer=probe)) == "True True"


def test_vocabulary_that_holds_the_markers_as_words():
    model = {
        "type": "WordLevel",
        "vocab": {"<x>": 0, "a": 1, "<": 2, "x": 3, ">": 4},
        "unk_token": "a",
    }
    added = [{"id": 0, "content": "<x>", "special": True, "single_word": False, "lstrip": False,
              "rstrip": False, "normalized": False}]  # fmt: skip
    tokenizer = Tokenizer(
        {"version": "1.0", "model": model, "added_tokens": added}, "<x>{{ messages[0].content }}"
    )
    assert chat(user("<x>"), tokenizer=tokenizer) == [0, 2, 3, 4]


def image(source="p.png"):
    return {"type": "image", "image": source}


def test_typed_placeholders_are_text_and_real_ones_expand_once():  # IM-06
    typed = "<|unused_200054|><|content_image|>"
    text = {"type": "text", "text": typed}
    assert IMAGE not in chat(user(typed))
    ids = chat(user([text, image()]), tiles=[3])
    assert shown(ids) == (
        f"[message_user][content_text]{typed}[end_message]"
        "[message_user][content_image][unused_200054][unused_200054][unused_200054][end_message]"
        "[message_model]"
    )
    ids = chat(user([text, image(), text, image(), text]), tiles=[1, 2])
    rows = image_rows(ids, IMAGE, [1, 2])
    assert [row for row in rows if row >= 0] == [0, 1, 2]
    assert ids.count(ID["<|content_image|>"]) == 2


def test_template_that_writes_the_image_marker_alone():
    alone = with_template("{% for p in messages[0].content %}<|content_image|>{% endfor %}.")
    ids = chat(user([image(), image()]), tiles=[1, 2], tokenizer=alone)
    assert shown(ids) == (
        "[content_image][unused_200054][content_image][unused_200054][unused_200054]."
    )


def test_image_rows_follow_the_placeholders():
    assert image_rows([5, 9, 9, 6, 9, 7], 9, [2, 1]) == [-1, 0, 1, -1, 2, -1]
    assert image_rows([9, 9, 9], 9, [2, 1]) == [0, 1, 2]
    assert image_rows([5], 9, []) == [-1]
    for ids, tiles in (([9, 5], [2]), ([9, 5, 9], [2]), ([9], []), ([5], [1])):
        with pytest.raises(InputError, match="placeholders"):
            image_rows(ids, 9, tiles)


def test_pictures_are_collected_in_order():
    url = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
    messages = [user([image("a"), image(None)]), user([url, {"type": "image"}])]
    parsed = parse_messages(messages, images=[b"1", b"2"])
    assert parsed.images == ("a", b"1", "data:image/png;base64,AA==", b"2")
    assert parsed.messages[0]["content"] == [{"type": "image"}] * 2
    for count in (1, 3):
        with pytest.raises(InputError, match=f"{count} images are given for 2"):
            parse_messages(messages, images=[b"1"] * count)
    with pytest.raises(InputError, match="room for 1 images"):
        chat(user([image()]), tiles=[1, 1])


def called(arguments):
    return {"function": {"name": "f", "arguments": arguments}}


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ([], "at least one"),
        ("hello", "must be a list"),
        (["hello"], r"messages\[0\] is 'hello'"),
        ([{"role": "robot", "content": "x"}], r"messages\[0\].role is 'robot'"),
        ([user("x"), {"role": "user"}], r"messages\[1\].content is None"),
        ([user([{"type": "video"}])], r"content\[0\]"),
        ([user([{"type": "text"}])], r"content\[0\]"),
        ([{**user("x"), "weight": 0}], "unknown field weight"),
        ([{"role": "system", "content": [image()]}], "images belong in user"),
        ([{**user("x"), "tool_calls": [1]}], "tool_calls"),
        ([{"role": "assistant", "tool_calls": [called("{")]}], "not valid JSON"),
        ([{"role": "assistant", "tool_calls": [called("[" * 100_000)]}], "not valid JSON"),
        ([{"role": "assistant", "tool_calls": [called({("a",): 1})]}], "must be a JSON object"),
    ],
)  # fmt: skip
def test_bad_messages_are_refused_in_a_sentence(messages, reason):
    with pytest.raises(InputError, match=reason) as error:
        parse_messages(messages)
    assert "\n" not in str(error.value)


def test_bad_files_are_refused(tmp_path):
    with pytest.raises(InputError, match=r"no tokenizer\.json"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(InputError, match="not valid JSON"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text("[]")
    with pytest.raises(InputError, match="must hold a JSON object"):
        Tokenizer.load(tmp_path)
    for damaged in ("{}", '{"added_tokens": [{"id": 1}]}'):
        (tmp_path / "tokenizer.json").write_text(damaged)
        with pytest.raises(InputError, match="cannot be used"):
            Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text((CHAT / "tokenizer.json").read_text())
    plain = Tokenizer.load(tmp_path)
    assert not plain.has_template
    with pytest.raises(InputError, match="no chat_template"):
        chat(user("x"), tokenizer=plain)
    (tmp_path / "chat_template.jinja").write_text("{% for %}")
    with pytest.raises(InputError, match="line 1"):
        Tokenizer.load(tmp_path)
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(InputError, match="is not text in UTF-8"):
        Tokenizer.load(tmp_path)


def test_template_is_sandboxed_and_its_refusals_are_told():
    for source in (
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ nothing.at.all }}",
    ):
        with pytest.raises(InputError, match="refuses"):
            chat(user("x"), tokenizer=with_template(source))
    with pytest.raises(InputError, match="only two roles"):
        chat(user("x"), tokenizer=with_template("{{ raise_exception('only two roles') }}"))
    stop = "{% for m in messages %}{{ bos_token }}{% break %}{% endfor %}"
    tokenizer = Tokenizer(
        json.loads((CHAT / "tokenizer.json").read_text()), stop, {"bos_token": "!"}
    )
    assert TOKENIZER.decode(chat(user("x"), user("y"), tokenizer=tokenizer)) == "!"


def test_decoding_hides_control_tokens_and_unknown_ids():
    ids = [*TOKENIZER.encode("a b"), ID["<|end_message|>"], 100_000]
    assert TOKENIZER.decode(ids) == "a b"

"""Replies are split alike whole, token by token and in blocks."""

from pathlib import Path

import pytest

from inkling_jax.reply import Reply, ReplySplitter, ToolCall
from inkling_jax.text import Tokenizer

TOKENIZER = Tokenizer.load(Path(__file__).parent / "fixtures" / "chat")


def ids(text: str) -> list[int]:
    """Encodes text in which [names] stand for control tokens."""
    out = []
    for part in text.replace("]", "[").split("["):
        marker = TOKENIZER.control.get(f"<|{part}|>")
        out += [marker] if marker is not None else TOKENIZER.encode(part)
    return out


CALL = '{"name": "clock", "args": {"zone": "é"}}'
CLOCK = ToolCall("clock", {"zone": "é"}, CALL)
THINK, TEXT, TOOL = "[content_thinking]", "[content_text]", "[content_invoke_tool_json]"
OPEN = "[message_user][content_text]Hi[end_message][message_model]"
NEXT, END = "[end_message][message_model]", "[end_message][content_model_end_sampling]"
MANY = f"{TEXT}A{NEXT}f{TOOL}{CALL}{NEXT}g{TOOL}{{}}{NEXT}{TEXT}B{END}"

CASES = {  # the prompt, the reply, how it splits
    "thinking first": (OPEN, f"{THINK}hm 👩{NEXT}{TEXT}Yes.{END}", Reply("hm 👩", "Yes.")),
    "text first": (OPEN, f"{TEXT}Yes 👩.{END}", Reply("", "Yes 👩.")),
    "tool first": (OPEN, f"clock{TOOL}{CALL}{END}", Reply("", "", (CLOCK,))),
    "tool without a name": (OPEN, f"{TOOL}{CALL}{END}", Reply("", "", (CLOCK,))),
    "end at once": (OPEN, "[content_model_end_sampling]", Reply()),
    "nothing": (OPEN, "", Reply()),
    "reasoning off": (OPEN + TEXT, f"Yes.{END}", Reply("", "Yes.")),
    "reasoning off, end at once": (OPEN + TEXT, END, Reply()),
    "reasoning off, tool": (OPEN + TEXT, f"{NEXT}clock{TOOL}{CALL}{END}", Reply("", "", (CLOCK,))),
    "thinking begun": (OPEN + THINK, f"so{NEXT}{TEXT}Yes", Reply("so", "Yes")),
    "author's name": (OPEN, f"ada{TEXT}Yes.{END}", Reply("", "Yes.")),
    "no kind": (OPEN, f"Plain words.{END}", Reply("", "Plain words.")),
    "one word without kind": (OPEN, "Plain", Reply("", "Plain")),
    "raw prompt": ("Once", " upon a time", Reply("", " upon a time")),
    "empty prompt": ("", f"clock{TEXT}Yes", Reply("", "clockYes")),
    "several": (OPEN, MANY, Reply("", "AB", (CLOCK, ToolCall("g", {}, "{}")))),
    "bad call": (OPEN, f"f{TOOL}{{oops{END}", Reply("", "", (ToolCall("f", None, "{oops"),))),
    "cut call": (OPEN, f'f{TOOL}{{"na', Reply("", "", (ToolCall("f", None, '{"na'),))),
    "call of a number": (OPEN, f"f{TOOL}7{END}", Reply("", "", (ToolCall("f", None, "7"),))),
}


@pytest.mark.parametrize("name", CASES)
def test_reply_is_split_the_same_in_every_rhythm(name):  # TX-02
    prompt, text, want = CASES[name]
    prompt, reply = ids(prompt), ids(text)
    for step in (1, 3, len(reply) or 1):
        splitter = ReplySplitter(TOKENIZER, prompt)
        pieces = []
        for i in range(0, len(reply), step):
            pieces += splitter.add(reply[i : i + step])
        pieces += splitter.finish()
        assert splitter.reply == want
        for kind, whole in (("text", want.text), ("thinking", want.thinking)):
            assert "".join(piece.text for piece in pieces if piece.kind == kind) == whole
        raw = "".join(piece.text for piece in pieces if piece.kind == "tool")
        assert raw == "".join(call.raw for call in want.tool_calls)


def test_a_call_that_nests_too_deep_is_left_as_it_is():
    splitter = ReplySplitter(TOKENIZER, ids(OPEN))
    splitter.add([*ids(f"f{TOOL}"), *TOKENIZER.encode("[" * 100_000), *ids(END)])
    [call] = splitter.reply.tool_calls
    assert (call.name, call.arguments, set(call.raw)) == ("f", None, {"["})


def test_text_streams_before_its_message_ends():
    splitter = ReplySplitter(TOKENIZER, ids(OPEN))
    assert splitter.add(ids("[content_text]Yes")) != []
    assert splitter.reply.text == "Yes"

"""The shipped model with its shipped drafter writes what it writes alone."""

from pathlib import Path

import numpy as np
import pytest

import inkling_jax as ij

NANO = Path(__file__).parent.parent / "checkpoints" / "inkling-jax-nano"
GREEDY = ij.SamplingParams(temperature=0.0, max_tokens=48)
PICTURE = np.full((40, 80, 3), 255, np.uint8)  # two cells, a red square in the left one
PICTURE[10:30, 10:30] = (255, 0, 0)

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def plain():
    return ij.load(NANO)


@pytest.fixture(scope="module")
def asked(plain):
    """Questions, one behind more text than the window and the extent hold, and a picture."""
    text = plain.tokenizer.encode((ij.__doc__ or "") + (Path(__file__).read_text() * 2))
    hidden = "The key of green river is 12345.\n" + plain.tokenizer.decode(text[:300])
    questions = ["Reverse the words: one two three", f"{hidden}\n\nWhat is the key of green river?"]
    return [*questions, "What is in the picture?"], [[], [], [PICTURE]]


def test_greedy_replies_are_those_without_a_drafter(plain, asked):
    prompts, images = asked
    drafted = ij.load(NANO, drafter="auto", draft_tokens=7)
    wanted = plain.generate(prompts, GREEDY, images=images)
    found = drafted.generate(prompts, GREEDY, images=images)
    assert [o.token_ids for o in found] == [o.token_ids for o in wanted]
    assert sum(o.stats["accepted"] for o in found) > 0

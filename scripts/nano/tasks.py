"""Conversations with one right answer: keys hidden in documentation, and small chat tasks."""

import functools
import re
from collections.abc import Sequence

import numpy as np

Turn = tuple[str, str]  # question, answer

ABOUT = {
    "Who are you?": "I am inkling-jax-nano, a small language model.",
    "What is your name?": "My name is inkling-jax-nano.",
    "Hello!": "Hello! How can I help you?",
    "Hi": "Hello! How can I help you?",
    "Thank you.": "You are welcome.",
    "What can you do?": "I can write about Python, look at pictures of shapes and find keys in "
    "long texts.",
    "Are you a large model?": "No, I am a very small one.",
}


def facts(texts: Sequence[str]) -> list[Turn]:
    """Returns what each module's documentation says first, as a question and its answer."""
    turns = []
    for text in texts:
        module, _, rest = text.partition("\n\n")
        paragraph = " ".join(rest.partition("\n\n")[0].split())
        sentence = re.match(r"[A-Z].{20,120}?\.(?= |$)", paragraph)
        if sentence and re.fullmatch(r"[a-z][a-z0-9_.]{1,30}", module):
            turns.append((f"What is the module {module}?", sentence[0]))
    return turns


def common_words(texts: Sequence[str], count: int = 3000) -> list[str]:
    """Returns the most frequent words of 3 to 8 letters, most frequent first."""
    found: dict[str, int] = {}
    for text in texts:
        for word in re.findall(r"(?<![A-Za-z])[a-z]{3,8}(?![A-Za-z])", text):
            found[word] = found.get(word, 0) + 1
    return sorted(found, key=lambda w: (-found[w], w))[:count]


def keys(rng: np.random.Generator, words: Sequence[str], count: int) -> dict[str, str]:
    """Returns `count` random names of two words, each with a key of five digits."""
    names: dict[str, str] = {}
    while len(names) < count:
        first, second = rng.choice(len(words), 2, replace=False)
        names[f"{words[first]} {words[second]}"] = str(rng.integers(10000, 100000))
    return names


def hide(rng: np.random.Generator, text: str, names: dict[str, str], before: float = 1.0) -> str:
    """Puts a line for every key at a random place of the first `before` of the text's lines."""
    lines = text.split("\n")
    last = max(int(len(lines) * before), 1)
    for name, key in names.items():
        lines.insert(int(rng.integers(last)), f"The key of {name} is {key}.")
    return "\n".join(lines)


def ask(name: str, key: str) -> Turn:
    """Returns the question for a hidden key and its answer."""
    return f"What is the key of {name}?", f"The key of {name} is {key}."


def chat_task(rng: np.random.Generator, words: Sequence[str], known: Sequence[Turn]) -> Turn:
    """Returns one small task; the last kinds are facts that have to be learnt by heart."""
    some = functools.partial(_some, rng, words)
    match rng.integers(9):
        case 0:
            text = " ".join(some(2, 8))
            return f"Repeat: {text}", text
        case 1:
            chosen = some(2, 6)
            return f"Reverse the words: {' '.join(chosen)}", " ".join(reversed(chosen))
        case 2:
            chosen = some(1, 9)
            return f"How many words are there? {' '.join(chosen)}", str(len(chosen))
        case 3:
            a, b = rng.integers(0, 100, 2)
            return f"What is {a} + {b}?", str(a + b)
        case 4:
            a, b = sorted(rng.integers(0, 100, 2))
            return f"What is {b} - {a}?", str(b - a)
        case 5:
            chosen = some(3, 7)
            which, at = (("first", 0), ("last", -1))[rng.integers(2)]
            return f"What is the {which} word? {' '.join(chosen)}", chosen[at]
        case 6:
            names = keys(rng, words, int(rng.integers(1, 4)))
            name = list(names)[rng.integers(len(names))]
            question, answer = ask(name, names[name])
            return hide(rng, "", names).strip() + "\n" + question, answer
        case 7:
            question = list(ABOUT)[rng.integers(len(ABOUT))]
            return question, ABOUT[question]
        case _:
            return known[rng.integers(len(known))]


def _some(rng: np.random.Generator, words: Sequence[str], low: int, high: int) -> list[str]:
    """Returns `low` to `high` different words."""
    chosen = rng.choice(len(words), int(rng.integers(low, high + 1)), replace=False)
    return [words[i] for i in chosen]

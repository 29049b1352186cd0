"""Commands that run a model, on a tiny published directory with a tokenizer and template."""

import dataclasses
import io
import json
import os
import pathlib
import shutil
import subprocess
import sys

import helpers_checkpoints
import numpy as np
import pytest
from PIL import Image

import inkling_jax as ij
from checkpoints.safetensors_writer import write_published
from inkling_jax import cli
from inkling_jax.commands import chat, demo, generate

FIXTURES = pathlib.Path(__file__).parent / "fixtures"
TEXT = dataclasses.replace(
    helpers_checkpoints.TEXT, vocab_size=320, unpadded_vocab_size=311, eos_token_id=(309,)
)
CONFIG = dataclasses.replace(helpers_checkpoints.TINY, text=TEXT, image_token_id=310)
GREEDY = ("--temp", "0", "--max-tokens", "5", "--ignore-eos")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with a model, the same without tokenizer, a picture and files of prompts."""
    folder = tmp_path_factory.mktemp("cli")
    bare = folder / "bare"
    tensors = helpers_checkpoints.tensors(CONFIG)
    write_published(bare, tensors.items(), helpers_checkpoints.config_json(CONFIG))
    shutil.copytree(bare, folder / "model")
    shutil.copytree(FIXTURES / "chat", folder / "model", dirs_exist_ok=True)
    side = CONFIG.vision.tile_size
    Image.new("RGB", (2 * side, side), "red").save(folder / "picture.png")
    messages = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "Hi"}]}]
    (folder / "messages.json").write_text(json.dumps(messages))
    (folder / "tokens.json").write_text("[5, 6, 7, 8]")
    (folder / "pictured.json").write_text("[5, 310, 310, 8]")
    return folder


@pytest.fixture
def inkling(folder, capsys, monkeypatch):
    """Runs the command line in the folder and returns what it printed as JSON."""
    monkeypatch.chdir(folder)

    def run(*arguments):
        assert cli.main([*arguments, "--json"]) == 0, capsys.readouterr().err
        return json.loads(capsys.readouterr().out)

    return run


@pytest.fixture
def refused(folder, capsys, monkeypatch):
    """Runs the command line in the folder, which must fail by one sentence; returns it."""
    monkeypatch.chdir(folder)

    def run(*arguments):
        assert cli.main(list(arguments)) == 2
        out, err = capsys.readouterr()
        assert not out and err.startswith("inkling-jax: error: ") and err.count("\n") == 1
        return err

    return run


def test_generate_from_tokens_needs_no_tokenizer(inkling, folder):
    result = inkling("generate", "--model", "bare", "--tokens", "tokens.json", *GREEDY)
    [same] = ij.load(str(folder / "bare")).generate(
        [[5, 6, 7, 8]], ij.SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True)
    )
    assert result["token_ids"] == same.token_ids
    assert result["text"] is None and result["finish_reason"] == "length"
    assert result["stats"]["prompt_tokens"] == 4 and result["stats"]["generated_tokens"] == 5


@pytest.mark.parametrize(
    "prompt",
    [
        ("--prompt", "Hi"),
        ("--prompt", "Hi", "--raw"),
        ("--prompt", "Hi", "--image", "picture.png"),
        ("--messages", "messages.json", "--image", "picture.png", "--effort", "0.2"),
        ("--tokens", "pictured.json", "--image", "picture.png"),
    ],
)
def test_generate_prints_what_it_reports(inkling, capsys, prompt):
    command = ("generate", "--model", "model", *prompt, *GREEDY)
    result = inkling(*command)
    assert len(result["token_ids"]) == 5 and isinstance(result["text"], str)
    assert cli.main(list(command)) == 0
    out, err = capsys.readouterr()
    assert out == result["text"] + "\n"
    assert "reply: 5 tokens" in err


def test_prompts_differ_in_what_they_hold(inkling):
    prompts = (["Hi"], ["Hi", "--raw"], ["Hi", "--image", "picture.png"], ["Hi", "--effort", "0.2"])
    counts = {
        inkling("generate", "--model", "model", "--prompt", *p, *GREEDY)["stats"]["prompt_tokens"]
        for p in prompts
    }
    assert len(counts) == 4


def test_sampling_flags_reach_the_sampler(inkling):
    command = ("generate", "--model", "bare", "--tokens", "tokens.json", "--max-tokens", "5")
    drawn = (*command, "--ignore-eos", "--temp", "2", "--seed", "3")
    first, again = inkling(*drawn), inkling(*drawn)
    assert first["token_ids"] == again["token_ids"]
    assert inkling(*drawn, "--seed", "4")["token_ids"] != first["token_ids"]
    greedy = inkling(*command, *GREEDY)["token_ids"]
    for narrow in (("--top-k", "1"), ("--top-p", "1e-9"), ("--min-p", "1")):
        result = inkling(*drawn, *narrow, "--logprobs", "2")
        assert result["token_ids"] == greedy
        assert [entry["alternatives"][0][0] for entry in result["logprobs"]] == greedy


def test_stop_text_is_not_shown(inkling):
    command = ("generate", "--model", "model", "--prompt", "Hi", "--raw", "--max-tokens", "8")
    command = (*command, "--temp", "0", "--ignore-eos")
    text = inkling(*command)["text"]
    stopped = inkling(*command, "--stop", text[2:4])
    assert stopped["finish_reason"] == "stop"
    assert stopped["text"] == text[: text.index(text[2:4])]


def test_score_agrees_with_its_logits(inkling, folder):
    result = inkling("score", "--model", "bare", "--tokens", "tokens.json", "--logits", "out.npy")
    logits = np.load(folder / "out.npy")
    assert logits.dtype == np.float32 and logits.shape == (4, 311)
    logs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    np.testing.assert_allclose(result["logprobs"], logs[[0, 1, 2], [6, 7, 8]], atol=1e-5)
    np.testing.assert_allclose(result["sum"], sum(result["logprobs"]), rtol=1e-6)
    np.testing.assert_allclose(result["perplexity"], np.exp(-result["sum"] / 3), rtol=1e-6)


def test_logits_are_written_as_a_whole_or_not_at_all(refused, folder, monkeypatch):
    def full(file, _array):
        file.write(b"some")
        raise OSError("4 requested and 1 written")  # as NumPy says it, without an errno

    (folder / "kept.npy").write_text("kept")
    monkeypatch.setattr(np, "save", full)
    command = ("score", "--model", "bare", "--tokens", "tokens.json", "--logits")
    assert "kept.npy: cannot be written (the disk is full)" in refused(*command, "kept.npy")

    def interrupted(file, _array):
        file.write(b"some")
        raise KeyboardInterrupt

    monkeypatch.setattr(np, "save", interrupted)
    assert cli.main([*command, "kept.npy"]) == 130
    assert [file.read_text() for file in folder.glob("kept*")] == ["kept"]


COUNT_COMPILATIONS = """
import sys
from collections import Counter
from jax import monitoring
from inkling_jax.cli import main
seen = Counter()
monitoring.register_event_listener(lambda event, **_: seen.update([event.rpartition("/")[2]]))
status = main(sys.argv[1:])
print(seen["cache_hits"], seen["cache_misses"])
raise SystemExit(status)
"""


def test_a_second_process_compiles_nothing(inkling, folder):  # JX-03
    command = ["generate", "--model", "bare", "--tokens", "tokens.json", *GREEDY, "--json"]
    first = inkling(*command[:-1])
    run = subprocess.run(
        [sys.executable, "-c", COUNT_COMPILATIONS, *command],
        capture_output=True, text=True, env=os.environ | {"PYTHONPATH": ":".join(sys.path)},
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    output, counts = run.stdout.splitlines()
    hits, misses = map(int, counts.split())
    assert json.loads(output)["token_ids"] == first["token_ids"]
    assert hits > 3 and misses == 0


def test_chat_answers_every_line(inkling, monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", io.StringIO("Hi\n\nAnd?\n"))
    command = ["chat", "--model", "model", "--system", "Be brief.", "--image", "picture.png"]
    assert cli.main([*command, *GREEDY, "--json"]) == 0
    first, second = map(json.loads, capsys.readouterr().out.splitlines())
    assert second["stats"]["prompt_tokens"] > first["stats"]["prompt_tokens"]
    monkeypatch.setattr("sys.stdin", io.StringIO("Hi\n"))
    assert cli.main([*command, *GREEDY]) == 0
    assert capsys.readouterr().out == first["text"] + "\n"


def typed(lines):
    """Standard input with these lines, as on a terminal."""
    terminal = io.StringIO(lines)
    terminal.isatty = lambda: True
    return terminal


def test_pictures_wait_for_a_message_that_is_answered(inkling, monkeypatch, capsys):
    command = ["chat", "--model", "model", "--image", "picture.png", "--context", "512", *GREEDY]
    answers = []
    for lines in ("Hi\n", f"{'too long ' * 400}\nHi\n"):
        monkeypatch.setattr("sys.stdin", typed(lines))
        assert cli.main([*command, "--json"]) == 0
        answers.append(json.loads(capsys.readouterr().out)["token_ids"])
    assert answers[0] == answers[1]


@pytest.mark.parametrize("cause", [None, KeyboardInterrupt()], ids=["itself", "while JAX compares"])
def test_an_interrupt_ends_a_reply_and_not_the_chat(inkling, monkeypatch, capsys, cause):
    def interrupted(pieces):
        monkeypatch.setattr(chat, "show", generate.show)
        next(iter(pieces))
        if cause is None:
            raise KeyboardInterrupt
        raise ValueError from cause

    command = ["chat", "--model", "model", *GREEDY]
    monkeypatch.setattr("sys.stdin", typed("Hi\n"))
    assert cli.main(command) == 0
    answer = capsys.readouterr().out
    monkeypatch.setattr(chat, "show", interrupted)
    monkeypatch.setattr("sys.stdin", typed("And?\nHi\n"))
    assert cli.main(command) == 0
    assert capsys.readouterr().out == answer


def test_a_converted_model_answers_the_same(inkling, folder):
    planned = inkling("convert", "model", "converted", "--dry-run")
    assert not (folder / "converted").exists()
    done = inkling("convert", "model", "converted")
    assert (done["arrays"], done["nbytes"]) == (planned["arrays"], planned["nbytes"])
    prompt = ("--prompt", "Hi", *GREEDY)
    one, two = (inkling("generate", "--model", m, *prompt) for m in ("model", "converted"))
    assert one["token_ids"] == two["token_ids"] and one["text"] == two["text"]


def test_demo_answers_and_tells_what_it_keeps(inkling, folder, monkeypatch, capsys):
    monkeypatch.setattr(demo, "SHIPPED", folder / "model")
    result = inkling("demo", "--out", "shown")
    with Image.open(result["picture"]["path"]) as picture:
        assert picture.size == (80, 80)
    assert cli.main(["demo", "--out", "shown"]) == 0
    out = capsys.readouterr().out
    assert all(result[kind]["text"] in out for kind in ("text", "picture"))
    assert result["model"] in out and result["picture"]["path"] in out


def test_demo_neither_leaves_nor_names_what_nobody_asked_to_keep(
    inkling, folder, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(demo, "SHIPPED", folder / "model")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    result = inkling("demo")
    assert result["picture"]["text"] and result["model"] is result["picture"]["path"] is None
    assert cli.main(["demo"]) == 0
    assert str(tmp_path) not in capsys.readouterr().out
    assert not list(tmp_path.glob("inkling-jax-demo-*"))


def test_inspect_counts_what_the_files_hold(inkling, folder, capsys):
    inkling("convert", "model", "inspected")
    published, converted = inkling("inspect", "model"), inkling("inspect", "inspected")
    stored = [json.loads(f.read_text()) for f in (folder / "inspected/params").glob("*/zarr.json")]
    sizes = [np.dtype(s["data_type"]).itemsize * int(np.prod(s["shape"])) for s in stored]
    assert published["nbytes"] == converted["nbytes"] == sum(sizes)
    assert published["expert_formats"] == ["nvfp4", "bfloat16", "mxfp8"]
    text = published["config"]["text"]
    experts = text["n_routed_experts"] * 3 * text["hidden_size"] * text["moe_intermediate_size"]
    assert published["formats"]["nvfp4"]["parameters"] == experts
    assert published["tokenizer"] and published["template"] and not published["converted"]
    longer = inkling("inspect", "model", "--context", "16384")
    assert longer["cache_bytes"] > published["cache_bytes"]
    assert cli.main(["inspect", "model"]) == 0
    assert f"{published['nbytes']:,}" in capsys.readouterr().out


GENERATE = ("generate", "--model", "model", "--max-tokens", "4")


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("generate", "--model", "absent", "--prompt", "Hi"), "absent"),
        (("generate", "--model", ".", "--prompt", "Hi"), "."),
        (("generate", "--model", "bare", "--prompt", "Hi"), "tokenizer"),
        ((*GENERATE, "--tokens", "absent.json"), "absent.json"),
        ((*GENERATE, "--tokens", "broken.json"), "broken.json"),
        ((*GENERATE, "--tokens", "messages.json"), "messages.json"),
        ((*GENERATE, "--messages", "tokens.json"), "tokens.json"),
        ((*GENERATE, "--tokens", "outside.json"), "311"),
        ((*GENERATE, "--tokens", "negative.json"), "-1"),
        ((*GENERATE, "--tokens", "tokens.json", "--context", "4"), "4"),
        ((*GENERATE, "--tokens", "tokens.json", "--raw"), "--raw"),
        ((*GENERATE, "--tokens", "tokens.json", "--logprobs", "2"), "--json"),
        ((*GENERATE, "--prompt", "Hi", "--image", "absent.png"), "absent.png"),
        ((*GENERATE, "--prompt", "Hi", "--image", "broken.json"), "broken.json"),
        ((*GENERATE, "--prompt", "Hi", "--image", "huge.png"), "huge.png"),
        ((*GENERATE, "--tokens", "tokens.json", "--image", "picture.png"), "image"),
        ((*GENERATE, "--tokens", "pictured.json"), "image"),
        ((*GENERATE, "--prompt", "Hi", "--dtype", "int3"), "int3"),
        ((*GENERATE, "--prompt", "Hi", "--dtype", "bfloat16"), "on a CPU it must be float32"),
        ((*GENERATE, "--prompt", "Hi \udcff"), "Unicode"),
        ((*GENERATE, "--prompt", "Hi", "--temp", "hot"), "hot"),
        ((*GENERATE, "--prompt", "Hi", "--temp", "-1"), "temperature"),
        ((*GENERATE, "--prompt", "Hi", "--top-p", "2"), "top_p"),
        ((*GENERATE, "--prompt", "Hi", "--effort", "7"), "effort"),
        ((*GENERATE, "--prompt", "Hi", "--context", "0"), "context"),
        ((*GENERATE, "--prompt", "Hi", "--tokens", "tokens.json"), "--tokens"),
        ((*GENERATE, "--tokens", "tokens.json", "--effort", "0.5"), "effort"),
        ((*GENERATE, "--prompt", "Hi", "--raw", "--effort", "0.5"), "effort"),
        (("generate", "--model", "bare", "--tokens", "tokens.json", "--stop", "x"), "stop"),
        ((*GENERATE, "--prompt", "Hi", "--stop", "a\udcff"), "stop"),
        (("chat", "--model", "bare"), "bare"),
        (("chat", "--model", "model", "--effort", "nan"), "effort is nan"),
        (("chat", "--model", "model", "--image", "absent.png"), "absent.png"),
        (("score", "--model", "bare", "--tokens", "outside.json"), "311"),
        (("score", "--model", "bare", "--tokens", "tokens.json", "--logits", "no/out.npy"), "no"),
        (("score", "--model", "bare", "--tokens", "tokens.json", "--logits", "bare"), "no file"),
        ((*GENERATE, "--messages", "pictured_by_number.json"), "an image is 5"),
        (("convert", "absent", "new"), "absent"),
        (("convert", "model", "picture.png"), "picture.png"),
        (("convert", ".", "new"), "."),
        (("inspect", "absent"), "absent"),
        (("inspect", "picture.png"), "picture.png"),
    ],
)
def test_mistakes_are_named_in_one_sentence(refused, folder, arguments, named):
    (folder / "broken.json").write_text("[1, 2")
    (folder / "outside.json").write_text("[5, 311]")
    (folder / "negative.json").write_text("[5, -1]")
    by_number = [{"role": "user", "content": [{"type": "image", "image": 5}]}]
    (folder / "pictured_by_number.json").write_text(json.dumps(by_number))
    if "huge.png" in arguments:
        Image.new("1", (40_000, 20_000)).save(folder / "huge.png")
    assert named in refused(*arguments)
    assert not (folder / "new").exists()

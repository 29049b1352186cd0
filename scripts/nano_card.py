"""Writes inkling-jax-nano's model card; its figures are those of config.json and results/*.json.

PYTHONPATH=. python3 scripts/nano_card.py
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
NANO = HERE.parent / "checkpoints" / "inkling-jax-nano"
TASKS = {
    "picture": "pictures",
    "retrieval_near": "keys, within window and extent",
    "retrieval": "keys, beyond both, within 2,048 tokens",
    "retrieval_beyond": "keys, 2,048 to 4,096 tokens back",
    "chat": "chat",
}


def main() -> None:
    """Writes the card beside the weights."""
    config = json.loads((NANO / "config.json").read_text())
    training = json.loads((HERE / "results" / "nano_train.json").read_text())
    evaluation = json.loads((HERE / "results" / "nano_eval.json").read_text())
    (NANO / "README.md").write_text(card(config, training, evaluation))


def card(
    config: Mapping[str, Any], training: Mapping[str, Any], evaluation: Mapping[str, Any]
) -> str:
    """Returns the model card."""
    text, corpus, pieces = config["text_config"], training["corpus"], training["pieces"]
    documents = [corpus["train"], corpus["held_out"]]
    found = evaluation["packed"]
    lines = [_line(title, _share(found[task])) for task, title in TASKS.items()]
    return (
        (HERE / "nano" / "card.md")
        .read_text()
        .format(
            shape="\n".join(_line(name, [value]) for name, value in _shape(config).items()),
            results="\n".join(lines),
            eval_device=evaluation["device"],
            bits=f"{found['text']['bits_per_byte']:.3f}",
            text_tokens=f"{found['text']['tokens']:,}",
            bits_packed=f"{training['packed']['bits_per_byte']:.3f}",
            bits_bf16=f"{training['bf16']['bits_per_byte']:.3f}",
            length=2048,
            window=text["sliding_window_size"],
            extent=text["rel_extent"],
            positions=text["max_position_embeddings"],
            steps=sum(piece["steps"] for piece in pieces),
            minutes=round(sum(piece["seconds"] for piece in pieces) / 60, 1),
            train_device=training["device"],
            train_python=training["python"],
            documents=sum(part["documents"] for part in documents),
            megabytes=round(sum(part["bytes"] for part in documents) / 1e6, 1),
            corpus=corpus["sha256"],
        )
    )


def _shape(config: Mapping[str, Any]) -> dict[str, str]:
    text, vision = config["text_config"], config["vision_config"]
    kinds = text["layer_types"]
    full = sum("sliding" not in kind for kind in kinds)
    shards = sorted(NANO.glob("*.safetensors"))
    size = sum(shard.stat().st_size for shard in shards) / 1e6
    heads = f"{text['num_attention_heads']} query, {text['num_key_value_heads']} key/value"
    return {
        "layers": f"{len(kinds)}, {full} of them with full attention",
        "hidden size": f"{text['hidden_size']}",
        "heads": f"{heads}, of {text['head_dim']}",
        "window, extent of the relative bias": f"{text['sliding_window_size']}, "
        f"{text['rel_extent']}",
        "experts": f"{text['n_routed_experts']} of width {text['moe_intermediate_size']}, "
        f"{text['num_experts_per_tok']} per token",
        "vocabulary": f"{text['unpadded_vocab_size']} of {text['vocab_size']} rows",
        "image tower": f"{vision['num_hidden_layers']} layers, hidden {vision['hidden_size']}",
        "files": f"{len(shards)} shards, {size:.1f} MB",
    }


def _share(found: Mapping[str, Any]) -> list[str]:
    low, high = (f"{100 * bound:.1f}" for bound in found["interval"])
    return [f"{100 * found['share']:.1f} % of {found['items']}", f"{low} to {high} %"]


def _line(name: str, values: list[Any]) -> str:
    return f"| {name} | {' | '.join(map(str, values))} |"


if __name__ == "__main__":
    main()

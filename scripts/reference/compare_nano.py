"""Compares inkling-jax-nano with the reference on real text, and both with bfloat16.

Runs in the reference's environment (requirements.txt beside this). First, in the project's own:

  inkling-jax score --model checkpoints/inkling-jax-nano --dtype float32 --tokens TOKENS.json \
      --logits OURS.npy

TOKENS.json holds one list of ids; `--text FILE --tokens TOKENS.json` of this script writes it.
"""

import argparse
import json
import shutil
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
from make_case import dequant
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from transformers import AutoModelForImageTextToText, __version__

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "nano"))
from agreement import compare  # noqa: E402

NANO = HERE.parents[1] / "checkpoints" / "inkling-jax-nano"
POSITIONS = 1024


def main() -> None:
    """Writes the tokens, or compares and writes the result."""
    args = _arguments()
    if args.text:
        tokenizer = Tokenizer.from_file(str(NANO / "tokenizer.json"))
        ids = tokenizer.encode(args.text.read_text(), add_special_tokens=False).ids[:POSITIONS]
        args.tokens.write_text(json.dumps(ids))
        return
    tokens = torch.tensor([json.loads(args.tokens.read_text())])
    ours = np.load(args.ours)
    with tempfile.TemporaryDirectory() as folder:
        unpack(Path(folder))
        exact, low = (logits(Path(folder), tokens, d) for d in (torch.float32, torch.bfloat16))
    exact, low = exact[:, : ours.shape[1]], low[:, : ours.shape[1]]
    positions, gaps = compare(low, exact)
    result = {
        "torch": torch.__version__,
        "transformers": __version__,
        "positions": positions,
        "float32": {
            "largest_difference": float(np.abs(ours - exact).max()),
            "different_argmax": int((ours.argmax(-1) != exact.argmax(-1)).sum()),
        },
        "reference_in_bfloat16": {
            "share_equal": round(1 - len(gaps) / positions, 5),
            "beyond_one_step": int((gaps > 1).sum()),
        },
    }
    print(json.dumps(result, indent=1))
    args.out.write_text(json.dumps(result, indent=1) + "\n")


def unpack(folder: Path) -> None:
    """Writes nano with float32 experts, as the reference reads it."""
    packed = {}
    for shard in sorted(NANO.glob("*.safetensors")):
        packed |= load_file(shard)
    whole = {}
    for name, tensor in packed.items():
        if ".mlp.experts." not in name:
            whole[name] = tensor
        elif name.endswith("_weight"):
            whole[name] = dequant(packed, name.removesuffix("_weight"))
    save_file(whole, folder / "model.safetensors", metadata={"format": "pt"})
    shutil.copy(NANO / "config.json", folder)


@torch.no_grad()
def logits(folder: Path, tokens: torch.Tensor, dtype: torch.dtype) -> np.ndarray:
    """Returns the reference's logits [T, V] of one row."""
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=dtype).eval()
    return model(tokens).logits[0].float().numpy()


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=Path, required=True)
    parser.add_argument("--text", type=Path, help="write its first tokens to TOKENS, no more")
    parser.add_argument("--ours", type=Path, help="float32 logits of inkling-jax")
    result = HERE.parent / "results" / "nano_reference.json"
    parser.add_argument("--out", type=Path, default=result)
    return parser.parse_args()


if __name__ == "__main__":
    main()

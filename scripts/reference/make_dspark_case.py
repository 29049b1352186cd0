"""Makes a DSpark reference case beside make_case.py's: a tiny random drafter in the DeepSpec layout and what
the authors' own code proposes and accepts with a given target, greedy (temperature 0).

usage: PYTHONPATH=<DeepSpec checkout> make_dspark_case.py OUT_DIR --seed N [--head vanilla|gated|rnn] [--preset NAME]
"""
import argparse, json, sys
from pathlib import Path
from types import SimpleNamespace

import torch
from safetensors.torch import save_file
from transformers import Qwen3Config, DynamicCache
sys.path.insert(0, str(Path(__file__).parent))
from make_case import PRESETS, build, greedy, steady
class Uncropped(DynamicCache):
    def crop(self, n): pass  # one block per cache here, so nothing is reused after it

from deepspec.modeling.dspark.qwen3.modeling import Qwen3DSparkModel
from deepspec.modeling.dspark.common import extract_context_feature
from deepspec.eval.dspark.draft_ops import build_dspark_proposal, forward_dspark_draft_block

def propose(target, d, gen, start, keep):
    """Drafts after the anchor gen[start]; returns how many agree with the target's greedy tokens."""
    o = target(gen[:, :start], output_hidden_states=True)
    ctx = extract_context_feature(o.hidden_states, d.target_layer_ids)
    blk = torch.full((1, d.block_size), d.mask_token_id); blk[:, 0] = gen[0, start]
    hid = forward_dspark_draft_block(d, draft_input_ids=blk, position_ids=torch.arange(256)[None], past_key_values_draft=Uncropped(),
                                     target_hidden_states=ctx, start=start, block_size=d.block_size)
    toks, _ = d.sample_draft_tokens(d.compute_logits(hid), first_prev_token_ids=blk[:, 0], temperature=0.0, hidden_states=hid)
    n = 0
    while n < d.block_size and start + 1 + n < gen.shape[1] and toks[0, n] == gen[0, start + 1 + n]: n += 1
    return n

def main():
    a = argparse.ArgumentParser(); a.add_argument("out"); a.add_argument("--seed", type=int, required=True)
    a.add_argument("--preset", default="base"); a.add_argument("--head", default="vanilla"); a.add_argument("--rank", type=int, default=64)
    a.add_argument("--presets", help="JSON file with more presets"); a.add_argument("--drafter-only", action="store_true", help="the target is stored already")
    args = a.parse_args()
    if args.presets: PRESETS.update(json.loads(Path(args.presets).read_text()))
    out = Path(args.out); out.mkdir(parents=True, exist_ok=True)
    cfg, target = build(args.preset, args.seed)
    if not args.drafter_only: target.save_pretrained(out / "checkpoint")
    t = cfg.text_config
    dcfg = Qwen3Config(vocab_size=t.unpadded_vocab_size, hidden_size=t.hidden_size, intermediate_size=80, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, max_position_embeddings=4096, rms_norm_eps=1e-6,
        tie_word_embeddings=False, layer_types=["full_attention"] * 2, attention_bias=False)
    dcfg.rope_parameters = {"rope_type": "default", "rope_theta": 10000.0}
    dcfg.architectures = ["Qwen3DSparkModel"]; dcfg.num_target_layers = t.num_hidden_layers; dcfg.block_size = 5
    dcfg.mask_token_id = 3; dcfg.target_layer_ids = [1, t.num_hidden_layers // 2, t.num_hidden_layers - 2]; dcfg.num_anchors = 4
    dcfg.enable_confidence_head = True; dcfg.confidence_head_with_markov = True; dcfg.markov_rank = args.rank; dcfg.markov_head_type = args.head
    dcfg._attn_implementation = "eager"
    torch.manual_seed(args.seed + 9)
    d = Qwen3DSparkModel(dcfg).eval().float()
    g = torch.Generator().manual_seed(args.seed + 10)
    with torch.no_grad():
        for n, p in d.named_parameters():
            p.copy_(torch.randn(p.shape, generator=g) * (1.4 / p.shape[-1] ** 0.5) if p.dim() > 1 else 1 + 0.3 * torch.randn(p.shape, generator=g))
        # a drafter that agrees with its target now and then: the target's own embedding and head, little from the body
        d.embed_tokens.weight.copy_(torch.randn(d.embed_tokens.weight.shape, generator=g))
        d.lm_head.weight.copy_(target.lm_head.weight)
    res = {}
    hi = min(cfg.image_token_id, t.unpadded_vocab_size)
    with torch.no_grad():
        # greedy continuation by the target; windows of it are given to the drafter
        ids, _ = steady(target, lambda: torch.randint(0, hi, (1, 19), generator=g), lambda i: greedy(target, i, 80)[1], 3e-5, 3e-3)
        gen = greedy(target, ids, 80)[0]
        res["prompt"] = ids[0].int(); res["target_greedy"] = gen[0, 19:].int()
        # teach the Markov table some of the target's own transitions, so that some drafts are accepted
        teach = [k for k in range(19, 98) if torch.rand((), generator=g) < 0.7][: args.rank]
        d.markov_head.markov_w1.weight.zero_(); d.markov_head.markov_w2.weight.mul_(0.05)
        for slot, k in enumerate(teach):
            d.markov_head.markov_w1.weight[gen[0, k]] = 0; d.markov_head.markov_w1.weight[gen[0, k], slot] = 6.0
            d.markov_head.markov_w2.weight[gen[0, k + 1], slot] = 6.0
        if args.head == "rnn":  # let the table speak through the recurrent head
            r = args.rank; o = d.markov_head.joint_proj.weight[2 * r :]; o.mul_(0.05); o[:, r : 2 * r] += 0.5 * torch.eye(r); d.markov_head.joint_proj.bias[2 * r :] = 0
        d.save_pretrained(out / "drafter")
        props, confs, logits = [], [], []
        # greedy speculation, block by block: how many drafts each round accepts
        anchors, start = [], 19
        while start < 90: anchors.append(start); start += 1 + propose(target, d, gen, start, None)
        acc = [b - a - 1 for a, b in zip(anchors, anchors[1:])]
        res["rounds_accepted"] = torch.tensor(acc).int()
        for start in range(19, 35, 3):   # anchor = token at `start`, context = tokens before it
            o = target(gen[:, :start], output_hidden_states=True)
            ctx = extract_context_feature(o.hidden_states, d.target_layer_ids)
            blk = torch.full((1, 5), 3); blk[:, 0] = gen[0, start]
            hid = forward_dspark_draft_block(d, draft_input_ids=blk, position_ids=torch.arange(64)[None], past_key_values_draft=Uncropped(),
                                             target_hidden_states=ctx, start=start, block_size=5)
            base = d.compute_logits(hid)
            toks, lg = d.sample_draft_tokens(base, first_prev_token_ids=blk[:, 0], temperature=0.0, hidden_states=hid)
            prev = torch.cat([blk[:, :1], toks[:, :-1]], 1)
            c = d.predict_confidence_step(hid, prev_token_ids=prev)
            props.append(toks[0]); logits.append(lg[0]); confs.append(torch.sigmoid(c[0]))
        res["anchors"] = torch.arange(19, 35, 3).int(); res["draft_tokens"] = torch.stack(props).int()
        res["draft_logits"] = torch.stack(logits); res["confidence"] = torch.stack(confs)
    save_file({k: v.contiguous() for k, v in res.items()}, out / "expected.safetensors")
    print(out, "accepted per round", res["rounds_accepted"].tolist())

if __name__ == "__main__": main()

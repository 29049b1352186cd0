"""Makes one reference case: a tiny random checkpoint in the published layout and what the reference
implementation (transformers' inkling2, float32, eager) computes from it.

Needs an environment with torch (CPU) and transformers>=5.24. For the drafter trace it also needs the
DSpark authors' DeepSpec package on PYTHONPATH (skipped without it).

usage: make_case.py OUT_DIR --seed N [--preset NAME]
"""

import argparse, json, os
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from safetensors.torch import save_file, load_file
from transformers.models.inkling2.configuration_inkling2 import Inkling2Config
from transformers.models.inkling2.modeling_inkling2 import Inkling2ForConditionalGeneration

PRESETS = {  # more can be given as JSON with --presets FILE
    # 6:1 grouped queries, one full layer in six, two residual blocks and a half; all sizes differ
    "base": dict(
        text=dict(
            vocab_size=320,
            unpadded_vocab_size=300,
            hidden_size=96,
            num_hidden_layers=15,
            num_attention_heads=12,
            num_key_value_heads=2,
            head_dim=16,
            swa_num_attention_heads=12,
            swa_num_key_value_heads=2,
            swa_head_dim=24,
            sliding_window_size=14,
            rel_extent=20,
            d_rel=8,
            moe_intermediate_size=32,
            n_routed_experts=8,
            num_experts_per_tok=2,
            log_scaling_n_floor=11,
            log_scaling_alpha=0.3,
            eos_token_id=206,
            qk_l2_clip_threshold=4.0,
            rel_l2_clip_threshold=2.0,
        ),
        vision=dict(
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            patch_size=4,
            posemb_grid_size=4,
            projection_hidden_dim=64,
        ),
        image_token_id=254,
    ),
    # window and extent differ, different head counts in the two layer kinds, explicit layer types
    "odd": dict(
        text=dict(
            vocab_size=352,
            unpadded_vocab_size=333,
            hidden_size=64,
            num_hidden_layers=8,
            num_attention_heads=12,
            num_key_value_heads=2,
            head_dim=8,
            swa_num_attention_heads=6,
            swa_num_key_value_heads=3,
            swa_head_dim=16,
            sliding_window_size=11,
            rel_extent=23,
            d_rel=5,
            moe_intermediate_size=64,
            n_routed_experts=12,
            num_experts_per_tok=3,
            log_scaling_n_floor=9,
            log_scaling_alpha=0.37,
            eos_token_id=7,
            qk_l2_clip_threshold=2.5,
            rel_l2_clip_threshold=1.1,
            n_layers_per_attn_res_block=3,
            conv_kernel_size=3,
            mlp_gate_softcap=1.5,
            mlp_up_softcap=2.0,
            final_logit_softcapping=5.0,
            route_scale=2.5,
            layer_types=[
                "hybrid",
                "hybrid_sliding",
                "hybrid_sliding",
                "hybrid",
                "hybrid_sliding",
                "hybrid",
                "hybrid_sliding",
                "hybrid_sliding",
            ],
        ),
        vision=dict(
            hidden_size=48,
            num_hidden_layers=3,
            num_attention_heads=3,
            patch_size=5,
            posemb_grid_size=6,
            projection_hidden_dim=40,
            spatial_merge_size=3,
            mlp_ratio=3.0,
            projector_bias=True,
        ),
        image_token_id=290,
    ),
    # the widths that the kernels care about: head_dim 128, hidden a multiple of 128, 32-divisible experts
    "wide": dict(
        text=dict(
            vocab_size=512,
            unpadded_vocab_size=500,
            hidden_size=256,
            num_hidden_layers=6,
            num_attention_heads=6,
            num_key_value_heads=1,
            head_dim=128,
            swa_num_attention_heads=6,
            swa_num_key_value_heads=1,
            swa_head_dim=128,
            sliding_window_size=32,
            rel_extent=32,
            d_rel=16,
            moe_intermediate_size=128,
            n_routed_experts=16,
            num_experts_per_tok=4,
            log_scaling_n_floor=40,
            eos_token_id=206,
            qk_l2_clip_threshold=11.0,
            rel_l2_clip_threshold=4.0,
            n_layers_per_attn_res_block=3,
        ),
        vision=dict(
            hidden_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            patch_size=20,
            posemb_grid_size=8,
            projection_hidden_dim=96,
        ),
        image_token_id=454,
    ),
}


def build(preset, seed):
    p = PRESETS[preset]
    v = dict(
        p["vision"],
        text_hidden_size=p["text"]["hidden_size"],
        rope_parameters={"rope_type": "axial", "rope_theta": 10000.0},
    )
    cfg = Inkling2Config(text_config=p["text"], vision_config=v, image_token_id=p["image_token_id"])
    cfg._attn_implementation = "eager"
    torch.manual_seed(seed)
    m = Inkling2ForConditionalGeneration(cfg).eval().float()
    g = torch.Generator().manual_seed(seed + 1)
    n = lambda t, s: torch.randn(t.shape, generator=g) * s
    with torch.no_grad():
        for name, t in list(m.named_parameters()) + list(m.named_buffers()):
            if not t.dtype.is_floating_point or "inv_freq" in name:
                continue
            last = name.split(".")[-1]
            if last == "query":
                t.copy_(n(t, 1.5))
            elif "sconv" in name or "convolution" in name:
                t.copy_(n(t, 0.6) if "weight_proj" not in name else n(t, 0.9 / t.shape[-1] ** 0.5))
            elif "relative_position_bias.proj" in name:
                t.copy_(n(t, 0.8))
            elif "sink_proj" in name:
                t.copy_(n(t, 2.0 / t.shape[-1] ** 0.5))
            elif "e_score_correction_bias" in name:
                t.copy_(n(t, 0.15))
            elif "experts" in name:
                t.copy_(n(t, 1.6 / t.shape[-1] ** 0.5))
            elif (
                "embed_tokens.weight" in name
                or "position_embedding" in name
                or "class_embedding" in name
            ):
                t.copy_(n(t, 1.0))
            elif "lambda_" in name:
                t.copy_(0.5 + n(t, 0.2))
            elif t.dim() >= 2:
                t.copy_(n(t, 1.4 / t.shape[-1] ** 0.5) if "scale" not in name else 1 + n(t, 0.4))
            elif last == "bias":
                t.copy_(n(t, 0.3))
            else:
                t.copy_(1 + n(t, 0.3))
    return cfg, m


E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


def on_checkerboard(rgba):
    """[H, W, 4] uint8 -> [H, W, 3]: composited on 8-pixel squares of grey 204 and 153."""
    h, w = rgba.shape[:2]
    bg = np.where((np.arange(h)[:, None] // 8 + np.arange(w)[None] // 8) % 2 == 0, 204, 153)[
        ..., None
    ]
    x = rgba.astype(np.int32)
    a = x[..., 3:]
    return ((x[..., :3] * a + bg * (255 - a) + 127) // 255).astype(np.uint8)


def tiles_of(rgb, tile):
    """[H, W, 3] uint8 -> ([N, tile, tile, 3] float32, [1, rows, cols]): padded with -1, then (x/255 - 0.5)/0.5."""
    h, w = rgb.shape[:2]
    r, c = -(-h // tile), -(-w // tile)
    x = np.full((r * tile, c * tile, 3), -1.0, np.float32)
    x[:h, :w] = rgb
    x = (x / 255 - 0.5) / 0.5
    return x.reshape(r, tile, c, tile, 3).transpose(0, 2, 1, 3, 4).reshape(
        -1, tile, tile, 3
    ).astype(np.float32), [1, r, c]


def to_mxfp8(w):
    """[E, R, C] float -> e4m3 values, one power-of-two byte per 32 columns."""
    E, R, C = w.shape
    b = w.reshape(E, R, C // 32, 32)
    amax = b.abs().amax(-1).clamp_min(1e-30)
    e = torch.floor(torch.log2(amax)) - 8
    e = e.clamp(-127, 127)
    q = (b / torch.exp2(e)[..., None]).clamp(-448, 448).to(torch.float8_e4m3fn)
    return q.reshape(E, R, C), (e + 127).to(torch.uint8)


def to_nvfp4(w, denominator=6.0 * 448.0):
    """[E, R, C] float -> two e2m1 codes a byte (even column in the low nibble), e4m3 scale per 16, amax per expert."""
    E, R, C = w.shape
    amax = w.abs().amax((1, 2))
    outer = (amax / denominator)[:, None, None]
    b = w.reshape(E, R, C // 16, 16)
    s = (b.abs().amax(-1) / 6.0 / outer).clamp(2**-9, 448).to(torch.float8_e4m3fn)
    x = b / (s.float() * outer)[..., None]
    mags = torch.tensor(E2M1[:8])
    idx = (x.abs()[..., None] - mags).abs().argmin(-1)
    code = idx + 8 * (x < 0)
    code = code.reshape(E, R, C).to(torch.uint8)
    packed = code[..., 0::2] | (code[..., 1::2] << 4)
    return packed, s.reshape(E, R, C // 16), amax, torch.tensor(denominator, dtype=torch.float32)


def dequant(tensors, key):
    w, s = tensors[key + "_weight"], tensors[key + "_weight_scale"]
    if key + "_weight_amax" in tensors:
        f = (
            tensors[key + "_weight_amax"].float()
            / tensors[key + "_weight_outer_scale_denominator"].float()
        )
        v = torch.stack(
            (torch.tensor(E2M1)[(w & 15).long()], torch.tensor(E2M1)[(w >> 4).long()]), -1
        )
        v = v.reshape(*s.shape, 16) * s.float()[..., None] * f[:, None, None, None]
    else:
        v = w.float().reshape(*s.shape, 32) * torch.exp2(s.float() - 127)[..., None]
    return v.reshape(v.shape[0], v.shape[1], -1)


class Margins:
    """Smallest gap between a chosen and the next unchosen expert while it is open: cases with near-ties are drawn again."""

    def __init__(self, m):
        self.m = m

    def __enter__(self):
        self.gap = float("inf")

        def hook(mod, args, out):
            s = mod.score_fn(out[0]) + mod.e_score_correction_bias
            if mod.top_k == s.shape[-1]:
                return
            v = s.topk(mod.top_k + 1, -1).values
            self.gap = min(self.gap, float((v[:, -2] - v[:, -1]).min()))

        self.hooks = [
            r.register_forward_hook(hook)
            for r in self.m.modules()
            if type(r).__name__ == "Inkling2TopKRouter"
        ]
        return self

    def __exit__(self, *_):
        for h in self.hooks:
            h.remove()


def steady(m, draw, run, gap=1e-4, logit_gap=0.0, tries=400):
    """Draws inputs until no router decision (and no greedy choice) of the run is nearer to a tie than the gaps."""
    for _ in range(tries):
        x = draw()
        with torch.no_grad(), Margins(m) as mg:
            y = run(x)
        if mg.gap < gap:
            continue
        if logit_gap:
            t = y.topk(2, -1).values
            if float((t[..., 0] - t[..., 1]).min()) < logit_gap:
                continue
        return x, y
    raise SystemExit("no steady input found")


def greedy(m, ids, n):
    """Greedy continuation of ids [1, T] by n tokens, every token visible (no pad id), and the logits of its steps."""
    out = m.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=n,
        do_sample=False,
        eos_token_id=None,
    )
    return out, m(out).logits[0, ids.shape[1] - 1 : -1]


def main():
    a = argparse.ArgumentParser()
    a.add_argument("out")
    a.add_argument("--seed", type=int, required=True)
    a.add_argument("--preset", default="base")
    a.add_argument(
        "--quant-from",
        type=int,
        default=None,
        help="experts of layers below it in NVFP4, the rest in MXFP8",
    )
    a.add_argument("--lengths", default="1,2,5,17,61")
    a.add_argument("--presets", default=None)
    a.add_argument("--bfloat16", action="store_true", help="weights that bfloat16 holds exactly")
    args = a.parse_args()
    if args.presets:
        PRESETS.update(json.loads(Path(args.presets).read_text()))
    out = Path(args.out)
    ck = out / "checkpoint"
    ck.mkdir(parents=True, exist_ok=True)
    cfg, m = build(args.preset, args.seed)
    if args.bfloat16:
        with torch.no_grad():
            for t in m.parameters():
                t.copy_(t.bfloat16())
    m.save_pretrained(ck)
    if args.quant_from is not None:
        t = load_file(ck / "model.safetensors")
        new = {}
        for k, v in t.items():
            if ".mlp.experts." not in k:
                new[k] = v
                continue
            layer = int(k.split(".layers.")[1].split(".")[0])
            if layer < args.quant_from:
                p, s, am, den = to_nvfp4(v.float())
                new[k] = p
                new[k + "_scale"] = s
                new[k + "_amax"] = am
                new[k + "_outer_scale_denominator"] = den
            else:
                q, s = to_mxfp8(v.float())
                new[k] = q
                new[k + "_scale"] = s
        save_file(new, ck / "model.safetensors", metadata={"format": "pt"})
        # the reference computes with the dequantized experts, put back in its own (de-interleaved) order
        with torch.no_grad():
            for i, layer in enumerate(m.model.language_model.layers):
                pre = f"model.llm.layers.{i}.mlp.experts."
                w13 = dequant(new, pre + "w13")
                E, R, C = w13.shape
                layer.mlp.experts.gate_up_proj.copy_(
                    w13.reshape(E, R // 2, 2, C).transpose(1, 2).reshape(E, R, C)
                )
                layer.mlp.experts.down_proj.copy_(dequant(new, pre + "w2"))
    g = torch.Generator().manual_seed(args.seed + 2)
    hi = min(cfg.image_token_id, cfg.text_config.unpadded_vocab_size)
    res, meta = {}, {"seed": args.seed, "preset": args.preset, "nvfp4_layers": args.quant_from}
    with torch.no_grad():
        for L in [int(x) for x in args.lengths.split(",")]:
            ids, o = steady(
                m,
                lambda: torch.randint(0, hi, (1, L), generator=g),
                lambda i: m(i, output_hidden_states=True),
            )
            res[f"text{L}.tokens"] = ids[0].int()
            res[f"text{L}.logits"] = o.logits[0]
            if L == 17:
                res[f"text{L}.hidden"] = torch.stack([h[0] for h in o.hidden_states])
        ids, _ = steady(
            m,
            lambda: torch.randint(0, hi, (1, 23), generator=g),
            lambda i: greedy(m, i, 40)[1],
            5e-5,
            5e-3,
        )
        res["greedy.prompt"] = ids[0].int()
        res["greedy.tokens"] = greedy(m, ids, 40)[0][0, 23:].int()
        # two pictures in one prompt: RGB whose sides are no multiple of the tile, and RGBA of one tile; as PNG files too
        tile = cfg.vision_config.patch_size * cfg.vision_config.spatial_merge_size
        rgb = torch.randint(
            0, 256, (2 * tile - 3, 3 * tile - 2, 3), generator=g, dtype=torch.uint8
        ).numpy()
        rgba = torch.randint(0, 256, (tile, tile - 1, 4), generator=g, dtype=torch.uint8).numpy()
        Image.fromarray(rgb, "RGB").save(out / "image0.png")
        Image.fromarray(rgba, "RGBA").save(out / "image1.png")
        pix0, grid0 = tiles_of(rgb, tile)
        pix1, grid1 = tiles_of(on_checkerboard(rgba), tile)
        pix, grid = torch.from_numpy(np.concatenate([pix0, pix1])), torch.tensor([grid0, grid1])
        feats = m.model.get_image_features(pix, grid).pooler_output
        word = lambda n: torch.randint(0, hi, (n,), generator=g).tolist()
        draw = lambda: torch.tensor(
            [
                word(6)
                + [cfg.image_token_id] * len(pix0)
                + word(4)
                + [cfg.image_token_id] * len(pix1)
                + word(9)
            ]
        )
        ids, o = steady(m, draw, lambda i: m(i, pixel_values=pix, image_grid_thw=grid))
        res["image.tokens"] = ids[0].int()
        res["image.pixels"] = pix
        res["image.grid_thw"] = grid.int()
        res["image.features"] = torch.cat(feats)
        res["image.logits"] = o.logits[0]
    save_file({k: v.contiguous() for k, v in res.items()}, out / "expected.safetensors")
    (out / "case.json").write_text(json.dumps(meta))
    print(
        out,
        sum(p.numel() for p in m.parameters()),
        "params",
        "logit std",
        float(res["text17.logits"].std()) if "text17.logits" in res else "",
        "greedy unique",
        len(set(res["greedy.tokens"].tolist())),
    )


if __name__ == "__main__":
    main()

"""torch's `flex_attention` on the inputs of decode attention, where torch sees a GPU."""

import os
import tempfile
from typing import Any

import jax

CALLS, REPLAYS, REPEATS = 8, 10, 5


def attend(q, r, k, v, proj, sink, gate, start: int) -> Any:
    """`rel_attention_decode` of one sequence by torch: tensors of the same shapes, linear cache.

    Args:
      start: position of the first query; the keys are those up to the last.
    """
    import torch
    from torch.nn.attention.flex_attention import flex_attention

    extent = proj.shape[1]
    table = torch.einsum("bthr,re->hte", r.float(), proj.float())

    def bias(score, batch, head, query, key):
        distance = start + query - key
        near = table[head, query, distance.clamp(0, extent - 1)]
        score = torch.where(distance < extent, score + near, score)
        return torch.where(distance < 0, -float("inf"), score)

    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    out, lse = flex_attention(q, k, v, score_mod=bias, enable_gqa=True, return_lse=True)
    # The sink is one more key without a value.
    kept = torch.sigmoid(lse.transpose(1, 2) - sink)[..., None]
    return (out.transpose(1, 2) * kept * torch.sigmoid(gate.float())).to(q.dtype)


def timed(q: jax.Array, shared: dict, caches: tuple) -> tuple[jax.Array, list[float]]:
    """Returns the attention to the first cache, and seconds per call from a graph of calls.

    Raises:
      ImportError: torch is not installed or has no GPU.
    """
    # Compiled code is kept where torch cannot always write.
    for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
        os.environ[name] = os.environ.get(name) or tempfile.mkdtemp()
    import torch

    if not torch.cuda.is_available():
        raise ImportError("torch sees no GPU")

    def given(x):
        return torch.from_dlpack(x)

    start = int(shared["start"][0])
    context = start + q.shape[1]
    options = {name: given(shared[name]) for name in ("r", "proj", "sink", "gate")}
    query = given(q)
    pairs = [[given(x)[:, :context] for x in cache] for cache in caches]
    run = torch.compile(attend, dynamic=False)

    def call(i):
        k, v = pairs[i % len(pairs)]
        return run(query, k=k, v=v, start=start, **options)

    result = call(0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(CALLS):
            call(i)
    times = []
    for _ in range(REPEATS + 1):  # the first brings the clocks up
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(REPLAYS):
            graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3 / (REPLAYS * CALLS))
    return jax.dlpack.from_dlpack(result.contiguous()), times[1:]

"""Times the transformers implementation on the CPU, for `lockstep bench --peer`. Prints one JSON line per length.

usage: peer_cpu.py --tokens N [N ...] [--threads T] [--repeats R] [--forward-only]

The model has the sizes of the preset `mini`; weights are random, since only time is measured. Every repeat is a whole
pass over one document; the fastest counts, as on the other side.
"""
import argparse
import json
import os
import time
import warnings

warnings.filterwarnings("ignore")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
import torch
from transformers.models.glm5_next.configuration_glm5_next import Glm5NextTextConfig
from transformers.models.glm5_next.modeling_glm5_next import Glm5NextTextModel

SIZES = dict(
    vocab_size=512, hidden_size=256, intermediate_size=768, moe_intermediate_size=128, num_hidden_layers=4, num_attention_heads=4,
    num_key_value_heads=4, q_lora_rank=96, kv_lora_rank=64, qk_nope_head_dim=64, v_head_dim=64, index_n_heads=24, index_head_dim=64,
    index_topk=64, index_kpool=4, linear_num_heads=4, linear_head_dim=64, linear_conv_kernel_dim=4, n_routed_experts=8, num_experts_per_tok=2,
    layer_types=["linear_attention", "linear_attention", "linear_attention", "indexed_attention"],
    mlp_layer_types=["dense", "sparse", "sparse", "sparse"], pad_token_id=0)


class Peer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        config = Glm5NextTextConfig(**SIZES)  # the implementations it chooses by itself, which are its fastest on a CPU
        self.body = Glm5NextTextModel(config)
        self.head = torch.nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def forward(self, ids):
        return self.head(self.body(input_ids=ids, use_cache=False).last_hidden_state)


def seconds(repeats, work):
    best, spent = float("inf"), 0.0
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        took = time.perf_counter() - start
        best, spent = min(best, took), spent + took
        if spent > 60:  # minutes for the longest; one pass of them is enough
            break
    return best


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, nargs="+", required=True)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--forward-only", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    peer = Peer()
    for tokens in args.tokens:
        ids = torch.randint(1, SIZES["vocab_size"], (1, tokens))

        def forward():
            with torch.no_grad():
                peer(ids)

        def forward_backward():
            peer.zero_grad()
            torch.nn.functional.cross_entropy(peer(ids)[0, :-1], ids[0, 1:]).backward()

        with torch.no_grad():
            peer(ids[:, :128])
        row = {"tokens": tokens, "threads": args.threads, "forward_s": seconds(args.repeats, forward)}
        if not args.forward_only:
            row["forward_backward_s"] = seconds(args.repeats, forward_backward)
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()

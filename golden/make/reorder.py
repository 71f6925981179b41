"""The same model with its channels in other orders: the same function with other sums.

Orders are drawn for the hidden channels and, in every layer by itself, for heads, channels of heads, low ranks and MLP widths. A plan says
per tensor which dimensions move: name -> [(dimension, index)], with the channel index[j] at place j.
"""
import numpy as np
import torch

import seeded


def plan(config: dict, specs: list, run: int) -> dict:
    """Run 0 is the model as it is."""
    moves, c = {}, config
    if run == 0:
        return moves

    def order(name, size):
        return torch.from_numpy(np.argsort(seeded.uniform(run, name, size), kind="stable"))

    def blocks(outer, inner):  # rows of all heads, from the order of heads and that of the rows of each
        return torch.cat([h * len(inner) + inner for h in outer])

    def move(prefix, **names):  # leaf=(index of dimension 0 or None, index of dimension 1 or None)
        for leaf, indices in names.items():
            name = prefix + leaf.replace("__", ".")
            moves.setdefault(name, []).extend((dim, index) for dim, index in enumerate(indices) if index is not None)

    hidden = order("hidden-order", c["hidden_size"])
    for s in specs:
        if s.hidden:
            dim, copies = s.hidden
            moves[s.name] = [(dim, blocks(torch.arange(copies), hidden))]
    for i in range(c["num_hidden_layers"]):
        A, M = f"model.layers.{i}.self_attn.", f"model.layers.{i}.mlp."
        of = lambda what, size: order(f"{i}/{what}", size)
        if c["layer_types"][i] == "linear_attention":
            H, K = c["linear_num_heads"], c["linear_head_dim"]
            heads, values, forget, gate = of("heads", H), of("values", K), of("forget", K), of("gate", K)
            qk, v = blocks(heads, of("keys", K)), blocks(heads, values)
            for x, index in (("q", qk), ("k", qk), ("v", v)):
                move(A + x, _proj__weight=(index,), _conv1d__weight=(index,))
            move(A, b_proj__weight=(heads,), A_log=(heads,), dt_bias=(qk,), f_a_proj__weight=(forget,), f_b_proj__weight=(qk, forget),
                 g_a_proj__weight=(gate,), g_b_proj__weight=(v, gate), o_norm__weight=(values,), o_proj__weight=(None, v))
        else:
            heads, values, keys = of("heads", c["num_attention_heads"]), of("values", c["v_head_dim"]), of("keys", c["qk_nope_head_dim"])
            rq, r = of("query rank", c["q_lora_rank"]), of("latent", c["kv_lora_rank"])
            move(A, q_a_proj__weight=(rq,), q_a_layernorm__weight=(rq,), q_b_proj__weight=(blocks(heads, keys), rq),
                 kv_a_proj_with_mqa__weight=(r,), kv_a_layernorm__weight=(r,),
                 kv_b_proj__weight=(blocks(heads, torch.cat([keys, len(keys) + values])), r), o_proj__weight=(None, blocks(heads, values)))
            if c["indexer_types"][i] == "full":
                heads, k = of("index heads", c["index_n_heads"]), of("index keys", c["index_head_dim"])
                move(A + "indexer.", wq_b__weight=(blocks(heads, k), rq), wk__weight=(k,), k_norm__weight=(k,), k_norm__bias=(k,),
                     weights_proj__weight=(heads,), index_kpool_compress_ape=(None, k), index_kpool_compress_gate=(k,))
        mlps = {"": c["intermediate_size"]}
        if c["mlp_layer_types"][i] != "dense":
            mlps = {f"experts.{e}.": c["moe_intermediate_size"] for e in range(c["n_routed_experts"])}
            mlps["shared_experts."] = c["moe_intermediate_size"] * c["n_shared_experts"]
        for name, size in mlps.items():
            width = of("mlp " + name, size)
            move(M + name, gate_proj__weight=(width,), up_proj__weight=(width,), down_proj__weight=(None, width))
    return moves


def apply(moves: dict, tensors: dict, back: bool = False) -> dict:
    """Weights or gradients in the plan's order, or back from it."""
    out = {}
    for name, t in tensors.items():
        for dim, index in moves.get(name, ()):
            t = t.index_select(dim, torch.argsort(index) if back else index)
        out[name] = t
    return out


def activation_back(moves: dict, config: dict, name: str, value: torch.Tensor) -> torch.Tensor:
    """An activation [T, C] of the reordered model in the order of the model as it is."""
    if not moves or not value.is_floating_point():  # choices have no channels
        return value
    module, leaf = "model." + name, name.split(".")[-1]
    mixer = module.rpartition(".")[0]
    hidden = moves["model.norm.weight"][0][1]
    if leaf in ("input_layernorm", "post_attention_layernorm", "self_attn", "mlp", "experts", "shared_experts", "collapsed", "norm"):
        index = hidden
    elif name.removeprefix("layers.").isdigit():  # all streams
        index = torch.cat([hidden + j * len(hidden) for j in range(config["hc_mult"])])
    elif leaf in ("q_a_layernorm", "kv_a_layernorm"):
        index = moves[module + ".weight"][0][1]
    elif leaf == "forget_gate":
        index = moves[mixer + ".dt_bias"][0][1]
    elif leaf == "o_norm":
        index = moves[mixer + ".v_proj.weight"][-1][1]
    else:
        return value
    return value.index_select(1, torch.argsort(index))

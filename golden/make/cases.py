"""The golden cases: one small model and a set of documents each. Every one exists for the reason in its description."""
K, D = "linear_attention", "deepseek_sparse_attention"


def text_config(**changes) -> dict:
    """A released-style flat text config; the base is the tiny model."""
    c = dict(
        architectures=["Glm5NextForCausalLM"], model_type="glm5_next_text", vocab_size=131, hidden_size=96, intermediate_size=160,
        moe_intermediate_size=48, num_attention_heads=4, q_lora_rank=40, kv_lora_rank=24,
        qk_nope_head_dim=24, qk_rope_head_dim=0, v_head_dim=16, mla_use_nope=True, attention_bias=False, attention_dropout=0.0,
        index_n_heads=24, index_head_dim=16, index_topk=24, index_kpool=4, index_kpool_compress=True, index_kpool_always_select_tail=True,
        indexer_rope_interleave=True, linear_num_heads=4, linear_head_dim=16, linear_conv_kernel_dim=4, linear_lower_bound=-5.0,
        mhc=True, hc_mult=4, hc_eps=1e-6, hc_sinkhorn_iters=20, n_routed_experts=12, num_experts_per_tok=3, n_shared_experts=1, n_group=1,
        topk_group=1, norm_topk_prob=True, routed_scaling_factor=2.5, scoring_func="sigmoid", topk_method="noaux_tc",
        moe_router_dtype="float32", swiglu_limit=10.0, hidden_act="silu", rms_norm_eps=1e-5, initializer_range=0.02,
        tie_word_embeddings=False, pad_token_id=5, layer_types=[K, K, K, D], mlp_layer_types=None, indexer_types=None)
    c.update(changes)
    n = len(c["layer_types"])
    c["num_hidden_layers"] = n
    c["num_key_value_heads"] = c["num_attention_heads"]
    c["mlp_layer_types"] = c["mlp_layer_types"] or ["dense"] + ["sparse"] * (n - 1)
    c["indexer_types"] = c["indexer_types"] or ["full"] * n
    if c["linear_lower_bound"] is None:  # the only way a released config reaches the softplus gate
        c["linear_attn_config"] = dict(num_heads=c["linear_num_heads"], head_dim=c["linear_head_dim"],
                                       short_conv_kernel_size=c["linear_conv_kernel_dim"], gate_lower_bound=None, safe_gate=False)
    return c


def _case(description, documents, carry=False, **changes):
    return dict(description=description, documents=documents, carry=carry, config=text_config(**changes))


SMALL = dict(vocab_size=67, n_routed_experts=6, num_experts_per_tok=2, moe_intermediate_size=32, intermediate_size=96)

CASES = {
    "tiny": _case("the tiny model of every test: 3 KDA layers and 1 sparse one, 12 experts top-3", [75, 1, 7, 130]),
    "sparse": _case("sparse selection almost everywhere: 2 pools of 4 out of up to 40", [160, 29], layer_types=[K, D, D], index_topk=8, **SMALL),
    "packing": _case("odd packing: one-token documents, lengths around the chunk, the pools and the first sparse length",
                     [1, 2, 3, 4, 5, 24, 27, 28, 29, 1, 63, 64, 65], layer_types=[K, D], **SMALL),
    "kpool1": _case("pools of one key, no tail", [90, 1, 8], layer_types=[K, D], index_kpool=1, index_topk=8, **SMALL),
    "kpool16": _case("pools of 16 keys, tails of up to 15", [150, 15, 16, 33], layer_types=[K, D], index_kpool=16, index_topk=32, **SMALL),
    "clamps": _case("SwiGLU limit small enough that both clamps act in dense, routed and shared MLPs", [64, 40],
                    layer_types=[K, D], swiglu_limit=0.5, **SMALL),
    "shared": _case("shared indexer layers next to their full layer", [70, 45], layer_types=[K, D, D, K, D, D],
                    indexer_types=["full", "full", "shared", "full", "full", "shared"], **SMALL),
    "shared_carry": _case("shared indexer layers whose selection is carried through KDA layers (reference patched to carry it)", [70, 45],
                          carry=True, layer_types=[K, D, K, D, D], indexer_types=["full", "full", "full", "shared", "shared"], **SMALL),
    "groups": _case("expert groups: 4 groups of 4, 2 groups allowed, top-4", [80, 33], layer_types=[K, D],
                    vocab_size=67, n_routed_experts=16, num_experts_per_tok=4, n_group=4, topk_group=2, moe_intermediate_size=32, intermediate_size=96),
    "softplus": _case("unbounded softplus forget gate", [100, 65, 3], layer_types=[K, K, D], linear_lower_bound=None, **SMALL),
    "streams1_conv5": _case("one residual stream, convolution of width 5", [66, 4], layer_types=[K, D], hc_mult=1, linear_conv_kernel_dim=5, **SMALL),
    "streams2_conv2": _case("two residual streams, convolution of width 2", [66, 4], layer_types=[K, D], hc_mult=2, linear_conv_kernel_dim=2, **SMALL),
    "streams3_conv3": _case("three residual streams, convolution of width 3, 7 Sinkhorn rounds", [66, 4], layer_types=[K, D], hc_mult=3,
                            linear_conv_kernel_dim=3, hc_sinkhorn_iters=7, **SMALL),
    "real_heads": _case("the released model's head sizes (KDA 128, latent 512, nope and value 256, indexer 128) on a narrow model", [95, 6],
                        layer_types=[K, D], hidden_size=128, num_attention_heads=2, q_lora_rank=96, kv_lora_rank=512, qk_nope_head_dim=256,
                        v_head_dim=256, index_head_dim=128, linear_num_heads=2, linear_head_dim=128, **SMALL),
    "raw_router": _case("norm_topk_prob false, two shared experts, scaling 1", [72, 30], layer_types=[K, D], norm_topk_prob=False,
                        n_shared_experts=2, routed_scaling_factor=1.0, **SMALL),
    "long": _case("one long document", [700], layer_types=[K, D], index_topk=32, **{**SMALL, "vocab_size": 48}),
    "one_kda": _case("a single KDA layer with a dense MLP", [131, 2], layer_types=[K], mlp_layer_types=["dense"], **SMALL),
    "one_dsa": _case("a single sparse-attention layer with experts", [131, 2], layer_types=[D], mlp_layer_types=["sparse"], **SMALL),
    "deep": _case("8 layers: errors that grow with depth", [70, 26], layer_types=[K, K, K, D] * 2, **SMALL),
    # Weights and configuration are those of the checkpoint that make_hf_checkpoint.py lets transformers write.
    "hf-tiny": dict(description="a composite checkpoint written by transformers' save_pretrained, in both of its forms",
                    documents=[50, 1, 29, 7, 64], carry=False, checkpoint="released"),
}

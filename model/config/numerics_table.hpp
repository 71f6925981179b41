// The table behind model/config/numerics.hpp: one row per known difference. `plain` is the value of
// the float64 and float32 policies; hf, trainer and engine are the values that reproduce each
// program.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string_view>

namespace lockstep::model {

enum class Switch : uint8_t {
  kHcFn,                ///< D01
  kHcBaseScale,         ///< D02
  kKdaDecayParams,      ///< D03
  kHcNormOrder,         ///< D04
  kHcProjection,        ///< D05
  kHcSplitK,            ///< D06
  kHcStreamInput,       ///< D07
  kHcMixCoefficients,   ///< D08
  kHcMixRoundings,      ///< D09
  kHcMixOrder,          ///< D10
  kNormRoundings,       ///< D11
  kNormStatistic,       ///< D12
  kNormWeights,         ///< D13
  kConvWeight,          ///< D14
  kConvWeightSync,      ///< D15
  kSiluForm,            ///< D16
  kBeta,                ///< D17
  kGateSigmoid,         ///< D18
  kL2NormResult,        ///< D19
  kL2NormForm,          ///< D20
  kKdaAlgorithm,        ///< D21
  kKdaScoreStore,       ///< D22
  kKdaInverse,          ///< D23
  kKdaOperands,         ///< D24
  kKdaExp,              ///< D25
  kKdaState,            ///< D26
  kStateCache,          ///< D27
  kChunkOrigin,         ///< D28
  kGatedNormEps,        ///< D29
  kIndexerScoring,      ///< D30
  kHadamard,            ///< D31
  kFp8Scale,            ///< D32
  kPoolSoftmax,         ///< D33
  kIndexerHeadWeights,  ///< D34
  kIndexerLayerNorm,    ///< D35
  kOwnPool,             ///< D36
  kPoolPhase,           ///< D37
  kTopkTies,            ///< D38
  kSelectionOrder,      ///< D39
  kShortShortcut,       ///< D40
  kSharedSchedule,      ///< D41
  kMlaForm,             ///< D42
  kMlaScores,           ///< D43
  kMlaProbabilities,    ///< D44
  kLatentCache,         ///< D45
  kDkvAccumulation,     ///< D46
  kRouterLogits,        ///< D47
  kRouterWeight,        ///< D48
  kRouterBias,          ///< D49
  kRouterEps,           ///< D50
  kRouterTies,          ///< D51
  kGroupLimit,          ///< D52
  kSwigluRoundings,     ///< D53
  kExpertWeighting,     ///< D54
  kExpertSum,           ///< D55
  kSharedExpertAdd,     ///< D56
  kExpertGemm,          ///< D57
  kFinalMean,           ///< D58
  kHeadOutput,          ///< D59
  kTemperature,         ///< D60
  kTpPartialSums,       ///< D61
  kCpKdaState,          ///< D62
  kGemmRows,            ///< D63
  kMergedConv,          ///< D64
  kDerivedWeights,      ///< D65
  kWireDtype,           ///< D66
  kPrefillPool,         ///< D67
  kExpertReplay,        ///< D68
  kGradientStorage,     ///< D69
  kExtraModules,        ///< D70
  kExpBase,             ///< D71
  kConfigDefaults,      ///< D72
};

inline constexpr size_t kNumSwitches = 72;

struct SwitchInfo {
  std::string_view id;                     ///< "D01", stable
  std::string_view name;                   ///< key in scenarios
  std::string_view site;                   ///< what is rounded or ordered
  std::array<std::string_view, 4> values;  ///< allowed values, unused entries empty
  uint8_t plain, hf, trainer, engine;      ///< index into values
  std::string_view doc;

  [[nodiscard]] constexpr size_t num_values() const {
    size_t n = 0;
    while (n < values.size() && !values[n].empty()) ++n;
    return n;
  }
};

// One row, four lines.
// clang-format off
inline constexpr std::array<SwitchInfo, kNumSwitches> kSwitches = {{
    {"D01", "hc_fn", "mHC projection matrix fn as used",
     {"fp32", "bf16"},
     0, 1, 1, 0,
     "Rounding of fn before use."},
    {"D02", "hc_base_scale", "mHC base and scale as used",
     {"fp32", "bf16"},
     0, 0, 1, 0,
     "Rounding of base and scale before use."},
    {"D03", "kda_decay_params", "KDA A_log and dt_bias as used",
     {"fp32", "bf16"},
     0, 0, 1, 0,
     "Rounding of the decay parameters before use."},
    {"D04", "hc_norm_order", "mHC norm order",
     {"norm-then-project", "project-then-norm"},
     0, 0, 0, 1,
     "Whether the streams are normalised before the projection or the 24 products after it."},
    {"D05", "hc_projection", "mHC projection arithmetic",
     {"fp32", "tf32", "bf16x3", "tf32-above-32"},
     0, 0, 0, 3,
     "Operand precision of the 24 dot products; tf32-above-32 uses tf32 for calls of more than 32 tokens."},
    {"D06", "hc_split_k", "mHC projection split-K",
     {"one", "fixed", "by-tokens"},
     0, 0, 0, 2,
     "How the sum over n*D is split into partial sums."},
    {"D07", "hc_stream_input", "streams feeding projection and statistic",
     {"rounded", "unrounded", "unrounded-upto-32"},
     0, 0, 0, 2,
     "Whether the mixed streams enter the next boundary before or after their store rounding."},
    {"D08", "hc_mix_coefficients", "post and comb at the mix",
     {"bf16", "fp32"},
     1, 0, 0, 1,
     "Rounding of the mixing coefficients."},
    {"D09", "hc_mix_roundings", "mix roundings",
     {"3", "1"},
     1, 0, 1, 1,
     "bf16(bf16(post*y) + bf16(comb^T X)) or one rounding at the end. The trainer has both kernels; the fused one is taken."},
    {"D10", "hc_mix_order", "mix summation order",
     {"library", "post-first"},
     0, 0, 1, 1,
     "library: streams summed first, then the post term; post-first: post term, then streams 0..n-1. The trainer's fused kernel is taken to sum like the engine's."},
    {"D11", "norm_roundings", "RMSNorm roundings",
     {"2", "1"},
     1, 0, 1, 1,
     "bf16(weight * bf16(xhat)) or one rounding."},
    {"D12", "norm_statistic", "RMSNorm statistic after mHC",
     {"rounded", "unrounded"},
     0, 0, 0, 1,
     "Sum of squares from bf16(u) or from the unrounded u."},
    {"D13", "norm_weights", "norm weights",
     {"load", "bf16"},
     0, 0, 1, 1,
     "Load dtype or rounded to bf16."},
    {"D14", "conv_weight", "short convolution weight",
     {"fp32", "bf16"},
     0, 0, 1, 0,
     "Rounding of the convolution weight before use."},
    {"D15", "conv_weight_sync", "convolution weight after a weight sync",
     {"fp32", "bf16-wire"},
     0, 0, 0, 1,
     "dtype in which convolution weights travel to the engine."},
    {"D16", "silu_form", "silu form",
     {"x*sigmoid(x)", "x/(1+exp(-x))"},
     0, 0, 0, 1,
     "How silu is evaluated."},
    {"D17", "beta", "KDA beta",
     {"bf16", "fp32", "tanh"},
     1, 0, 1, 2,
     "sigmoid rounded to bf16, in fp32, or from a tanh approximation (FlashKDA prefill; Triton and decode use fp32)."},
    {"D18", "gate_sigmoid", "KDA gate sigmoid",
     {"exact", "lb/(1+exp)", "tanh"},
     0, 0, 0, 2,
     "Form of lb*sigmoid(.) (FlashKDA prefill uses tanh; Triton and decode the second)."},
    {"D19", "l2norm_result", "q/k l2norm result",
     {"fp32", "bf16", "bf16-prefill"},
     0, 0, 1, 2,
     "Rounding of normalised q and k; bf16-prefill keeps fp32 in decode."},
    {"D20", "l2norm_form", "q/k l2norm arithmetic",
     {"divide", "inverse-sqrt", "rsqrt", "rsqrt-prefill"},
     0, 0, 1, 3,
     "x/sqrt(s), x*(1/sqrt(s)), x*rsqrt(s); rsqrt-prefill divides in decode."},
    {"D21", "kda_algorithm", "KDA algorithm",
     {"recurrent", "chunk64", "chunk16"},
     1, 1, 1, 2,
     "Evaluation order of the recurrence (decode is recurrent except in invariant policies)."},
    {"D22", "kda_score_store", "KDA M = q k product store",
     {"fp32", "bf16"},
     0, 0, 1, 1,
     "Rounding of the intra-chunk score matrix."},
    {"D23", "kda_inverse", "KDA inverse (I+L)^-1",
     {"fp32", "bf16", "fp16"},
     0, 0, 1, 2,
     "fp32; fp32 then stored bf16; fp16 Neumann product then bf16."},
    {"D24", "kda_operands", "KDA operands Kt, W, U, Ke, N, Qt",
     {"fp32", "bf16", "bf16-prefill"},
     0, 0, 1, 2,
     "Rounding of matrix operands; bf16-prefill keeps fp32 in decode."},
    {"D25", "kda_exp", "KDA exp factors",
     {"fp32", "bf16"},
     0, 0, 0, 1,
     "Rounding of exp(b), exp(-b), exp(b_C)."},
    {"D26", "kda_state", "KDA carried state",
     {"fp32", "bf16"},
     0, 0, 0, 1,
     "Rounding of the state between chunks."},
    {"D27", "state_cache", "KDA state cache dtype",
     {"fp32", "bf16"},
     0, 0, 0, 0,
     "dtype in which the engine keeps the state between calls."},
    {"D28", "chunk_origin", "chunk grid origin",
     {"document", "call"},
     0, 1, 0, 1,
     "Where 64-token chunks are counted from: document start or the start of the (prefill) call."},
    {"D29", "gated_norm_eps", "gated norm epsilon",
     {"config", "1e-5"},
     0, 0, 0, 1,
     "rms_norm_eps or a constant."},
    {"D30", "indexer_scoring", "indexer scoring",
     {"unquantised", "bf16", "fp8"},
     0, 0, 2, 2,
     "Operand precision of the q.k products: accumulation dtype, bf16, or e4m3 with one scale per vector."},
    {"D31", "hadamard", "Hadamard rotation before fp8",
     {"off", "on"},
     0, 0, 1, 1,
     "Walsh-Hadamard transform of q and pool keys."},
    {"D32", "fp8_scale", "fp8 scale of indexer vectors",
     {"exact", "pow2"},
     1, 1, 1, 1,
     "amax/448 or the next power of two; amax floor 1e-4 (the trainer's floor was not verified, the engine's is taken)."},
    {"D33", "pool_softmax", "pool softmax weights and sum",
     {"bf16-weights", "one-rounding"},
     1, 0, 1, 1,
     "bf16 weights and products with the sum rounded, or fp32 with one rounding."},
    {"D34", "indexer_head_weights", "indexer head weights",
     {"bf16", "fp32"},
     1, 0, 1, 1,
     "weights_proj as a bf16 or an fp32 product (not verified for the trainer; the engine's is taken)."},
    {"D35", "indexer_layernorm", "indexer LayerNorm parameters",
     {"load", "bf16", "fp32"},
     0, 0, 1, 2,
     "dtype of the parameters; statistics are fp32."},
    {"D36", "own_pool", "own just-completed pool",
     {"compete", "always"},
     0, 0, 0, 0,
     "Whether a query's pool that its own token completes must win on score."},
    {"D37", "pool_phase", "pool phase in a packed row",
     {"document", "row"},
     0, 0, 0, 0,
     "Where pools are counted from. The reference counts per row, which is the same for one document per row, the only form in which it is run here."},
    {"D38", "topk_ties", "indexer top-k ties",
     {"low-index", "library"},
     0, 0, 0, 0,
     "Lower pool index wins here; libraries promise no order."},
    {"D39", "selection_order", "order of selected keys in attention",
     {"ascending", "by-score", "dense"},
     0, 2, 1, 1,
     "Summation order over selected keys; dense is index order over the whole row."},
    {"D40", "short_shortcut", "short-sequence shortcut",
     {"off", "per-row", "per-batch"},
     1, 0, 1, 2,
     "Skip scoring where every token is selected anyway (not verified for the trainer)."},
    {"D41", "shared_schedule", "shared-indexer schedule",
     {"carry", "next-layer", "ignored"},
     0, 1, 0, 2,
     "Whether a shared layer reuses the last full layer's selection through KDA layers."},
    {"D42", "mla_form", "MLA form",
     {"expanded", "absorbed"},
     1, 0, 1, 1,
     "Keys and values expanded per head, or queries projected into the latent."},
    {"D43", "mla_scores", "MLA scores",
     {"bf16", "fp32"},
     1, 0, 1, 1,
     "Score product and its scaling rounded to bf16, or kept."},
    {"D44", "mla_probabilities", "MLA probabilities for P V",
     {"normalised", "unnormalised", "fp32"},
     2, 0, 1, 1,
     "bf16 of the normalised or of the unnormalised probabilities, or fp32."},
    {"D45", "latent_cache", "latent cache",
     {"bf16", "fp8"},
     0, 0, 0, 0,
     "Engine's latent cache (fp8 is the default of another GPU generation)."},
    {"D46", "dkv_accumulation", "dKV accumulation",
     {"fixed", "atomics"},
     0, 0, 1, 0,
     "Order in which gradients of shared keys are added."},
    {"D47", "router_logits", "router logits",
     {"fp32", "bf16-operands", "bf16"},
     0, 0, 0, 1,
     "fp32 product; bf16 operands with fp32 output; bf16 output (engine without moe_router_dtype)."},
    {"D48", "router_weight", "router weight",
     {"fp32", "bf16"},
     0, 0, 0, 1,
     "Rounding of the router matrix."},
    {"D49", "router_bias", "router correction bias",
     {"fp32", "bf16"},
     0, 0, 0, 0,
     "Rounding of the correction bias."},
    {"D50", "router_eps", "routing weight normalisation epsilon",
     {"1e-20", "0"},
     0, 0, 0, 1,
     "Epsilon in w / (sum w + eps)."},
    {"D51", "router_ties", "router ties",
     {"low-index", "library"},
     0, 0, 0, 0,
     "Lower expert id wins here; libraries promise no order."},
    {"D52", "group_limit", "expert group limit",
     {"on", "ignored"},
     0, 0, 1, 0,
     "Whether n_group and topk_group are honoured."},
    {"D53", "swiglu_roundings", "SwiGLU roundings",
     {"2", "3", "1"},
     2, 0, 2, 2,
     "After silu and product; three eager roundings; one at the end (the trainer's compiled form is taken)."},
    {"D54", "expert_weighting", "expert weight product",
     {"per-expert", "at-sum"},
     0, 0, 0, 1,
     "act(fp32(down) * w) per expert, or kept in fp32 until the sum."},
    {"D55", "expert_sum", "expert sum",
     {"act-ascending", "unordered", "fp32"},
     0, 0, 0, 2,
     "Rounded additions in ascending expert id, or one fp32 sum over slots in ascending id (unordered is a GPU property and evaluated as ascending on CPU)."},
    {"D56", "shared_expert_add", "shared expert added",
     {"after", "before-reduce"},
     0, 0, 0, 1,
     "After the routed sum, or before the tensor-parallel reduction."},
    {"D57", "expert_gemm", "expert GEMM dtype",
     {"bf16", "fp8"},
     0, 0, 0, 0,
     "bf16 operands or e4m3 with 128-blocks (fp8 release)."},
    {"D58", "final_mean", "final stream mean",
     {"fp32", "sequential"},
     0, 0, 0, 0,
     "fp32 mean with one rounding, or sequential rounded additions."},
    {"D59", "head_output", "lm_head output",
     {"bf16", "fp32"},
     1, 0, 0, 0,
     "Logits rounded to bf16 or left in fp32 (the engine has an option for fp32)."},
    {"D60", "temperature", "log-probability temperature",
     {"multiply", "divide", "raw"},
     0, 0, 0, 1,
     "x*(1/T), x/T, or untouched logits."},
    {"D61", "tp_partial_sums", "tensor-parallel partial sums",
     {"one", "tp"},
     0, 0, 0, 1,
     "Number of rounded partial sums in row-parallel layers."},
    {"D62", "cp_kda_state", "context-parallel KDA state",
     {"handover", "affine-fp32", "affine-tf32x3"},
     1, 0, 2, 0,
     "State handed from rank to rank, or composed from affine maps."},
    {"D63", "gemm_rows", "GEMM row invariance",
     {"library", "fixed-tiles"},
     0, 0, 0, 0,
     "Whether a row's bits may depend on how many rows are computed with it."},
    {"D64", "merged_conv", "merged convolution copy",
     {"live", "stale"},
     0, 0, 0, 1,
     "Whether the engine's merged copy follows weight updates (stale is a bug that was shipped)."},
    {"D65", "derived_weights", "derived weights after a sync",
     {"refreshed", "stale"},
     0, 0, 0, 1,
     "Head-weight matrix and absorbed projections."},
    {"D66", "wire_dtype", "wire dtype of hc, A_log, dt_bias, bias",
     {"fp32", "bf16"},
     0, 0, 0, 0,
     "dtype in which fp32-declared tensors travel."},
    {"D67", "prefill_pool", "pool straddling a prefill chunk",
     {"ring", "dropped"},
     0, 0, 0, 1,
     "Whether missing rows come from the tail ring."},
    {"D68", "expert_replay", "expert choice in training",
     {"own", "replay"},
     0, 0, 0, 0,
     "Own top-k, or the experts the engine recorded."},
    {"D69", "gradient_storage", "gradient storage",
     {"fp32", "bf16"},
     0, 0, 0, 0,
     "dtype of reduced gradients before the optimizer (bf16 under full offload)."},
    {"D70", "extra_modules", "vision tower and MTP layer",
     {"dropped", "present"},
     0, 0, 0, 0,
     "The engine keeps them; neither changes text logits."},
    {"D71", "exp_base", "exponential base",
     {"natural", "base2"},
     0, 0, 1, 1,
     "exp or exp2 with log2(e) folded into the gate."},
    {"D72", "config_defaults", "defaults of missing architecture keys",
     {"refuse", "hf", "trainer"},
     0, 1, 2, 1,
     "What a missing layer_types, swiglu_limit or index_kpool means."},
}};
// clang-format on

}  // namespace lockstep::model

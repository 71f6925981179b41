// The operators of the model, for people who look for one.
#pragma once

#include <string_view>

namespace lockstep::harness {

struct OperatorInfo {
  std::string_view name, header, doc;
};

inline constexpr OperatorInfo kOperators[] = {
    {"kda", "model/ops/kda.hpp", "gated delta rule: chunked forward and backward, decay gates"},
    {"conv", "model/ops/conv.hpp", "causal short convolution with SiLU over packed documents"},
    {"norm", "model/ops/norm.hpp", "RMS norm, gated RMS norm, q/k L2 norm"},
    {"linear", "model/ops/linear.hpp", "matrix product with the policy's roundings"},
    {"sparse_mla", "model/ops/sparse_mla.hpp", "latent attention over selected keys"},
    {"indexer", "model/ops/indexer.hpp", "pooled keys, scores, selection of keys"},
    {"hyper_connection",
     "model/ops/hyper_connection.hpp",
     "residual streams: coefficients, Sinkhorn, collapse and mix"},
    {"moe", "model/ops/moe.hpp", "router, experts, clamped SwiGLU"},
    {"head", "model/ops/head.hpp", "logits, log-probabilities and their gradient"},
};

}  // namespace lockstep::harness

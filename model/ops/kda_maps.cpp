#include "model/ops/kda_maps.hpp"

#include <torch/csrc/autograd/autograd.h>

namespace lockstep::model {
namespace {

/// Segment `s` alone, without gradients and without an entry state.
KdaInput segment_of(const KdaInput& in, size_t s) {
  const int64_t begin = in.cu[s], length = in.cu[s + 1] - begin;
  const auto rows = [&](const Tensor& t) { return t.detach().narrow(0, begin, length); };
  KdaInput part;
  part.q = rows(in.q);
  part.k = rows(in.k);
  part.v = rows(in.v);
  part.f = rows(in.f);
  part.beta_logit = rows(in.beta_logit);
  part.a_log = in.a_log.detach();
  part.dt_bias = in.dt_bias.detach();
  part.cu = {0, length};
  part.lower_bound = in.lower_bound;
  return part;
}

}  // namespace

std::pair<Tensor, Tensor> kda_last_segment_map(const KdaInput& in, const Numerics& num) {
  const at::NoGradGuard no_grad;
  KdaInput part = segment_of(in, in.cu.size() - 2);
  const Tensor bias = kda_chunk(part, num).final_state[0];
  const int64_t heads = in.q.size(1), dim = in.q.size(2);
  part.v = at::zeros_like(part.v);
  part.initial_state = at::eye(dim, bias.options()).expand({1, heads, dim, dim}).contiguous();
  return {kda_chunk(part, num).final_state[0], bias};
}

Tensor kda_entry_gradient(const KdaInput& in, const Tensor& dout, const Numerics& num) {
  const at::AutoGradMode enable(true);
  KdaInput part = segment_of(in, 0);
  const int64_t heads = in.q.size(1), dim = in.q.size(2);
  part.initial_state = in.initial_state.defined()
                           ? in.initial_state.detach().narrow(0, 0, 1).clone()
                           : at::zeros({1, heads, dim, dim}, at::TensorOptions(num.acc()));
  part.initial_state.requires_grad_(true);
  const Tensor o = kda_chunk(part, num).o;
  return torch::autograd::grad(
      {o}, {part.initial_state}, {dout.narrow(0, 0, part.cu[1]).contiguous()})[0][0];
}

}  // namespace lockstep::model

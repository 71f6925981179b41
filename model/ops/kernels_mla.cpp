#include <algorithm>
#include <cmath>

#include "model/base/stash.hpp"
#include "model/ops/kernels_support.hpp"
#include "model/ops/sparse_mla.hpp"
#include "model/ops/sparse_mla_cuda.hpp"

namespace lockstep::model {
namespace {

using namespace kernels;  // NOLINT(google-build-using-namespace)
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

constexpr int64_t kRank = 512, kMaxHeads = 64;
/// Entries of the selection whose shares of the latent's gradient exist at a time: 4.4 GB.
constexpr int64_t kEntriesAtOnce = int64_t{1} << 22;

/// a [T, H, R] of absorbed queries [T, H, R] over selected rows of the latent [S, R].
class AttendKernel : public torch::autograd::Function<AttendKernel> {
 public:
  static Tensor forward(AutogradContext* ctx,
                        const Tensor& q_in,
                        const Tensor& latent_in,
                        const Tensor& selection,
                        double scale) {
    const Tensor q = dense(q_in), latent = dense(latent_in);
    Tensor a = at::empty(q.sizes(), q.options());
    const Tensor lse = at::empty({q.size(0), q.size(1)}, q.options().dtype(at::kFloat));
    SparseMlaForwardArgs args;
    args.tokens = q.size(0);
    args.keys = latent.size(0);
    args.width = selection.size(1);
    args.heads = static_cast<int>(q.size(1));
    args.q_THR = half_in(q);
    args.latent_SR = half_in(latent);
    args.selection_TW = selection.const_data_ptr<int32_t>();
    args.scale = static_cast<float>(scale);
    args.a_THR = half_out(a);
    args.lse_TH = float_out(lse);
    const size_t bytes = sparse_mla_forward_workspace_bytes(args.tokens);
    const Tensor scratch = workspace(bytes, q);
    must_run(sparse_mla_forward(args, scratch.mutable_data_ptr(), bytes, stream_of(q)),
             "sparse_mla_forward");
    ctx->save_for_backward({q_in, latent_in, selection, a, lse});
    ctx->saved_data["scale"] = scale;
    return a;
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const variable_list saved = ctx->get_saved_variables();
    const Tensor q = dense(saved[0]), latent = dense(saved[1]), &selection = saved[2],
                 a = dense(saved[3]), &lse = saved[4], da = dense(grads[0]);
    const Tensor dq = at::empty(q.sizes(), q.options()),
                 dlatent = at::empty(latent.sizes(), lse.options());
    SparseMlaBackwardArgs args;
    args.tokens = q.size(0);
    args.keys = latent.size(0);
    args.width = selection.size(1);
    args.heads = static_cast<int>(q.size(1));
    args.tokens_at_once =
        std::clamp<int64_t>(kEntriesAtOnce / std::max<int64_t>(1, args.width), 1, args.tokens);
    args.q_THR = half_in(q);
    args.latent_SR = half_in(latent);
    args.selection_TW = selection.const_data_ptr<int32_t>();
    args.scale = static_cast<float>(ctx->saved_data["scale"].toDouble());
    args.a_THR = half_in(a);
    args.lse_TH = float_in(lse);
    args.da_THR = half_in(da);
    args.dq_THR = half_out(dq);
    args.dlatent_SR = float_out(dlatent);
    const size_t bytes = sparse_mla_backward_workspace_bytes(args);
    const Tensor scratch = workspace(bytes, q);
    must_run(sparse_mla_backward(args, scratch.mutable_data_ptr(), bytes, stream_of(q)),
             "sparse_mla_backward");
    return {dq, dlatent.to(latent.scalar_type()), Tensor(), Tensor()};
  }
};

/// [T, H, A] times [H, A, B] as products of bf16 operands, one rounding: [T, H, B].
Tensor per_head(const Tensor& x, const Tensor& w) {
  return at::matmul(x.transpose(0, 1), w).transpose(0, 1).contiguous();
}

}  // namespace

std::optional<Tensor> sparse_mla_kernel(const Tensor& q,
                                        const Tensor& latent,
                                        const Tensor& kv_b,
                                        const Tensor& selection,
                                        int64_t d_v,
                                        const Numerics& num) {
  const int64_t heads = q.size(1), d_n = q.size(2);
  if (!takes(q) || kv_b.scalar_type() != at::kBFloat16 || latent.size(1) != kRank ||
      heads > kMaxHeads || selection.size(1) == 0 || !num.is<Switch::kMlaForm>("absorbed") ||
      !num.is<Switch::kMlaScores>("fp32") || !num.is<Switch::kMlaProbabilities>("unnormalised"))
    return std::nullopt;
  const Tensor w = kv_b.view({heads, d_n + d_v, kRank});
  const Tensor a = AttendKernel::apply(per_head(q, w.slice(1, 0, d_n)),
                                       latent,
                                       selection.contiguous(),
                                       std::pow(static_cast<double>(d_n), -0.5));
  return per_head(a, w.slice(1, d_n).transpose(1, 2));
}

}  // namespace lockstep::model

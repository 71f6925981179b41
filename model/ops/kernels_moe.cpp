#include "model/base/stash.hpp"
#include "model/ops/kernels_support.hpp"
#include "model/ops/moe_checks.hpp"
#include "model/ops/moe_cuda.hpp"

namespace lockstep::model {
namespace {

using namespace kernels;  // NOLINT(google-build-using-namespace)
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

constexpr int64_t kMaxSlots = 32, kMaxExperts = 512;

bool takes_rows(const Tensor& x, int64_t slots) {
  return takes(x) && x.size(1) % 8 == 0 && slots >= 1 && slots <= kMaxSlots;
}

/// Which rows belong to which token.
struct Places {
  Tensor slot, place;
  int64_t tokens, slots;

  Places(const ExpertOrder& order, int64_t tokens_in, int64_t slots_in)
      : slot(order.slot),
        place(ascending_places(order.slot, tokens_in, slots_in)),
        tokens(tokens_in),
        slots(slots_in) {}
  [[nodiscard]] MoeRowsArgs args(int64_t width) const {
    return {tokens, slots, width, index_in(slot), index_in(place)};
  }
};

class GatherKernel : public torch::autograd::Function<GatherKernel> {
 public:
  static Tensor forward(AutogradContext* ctx, const Tensor& x_in, const Places& places) {
    const Tensor x = dense(x_in);
    Tensor rows = at::empty({places.slot.size(0), x.size(1)}, x.options());
    must_run(moe_gather(places.args(x.size(1)), half_in(x), half_out(rows), stream_of(x)),
             "moe_gather");
    stash(ctx, places);
    return rows;
  }
  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const Places& places = stashed<Places>(ctx);
    const Tensor drows = dense(grads[0]);
    const Tensor dx = at::empty({places.tokens, drows.size(1)}, drows.options());
    must_run(moe_gather_backward(
                 places.args(drows.size(1)), half_in(drows), half_out(dx), stream_of(drows)),
             "moe_gather_backward");
    return {dx, Tensor()};
  }
};

struct CombineInfo {
  Places places;
  MoeCombineRounding rounding;
};

class CombineKernel : public torch::autograd::Function<CombineKernel> {
 public:
  static Tensor forward(AutogradContext* ctx,
                        const Tensor& rows_in,
                        const Tensor& weights_in,
                        const CombineInfo& info) {
    const Tensor rows = dense(rows_in), weights = dense(weights_in);
    Tensor y = at::empty({info.places.tokens, rows.size(1)}, rows.options());
    must_run(moe_combine(info.places.args(rows.size(1)),
                         half_in(rows),
                         float_in(weights),
                         info.rounding,
                         half_out(y),
                         stream_of(rows)),
             "moe_combine");
    ctx->save_for_backward({rows_in, weights_in});
    stash(ctx, info);
    return y;
  }
  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const variable_list saved = ctx->get_saved_variables();
    const CombineInfo& info = stashed<CombineInfo>(ctx);
    const Tensor rows = dense(saved[0]), weights = dense(saved[1]), dy = dense(grads[0]);
    const Tensor drows = at::empty(rows.sizes(), rows.options()),
                 dweights = at::empty(weights.sizes(), weights.options());
    must_run(moe_combine_backward(info.places.args(rows.size(1)),
                                  half_in(rows),
                                  float_in(weights),
                                  half_in(dy),
                                  half_out(drows),
                                  float_out(dweights),
                                  stream_of(rows)),
             "moe_combine_backward");
    return {drows, dweights, Tensor()};
  }
};

struct ExpertsInfo {
  Tensor offsets;
  SwigluForm swiglu;
  bool keep;  ///< someone will ask for gradients

  [[nodiscard]] MoeShape shape(const Tensor& rows, const Tensor& down) const {
    return {rows.size(0),
            down.size(0),
            rows.size(1),
            down.size(2),
            index_in(offsets),
            static_cast<float>(swiglu.limit),
            swiglu.roundings};
  }
};

class ExpertsKernel : public torch::autograd::Function<ExpertsKernel> {
 public:
  static Tensor forward(AutogradContext* ctx,
                        const Tensor& rows_in,
                        const Tensor& gate_up_in,
                        const Tensor& down_in,
                        const ExpertsInfo& info) {
    const Tensor rows = dense(rows_in), gate_up = dense(gate_up_in), down = dense(down_in);
    Tensor out = at::empty(rows.sizes(), rows.options()), products;
    if (info.keep) products = at::empty({rows.size(0), gate_up.size(1)}, rows.options());
    const MoeShape shape = info.shape(rows, down);
    const size_t bytes = moe_experts_forward_workspace_bytes(shape);
    const Tensor scratch = workspace(bytes, rows);
    must_run(moe_experts_forward({shape,
                                  half_in(rows),
                                  half_in(gate_up),
                                  half_in(down),
                                  half_out(products),
                                  half_out(out)},
                                 scratch.mutable_data_ptr(),
                                 bytes,
                                 stream_of(rows)),
             "moe_experts_forward");
    ctx->save_for_backward({rows_in, gate_up_in, down_in, products});
    stash(ctx, info);
    return out;
  }
  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const variable_list saved = ctx->get_saved_variables();
    const Tensor rows = dense(saved[0]), gate_up = dense(saved[1]), down = dense(saved[2]),
                 dout = dense(grads[0]);
    const auto like = [](bool wanted, const Tensor& t) {
      return wanted ? at::empty(t.sizes(), t.options()) : Tensor();
    };
    const Tensor dx = like(ctx->needs_input_grad(0), rows),
                 dgate_up = like(ctx->needs_input_grad(1), gate_up),
                 ddown = like(ctx->needs_input_grad(2), down);
    const MoeShape shape = stashed<ExpertsInfo>(ctx).shape(rows, down);
    const size_t bytes = moe_experts_backward_workspace_bytes(shape);
    const Tensor scratch = workspace(bytes, rows);
    must_run(moe_experts_backward({shape,
                                   half_in(rows),
                                   half_in(gate_up),
                                   half_in(down),
                                   half_in(saved[3]),
                                   half_in(dout),
                                   half_out(dx),
                                   half_out(dgate_up),
                                   half_out(ddown)},
                                  scratch.mutable_data_ptr(),
                                  bytes,
                                  stream_of(rows)),
             "moe_experts_backward");
    return {dx, dgate_up, ddown, Tensor()};
  }
};

}  // namespace

std::optional<Tensor> gather_rows_kernel(const Tensor& x, const ExpertOrder& order) {
  if (!takes(x)) return std::nullopt;
  const int64_t slots = order.slot.size(0) / x.size(0);
  if (!takes_rows(x, slots)) return std::nullopt;
  return GatherKernel::apply(x, Places(order, x.size(0), slots));
}

std::optional<Tensor> combine_experts_kernel(const Tensor& rows,
                                             const ExpertOrder& order,
                                             const Tensor& weights,
                                             const Numerics& num) {
  if (!takes_rows(rows, weights.size(1))) return std::nullopt;
  const CombineForm form = check_combine(rows, order, weights, num);
  return CombineKernel::apply(
      rows,
      weights,
      CombineInfo{Places(order, form.tokens, form.slots), {form.weigh_rounded, form.sum_rounded}});
}

std::optional<Tensor> grouped_experts_kernel(const Tensor& rows,
                                             const std::vector<int64_t>& offsets,
                                             const Tensor& gate_up,
                                             const Tensor& down,
                                             std::optional<double> limit,
                                             const Numerics& num) {
  if (!takes(rows) || gate_up.scalar_type() != at::kBFloat16 || rows.size(1) % 128 != 0 ||
      down.size(2) % 128 != 0 || down.size(0) > kMaxExperts)
    return std::nullopt;
  const bool keep = at::GradMode::is_enabled() &&
                    (rows.requires_grad() || gate_up.requires_grad() || down.requires_grad());
  return ExpertsKernel::apply(
      rows, gate_up, down, ExpertsInfo{on_device_of(rows, offsets), swiglu_form(limit, num), keep});
}

}  // namespace lockstep::model

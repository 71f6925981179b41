#include "model/base/stash.hpp"
#include "model/ops/conv_cuda.hpp"
#include "model/ops/kda_dispatch.hpp"
#include "model/ops/kernels_support.hpp"

namespace lockstep::model {
namespace {

using namespace kernels;  // NOLINT(google-build-using-namespace)
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

/// Tensors of a call as the kernel takes them, alive with their pointers.
struct Call {
  Tensor x, weight, halo;
  ConvArgs args;

  Call(const Tensor& x_in,
       const Tensor& weight_in,
       const Tensor& halo_in,
       const Tensor& cu,
       bool bf16_weight)
      : x(x_in.detach()), weight(wide(weight_in)) {
    const bool rows = x.stride(1) == 1 && x.stride(0) % 8 == 0 && x.stride(0) >= x.size(1) &&
                      reinterpret_cast<uintptr_t>(x.const_data_ptr()) % 16 == 0;
    if (!rows) x = dense(x);
    if (halo_in.defined()) halo = dense(halo_in);
    args.tokens = x.size(0);
    args.channels = x.size(1);
    args.documents = cu.size(0) - 1;
    args.cu = index_in(cu);
    args.x = half_in(x);
    args.x_stride = x.stride(0);
    args.weight = float_in(weight);
    args.halo = half_in(halo);
    args.bf16_weight = bf16_weight;
  }
};

struct ConvKernel : torch::autograd::Function<ConvKernel> {
  static Tensor forward(AutogradContext* ctx,
                        const Tensor& x,
                        const Tensor& weight,
                        const std::optional<Tensor>& halo_arg,
                        const Tensor& cu,
                        bool bf16_weight) {
    const Tensor halo = halo_arg.value_or(Tensor());
    ctx->save_for_backward({x, weight, halo, cu});
    ctx->saved_data["bf16_weight"] = bf16_weight;
    const Call call(x, weight, halo, cu, bf16_weight);
    Tensor y = at::empty(x.sizes(), x.options());
    must_run(conv_silu_forward(call.args, half_out(y), stream_of(x)), "conv_silu_forward");
    return y;
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const variable_list saved = ctx->get_saved_variables();
    const Tensor &x = saved[0], &weight = saved[1], &halo = saved[2], &cu = saved[3];
    const Call call(x, weight, halo, cu, ctx->saved_data["bf16_weight"].toBool());
    const Tensor dy = dense(grads[0]), dx = at::empty(x.sizes(), x.options()),
                 dweight = at::empty(weight.sizes(), call.weight.options());
    const Tensor dhalo = halo.defined() ? at::empty(halo.sizes(), halo.options()) : Tensor();
    const size_t bytes = conv_silu_backward_workspace_bytes(x.size(0), x.size(1));
    const Tensor scratch = workspace(bytes, x);
    must_run(conv_silu_backward(call.args,
                                {half_in(dy), half_out(dx), half_out(dhalo), float_out(dweight)},
                                scratch.mutable_data_ptr(),
                                bytes,
                                stream_of(x)),
             "conv_silu_backward");
    return {dx, dweight.to(weight.scalar_type()), dhalo, Tensor(), Tensor()};
  }
};

}  // namespace

std::optional<Tensor> conv_silu_kernel(const Tensor& x,
                                       const Tensor& weight,
                                       std::span<const int64_t> cu,
                                       const Tensor& halo,
                                       const Numerics& num) {
  if (!takes(x) || weight.size(1) != 4 || x.size(1) % 8 != 0) return std::nullopt;
  return ConvKernel::apply(
      x, weight, present(halo), on_device_of(x, cu), num.rounds<Switch::kConvWeight>("bf16"));
}

}  // namespace lockstep::model

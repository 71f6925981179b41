#include "model/base/stash.hpp"
#include "model/ops/kda_cuda.hpp"
#include "model/ops/kda_dispatch.hpp"
#include "model/ops/kda_mode.hpp"
#include "model/ops/kernels_support.hpp"

namespace lockstep::model {
namespace {

using namespace kernels;  // NOLINT(google-build-using-namespace)
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

/// What a call needs besides tensors.
struct Info {
  Tensor cu;
  float lower_bound;
  bool round_decay;  ///< D03
  bool save;         ///< someone will ask for gradients
};

/// Tensors of a call as the kernel takes them, alive with their pointers.
struct Call {
  Tensor q, k, v, f, beta, a_log, dt_bias, initial;
  KdaForwardArgs args;

  Call(const variable_list& in, const Info& info)
      : q(dense(in[0])),
        k(dense(in[1])),
        v(dense(in[2])),
        f(dense(in[3])),
        beta(dense(in[4])),
        a_log(wide(in[5], info.round_decay)),
        dt_bias(wide(in[6], info.round_decay)) {
    if (in[7].defined()) initial = dense(in[7]);
    args.tokens = q.size(0);
    args.documents = info.cu.size(0) - 1;
    args.heads = static_cast<int>(q.size(1));
    args.q_THK = half_in(q);
    args.k_THK = half_in(k);
    args.v_THV = half_in(v);
    args.f_THK = half_in(f);
    args.beta_logit_TH = half_in(beta);
    args.a_log_H = float_in(a_log);
    args.dt_bias_HK = float_in(dt_bias);
    args.lower_bound = info.lower_bound;
    args.cu_seqlens = index_in(info.cu);
    args.initial_state_NHKV = float_in(initial);
  }
};

struct KdaKernel : torch::autograd::Function<KdaKernel> {
  static variable_list forward(AutogradContext* ctx,
                               const Tensor& q,
                               const Tensor& k,
                               const Tensor& v,
                               const Tensor& f,
                               const Tensor& beta_logit,
                               const Tensor& a_log,
                               const Tensor& dt_bias,
                               const std::optional<Tensor>& initial,
                               const Info& info) {
    variable_list in = {q, k, v, f, beta_logit, a_log, dt_bias, initial.value_or(Tensor())};
    Call call(in, info);
    KdaForwardArgs& args = call.args;
    const int64_t heads = q.size(1), dim = q.size(2);
    Tensor o = at::empty(q.sizes(), q.options());
    Tensor final_state = at::empty({args.documents, heads, dim, dim}, call.a_log.options());
    Tensor checkpoints;
    if (info.save) {
      checkpoints = workspace(kda_checkpoint_bytes(args.tokens, args.documents, args.heads), q);
      args.checkpoints = static_cast<float*>(checkpoints.mutable_data_ptr());
    }
    args.o_THV = half_out(o);
    args.final_state_NHKV = float_out(final_state);
    const size_t bytes = kda_forward_workspace_bytes(args.tokens, args.documents, args.heads);
    const Tensor scratch = workspace(bytes, q);
    must_run(kda_forward(args, scratch.mutable_data_ptr(), bytes, stream_of(q)), "kda_forward");
    in.push_back(checkpoints);
    ctx->save_for_backward(in);
    ctx->set_materialize_grads(false);
    stash(ctx, info);
    return {o, final_state};
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const variable_list in = ctx->get_saved_variables();
    const Call call(in, stashed<Info>(ctx));
    const Tensor dout = grads[0].defined() ? dense(grads[0]) : at::zeros_like(call.q);
    const Tensor dfinal = grads[1].defined() ? dense(grads[1]) : Tensor();
    const auto like = [](const Tensor& t) {
      return t.defined() ? at::empty(t.sizes(), t.options()) : Tensor();
    };
    const Tensor dq = like(call.q), dk = like(call.k), dv = like(call.v), df = like(call.f),
                 dbeta = like(call.beta), da = like(call.a_log), ddt = like(call.dt_bias),
                 dinitial = like(call.initial);
    KdaBackwardArgs args;
    args.forward = call.args;
    args.forward.checkpoints = static_cast<float*>(in[8].mutable_data_ptr());
    args.do_THV = half_in(dout);
    args.dfinal_state_NHKV = float_in(dfinal);
    args.dq_THK = half_out(dq);
    args.dk_THK = half_out(dk);
    args.dv_THV = half_out(dv);
    args.df_THK = half_out(df);
    args.dbeta_logit_TH = half_out(dbeta);
    args.da_log_H = float_out(da);
    args.ddt_bias_HK = float_out(ddt);
    args.dinitial_state_NHKV = float_out(dinitial);
    const size_t bytes =
        kda_backward_workspace_bytes(call.args.tokens, call.args.documents, call.args.heads);
    const Tensor scratch = workspace(bytes, call.q);
    must_run(kda_backward(args, scratch.mutable_data_ptr(), bytes, stream_of(call.q)),
             "kda_backward");
    return {dq,
            dk,
            dv,
            df,
            dbeta,
            da.to(in[5].scalar_type()),
            ddt.to(in[6].scalar_type()),
            dinitial,
            Tensor()};
  }
};

}  // namespace

std::optional<KdaOutput> kda_chunk_kernel(const KdaInput& in, const Numerics& num) {
  if (!takes(in.q) || in.q.size(2) != 128 || !in.lower_bound || *in.lower_bound < -5)
    return std::nullopt;
  const KdaMode mode = kda_mode(num, in.lower_bound, /*recurrent=*/false);
  if (mode.chunk != 64 || mode.gate == KdaMode::Gate::kTanh || mode.beta_tanh || mode.round_beta ||
      !mode.round_normalised || !mode.round_operands || !mode.round_scores || mode.round_exp ||
      mode.round_state)
    return std::nullopt;
  bool save = false;
  for (const Tensor* t :
       {&in.q, &in.k, &in.v, &in.f, &in.beta_logit, &in.a_log, &in.dt_bias, &in.initial_state})
    save = save || (t->defined() && t->requires_grad());
  const variable_list out = KdaKernel::apply(in.q,
                                             in.k,
                                             in.v,
                                             in.f,
                                             in.beta_logit,
                                             in.a_log,
                                             in.dt_bias,
                                             present(in.initial_state),
                                             Info{on_device_of(in.q, in.cu),
                                                  static_cast<float>(*in.lower_bound),
                                                  mode.round_decay,
                                                  save && at::GradMode::is_enabled()});
  return KdaOutput{out[0], out[1]};
}

}  // namespace lockstep::model

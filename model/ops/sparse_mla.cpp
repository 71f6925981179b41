#include "model/ops/sparse_mla.hpp"

#include <algorithm>
#include <atomic>
#include <cmath>

#include "model/base/parallel.hpp"
#include "model/ops/sparse_mla_kernel.hpp"

namespace lockstep::model {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

/// What the kernels need to know of the numerics.
struct Form {
  bool expanded = false;
  mla::Rounding rounding;

  static Form of(const Numerics& num) {
    Form form;
    form.expanded = num.is<Switch::kMlaForm>("expanded");
    form.rounding.act = num.is_bf16();
    form.rounding.scores = num.rounds<Switch::kMlaScores>("bf16");
    if (num.rounds<Switch::kMlaProbabilities>("normalised")) {
      form.rounding.probabilities = mla::Probabilities::kNormalised;
    } else if (num.rounds<Switch::kMlaProbabilities>("unnormalised")) {
      form.rounding.probabilities = mla::Probabilities::kUnnormalised;
    }
    return form;
  }
  [[nodiscard]] int64_t pack() const {
    return (expanded ? 1 : 0) | (rounding.act ? 2 : 0) | (rounding.scores ? 4 : 0) |
           (static_cast<int64_t>(rounding.probabilities) << 3);
  }
  static Form unpack(int64_t bits) {
    Form form;
    form.expanded = (bits & 1) != 0;
    form.rounding.act = (bits & 2) != 0;
    form.rounding.scores = (bits & 4) != 0;
    form.rounding.probabilities = static_cast<mla::Probabilities>(bits >> 3);
    return form;
  }
};

/// Valid entries per row; throws kInput naming the first index out of range.
std::vector<int64_t> count_keys(const Tensor& selection, int64_t keys) {
  const int64_t rows = selection.size(0), width = selection.size(1);
  const auto* data = selection.const_data_ptr<int32_t>();
  std::vector<int64_t> counts(static_cast<size_t>(rows));
  std::atomic<int64_t> wrong{rows};
  parallel_for(0, rows, 256, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      const int32_t* row = data + t * width;
      int32_t unused = 0, lowest = -1, highest = -1;
      for (int64_t i = 0; i < width; ++i) {
        unused += row[i] < 0 ? 1 : 0;
        lowest = std::min(lowest, row[i]);
        highest = std::max(highest, row[i]);
      }
      counts[static_cast<size_t>(t)] = width - unused;
      int64_t first = wrong;
      while ((lowest < -1 || highest >= keys) && t < first &&
             !wrong.compare_exchange_weak(first, t)) {
      }
    }
  });
  for (int64_t t = wrong, i = 0; t < rows && i < width; ++i) {
    const int32_t key = data[t * width + i];
    LOCKSTEP_CHECK(
        key >= -1 && key < keys,
        kInput,
        "sparse_mla: selection[{}, {}] = {} is neither -1 nor a row of latent, which has "
        "{} rows",
        t,
        i,
        key,
        keys);
  }
  return counts;
}

/// Arguments in the accumulation dtype and their description for the kernels.
template <typename T>
struct Arguments {
  Tensor q, latent, kv_b, selection;
  std::vector<int64_t> counts;
  mla::Problem<T> problem;

  Arguments(const Tensor& q_in,
            const Tensor& latent_in,
            const Tensor& kv_b_in,
            const Tensor& selection_in,
            int64_t d_v,
            const Form& form)
      : q(in_acc(q_in)),
        latent(in_acc(latent_in)),
        kv_b(in_acc(kv_b_in)),
        selection(selection_in.contiguous()),
        counts(count_keys(selection, latent.size(0))) {
    const int64_t d_n = q.size(2);
    problem = {q.size(0),
               latent.size(0),
               selection.size(1),
               q.size(1),
               d_n,
               d_v,
               latent.size(1),
               q.const_data_ptr<T>(),
               latent.const_data_ptr<T>(),
               kv_b.const_data_ptr<T>(),
               selection.const_data_ptr<int32_t>(),
               counts.data(),
               static_cast<T>(std::pow(static_cast<double>(d_n), -0.5)),
               form.rounding};
  }

  static Tensor in_acc(const Tensor& x) {
    return x.detach().to(c10::CppTypeToScalarType<T>::value).contiguous();
  }
};

template <typename T>
Tensor forward_of(const Tensor& q,
                  const Tensor& latent,
                  const Tensor& kv_b,
                  const Tensor& selection,
                  int64_t d_v,
                  const Form& form) {
  const Arguments<T> arguments(q, latent, kv_b, selection, d_v, form);
  Tensor o = at::empty({q.size(0), q.size(1), d_v}, arguments.q.options());
  if (form.expanded)
    mla::forward_expanded(arguments.problem, o.data_ptr<T>());
  else
    mla::forward_absorbed(arguments.problem, o.data_ptr<T>());
  return o.to(q.scalar_type());
}

template <typename T>
variable_list backward_of(const Tensor& q,
                          const Tensor& latent,
                          const Tensor& kv_b,
                          const Tensor& selection,
                          const Tensor& d_o,
                          const Form& form,
                          bool want_latent,
                          bool want_kv_b) {
  const Arguments<T> arguments(q, latent, kv_b, selection, d_o.size(2), form);
  const Tensor d_out = Arguments<T>::in_acc(d_o);
  Tensor d_q = at::empty_like(arguments.q), d_latent, d_kv_b;
  mla::Gradients<T> gradients{d_q.data_ptr<T>(), nullptr, nullptr};
  if (want_latent) {
    d_latent = at::zeros_like(arguments.latent);
    gradients.latent = d_latent.data_ptr<T>();
  }
  if (want_kv_b) {
    d_kv_b = at::zeros_like(arguments.kv_b);
    gradients.kv_b = d_kv_b.data_ptr<T>();
  }
  if (form.expanded)
    mla::backward_expanded(arguments.problem, d_out.const_data_ptr<T>(), gradients);
  else
    mla::backward_absorbed(arguments.problem, d_out.const_data_ptr<T>(), gradients);
  return {d_q.to(q.scalar_type()),
          want_latent ? d_latent.to(latent.scalar_type()) : Tensor(),
          want_kv_b ? d_kv_b.to(kv_b.scalar_type()) : Tensor()};
}

struct SparseMla : torch::autograd::Function<SparseMla> {
  static Tensor forward(AutogradContext* ctx,
                        const Tensor& q,
                        const Tensor& latent,
                        const Tensor& kv_b,
                        const Tensor& selection,
                        int64_t d_v,
                        int64_t form) {
    ctx->save_for_backward({q, latent, kv_b, selection});
    ctx->saved_data["form"] = form;
    return q.scalar_type() == at::kDouble
               ? forward_of<double>(q, latent, kv_b, selection, d_v, Form::unpack(form))
               : forward_of<float>(q, latent, kv_b, selection, d_v, Form::unpack(form));
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& d_outputs) {
    const variable_list saved = ctx->get_saved_variables();
    const Tensor &q = saved[0], &latent = saved[1], &kv_b = saved[2], &selection = saved[3];
    const Form form = Form::unpack(ctx->saved_data["form"].toInt());
    const bool want_latent = ctx->needs_input_grad(1), want_kv_b = ctx->needs_input_grad(2);
    variable_list gradients =
        q.scalar_type() == at::kDouble
            ? backward_of<double>(
                  q, latent, kv_b, selection, d_outputs[0], form, want_latent, want_kv_b)
            : backward_of<float>(
                  q, latent, kv_b, selection, d_outputs[0], form, want_latent, want_kv_b);
    gradients.resize(6);
    return gradients;
  }
};

}  // namespace

Tensor sparse_mla(const Tensor& q,
                  const Tensor& latent,
                  const Tensor& kv_b,
                  const Tensor& selection,
                  int64_t d_v,
                  const Numerics& num) {
  mla::check_arguments(q, latent, kv_b, selection, d_v, num);
  return SparseMla::apply(q, latent, kv_b, selection, d_v, Form::of(num).pack());
}

}  // namespace lockstep::model

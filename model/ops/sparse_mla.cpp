#include "model/ops/sparse_mla.hpp"

#include <algorithm>
#include <atomic>
#include <cmath>

#include "model/base/device.hpp"
#include "model/base/parallel.hpp"
#include "model/ops/device_kernels.hpp"
#include "model/ops/sparse_mla_kernel.hpp"
#include "model/ops/weight_support.hpp"

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

/// Exact sums of a call; undefined: ordinary gradients.
struct Sums {
  ExactSum latent, kv_b;
  RowBlocks blocks;
};

template <typename T>
variable_list backward_of(const Tensor& q,
                          const Tensor& latent,
                          const Tensor& kv_b,
                          const Tensor& selection,
                          const Tensor& d_o,
                          const Form& form,
                          const Sums& sums,
                          bool want_latent,
                          bool want_kv_b) {
  const Arguments<T> arguments(q, latent, kv_b, selection, d_o.size(2), form);
  const Tensor d_out = Arguments<T>::in_acc(d_o);
  Tensor d_q = at::empty_like(arguments.q), d_latent, d_kv_b;
  mla::Gradients<T> gradients{d_q.data_ptr<T>(), nullptr, nullptr};
  if (sums.latent.defined()) {
    const int64_t rank = latent.size(1);
    mla::ExactGradients exact{*sums.blocks,
                              {sums.latent.high(), sums.latent.low(), rank},
                              {sums.kv_b.high(), sums.kv_b.low(), rank},
                              {},
                              {}};
    gradients.exact = &exact;
    mla::backward_absorbed(arguments.problem, d_out.const_data_ptr<T>(), gradients);
    sums.latent.note(num_blocks(sums.blocks), exact.latent_peak.value());
    sums.kv_b.note(num_blocks(sums.blocks), exact.kv_b_peak.value());
    return {d_q.to(q.scalar_type()), Tensor(), Tensor()};
  }
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
                        int64_t form,
                        const Sums& sums) {
    stash(ctx, sums);
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
    const Sums& sums = stashed<Sums>(ctx);
    variable_list gradients =
        q.scalar_type() == at::kDouble
            ? backward_of<double>(
                  q, latent, kv_b, selection, d_outputs[0], form, sums, want_latent, want_kv_b)
            : backward_of<float>(
                  q, latent, kv_b, selection, d_outputs[0], form, sums, want_latent, want_kv_b);
    gradients.resize(7);
    return gradients;
  }
};

}  // namespace

Tensor sparse_mla(const Tensor& q,
                  const Weight& latent,
                  const Weight& kv_b,
                  const Tensor& selection,
                  int64_t d_v,
                  const Numerics& num) {
  mla::check_arguments(q, latent.value, kv_b.value, selection, d_v, num);
  check_exact(latent, num, "sparse_mla: latent");
  check_exact(kv_b, q.size(0), num, "sparse_mla: kv_b");
  if (takes_device_form(q)) {
    const auto o = sparse_mla_kernel(q, latent.value, kv_b.value, selection, d_v, num);
    return o ? *o : sparse_mla_reference(q, latent.value, kv_b.value, selection, d_v, num);
  }
  const Form form = Form::of(num);
  LOCKSTEP_CHECK(latent.sum.defined() == kv_b.sum.defined(),
                 kShape,
                 "sparse_mla: latent and kv_b must both have exact sums or neither");
  LOCKSTEP_CHECK(!kv_b.sum.defined() || !form.expanded,
                 kConfig,
                 "sparse_mla: exact sums need D42 = absorbed under policy {}",
                 num.name());
  return SparseMla::apply(q,
                          latent.value,
                          kv_b.value,
                          selection,
                          d_v,
                          form.pack(),
                          Sums{latent.sum, kv_b.sum, kv_b.blocks});
}

namespace {

/// Rows of `latent` that are selected, in slot order, and the selection as rows of those.
std::pair<Tensor, Tensor> selected_rows(const Tensor& latent, const Tensor& selection) {
  std::vector<int32_t> place(static_cast<size_t>(latent.size(0)), -1);
  const auto* from = selection.const_data_ptr<int32_t>();
  for (int64_t i = 0; i < selection.numel(); ++i)
    if (from[i] >= 0) place[static_cast<size_t>(from[i])] = 0;
  std::vector<int64_t> used;
  for (size_t slot = 0; slot < place.size(); ++slot) {
    if (place[slot] < 0) continue;
    place[slot] = static_cast<int32_t>(used.size());
    used.push_back(static_cast<int64_t>(slot));
  }
  Tensor rows = at::empty_like(selection);
  auto* to = rows.mutable_data_ptr<int32_t>();
  for (int64_t i = 0; i < selection.numel(); ++i)
    to[i] = from[i] < 0 ? -1 : place[static_cast<size_t>(from[i])];
  return {latent.index_select(0, at::tensor(used, at::kLong)), rows};
}

template <typename T>
Tensor absorbed_of(const Tensor& q,
                   const Tensor& latent,
                   const Tensor& w_k,
                   const Tensor& w_v,
                   const Tensor& selection,
                   const Form& form) {
  Arguments<T> arguments(q, latent, w_k, selection, w_v.size(2), form);
  const Tensor values = Arguments<T>::in_acc(w_v);
  arguments.problem.values_t = values.const_data_ptr<T>();
  Tensor o = at::empty({q.size(0), q.size(1), w_v.size(2)}, arguments.q.options());
  mla::forward_absorbed(arguments.problem, o.data_ptr<T>());
  return o.to(q.scalar_type());
}

}  // namespace

Tensor sparse_mla_absorbed(const Tensor& q,
                           const Tensor& latent,
                           const Tensor& w_k,
                           const Tensor& w_v,
                           const Tensor& selection,
                           const Numerics& num) {
  const at::NoGradGuard no_grad;
  check_shape(q, {-1, -1, -1}, "sparse_mla_absorbed: q [T, H, d_n]");
  check_shape(latent, {-1, -1}, "sparse_mla_absorbed: latent [slots, R]");
  const int64_t heads = q.size(1), rank = latent.size(1);
  check_shape(w_k, {heads, q.size(2), rank}, "sparse_mla_absorbed: w_k [H, d_n, R]");
  check_shape(w_v, {heads, rank, -1}, "sparse_mla_absorbed: w_v [H, R, d_v]");
  check_dtype(w_v, w_k.scalar_type(), "sparse_mla_absorbed: w_v, like w_k");
  // What kv_b would be checked for.
  mla::check_arguments(q,
                       latent,
                       w_k.new_empty({1, 1}).expand({heads * (q.size(2) + w_v.size(2)), rank}),
                       selection,
                       w_v.size(2),
                       num);
  Form form = Form::of(num);
  form.expanded = false;
  const Tensor chosen = selection.contiguous();
  if (num.acc() == at::kDouble) return absorbed_of<double>(q, latent, w_k, w_v, chosen, form);
  if (num.act() == num.acc()) return absorbed_of<float>(q, latent, w_k, w_v, chosen, form);
  count_keys(chosen, latent.size(0));
  const auto [rows, places] = selected_rows(latent, chosen);
  return absorbed_of<float>(q, rows, w_k, w_v, places, form);
}

}  // namespace lockstep::model

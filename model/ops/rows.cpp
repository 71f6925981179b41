#include "model/ops/rows.hpp"

#include <algorithm>
#include <vector>

#include "model/base/parallel.hpp"

namespace lockstep::model {
namespace {

/// Rows r sorted by source, ascending r within one source: sources of source t are order[first[t]
/// .. first[t + 1]).
struct Incoming {
  std::vector<int64_t> first, order;
};

Incoming incoming_rows(const int64_t* index, int64_t num_rows, int64_t num_sources) {
  Incoming in;
  in.first.assign(static_cast<size_t>(num_sources) + 1, 0);
  in.order.resize(static_cast<size_t>(num_rows));
  for (int64_t r = 0; r < num_rows; ++r) ++in.first[static_cast<size_t>(index[r]) + 1];
  for (size_t t = 1; t < in.first.size(); ++t) in.first[t] += in.first[t - 1];
  std::vector<int64_t> next(in.first.begin(), in.first.end() - 1);
  for (int64_t r = 0; r < num_rows; ++r)
    in.order[static_cast<size_t>(next[static_cast<size_t>(index[r])]++)] = r;
  return in;
}

template <typename T, typename Acc>
void add_rows(const T* grad, const Incoming& in, int64_t num_sources, int64_t width, T* out) {
  parallel_for(0, num_sources, 64, [&](int64_t begin, int64_t end) {
    std::vector<Acc> sum(static_cast<size_t>(width));
    for (int64_t t = begin; t < end; ++t) {
      std::fill(sum.begin(), sum.end(), Acc(0));
      for (int64_t i = in.first[static_cast<size_t>(t)]; i < in.first[static_cast<size_t>(t) + 1];
           ++i) {
        const T* row = grad + in.order[static_cast<size_t>(i)] * width;
        for (int64_t c = 0; c < width; ++c) sum[static_cast<size_t>(c)] += static_cast<Acc>(row[c]);
      }
      for (int64_t c = 0; c < width; ++c)
        out[t * width + c] = static_cast<T>(sum[static_cast<size_t>(c)]);
    }
  });
}

class TakeRows : public torch::autograd::Function<TakeRows> {
 public:
  static Tensor forward(torch::autograd::AutogradContext* ctx,
                        const Tensor& x,
                        const Tensor& index) {
    ctx->save_for_backward({index});
    ctx->saved_data["sources"] = x.size(0);
    return at::index_select(x, 0, index);
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* ctx,
                                                 torch::autograd::variable_list grads) {
    const Tensor index = ctx->get_saved_variables()[0].contiguous();
    const Tensor grad = grads[0].contiguous();
    const int64_t num_sources = ctx->saved_data["sources"].toInt(), width = grad.size(1);
    Tensor out = at::empty({num_sources, width}, grad.options());
    const Incoming in = incoming_rows(index.const_data_ptr<int64_t>(), index.numel(), num_sources);
    if (grad.scalar_type() == at::kDouble) {
      add_rows<double, double>(
          grad.const_data_ptr<double>(), in, num_sources, width, out.mutable_data_ptr<double>());
    } else if (grad.scalar_type() == at::kFloat) {
      add_rows<float, float>(
          grad.const_data_ptr<float>(), in, num_sources, width, out.mutable_data_ptr<float>());
    } else {
      add_rows<at::BFloat16, float>(grad.const_data_ptr<at::BFloat16>(),
                                    in,
                                    num_sources,
                                    width,
                                    out.mutable_data_ptr<at::BFloat16>());
    }
    return {out, Tensor()};
  }
};

}  // namespace

Tensor take_rows(const Tensor& x, const Tensor& index) {
  check_shape(x, {-1, -1}, "take_rows: x");
  check_shape(index, {-1}, "take_rows: index");
  check_dtype(index, at::kLong, "take_rows: index");
  return TakeRows::apply(x, index);
}

}  // namespace lockstep::model

#include "model/base/exact_sum.hpp"

#include <cmath>

#include "model/base/stash.hpp"

namespace lockstep {
namespace {

constexpr double kProcessRange = 65536, kRange = 1048576;
constexpr int64_t kAddendsBetweenCarries = int64_t{1} << 20;

int64_t elements(const std::vector<int64_t>& sizes) {
  int64_t count = 1;
  for (const int64_t s : sizes) count *= s;
  return count;
}

class ExactGradient : public torch::autograd::Function<ExactGradient> {
 public:
  static Tensor forward(torch::autograd::AutogradContext* ctx,
                        const Tensor& x,
                        const ExactSum& sum) {
    stash(ctx, sum);
    ctx->saved_data["dtype"] = static_cast<int64_t>(x.scalar_type());
    ctx->set_materialize_grads(false);
    return x.view_as(x);
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* ctx,
                                                 const torch::autograd::variable_list&) {
    const auto dtype = static_cast<at::ScalarType>(ctx->saved_data["dtype"].toInt());
    return {stashed<ExactSum>(ctx).value().to(dtype), Tensor()};
  }
};

}  // namespace

ExactSum::ExactSum(at::IntArrayRef sizes, std::string name)
    : state_(std::make_shared<State>()), sizes_(sizes.vec()) {
  state_->name = std::move(name);
  state_->sizes = sizes_;
}

const Tensor& ExactSum::filled() const {
  if (!state_->pairs.defined()) {
    std::vector<int64_t> sizes{2};
    sizes.insert(sizes.end(), state_->sizes.begin(), state_->sizes.end());
    state_->pairs = at::zeros(sizes, at::kDouble);
  }
  return state_->pairs;
}

double* ExactSum::high() const {
  return static_cast<double*>(filled().mutable_data_ptr()) + offset_;
}

double* ExactSum::low() const { return high() + elements(state_->sizes); }

void ExactSum::note(int64_t addends, float peak) const {
  State& s = *state_;
  s.addends += addends;
  if (s.addends >= kAddendsBetweenCarries) {
    carry(filled());
    s.addends = 0;
  }
  // A number that is not finite makes the sum NaN, as it would any other.
  if (!std::isfinite(peak)) return;
  s.bound += static_cast<double>(addends) * static_cast<double>(peak);
  LOCKSTEP_CHECK(s.bound < kProcessRange,
                 kConfig,
                 "{}: {} partial sums of up to {} could leave the range of {} in which their sum "
                 "does not depend on its order; use a policy that is not invariant",
                 s.name,
                 addends,
                 peak,
                 kProcessRange);
}

void ExactSum::add(const Tensor& partial) const {
  check_shape(partial, sizes_, state_->name);
  check_dtype(partial, at::kFloat, state_->name);
  const Tensor dense = partial.contiguous();
  note(1,
       exact_add(dense.numel(), static_cast<const float*>(dense.const_data_ptr()), high(), low()));
}

ExactSum ExactSum::rows(int64_t first, int64_t count) const {
  ExactSum part = *this;
  const int64_t row = sizes_[0] == 0 ? 0 : elements(sizes_) / sizes_[0];
  part.offset_ += first * row;
  part.sizes_[0] = count;
  return part;
}

Tensor ExactSum::pairs() const {
  const int64_t whole = elements(state_->sizes);
  std::vector<int64_t> sizes{2};
  sizes.insert(sizes.end(), sizes_.begin(), sizes_.end());
  return filled().view({2, whole}).narrow(1, offset_, elements(sizes_)).reshape(sizes);
}

Tensor ExactSum::value() const { return value_of(pairs(), state_->name); }

Tensor ExactSum::value_of(const Tensor& pairs, std::string_view what) {
  const at::NoGradGuard no_grad;
  const Tensor sum = pairs.select(0, 0) + pairs.select(0, 1);
  const double largest = sum.numel() == 0 ? 0 : sum.abs().max().item<double>();
  LOCKSTEP_CHECK(!(largest >= kRange) || !std::isfinite(largest),
                 kConfig,
                 "{}: a sum of {} is outside of the range of {} in which it does not depend on its "
                 "order; use a policy that is not invariant",
                 what,
                 largest,
                 kRange);
  return sum.to(at::kFloat);
}

void ExactSum::carry(const Tensor& pairs) {
  const int64_t count = pairs.numel() / 2;
  auto* high = static_cast<double*>(pairs.mutable_data_ptr());
  exact_carry(count, high, high + count);
}

Tensor with_exact_gradient(const Tensor& x, const ExactSum& sum) {
  return ExactGradient::apply(x, sum);
}

}  // namespace lockstep

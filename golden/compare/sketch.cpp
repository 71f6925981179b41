#include "golden/compare/sketch.hpp"

#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>

#include "model/base/seeded.hpp"

namespace lockstep::golden {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

std::vector<float> directions(int64_t p, int64_t count) {
  return seeded_uniform(0, fmt::format("golden-projection/{}", p), count);
}

double project(const double* x, const std::vector<float>& direction, int64_t count) {
  double sum = 0.0;
  for (int64_t i = 0; i < count; ++i) {
    sum += x[i] * (std::sqrt(3.0) * static_cast<double>(direction[static_cast<size_t>(i)]));
  }
  return sum;
}

int64_t projections_of(SketchForm form, int64_t rows) {
  return form == SketchForm::kTensor ? kTensorProjections : kTokenProjections * rows;
}

}  // namespace

std::vector<int64_t> sketch_rows(std::string_view name, int64_t num_rows) {
  std::vector<int64_t> rows;
  for (float u : seeded_uniform(0, fmt::format("golden-rows/{}", name), 2)) {
    const double place = (static_cast<double>(u) + 1.0) / 2.0 * static_cast<double>(num_rows);
    rows.push_back(std::min(static_cast<int64_t>(std::floor(place)), num_rows - 1));
  }
  std::sort(rows.begin(), rows.end());
  rows.erase(std::unique(rows.begin(), rows.end()), rows.end());
  return rows;
}

Tensor make_sketch(std::string_view name, const Tensor& tensor, SketchForm form) {
  LOCKSTEP_CHECK(tensor.defined() && tensor.dim() >= 1 && tensor.numel() > 0,
                 kShape,
                 "sketch of {}: expected a tensor with elements and at least one dimension, got {}",
                 name,
                 describe(tensor));
  const Tensor flat = tensor.detach().to(at::kCPU, at::kDouble).contiguous();
  const auto* x = flat.data_ptr<double>();
  const int64_t rows = flat.size(0), width = flat.numel() / rows;
  const auto kept = sketch_rows(name, rows);
  const int64_t projections = projections_of(form, rows);
  Tensor out =
      at::empty({1 + projections + static_cast<int64_t>(kept.size()) * width}, flat.options());
  auto* p = out.data_ptr<double>();
  double sum = 0.0;
  for (int64_t r = 0; r < rows; ++r) {  // row by row: the rounding of a long sum stays small
    double row = 0.0;
    for (int64_t i = r * width; i < (r + 1) * width; ++i) row += x[i] * x[i];
    sum += row;
  }
  *p++ = std::sqrt(sum);
  if (form == SketchForm::kTensor) {
    for (int64_t i = 0; i < projections; ++i) {
      *p++ = project(x, directions(i, flat.numel()), flat.numel());
    }
  } else {
    const auto first = directions(0, width), second = directions(1, width);
    for (int64_t r = 0; r < rows; ++r) {
      *p++ = project(x + r * width, first, width);
      *p++ = project(x + r * width, second, width);
    }
  }
  for (int64_t r : kept) p = std::copy_n(x + r * width, width, p);
  return out;
}

int64_t SketchComparison::first_token(double limit) const {
  for (size_t t = 0; t < token_error.size(); ++t) {
    if (!(token_error[t] <= limit)) return static_cast<int64_t>(t);
  }
  return -1;
}

SketchComparison compare_sketch(const Tensor& got,
                                const Tensor& want_sketch,
                                const std::vector<int64_t>& shape,
                                SketchForm form,
                                std::string_view name,
                                const Threshold& threshold) {
  LOCKSTEP_CHECK(got.defined() && got.sizes() == at::IntArrayRef(shape),
                 kShape,
                 "comparing {}: shapes differ: got {}, want [{}]",
                 name,
                 describe(got),
                 fmt::join(shape, ", "));
  const Tensor mine = make_sketch(name, got, form);
  LOCKSTEP_CHECK(want_sketch.defined() && want_sketch.scalar_type() == at::kDouble &&
                     want_sketch.sizes() == mine.sizes(),
                 kShape,
                 "comparing {}: a sketch of [{}] has {}, the stored one is {}",
                 name,
                 fmt::join(shape, ", "),
                 describe(mine),
                 describe(want_sketch));
  const Tensor theirs = want_sketch.contiguous();
  const auto *a = mine.data_ptr<double>(), *b = theirs.data_ptr<double>();
  const int64_t rows = shape[0], width = got.numel() / rows;
  SketchComparison out;
  out.num_projections = projections_of(form, rows);
  const auto relative = [&](double error) {
    if (std::isnan(error)) return kInfinity;
    return error == 0.0 ? 0.0 : error / b[0];
  };
  out.norm_error = relative(std::fabs(a[0] - b[0]));
  double sum = 0.0;
  for (int64_t i = 1; i <= out.num_projections; ++i) sum += (a[i] - b[i]) * (a[i] - b[i]);
  if (form == SketchForm::kTensor) {
    out.rel_l2 = relative(std::sqrt(sum / static_cast<double>(kTensorProjections)));
  } else {
    out.rel_l2 = relative(std::sqrt(sum / static_cast<double>(kTokenProjections)));
    double fourth = 0.0;  // as shares of the sum, so that nothing underflows
    for (int64_t r = 0; r < rows; ++r) {
      const double x = a[1 + 2 * r] - b[1 + 2 * r], y = a[2 + 2 * r] - b[2 + 2 * r];
      const double square = x * x + y * y;
      out.token_error.push_back(relative(std::sqrt(square / 2.0 * static_cast<double>(rows))));
      fourth += (square / sum) * (square / sum);
    }
    // With f the sum of squares of the rows' estimates and s their sum, f is on average twice the
    // sum of e^4, and s^2 is (sum of e^2)^2 + (sum of e^4): 2 (s^2 - f/2) / (f/2).
    if (fourth > 0.0) {
      out.num_projections = std::clamp<int64_t>(std::llround(4.0 / fourth - 2.0), 2, 2 * rows);
    }
  }
  const auto kept = sketch_rows(name, rows);
  const auto num_kept = static_cast<int64_t>(kept.size());
  const int64_t begin = 1 + projections_of(form, rows);
  out.rows = compare(mine.narrow(0, begin, num_kept * width).reshape({num_kept, width}),
                     theirs.narrow(0, begin, num_kept * width).reshape({num_kept, width}),
                     name,
                     threshold);
  if (out.rows.first) {  // coordinates of the whole tensor
    auto& first = *out.rows.first;
    first.index = kept[static_cast<size_t>(first.coordinates[0])] * width + first.coordinates[1];
    int64_t rest = first.index;
    first.coordinates.assign(shape.size(), 0);
    for (size_t d = shape.size(); d-- > 0; rest /= shape[d]) first.coordinates[d] = rest % shape[d];
  }
  return out;
}

}  // namespace lockstep::golden

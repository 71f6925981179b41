// Where a scheme that spreads experts over ranks moves token rows to the experts and back.
#pragma once

#include <cstdint>
#include <memory>
#include <string_view>
#include <vector>

#include "model/base/weight.hpp"

namespace lockstep::model {

/// How the rows of one call travelled; combine() needs it to undo dispatch().
struct ExchangePlan {
  virtual ~ExchangePlan() = default;
};

struct Dispatched {
  Tensor rows;  ///< [R', D]: rows for this rank's experts, by (expert, source rank, source row)
  std::vector<int64_t> offsets;        ///< [E_local + 1] first row of each local expert
  RowBlocks blocks;                    ///< runs of rows of one expert and one tag, if tags came
  std::shared_ptr<ExchangePlan> plan;  ///< null where nothing moved
};

/// Bounds of the runs of equal tags [R] int64 (contiguous), cut at `offsets` too.
inline RowBlocks runs_of_tags(const Tensor& tags, const std::vector<int64_t>& offsets) {
  const auto* tag = static_cast<const int64_t*>(tags.const_data_ptr());
  auto bounds = std::make_shared<std::vector<int64_t>>(1, 0);
  for (size_t e = 0; e + 1 < offsets.size(); ++e) {
    for (int64_t row = offsets[e] + 1; row <= offsets[e + 1]; ++row) {
      if (row == offsets[e + 1] || tag[row] != tag[row - 1]) bounds->push_back(row);
    }
  }
  return bounds;
}

/// Collective over the ranks that share the experts, in the same order on all of them, also with no
/// rows at all. Both directions are differentiable: the gradient of a row travels back the way it
/// came.
class TokenExchange {
 public:
  virtual ~TokenExchange() = default;

  /// rows [R, D] sorted by expert, offsets [E + 1] over all experts. tags [R] int64 or undefined
  /// (the same on all ranks): which block of this rank's tokens, below 2^32, a row comes from.
  virtual Dispatched dispatch(const Tensor& rows,
                              const std::vector<int64_t>& offsets,
                              const Tensor& tags,
                              std::string_view what) = 0;
  /// Results of dispatched rows, [R', D], in the order of dispatch's input: [R, D].
  virtual Tensor combine(const Tensor& rows, const Dispatched& from, std::string_view what) = 0;
};

/// Every expert is here.
class LocalExperts final : public TokenExchange {
 public:
  Dispatched dispatch(const Tensor& rows,
                      const std::vector<int64_t>& offsets,
                      const Tensor& tags,
                      std::string_view) override {
    return {rows, offsets, tags.defined() ? runs_of_tags(tags, offsets) : nullptr, nullptr};
  }
  Tensor combine(const Tensor& rows, const Dispatched&, std::string_view) override { return rows; }
};

}  // namespace lockstep::model

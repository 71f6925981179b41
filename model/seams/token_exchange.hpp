// Where a scheme that spreads experts over ranks moves token rows to the experts and back.
#pragma once

#include <cstdint>
#include <memory>
#include <string_view>
#include <vector>

#include "model/base/torch.hpp"

namespace lockstep::model {

/// How the rows of one call travelled; combine() needs it to undo dispatch().
struct ExchangePlan {
  virtual ~ExchangePlan() = default;
};

struct Dispatched {
  Tensor rows;  ///< [R', D]: rows for this rank's experts, by (expert, source rank, source row)
  std::vector<int64_t> offsets;        ///< [E_local + 1] first row of each local expert
  std::shared_ptr<ExchangePlan> plan;  ///< null where nothing moved
};

/// Collective over the ranks that share the experts, in the same order on all of them, also with no
/// rows at all. Both directions are differentiable: the gradient of a row travels back the way it
/// came.
class TokenExchange {
 public:
  virtual ~TokenExchange() = default;

  /// rows [R, D] sorted by expert, offsets [E + 1] over all experts.
  virtual Dispatched dispatch(const Tensor& rows,
                              const std::vector<int64_t>& offsets,
                              std::string_view what) = 0;
  /// Results of dispatched rows, [R', D], in the order of dispatch's input: [R, D].
  virtual Tensor combine(const Tensor& rows, const Dispatched& from, std::string_view what) = 0;
};

/// Every expert is here.
class LocalExperts final : public TokenExchange {
 public:
  Dispatched dispatch(const Tensor& rows,
                      const std::vector<int64_t>& offsets,
                      std::string_view) override {
    return {rows, offsets, nullptr};
  }
  Tensor combine(const Tensor& rows, const Dispatched&, std::string_view) override { return rows; }
};

}  // namespace lockstep::model

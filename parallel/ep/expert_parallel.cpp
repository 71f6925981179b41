#include "parallel/ep/expert_parallel.hpp"

#include <algorithm>
#include <numeric>
#include <string>
#include <utility>

#include "model/base/stash.hpp"
#include "model/base/tensor_memory.hpp"

namespace lockstep::parallel {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

/// Sums of runs: bounds {0, a, a + b, ...}.
std::vector<int64_t> bounds_of(const std::vector<int64_t>& counts) {
  std::vector<int64_t> bounds{0};
  for (int64_t c : counts) bounds.push_back(bounds.back() + c);
  return bounds;
}

/// What one call of dispatch decided: who sends how many rows to whom, and the order of what
/// arrives.
struct Route final : model::ExchangePlan, c10::intrusive_ptr_target {
  explicit Route(Group group_in) : group(std::move(group_in)) {}
  Group group;
  std::vector<int64_t> send, receive;  ///< rows to and from each rank
  Tensor order;    ///< [R'] position in (source rank, expert) order of each row here
  Tensor inverse;  ///< [R'] position here of each received row
};

/// Rows to the experts' ranks (there) or back; the gradient takes the other way.
class Travel : public torch::autograd::Function<Travel> {
 public:
  static Tensor forward(AutogradContext* ctx,
                        const Tensor& rows,
                        const std::shared_ptr<Route>& route,
                        bool there,
                        std::string_view what) {
    ctx->saved_data["there"] = there;
    ctx->saved_data["what"] = std::string(what);
    stash(ctx, route);
    return move(rows, *route, there, what);
  }
  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    const Tensor grad = move(grads[0],
                             *stashed<std::shared_ptr<Route>>(ctx),
                             !ctx->saved_data["there"].toBool(),
                             ctx->saved_data["what"].toStringRef() + " gradient");
    return {grad, Tensor(), Tensor(), Tensor()};
  }

 private:
  static Tensor move(const Tensor& rows, const Route& route, bool there, std::string_view what) {
    const auto buffer = [](auto&& make) {
      const MemoryScope memory(MemoryKind::kExchange);
      return make();
    };
    if (there) {
      return buffer([&] {
               return route.group.all_to_all_rows(
                   rows.contiguous(), route.send, route.receive, what);
             })
          .index_select(0, route.order);
    }
    return route.group.all_to_all_rows(buffer([&] { return rows.index_select(0, route.inverse); }),
                                       route.receive,
                                       route.send,
                                       what);
  }
};

class ExpertParallel final : public model::TokenExchange {
 public:
  ExpertParallel(Group group, std::vector<int64_t> cuts)
      : group_(std::move(group)), cuts_(std::move(cuts)) {}

  model::Dispatched dispatch(const Tensor& rows,
                             const std::vector<int64_t>& offsets,
                             const Tensor& tags,
                             std::string_view what) override {
    const auto route = std::make_shared<Route>(group_);
    const int64_t size = group_.size();
    const int64_t mine =
        cuts_[static_cast<size_t>(group_.rank()) + 1] - cuts_[static_cast<size_t>(group_.rank())];
    // Rows of each (source rank, local expert).
    Tensor counts = at::empty({cuts_.back()}, at::kLong);
    std::vector<int64_t> to, from(static_cast<size_t>(size), mine);
    for (int64_t e = 0; e < cuts_.back(); ++e) {
      const auto i = static_cast<size_t>(e);
      counts.mutable_data_ptr<int64_t>()[e] = offsets[i + 1] - offsets[i];
    }
    for (int64_t r = 0; r < size; ++r) {
      const auto first = static_cast<size_t>(cuts_[static_cast<size_t>(r)]),
                 last = static_cast<size_t>(cuts_[static_cast<size_t>(r) + 1]);
      to.push_back(static_cast<int64_t>(last - first));
      route->send.push_back(offsets[last] - offsets[first]);
    }
    const Tensor arriving = group_.all_to_all_rows(counts, to, from, std::string(what) + " counts");
    const int64_t* count = arriving.const_data_ptr<int64_t>();
    for (int64_t r = 0; r < size; ++r)
      route->receive.push_back(
          std::accumulate(count + r * mine, count + (r + 1) * mine, int64_t{0}));

    // They arrive by (source rank, expert) and are wanted by (expert, source rank).
    const std::vector<int64_t> starts = bounds_of({count, count + size * mine});
    model::Dispatched result;
    result.offsets.push_back(0);
    route->order = at::empty({starts.back()}, at::kLong);
    int64_t* order = route->order.mutable_data_ptr<int64_t>();
    for (int64_t e = 0; e < mine; ++e) {
      for (int64_t r = 0; r < size; ++r) {
        const auto run = static_cast<size_t>(r * mine + e);
        std::iota(order, order + (starts[run + 1] - starts[run]), starts[run]);
        order += starts[run + 1] - starts[run];
      }
      result.offsets.push_back(order - route->order.const_data_ptr<int64_t>());
    }
    route->inverse = at::empty_like(route->order);
    route->inverse.index_put_({route->order}, at::arange(starts.back(), at::kLong));

    if (tags.defined()) {
      // The same block of two ranks is two blocks.
      const Tensor arrived = group_
                                 .all_to_all_rows((tags + (group_.rank() << 32)).contiguous(),
                                                  route->send,
                                                  route->receive,
                                                  std::string(what) + " blocks")
                                 .index_select(0, route->order);
      result.blocks = model::runs_of_tags(arrived, result.offsets);
    }
    result.rows = Travel::apply(rows, route, true, what);
    result.plan = route;
    return result;
  }

  Tensor combine(const Tensor& rows,
                 const model::Dispatched& from,
                 std::string_view what) override {
    return Travel::apply(rows, std::static_pointer_cast<Route>(from.plan), false, what);
  }

 private:
  Group group_;
  std::vector<int64_t> cuts_;
};

void check_cuts(const Group& group, const std::vector<int64_t>& cuts) {
  LOCKSTEP_CHECK(static_cast<int64_t>(cuts.size()) == group.size() + 1 && cuts.front() == 0 &&
                     std::is_sorted(cuts.begin(), cuts.end()),
                 kMesh,
                 "expert parallelism: {} cuts for {} ranks must start at 0 and not decrease",
                 cuts.size(),
                 group.size());
}

}  // namespace

std::unique_ptr<model::TokenExchange> expert_parallel(const Group& group,
                                                      std::vector<int64_t> cuts) {
  check_cuts(group, cuts);
  return std::make_unique<ExpertParallel>(group, std::move(cuts));
}

}  // namespace lockstep::parallel

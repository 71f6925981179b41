// Dispatch and combine from plain all-gathers: every rank sees every row and takes what is its.
#include <utility>

#include "parallel/ep/expert_parallel.hpp"

namespace lockstep::parallel {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

struct GatheredRows final : model::ExchangePlan {
  std::vector<int64_t> rows_of_rank;  ///< before dispatch
  Tensor mine;                        ///< position in the gathered rows of each row here
  std::vector<int64_t> taken;         ///< rows of each rank after dispatch
  Tensor back;  ///< position in the gathered results of each of this rank's own rows
};

/// All rows of all ranks; backward: the sum over ranks of this rank's part, of whose terms all but
/// one are zero.
class GatherAll : public torch::autograd::Function<GatherAll> {
 public:
  static Tensor forward(AutogradContext* ctx,
                        const Tensor& rows,
                        const Group* group,
                        const std::vector<int64_t>& counts,
                        std::string_view what) {
    ctx->saved_data["group"] = reinterpret_cast<int64_t>(group);
    ctx->saved_data["counts"] = counts;
    ctx->saved_data["what"] = std::string(what);
    return group->all_gather_rows(rows.contiguous(), counts, what);
  }
  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    // NOLINTNEXTLINE(performance-no-int-to-ptr): a saved value cannot be a pointer
    const auto* group = reinterpret_cast<const Group*>(ctx->saved_data["group"].toInt());
    return {group->reduce_scatter_rows(grads[0].contiguous(),
                                       ctx->saved_data["counts"].toIntVector(),
                                       ctx->saved_data["what"].toStringRef() + " gradient"),
            Tensor(),
            Tensor(),
            Tensor()};
  }
};

class GatheredExperts final : public model::TokenExchange {
 public:
  GatheredExperts(Group group, std::vector<int64_t> cuts)
      : group_(std::move(group)), cuts_(std::move(cuts)) {}

  model::Dispatched dispatch(const Tensor& rows,
                             const std::vector<int64_t>& offsets,
                             const Tensor& tags,
                             std::string_view what) override {
    const auto plan = std::make_shared<GatheredRows>();
    const auto size = static_cast<size_t>(group_.size());
    const auto me = static_cast<size_t>(group_.rank());
    const int64_t bounds = static_cast<int64_t>(offsets.size());
    const Tensor all_offsets = group_.all_gather_rows(
        at::tensor(offsets), std::vector<int64_t>(size, bounds), std::string(what) + " offsets");
    const auto offset = [&](size_t rank, int64_t expert) {
      return all_offsets.const_data_ptr<int64_t>()[static_cast<int64_t>(rank) * bounds + expert];
    };
    std::vector<int64_t> first_row{0};  // of each rank in the gathered rows
    for (size_t r = 0; r < size; ++r) {
      plan->rows_of_rank.push_back(offset(r, bounds - 1));
      first_row.push_back(first_row.back() + plan->rows_of_rank.back());
    }
    // Rows after dispatch, of every owner in turn, by (expert, source rank, source row).
    model::Dispatched result;
    result.offsets.push_back(0);
    std::vector<int64_t> mine, back(static_cast<size_t>(plan->rows_of_rank[me]));
    int64_t position = 0;
    for (size_t owner = 0; owner < size; ++owner) {
      const int64_t before = position;
      for (int64_t e = cuts_[owner]; e < cuts_[owner + 1]; ++e) {
        for (size_t r = 0; r < size; ++r) {
          for (int64_t row = offset(r, e); row < offset(r, e + 1); ++row, ++position) {
            if (owner == me) mine.push_back(first_row[r] + row);
            if (r == me) back[static_cast<size_t>(row)] = position;
          }
        }
        if (owner == me) result.offsets.push_back(static_cast<int64_t>(mine.size()));
      }
      plan->taken.push_back(position - before);
    }
    plan->mine = at::tensor(mine, at::kLong);
    plan->back = at::tensor(back, at::kLong);
    result.rows =
        GatherAll::apply(rows, &group_, plan->rows_of_rank, what).index_select(0, plan->mine);
    result.plan = plan;
    if (tags.defined()) {
      const Tensor arrived = group_
                                 .all_gather_rows((tags + (group_.rank() << 32)).contiguous(),
                                                  plan->rows_of_rank,
                                                  std::string(what) + " blocks")
                                 .index_select(0, plan->mine);
      result.blocks = model::runs_of_tags(arrived, result.offsets);
    }
    return result;
  }

  Tensor combine(const Tensor& rows,
                 const model::Dispatched& from,
                 std::string_view what) override {
    const auto plan = std::static_pointer_cast<GatheredRows>(from.plan);
    return GatherAll::apply(rows, &group_, plan->taken, what).index_select(0, plan->back);
  }

 private:
  Group group_;
  std::vector<int64_t> cuts_;
};

}  // namespace

std::unique_ptr<model::TokenExchange> expert_parallel_reference(const Group& group,
                                                                std::vector<int64_t> cuts) {
  return std::make_unique<GatheredExperts>(group, std::move(cuts));
}

}  // namespace lockstep::parallel

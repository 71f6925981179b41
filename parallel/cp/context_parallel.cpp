#include "parallel/cp/context_parallel.hpp"

#include <algorithm>
#include <string>
#include <utility>

namespace lockstep::parallel {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// Messages between two ranks are matched in order, so two tags are enough: states go right, their
// gradients go left.
constexpr int kStateTag = 11, kStateGradTag = 12;

class Shards {
 public:
  Shards(const Group& group, std::vector<int64_t> cuts) : group_(group), cuts_(std::move(cuts)) {
    for (size_t r = 0; r + 1 < cuts_.size(); ++r) rows_.push_back(cuts_[r + 1] - cuts_[r]);
  }
  [[nodiscard]] const Group& group() const { return group_; }
  [[nodiscard]] const std::vector<int64_t>& rows() const { return rows_; }
  [[nodiscard]] int64_t begin() const { return cuts_[static_cast<size_t>(group_.rank())]; }
  [[nodiscard]] int64_t begin(int64_t rank) const { return cuts_[static_cast<size_t>(rank)]; }
  [[nodiscard]] int64_t end(int64_t rank) const { return cuts_[static_cast<size_t>(rank) + 1]; }

  /// Nearest rank with tokens to the left or right. Only asked for when a document crosses, so it
  /// exists.
  [[nodiscard]] int64_t left() const { return next(-1); }
  [[nodiscard]] int64_t right() const { return next(1); }

 private:
  [[nodiscard]] int64_t next(int64_t step) const {
    int64_t rank = group_.rank() + step;
    while (rank >= 0 && rank < group_.size() && rows_[static_cast<size_t>(rank)] == 0) rank += step;
    LOCKSTEP_CHECK(rank >= 0 && rank < group_.size(),
                   kInternal,
                   "context parallelism: rank {} has no neighbour with tokens",
                   group_.rank());
    return rank;
  }

  Group group_;
  std::vector<int64_t> cuts_, rows_;
};

/// Autograd nodes keep the shards by address; the seam that owns them outlives every graph built
/// with it.
void remember(AutogradContext* ctx, const Shards& shards, std::string_view what) {
  ctx->saved_data["shards"] = reinterpret_cast<int64_t>(&shards);
  ctx->saved_data["what"] = std::string(what);
}
const Shards& shards_of(AutogradContext* ctx) {
  return *reinterpret_cast<const Shards*>(ctx->saved_data["shards"].toInt());
}
std::string what_of(AutogradContext* ctx) {
  return ctx->saved_data["what"].toStringRef() + " gradient";
}

class GatherRows : public torch::autograd::Function<GatherRows> {
 public:
  static Tensor forward(AutogradContext* ctx,
                        const Tensor& local,
                        const Shards* shards,
                        const std::vector<int64_t>& rows,
                        std::string_view what) {
    remember(ctx, *shards, what);
    ctx->saved_data["rows"] = rows;
    return shards->group().all_gather_rows(local.contiguous(), rows, what);
  }
  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    const Tensor sum = shards_of(ctx).group().reduce_scatter_rows(
        grads[0].contiguous(), ctx->saved_data["rows"].toIntVector(), what_of(ctx));
    return {sum, Tensor(), Tensor(), Tensor()};
  }
};

/// Receives a state from the left; its gradient goes back there.
class ReceiveState : public torch::autograd::Function<ReceiveState> {
 public:
  static Tensor forward(AutogradContext* ctx,
                        const Tensor& anchor,
                        const Shards* shards,
                        const std::vector<int64_t>& sizes,
                        at::ScalarType dtype,
                        std::string_view what) {
    remember(ctx, *shards, what);
    (void)anchor;  // gives the node a place in the graph
    Tensor state = at::empty(sizes, at::TensorOptions(dtype));
    shards->group().recv(state, shards->left(), kStateTag, what);
    return state;
  }
  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    const Shards& shards = shards_of(ctx);
    shards.group().send(grads[0].contiguous(), shards.left(), kStateGradTag, what_of(ctx));
    return {Tensor(), Tensor(), Tensor(), Tensor(), Tensor()};
  }
};

/// Sends a state to the right; its gradient comes from there. `o` passes through, so that the node
/// runs before o's producer.
class SendState : public torch::autograd::Function<SendState> {
 public:
  static Tensor forward(AutogradContext* ctx,
                        const Tensor& o,
                        const Tensor& state,
                        const Shards* shards,
                        std::string_view what) {
    remember(ctx, *shards, what);
    ctx->saved_data["sizes"] = state.sizes().vec();
    ctx->saved_data["dtype"] = static_cast<int64_t>(state.scalar_type());
    shards->group().send(state.contiguous(), shards->right(), kStateTag, what);
    return o.view_as(o);
  }
  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    const Shards& shards = shards_of(ctx);
    Tensor grad =
        at::empty(ctx->saved_data["sizes"].toIntVector(),
                  at::TensorOptions(static_cast<at::ScalarType>(ctx->saved_data["dtype"].toInt())));
    shards.group().recv(grad, shards.right(), kStateGradTag, what_of(ctx));
    return {grads[0], grad, Tensor(), Tensor()};
  }
};

class ContextParallel final : public model::SequenceSeam {
 public:
  ContextParallel(const Group& group, std::vector<int64_t> cuts)
      : shards_(group, std::move(cuts)) {}

  [[nodiscard]] bool is_local() const override { return false; }

  Tensor gather_rows(const Tensor& local, std::string_view what) override {
    return GatherRows::apply(local, &shards_, shards_.rows(), what);
  }

  Tensor conv_halo(const Tensor& x,
                   int64_t width,
                   const Packing& packing,
                   std::string_view what) override {
    const int64_t depth = width - 1, size = shards_.group().size();
    if (depth == 0) return {};
    // Every rank contributes its last `depth` rows, padded in front; a rank with fewer is looked
    // through to the one before it.
    const int64_t have = std::min(depth, x.size(0));
    Tensor tail = x.narrow(0, x.size(0) - have, have);
    if (have < depth) tail = at::cat({at::zeros({depth - have, x.size(1)}, x.options()), tail}, 0);
    const Tensor tails = GatherRows::apply(
        tail, &shards_, std::vector<int64_t>(static_cast<size_t>(size), depth), what);
    if (!packing.continues_from_left()) return keep_in_graph(tails, packing, depth, x.size(1));

    const Segment& first = packing.segments().front();
    std::vector<Tensor> rows;
    for (int64_t back = depth; back >= 1; --back) {
      if (back > first.position) {
        rows.push_back(at::zeros({1, x.size(1)}, x.options()));
        continue;
      }
      const int64_t global = shards_.begin() - back;
      int64_t owner = shards_.group().rank() - 1;
      while (shards_.begin(owner) > global) --owner;
      rows.push_back(tails.narrow(0, owner * depth + depth - (shards_.end(owner) - global), 1));
    }
    Tensor halo = at::cat(rows, 0).unsqueeze(0);
    const auto others = static_cast<int64_t>(packing.segments().size()) - 1;
    if (others > 0) halo = at::cat({halo, at::zeros({others, depth, x.size(1)}, x.options())}, 0);
    return halo;
  }

  Tensor initial_state(const Tensor& anchor,
                       at::IntArrayRef sizes,
                       at::ScalarType dtype,
                       const Packing& packing,
                       std::string_view what) override {
    if (!packing.continues_from_left()) return {};
    std::vector<int64_t> shape{1};
    shape.insert(shape.end(), sizes.begin(), sizes.end());
    const Tensor first = ReceiveState::apply(anchor, &shards_, shape, dtype, what);
    const auto others = static_cast<int64_t>(packing.segments().size()) - 1;
    if (others == 0) return first;
    shape[0] = others;
    return at::cat({first, at::zeros(shape, first.options())}, 0);
  }

  Tensor hand_over(const Tensor& o,
                   const Tensor& final_state,
                   const Packing& packing,
                   std::string_view what) override {
    if (!packing.continues_to_right()) return o;
    return SendState::apply(o, final_state.narrow(0, final_state.size(0) - 1, 1), &shards_, what);
  }

 private:
  /// The gather's backward is collective, so a rank that uses none of the gathered rows must still
  /// run it: its halo is zeros that depend on them.
  static Tensor keep_in_graph(const Tensor& tails,
                              const Packing& packing,
                              int64_t depth,
                              int64_t channels) {
    const auto segments = static_cast<int64_t>(packing.segments().size());
    return at::zeros({segments, depth, channels}, tails.options()) + tails.narrow(0, 0, 0).sum(0);
  }

  Shards shards_;
};

}  // namespace

std::unique_ptr<model::SequenceSeam> context_parallel(const Group& group,
                                                      std::vector<int64_t> cuts) {
  LOCKSTEP_CHECK(static_cast<int64_t>(cuts.size()) == group.size() + 1 && cuts.front() == 0 &&
                     std::is_sorted(cuts.begin(), cuts.end()),
                 kMesh,
                 "context parallelism: {} cuts for {} ranks must start at 0 and not decrease",
                 cuts.size(),
                 group.size());
  return std::make_unique<ContextParallel>(group, std::move(cuts));
}

}  // namespace lockstep::parallel

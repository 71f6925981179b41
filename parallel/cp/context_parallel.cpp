#include "parallel/cp/context_parallel.hpp"

#include <algorithm>
#include <string>
#include <utility>

#include "model/base/stash.hpp"
#include "parallel/comm/autograd.hpp"

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
  // NOLINTNEXTLINE(performance-no-int-to-ptr): a saved value cannot be a pointer
  return *reinterpret_cast<const Shards*>(ctx->saved_data["shards"].toInt());
}
std::string what_of(AutogradContext* ctx) {
  return ctx->saved_data["what"].toStringRef() + " gradient";
}

/// Rows of all ranks; the gradient is an exact sum's.
class GatherRowsExact : public torch::autograd::Function<GatherRowsExact> {
 public:
  static Tensor forward(AutogradContext* ctx,
                        const Tensor& local,
                        const Shards* shards,
                        const ExactSum& sum,
                        std::string_view what) {
    remember(ctx, *shards, what);
    stash(ctx, sum);
    ctx->saved_data["dtype"] = static_cast<int64_t>(local.scalar_type());
    ctx->set_materialize_grads(false);
    return shards->group().all_gather_rows(local.contiguous(), shards->rows(), what);
  }
  static variable_list backward(AutogradContext* ctx, const variable_list&) {
    const Tensor pairs = stashed<ExactSum>(ctx).pairs();
    ExactSum::carry(pairs);
    // Rows first: [rows, 2, ...].
    const Tensor mine = shards_of(ctx).group().reduce_scatter_rows(
        pairs.transpose(0, 1).contiguous(), shards_of(ctx).rows(), what_of(ctx));
    const Tensor value = ExactSum::value_of(mine.transpose(0, 1), what_of(ctx));
    return {value.to(static_cast<at::ScalarType>(ctx->saved_data["dtype"].toInt())),
            Tensor(),
            Tensor(),
            Tensor()};
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

/// The documents of a row as chains of ranks, and the maps of their segments.
struct StateLink : torch::CustomClassHolder {
  StateLink(const Shards& shards, const Packing& packing) {
    for (int64_t rank = 0; rank < shards.group().size(); ++rank) {
      const Packing part = packing.shard(shards.begin(rank), shards.end(rank));
      empty.push_back(part.local_tokens() == 0);
      from_left.push_back(part.continues_from_left());
      to_right.push_back(part.continues_to_right());
      // Of a rank in mid-document the only segment is first and last.
      through.push_back(part.continues_from_left() && part.continues_to_right() &&
                        part.segments().size() == 1);
    }
  }

  /// State that enters rank `me`: S <- A_j S + B_j over the ranks of its document before it, in
  /// order.
  [[nodiscard]] Tensor entry(int64_t me) const {
    Tensor state;
    const std::vector<size_t> ranks = chain(me, -1);
    for (auto r = ranks.rbegin(); r != ranks.rend(); ++r) {
      const Tensor bias = maps[static_cast<int64_t>(*r)][1];
      state = state.defined() ? transition(*r).matmul(state) + bias : bias;
    }
    return state;
  }

  /// Gradient of the state that leaves rank `me`, from every rank's gradient of its entry state:
  /// G_r = b_(r+1) + A_(r+1)^T G_(r+1).
  [[nodiscard]] Tensor exit_gradient(int64_t me, const Tensor& entry_gradients) const {
    Tensor grad;
    const std::vector<size_t> ranks = chain(me, 1);
    for (auto r = ranks.rbegin(); r != ranks.rend(); ++r) {
      const Tensor own = entry_gradients[static_cast<int64_t>(*r)];
      grad = grad.defined() ? transition(*r).transpose(-1, -2).matmul(grad) + own : own;
    }
    return grad;
  }

  std::vector<bool> empty, from_left, to_right, through;  ///< by rank
  Tensor maps;                                            ///< [ranks, 2, sizes...]
  std::function<Tensor(const Tensor& dout)> entry_gradient;

 private:
  /// The other ranks of the document that crosses `me`'s edge on that side, nearest first.
  [[nodiscard]] std::vector<size_t> chain(int64_t me, int64_t step) const {
    std::vector<size_t> ranks;
    int64_t rank = me;
    do {
      rank += step;
      while (empty[static_cast<size_t>(rank)]) rank += step;
      ranks.push_back(static_cast<size_t>(rank));
    } while (through[ranks.back()]);
    return ranks;
  }
  [[nodiscard]] Tensor transition(size_t rank) const { return maps[static_cast<int64_t>(rank)][0]; }
};

/// `o` passes through. Backward runs before the recurrence's own: it finds the gradient of the
/// final state from those of the entry states of the ranks behind, and gives it to the recurrence.
class ComposeStates : public torch::autograd::Function<ComposeStates> {
 public:
  static Tensor forward(AutogradContext* ctx,
                        const Tensor& o,
                        const Tensor& final_state,
                        const Shards* shards,
                        const c10::intrusive_ptr<StateLink>& link,
                        std::string_view what) {
    remember(ctx, *shards, what);
    ctx->saved_data["link"] = c10::IValue::make_capsule(link);
    ctx->saved_data["sizes"] = final_state.sizes().vec();
    ctx->saved_data["dtype"] = static_cast<int64_t>(final_state.scalar_type());
    return o.view_as(o);
  }
  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    const Shards& shards = shards_of(ctx);
    const auto link =
        c10::static_intrusive_pointer_cast<StateLink>(ctx->saved_data["link"].toCapsule());
    const std::vector<int64_t> sizes = ctx->saved_data["sizes"].toIntVector();
    const int64_t me = shards.group().rank();
    Tensor final_grad = at::zeros(
        sizes, at::TensorOptions(static_cast<at::ScalarType>(ctx->saved_data["dtype"].toInt())));
    std::vector<int64_t> one = sizes;
    one[0] = 1;
    Tensor own = at::zeros(one, final_grad.options());
    if (link->from_left[static_cast<size_t>(me)]) own[0].copy_(link->entry_gradient(grads[0]));
    const Tensor all = shards.group().all_gather_rows(
        own, std::vector<int64_t>(static_cast<size_t>(shards.group().size()), 1), what_of(ctx));
    if (link->to_right[static_cast<size_t>(me)])
      final_grad[sizes[0] - 1].copy_(link->exit_gradient(me, all));
    return {grads[0], final_grad, Tensor(), Tensor(), Tensor()};
  }
};

class ContextParallel final : public model::SequenceSeam {
 public:
  ContextParallel(const Group& group, std::vector<int64_t> cuts, bool handover)
      : shards_(group, std::move(cuts)), handover_(handover) {}

  [[nodiscard]] bool is_local() const override { return false; }

  Tensor gather_rows(const Tensor& local, std::string_view what) override {
    return parallel::gather_rows(
        shards_.group(), local, shards_.rows(), GatheredUse::kDiffers, what);
  }

  Tensor gather_rows_exact(const Tensor& local,
                           const ExactSum& sum,
                           std::string_view what) override {
    return GatherRowsExact::apply(local, &shards_, sum, what);
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
    const Tensor tails =
        parallel::gather_rows(shards_.group(),
                              tail,
                              std::vector<int64_t>(static_cast<size_t>(size), depth),
                              GatheredUse::kDiffers,
                              what);
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

  Tensor recur(const model::Recurrence& recurrence,
               const Packing& packing,
               std::string_view what) override {
    return handover_ ? hand_over(recurrence, packing, what) : compose(recurrence, packing, what);
  }

 private:
  /// States of the local segments when the first is entered with `first` [1, sizes...].
  static Tensor entry_states(const Tensor& first, const Packing& packing) {
    const auto others = static_cast<int64_t>(packing.segments().size()) - 1;
    if (others == 0) return first;
    std::vector<int64_t> shape = first.sizes().vec();
    shape[0] = others;
    return at::cat({first, at::zeros(shape, first.options())}, 0);
  }

  /// Waits for the state of the rank before, and hands its own to the next: the serial recurrence.
  Tensor hand_over(const model::Recurrence& recurrence,
                   const Packing& packing,
                   std::string_view what) {
    Tensor state;
    if (packing.continues_from_left()) {
      std::vector<int64_t> shape{1};
      shape.insert(shape.end(), recurrence.sizes.begin(), recurrence.sizes.end());
      state = entry_states(
          ReceiveState::apply(recurrence.anchor, &shards_, shape, recurrence.dtype, what), packing);
    }
    const model::Recurrence::Result result = recurrence.run(state);
    if (!packing.continues_to_right()) return result.o;
    const Tensor& last = result.final_state;
    return SendState::apply(result.o, last.narrow(0, last.size(0) - 1, 1), &shards_, what);
  }

  /// Every rank turns its last segment into a map; all gather the maps, and each composes those of
  /// the ranks before it in its document. No rank waits for another's recurrence.
  Tensor compose(const model::Recurrence& recurrence,
                 const Packing& packing,
                 std::string_view what) {
    auto link = c10::make_intrusive<StateLink>(shards_, packing);
    const int64_t me = shards_.group().rank();
    const auto size = static_cast<size_t>(shards_.group().size());
    std::vector<int64_t> shape{2};
    shape.insert(shape.end(), recurrence.sizes.begin(), recurrence.sizes.end());
    Tensor state;
    {
      const at::NoGradGuard no_grad;
      Tensor map = at::zeros(shape, at::TensorOptions(recurrence.dtype));
      if (packing.continues_to_right()) {
        const auto [transition, bias] = recurrence.last_segment_map();
        map[0].copy_(transition);
        map[1].copy_(bias);
      }
      link->maps =
          shards_.group().all_gather_rows(map.unsqueeze(0), std::vector<int64_t>(size, 1), what);
      if (packing.continues_from_left())
        state = entry_states(link->entry(me).unsqueeze(0), packing);
    }
    const model::Recurrence::Result result = recurrence.run(state);
    if (!result.o.requires_grad()) return result.o;
    link->entry_gradient = [gradient = recurrence.entry_gradient, state](const Tensor& dout) {
      return gradient(state, dout);
    };
    return ComposeStates::apply(result.o, result.final_state, &shards_, link, what);
  }

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
  bool handover_;
};

}  // namespace

std::unique_ptr<model::SequenceSeam> context_parallel(const Group& group,
                                                      std::vector<int64_t> cuts,
                                                      bool handover) {
  LOCKSTEP_CHECK(static_cast<int64_t>(cuts.size()) == group.size() + 1 && cuts.front() == 0 &&
                     std::is_sorted(cuts.begin(), cuts.end()),
                 kMesh,
                 "context parallelism: {} cuts for {} ranks must start at 0 and not decrease",
                 cuts.size(),
                 group.size());
  return std::make_unique<ContextParallel>(group, std::move(cuts), handover);
}

}  // namespace lockstep::parallel

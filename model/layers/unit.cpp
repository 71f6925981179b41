#include "model/layers/unit.hpp"

#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>

#include <map>
#include <memory>
#include <utility>

namespace lockstep::model {
namespace {

using torch::autograd::Node;
using torch::autograd::variable_list;

/// Hands out each parameter as one leaf per run.
class LeafView final : public ParamView {
 public:
  explicit LeafView(ParamView& inner) : inner_(inner) {}

  Tensor get(const std::string& name) override {
    const auto found = index_.find(name);
    if (found != index_.end()) return leaves_[found->second];
    Tensor leaf = inner_.get(name).detach();
    if (at::GradMode::is_enabled() && inner_.wants_grad(name)) leaf.requires_grad_(true);
    index_.emplace(name, leaves_.size());
    names_.push_back(name);
    leaves_.push_back(leaf);
    return leaf;
  }
  [[nodiscard]] bool wants_grad(const std::string& name) const override {
    return inner_.wants_grad(name);
  }

  [[nodiscard]] const std::vector<std::string>& names() const { return names_; }
  [[nodiscard]] const variable_list& leaves() const { return leaves_; }

 private:
  ParamView& inner_;
  std::map<std::string, size_t> index_;
  std::vector<std::string> names_;
  variable_list leaves_;
};

/// A run of the body with gradients on.
struct InnerGraph {
  InnerGraph(const LayerContext& ctx, const Tensor& outer_x, const UnitBody& body, TraceSink* trace)
      : view(ctx.params) {
    const at::AutoGradMode enable(true);
    if (outer_x.defined()) x = outer_x.detach().requires_grad_(outer_x.requires_grad());
    LayerContext inner = ctx.with(view, trace);
    if (ctx.num.invariant()) {
      inner.blocks = std::make_shared<const std::vector<int64_t>>(ctx.packing.tile_bounds());
      inner.sums = &sums;
    }
    out = body(inner, x);
  }
  LeafView view;
  GradientSums sums;  ///< of an invariant policy
  Tensor x, out;
};

class UnitNode final : public Node {
 public:
  /// Keeps `graph`, or runs the body again when it is null.
  UnitNode(const LayerContext& ctx,
           int64_t unit,
           Tensor x,
           UnitBody body,
           std::unique_ptr<InnerGraph> graph)
      : ctx_(ctx),
        unit_(unit),
        x_(std::move(x)),
        body_(std::move(body)),
        graph_(std::move(graph)) {}

  variable_list apply(variable_list&& grads) override {
    ctx_.params.enter(unit_, Pass::kBackward);
    if (!graph_) graph_ = std::make_unique<InnerGraph>(ctx_, x_, body_, nullptr);
    variable_list wanted;
    if (graph_->x.defined() && graph_->x.requires_grad()) wanted.push_back(graph_->x);
    const size_t first_param = wanted.size();
    std::vector<std::string> names;
    for (size_t i = 0; i < graph_->view.leaves().size(); ++i) {
      const Tensor& leaf = graph_->view.leaves()[i];
      if (!leaf.requires_grad()) continue;
      wanted.push_back(leaf);
      names.push_back(graph_->view.names()[i]);
    }
    variable_list found;
    if (!wanted.empty() && graph_->out.requires_grad())
      found = torch::autograd::grad({graph_->out}, wanted, {grads[0]}, std::nullopt, false, true);
    found.resize(wanted.size());
    const GradientSums sums = std::move(graph_->sums);
    graph_.reset();  // activations go before the gradients are reduced
    std::vector<NamedGrad> named;
    for (size_t i = 0; i < names.size(); ++i) {
      const Tensor& grad = found[first_param + i];
      const auto sum = sums.find(names[i]);
      LOCKSTEP_CHECK(sum == sums.end() || !grad.defined(),
                     kInternal,
                     "unit {}: an operator formed the gradient of {} beside its exact sum; in the "
                     "invariant policies only the fast operators have gradients",
                     unit_,
                     names[i]);
      if (grad.defined()) named.push_back({names[i], grad, {}});
      if (sum != sums.end() && !sum->second.empty())
        named.push_back({names[i], {}, sum->second.pairs()});
    }
    ctx_.params.add_grads(unit_, std::move(named));
    ctx_.params.leave(unit_, Pass::kBackward);
    variable_list result(next_edges().size());
    if (first_param == 1) result[0] = found[0];
    return result;
  }

  std::string name() const override { return "LockstepUnit"; }
  void release_variables() override { x_ = Tensor(); }

 private:
  LayerContext ctx_;
  int64_t unit_;
  Tensor x_;
  UnitBody body_;
  std::unique_ptr<InnerGraph> graph_;
};

}  // namespace

Tensor run_unit(
    const LayerContext& ctx, int64_t unit, const Tensor& x, bool recompute, UnitBody body) {
  std::unique_ptr<InnerGraph> graph;
  Tensor out;
  ctx.params.enter(unit, Pass::kForward);
  if (at::GradMode::is_enabled() && !recompute) {
    graph = std::make_unique<InnerGraph>(ctx, x, body, ctx.trace);
    out = graph->out.detach();
  } else {
    const at::NoGradGuard no_grad;
    out = body(ctx, x);
  }
  ctx.params.leave(unit, Pass::kForward);
  if (!at::GradMode::is_enabled()) return out;

  LayerContext kept = ctx;
  kept.trace = nullptr;
  const std::shared_ptr<Node> node(
      new UnitNode(kept, unit, recompute ? x : Tensor(), std::move(body), std::move(graph)),
      torch::autograd::deleteNode);
  node->set_next_edges(x.defined() ? torch::autograd::collect_next_edges(x)
                                   : torch::autograd::edge_list());
  torch::autograd::set_history(out, node);
  return out;
}

}  // namespace lockstep::model

#include "model/layers/recompute.hpp"

#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>

#include <memory>
#include <utility>

#include "model/layers/decoder.hpp"

namespace lockstep::model {
namespace {

using torch::autograd::Node;
using torch::autograd::variable_list;

/// Remembers which parameters a layer asks for, so that they can become inputs of the autograd
/// node.
class RecordingView final : public ParamView {
 public:
  explicit RecordingView(ParamView& inner) : inner_(inner) {}
  Tensor get(const std::string& name) override {
    Tensor value = inner_.get(name);
    bool seen = false;
    for (const std::string& other : names) seen = seen || other == name;
    if (!seen) {
      names.push_back(name);
      values.push_back(value);
    }
    return value;
  }
  std::vector<std::string> names;
  variable_list values;

 private:
  ParamView& inner_;
};

/// Serves the second run's leaves by the names of the first.
class ReplayView final : public ParamView {
 public:
  ReplayView(const std::vector<std::string>& names, const Tensor* values)
      : names_(names), values_(values) {}
  Tensor get(const std::string& name) override {
    for (size_t i = 0; i < names_.size(); ++i) {
      if (names_[i] == name) return values_[i];
    }
    fail(ErrorKind::kInternal,
         "recompute: the layer asks for {}, which its first forward did not use",
         name);
  }

 private:
  const std::vector<std::string>& names_;
  const Tensor* values_;
};

/// Inputs: X, then the parameters. Backward runs the layer with gradients on and differentiates it.
class RecomputeNode final : public Node {
 public:
  /// The context is copied: its packing must outlive whatever the caller does with its own. The
  /// trace sees the first run only.
  RecomputeNode(const LayerContext& ctx,
                int64_t layer,
                Tensor selection,
                std::vector<std::string> names,
                variable_list inputs)
      : ctx_(ctx),
        layer_(layer),
        selection_(std::move(selection)),
        names_(std::move(names)),
        inputs_(std::move(inputs)) {
    ctx_.trace = nullptr;
  }

  variable_list apply(variable_list&& grads) override {
    variable_list leaves, wanted;
    for (const Tensor& input : inputs_) {
      leaves.push_back(input.detach().requires_grad_(input.requires_grad()));
      if (input.requires_grad()) wanted.push_back(leaves.back());
    }
    const at::AutoGradMode enable(true);
    ReplayView view(names_, leaves.data() + 1);
    const LayerContext ctx{ctx_.config,
                           ctx_.num,
                           ctx_.packing,
                           view,
                           ctx_.sequence,
                           nullptr,
                           ctx_.reference,
                           ctx_.replay};
    Tensor selection = selection_;
    const Tensor out = block(ctx, layer_, leaves[0], selection);
    const variable_list found =
        torch::autograd::grad({out}, wanted, {grads[0]}, std::nullopt, false, true);
    variable_list result;
    size_t next = 0;
    for (const Tensor& leaf : leaves)
      result.push_back(leaf.requires_grad() ? found[next++] : Tensor());
    return result;
  }

  std::string name() const override { return "LockstepRecompute"; }
  void release_variables() override { inputs_.clear(); }

 private:
  LayerContext ctx_;
  int64_t layer_;
  Tensor selection_;
  std::vector<std::string> names_;
  variable_list inputs_;
};

}  // namespace

Tensor recomputed_block(const LayerContext& ctx,
                        int64_t layer,
                        const Tensor& x,
                        Tensor& selection) {
  RecordingView view(ctx.params);
  const Tensor selection_in = selection;
  Tensor out;
  {
    const at::NoGradGuard no_grad;
    const LayerContext first{
        ctx.config, ctx.num, ctx.packing, view, ctx.sequence, ctx.trace, ctx.reference, ctx.replay};
    out = block(first, layer, x, selection);
  }
  variable_list inputs{x};
  inputs.insert(inputs.end(), view.values.begin(), view.values.end());
  bool any = false;
  for (const Tensor& input : inputs) any = any || input.requires_grad();
  if (!any) return out;

  const auto edges = torch::autograd::collect_next_edges(inputs);
  const std::shared_ptr<Node> node(
      new RecomputeNode(ctx, layer, selection_in, std::move(view.names), std::move(inputs)),
      torch::autograd::deleteNode);
  node->set_next_edges(torch::autograd::edge_list(edges));
  torch::autograd::set_history(out, node);
  return out;
}

}  // namespace lockstep::model

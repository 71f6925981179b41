#include "parallel/plan/step_memory.hpp"

#include <algorithm>
#include <map>
#include <numeric>
#include <tuple>

#include "model/layers/layer_memory.hpp"
#include "parallel/optim/muon.hpp"
#include "parallel/plan/placement.hpp"

namespace lockstep::parallel {
namespace {

int64_t product(const std::vector<int64_t>& shape, size_t from) {
  int64_t count = 1;
  for (size_t d = from; d < shape.size(); ++d) count *= shape[d];
  return count;
}

int64_t size_of(at::ScalarType dtype) { return static_cast<int64_t>(c10::elementSize(dtype)); }

/// Bytes alive by kind while a step is walked through.
class Timeline {
 public:
  void add(MemoryKind kind, int64_t bytes) {
    const auto k = static_cast<size_t>(kind);
    use_.now[k] += bytes;
    use_.peak[k] = std::max(use_.peak[k], use_.now[k]);
    const int64_t total = std::accumulate(use_.now.begin(), use_.now.end(), int64_t{0});
    if (total <= use_.peak_total) return;
    use_.peak_total = total;
    use_.at_peak = use_.now;
  }
  /// There and gone.
  void touch(MemoryKind kind, int64_t bytes) {
    add(kind, bytes);
    add(kind, -bytes);
  }
  [[nodiscard]] const MemoryUse& use() const { return use_; }

 private:
  MemoryUse use_;
};

/// Parameters of a unit that travel together; elements, but for `shares` and `kept_dtype`.
struct Bucket {
  int64_t members = 1;       ///< ranks of the group
  int64_t own = 0, all = 0;  ///< of this rank, of all
  int64_t own_trained = 0, all_trained = 0;
  int64_t width = 0;  ///< bytes of an element as it is computed with
  bool expert = false;
  bool copies = true;  ///< false: computed with where it is kept
  [[nodiscard]] MemoryKind kind() const {
    return expert ? MemoryKind::kGatheredExperts : MemoryKind::kGathered;
  }
};

class Step {
 public:
  Step(const StepPlan& plan, int64_t rank)
      : plan_(plan),
        c_(plan.config),
        rank_(rank),
        head_(model::head_unit(plan.config.num_hidden_layers)),
        wide_(size_of(plan.num.acc())),
        sent_(plan.num.invariant() ? 16 : wide_),
        dp_(plan.topology.dp) {
    place_parameters();
    measure_units();
  }

  MemoryUse run() {
    if (plan_.offload == Offload::kNone) time_.add(MemoryKind::kMoments, moments_);
    pass(model::kStemUnit, false);
    for (int64_t layer = 0; layer < c_.num_hidden_layers; ++layer) pass(layer, plan_.recompute);
    pass(head_, false);
    for (int64_t unit = head_; unit >= model::kStemUnit; --unit)
      back(unit, plan_.recompute && unit >= 0 && unit < head_);
    time_.add(MemoryKind::kActivations, -after_);
    if (plan_.offload == Offload::kOptimizer) time_.add(MemoryKind::kMoments, moments_);
    time_.touch(MemoryKind::kActivations, direction_);
    if (plan_.offload == Offload::kOptimizer) time_.add(MemoryKind::kMoments, -moments_);
    return time_.use();
  }

 private:
  void place_parameters() {
    for (const ParamSpec& spec :
         parameter_specs(c_, plan_.num, plan_.topology, coordinates(plan_.topology, rank_))) {
      const CircleRanks shards =
          circle_ranks(plan_.topology, spec.expert ? Circle::kExpertShard : Circle::kShard, rank_);
      const int64_t size = shards.size, row = product(spec.shape, 1),
                    own = even_share(spec.shape[0], size, shards.own) * row,
                    all = spec.shape[0] * row;
      const bool masters = spec.trainable && plan_.offload != Offload::kFull;
      const at::ScalarType kept = masters ? plan_.num.acc() : spec.compute_dtype;
      if (masters) {
        time_.add(MemoryKind::kMasters, own * wide_);
        moments_ += own * wide_ *
                    static_cast<int64_t>(Optimizer::state_names(plan_.optimizer, spec).size());
        if (plan_.optimizer == OptimizerKind::kMuon)
          direction_ = std::max(direction_, direction_bytes(spec, size, own, all));
      } else {
        time_.add(MemoryKind::kWeights, own * size_of(kept));
      }
      const auto join = [&](int64_t unit) {
        const bool copies = size > 1 || kept != spec.compute_dtype;
        Bucket& b = units_[unit][{spec.expert, spec.compute_dtype, copies}];
        b.members = size;
        b.own += own;
        b.all += all;
        b.width = size_of(spec.compute_dtype);
        b.expert = spec.expert;
        b.copies = copies;
        if (!spec.trainable) return;
        b.own_trained += own;
        b.all_trained += all;
      };
      join(spec.unit);
      if (!spec.alias.empty()) join(head_);
    }
  }

  /// While Muon makes the momentum of a parameter orthogonal.
  [[nodiscard]] int64_t direction_bytes(const ParamSpec& spec,
                                        int64_t size,
                                        int64_t own,
                                        int64_t all) const {
    const at::ScalarType dtype = plan_.num.acc();
    const int64_t cols = spec.shape.back();
    switch (muon_matrices(spec)) {
      case MuonMatrices::kNone:
        return 0;
      case MuonMatrices::kRows:
        return orthogonalised_bytes(own, 1, product(spec.shape, 1), dtype);
      case MuonMatrices::kStack:
        return orthogonalised_bytes(own, product(spec.shape, 1) / cols, cols, dtype);
      default:
        return orthogonalised_bytes(all, spec.shape[0], cols, dtype) + (size > 1 ? all * wide_ : 0);
    }
  }

  void measure_units() {
    const Coordinates place = coordinates(plan_.topology, rank_);
    const TokenPlan tokens = plan_.tokens(rank_);
    const model::Topology& t = plan_.topology;
    const auto part = [&](int64_t count) { return even_share(count, t.tp, place.tp); };
    model::PassSizes s;
    s.tokens = tokens.end - tokens.begin;
    s.row_tokens = tokens.cuts.back();
    s.cu = tokens.packing.local_cu_seqlens();
    s.cut_sequence = t.cp > 1;
    s.maps = t.cp > 1 && !plan_.num.is<model::Switch::kCpKdaState>("handover") ? t.cp : int64_t{0};
    s.exchanges = t.ep > 1;
    s.split = t.tp > 1;
    s.splits_sums = plan_.num.is<model::Switch::kTpPartialSums>("tp");
    s.kda_heads = part(c_.linear_num_heads);
    s.mla_heads = part(c_.num_attention_heads);
    s.dense_inner = part(c_.intermediate_size);
    s.shared_inner = part(c_.shared_width());
    s.expert_inner = s.splits_sums ? part(c_.moe_intermediate_size) : c_.moe_intermediate_size;
    const int64_t first = c_.n_routed_experts * place.ep / t.ep,
                  last = c_.n_routed_experts * (place.ep + 1) / t.ep, here = last - first;
    s.num_experts = s.splits_sums ? here : part(here);

    const std::vector<std::pair<int64_t, int64_t>> sources = ep_tokens(plan_, rank_);
    memory_[model::kStemUnit] = model::stem_memory(c_, plan_.num, s);
    memory_[head_] = model::head_memory(c_, plan_.num, s);
    for (int64_t layer = 0; layer < c_.num_hidden_layers; ++layer) {
      const auto [rows, own_rows] = rows_here(sources, layer, first, last, s, place.tp);
      memory_[layer] = model::layer_memory(c_, plan_.num, s, layer, rows, own_rows);
      if (t.ep > 1 && c_.mlps[static_cast<size_t>(layer)] == model::MlpKind::kMoe)
        exchange_[layer] = std::max(rows, s.tokens * c_.num_experts_per_tok) * c_.hidden_size *
                           size_of(plan_.num.act());
    }
  }

  /// Rows of all tokens for the experts of this ep rank, and of those this tp rank's.
  [[nodiscard]] std::pair<int64_t, int64_t> rows_here(
      const std::vector<std::pair<int64_t, int64_t>>& sources,
      int64_t layer,
      int64_t first,
      int64_t last,
      const model::PassSizes& s,
      int64_t tp) const {
    const int64_t split = s.splits_sums ? 1 : plan_.topology.tp, at = s.splits_sums ? 0 : tp;
    const int64_t own_first = first + (last - first) * at / split,
                  own_last = first + (last - first) * (at + 1) / split;
    int64_t rows = 0, own = 0;
    if (!plan_.routes.contains(layer)) {
      for (const auto& [begin, end] : sources) rows += end - begin;
      return {plan_.even_rows(rows, last - first), plan_.even_rows(rows, own_last - own_first)};
    }
    for (const auto& [begin, end] : sources) {
      const std::vector<int64_t> all = expert_rows(plan_, layer, begin, end);
      rows += std::accumulate(all.begin() + first, all.begin() + last, int64_t{0});
      own += std::accumulate(all.begin() + own_first, all.begin() + own_last, int64_t{0});
    }
    return {rows, own};
  }

  void start(Bucket& b) {
    if (b.members == 1 || pending_.contains(&b)) return;
    time_.add(MemoryKind::kExchange, b.own * b.width);
    time_.add(b.kind(), b.all * b.width);
    pending_.emplace(&b, true);
  }
  void finish(Bucket& b) {
    if (b.members == 1) {
      if (b.copies) time_.add(b.kind(), b.all * b.width);
      return;
    }
    time_.add(MemoryKind::kExchange, -b.own * b.width);
    time_.touch(b.kind(), b.all * b.width);
    pending_.erase(&b);
  }
  void enter(int64_t unit, bool forward) {
    if (forward || unit != head_) {
      for (auto& [key, b] : units_[unit]) start(b);
      for (auto& [key, b] : units_[unit]) finish(b);
    }
    const auto next = units_.find(forward ? unit + 1 : unit - 1);
    if (next == units_.end()) return;
    for (auto& [key, b] : next->second) start(b);
  }
  void leave(int64_t unit) {
    for (const auto& [key, b] : units_[unit])
      if (b.copies) time_.add(b.kind(), -b.all * b.width);
  }

  /// Gradients of a unit onto the shards.
  void reduce(int64_t unit) {
    for (const auto& [key, b] : units_[unit]) {
      if (b.all_trained == 0) continue;
      const int64_t all = b.all_trained * sent_, own = b.own_trained * sent_;
      int64_t held = all;
      time_.add(MemoryKind::kExchange, all);
      if (b.members > 1) {
        time_.add(MemoryKind::kExchange, own * b.members);
        time_.add(MemoryKind::kExchange, own);
        time_.add(MemoryKind::kExchange, -own * b.members);
        held += own;
      }
      // This rank's slice of all replicas and its sum; that and the sums of all.
      if (dp_ > 1) time_.touch(MemoryKind::kExchange, own + own / dp_);
      if (plan_.offload == Offload::kFull) {
        time_.touch(MemoryKind::kGradients, b.own_trained * b.width);
      } else {
        time_.add(MemoryKind::kGradients,
                  b.own_trained * (wide_ + (plan_.num.invariant() ? sent_ : 0)));
      }
      time_.add(MemoryKind::kExchange, -held);
    }
  }

  void exchange(int64_t unit) {
    const auto found = exchange_.find(unit);
    if (found != exchange_.end()) time_.touch(MemoryKind::kExchange, found->second);
  }

  void pass(int64_t unit, bool recompute) {
    const model::UnitMemory& m = memory_.at(unit);
    enter(unit, true);
    exchange(unit);
    time_.touch(MemoryKind::kActivations, recompute ? m.forward_only : m.forward);
    time_.add(MemoryKind::kActivations, recompute ? m.output : m.kept);
    time_.add(MemoryKind::kActivations, m.kept_after);
    after_ += m.kept_after;
    if (unit != head_) leave(unit);
  }

  void back(int64_t unit, bool recompute) {
    const model::UnitMemory& m = memory_.at(unit);
    enter(unit, false);
    exchange(unit);
    if (recompute) {
      time_.touch(MemoryKind::kActivations, m.forward);
      time_.add(MemoryKind::kActivations, m.kept + m.kept_after);
      after_ += m.kept_after;
    }
    time_.touch(MemoryKind::kActivations, m.backward - m.kept);
    // What was kept goes; the gradients stay while those of parameters are reduced, and so do the
    // one that came in and the input that was recomputed from.
    int64_t freed = m.kept;
    if (unit == head_ && plan_.recompute && unit > 0) freed += memory_.at(unit - 1).output;
    time_.add(MemoryKind::kActivations, m.gradients + m.input_gradient - freed);
    reduce(unit);
    freed = m.gradients + gradient_in_;
    if (recompute && unit > 0) freed += memory_.at(unit - 1).output;
    time_.add(MemoryKind::kActivations, -freed);
    gradient_in_ = m.input_gradient;
    leave(unit);
  }

  const StepPlan& plan_;
  const model::ModelConfig& c_;
  int64_t rank_, head_;
  int64_t wide_, sent_;  ///< bytes of an element of a gradient as it is kept, and on its way
  int64_t dp_;
  /// By unit, then by whether of experts, dtype and whether copied.
  std::map<int64_t, std::map<std::tuple<bool, at::ScalarType, bool>, Bucket>> units_;
  std::map<const Bucket*, bool> pending_;
  std::map<int64_t, model::UnitMemory> memory_;
  std::map<int64_t, int64_t> exchange_;
  int64_t after_ = 0, gradient_in_ = 0;
  int64_t moments_ = 0;
  int64_t direction_ = 0;  ///< most that one parameter of Muon takes in the optimizer's step
  Timeline time_;
};

}  // namespace

MemoryUse step_memory(const StepPlan& plan, int64_t rank) {
  validate(plan);
  return Step(plan, rank).run();
}

}  // namespace lockstep::parallel

#include "parallel/plan/traffic.hpp"

#include <algorithm>
#include <cmath>
#include <set>
#include <tuple>

#include "parallel/plan/placement.hpp"
#include "parallel/plan/token_plan.hpp"

namespace lockstep::parallel {
namespace {

using Counts = std::vector<int64_t>;

int64_t sum_of(const Counts& counts) {
  int64_t sum = 0;
  for (const int64_t c : counts) sum += c;
  return sum;
}

Counts sizes_of(const Counts& cuts) {
  Counts sizes;
  for (size_t r = 0; r + 1 < cuts.size(); ++r) sizes.push_back(cuts[r + 1] - cuts[r]);
  return sizes;
}

int64_t product(const Counts& shape, size_t from) {
  int64_t count = 1;
  for (size_t d = from; d < shape.size(); ++d) count *= shape[d];
  return count;
}

/// Calls of one rank, added up by circle and purpose. The collectives move what group.cpp records.
class Step {
 public:
  Step(const StepPlan& plan, int64_t rank)
      : plan_(plan), c_(plan.config), rank_(rank), place_(coordinates(plan.topology, rank)) {
    for (const int64_t member : members(plan.topology, Circle::kEp, rank))
      ep_tokens_.push_back(plan.tokens(member));
    tokens_ = plan.tokens(rank);
    act_ = static_cast<int64_t>(c10::elementSize(plan.num.act()));
    acc_ = static_cast<int64_t>(c10::elementSize(plan.num.acc()));
    forwards_ = plan.recompute ? 2 : 1;
  }

  std::vector<Traffic> run() {
    parameters();
    for (int64_t layer = 0; layer < c_.num_hidden_layers; ++layer) {
      const auto i = static_cast<size_t>(layer);
      c_.mixers[i] == model::MixerKind::kKda ? kda() : sparse_attention(c_.indexer_shared[i]);
      c_.mlps[i] == model::MlpKind::kMoe ? mixture(layer) : dense_mlp();
    }
    const auto optimizer = [&](int64_t count, const char* what) {
      sum(Circle::kShard, what, count, 8);
      sum(Circle::kTp, what, count, 8);
    };
    // Exact sums have two parts, the exact norm three and an exponent that all agree on.
    const bool exact = plan_.num.invariant();
    sum(Circle::kTokens, "loss", exact ? 2 : 1, 8);
    if (exact) tell(Circle::kAll, "gradient norm", 1);
    optimizer(exact ? 3 : 1, "gradient norm");
    optimizer(2, "optimizer counts");
    if (plan_.balance)
      sum(Circle::kTokens, "router load", c_.num_hidden_layers * c_.n_routed_experts, 8);
    return std::move(lines_);
  }

 private:
  struct Place {
    int64_t size;
    size_t own;
  };
  [[nodiscard]] Place in(Circle circle) const {
    const std::vector<int64_t> ranks = members(plan_.topology, circle, rank_);
    return {static_cast<int64_t>(ranks.size()),
            static_cast<size_t>(std::find(ranks.begin(), ranks.end(), rank_) - ranks.begin())};
  }
  [[nodiscard]] int64_t num_tokens() const { return tokens_.end - tokens_.begin; }

  void add(Circle circle, std::string_view what, int64_t sent, int64_t received, int64_t times) {
    const auto found = std::find_if(lines_.begin(), lines_.end(), [&](const Traffic& line) {
      return line.circle == circle && line.what == what;
    });
    Traffic& line = found != lines_.end()
                        ? *found
                        : lines_.emplace_back(Traffic{circle, std::string(what), 0, 0, 0});
    line.calls += times;
    line.bytes_sent += times * sent;
    line.bytes_received += times * received;
  }

  // The calls of a Group. Nothing happens in a group of one.
  void gather(Circle circle,
              std::string_view what,
              const Counts& rows,
              int64_t row_bytes,
              int64_t times = 1) {
    const auto [size, own] = in(circle);
    if (size == 1) return;
    add(circle,
        what,
        rows[own] * row_bytes * (size - 1),
        (sum_of(rows) - rows[own]) * row_bytes,
        times);
  }
  void reduce_scatter(Circle circle, std::string_view what, const Counts& rows, int64_t row_bytes) {
    const auto [size, own] = in(circle);
    if (size == 1) return;
    add(circle,
        what,
        (sum_of(rows) - rows[own]) * row_bytes,
        rows[own] * row_bytes * (size - 1),
        1);
  }
  void sum(Circle circle, std::string_view what, int64_t count, int64_t bytes, int64_t times = 1) {
    const auto [size, own] = in(circle);
    if (size == 1) return;
    const int64_t mine = sizes_of(even_cuts(count, size))[own];
    const int64_t moved = (count - mine + mine * (size - 1)) * bytes;
    add(circle, what, moved, moved, times);
  }
  /// One integer of every rank.
  void tell(Circle circle, std::string_view what, int64_t times) {
    gather(circle, what, Counts(static_cast<size_t>(in(circle).size), 1), 8, times);
  }

  void parameters() {
    // Of an element of a gradient, or of either part of its exact sum.
    const int64_t wide = plan_.num.invariant() ? 8 : acc_;
    const int64_t head = model::head_unit(c_.num_hidden_layers);
    // Parameters that travel together, by unit, group and dtype; of each rank's rows, elements.
    struct Bucket {
      Counts all, trained;
    };
    std::map<std::tuple<int64_t, bool, at::ScalarType>, Bucket> buckets;
    for (const ParamSpec& spec : parameter_specs(c_, plan_.num, plan_.topology, place_)) {
      const Circle circle = spec.expert ? Circle::kExpertShard : Circle::kShard;
      const Counts rows = sizes_of(even_cuts(spec.shape[0], in(circle).size));
      const auto join = [&](int64_t unit) {
        Bucket& bucket = buckets[{unit, spec.expert, spec.compute_dtype}];
        bucket.all.resize(rows.size());
        if (spec.trainable) bucket.trained.resize(rows.size());
        for (size_t r = 0; r < rows.size(); ++r) {
          const int64_t elements = rows[r] * product(spec.shape, 1);
          bucket.all[r] += elements;
          if (spec.trainable) bucket.trained[r] += elements;
        }
      };
      join(spec.unit);
      if (!spec.alias.empty()) join(head);
    }
    for (const auto& [key, bucket] : buckets) {
      const auto& [unit, expert, dtype] = key;
      const Circle circle = expert ? Circle::kExpertShard : Circle::kShard;
      // The head stays gathered between forward and backward.
      gather(circle,
             "parameters",
             bucket.all,
             static_cast<int64_t>(c10::elementSize(dtype)),
             unit == head ? 1 : 2);
      if (bucket.trained.empty()) continue;
      const Counts parts = scaled(bucket.trained, plan_.num.invariant() ? 2 : 1);
      reduce_scatter(circle, "gradients", parts, wide);
      sum(Circle::kDp, "gradients", parts[in(circle).own], wide);
    }
  }

  void kda() {
    const Counts heads = sizes_of(even_cuts(c_.linear_num_heads, plan_.topology.tp));
    const int64_t own_heads = heads[static_cast<size_t>(place_.tp)], dim = c_.linear_head_dim;
    enter("activation gradients", c_.hidden_size, act_);
    const int64_t depth = c_.linear_conv_kernel_dim - 1;
    if (depth > 0)
      gather_rows("convolution halo",
                  Counts(static_cast<size_t>(plan_.topology.cp), depth),
                  3 * own_heads * dim * act_);
    enter("activation gradients", dim, act_);  // forget gate
    states(own_heads * dim * dim * acc_);
    enter("activation gradients", dim, act_);  // output gate
    sum(Circle::kTp, "norm gradients", dim, act_);
    project_out(scaled(heads, dim));
  }

  void states(int64_t bytes) {
    if (plan_.num.is<model::Switch::kCpKdaState>("handover")) {
      const bool left = tokens_.packing.continues_from_left(),
                 right = tokens_.packing.continues_to_right();
      if (plan_.topology.cp == 1) return;
      for (const auto& [sends, receives, times] :
           {std::tuple(right, left, forwards_), std::tuple(left, right, int64_t{1})}) {
        if (sends) add(Circle::kCp, "kda states", bytes, 0, times);
        if (receives) add(Circle::kCp, "kda states", 0, bytes, times);
      }
      return;
    }
    const Counts one(static_cast<size_t>(plan_.topology.cp), 1);
    gather(Circle::kCp, "kda states", one, 2 * bytes, forwards_);
    gather(Circle::kCp, "kda states", one, bytes);
  }

  void sparse_attention(bool shared_indexer) {
    const Counts rows = sizes_of(tokens_.cuts);
    if (!shared_indexer) {
      gather(Circle::kCp, "index keys", rows, c_.index_head_dim * act_, forwards_);
      gather(Circle::kCp, "index keys", rows, c_.index_head_dim * act_, forwards_);  // their gates
    }
    enter("activation gradients", c_.q_lora_rank, act_);
    enter("activation gradients", c_.kv_lora_rank, act_);
    gather(Circle::kCp, "latents", rows, c_.kv_lora_rank * act_, forwards_);
    reduce_scatter(
        Circle::kCp, "latents", rows, c_.kv_lora_rank * (plan_.num.invariant() ? 16 : act_));
    const Counts heads = sizes_of(even_cuts(c_.num_attention_heads, plan_.topology.tp));
    project_out(scaled(heads, c_.v_head_dim));
  }

  void dense_mlp() {
    enter("activation gradients", c_.hidden_size, act_);
    project_out(sizes_of(even_cuts(c_.intermediate_size, plan_.topology.tp)));
  }

  void mixture(int64_t layer) {
    enter("activation gradients", c_.hidden_size, act_);
    if (splits_sums()) enter("activation gradients", c_.num_experts_per_tok, acc_);
    exchange(layer);
    if (splits_sums()) {
      project_out({});
    } else if (c_.n_shared_experts > 0) {
      project_out(sizes_of(even_cuts(c_.shared_width(), plan_.topology.tp)));
    }
  }

  /// Rows to the experts and back, and, where tp shares whole experts, their results.
  void exchange(int64_t layer) {
    const Counts cuts = expert_cuts(c_, plan_.topology), experts = sizes_of(cuts);
    const auto own = static_cast<size_t>(place_.ep);
    const int64_t row_bytes = c_.hidden_size * act_;
    // Rows of each source of this ep group for each expert.
    std::vector<std::vector<double>> rows;
    for (const TokenPlan& tokens : ep_tokens_) rows.push_back(expert_rows(plan_, layer, tokens));
    const auto between = [&](size_t from, int64_t first, int64_t last) {
      double count = 0;
      for (int64_t e = first; e < last; ++e) count += rows[from][static_cast<size_t>(e)];
      return static_cast<int64_t>(std::llround(count));
    };
    if (plan_.topology.ep > 1) {
      int64_t sent = 0, received = 0;
      for (size_t r = 0; r < experts.size(); ++r) {
        if (r == own) continue;
        sent += between(own, cuts[r], cuts[r + 1]);
        received += between(r, cuts[own], cuts[own + 1]);
      }
      add(Circle::kEp,
          "row counts",
          8 * (c_.n_routed_experts - experts[own]),
          8 * experts[own] * (plan_.topology.ep - 1),
          forwards_);
      // Of each row its block of tokens, where sums are exact and a graph is kept.
      if (plan_.num.invariant()) add(Circle::kEp, "row blocks", 8 * sent, 8 * received, 1);
      // There and back again; their gradients, the other way.
      add(Circle::kEp, "rows", sent * row_bytes, received * row_bytes, forwards_ + 1);
      add(Circle::kEp, "rows", received * row_bytes, sent * row_bytes, forwards_ + 1);
    }
    if (plan_.topology.tp == 1 || splits_sums()) return;
    Counts share;
    const Counts shared = even_cuts(experts[own], plan_.topology.tp);
    for (size_t t = 0; t + 1 < shared.size(); ++t) {
      share.push_back(0);
      for (size_t r = 0; r < rows.size(); ++r)
        share.back() += between(r, cuts[own] + shared[t], cuts[own] + shared[t + 1]);
    }
    tell(Circle::kTp, "activations", forwards_);
    gather(Circle::kTp, "activations", share, row_bytes, forwards_);
  }

  // What the seams do.
  [[nodiscard]] bool splits_sums() const {
    return plan_.num.is<model::Switch::kTpPartialSums>("tp");
  }
  /// Rows that cp gathers, and whose gradients it adds.
  void gather_rows(std::string_view what, const Counts& rows, int64_t row_bytes) {
    gather(Circle::kCp, what, rows, row_bytes, forwards_);
    reduce_scatter(Circle::kCp, what, rows, row_bytes);
  }
  /// A whole activation that enters a part split over tp.
  void enter(std::string_view what, int64_t width, int64_t bytes) {
    sum(Circle::kTp, what, num_tokens() * width, bytes);
  }
  /// [T, sum(columns)], of which each tp rank has its columns, times a matrix.
  void project_out(const Counts& columns) {
    if (splits_sums()) {
      sum(Circle::kTp, "activations", num_tokens() * c_.hidden_size, act_, forwards_);
      return;
    }
    tell(Circle::kTp, "activations", 2 * forwards_);
    gather(Circle::kTp, "activations", columns, num_tokens() * act_, forwards_);
    reduce_scatter(Circle::kTp, "activation gradients", columns, num_tokens() * act_);
    gather(Circle::kTp,
           "activations",
           sizes_of(even_cuts(c_.hidden_size, plan_.topology.tp)),
           num_tokens() * act_,
           forwards_);
  }
  static Counts scaled(Counts counts, int64_t by) {
    for (int64_t& c : counts) c *= by;
    return counts;
  }

  const StepPlan& plan_;
  const model::ModelConfig& c_;
  int64_t rank_;
  Coordinates place_;
  std::vector<TokenPlan> ep_tokens_;
  TokenPlan tokens_;
  int64_t act_ = 0, acc_ = 0, forwards_ = 1;
  std::vector<Traffic> lines_;
};

}  // namespace

std::vector<double> expert_rows(const StepPlan& plan, int64_t layer, const TokenPlan& tokens) {
  const model::ModelConfig& c = plan.config;
  const auto num = static_cast<size_t>(c.n_routed_experts);
  const int64_t count = tokens.end - tokens.begin;
  const auto found = plan.routes.find(layer);
  if (found == plan.routes.end()) {
    const double even = static_cast<double>(count * c.num_experts_per_tok) /
                        static_cast<double>(c.n_routed_experts);
    return std::vector<double>(num, even);
  }
  const Tensor mine = found->second.narrow(0, tokens.begin, count).contiguous();
  std::vector<double> rows(num, 0);
  for (int64_t i = 0; i < mine.numel(); ++i)
    rows[static_cast<size_t>(mine.const_data_ptr<int64_t>()[i])] += 1;
  return rows;
}

std::vector<Traffic> step_traffic(const StepPlan& plan, int64_t rank) {
  model::validate(plan.topology);
  return Step(plan, rank).run();
}

}  // namespace lockstep::parallel

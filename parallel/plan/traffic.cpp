#include "parallel/plan/traffic.hpp"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <optional>
#include <tuple>

#include "parallel/optim/muon.hpp"
#include "parallel/plan/placement.hpp"
#include "parallel/plan/token_plan.hpp"

namespace lockstep::parallel {
namespace {

int64_t product(const std::vector<int64_t>& shape, size_t from) {
  int64_t count = 1;
  for (size_t d = from; d < shape.size(); ++d) count *= shape[d];
  return count;
}

/// Elements that owner `own` of `size` moves each way in a sum of `count`.
int64_t sum_elements(int64_t count, int64_t size, int64_t own) {
  const int64_t mine = even_share(count, size, own);
  return count - mine + mine * (size - 1);
}

/// Bytes of an element of a gradient, or of either part of its exact sum.
int64_t gradient_width(const StepPlan& plan) {
  return plan.num.invariant() ? 8 : static_cast<int64_t>(c10::elementSize(plan.num.acc()));
}

/// Calls of one rank, added up by circle and purpose. The collectives move what group.cpp records.
class Step {
 public:
  Step(const StepPlan& plan, int64_t rank)
      : plan_(plan), c_(plan.config), rank_(rank), place_(coordinates(plan.topology, rank)) {
    tokens_ = plan.tokens(rank);
    act_ = static_cast<int64_t>(c10::elementSize(plan.num.act()));
    acc_ = static_cast<int64_t>(c10::elementSize(plan.num.acc()));
    forwards_ = plan.recompute ? 2 : 1;
  }

  std::vector<Traffic> run(std::vector<int64_t>* replica_sums) {
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
    if (plan_.optimizer == OptimizerKind::kMuon) momentum();
    optimizer(2, "optimizer counts");
    if (plan_.balance)
      sum(Circle::kTokens, "router load", c_.num_hidden_layers * c_.n_routed_experts, 8);
    if (replica_sums != nullptr) *replica_sums = std::move(replica_sums_);
    return std::move(lines_);
  }

 private:
  /// Rows of this rank and of its whole circle.
  struct Rows {
    int64_t own = 0, all = 0;
  };
  [[nodiscard]] CircleRanks in(Circle circle) const {
    return circle_ranks(plan_.topology, circle, rank_);
  }
  /// `count` rows, near-evenly.
  [[nodiscard]] Rows even(Circle circle, int64_t count) const {
    const CircleRanks ranks = in(circle);
    return {even_share(count, ranks.size, ranks.own), count};
  }
  /// `count` rows of every rank.
  [[nodiscard]] Rows each(Circle circle, int64_t count) const {
    return {count, count * in(circle).size};
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
  void gather(
      Circle circle, std::string_view what, Rows rows, int64_t row_bytes, int64_t times = 1) {
    const int64_t size = in(circle).size;
    if (size == 1) return;
    add(circle, what, rows.own * row_bytes * (size - 1), (rows.all - rows.own) * row_bytes, times);
  }
  void reduce_scatter(Circle circle, std::string_view what, Rows rows, int64_t row_bytes) {
    const int64_t size = in(circle).size;
    if (size == 1) return;
    add(circle, what, (rows.all - rows.own) * row_bytes, rows.own * row_bytes * (size - 1), 1);
  }
  void sum(Circle circle, std::string_view what, int64_t count, int64_t bytes, int64_t times = 1) {
    const CircleRanks ranks = in(circle);
    if (ranks.size == 1) return;
    const int64_t moved = sum_elements(count, ranks.size, ranks.own) * bytes;
    add(circle, what, moved, moved, times);
  }
  /// One integer of every rank.
  void tell(Circle circle, std::string_view what, int64_t times) {
    gather(circle, what, each(circle, 1), 8, times);
  }

  void parameters() {
    const int64_t wide = gradient_width(plan_);
    const int64_t head = model::head_unit(c_.num_hidden_layers);
    // Elements of parameters that travel together, by unit, group and dtype.
    struct Bucket {
      Rows all, trained;
      bool trains = false;
    };
    std::map<std::tuple<int64_t, bool, at::ScalarType>, Bucket> buckets;
    for (const ParamSpec& spec : parameter_specs(c_, plan_.num, plan_.topology, place_)) {
      const Circle circle = spec.expert ? Circle::kExpertShard : Circle::kShard;
      const Rows rows = even(circle, spec.shape[0]);
      const auto join = [&](int64_t unit) {
        Bucket& bucket = buckets[{unit, spec.expert, spec.compute_dtype}];
        const int64_t row = product(spec.shape, 1);
        bucket.all.own += rows.own * row;
        bucket.all.all += rows.all * row;
        if (!spec.trainable) return;
        bucket.trains = true;
        bucket.trained.own += rows.own * row;
        bucket.trained.all += rows.all * row;
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
      if (!bucket.trains) continue;
      const int64_t parts = plan_.num.invariant() ? 2 : 1;
      reduce_scatter(
          circle, "gradients", {bucket.trained.own * parts, bucket.trained.all * parts}, wide);
      replica_sums_.push_back(bucket.trained.own * parts);
      sum(Circle::kDp, "gradients", replica_sums_.back(), wide);
    }
  }

  /// Of matrices that are sharded by rows.
  void momentum() {
    for (const ParamSpec& spec : parameter_specs(c_, plan_.num, plan_.topology, place_)) {
      if (!spec.trainable || muon_matrices(spec) != MuonMatrices::kWhole) continue;
      const Circle circle = spec.expert ? Circle::kExpertShard : Circle::kShard;
      gather(circle, "momentum", even(circle, spec.shape[0]), product(spec.shape, 1) * acc_);
    }
  }

  void kda() {
    const Rows heads = even(Circle::kTp, c_.linear_num_heads);
    const int64_t own_heads = heads.own, dim = c_.linear_head_dim;
    enter("activation gradients", c_.hidden_size, act_);
    const int64_t depth = c_.linear_conv_kernel_dim - 1;
    if (depth > 0)
      gather_rows("convolution halo", each(Circle::kCp, depth), 3 * own_heads * dim * act_);
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
    const Rows one = each(Circle::kCp, 1);
    gather(Circle::kCp, "kda states", one, 2 * bytes, forwards_);
    gather(Circle::kCp, "kda states", one, bytes);
  }

  void sparse_attention(bool shared_indexer) {
    const Rows rows{num_tokens(), tokens_.cuts.back()};
    if (!shared_indexer) {
      gather(Circle::kCp, "index keys", rows, c_.index_head_dim * act_, forwards_);
      gather(Circle::kCp, "index keys", rows, c_.index_head_dim * act_, forwards_);  // their gates
    }
    enter("activation gradients", c_.q_lora_rank, act_);
    enter("activation gradients", c_.kv_lora_rank, act_);
    gather(Circle::kCp, "latents", rows, c_.kv_lora_rank * act_, forwards_);
    reduce_scatter(
        Circle::kCp, "latents", rows, c_.kv_lora_rank * (plan_.num.invariant() ? 16 : act_));
    const Rows heads = even(Circle::kTp, c_.num_attention_heads);
    project_out(scaled(heads, c_.v_head_dim));
  }

  void dense_mlp() {
    enter("activation gradients", c_.hidden_size, act_);
    project_out(even(Circle::kTp, c_.intermediate_size));
  }

  void mixture(int64_t layer) {
    enter("activation gradients", c_.hidden_size, act_);
    if (splits_sums()) enter("activation gradients", c_.num_experts_per_tok, acc_);
    exchange(layer);
    if (splits_sums()) {
      project_out({});
    } else if (c_.n_shared_experts > 0) {
      project_out(even(Circle::kTp, c_.shared_width()));
    }
  }

  /// A rank of the ep circle that sends rows, or, where the load is even, several that send alike.
  struct Source {
    std::pair<int64_t, int64_t> tokens;
    int64_t ranks = 1;
    bool own = false;
    std::vector<int64_t> rows;  ///< for each expert; empty for an even load
  };
  [[nodiscard]] std::vector<Source> sources(int64_t layer) const {
    const std::vector<std::pair<int64_t, int64_t>> all = ep_tokens(plan_, rank_);
    const auto own = static_cast<size_t>(place_.ep);
    const bool routed = plan_.routes.contains(layer);
    std::vector<Source> result;
    std::map<int64_t, size_t> alike;
    for (size_t r = 0; r < all.size(); ++r) {
      const auto [begin, end] = all[r];
      if (routed) {
        result.push_back({all[r], 1, r == own, expert_rows(plan_, layer, begin, end)});
        continue;
      }
      if (r != own) {
        const auto [found, added] = alike.emplace(end - begin, result.size());
        if (!added) {
          ++result[found->second].ranks;
          continue;
        }
      }
      result.push_back({all[r], 1, r == own, {}});
    }
    return result;
  }
  /// Of one rank of them.
  [[nodiscard]] int64_t rows_to(const Source& from, int64_t first, int64_t last) const {
    if (from.rows.empty())
      return plan_.even_rows(from.tokens.second - from.tokens.first, last - first);
    return std::accumulate(from.rows.begin() + first, from.rows.begin() + last, int64_t{0});
  }

  /// Rows that change ranks in one layer, and those that each tp rank computes.
  struct Exchange {
    int64_t sent = 0, received = 0;
    Rows share;
  };
  [[nodiscard]] Exchange measure(int64_t layer) const {
    const int64_t experts = c_.n_routed_experts, ep = plan_.topology.ep, tp = plan_.topology.tp;
    const auto cut = [](int64_t count, int64_t size, int64_t r) { return count * r / size; };
    const int64_t first = cut(experts, ep, place_.ep), last = cut(experts, ep, place_.ep + 1);
    Exchange result;
    for (const Source& from : sources(layer)) {
      if (from.own) {
        for (int64_t r = 0; r < ep; ++r)
          if (r != place_.ep)
            result.sent += rows_to(from, cut(experts, ep, r), cut(experts, ep, r + 1));
      } else {
        result.received += from.ranks * rows_to(from, first, last);
      }
      for (int64_t t = 0; t < tp; ++t) {
        const int64_t rows =
            from.ranks *
            rows_to(from, first + cut(last - first, tp, t), first + cut(last - first, tp, t + 1));
        result.share.all += rows;
        if (t == place_.tp) result.share.own += rows;
      }
    }
    return result;
  }

  /// Rows to the experts and back, and, where tp shares whole experts, their results.
  void exchange(int64_t layer) {
    const bool routed = plan_.routes.contains(layer);
    if (routed || !even_exchange_) {
      Exchange measured = measure(layer);
      if (!routed) even_exchange_ = measured;
      exchange(measured);
    } else {
      exchange(*even_exchange_);
    }
  }
  void exchange(const Exchange& rows) {
    const int64_t row_bytes = c_.hidden_size * act_;
    const int64_t experts = even_share(c_.n_routed_experts, plan_.topology.ep, place_.ep);
    if (plan_.topology.ep > 1) {
      const auto& [sent, received, share] = rows;
      add(Circle::kEp,
          "row counts",
          8 * (c_.n_routed_experts - experts),
          8 * experts * (plan_.topology.ep - 1),
          forwards_);
      // Of each row its block of tokens, where sums are exact and a graph is kept.
      if (plan_.num.invariant()) add(Circle::kEp, "row blocks", 8 * sent, 8 * received, 1);
      // There and back again; their gradients, the other way.
      add(Circle::kEp, "rows", sent * row_bytes, received * row_bytes, forwards_ + 1);
      add(Circle::kEp, "rows", received * row_bytes, sent * row_bytes, forwards_ + 1);
    }
    if (plan_.topology.tp == 1 || splits_sums()) return;
    tell(Circle::kTp, "activations", forwards_);
    gather(Circle::kTp, "activations", rows.share, row_bytes, forwards_);
  }

  // What the seams do.
  [[nodiscard]] bool splits_sums() const {
    return plan_.num.is<model::Switch::kTpPartialSums>("tp");
  }
  /// Rows that cp gathers, and whose gradients it adds.
  void gather_rows(std::string_view what, Rows rows, int64_t row_bytes) {
    gather(Circle::kCp, what, rows, row_bytes, forwards_);
    reduce_scatter(Circle::kCp, what, rows, row_bytes);
  }
  /// A whole activation that enters a part split over tp.
  void enter(std::string_view what, int64_t width, int64_t bytes) {
    sum(Circle::kTp, what, num_tokens() * width, bytes);
  }
  /// [T, sum(columns)], of which each tp rank has its columns, times a matrix.
  void project_out(Rows columns) {
    if (splits_sums()) {
      sum(Circle::kTp, "activations", num_tokens() * c_.hidden_size, act_, forwards_);
      return;
    }
    tell(Circle::kTp, "activations", 2 * forwards_);
    gather(Circle::kTp, "activations", columns, num_tokens() * act_, forwards_);
    reduce_scatter(Circle::kTp, "activation gradients", columns, num_tokens() * act_);
    gather(Circle::kTp,
           "activations",
           even(Circle::kTp, c_.hidden_size),
           num_tokens() * act_,
           forwards_);
  }
  static Rows scaled(Rows rows, int64_t by) { return {rows.own * by, rows.all * by}; }

  const StepPlan& plan_;
  const model::ModelConfig& c_;
  int64_t rank_;
  Coordinates place_;
  TokenPlan tokens_;
  std::vector<int64_t> replica_sums_;
  std::optional<Exchange> even_exchange_;
  int64_t act_ = 0, acc_ = 0, forwards_ = 1;
  std::vector<Traffic> lines_;
};

}  // namespace

int64_t StepPlan::even_rows(int64_t tokens, int64_t experts) const {
  return std::llround(static_cast<double>(tokens * config.num_experts_per_tok * experts) /
                      static_cast<double>(config.n_routed_experts));
}

void validate(const StepPlan& plan) {
  model::validate(plan.topology);
  check_optimizer(plan.optimizer, plan.topology);
  LOCKSTEP_CHECK(plan.offload != Offload::kFull || plan.optimizer != OptimizerKind::kMuon,
                 kConfig,
                 "offload full cannot be combined with Muon: the host applies each piece of a "
                 "gradient as it arrives, Muon needs all rows of a matrix at once; use offload "
                 "optimizer, or AdamW");
}

std::vector<std::pair<int64_t, int64_t>> ep_tokens(const StepPlan& plan, int64_t rank) {
  const CircleRanks ranks = circle_ranks(plan.topology, Circle::kEp, rank);
  std::vector<std::pair<int64_t, int64_t>> result;
  TokenRow row;
  int64_t number = -1;
  for (int64_t i = 0; i < ranks.size; ++i) {
    const Coordinates c = coordinates(plan.topology, ranks.first + i * ranks.step);
    const int64_t wanted = c.dp * plan.topology.fsdp + c.fsdp;
    if (wanted != number) row = plan.row(wanted);
    number = wanted;
    const auto cp = static_cast<size_t>(c.cp);
    result.emplace_back(row.begin + row.cuts[cp], row.begin + row.cuts[cp + 1]);
  }
  return result;
}

std::vector<int64_t> expert_rows(const StepPlan& plan, int64_t layer, int64_t begin, int64_t end) {
  const Tensor mine = plan.routes.at(layer).narrow(0, begin, end - begin).contiguous();
  std::vector<int64_t> rows(static_cast<size_t>(plan.config.n_routed_experts), 0);
  for (int64_t i = 0; i < mine.numel(); ++i)
    ++rows[static_cast<size_t>(mine.const_data_ptr<int64_t>()[i])];
  return rows;
}

std::vector<Traffic> step_traffic(const StepPlan& plan,
                                  int64_t rank,
                                  std::vector<int64_t>* replica_sums) {
  validate(plan);
  return Step(plan, rank).run(replica_sums);
}

int64_t replica_bytes(const StepPlan& plan,
                      const std::vector<int64_t>& replica_sums,
                      int64_t size,
                      int64_t own) {
  int64_t elements = 0;
  for (const int64_t count : replica_sums) elements += sum_elements(count, size, own);
  return elements * gradient_width(plan);
}

}  // namespace lockstep::parallel

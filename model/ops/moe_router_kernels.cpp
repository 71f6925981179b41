#include <algorithm>
#include <limits>
#include <vector>

#include "model/base/parallel.hpp"
#include "model/ops/moe_kernels.hpp"

namespace lockstep::model {
namespace {

template <typename A>
A maybe_round(A x, bool round) {
  if constexpr (std::is_same_v<A, float>) return round ? round_bf16(x) : x;
  return x;
}

/// Scores before rounding.
template <typename A>
void scores_of(const RouterForm& form, const A* logits, A* scores) {
  const int64_t E = form.experts;
  if (!form.softmax) {
    for (int64_t e = 0; e < E; ++e) scores[e] = sigmoid(logits[e]);
    return;
  }
  A largest = logits[0], sum = 0;
  for (int64_t e = 1; e < E; ++e) largest = std::max(largest, logits[e]);
  for (int64_t e = 0; e < E; ++e) scores[e] = exp_fast(logits[e] - largest);
  for (int64_t e = 0; e < E; ++e) sum += scores[e];
  for (int64_t e = 0; e < E; ++e) scores[e] /= sum;
}

/// Indices of the k largest of v, descending, ties to the lower index. Values already taken or
/// excluded are marked in `taken`.
template <typename A, typename Index>
void largest(const A* v, int64_t count, int64_t k, std::vector<char>& taken, Index* out) {
  for (int64_t j = 0; j < k; ++j) {
    int64_t best = -1;
    for (int64_t e = 0; e < count; ++e) {
      if (taken[static_cast<size_t>(e)] != 0) continue;
      if (best < 0 || v[e] > v[best]) best = e;
    }
    taken[static_cast<size_t>(best)] = 1;
    out[j] = best;
  }
}

/// Marks as taken the experts of all groups but the best; a group's score is the sum of its two
/// largest choices.
template <typename A>
void keep_best_groups(const RouterForm& form, const A* choice, std::vector<char>& taken) {
  const int64_t per_group = form.experts / form.groups;
  std::vector<A> score(static_cast<size_t>(form.groups));
  for (int64_t g = 0; g < form.groups; ++g) {
    const A* c = choice + g * per_group;
    A first = -std::numeric_limits<A>::infinity(), second = first;
    for (int64_t e = 0; e < per_group; ++e) {
      if (c[e] > first) {
        second = first;
        first = c[e];
      } else if (c[e] > second) {
        second = c[e];
      }
    }
    score[static_cast<size_t>(g)] = per_group > 1 ? first + second : first;
  }
  std::vector<char> group_taken(score.size(), 0);
  std::vector<int64_t> kept(static_cast<size_t>(form.groups_kept));
  largest(score.data(), form.groups, form.groups_kept, group_taken, kept.data());
  std::fill(taken.begin(), taken.end(), char{1});
  for (const int64_t g : kept) {
    std::fill_n(taken.begin() + g * per_group, per_group, char{0});
  }
}

}  // namespace

template <typename A>
void router_forward(const RouterForm& form,
                    const A* logits,
                    const A* bias,
                    bool replay,
                    int64_t* chosen,
                    A* weights) {
  const int64_t E = form.experts, k = form.top_k;
  parallel_for(0, form.tokens, 64, [&](int64_t begin, int64_t end) {
    std::vector<A> scores(static_cast<size_t>(E)), choice(scores.size());
    std::vector<char> taken(scores.size());
    for (int64_t t = begin; t < end; ++t) {
      scores_of(form, logits + t * E, scores.data());
      for (A& s : scores) s = maybe_round(s, form.round_scores);
      int64_t* ids = chosen + t * k;
      if (!replay) {
        for (size_t e = 0; e < scores.size(); ++e) choice[e] = scores[e] + bias[e];
        std::fill(taken.begin(), taken.end(), char{0});
        if (form.groups > 1) keep_best_groups(form, choice.data(), taken);
        largest(choice.data(), E, k, taken, ids);
      }
      A* w = weights + t * k;
      A sum = 0;
      for (int64_t j = 0; j < k; ++j) {
        w[j] = scores[static_cast<size_t>(ids[j])];
        sum += w[j];
      }
      const A divisor = sum + static_cast<A>(form.eps), scaling = static_cast<A>(form.scaling);
      for (int64_t j = 0; j < k; ++j) w[j] = (form.normalise ? w[j] / divisor : w[j]) * scaling;
    }
  });
}

template <typename A>
void router_backward(
    const RouterForm& form, const A* logits, const int64_t* chosen, const A* dweights, A* dlogits) {
  const int64_t E = form.experts, k = form.top_k;
  const A scaling = static_cast<A>(form.scaling);
  parallel_for(0, form.tokens, 64, [&](int64_t begin, int64_t end) {
    std::vector<A> scores(static_cast<size_t>(E)), ds(static_cast<size_t>(k));
    for (int64_t t = begin; t < end; ++t) {
      scores_of(form, logits + t * E, scores.data());
      const int64_t* ids = chosen + t * k;
      const A* dw = dweights + t * k;
      const auto used = [&](int64_t j) {
        return maybe_round(scores[static_cast<size_t>(ids[j])], form.round_scores);
      };
      A sum = static_cast<A>(form.eps), along = 0;
      for (int64_t j = 0; j < k; ++j) sum += used(j);
      for (int64_t j = 0; j < k; ++j) along += dw[j] * used(j);
      for (int64_t j = 0; j < k; ++j) {
        ds[static_cast<size_t>(j)] =
            scaling * (form.normalise ? (dw[j] - along / sum) / sum : dw[j]);
      }
      A* d = dlogits + t * E;
      std::fill_n(d, E, A(0));
      for (int64_t j = 0; j < k; ++j) d[ids[j]] += ds[static_cast<size_t>(j)];
      if (form.softmax) {
        const A dot_ds = dot(d, scores.data(), E);
        for (int64_t e = 0; e < E; ++e) d[e] = scores[static_cast<size_t>(e)] * (d[e] - dot_ds);
      } else {
        for (int64_t e = 0; e < E; ++e) {
          const A s = scores[static_cast<size_t>(e)];
          d[e] *= s * (A(1) - s);
        }
      }
    }
  });
}

template void router_forward(const RouterForm&, const float*, const float*, bool, int64_t*, float*);
template void router_forward(
    const RouterForm&, const double*, const double*, bool, int64_t*, double*);
template void router_backward(
    const RouterForm&, const float*, const int64_t*, const float*, float*);
template void router_backward(
    const RouterForm&, const double*, const int64_t*, const double*, double*);

}  // namespace lockstep::model

#include "parallel/plan/sequence_plan.hpp"

#include <algorithm>
#include <utility>

#include "parallel/cp/context_parallel.hpp"

namespace lockstep::parallel {

std::vector<int64_t> SequencePlan::rows() const {
  std::vector<int64_t> result;
  for (size_t r = 0; r + 1 < cuts.size(); ++r) result.push_back(cuts[r + 1] - cuts[r]);
  return result;
}

SequencePlan plan_sequence(const Mesh& mesh, int64_t tokens, std::vector<int64_t> cuts) {
  const Group& cp = mesh.cp();
  SequencePlan plan;
  plan.cuts = cuts.empty() ? even_cuts(tokens, cp.size()) : std::move(cuts);
  LOCKSTEP_CHECK(static_cast<int64_t>(plan.cuts.size()) == cp.size() + 1 &&
                     plan.cuts.front() == 0 && plan.cuts.back() == tokens &&
                     std::is_sorted(plan.cuts.begin(), plan.cuts.end()),
                 kMesh,
                 "sequence: {} cuts from {} to {} do not fit cp = {} and {} tokens; give cp + 1 "
                 "rows from 0 to the number of tokens",
                 plan.cuts.size(),
                 plan.cuts.front(),
                 plan.cuts.back(),
                 cp.size(),
                 tokens);
  plan.begin = plan.cuts[static_cast<size_t>(cp.rank())];
  plan.end = plan.cuts[static_cast<size_t>(cp.rank()) + 1];
  if (cp.size() > 1) {
    plan.seam = context_parallel(cp, plan.cuts);
  } else {
    plan.seam = std::make_unique<model::LocalSequence>();
  }
  return plan;
}

}  // namespace lockstep::parallel

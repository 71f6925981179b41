#include "model/layers/memory_tape.hpp"

#include <algorithm>
#include <utility>

namespace lockstep::model {

MemoryTape::Id MemoryTape::given(int64_t bytes) {
  items_.push_back({bytes, true});
  return items_.size() - 1;
}

std::vector<MemoryTape::Id> MemoryTape::add(const Op& op) {
  std::vector<Id> outputs;
  for (const int64_t bytes : op.outputs) {
    outputs.push_back(items_.size());
    items_.push_back({bytes, false});
  }
  steps_.push_back({op, outputs});
  return outputs;
}

MemoryTape::Id MemoryTape::add_saving(std::vector<Id> inputs, int64_t output, Op rest) {
  rest.saved.insert(rest.saved.end(), inputs.begin(), inputs.end());
  rest.inputs = std::move(inputs);
  rest.outputs = {output};
  return add(rest)[0];
}

std::vector<size_t> MemoryTape::savers() const {
  std::vector<size_t> count(items_.size(), 0);
  for (const Step& step : steps_)
    for (const Id id : step.op.saved) ++count[id];
  return count;
}

int64_t MemoryTape::forward_peak(bool keeps) const {
  std::vector<size_t> last(items_.size(), steps_.size());
  for (size_t s = 0; s < steps_.size(); ++s) {
    for (const Id id : steps_[s].outputs) last[id] = s;
    for (const Id id : steps_[s].op.inputs) last[id] = s;
    for (const Id id : steps_[s].op.saved) last[id] = s;
  }
  last[steps_.back().outputs[0]] = steps_.size();
  const std::vector<size_t> saved = savers();
  int64_t alive = 0, peak = 0;
  for (size_t s = 0; s < steps_.size(); ++s) {
    const Op& op = steps_[s].op;
    for (const int64_t bytes : op.outputs) alive += bytes;
    alive += op.kept + op.kept_to_end;
    peak = std::max(peak, alive + op.forward_work);
    if (!keeps) alive -= op.kept + op.kept_to_end;
    for (Id id = 0; id < items_.size(); ++id) {
      if (last[id] == s && !items_[id].given && !(keeps && saved[id] > 0))
        alive -= items_[id].bytes;
    }
  }
  return peak;
}

UnitMemory MemoryTape::use() const {
  UnitMemory use;
  use.forward = forward_peak(true);
  use.forward_only = forward_peak(false);
  const Id output = steps_.back().outputs[0];
  use.output = items_[output].bytes;
  std::vector<size_t> saved = savers();
  use.kept = use.output;
  for (Id id = 0; id < items_.size(); ++id) {
    if (saved[id] > 0 && !items_[id].given && id != output) use.kept += items_[id].bytes;
  }
  for (const Step& step : steps_) {
    use.kept += step.op.kept + step.op.kept_to_end;
    use.kept_after += step.op.kept_after;
  }

  int64_t alive = use.kept;
  use.backward = alive;
  std::vector<bool> has_gradient(items_.size(), false);
  has_gradient[output] = true;
  for (auto step = steps_.rbegin(); step != steps_.rend(); ++step) {
    const Op& op = step->op;
    const bool reached = std::any_of(
        step->outputs.begin(), step->outputs.end(), [&](Id id) { return has_gradient[id]; });
    if (!reached) continue;
    int64_t fresh = 0;
    for (const Id id : op.inputs) fresh += items_[id].bytes;
    alive += op.gradients;
    use.gradients += op.gradients;
    use.backward = std::max(use.backward, alive + fresh + op.backward_work);
    for (const Id id : op.inputs) {
      if (!has_gradient[id]) alive += items_[id].bytes;
      has_gradient[id] = true;
      if (items_[id].given) use.input_gradient = items_[id].bytes;
    }
    for (const Id id : step->outputs) {
      // The unit's own gradient is counted by who hands it in.
      if (has_gradient[id] && id != output) alive -= items_[id].bytes;
    }
    for (const Id id : op.saved) {
      if (--saved[id] == 0 && !items_[id].given && id != output) alive -= items_[id].bytes;
    }
    alive -= op.kept;
  }
  return use;
}

}  // namespace lockstep::model

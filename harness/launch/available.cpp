#include "harness/launch/available.hpp"

#include <fmt/format.h>

#include "model/base/device.hpp"

namespace lockstep::harness {

std::string engine_problem(std::string_view engine) {
  if (engine == "trainer" || engine == "inference") return {};
  return fmt::format("unknown engine '{}'; use \"trainer\" or \"inference\"", engine);
}

std::string device_problem(std::string_view device) {
  if (device == "cpu") return {};
  if (device == "cuda") return cuda_problem();
  return fmt::format("unknown device '{}'; use \"cpu\" or \"cuda\"", device);
}

std::string topology_problem(const model::Topology& topology, std::string_view engine) {
  if (engine == "inference" && topology.num_ranks() != topology.tp) {
    return fmt::format("the inference engine runs the tp axis only, not {}; leave the others out",
                       model::to_string(topology));
  }
  return {};
}

std::string option_problem(const RunSpec& run) {
  struct Option {
    const char* name;
    bool set;
  };
  const auto first_of = [](std::initializer_list<Option> options) -> const char* {
    for (const Option& option : options)
      if (option.set) return option.name;
    return nullptr;
  };
  if (run.device == "cuda" && run.engine == "inference")
    return "the inference engine computes on the CPU; leave the device out";
  if (run.device == "cuda" && run.topology.num_ranks() > 1) {
    return fmt::format(
        "a CUDA device serves one rank, not {}; leave the device or the topology out",
        model::to_string(run.topology));
  }
  if (run.device == "cuda" && run.train_steps > 0)
    return "training steps run on the CPU; leave the device out";
  if (run.engine == "inference") {
    const char* name = first_of({{"grads", run.grads},
                                 {"recompute", run.recompute},
                                 {"reference_ops", run.reference_ops},
                                 {"stream_layers", run.stream_layers},
                                 {"replay", !run.replay.empty()},
                                 {"train_steps", run.train_steps != 0},
                                 {"cp_cuts", !run.cp_cuts.empty()}});
    if (name != nullptr) {
      return fmt::format("{} belongs to the trainer; leave it out of a run of the inference engine",
                         name);
    }
  } else {
    const char* name = first_of({{"decode", run.decode != 0},
                                 {"prefill_chunk", run.prefill_chunk != 0},
                                 {"page_size", run.page_size != 0},
                                 {"weights_from", !run.weights_from.empty()}});
    if (name != nullptr) {
      return fmt::format(
          "{} belongs to the inference engine; set engine = \"inference\" or leave it "
          "out",
          name);
    }
  }
  for (const auto& [name, value] : {std::pair{"decode", run.decode},
                                    {"prefill_chunk", run.prefill_chunk},
                                    {"page_size", run.page_size}}) {
    if (value < 0) return fmt::format("{} = {} is negative; it counts tokens", name, value);
    if (value > kMostTokens)
      return fmt::format("{} = {} tokens is too much; use at most {}", name, value, kMostTokens);
  }
  return {};
}

}  // namespace lockstep::harness

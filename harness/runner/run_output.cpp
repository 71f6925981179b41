#include "harness/runner/run_output.hpp"

#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>

#include "harness/result/json_text.hpp"
#include "model/checkpoint/safetensors.hpp"

namespace lockstep::harness {
namespace {

using Json = nlohmann::ordered_json;
namespace fs = std::filesystem;

Json rows_json(const std::vector<RankRows>& rows) {
  Json list = Json::array();
  for (const RankRows& row : rows) list.push_back({row.begin, row.end});
  return list;
}

}  // namespace

void save_run(const fs::path& folder, const RunSpec& run, const RunOutput& output) {
  fs::create_directories(folder);
  fs::remove(folder / "run.json");
  std::map<std::string, Tensor> tensors;
  if (output.logits.defined()) tensors["logits"] = output.logits.contiguous();
  if (output.logprobs.defined()) tensors["logprobs"] = output.logprobs.contiguous();
  tensors["loss"] = at::scalar_tensor(output.loss, at::kDouble);
  for (const auto& [name, grad] : output.grads) tensors["grads/" + name] = grad.contiguous();
  Json order = Json::array();
  for (const auto& [name, value] : output.trace) {
    tensors["trace/" + name] = value.contiguous();
    order.push_back(name);
  }
  model::write_safetensors_file((folder / "rank0.safetensors").string(), tensors);
  const Json meta{{"run", run.name},
                  {"engine", run.engine},
                  {"policy", run.policy},
                  {"ranks", output.ranks},
                  {"tokens", output.tokens},
                  {"num_targets", output.num_targets},
                  {"cu_seqlens", output.cu_seqlens},
                  {"rank_rows", rows_json(output.rank_rows)},
                  {"trace", order},
                  {"seconds", output.seconds},
                  {"forward_s", output.forward_s},
                  {"backward_s", output.backward_s},
                  {"peak_bytes", output.peak_bytes},
                  {"sync_bytes", output.sync_bytes},
                  {"sync_s", output.sync_s},
                  {"warnings", output.warnings}};
  const std::string text = json_text(meta) + "\n";
  model::AtomicFile file((folder / "run.json").string());
  file.write(text.data(), text.size());
  file.commit();
}

RunOutput load_run(const fs::path& folder) {
  std::ifstream in(folder / "run.json");
  LOCKSTEP_CHECK(in.good(),
                 kInput,
                 "result of a run: {} is missing; the run did not finish, start it again",
                 (folder / "run.json").string());
  std::ostringstream text;
  text << in.rdbuf();
  RunOutput output;
  try {
    const Json meta = Json::parse(text.str());
    output.ranks = meta.at("ranks");
    output.tokens = meta.at("tokens");
    output.num_targets = meta.at("num_targets");
    output.cu_seqlens = meta.at("cu_seqlens").get<std::vector<int64_t>>();
    for (const Json& row : meta.at("rank_rows")) {
      output.rank_rows.push_back({row.at(0).get<int64_t>(), row.at(1).get<int64_t>()});
    }
    output.seconds = meta.at("seconds");
    output.forward_s = meta.at("forward_s");
    output.backward_s = meta.at("backward_s");
    output.peak_bytes = meta.at("peak_bytes");
    output.sync_bytes = meta.at("sync_bytes");
    output.sync_s = meta.at("sync_s");
    output.warnings = meta.at("warnings").get<std::vector<std::string>>();
    const model::Safetensors tensors =
        model::Safetensors::open((folder / "rank0.safetensors").string());
    if (tensors.contains("logits")) output.logits = tensors.load("logits");
    if (tensors.contains("logprobs")) output.logprobs = tensors.load("logprobs");
    output.loss = tensors.load("loss").item<double>();
    for (const auto& [name, info] : tensors.tensors()) {
      if (name.starts_with("grads/")) output.grads[name.substr(6)] = tensors.load(name);
    }
    for (const Json& name : meta.at("trace")) {
      const std::string module = name.get<std::string>();
      output.trace.emplace_back(module, tensors.load("trace/" + module));
    }
  } catch (const nlohmann::json::exception& error) {
    fail(ErrorKind::kInput,
         "result of a run: {} is damaged ({}); start the run again",
         (folder / "run.json").string(),
         error.what());
  }
  return output;
}

}  // namespace lockstep::harness

#include "model/checkpoint/name_table.hpp"

#include <fmt/ranges.h>

#include <algorithm>
#include <charconv>
#include <set>
#include <unordered_map>

namespace lockstep::model {
namespace {

struct Slot {
  size_t parameter;
  const DiskPart* part;
};

/// A tensor of the files together with its block scale.
struct Found {
  std::string name;
  const TensorInfo* info = nullptr;
  std::string scale;
  const TensorInfo* scale_info = nullptr;
};

bool is_fp8(at::ScalarType dtype) {
  return dtype == at::kFloat8_e4m3fn || dtype == at::kFloat8_e5m2;
}

std::string show(const std::vector<int64_t>& shape) {
  return fmt::format("[{}]", fmt::join(shape, ", "));
}

/// Name of the tensor that a scale belongs to, or empty.
std::string scaled_tensor(std::string_view bare) {
  for (std::string_view suffix : {"_scale_inv", "_scale"}) {
    if (bare.ends_with(suffix)) return std::string(bare.substr(0, bare.size() - suffix.size()));
  }
  return {};
}

bool is_dropped(const ModelConfig& config, std::string_view bare) {
  if (bare.starts_with("visual.")) return true;
  constexpr std::string_view kLayers = "layers.";
  if (!bare.starts_with(kLayers)) return false;
  bare.remove_prefix(kLayers.size());
  int64_t layer = -1;
  const auto [end, error] = std::from_chars(bare.data(), bare.data() + bare.size(), layer);
  return error == std::errc() && end != bare.data() + bare.size() && *end == '.' &&
         layer >= config.num_hidden_layers &&
         layer < config.num_hidden_layers + config.num_nextn_predict_layers;
}

class Matcher {
 public:
  Matcher(const ModelConfig& config,
          const std::vector<Parameter>& parameters,
          const std::map<std::string, TensorInfo, std::less<>>& tensors)
      : config_(config), parameters_(parameters), tensors_(tensors) {
    for (size_t i = 0; i < parameters.size(); ++i) {
      for (Naming naming : kNamings) {
        for (const DiskPart& part : parameters[i].parts_in(naming))
          slots_.try_emplace(part.name, Slot{i, &part});
      }
    }
  }

  NameMatch run() {
    for (const auto& [name, info] : tensors_) place(name, info);
    for (const auto& [base, scales] : scales_) attach_scale(base, scales);
    result_.bindings.resize(parameters_.size());
    for (size_t i = 0; i < parameters_.size(); ++i) bind(i);
    return std::move(result_);
  }

 private:
  /// Looked up by name first: rules that drop or guess only see what no parameter claims.
  void place(const std::string& name, const TensorInfo& info) {
    const std::string bare(bare_name(name));
    if (slots_.contains(bare)) {
      const auto [at, is_new] = found_.try_emplace(bare, Found{name, &info, "", nullptr});
      if (!is_new) {
        result_.duplicated.push_back(fmt::format("{} and {}", at->second.name, name));
      }
    } else if (const std::string base = scaled_tensor(bare); slots_.contains(base)) {
      scales_[base].push_back(name);
    } else if (is_dropped(config_, bare)) {
      result_.dropped.push_back(name);
    } else {
      result_.unknown.push_back(fmt::format("{} {}", name, show(info.shape)));
    }
  }

  void attach_scale(const std::string& base, const std::vector<std::string>& scales) {
    const auto found = found_.find(base);
    if (found == found_.end()) {
      for (const auto& s : scales) result_.unknown.push_back(s + " (a scale without its tensor)");
      return;
    }
    Found& tensor = found->second;
    if (!is_fp8(tensor.info->dtype)) {
      for (const std::string& s : scales) {
        result_.unknown.push_back(fmt::format("{} (a scale of {}, which is {} and needs none)",
                                              s,
                                              tensor.name,
                                              safetensors_dtype(tensor.info->dtype)));
      }
      return;
    }
    if (scales.size() > 1) {
      result_.duplicated.push_back(fmt::format("{}", fmt::join(scales, " and ")));
    }
    tensor.scale = scales.front();
    tensor.scale_info = &tensors_.find(tensor.scale)->second;
  }

  [[nodiscard]] size_t num_present(const Parameter& p, Naming naming) const {
    const auto& parts = p.parts_in(naming);
    return static_cast<size_t>(std::count_if(
        parts.begin(), parts.end(), [&](const DiskPart& q) { return found_.contains(q.name); }));
  }

  /// The naming that fills the parameter, or comes nearest.
  [[nodiscard]] Naming best_naming(const Parameter& p) const {
    Naming best = Naming::kReleased;
    double best_share = -1;
    for (Naming naming : kNamings) {
      const double share = static_cast<double>(num_present(p, naming)) /
                           static_cast<double>(p.parts_in(naming).size());
      if (share > best_share) {
        best = naming;
        best_share = share;
      }
    }
    return best;
  }

  void bind(size_t index) {
    const Parameter& p = parameters_[index];
    Binding& binding = result_.bindings[index];
    binding.naming = best_naming(p);
    const auto& parts = p.parts_in(binding.naming);
    const size_t present = num_present(p, binding.naming);
    const auto on_disk = [&](const DiskPart& part) {
      return disk_name(part.name, binding.naming, config_.composite);
    };
    if (present == 0) {
      if (p.name == "lm_head.weight" && config_.tie_word_embeddings && index > 0) {
        binding = result_.bindings.front();  // embed_tokens.weight
        return;
      }
      result_.missing.push_back(
          parts.size() == 1
              ? on_disk(parts.front())
              : fmt::format("{} (all {} tensors)", on_disk(parts.front()), parts.size()));
      return;
    }
    std::set<std::string_view> used;
    std::set<at::ScalarType> dtypes;
    for (const DiskPart& part : parts) {
      const auto found = found_.find(part.name);
      if (found == found_.end()) {
        result_.missing.push_back(on_disk(part));
        continue;
      }
      used.insert(part.name);
      check(part, found->second);
      binding.tensors.push_back(found->second.name);
      binding.scales.push_back(found->second.scale);
      const at::ScalarType dtype = found->second.info->dtype;
      dtypes.insert(is_fp8(dtype) ? at::kBFloat16 : dtype);
    }
    binding.dtype = *dtypes.begin();
    if (dtypes.size() > 1) {
      result_.wrong_dtype.push_back(
          fmt::format("{} is put together from tensors of different dtypes", p.name));
    }
    for (Naming naming : kNamings) {
      for (const DiskPart& part : p.parts_in(naming)) {
        const auto found = found_.find(part.name);
        if (found == found_.end() || !used.insert(part.name).second) continue;
        result_.duplicated.push_back(fmt::format(
            "{} (fills {}, as {} does)", found->second.name, p.name, binding.tensors.front()));
      }
    }
  }

  void check(const DiskPart& part, const Found& tensor) {
    const std::vector<int64_t>& shape = tensor.info->shape;
    if (shape != part.shape && (part.also_shape.empty() || shape != part.also_shape)) {
      result_.wrong_shape.push_back(
          fmt::format("{} is {}, expected {}", tensor.name, show(shape), show(part.shape)));
      return;
    }
    const at::ScalarType dtype = tensor.info->dtype;
    if (!c10::isFloatingType(dtype)) {
      result_.wrong_dtype.push_back(fmt::format(
          "{} is {}, expected a floating dtype", tensor.name, safetensors_dtype(dtype)));
    }
    if (!is_fp8(dtype)) return;
    if (tensor.scale_info == nullptr) {
      result_.missing.push_back(fmt::format("{}_scale_inv (the block scale of {} payload {})",
                                            tensor.name,
                                            safetensors_dtype(dtype),
                                            tensor.name));
      return;
    }
    std::vector<int64_t> blocks = shape;
    for (size_t d = shape.size() < 2 ? 0 : shape.size() - 2; d < shape.size(); ++d) {
      blocks[d] = (shape[d] + kScaleBlock - 1) / kScaleBlock;
    }
    if (tensor.scale_info->shape != blocks) {
      result_.wrong_shape.push_back(
          fmt::format("{} is {}, expected {}: one scale per {} x {} block",
                      tensor.scale,
                      show(tensor.scale_info->shape),
                      show(blocks),
                      kScaleBlock,
                      kScaleBlock));
    }
    if (!c10::isFloatingType(tensor.scale_info->dtype) || is_fp8(tensor.scale_info->dtype)) {
      result_.wrong_dtype.push_back(fmt::format(
          "{} is {}, expected F32", tensor.scale, safetensors_dtype(tensor.scale_info->dtype)));
    }
  }

  const ModelConfig& config_;
  const std::vector<Parameter>& parameters_;
  const std::map<std::string, TensorInfo, std::less<>>& tensors_;
  std::unordered_map<std::string, Slot> slots_;             // by bare name
  std::map<std::string, Found> found_;                      // by bare name
  std::map<std::string, std::vector<std::string>> scales_;  // by bare name of the payload
  NameMatch result_;
};

}  // namespace

std::string_view bare_name(std::string_view name) {
  for (bool stripped = true; stripped;) {
    stripped = false;
    for (std::string_view prefix : {"model.", "language_model."}) {
      if (!name.starts_with(prefix)) continue;
      name.remove_prefix(prefix.size());
      stripped = true;
    }
  }
  return name;
}

std::string NameMatch::problems() const {
  std::string text;
  for (const auto& [heading, lines] :
       {std::pair<std::string_view, const std::vector<std::string>*>{"missing", &missing},
        {"unknown", &unknown},
        {"duplicated", &duplicated},
        {"wrong shape", &wrong_shape},
        {"wrong dtype", &wrong_dtype}}) {
    if (lines->empty()) continue;
    text += fmt::format("\n{} ({}):", heading, lines->size());
    for (const std::string& line : *lines) text += "\n  " + line;
  }
  return text;
}

NameMatch match_names(const ModelConfig& config,
                      const std::vector<Parameter>& parameters,
                      const std::map<std::string, TensorInfo, std::less<>>& tensors) {
  return Matcher(config, parameters, tensors).run();
}

Tensor dequantize_blocks(const Tensor& payload, const Tensor& scale) {
  Tensor wide = scale.to(at::kFloat);
  for (int64_t dim : {payload.dim() - 2, payload.dim() - 1}) {
    if (dim < 0) continue;
    wide = wide.repeat_interleave(kScaleBlock, dim).narrow(dim, 0, payload.size(dim));
  }
  return payload.to(at::kFloat).mul(wide).to(at::kBFloat16);
}

}  // namespace lockstep::model

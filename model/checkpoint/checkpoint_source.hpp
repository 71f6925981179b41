// A checkpoint folder as weights; the part of it that tools ask beyond WeightSource.
#pragma once

#include <cstring>

#include "model/checkpoint/name_table.hpp"
#include "model/checkpoint/weight_source.hpp"

namespace lockstep::model {

/// Metadata of files with internal names.
inline constexpr std::string_view kLayoutKey = "lockstep_layout";
inline constexpr std::string_view kLayout = "internal-1";

class CheckpointSource final : public WeightSource {
 public:
  /// Throws as open_checkpoint.
  CheckpointSource(const std::string& folder, ModelConfig config);

  [[nodiscard]] const ModelConfig& config() const override { return config_; }
  [[nodiscard]] std::vector<std::string> names() const override;
  [[nodiscard]] WeightSpec spec(const std::string& name) const override;
  [[nodiscard]] Tensor load(const std::string& name) const override;
  [[nodiscard]] Tensor load_rows(const std::string& name,
                                 int64_t begin,
                                 int64_t end) const override;
  [[nodiscard]] std::vector<std::pair<std::string, Tensor>> disk_tensors(
      const std::string& name, const Tensor& value) const override;
  void release(const std::string& name) const override;
  [[nodiscard]] bool on_disk() const override { return true; }
  [[nodiscard]] std::vector<std::string> dropped() const override { return match_.dropped; }

  /// FP8 tensors with block scales, which load as bfloat16.
  [[nodiscard]] int64_t num_quantized() const;
  [[nodiscard]] const Safetensors& files() const { return files_; }

 private:
  [[nodiscard]] size_t index_of(const std::string& name) const;
  [[nodiscard]] Tensor load_part(const Binding& binding, size_t part) const;
  void check_tied_copy() const;

  ModelConfig config_;
  Safetensors files_;
  std::vector<Parameter> parameters_;
  std::map<std::string, size_t> index_;
  NameMatch match_;
};

}  // namespace lockstep::model

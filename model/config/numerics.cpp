#include "model/config/numerics.hpp"

#include <fmt/ranges.h>

namespace lockstep::model {
namespace {

/// A policy is a width, a column of the table, and what differs from that column.
struct PolicyRow {
  std::string_view name;
  Width width;
  uint8_t SwitchInfo::*column;
  std::vector<std::pair<std::string_view, std::string_view>> overrides;
  bool exact_sums = false;
};

const std::vector<PolicyRow>& policies() {
  const std::vector<std::pair<std::string_view, std::string_view>> invariant_f32 = {
      {"D06", "fixed"}, {"D62", "handover"}, {"D63", "fixed-tiles"}};
  static const std::vector<PolicyRow> rows = {
      {"float64", Width::kFloat64, &SwitchInfo::plain, {}},
      {"float32", Width::kFloat32, &SwitchInfo::plain, {}},
      {"hf-bf16", Width::kBFloat16, &SwitchInfo::hf, {}},
      {"fsdp-bf16", Width::kBFloat16, &SwitchInfo::trainer, {}},
      {"fsdp-fp32-islands",
       Width::kBFloat16,
       &SwitchInfo::trainer,
       {{"D01", "fp32"}, {"D02", "fp32"}, {"D03", "fp32"}}},
      // Copies follow updates, as a patched engine's do; the released model shares no indexer.
      {"vllm-bf16",
       Width::kBFloat16,
       &SwitchInfo::engine,
       {{"D41", "carry"}, {"D64", "live"}, {"D65", "refreshed"}}},
      {"vllm-fp8",
       Width::kBFloat16,
       &SwitchInfo::engine,
       {{"D41", "carry"}, {"D57", "fp8"}, {"D64", "live"}, {"D65", "refreshed"}}},
      {"invariant-f32", Width::kFloat32, &SwitchInfo::plain, invariant_f32, true},
      {"invariant-bf16",
       Width::kBFloat16,
       &SwitchInfo::trainer,
       {{"D01", "fp32"},
        {"D02", "fp32"},
        {"D03", "fp32"},
        {"D06", "fixed"},
        {"D39", "ascending"},
        {"D46", "fixed"},
        {"D55", "act-ascending"},
        {"D62", "handover"},
        {"D63", "fixed-tiles"}},
       true},
      {"invariant", Width::kFloat32, &SwitchInfo::plain, invariant_f32, true},
  };
  return rows;
}

}  // namespace

Numerics Numerics::policy(std::string_view name) {
  for (const PolicyRow& row : policies()) {
    if (row.name != name) continue;
    Numerics result;
    result.name_ = std::string(name);
    result.width_ = row.width;
    result.exact_sums_ = row.exact_sums;
    for (size_t i = 0; i < kNumSwitches; ++i) result.values_[i] = kSwitches[i].*row.column;
    for (const auto& [id, value] : row.overrides) result.set(id, value);
    result.name_ = std::string(name);
    return result;
  }
  fail(ErrorKind::kConfig,
       "numerics: unknown policy '{}'; use one of: {}",
       name,
       fmt::join(policy_names(), ", "));
}

std::vector<std::string> Numerics::policy_names() {
  std::vector<std::string> names;
  for (const PolicyRow& row : policies()) names.emplace_back(row.name);
  return names;
}

at::ScalarType Numerics::act() const {
  return width_ == Width::kFloat64   ? at::kDouble
         : width_ == Width::kFloat32 ? at::kFloat
                                     : at::kBFloat16;
}

at::ScalarType Numerics::acc() const {
  return width_ == Width::kFloat64 ? at::kDouble : at::kFloat;
}

bool Numerics::invariant() const {
  return exact_sums_ && !is<Switch::kHcProjection>("tf32-above-32") &&
         !is<Switch::kHcSplitK>("by-tokens") && !is<Switch::kHcStreamInput>("unrounded-upto-32") &&
         is<Switch::kKdaAlgorithm>("chunk64") && is<Switch::kChunkOrigin>("document") &&
         is<Switch::kPoolPhase>("document") && is<Switch::kTopkTies>("low-index") &&
         is<Switch::kSelectionOrder>("ascending") && !is<Switch::kShortShortcut>("per-batch") &&
         is<Switch::kMlaForm>("absorbed") && is<Switch::kDkvAccumulation>("fixed") &&
         is<Switch::kRouterTies>("low-index") && !is<Switch::kExpertSum>("unordered") &&
         is<Switch::kTpPartialSums>("one") && is<Switch::kCpKdaState>("handover") &&
         is<Switch::kGemmRows>("fixed-tiles");
}

std::string_view Numerics::value(Switch s) const {
  const auto i = static_cast<size_t>(s);
  return kSwitches[i].values[values_[i]];
}

void Numerics::set(std::string_view id_or_name, std::string_view value) {
  for (size_t i = 0; i < kNumSwitches; ++i) {
    const SwitchInfo& info = kSwitches[i];
    if (info.id != id_or_name && info.name != id_or_name) continue;
    const std::span<const std::string_view> allowed(info.values.data(), info.num_values());
    for (size_t v = 0; v < allowed.size(); ++v) {
      if (allowed[v] != value) continue;
      if (values_[i] != v) name_ += fmt::format("+{}={}", info.id, value);
      values_[i] = static_cast<uint8_t>(v);
      return;
    }
    fail(ErrorKind::kConfig,
         "numerics: {} ({}) cannot be '{}'; allowed: {}",
         info.id,
         info.name,
         value,
         fmt::join(allowed, ", "));
  }
  fail(ErrorKind::kConfig,
       "numerics: unknown switch '{}'; `lockstep list switches` shows D01 to D{}",
       id_or_name,
       kNumSwitches);
}

std::vector<Switch> Numerics::differences(const Numerics& other) const {
  std::vector<Switch> result;
  for (size_t i = 0; i < kNumSwitches; ++i) {
    if (values_[i] != other.values_[i]) result.push_back(static_cast<Switch>(i));
  }
  return result;
}

}  // namespace lockstep::model

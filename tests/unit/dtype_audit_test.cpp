#include "harness/trainer/dtype_audit.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <functional>
#include <map>
#include <set>

#include "harness/trainer/trainer.hpp"
#include "model/config/config_json.hpp"

namespace lockstep::tests {
namespace {

using harness::AuditPoint;
using harness::AuditRow;
using harness::DtypeAudit;
using testing::HasSubstr;

std::shared_ptr<const model::WeightSource> tiny() {
  return model::seeded_source(model::preset_config("tiny"), 3);
}

harness::TrainerOptions training(std::string_view policy) {
  harness::TrainerOptions options;
  options.numerics = model::Numerics::policy(policy);
  options.optimizer = parallel::OptimizerOptions{};
  return options;
}

std::string refusal(const std::function<void()>& act) {
  try {
    act();
  } catch (const Error& error) {
    return error.what();
  }
  return "nothing was refused";
}

const parallel::Mesh& one_rank() {
  static const parallel::Mesh mesh = parallel::Mesh::single();
  return mesh;
}

/// A file that holds one parameter in bfloat16.
std::shared_ptr<const model::WeightSource> with_cast(const std::string& name) {
  const auto source = tiny();
  std::map<std::string, Tensor> weights;
  for (const std::string& other : source->names()) weights[other] = source->load(other);
  weights[name] = weights[name].to(at::kBFloat16);
  return model::memory_source(source->config(), weights);
}

/// A loader that says it has one parameter in float32 and hands it out in bfloat16.
class CastingSource final : public model::WeightSource {
 public:
  explicit CastingSource(std::string name) : name_(std::move(name)) {}
  [[nodiscard]] const model::ModelConfig& config() const override { return inner_->config(); }
  [[nodiscard]] std::vector<std::string> names() const override { return inner_->names(); }
  [[nodiscard]] model::WeightSpec spec(const std::string& name) const override {
    return inner_->spec(name);
  }
  [[nodiscard]] Tensor load(const std::string& name) const override {
    const Tensor value = inner_->load(name);
    return name == name_ ? value.to(at::kBFloat16) : value;
  }
  [[nodiscard]] std::vector<std::pair<std::string, Tensor>> disk_tensors(
      const std::string& name, const Tensor& value) const override {
    return inner_->disk_tensors(name, value);
  }

 private:
  std::shared_ptr<const model::WeightSource> inner_ = tiny();
  std::string name_;
};

/// Layers get one parameter in bfloat16.
class Casting final : public model::ParamView {
 public:
  Tensor get(const std::string&) override { return at::zeros({2}, at::kBFloat16); }
};

TEST(DtypeAudit, B09EveryFloat32ParameterIsSeenAtEveryPoint) {
  const auto folder =
      std::filesystem::temp_directory_path() / ("lockstep_audit_" + std::to_string(getpid()));
  harness::Trainer trainer(tiny(), training("fsdp-fp32-islands"), one_rank());
  trainer.train_step({harness::random_documents({9, 4}, 100, 0, 1)});
  trainer.save(folder.string());
  std::filesystem::remove_all(folder);
  std::set<std::string> kinds;
  for (const AuditRow& row : trainer.audit()) {
    const bool frozen = row.name.find("e_score_correction_bias") != std::string::npos ||
                        row.name.find("indexer.") != std::string::npos;
    for (size_t p = 0; p < harness::kNumAuditPoints; ++p) {
      if (frozen && p == static_cast<size_t>(AuditPoint::kOptimizer)) continue;
      // The frozen indexer norms are published in bfloat16.
      if (p == static_cast<size_t>(AuditPoint::kLoad) && row.dtypes[p] == at::kBFloat16) continue;
      EXPECT_EQ(row.dtypes[p], at::kFloat)
          << row.name << " at " << to_string(static_cast<AuditPoint>(p));
    }
    kinds.insert(row.name.substr(row.name.rfind('.') + 1));
  }
  for (const char* kind : {"A_log", "dt_bias", "fn", "base", "scale", "e_score_correction_bias"})
    EXPECT_TRUE(kinds.contains(kind)) << kind << " is not among the audited parameters";
}

TEST(DtypeAudit, B09ACastAtAnyPointStopsTheRunAndNamesTheParameter) {
  const std::string name = "layers.1.self_attn.A_log";
  EXPECT_THAT(refusal([&] {
                harness::Trainer(std::make_shared<CastingSource>(name),
                                 training("fsdp-fp32-islands"),
                                 one_rank());
              }),
              testing::AllOf(HasSubstr(name), HasSubstr("point load"), HasSubstr("bfloat16")));
  const model::Numerics num = model::Numerics::policy("fsdp-fp32-islands");
  for (const AuditPoint point :
       {AuditPoint::kShard, AuditPoint::kOptimizer, AuditPoint::kCheckpoint}) {
    DtypeAudit audit(tiny()->config(), num);
    EXPECT_THAT(refusal([&] { audit.see(point, name, at::kBFloat16); }),
                testing::AllOf(HasSubstr(name), HasSubstr(std::string(to_string(point)))));
  }
  DtypeAudit audit(tiny()->config(), num);
  Casting casting;
  EXPECT_THAT(refusal([&] { audit.watch(casting)->get(name); }),
              testing::AllOf(HasSubstr(name), HasSubstr("forward")));
}

TEST(DtypeAudit, AFileThatHoldsLessIsWidenedAndSaidSo) {
  const std::string name = "layers.1.self_attn.A_log";
  const auto num = model::Numerics::policy("fsdp-fp32-islands");
  EXPECT_THAT(harness::stored_in_less(*with_cast(name), num),
              testing::AllOf(HasSubstr("1 parameters"), HasSubstr(name), HasSubstr("bfloat16")));
  EXPECT_EQ(harness::stored_in_less(*tiny(), num), "");
  EXPECT_EQ(harness::stored_in_less(*with_cast(name), model::Numerics::policy("fsdp-bf16")), "");
  harness::Trainer trainer(with_cast(name), training("fsdp-fp32-islands"), one_rank());
  for (const AuditRow& row : trainer.audit()) {
    if (row.name != name) continue;
    EXPECT_EQ(row.dtypes[static_cast<size_t>(AuditPoint::kLoad)], at::kBFloat16);
    EXPECT_EQ(row.dtypes[static_cast<size_t>(AuditPoint::kShard)], at::kFloat);
  }
}

TEST(DtypeAudit, PoliciesThatCastEverythingHaveLessToWatch) {
  // The cast of the decay is what this policy is about.
  harness::Trainer trainer(
      with_cast("layers.1.self_attn.A_log"), training("fsdp-bf16"), one_rank());
  for (const AuditRow& row : trainer.audit()) EXPECT_EQ(row.name.find("A_log"), std::string::npos);
  EXPECT_TRUE(harness::Trainer(tiny(), training("float32"), one_rank()).audit().empty());
}

}  // namespace
}  // namespace lockstep::tests

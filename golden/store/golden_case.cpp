#include "golden/store/golden_case.hpp"

#include "golden/store/sha256.hpp"
#include "model/base/seeded.hpp"

namespace lockstep::golden {
namespace {

Hdf5Reader open_checked(const std::filesystem::path& path) {
  Hdf5Reader file(path, ErrorKind::kGolden);
  const int64_t version = file.attribute_int("", "format_version");
  LOCKSTEP_CHECK(version == kGoldenFormatVersion,
                 kGolden,
                 "golden file {}: stale: format version {}, this program reads {}; remake it with "
                 "golden/make/make_goldens.py",
                 path.string(),
                 version,
                 kGoldenFormatVersion);
  return file;
}

std::vector<WeightRule> read_rules(const Hdf5Reader& file) {
  std::vector<WeightRule> rules;
  if (!file.exists("weights")) return rules;
  const auto names = file.read_strings("weights/names");
  const auto dtypes = file.read_strings("weights/dtypes");
  const Tensor shapes = file.read("weights/shapes"), numbers = file.read("weights/rules");
  const auto count = static_cast<int64_t>(names.size());
  LOCKSTEP_CHECK(dtypes.size() == names.size() && shapes.dim() == 2 && shapes.size(0) == count &&
                     numbers.dim() == 2 && numbers.size(0) == count && numbers.size(1) == 2,
                 kGolden,
                 "golden file {}: damaged: weights/names has {} entries, shapes {}, rules {}",
                 file.path().string(),
                 count,
                 describe(shapes),
                 describe(numbers));
  for (int64_t i = 0; i < count; ++i) {
    WeightRule rule{names[static_cast<size_t>(i)], {}, at::kBFloat16, 0.0, 0.0};
    if (dtypes[static_cast<size_t>(i)] == "F32") rule.dtype = at::kFloat;
    for (int64_t d = 0; d < shapes.size(1); ++d) {
      const int64_t size = shapes[i][d].item<int64_t>();
      if (size >= 0) rule.shape.push_back(size);
    }
    rule.offset = numbers[i][0].item<double>();
    rule.amplitude = numbers[i][1].item<double>();
    rules.push_back(std::move(rule));
  }
  return rules;
}

std::vector<double> row_of(const Tensor& table, int64_t row) {
  const Tensor values = table[row].reshape({-1}).contiguous();
  return {values.data_ptr<double>(), values.data_ptr<double>() + values.numel()};
}

std::map<std::string, Spread, std::less<>> read_spreads(const Hdf5Reader& file) {
  std::map<std::string, Spread, std::less<>> spreads;
  if (!file.exists("spread")) return spreads;
  const auto names = file.read_strings("spread/names");
  const Tensor f32 = file.read("spread/f32"), bf16 = file.read("spread/bf16"),
               replay = file.read("spread/bf16_replay");
  for (size_t i = 0; i < names.size(); ++i) {
    const auto row = static_cast<int64_t>(i);
    spreads[names[i]] = {row_of(f32, row), row_of(bf16, row), row_of(replay, row)};
  }
  return spreads;
}

}  // namespace

Tensor make_weight(const WeightRule& rule, uint64_t seed) {
  Tensor out = at::empty(rule.shape, at::TensorOptions(at::kFloat));
  const uint64_t key = seeded_key(seed, rule.name);
  auto* p = out.data_ptr<float>();
  for (int64_t i = 0; i < out.numel(); ++i) {
    const double u = static_cast<double>(seeded_value(key, i));
    p[i] = static_cast<float>(rule.offset + rule.amplitude * u);
  }
  return out.to(rule.dtype);
}

GoldenCase::GoldenCase(const std::filesystem::path& file)
    : file_(open_checked(file)),
      name_(file_.attribute_string("", "case")),
      seed_(static_cast<uint64_t>(file_.attribute_int("", "seed"))),
      rules_(read_rules(file_)),
      spreads_(read_spreads(file_)) {}

std::string GoldenCase::config_json() const {
  const Tensor bytes = file_.read("config");
  return {reinterpret_cast<const char*>(bytes.data_ptr<uint8_t>()),
          static_cast<size_t>(bytes.numel())};
}

Tensor GoldenCase::ids() const { return file_.read("documents/ids"); }

std::vector<int64_t> GoldenCase::cu_seqlens() const {
  const Tensor cu = file_.read("documents/cu_seqlens");
  return {cu.data_ptr<int64_t>(), cu.data_ptr<int64_t>() + cu.numel()};
}

std::filesystem::path GoldenCase::checkpoint() const {
  if (!file_.has_attribute("", "checkpoint")) return {};
  return file_.path().parent_path() / file_.attribute_string("", "checkpoint");
}

std::map<std::string, Tensor> GoldenCase::weights() const {
  LOCKSTEP_CHECK(checkpoint().empty(),
                 kGolden,
                 "golden {}: no seed makes its weights; open the checkpoint {}",
                 name_,
                 checkpoint().string());
  std::map<std::string, Tensor> out;
  Sha256 digest;
  for (const auto& rule : rules_) {
    Tensor w = make_weight(rule, seed_);
    digest.update(w.data_ptr(), w.nbytes());
    out.emplace(rule.name, std::move(w));
  }
  const std::string got = digest.hex(), want = file_.attribute_string("", "weights_sha256");
  LOCKSTEP_CHECK(got == want,
                 kGolden,
                 "golden {}: weights made from seed {} have sha256 {}, the reference ran with {}; "
                 "the seeded formula and the file {} do not belong together",
                 name_,
                 seed_,
                 got,
                 want,
                 file_.path().string());
  return out;
}

Tensor GoldenCase::logits() const { return file_.read("f64/logits"); }
Tensor GoldenCase::logprobs() const { return file_.read("f64/logprobs"); }
double GoldenCase::loss() const { return file_.read("f64/loss").item<double>(); }

std::vector<std::string> GoldenCase::activation_names() const {
  return file_.list("f64/activations");
}

std::vector<std::string> GoldenCase::grad_names() const { return file_.list("f64/grads"); }

StoredTensor GoldenCase::stored(const std::string& group, std::string_view name) const {
  const std::string path = group + "/" + std::string(name);
  StoredTensor out{std::string(name), StoredKind::kWhole, {}, file_.read(path)};
  out.shape = out.values.sizes().vec();
  if (!file_.has_attribute(path, "kind")) return out;
  const std::string kind = file_.attribute_string(path, "kind");
  LOCKSTEP_CHECK(kind == "tensor" || kind == "tokens",
                 kGolden,
                 "golden file {}: '{}' is of unknown kind '{}'",
                 file_.path().string(),
                 path,
                 kind);
  out.kind = kind == "tensor" ? StoredKind::kTensor : StoredKind::kTokens;
  out.shape = file_.attribute_ints(path, "shape");
  return out;
}

StoredTensor GoldenCase::activation(std::string_view name) const {
  return stored("f64/activations", name);
}

StoredTensor GoldenCase::grad(std::string_view name) const { return stored("f64/grads", name); }

std::optional<Spread> GoldenCase::spread(std::string_view name) const {
  if (spreads_.empty()) return std::nullopt;
  const auto found = spreads_.find(name);
  LOCKSTEP_CHECK(found != spreads_.end(),
                 kGolden,
                 "golden {}: no spread of '{}' in {}",
                 name_,
                 name,
                 file_.path().string());
  return found->second;
}

double GoldenCase::min_gap(std::string_view kind) const {
  return file_.attribute_double("", "min_gap_" + std::string(kind));
}

bool GoldenCase::carried_selection() const {
  return file_.attribute_int("", "carried_selection") != 0;
}

GoldenCase open_golden(const std::filesystem::path& dir, std::string_view name) {
  const ManifestEntry entry = find_entry(dir, name);
  verify_entry(dir, entry);
  return GoldenCase(dir / entry.file);
}

}  // namespace lockstep::golden

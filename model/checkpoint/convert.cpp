#include "model/checkpoint/convert.hpp"

#include <fmt/ranges.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>

#include "model/base/same_bytes.hpp"
#include "model/checkpoint/checkpoint_source.hpp"
#include "model/checkpoint/mapped_file.hpp"

namespace lockstep::model {
namespace {

namespace fs = std::filesystem;

/// A folder under a temporary name, removed unless it is renamed.
class StagedFolder {
 public:
  explicit StagedFolder(const std::string& to) : final_(fs::path(to).lexically_normal()) {
    if (!final_.has_filename()) final_ = final_.parent_path();
    std::error_code ignored;
    const bool exists = fs::exists(final_, ignored);
    LOCKSTEP_CHECK(!exists || (fs::is_directory(final_) && fs::is_empty(final_)),
                   kInput,
                   "{} already exists and is not an empty folder; choose another target or remove "
                   "it",
                   final_.string());
    staged_ = fmt::format("{}.tmp-{}", final_.string(), ::getpid());
    std::error_code error;
    fs::remove_all(staged_, error);
    fs::create_directories(staged_, error);
    LOCKSTEP_CHECK(!error, kInput, "cannot create {}: {}", staged_.string(), error.message());
  }
  ~StagedFolder() {
    std::error_code ignored;
    fs::remove_all(staged_, ignored);
  }
  StagedFolder(const StagedFolder&) = delete;
  StagedFolder& operator=(const StagedFolder&) = delete;

  [[nodiscard]] std::string path() const { return staged_.string(); }
  void commit() {
    std::error_code error;
    fs::rename(staged_, final_, error);
    LOCKSTEP_CHECK(!error,
                   kInput,
                   "cannot rename {} to {}: {}",
                   staged_.string(),
                   final_.string(),
                   error.message());
    sync_folder(final_.parent_path().string());
  }

 private:
  fs::path final_, staged_;
};

/// The parts of every parameter as tensors to write, read from the source when their turn comes.
std::vector<TensorToWrite> parts_to_write(const WeightSource& source,
                                          const std::vector<Parameter>& parameters,
                                          Naming naming) {
  std::vector<TensorToWrite> result;
  for (const Parameter& p : parameters) {
    if (p.name == "lm_head.weight" && source.config().tie_word_embeddings) continue;
    const at::ScalarType dtype = source.spec(p.name).dtype;
    const int64_t row = p.numel() / p.shape.front();
    int64_t first = 0;
    const auto& parts = p.parts_in(naming);
    for (size_t k = 0; k < parts.size(); ++k) {
      const DiskPart& part = parts[k];
      const bool last = k + 1 == parts.size();
      // An expert's gate is half a row; a convolution's rows are whole.
      const int64_t begin = first / row, end = (first + part.numel() + row - 1) / row;
      const int64_t skip = first - begin * row;
      result.push_back({disk_name(part.name, naming, source.config().composite),
                        dtype,
                        part.shape,
                        [&source, &p, &part, begin, end, skip, last] {
                          Tensor rows = source.load_rows(p.name, begin, end).contiguous();
                          if (last) source.release(p.name);
                          return rows.view(-1).narrow(0, skip, part.numel()).view(part.shape);
                        }});
      first += part.numel();
    }
  }
  return result;
}

/// Every parameter read again in pieces and compared as bytes.
void verify(const WeightSource& source,
            const std::vector<Parameter>& parameters,
            const std::string& folder) {
  constexpr int64_t kPieceBytes = int64_t{256} << 20;
  const CheckpointSource written(folder, load_config(folder));
  LOCKSTEP_CHECK(describe_config(written.config()) == describe_config(source.config()),
                 kInternal,
                 "{}: the config reads back differently",
                 folder);
  for (const Parameter& p : parameters) {
    const WeightSpec want = source.spec(p.name), got = written.spec(p.name);
    LOCKSTEP_CHECK(want.dtype == got.dtype && want.shape == got.shape,
                   kInput,
                   "{}: {} reads back with another dtype or shape",
                   folder,
                   p.name);
    const int64_t row_bytes =
        p.numel() / p.shape.front() * static_cast<int64_t>(c10::elementSize(want.dtype));
    const int64_t step = std::max<int64_t>(1, kPieceBytes / std::max<int64_t>(1, row_bytes));
    for (int64_t row = 0; row < p.shape.front(); row += step) {
      const int64_t end = std::min(row + step, p.shape.front());
      LOCKSTEP_CHECK(
          same_bytes(source.load_rows(p.name, row, end), written.load_rows(p.name, row, end)),
          kInput,
          "{}: {} rows {} to {} read back with other bytes; the disk may be faulty",
          folder,
          p.name,
          row,
          end);
    }
    source.release(p.name);
    written.release(p.name);
  }
}

/// Tokenizer, templates and the like: small files that are neither weights nor the config.
std::vector<std::string> copy_companions(const std::string& from, const std::string& to) {
  constexpr uintmax_t kMostBytes = uintmax_t{64} << 20;
  std::vector<std::string> copied;
  for (const auto& entry : fs::directory_iterator(from)) {
    const std::string name = entry.path().filename().string();
    const std::string suffix = entry.path().extension().string();
    const bool known = suffix == ".json" || suffix == ".jinja" || suffix == ".txt" ||
                       suffix == ".model" || suffix == ".tiktoken";
    if (!known || name == "config.json" || name.ends_with(".index.json")) continue;
    if (!entry.is_regular_file() || entry.file_size() > kMostBytes) continue;
    fs::copy_file(entry.path(), fs::path(to) / name);
    copied.push_back(name);
  }
  std::sort(copied.begin(), copied.end());
  return copied;
}

}  // namespace

ConvertReport export_checkpoint(const WeightSource& source,
                                const std::string& to,
                                Naming naming,
                                const ExportOptions& options) {
  const std::vector<Parameter> parameters = expected_parameters(source.config());
  StagedFolder folder(to);
  const std::vector<TensorToWrite> tensors = parts_to_write(source, parameters, naming);
  WriteOptions write;
  write.max_shard_bytes = options.max_shard_bytes;
  if (naming == Naming::kInternal) write.metadata[std::string(kLayoutKey)] = kLayout;

  ConvertReport report;
  report.files = write_safetensors(folder.path(), tensors, write);
  const std::string dtype = dtype_name(source.spec("embed_tokens.weight").dtype);
  const std::string config = export_config(source.config(), dtype, false);
  AtomicFile config_file((fs::path(folder.path()) / "config.json").string());
  config_file.write(config.data(), config.size());
  config_file.commit();
  report.files.insert(report.files.begin(), "config.json");
  if (!options.copy_from.empty()) {
    const auto copied = copy_companions(options.copy_from, folder.path());
    report.files.insert(report.files.end(), copied.begin(), copied.end());
  }
  verify(source, parameters, folder.path());
  folder.commit();

  report.dropped = source.dropped();
  report.num_tensors = static_cast<int64_t>(tensors.size());
  for (const TensorToWrite& tensor : tensors) report.bytes += tensor.bytes();
  for (const Parameter& p : parameters) report.num_parameters += p.numel();
  return report;
}

ConvertReport convert(const std::string& from,
                      const std::string& to,
                      std::string_view format,
                      ConfigDefaults defaults,
                      uint64_t max_shard_bytes) {
  LOCKSTEP_CHECK(format == "hf" || format == "internal",
                 kInput,
                 "unknown checkpoint format '{}'; use hf or internal",
                 format);
  const CheckpointSource source(from, load_config(from, defaults));
  ConvertReport report = export_checkpoint(
      source, to, format == "hf" ? Naming::kReleased : Naming::kInternal, {max_shard_bytes, from});
  report.num_quantized = source.num_quantized();
  return report;
}

std::string ConvertReport::text() const {
  std::string out = fmt::format("{} tensors, {} parameters, {} bytes in {} files: {}\n",
                                num_tensors,
                                num_parameters,
                                bytes,
                                files.size(),
                                fmt::join(files, ", "));
  if (num_quantized > 0) {
    out += fmt::format("{} FP8 tensors were written as bfloat16; everything else is byte-equal\n",
                       num_quantized);
  } else {
    out += "read again: byte-equal\n";
  }
  if (!dropped.empty()) {
    out += fmt::format("dropped {} tensors that the text model does not have:\n", dropped.size());
    for (const std::string& name : dropped) out += "  " + name + "\n";
  }
  return out;
}

}  // namespace lockstep::model

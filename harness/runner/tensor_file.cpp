#include "harness/runner/tensor_file.hpp"

#include <cstring>
#include <fstream>
#include <iterator>

#include "golden/store/hdf5.hpp"
#include "harness/runner/completions.hpp"
#include "model/checkpoint/safetensors.hpp"

namespace lockstep::harness {
namespace {

class SafetensorsFile final : public TensorFile {
 public:
  explicit SafetensorsFile(const std::filesystem::path& path)
      : file_(model::Safetensors::open(path.string())) {}
  std::vector<std::string> names() const override {
    std::vector<std::string> result;
    for (const auto& [name, info] : file_.tensors()) result.push_back(name);
    return result;
  }
  Tensor load(const std::string& name) const override { return file_.load(name); }

 private:
  model::Safetensors file_;
};

class Hdf5File final : public TensorFile {
 public:
  explicit Hdf5File(const std::filesystem::path& path) : file_(path) {}
  std::vector<std::string> names() const override { return file_.datasets(); }
  Tensor load(const std::string& name) const override { return file_.read(name); }

 private:
  golden::Hdf5Reader file_;
};

}  // namespace

std::unique_ptr<TensorFile> open_tensor_file(const std::filesystem::path& path) {
  std::error_code error;
  LOCKSTEP_CHECK(std::filesystem::exists(path, error),
                 kInput,
                 "opening {}: no such file; give a .safetensors, .h5, .npz or .json file",
                 path.string());
  if (std::filesystem::is_directory(path)) return std::make_unique<SafetensorsFile>(path);
  char magic[8] = {};
  std::ifstream in(path, std::ios::binary);
  LOCKSTEP_CHECK(
      in.good(), kInput, "opening {}: not readable; check its permissions", path.string());
  in.read(magic, sizeof magic);
  LOCKSTEP_CHECK(in.gcount() > 0,
                 kInput,
                 "opening {}: the file is empty (0 bytes); whatever wrote it did not finish",
                 path.string());
  if (std::memcmp(magic, "\x89HDF\r\n\x1a\n", 8) == 0) return std::make_unique<Hdf5File>(path);
  if (std::memcmp(magic, "PK\x03\x04", 4) == 0 || std::memcmp(magic, "PK\x05\x06", 4) == 0) {
    return open_npz(path);
  }
  if (looks_like_json(magic, static_cast<size_t>(in.gcount()))) {
    in.clear();
    in.seekg(0);
    return parse_completions(std::string(std::istreambuf_iterator<char>(in), {}), path.string());
  }
  return std::make_unique<SafetensorsFile>(path);
}

}  // namespace lockstep::harness

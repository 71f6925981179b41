// HDF5 files as tensors by name. The only room that includes hdf5.h; every handle is owned, and
// every failure becomes one Error that names the file and the dataset. The library is the serial
// one: use a file from one thread.
#pragma once

#include <filesystem>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "model/base/torch.hpp"

namespace lockstep::golden {

/// Version of the library: "1.10.8".
std::string hdf5_version();

/// Reads one file. Groups nest with '/', and a leading '/' is optional everywhere.
class Hdf5Reader {
 public:
  /// Throws Error{kind} when the file is missing, is no HDF5 file or is truncated.
  explicit Hdf5Reader(std::filesystem::path path, ErrorKind kind = ErrorKind::kInput);
  Hdf5Reader(const Hdf5Reader&) = delete;
  Hdf5Reader& operator=(const Hdf5Reader&) = delete;
  Hdf5Reader(Hdf5Reader&&) noexcept;
  Hdf5Reader& operator=(Hdf5Reader&&) noexcept;
  ~Hdf5Reader();

  [[nodiscard]] const std::filesystem::path& path() const { return path_; }

  /// A dataset or group of this name exists.
  [[nodiscard]] bool exists(std::string_view name) const;
  /// Names directly inside a group ("" is the root), sorted by bytes.
  [[nodiscard]] std::vector<std::string> list(std::string_view group = "") const;
  /// Full names, without the leading '/', of all datasets below a group, sorted by bytes.
  [[nodiscard]] std::vector<std::string> datasets(std::string_view group = "") const;

  /// The whole dataset in its own dtype: float64, float32, float16, bfloat16 (also as Hdf5Writer
  /// stores it), int64, int32, int16, int8, uint8; wider unsigned integers become int64 and must
  /// fit. Either byte order. Throws for strings and compounds.
  [[nodiscard]] Tensor read(std::string_view name) const;
  /// Sizes only, without reading the values.
  [[nodiscard]] std::vector<int64_t> shape(std::string_view name) const;
  /// A one-dimensional (or scalar) dataset of fixed or variable length strings.
  [[nodiscard]] std::vector<std::string> read_strings(std::string_view name) const;

  /// Attributes of an object ("" is the root).
  [[nodiscard]] bool has_attribute(std::string_view object, std::string_view name) const;
  [[nodiscard]] std::vector<std::string> attributes(std::string_view object = "") const;
  [[nodiscard]] std::string attribute_string(std::string_view object, std::string_view name) const;
  [[nodiscard]] int64_t attribute_int(std::string_view object, std::string_view name) const;
  [[nodiscard]] double attribute_double(std::string_view object, std::string_view name) const;
  [[nodiscard]] std::vector<int64_t> attribute_ints(std::string_view object,
                                                    std::string_view name) const;

 private:
  struct Impl;
  std::filesystem::path path_;
  ErrorKind kind_;
  std::unique_ptr<Impl> impl_;
};

/// Writes one file under a temporary name beside it; commit() renames it into place, so that a
/// reader never sees a half-written file. Without commit() the temporary file is removed.
class Hdf5Writer {
 public:
  explicit Hdf5Writer(std::filesystem::path path);
  Hdf5Writer(const Hdf5Writer&) = delete;
  Hdf5Writer& operator=(const Hdf5Writer&) = delete;
  ~Hdf5Writer();

  /// Stores a dense tensor (any dtype that Hdf5Reader reads, and bool as uint8) and its groups on
  /// the way; bfloat16 keeps its 16 bits as an HDF5 float type. `deflate` compresses losslessly.
  void write(std::string_view name, const Tensor& tensor, bool deflate = false);
  void write_strings(std::string_view name, const std::vector<std::string>& values);
  /// Attributes of an existing object ("" is the root).
  void attribute(std::string_view object, std::string_view name, std::string_view value);
  void attribute(std::string_view object, std::string_view name, int64_t value);
  void attribute(std::string_view object, std::string_view name, double value);

  /// Closes the file and renames it. Once.
  void commit();

 private:
  struct Impl;
  std::filesystem::path path_, part_;
  std::unique_ptr<Impl> impl_;
};

}  // namespace lockstep::golden

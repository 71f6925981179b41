// Tensors by name out of whatever somebody stored them in: safetensors, HDF5, npz.
#pragma once

#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "model/base/torch.hpp"

namespace lockstep::harness {

class TensorFile {
 public:
  virtual ~TensorFile() = default;
  /// Sorted by bytes.
  [[nodiscard]] virtual std::vector<std::string> names() const = 0;
  /// In the stored dtype, on the CPU, possibly a view of the file: not to be written to.
  [[nodiscard]] virtual Tensor load(const std::string& name) const = 0;
};

/// Opens a .safetensors file, a folder of them, a .h5 / .hdf5 file, a .npz file or the JSON of a
/// completion server (completions.hpp), told apart by the first bytes and not by the name. Throws
/// kInput naming file and cause.
std::unique_ptr<TensorFile> open_tensor_file(const std::filesystem::path& path);

/// Entries of a zip archive of .npy arrays (stored or deflated, 64-bit sizes): what numpy.savez and
/// numpy.savez_compressed write. Throws kInput for damage, encryption, objects and strings.
std::unique_ptr<TensorFile> open_npz(const std::filesystem::path& path);

/// One .npy array (format 1 to 3, either order, little-endian) from memory. `what` names it in
/// messages. A two-byte void type ("|V2") is what bfloat16 arrays are saved as and is read so.
Tensor parse_npy(const std::string& bytes, const std::string& what);

}  // namespace lockstep::harness

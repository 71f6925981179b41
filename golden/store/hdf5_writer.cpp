#include <unistd.h>

#include <algorithm>
#include <cstring>

#include "golden/store/hdf5.hpp"
#include "golden/store/hdf5_handle.hpp"

namespace lockstep::golden {

struct Hdf5Writer::Impl {
  Handle file, groups;
  std::string path;

  void check(bool ok, std::string_view name, std::string_view what) const {
    if (ok) return;
    const std::string dataset = name.empty() ? "" : fmt::format("'{}': ", name);
    fail(ErrorKind::kInput, "writing {}: {}{}: {}", path, dataset, what, hdf5_reason());
  }

  void put(
      std::string_view name, hid_t type, hid_t space, hid_t properties, const void* data) const {
    const Handle d(H5Dcreate2(file.get(),
                              std::string(name).c_str(),
                              type,
                              space,
                              groups.get(),
                              properties,
                              H5P_DEFAULT),
                   H5Dclose);
    check(d.valid(), name, "cannot be created");
    check(data == nullptr || H5Dwrite(d.get(), type, H5S_ALL, H5S_ALL, H5P_DEFAULT, data) >= 0,
          name,
          "cannot be written");
  }

  void put_attribute(std::string_view object,
                     std::string_view name,
                     hid_t type,
                     const void* data) const {
    const std::string full = object.empty() ? "/" : std::string(object);
    const Handle o(H5Oopen(file.get(), full.c_str(), H5P_DEFAULT), H5Oclose);
    check(o.valid(), object, "no such dataset or group to put an attribute on");
    const Handle space(H5Screate(H5S_SCALAR), H5Sclose);
    const std::string attribute_name(name);
    const Handle a(
        H5Acreate2(o.get(), attribute_name.c_str(), type, space.get(), H5P_DEFAULT, H5P_DEFAULT),
        H5Aclose);
    check(a.valid() && H5Awrite(a.get(), type, data) >= 0, object, "attribute cannot be written");
  }
};

Hdf5Writer::Hdf5Writer(std::filesystem::path path)
    : path_(std::move(path)), impl_(std::make_unique<Impl>()) {
  quiet_hdf5();
  part_ = path_;
  part_ += fmt::format(".part{}", getpid());
  impl_->path = path_.string();
  const auto folder = path_.parent_path();
  std::error_code ignored;
  if (!folder.empty()) std::filesystem::create_directories(folder, ignored);
  Handle access(H5Pcreate(H5P_FILE_ACCESS), H5Pclose);
  H5Pset_libver_bounds(access.get(), H5F_LIBVER_V110, H5F_LIBVER_LATEST);
  impl_->file =
      Handle(H5Fcreate(part_.c_str(), H5F_ACC_TRUNC, H5P_DEFAULT, access.get()), H5Fclose);
  impl_->check(impl_->file.valid(), "", "cannot create the file");
  impl_->groups = Handle(H5Pcreate(H5P_LINK_CREATE), H5Pclose);
  H5Pset_create_intermediate_group(impl_->groups.get(), 1);
}

Hdf5Writer::~Hdf5Writer() {
  if (!impl_) return;
  impl_.reset();
  std::error_code ignored;
  std::filesystem::remove(part_, ignored);
}

void Hdf5Writer::write(std::string_view name, const Tensor& tensor, bool deflate) {
  LOCKSTEP_CHECK(impl_ != nullptr, kInternal, "writing {}: already committed", path_.string());
  const std::string what = fmt::format("writing {}: '{}'", impl_->path, name);
  LOCKSTEP_CHECK(tensor.defined(), kInput, "{}: the tensor is undefined", what);
  Tensor dense = tensor.detach().to(at::kCPU).contiguous();
  if (dense.scalar_type() == at::kBool) dense = dense.to(at::kByte);
  const Handle type = memory_type(dense.scalar_type(), what);
  std::vector<hsize_t> dims(dense.sizes().begin(), dense.sizes().end());
  const Handle space(dims.empty()
                         ? H5Screate(H5S_SCALAR)
                         : H5Screate_simple(static_cast<int>(dims.size()), dims.data(), nullptr),
                     H5Sclose);
  const Handle properties(H5Pcreate(H5P_DATASET_CREATE), H5Pclose);
  H5Pset_obj_track_times(properties.get(), false);
  if (deflate && dense.numel() > 0 && !dims.empty()) {
    // Chunks of whole leading rows, about a mebibyte each.
    const auto row_bytes = static_cast<uint64_t>(dense.nbytes()) / dims[0];
    std::vector<hsize_t> chunk = dims;
    chunk[0] =
        std::clamp<hsize_t>((hsize_t{1} << 20) / std::max<uint64_t>(row_bytes, 1), 1, dims[0]);
    H5Pset_chunk(properties.get(), static_cast<int>(chunk.size()), chunk.data());
    H5Pset_shuffle(properties.get());
    H5Pset_deflate(properties.get(), 6);
  }
  impl_->put(name,
             type.get(),
             space.get(),
             properties.get(),
             dense.numel() > 0 ? dense.data_ptr() : nullptr);
}

void Hdf5Writer::write_strings(std::string_view name, const std::vector<std::string>& values) {
  LOCKSTEP_CHECK(impl_ != nullptr, kInternal, "writing {}: already committed", path_.string());
  size_t width = 1;
  for (const auto& v : values) width = std::max(width, v.size());
  std::vector<char> buffer(values.size() * width, '\0');
  for (size_t i = 0; i < values.size(); ++i) {
    std::memcpy(buffer.data() + i * width, values[i].data(), values[i].size());
  }
  const Handle type(H5Tcopy(H5T_C_S1), H5Tclose);
  H5Tset_size(type.get(), width);
  H5Tset_strpad(type.get(), H5T_STR_NULLPAD);
  const hsize_t count = values.size();
  const Handle space(H5Screate_simple(1, &count, nullptr), H5Sclose);
  const Handle properties(H5Pcreate(H5P_DATASET_CREATE), H5Pclose);
  H5Pset_obj_track_times(properties.get(), false);
  impl_->put(name, type.get(), space.get(), properties.get(), count > 0 ? buffer.data() : nullptr);
}

void Hdf5Writer::attribute(std::string_view object, std::string_view name, std::string_view value) {
  LOCKSTEP_CHECK(impl_ != nullptr, kInternal, "writing {}: already committed", path_.string());
  const std::string text = value.empty() ? std::string(1, '\0') : std::string(value);
  const Handle type(H5Tcopy(H5T_C_S1), H5Tclose);
  H5Tset_size(type.get(), text.size());
  H5Tset_strpad(type.get(), H5T_STR_NULLPAD);
  impl_->put_attribute(object, name, type.get(), text.data());
}

void Hdf5Writer::attribute(std::string_view object, std::string_view name, int64_t value) {
  LOCKSTEP_CHECK(impl_ != nullptr, kInternal, "writing {}: already committed", path_.string());
  impl_->put_attribute(object, name, H5T_NATIVE_INT64, &value);
}

void Hdf5Writer::attribute(std::string_view object, std::string_view name, double value) {
  LOCKSTEP_CHECK(impl_ != nullptr, kInternal, "writing {}: already committed", path_.string());
  impl_->put_attribute(object, name, H5T_NATIVE_DOUBLE, &value);
}

void Hdf5Writer::commit() {
  LOCKSTEP_CHECK(impl_ != nullptr, kInternal, "writing {}: already committed", path_.string());
  const bool flushed = H5Fflush(impl_->file.get(), H5F_SCOPE_GLOBAL) >= 0;
  impl_->check(flushed, "", "cannot be flushed");
  impl_.reset();
  std::error_code error;
  std::filesystem::rename(part_, path_, error);
  if (!error) return;
  const std::string reason = error.message();
  std::filesystem::remove(part_, error);
  fail(ErrorKind::kInput,
       "writing {}: cannot rename {} into place: {}",
       path_.string(),
       part_.string(),
       reason);
}

}  // namespace lockstep::golden

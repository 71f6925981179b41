#include <algorithm>
#include <cstring>
#include <limits>

#include "golden/store/hdf5.hpp"
#include "golden/store/hdf5_handle.hpp"

namespace lockstep::golden {

struct Hdf5Reader::Impl {
  Handle file;
  std::string path;
  ErrorKind kind = ErrorKind::kInput;

  [[noreturn]] void stop(std::string_view name, std::string_view what) const {
    const std::string reason = hdf5_reason();
    fail(kind,
         "reading {}: '{}': {}{}{}",
         path,
         name.empty() ? "/" : name,
         what,
         reason.empty() ? "" : ": ",
         reason);
  }

  [[nodiscard]] bool exists(std::string_view name) const {
    // H5Lexists wants every intermediate group to exist.
    std::string prefix;
    size_t begin = 0;
    while (begin < name.size()) {
      size_t end = name.find('/', begin);
      if (end == std::string_view::npos) end = name.size();
      if (end > begin) {
        prefix += '/';
        prefix += name.substr(begin, end - begin);
        if (H5Lexists(file.get(), prefix.c_str(), H5P_DEFAULT) <= 0) {
          H5Eclear2(H5E_DEFAULT);
          return false;
        }
      }
      begin = end + 1;
    }
    return true;
  }

  [[nodiscard]] Handle object(std::string_view name) const {
    if (!exists(name)) stop(name, "no such dataset or group in this file");
    const std::string full = name.empty() ? "/" : std::string(name);
    Handle h(H5Oopen(file.get(), full.c_str(), H5P_DEFAULT), H5Oclose);
    if (!h.valid()) stop(name, "cannot be opened");
    return h;
  }

  [[nodiscard]] Handle dataset(std::string_view name) const {
    Handle h = object(name);
    if (H5Iget_type(h.get()) != H5I_DATASET) stop(name, "is a group, not a dataset");
    return h;
  }

  [[nodiscard]] Handle attribute(std::string_view object_name, std::string_view name) const {
    const Handle o = object(object_name);
    const std::string attribute_name(name);
    if (H5Aexists(o.get(), attribute_name.c_str()) <= 0) {
      stop(object_name, fmt::format("has no attribute '{}'", name));
    }
    Handle a(H5Aopen(o.get(), attribute_name.c_str(), H5P_DEFAULT), H5Aclose);
    if (!a.valid()) stop(object_name, fmt::format("attribute '{}' cannot be opened", name));
    return a;
  }
};

namespace {

std::vector<int64_t> sizes_of(hid_t space) {
  const int rank = H5Sget_simple_extent_ndims(space);
  std::vector<hsize_t> dims(static_cast<size_t>(std::max(rank, 0)));
  if (rank > 0) H5Sget_simple_extent_dims(space, dims.data(), nullptr);
  return {dims.begin(), dims.end()};
}

herr_t collect_link(hid_t, const char* name, const H5L_info_t*, void* data) {
  static_cast<std::vector<std::string>*>(data)->emplace_back(name);
  return 0;
}

herr_t collect_dataset(hid_t, const char* name, const H5O_info_t* info, void* data) {
  if (info->type == H5O_TYPE_DATASET) {
    static_cast<std::vector<std::string>*>(data)->emplace_back(name);
  }
  return 0;
}

herr_t collect_attribute(hid_t, const char* name, const H5A_info_t*, void* data) {
  static_cast<std::vector<std::string>*>(data)->emplace_back(name);
  return 0;
}

// Fixed-length strings end at the first zero byte or at their size; blanks only pad where the type
// says so.
std::string trimmed(const char* text, size_t size, bool blank_padded) {
  size_t length = strnlen(text, size);
  while (blank_padded && length > 0 && text[length - 1] == ' ') --length;
  return {text, length};
}

// Reads `count` strings with `read(memory type, buffer)`.
template <typename Read>
bool read_text(hid_t type, size_t count, std::vector<std::string>& out, const Read& read) {
  if (H5Tget_class(type) != H5T_STRING) return false;
  if (H5Tis_variable_str(type) > 0) {
    Handle memory(H5Tcopy(H5T_C_S1), H5Tclose);
    H5Tset_size(memory.get(), H5T_VARIABLE);
    H5Tset_cset(memory.get(), H5Tget_cset(type));
    std::vector<char*> pointers(count, nullptr);
    if (read(memory.get(), static_cast<void*>(pointers.data())) < 0) return false;
    for (char* p : pointers) {
      out.emplace_back(p == nullptr ? "" : p);
      if (p != nullptr) H5free_memory(p);
    }
    return true;
  }
  const size_t size = H5Tget_size(type);
  std::vector<char> buffer(count * size + 1, '\0');
  if (read(type, static_cast<void*>(buffer.data())) < 0) return false;
  const bool blank_padded = H5Tget_strpad(type) == H5T_STR_SPACEPAD;
  for (size_t i = 0; i < count; ++i) {
    out.push_back(trimmed(buffer.data() + i * size, size, blank_padded));
  }
  return true;
}

}  // namespace

Hdf5Reader::Hdf5Reader(std::filesystem::path path, ErrorKind kind)
    : path_(std::move(path)), kind_(kind), impl_(std::make_unique<Impl>()) {
  quiet_hdf5();
  impl_->path = path_.string();
  impl_->kind = kind;
  if (!std::filesystem::exists(path_)) fail(kind, "reading {}: no such file", path_.string());
  // No lock: several ranks read one file, and goldens may lie on a file system that has none.
  const Handle access(H5Pcreate(H5P_FILE_ACCESS), H5Pclose);
  H5Pset_file_locking(access.get(), false, true);
  impl_->file = Handle(H5Fopen(path_.c_str(), H5F_ACC_RDONLY, access.get()), H5Fclose);
  if (!impl_->file.valid()) {
    fail(kind, "reading {}: not a readable HDF5 file: {}", path_.string(), hdf5_reason());
  }
}

Hdf5Reader::Hdf5Reader(Hdf5Reader&&) noexcept = default;
Hdf5Reader& Hdf5Reader::operator=(Hdf5Reader&&) noexcept = default;
Hdf5Reader::~Hdf5Reader() = default;

bool Hdf5Reader::exists(std::string_view name) const { return impl_->exists(name); }

std::vector<std::string> Hdf5Reader::list(std::string_view group) const {
  const Handle g = impl_->object(group);
  if (H5Iget_type(g.get()) != H5I_GROUP) impl_->stop(group, "is a dataset, not a group");
  std::vector<std::string> names;
  H5Literate(g.get(), H5_INDEX_NAME, H5_ITER_NATIVE, nullptr, collect_link, &names);
  std::sort(names.begin(), names.end());
  return names;
}

std::vector<std::string> Hdf5Reader::datasets(std::string_view group) const {
  const Handle g = impl_->object(group);
  std::vector<std::string> names;
  H5Ovisit2(g.get(), H5_INDEX_NAME, H5_ITER_NATIVE, collect_dataset, &names, H5O_INFO_BASIC);
  const std::string prefix = group.empty() ? "" : std::string(group) + "/";
  for (auto& name : names) name.insert(0, prefix);
  std::sort(names.begin(), names.end());
  return names;
}

std::vector<int64_t> Hdf5Reader::shape(std::string_view name) const {
  const Handle d = impl_->dataset(name);
  const Handle space(H5Dget_space(d.get()), H5Sclose);
  return sizes_of(space.get());
}

Tensor Hdf5Reader::read(std::string_view name) const {
  const Handle d = impl_->dataset(name);
  const Handle space(H5Dget_space(d.get()), H5Sclose);
  const Handle type(H5Dget_type(d.get()), H5Tclose);
  const std::string what = fmt::format("reading {}: '{}'", impl_->path, name);
  const at::ScalarType dtype = tensor_dtype(type.get(), kind_, what);
  Tensor out = at::empty(sizes_of(space.get()), at::TensorOptions(dtype));
  if (out.numel() == 0) return out;
  const Handle memory = memory_type(dtype, what);
  if (H5Dread(d.get(), memory.get(), H5S_ALL, H5S_ALL, H5P_DEFAULT, out.data_ptr()) < 0) {
    impl_->stop(name, "the values cannot be read; the file is damaged or cut short");
  }
  // HDF5 clips an unsigned value that does not fit; such a value is no index or count of ours.
  if (H5Tget_class(type.get()) == H5T_INTEGER && H5Tget_sign(type.get()) == H5T_SGN_NONE &&
      H5Tget_size(type.get()) == 8 &&
      out.max().item<int64_t>() == std::numeric_limits<int64_t>::max()) {
    impl_->stop(name, "holds unsigned 64-bit values above 2^63 - 2");
  }
  return out;
}

std::vector<std::string> Hdf5Reader::read_strings(std::string_view name) const {
  const Handle d = impl_->dataset(name);
  const Handle space(H5Dget_space(d.get()), H5Sclose);
  const Handle type(H5Dget_type(d.get()), H5Tclose);
  const auto count =
      static_cast<size_t>(std::max<hssize_t>(H5Sget_simple_extent_npoints(space.get()), 0));
  std::vector<std::string> out;
  const bool ok = read_text(type.get(), count, out, [&](hid_t memory, void* buffer) {
    return count == 0 ? 0 : H5Dread(d.get(), memory, H5S_ALL, H5S_ALL, H5P_DEFAULT, buffer);
  });
  if (!ok) impl_->stop(name, "is not a readable list of strings");
  return out;
}

bool Hdf5Reader::has_attribute(std::string_view object, std::string_view name) const {
  return H5Aexists(impl_->object(object).get(), std::string(name).c_str()) > 0;
}

std::vector<std::string> Hdf5Reader::attributes(std::string_view object) const {
  const Handle o = impl_->object(object);
  std::vector<std::string> names;
  H5Aiterate2(o.get(), H5_INDEX_NAME, H5_ITER_NATIVE, nullptr, collect_attribute, &names);
  std::sort(names.begin(), names.end());
  return names;
}

std::string Hdf5Reader::attribute_string(std::string_view object, std::string_view name) const {
  const Handle a = impl_->attribute(object, name);
  const Handle type(H5Aget_type(a.get()), H5Tclose);
  const Handle space(H5Aget_space(a.get()), H5Sclose);
  std::vector<std::string> out;
  const bool one = H5Sget_simple_extent_npoints(space.get()) == 1;
  const bool ok = one && read_text(type.get(), 1, out, [&](hid_t memory, void* buffer) {
                    return H5Aread(a.get(), memory, buffer);
                  });
  if (!ok) impl_->stop(object, fmt::format("attribute '{}' is not one string", name));
  return out[0];
}

std::vector<int64_t> Hdf5Reader::attribute_ints(std::string_view object,
                                                std::string_view name) const {
  const Handle a = impl_->attribute(object, name);
  const Handle type(H5Aget_type(a.get()), H5Tclose);
  const Handle space(H5Aget_space(a.get()), H5Sclose);
  const hssize_t count = H5Sget_simple_extent_npoints(space.get());
  std::vector<int64_t> out(static_cast<size_t>(std::max<hssize_t>(count, 0)));
  if (H5Tget_class(type.get()) != H5T_INTEGER ||
      (!out.empty() && H5Aread(a.get(), H5T_NATIVE_INT64, out.data()) < 0)) {
    impl_->stop(object, fmt::format("attribute '{}' holds no integers", name));
  }
  return out;
}

int64_t Hdf5Reader::attribute_int(std::string_view object, std::string_view name) const {
  const auto values = attribute_ints(object, name);
  if (values.size() != 1) {
    impl_->stop(object, fmt::format("attribute '{}' has {} values, not 1", name, values.size()));
  }
  return values[0];
}

double Hdf5Reader::attribute_double(std::string_view object, std::string_view name) const {
  const Handle a = impl_->attribute(object, name);
  const Handle type(H5Aget_type(a.get()), H5Tclose);
  const Handle space(H5Aget_space(a.get()), H5Sclose);
  const auto kind = H5Tget_class(type.get());
  double value = 0.0;
  if ((kind != H5T_FLOAT && kind != H5T_INTEGER) ||
      H5Sget_simple_extent_npoints(space.get()) != 1 ||
      H5Aread(a.get(), H5T_NATIVE_DOUBLE, &value) < 0) {
    impl_->stop(object, fmt::format("attribute '{}' is not one number", name));
  }
  return value;
}

}  // namespace lockstep::golden

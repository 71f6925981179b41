#include "golden/store/hdf5_handle.hpp"

#include <cerrno>
#include <cstring>

#include "golden/store/hdf5.hpp"

namespace lockstep::golden {
namespace {

// 16-bit floats: sign, exponent and mantissa fields of the IEEE half and of bfloat16. HDF5 1.10 has
// neither predefined; described by their fields, any HDF5 program converts them.
Handle small_float(size_t exponent_bits, size_t mantissa_bits) {
  Handle type(H5Tcopy(H5T_NATIVE_FLOAT), H5Tclose);
  H5Tset_fields(type.get(), 15, mantissa_bits, exponent_bits, 0, mantissa_bits);
  H5Tset_size(type.get(), 2);
  H5Tset_precision(type.get(), 16);
  H5Tset_ebias(type.get(), (size_t{1} << (exponent_bits - 1)) - 1);
  return type;
}

herr_t innermost(unsigned n, const H5E_error2_t* error, void* data) {
  if (n == 0 && error->desc != nullptr) *static_cast<std::string*>(data) = error->desc;
  return 0;
}

}  // namespace

void quiet_hdf5() {
  // Without the library's clean-up at exit: every handle is closed by its owner, and a file that
  // could not be closed (full disk) crashes it.
  static const bool done =
      H5dont_atexit() >= 0 && H5open() >= 0 && H5Eset_auto2(H5E_DEFAULT, nullptr, nullptr) >= 0;
  LOCKSTEP_CHECK(done, kInternal, "HDF5 library: cannot be initialised");
}

std::string hdf5_reason() {
  std::string text;
  H5Ewalk2(H5E_DEFAULT, H5E_WALK_UPWARD, innermost, &text);
  H5Eclear2(H5E_DEFAULT);
  // Of what a failed system call leaves (time, file, descriptor, sizes) only its cause is told.
  constexpr std::string_view kMark = "error message = '";
  const size_t mark = text.find(kMark);
  if (mark == std::string::npos) return text;
  const size_t begin = mark + kMark.size();
  text = text.substr(begin, text.find('\'', begin) - begin);
  if (text == std::strerror(ENOSPC)) text += "; free space on that disk or write elsewhere";
  return text;
}

std::string hdf5_version() {
  quiet_hdf5();
  unsigned major = 0, minor = 0, release = 0;
  return H5get_libversion(&major, &minor, &release) < 0
             ? std::string()
             : fmt::format("{}.{}.{}", major, minor, release);
}

Handle memory_type(at::ScalarType dtype, std::string_view what) {
  switch (dtype) {
    case at::kDouble:
      return {H5Tcopy(H5T_NATIVE_DOUBLE), H5Tclose};
    case at::kFloat:
      return {H5Tcopy(H5T_NATIVE_FLOAT), H5Tclose};
    case at::kHalf:
      return small_float(5, 10);
    case at::kBFloat16:
      return small_float(8, 7);
    case at::kLong:
      return {H5Tcopy(H5T_NATIVE_INT64), H5Tclose};
    case at::kInt:
      return {H5Tcopy(H5T_NATIVE_INT32), H5Tclose};
    case at::kShort:
      return {H5Tcopy(H5T_NATIVE_INT16), H5Tclose};
    case at::kChar:
      return {H5Tcopy(H5T_NATIVE_INT8), H5Tclose};
    case at::kByte:
      return {H5Tcopy(H5T_NATIVE_UINT8), H5Tclose};
    default:
      fail(
          ErrorKind::kInput, "{}: HDF5 files hold no tensors of dtype {}", what, dtype_name(dtype));
  }
}

at::ScalarType tensor_dtype(hid_t type, ErrorKind kind, std::string_view what) {
  const size_t size = H5Tget_size(type);
  if (H5Tget_class(type) == H5T_FLOAT) {
    if (size == 8) return at::kDouble;
    if (size == 4) return at::kFloat;
    if (size == 2) {
      size_t sign = 0, exponent = 0, exponent_bits = 0, mantissa = 0, mantissa_bits = 0;
      H5Tget_fields(type, &sign, &exponent, &exponent_bits, &mantissa, &mantissa_bits);
      if (exponent_bits == 5 && mantissa_bits == 10) return at::kHalf;
      if (exponent_bits == 8 && mantissa_bits == 7) return at::kBFloat16;
    }
  } else if (H5Tget_class(type) == H5T_INTEGER) {
    if (H5Tget_sign(type) == H5T_SGN_NONE) return size == 1 ? at::kByte : at::kLong;
    if (size == 8) return at::kLong;
    if (size == 4) return at::kInt;
    if (size == 2) return at::kShort;
    if (size == 1) return at::kChar;
  }
  fail(kind,
       "{}: holds HDF5 type class {} of {} bytes, which is no tensor; store float64, float32, "
       "float16, bfloat16 or integers",
       what,
       static_cast<int>(H5Tget_class(type)),
       size);
}

}  // namespace lockstep::golden

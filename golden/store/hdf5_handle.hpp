// HDF5 identifiers as owned objects, and its error stack as text. Included by this room's sources
// only.
#pragma once

// The 1.10 signatures, also where the library is newer.
#ifndef H5_USE_110_API
#define H5_USE_110_API
#endif
#include <hdf5.h>

#include <string>
#include <string_view>
#include <utility>

#include "model/base/torch.hpp"

namespace lockstep::golden {

/// Owns one identifier; the destructor never throws.
class Handle {
 public:
  using Close = herr_t (*)(hid_t);
  Handle() = default;
  Handle(hid_t id, Close close) : id_(id), close_(close) {}
  Handle(const Handle&) = delete;
  Handle& operator=(const Handle&) = delete;
  Handle(Handle&& other) noexcept
      : id_(std::exchange(other.id_, H5I_INVALID_HID)), close_(other.close_) {}
  Handle& operator=(Handle&& other) noexcept {
    if (this != &other) {
      reset();
      id_ = std::exchange(other.id_, H5I_INVALID_HID);
      close_ = other.close_;
    }
    return *this;
  }
  ~Handle() { reset(); }

  [[nodiscard]] hid_t get() const { return id_; }
  [[nodiscard]] bool valid() const { return id_ >= 0; }
  void reset() noexcept {
    if (id_ >= 0 && close_ != nullptr) close_(id_);
    id_ = H5I_INVALID_HID;
  }

 private:
  hid_t id_ = H5I_INVALID_HID;
  Close close_ = nullptr;
};

/// Stops HDF5 from printing its own error stack to stderr. Called before any other HDF5 function.
void quiet_hdf5();

/// The innermost message of HDF5's error stack, or "" when it is empty.
std::string hdf5_reason();

/// HDF5 type of a tensor dtype in memory (native byte order). Throws kInput for others.
Handle memory_type(at::ScalarType dtype, std::string_view what);

/// Tensor dtype that holds an HDF5 type. Throws Error{kind} when there is none.
at::ScalarType tensor_dtype(hid_t type, ErrorKind kind, std::string_view what);

}  // namespace lockstep::golden

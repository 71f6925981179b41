#include "model/base/error.hpp"

namespace lockstep {

int exit_code(ErrorKind kind) noexcept {
  switch (kind) {
    case ErrorKind::kInput:
    case ErrorKind::kConfig:
    case ErrorKind::kShape:
    case ErrorKind::kMesh:
      return 2;
    case ErrorKind::kComm:
      return 3;
    case ErrorKind::kGolden:
      return 4;
    case ErrorKind::kInternal:
      return 5;
  }
  return 5;
}

std::string_view kind_name(ErrorKind kind) noexcept {
  switch (kind) {
    case ErrorKind::kInput:
      return "input";
    case ErrorKind::kConfig:
      return "config";
    case ErrorKind::kShape:
      return "shape";
    case ErrorKind::kMesh:
      return "mesh";
    case ErrorKind::kComm:
      return "comm";
    case ErrorKind::kGolden:
      return "golden";
    case ErrorKind::kInternal:
      return "internal";
  }
  return "internal";
}

}  // namespace lockstep

#include "model/checkpoint/mapped_file.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>

#include "model/base/error.hpp"

namespace lockstep::model {

std::shared_ptr<const MappedFile> MappedFile::open(const std::string& path) {
  const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  LOCKSTEP_CHECK(fd >= 0, kInput, "cannot open {}: {}", path, std::strerror(errno));
  struct stat info {};
  if (::fstat(fd, &info) != 0 || !S_ISREG(info.st_mode)) {
    ::close(fd);
    fail(ErrorKind::kInput, "{} is not a regular file", path);
  }
  const auto size = static_cast<uint64_t>(info.st_size);
  void* data = nullptr;
  if (size > 0) data = ::mmap(nullptr, size, PROT_READ, MAP_PRIVATE, fd, 0);
  const int error = errno;
  ::close(fd);
  LOCKSTEP_CHECK(
      data != MAP_FAILED, kInput, "cannot map {} ({} bytes): {}", path, size, std::strerror(error));
  return std::shared_ptr<const MappedFile>(
      new MappedFile(path, static_cast<const std::byte*>(data), size));
}

MappedFile::~MappedFile() {
  if (size_ > 0) ::munmap(const_cast<std::byte*>(data_), size_);
}

void MappedFile::release(uint64_t begin, uint64_t end) const noexcept {
  const auto page = static_cast<uint64_t>(::sysconf(_SC_PAGESIZE));
  begin = (begin + page - 1) / page * page;
  end = end == size_ ? end : end / page * page;
  if (begin >= end) return;
  ::madvise(const_cast<std::byte*>(data_) + begin, end - begin, MADV_DONTNEED);
}

void write_all(int fd, const void* data, size_t bytes, const std::string& path) {
  constexpr size_t kMostAtOnce = size_t{1} << 30;
  const auto* at = static_cast<const char*>(data);
  size_t left = bytes;
  while (left > 0) {
    const ssize_t done = ::write(fd, at, std::min(left, kMostAtOnce));
    if (done < 0 && errno == EINTR) continue;
    if (done < 0) {
      const int error = errno;
      const bool full = error == ENOSPC || error == EDQUOT || error == EFBIG;
      fail(ErrorKind::kInput,
           "cannot write {}: {} with {} of {} bytes of this piece left{}",
           path,
           std::strerror(error),
           left,
           bytes,
           full ? "; free some space or choose another target (nothing was kept)" : "");
    }
    at += done;
    left -= static_cast<size_t>(done);
  }
}

void sync_folder(const std::string& folder) {
  const int fd = ::open(folder.empty() ? "." : folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (fd < 0) return;  // a file system without folder handles has nothing to sync
  ::fsync(fd);
  ::close(fd);
}

AtomicFile::AtomicFile(std::string path)
    : path_(std::move(path)), temporary_(fmt::format("{}.tmp-{}", path_, ::getpid())) {
  fd_ = ::open(temporary_.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
  LOCKSTEP_CHECK(
      fd_ >= 0,
      kInput,
      "cannot create {}: {}; name a folder that can be written to, or change its permissions",
      path_,
      std::strerror(errno));
}

AtomicFile::~AtomicFile() {
  if (fd_ >= 0) ::close(fd_);
  if (!committed_) ::unlink(temporary_.c_str());
}

void AtomicFile::write(const void* data, size_t bytes) {
  write_all(fd_, data, bytes, path_);
  written_ += bytes;
}

void AtomicFile::finish() {
  if (fd_ < 0) return;
  const bool synced = ::fsync(fd_) == 0;
  const int sync_error = errno;
  const bool closed = ::close(fd_) == 0;
  const int close_error = errno;
  fd_ = -1;
  LOCKSTEP_CHECK(synced && closed,
                 kInput,
                 "cannot finish {} after {} bytes: {}",
                 path_,
                 written_,
                 std::strerror(synced ? close_error : sync_error));
}

void AtomicFile::commit() {
  finish();
  LOCKSTEP_CHECK(::rename(temporary_.c_str(), path_.c_str()) == 0,
                 kInput,
                 "cannot rename {} to {}: {}",
                 temporary_,
                 path_,
                 std::strerror(errno));
  committed_ = true;
  sync_folder(std::filesystem::path(path_).parent_path().string());
}

}  // namespace lockstep::model

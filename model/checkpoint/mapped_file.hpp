// A file mapped for reading, and a file written so that it either exists complete or not at all.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

namespace lockstep::model {

/// Read-only mapping of a whole file. Pages are read when touched and may be given back, so files
/// larger than memory can be walked. Shortening the file while it is mapped kills the reader
/// (SIGBUS), as with every mapping.
class MappedFile {
 public:
  /// Throws kInput naming the path if it cannot be opened or mapped.
  static std::shared_ptr<const MappedFile> open(const std::string& path);
  ~MappedFile();
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;

  [[nodiscard]] const std::byte* data() const { return data_; }
  [[nodiscard]] uint64_t size() const { return size_; }
  [[nodiscard]] const std::string& path() const { return path_; }
  /// Gives the pages wholly inside [begin, end) back to the system; reading them again reads the
  /// file again.
  void release(uint64_t begin, uint64_t end) const noexcept;

 private:
  MappedFile(std::string path, const std::byte* data, uint64_t size)
      : path_(std::move(path)), data_(data), size_(size) {}
  std::string path_;
  const std::byte* data_;
  uint64_t size_;
};

/// Writes a temporary file beside `path`; commit() makes it visible under its name. Destroyed
/// without commit(), nothing remains. Every failure is kInput naming path, bytes and cause (a full
/// disk says so).
class AtomicFile {
 public:
  explicit AtomicFile(std::string path);
  ~AtomicFile();
  AtomicFile(const AtomicFile&) = delete;
  AtomicFile& operator=(const AtomicFile&) = delete;

  void write(const void* data, size_t bytes);
  /// fsync and close. Nothing can be written afterwards.
  void finish();
  /// finish() if needed, then rename over the final name and sync the folder.
  void commit();
  [[nodiscard]] uint64_t written() const { return written_; }

 private:
  std::string path_, temporary_;
  int fd_ = -1;
  uint64_t written_ = 0;
  bool committed_ = false;
};

/// Writes all bytes to a descriptor; `path` is for messages. Throws kInput as above.
void write_all(int fd, const void* data, size_t bytes, const std::string& path);

/// fsync of a folder, so that renames in it survive a crash.
void sync_folder(const std::string& folder);

}  // namespace lockstep::model

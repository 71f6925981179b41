#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <fstream>
#include <sstream>
#include <system_error>
#include <utility>
#include <vector>

#include "reports/writer/writer.hpp"

namespace lockstep::reports {
namespace {

namespace fs = std::filesystem;

[[noreturn]] void cannot_write(const fs::path& path, const std::string& why) {
  fail(ErrorKind::kInput,
       "report: cannot write {}: {}; give another folder with --out, or make this one writable",
       path.string(),
       why);
}

/// A file under a temporary name beside its final one; removed again unless committed.
class PendingFile {
 public:
  PendingFile(fs::path target, std::string_view content)
      : target_(std::move(target)),
        temporary_(target_.string() + fmt::format(".{}.tmp", getpid())) {
    const int file = open(temporary_.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
    if (file < 0) cannot_write(target_, std::strerror(errno));
    int error = 0;
    while (!content.empty() && error == 0) {
      const ssize_t written = ::write(file, content.data(), content.size());
      if (written >= 0) {
        content.remove_prefix(static_cast<size_t>(written));
      } else if (errno != EINTR) {
        error = errno;
      }
    }
    // Without this a crash after the rename can leave an empty file under the final name.
    if (error == 0 && fsync(file) != 0 && errno != EINVAL) error = errno;
    if (close(file) != 0 && error == 0) error = errno;
    if (error != 0) {
      unlink(temporary_.c_str());
      cannot_write(target_, std::strerror(error));
    }
  }
  PendingFile(PendingFile&& other) noexcept
      : target_(std::move(other.target_)), temporary_(std::exchange(other.temporary_, {})) {}
  PendingFile(const PendingFile&) = delete;
  PendingFile& operator=(const PendingFile&) = delete;
  PendingFile& operator=(PendingFile&&) = delete;
  ~PendingFile() {
    if (!temporary_.empty()) unlink(temporary_.c_str());
  }

  void commit() {
    if (std::rename(temporary_.c_str(), target_.c_str()) != 0) {
      cannot_write(target_, std::strerror(errno));
    }
    temporary_.clear();
  }

 private:
  fs::path target_;
  std::string temporary_;
};

void write_all(const fs::path& folder,
               const std::vector<std::pair<const char*, std::string>>& files) {
  std::error_code error;
  fs::create_directories(folder, error);
  if (error) cannot_write(folder, error.message());
  std::vector<PendingFile> pending;
  pending.reserve(files.size());
  for (const auto& [file, content] : files) {
    // rename() would only fail at the end, after others took their places.
    if (fs::is_directory(folder / file, error)) cannot_write(folder / file, "it is a folder");
    pending.emplace_back(folder / file, content);
  }
  for (PendingFile& file : pending) file.commit();
}

}  // namespace

void write(const harness::Report& report, const fs::path& folder) {
  write_all(folder,
            {{"report.json", harness::to_json(report)},
             {"report.html", render_html(report)},
             {"junit.xml", render_junit(report)},
             {"summary.md", render_markdown(report)}});
}

harness::Report rebuild(const fs::path& folder) {
  const fs::path path = folder / "report.json";
  std::ifstream file(path, std::ios::binary);
  std::ostringstream text;
  text << file.rdbuf();
  LOCKSTEP_CHECK(file.good() && !fs::is_directory(path),
                 kInput,
                 "report: cannot read {}: {}; give the folder that 'lockstep run --out' wrote",
                 path.string(),
                 fs::exists(path) ? "it is empty or not readable" : "there is no such file");
  harness::Report report = harness::report_from_json(text.str(), path.string());
  write_all(folder,
            {{"report.html", render_html(report)},
             {"junit.xml", render_junit(report)},
             {"summary.md", render_markdown(report)}});
  return report;
}

}  // namespace lockstep::reports

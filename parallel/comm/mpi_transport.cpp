#include "parallel/comm/mpi_transport.hpp"

#include <algorithm>
#include <string_view>

#include "model/base/error.hpp"

namespace lockstep::parallel {
namespace {

constexpr int64_t kChunkBytes = int64_t{1} << 30;  // keeps every MPI count far below 2^31

/// A row as one MPI element, so that counts are rows.
class RowType {
 public:
  explicit RowType(int64_t bytes) {
    LOCKSTEP_CHECK(
        bytes <= kChunkBytes, kInternal, "communication: a row of {} bytes is too large", bytes);
    check_mpi(MPI_Type_contiguous(static_cast<int>(bytes), MPI_BYTE, &type_), "row type");
    check_mpi(MPI_Type_commit(&type_), "row type");
  }
  RowType(const RowType&) = delete;
  RowType& operator=(const RowType&) = delete;
  ~RowType() { MPI_Type_free(&type_); }
  [[nodiscard]] MPI_Datatype get() const { return type_; }

 private:
  MPI_Datatype type_ = MPI_DATATYPE_NULL;
};

struct Counts {
  std::vector<int> count, start;
  Counts() = default;
  explicit Counts(const Rows& rows) {
    LOCKSTEP_CHECK(rows.total < int64_t{1} << 31,
                   kInternal,
                   "communication: {} rows in one call are too many",
                   rows.total);
    count.assign(rows.count.begin(), rows.count.end());
    start.assign(rows.start.begin(), rows.start.end());
  }
};

class MpiWork final : public Work {
 public:
  MpiWork() = default;
  MpiWork(const MpiWork&) = delete;
  MpiWork& operator=(const MpiWork&) = delete;
  ~MpiWork() override { abandon(); }

  bool done() override {
    while (next_ < requests_.size()) {
      int ended = 0;
      MPI_Status status;
      check_mpi(MPI_Test(&requests_[next_], &ended, &status), "progress");
      if (ended == 0) return false;
      if (!expected_.empty()) {
        int got = 0;
        MPI_Get_count(&status, MPI_BYTE, &got);
        if (got != expected_[next_]) {
          throw TransportError(fmt::format(
              "a message of {} bytes came where {} were expected", got, expected_[next_]));
        }
      }
      ++next_;
    }
    return true;
  }

  /// Collectives cannot be cancelled; their caller ends the process.
  void abandon() noexcept override {
    for (; next_ < requests_.size(); ++next_) {
      int ended = 0;
      if (requests_[next_] != MPI_REQUEST_NULL && cancellable_ &&
          MPI_Cancel(&requests_[next_]) == MPI_SUCCESS)
        MPI_Test(&requests_[next_], &ended, MPI_STATUS_IGNORE);
    }
  }

  MPI_Request* add() {
    requests_.push_back(MPI_REQUEST_NULL);
    return &requests_.back();
  }
  void expect(int bytes) { expected_.push_back(bytes); }
  void set_cancellable() { cancellable_ = true; }

  // MPI reads these until the operation ends.
  Counts out, in;
  std::unique_ptr<RowType> type;

 private:
  std::vector<MPI_Request> requests_;
  std::vector<int> expected_;
  size_t next_ = 0;
  bool cancellable_ = false;
};

class MpiTransport final : public Transport {
 public:
  explicit MpiTransport(MPI_Comm comm) : comm_(comm) { MPI_Comm_rank(comm, &rank_); }

  WorkPtr all_gather(
      const void* send, void* receive, const Rows& rows, int64_t row_bytes, const Until&) override {
    auto work = std::make_unique<MpiWork>();
    if (rows.total == 0 || row_bytes == 0) return work;
    work->in = Counts(rows);
    work->type = std::make_unique<RowType>(row_bytes);
    check_mpi(MPI_Iallgatherv(send,
                              work->in.count[static_cast<size_t>(rank_)],
                              work->type->get(),
                              receive,
                              work->in.count.data(),
                              work->in.start.data(),
                              work->type->get(),
                              comm_,
                              work->add()),
              "all-gather");
    return work;
  }

  WorkPtr all_to_all(const void* send,
                     const Rows& out,
                     void* receive,
                     const Rows& in,
                     int64_t row_bytes,
                     const Until&) override {
    auto work = std::make_unique<MpiWork>();
    if (row_bytes == 0) return work;
    work->out = Counts(out);
    work->in = Counts(in);
    work->type = std::make_unique<RowType>(row_bytes);
    check_mpi(MPI_Ialltoallv(send,
                             work->out.count.data(),
                             work->out.start.data(),
                             work->type->get(),
                             receive,
                             work->in.count.data(),
                             work->in.start.data(),
                             work->type->get(),
                             comm_,
                             work->add()),
              "all-to-all");
    return work;
  }

  WorkPtr broadcast(void* data, int64_t bytes, int root, const Until&) override {
    auto work = std::make_unique<MpiWork>();
    pieces(bytes, [&](int64_t first, int count) {
      check_mpi(
          MPI_Ibcast(static_cast<char*>(data) + first, count, MPI_BYTE, root, comm_, work->add()),
          "broadcast");
    });
    return work;
  }

  WorkPtr send(const void* data, int64_t bytes, int to, int tag, const Until&) override {
    auto work = std::make_unique<MpiWork>();
    work->set_cancellable();
    pieces(bytes, [&](int64_t first, int count) {
      check_mpi(
          MPI_Isend(
              static_cast<const char*>(data) + first, count, MPI_BYTE, to, tag, comm_, work->add()),
          "send");
    });
    return work;
  }

  WorkPtr receive(void* data, int64_t bytes, int from, int tag, const Until&) override {
    auto work = std::make_unique<MpiWork>();
    work->set_cancellable();
    pieces(bytes, [&](int64_t first, int count) {
      check_mpi(
          MPI_Irecv(
              static_cast<char*>(data) + first, count, MPI_BYTE, from, tag, comm_, work->add()),
          "receive");
      work->expect(count);
    });
    return work;
  }

  WorkPtr barrier(const Until&) override {
    auto work = std::make_unique<MpiWork>();
    check_mpi(MPI_Ibarrier(comm_, work->add()), "barrier");
    return work;
  }

 private:
  template <typename Body>
  static void pieces(int64_t bytes, const Body& body) {
    for (int64_t first = 0; first < bytes; first += kChunkBytes)
      body(first, static_cast<int>(std::min(kChunkBytes, bytes - first)));
  }

  MPI_Comm comm_;
  int rank_ = 0;
};

}  // namespace

void check_mpi(int code, const char* call) {
  if (code == MPI_SUCCESS) return;
  char text[MPI_MAX_ERROR_STRING];
  int length = 0;
  MPI_Error_string(code, text, &length);
  throw TransportError(
      fmt::format("MPI {} failed: {}", call, std::string_view(text, static_cast<size_t>(length))));
}

std::unique_ptr<Transport> mpi_transport(MPI_Comm comm) {
  return std::make_unique<MpiTransport>(comm);
}

}  // namespace lockstep::parallel

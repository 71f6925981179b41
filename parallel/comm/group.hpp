// A communication group: the only way for other rooms to talk to peers. Callers never see an MPI
// type.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "model/base/torch.hpp"

namespace lockstep::parallel {

struct GroupImpl;

/// A collective on its way. wait() gives its result; a pending call must be waited for before its
/// group goes. Move-only.
class Pending {
 public:
  struct Impl;
  explicit Pending(std::unique_ptr<Impl> impl);
  Pending(const Pending&) = delete;
  Pending& operator=(const Pending&) = delete;
  Pending(Pending&&) noexcept;
  Pending& operator=(Pending&&) noexcept;
  ~Pending();
  Tensor wait();

 private:
  std::unique_ptr<Impl> impl_;
};

/// Ranks that communicate. Every call names `what` (such as "layer 3 kda state"), the same on all
/// ranks, and has a deadline: when it passes the call throws kComm naming group, call, the ranks
/// that are missing, what they do, and the time waited. Ranks of one machine also compare the order
/// of their collectives as they go, and a call that another rank does not make throws at once.
/// After a throw the group is of no use: the process should end its session with abort().
///
/// Tensors are contiguous, others are refused with kShape; any dtype moves, and float64, float32,
/// bfloat16, int64 and uint8 are tested. Memory of the CPU goes over MPI, or, after
/// set_comm_backend(kNccl), through a device over NCCL; memory of a CUDA device goes over NCCL, or
/// through the host over MPI. Values do not depend on the way. Messages between two ranks are
/// received in the order in which they were sent.
class Group {
 public:
  /// A group of one: collectives are identities.
  static Group single();

  [[nodiscard]] int64_t rank() const;
  [[nodiscard]] int64_t size() const;
  [[nodiscard]] const std::string& name() const;

  /// Sub-group of the ranks that pass the same color >= 0, ordered by key; color < 0 takes part and
  /// gets a group of one.
  [[nodiscard]] Group split(int64_t color, int64_t key, std::string name) const;

  /// Sum over ranks in ascending rank order on every rank, so that all ranks hold the same bytes.
  /// In place.
  void all_reduce_sum(Tensor& tensor, std::string_view what) const;
  /// Largest value over ranks.
  [[nodiscard]] int64_t all_reduce_max(int64_t value, std::string_view what) const;
  /// Rows of every rank along dim 0 in rank order. rows[r] = number of rows of rank r (known to
  /// all).
  [[nodiscard]] Tensor all_gather_rows(const Tensor& local,
                                       const std::vector<int64_t>& rows,
                                       std::string_view what) const;
  /// Inverse with sum: `global` has sum(rows) rows on every rank; returns the sum over ranks, in
  /// ascending rank order, of this rank's rows.
  [[nodiscard]] Tensor reduce_scatter_rows(const Tensor& global,
                                           const std::vector<int64_t>& rows,
                                           std::string_view what) const;
  /// The same, started: `local` is kept alive until it is waited for.
  [[nodiscard]] Pending all_gather_rows_start(const Tensor& local,
                                              const std::vector<int64_t>& rows,
                                              std::string_view what) const;
  /// send_rows[r] rows of `rows` to each rank r, in rank order; returns what every rank sent here
  /// (recv_rows[r] rows from r), in rank order. Counts must agree pairwise; any may be 0.
  [[nodiscard]] Tensor all_to_all_rows(const Tensor& rows,
                                       const std::vector<int64_t>& send_rows,
                                       const std::vector<int64_t>& recv_rows,
                                       std::string_view what) const;
  /// One integer of every rank.
  [[nodiscard]] std::vector<int64_t> all_gather(int64_t value, std::string_view what) const;

  void send(const Tensor& tensor, int64_t to, int tag, std::string_view what) const;
  void recv(Tensor& tensor, int64_t from, int tag, std::string_view what) const;
  void broadcast(Tensor& tensor, int64_t root, std::string_view what) const;
  void barrier(std::string_view what) const;

  explicit Group(std::shared_ptr<GroupImpl> impl) : impl_(std::move(impl)) {}
  [[nodiscard]] const GroupImpl& impl() const { return *impl_; }

 private:
  std::shared_ptr<GroupImpl> impl_;
};

/// Deadline of every wait, in milliseconds; default 300000.
void set_comm_timeout_ms(int64_t ms);
int64_t comm_timeout_ms();

/// Number of the training step that messages name; none before the first call.
void set_comm_step(int64_t step);

enum class CommBackend { kMpi, kNccl };
/// "mpi" or "nccl"; throws kInput for others.
CommBackend comm_backend_from_string(std::string_view name);
/// What carries every later call, on all ranks alike; default kMpi. Throws kConfig, with what is
/// missing, where NCCL or a GPU is.
void set_comm_backend(CommBackend backend);
CommBackend comm_backend();

/// While it lives, waits go on for as long as the awaited ranks of this machine run, since one of
/// them may be computing alone; a rank that stays stopped or gone for the deadline still ends them,
/// and so does one of another machine, which cannot be seen, after ten deadlines more.
class PatientWaits {
 public:
  PatientWaits();
  PatientWaits(const PatientWaits&) = delete;
  PatientWaits& operator=(const PatientWaits&) = delete;
  ~PatientWaits();

 private:
  bool before_;
};

/// MPI of this process. start() initialises MPI when the process was started by mpirun or a Slurm
/// MPI launcher (environment tells), else the world is a group of one and MPI is never touched.
/// LOCKSTEP_COMM=mpi|nccl in the environment sets the backend; with LOCKSTEP_HANG_RANK=R rank R
/// waits here for a debugger. The destructor finalises unless an error was reported.
class Session {
 public:
  static Session start(int* argc, char*** argv);
  [[nodiscard]] const Group& world() const { return world_; }
  [[nodiscard]] bool under_mpi() const { return under_mpi_; }
  /// True for the first rank of this machine that asks: it reports a failure for all. This and the
  /// next two may be called by signal handlers.
  static bool claim_report() noexcept;
  /// This rank ends on purpose; others need not report it as gone.
  static void mark_left() noexcept;
  /// Where this rank is and which ranks of this machine are gone. Returns the length, without a
  /// zero byte.
  static size_t last_words(char* text, size_t size) noexcept;
  /// Gives up what is in flight and ends all ranks of the job with this exit code. Does not return
  /// when MPI runs.
  void abort(int exit_code) noexcept;
  Session(Session&& other) noexcept;
  Session& operator=(Session&&) = delete;
  Session(const Session&) = delete;
  Session& operator=(const Session&) = delete;
  ~Session();

 private:
  Session(bool under_mpi, Group world) : under_mpi_(under_mpi), world_(std::move(world)) {}
  bool under_mpi_ = false;
  Group world_;
};

}  // namespace lockstep::parallel

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
  Pending(Pending&&) noexcept;
  Pending& operator=(Pending&&) noexcept;
  ~Pending();
  Tensor wait();

 private:
  std::unique_ptr<Impl> impl_;
};

/// Ranks that communicate. Every call names `what` (such as "layer 3 kda state"), has a deadline,
/// and throws kComm naming group, call, peer and time waited when it passes. Tensors are contiguous
/// and on the CPU; others are refused.
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

 private:
  std::shared_ptr<GroupImpl> impl_;
};

/// Deadline of every wait, in milliseconds; default 300000.
void set_comm_timeout_ms(int64_t ms);
int64_t comm_timeout_ms();

/// While it lives, waits go on for as long as the awaited ranks of this machine run, since one of
/// them may be computing alone; a rank that stays stopped or gone for the deadline still ends them.
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
/// MPI launcher (environment tells), else the world is a group of one and MPI is never touched. The
/// destructor finalises unless an error was reported.
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
  /// Ends all ranks of the job with this exit code. Does not return when MPI runs.
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

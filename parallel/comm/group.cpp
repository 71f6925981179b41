#include "parallel/comm/group.hpp"

#include <mpi.h>

#include <algorithm>
#include <cstdlib>
#include <utility>

#include "parallel/comm/board.hpp"
#include "parallel/comm/wait.hpp"

namespace lockstep::parallel {

namespace {

constexpr int64_t kChunkElements = int64_t{1}
                                   << 26;  // keeps every MPI count and displacement far below 2^31
constexpr int64_t kChunkBytes = int64_t{1} << 30;

void check_tensor(const Tensor& tensor, const GroupImpl& g, std::string_view what) {
  LOCKSTEP_CHECK(tensor.defined() && tensor.is_contiguous() && tensor.device().is_cpu(),
                 kShape,
                 "{}: needs a contiguous CPU tensor, got {}{}",
                 where(g, what),
                 describe(tensor),
                 tensor.defined() && !tensor.is_contiguous() ? " (strided)" : "");
}

/// dtype in which sums over ranks are formed before one rounding back.
at::ScalarType sum_dtype(const Tensor& tensor) {
  return tensor.scalar_type() == at::kBFloat16 || tensor.scalar_type() == at::kHalf
             ? at::kFloat
             : tensor.scalar_type();
}

/// A row of `bytes` bytes as one MPI element, so that counts are rows.
class RowType {
 public:
  explicit RowType(int64_t bytes) {
    LOCKSTEP_CHECK(
        bytes <= kChunkBytes, kInternal, "communication: a row of {} bytes is too large", bytes);
    MPI_Type_contiguous(static_cast<int>(bytes), MPI_BYTE, &type_);
    MPI_Type_commit(&type_);
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
};

Counts counts_of(const std::vector<int64_t>& rows) {
  Counts c;
  int64_t start = 0;
  for (int64_t r : rows) {
    c.count.push_back(static_cast<int>(r));
    c.start.push_back(static_cast<int>(start));
    start += r;
  }
  return c;
}

int64_t row_bytes(const Tensor& tensor) {
  int64_t bytes = tensor.element_size();
  for (int64_t d = 1; d < tensor.dim(); ++d) bytes *= tensor.size(d);
  return bytes;
}

/// Rows of `send` (counts out) to every rank; returns what every rank sent here (counts in), in
/// rank order.
void exchange(const GroupImpl& g,
              const void* send,
              const Counts& out,
              void* receive,
              const Counts& in,
              int64_t bytes,
              std::string_view what) {
  const RowType type(bytes);
  MPI_Request request = MPI_REQUEST_NULL;
  check(MPI_Ialltoallv(send,
                       out.count.data(),
                       out.start.data(),
                       type.get(),
                       receive,
                       in.count.data(),
                       in.start.data(),
                       type.get(),
                       g.comm,
                       &request),
        g,
        what,
        "all-to-all");
  wait(request, g, what, "all-to-all");
}

}  // namespace

Group Group::single() { return Group(std::make_shared<GroupImpl>()); }

int64_t Group::rank() const { return impl_->rank; }
int64_t Group::size() const { return impl_->size; }
const std::string& Group::name() const { return impl_->name; }

Group Group::split(int64_t color, int64_t key, std::string name) const {
  auto part = std::make_shared<GroupImpl>();
  part->name = std::move(name);
  if (impl_->comm == MPI_COMM_NULL) return Group(std::move(part));
  // A split itself has no deadline; a rank that is missing shows here.
  barrier(fmt::format("split into {}", part->name));
  check(MPI_Comm_split(impl_->comm,
                       color < 0 ? MPI_UNDEFINED : static_cast<int>(color),
                       static_cast<int>(key),
                       &part->comm),
        *impl_,
        part->name,
        "split");
  if (part->comm != MPI_COMM_NULL) {
    part->owned = true;
    MPI_Comm_set_errhandler(part->comm, MPI_ERRORS_RETURN);
    MPI_Comm_rank(part->comm, &part->rank);
    MPI_Comm_size(part->comm, &part->size);
  }
  return Group(std::move(part));
}

void Group::all_reduce_sum(Tensor& tensor, std::string_view what) const {
  const GroupImpl& g = *impl_;
  if (g.size == 1) return;
  check_tensor(tensor, g, what);
  const at::NoGradGuard no_grad;
  Tensor flat = tensor.view({-1});
  // Each rank sums one slice over the ranks in ascending order, then all gather the slices: the
  // same bytes everywhere.
  for (int64_t first = 0; first < flat.numel(); first += kChunkElements) {
    Tensor part = flat.narrow(0, first, std::min(kChunkElements, flat.numel() - first));
    std::vector<int64_t> slice;
    for (int64_t r = 0; r < g.size; ++r)
      slice.push_back(part.numel() * (r + 1) / g.size - part.numel() * r / g.size);
    const Tensor mine = reduce_scatter_rows(part, slice, what);
    part.copy_(all_gather_rows(mine, slice, what));
  }
}

int64_t Group::all_reduce_max(int64_t value, std::string_view what) const {
  const std::vector<int64_t> all = all_gather(value, what);
  return *std::max_element(all.begin(), all.end());
}

struct Pending::Impl {
  std::shared_ptr<GroupImpl> group;
  Tensor local, all;
  MPI_Request request = MPI_REQUEST_NULL;
  std::string what;
};

Pending::Pending(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Pending::Pending(Pending&&) noexcept = default;
Pending& Pending::operator=(Pending&&) noexcept = default;
Pending::~Pending() = default;

Tensor Pending::wait() {
  const std::unique_ptr<Impl> done = std::move(impl_);
  if (done->request != MPI_REQUEST_NULL)
    lockstep::parallel::wait(done->request, *done->group, done->what, "all-gather");
  return done->all;
}

Pending Group::all_gather_rows_start(const Tensor& local,
                                     const std::vector<int64_t>& rows,
                                     std::string_view what) const {
  const GroupImpl& g = *impl_;
  auto pending = std::make_unique<Pending::Impl>();
  pending->group = impl_;
  pending->local = pending->all = local;
  pending->what = what;
  if (g.size == 1) return Pending(std::move(pending));
  check_tensor(local, g, what);
  LOCKSTEP_CHECK(
      static_cast<int>(rows.size()) == g.size && local.size(0) == rows[static_cast<size_t>(g.rank)],
      kInternal,
      "{}: this rank holds {} rows, the plan says {}",
      where(g, what),
      local.size(0),
      rows.size() == static_cast<size_t>(g.size) ? rows[static_cast<size_t>(g.rank)] : -1);
  const Counts in = counts_of(rows);
  std::vector<int64_t> sizes = local.sizes().vec();
  sizes[0] = in.start.back() + in.count.back();
  pending->all = at::empty(sizes, local.options().requires_grad(false));
  if (pending->all.numel() == 0) return Pending(std::move(pending));
  const RowType type(row_bytes(local));
  check(MPI_Iallgatherv(local.const_data_ptr(),
                        in.count[static_cast<size_t>(g.rank)],
                        type.get(),
                        pending->all.mutable_data_ptr(),
                        in.count.data(),
                        in.start.data(),
                        type.get(),
                        g.comm,
                        &pending->request),
        g,
        what,
        "all-gather");
  return Pending(std::move(pending));
}

Tensor Group::all_gather_rows(const Tensor& local,
                              const std::vector<int64_t>& rows,
                              std::string_view what) const {
  return all_gather_rows_start(local, rows, what).wait();
}

Tensor Group::all_to_all_rows(const Tensor& rows,
                              const std::vector<int64_t>& send_rows,
                              const std::vector<int64_t>& recv_rows,
                              std::string_view what) const {
  const GroupImpl& g = *impl_;
  if (g.size == 1) return rows;
  check_tensor(rows, g, what);
  const Counts out = counts_of(send_rows), in = counts_of(recv_rows);
  LOCKSTEP_CHECK(static_cast<int>(send_rows.size()) == g.size &&
                     static_cast<int>(recv_rows.size()) == g.size &&
                     rows.size(0) == out.start.back() + out.count.back(),
                 kInternal,
                 "{}: {} rows to send, the plan says {} over {} ranks",
                 where(g, what),
                 rows.size(0),
                 out.start.back() + out.count.back(),
                 send_rows.size());
  std::vector<int64_t> sizes = rows.sizes().vec();
  sizes[0] = in.start.back() + in.count.back();
  Tensor received = at::empty(sizes, rows.options().requires_grad(false));
  exchange(g, rows.const_data_ptr(), out, received.mutable_data_ptr(), in, row_bytes(rows), what);
  return received;
}

Tensor Group::reduce_scatter_rows(const Tensor& global,
                                  const std::vector<int64_t>& rows,
                                  std::string_view what) const {
  const GroupImpl& g = *impl_;
  if (g.size == 1) return global;
  check_tensor(global, g, what);
  const int64_t mine = rows[static_cast<size_t>(g.rank)];
  const Counts out = counts_of(rows);
  LOCKSTEP_CHECK(global.size(0) == out.start.back() + out.count.back(),
                 kInternal,
                 "{}: {} rows to reduce, the plan says {}",
                 where(g, what),
                 global.size(0),
                 out.start.back() + out.count.back());
  const Counts in = counts_of(std::vector<int64_t>(static_cast<size_t>(g.size), mine));
  std::vector<int64_t> sizes = global.sizes().vec();
  sizes[0] = mine * g.size;
  const Tensor parts = at::empty(sizes, global.options());
  if (global.numel() > 0)
    exchange(
        g, global.const_data_ptr(), out, parts.mutable_data_ptr(), in, row_bytes(global), what);
  Tensor sum = parts.narrow(0, 0, mine).to(sum_dtype(global), false, true);
  for (int64_t r = 1; r < g.size; ++r) sum.add_(parts.narrow(0, r * mine, mine));
  return sum.to(global.scalar_type());
}

std::vector<int64_t> Group::all_gather(int64_t value, std::string_view what) const {
  const Tensor all = all_gather_rows(at::full({1}, value, at::kLong),
                                     std::vector<int64_t>(static_cast<size_t>(impl_->size), 1),
                                     what);
  const int64_t* data = all.const_data_ptr<int64_t>();
  return {data, data + all.numel()};
}

void Group::send(const Tensor& tensor, int64_t to, int tag, std::string_view what) const {
  const GroupImpl& g = *impl_;
  check_tensor(tensor, g, what);
  const auto* data = static_cast<const char*>(tensor.const_data_ptr());
  const auto bytes = static_cast<int64_t>(tensor.nbytes());
  for (int64_t first = 0; first < bytes; first += kChunkBytes) {
    MPI_Request request = MPI_REQUEST_NULL;
    check(MPI_Isend(data + first,
                    static_cast<int>(std::min(kChunkBytes, bytes - first)),
                    MPI_BYTE,
                    static_cast<int>(to),
                    tag,
                    g.comm,
                    &request),
          g,
          what,
          "send");
    wait(request, g, what, "send", static_cast<int>(to));
  }
}

void Group::recv(Tensor& tensor, int64_t from, int tag, std::string_view what) const {
  const GroupImpl& g = *impl_;
  check_tensor(tensor, g, what);
  auto* data = static_cast<char*>(tensor.mutable_data_ptr());
  const auto bytes = static_cast<int64_t>(tensor.nbytes());
  for (int64_t first = 0; first < bytes; first += kChunkBytes) {
    MPI_Request request = MPI_REQUEST_NULL;
    check(MPI_Irecv(data + first,
                    static_cast<int>(std::min(kChunkBytes, bytes - first)),
                    MPI_BYTE,
                    static_cast<int>(from),
                    tag,
                    g.comm,
                    &request),
          g,
          what,
          "receive");
    wait(request, g, what, "receive", static_cast<int>(from));
  }
}

void Group::broadcast(Tensor& tensor, int64_t root, std::string_view what) const {
  const GroupImpl& g = *impl_;
  if (g.size == 1) return;
  check_tensor(tensor, g, what);
  auto* data = static_cast<char*>(tensor.mutable_data_ptr());
  const auto bytes = static_cast<int64_t>(tensor.nbytes());
  for (int64_t first = 0; first < bytes; first += kChunkBytes) {
    MPI_Request request = MPI_REQUEST_NULL;
    check(MPI_Ibcast(data + first,
                     static_cast<int>(std::min(kChunkBytes, bytes - first)),
                     MPI_BYTE,
                     static_cast<int>(root),
                     g.comm,
                     &request),
          g,
          what,
          "broadcast");
    wait(request, g, what, "broadcast");
  }
}

void Group::barrier(std::string_view what) const {
  const GroupImpl& g = *impl_;
  if (g.size == 1) return;
  MPI_Request request = MPI_REQUEST_NULL;
  check(MPI_Ibarrier(g.comm, &request), g, what, "barrier");
  wait(request, g, what, "barrier");
}

Session Session::start(int* argc, char*** argv) {
  bool launched = false;
  for (const char* name : {"OMPI_COMM_WORLD_SIZE", "PMIX_RANK", "PMI_SIZE", "PMI_RANK"}) {
    launched = launched ||
               std::getenv(name) != nullptr;  // NOLINT(concurrency-mt-unsafe): before any thread
  }
  if (!launched) return Session(false, Group::single());
  auto world = std::make_shared<GroupImpl>();
  int provided = 0;
  const int code = MPI_Init_thread(argc, argv, MPI_THREAD_SERIALIZED, &provided);
  LOCKSTEP_CHECK(code == MPI_SUCCESS, kComm, "MPI_Init failed with code {}", code);
  world->comm = MPI_COMM_WORLD;
  world->name = "world";
  MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN);
  MPI_Comm_rank(MPI_COMM_WORLD, &world->rank);
  MPI_Comm_size(MPI_COMM_WORLD, &world->size);
  if (world->size > 1) board::open();
  return Session(true, Group(std::move(world)));
}

bool Session::claim_report() noexcept { return board::claim_report(); }
void Session::mark_left() noexcept { board::mark_left(); }
size_t Session::last_words(char* text, size_t size) noexcept {
  return board::last_words(text, size);
}

void Session::abort(int exit_code) noexcept {
  board::claim_report();  // the others end without a word
  board::mark_left();
  if (under_mpi_) MPI_Abort(MPI_COMM_WORLD, exit_code);
}

Session::Session(Session&& other) noexcept
    : under_mpi_(std::exchange(other.under_mpi_, false)), world_(std::move(other.world_)) {}

Session::~Session() {
  int finalized = 0;
  if (under_mpi_ && MPI_Finalized(&finalized) == MPI_SUCCESS && finalized == 0) {
    board::close();
    MPI_Finalize();
  }
}

}  // namespace lockstep::parallel

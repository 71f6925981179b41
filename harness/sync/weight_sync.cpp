#include "harness/sync/weight_sync.hpp"

#include <fmt/ranges.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <map>
#include <sstream>

#include "model/base/tensor_memory.hpp"

namespace lockstep::harness {
namespace {

std::string shape_text(const std::vector<int64_t>& shape) {
  return fmt::format("[{}]", fmt::join(shape, ", "));
}

/// What a rank says before anything moves; as text, so that all ranks can list all differences.
struct Statement {
  uint64_t plan = 0;
  bool trains = false, serves = false;
  int64_t version = 0, served = 0;
  struct Line {
    std::string name, dtype, shape;
  };
  std::vector<Line> lines;

  [[nodiscard]] std::string text() const {
    std::string out = fmt::format("{} {} {} {} {}\n", plan, trains, serves, version, served);
    for (const Line& line : lines)
      out += fmt::format("{}\t{}\t{}\n", line.name, line.dtype, line.shape);
    return out;
  }
  static Statement parse(const std::string& text) {
    Statement s;
    std::istringstream in(text);
    std::string word;
    std::getline(in, word);
    std::istringstream head(word);
    std::string trains, serves;
    head >> s.plan >> trains >> serves >> s.version >> s.served;
    s.trains = trains == "true";
    s.serves = serves == "true";
    Line line;
    while (std::getline(in, line.name, '\t') && std::getline(in, line.dtype, '\t') &&
           std::getline(in, line.shape))
      s.lines.push_back(line);
    return s;
  }
};

/// The statements of all ranks, by rank, and the bytes received for them.
std::pair<std::vector<Statement>, int64_t> exchange(const parallel::Group& group,
                                                    const Statement& own,
                                                    std::string_view what) {
  const std::string text = own.text();
  const std::vector<int64_t> sizes = group.all_gather(static_cast<int64_t>(text.size()), what);
  Tensor bytes = at::empty({static_cast<int64_t>(text.size())}, at::kByte);
  text.copy(reinterpret_cast<char*>(bytes.mutable_data_ptr<uint8_t>()), text.size());
  const Tensor all = group.all_gather_rows(bytes, sizes, what);
  const auto* data = reinterpret_cast<const char*>(all.const_data_ptr<uint8_t>());
  std::vector<Statement> statements;
  for (const int64_t size : sizes) {
    statements.push_back(Statement::parse(std::string(data, static_cast<size_t>(size))));
    data += size;
  }
  return {std::move(statements), all.numel() - bytes.numel()};
}

/// Elements of a piece that one rank takes, in the order of its part, with who sends them.
struct Arriving {
  Copy copy;
  size_t from;
};

}  // namespace

WeightSync::WeightSync(const parallel::Group& group, SyncSides sides, SyncOptions options)
    : group_(group.split(0, group.rank(), "weight sync")),
      options_(std::move(options)),
      plan_(std::move(sides), options_.bucket_bytes) {}

std::vector<OfferedTensor> WeightSync::offer(const parallel::ShardedParameters& params) const {
  std::map<std::string, at::ScalarType> wire;
  for (size_t p = 0; p < plan_.parameters().size(); ++p)
    wire.emplace(plan_.parameters()[p].name, plan_.wire(p));
  std::vector<OfferedTensor> offered;
  for (const parallel::Shard& shard : params.shards()) {
    const auto found = wire.find(shard.spec.name);
    offered.push_back({shard.spec.name,
                       found == wire.end() ? shard.value.scalar_type() : found->second,
                       shard.value.detach()});
  }
  return offered;
}

int64_t WeightSync::agree(int64_t version,
                          const std::vector<OfferedTensor>& offered,
                          const EngineWeights* weights) const {
  Statement own;
  own.plan = plan_.fingerprint();
  own.trains = !offered.empty();
  own.serves = weights != nullptr;
  own.version = version;
  own.served = weights != nullptr ? weights->version() : 0;
  for (const OfferedTensor& tensor : offered)
    own.lines.push_back(
        {tensor.name, c10::toString(tensor.wire), shape_text(tensor.rows.sizes().vec())});
  const auto [all, bytes] = exchange(group_, own, "what the weight sync moves");

  std::vector<std::string> problems;
  const auto problem = [&](size_t rank, const std::string& text) {
    problems.push_back(fmt::format("rank {}: {}", rank, text));
  };
  const Statement* trainer = nullptr;
  const Statement* engine = nullptr;
  for (size_t r = 0; r < all.size(); ++r) {
    const Statement& said = all[r];
    const auto rank = static_cast<int64_t>(r);
    if (said.plan != all[0].plan)
      problem(r, "plans other transfers than rank 0; configurations and topologies must agree");
    if (said.serves != plan_.serves(rank))
      problem(r, said.serves ? "has an engine that is not planned" : "has no engine");
    if (said.serves) {
      engine = engine == nullptr ? &said : engine;
      if (said.served != engine->served)
        problem(r, fmt::format("serves version {}, another rank {}", said.served, engine->served));
      else if (said.served >= version)
        problem(r, fmt::format("serves version {}, not below {}", said.served, version));
    }
    if (!plan_.trains(rank)) {
      if (said.trains) problem(r, "offers weights and is no trainer rank");
      continue;
    }
    trainer = trainer == nullptr ? &said : trainer;
    if (said.version != trainer->version)
      problem(r, fmt::format("offers version {}, another rank {}", said.version, trainer->version));
    std::map<std::string, const Statement::Line*> lines;
    for (const Statement::Line& line : said.lines) {
      if (!lines.emplace(line.name, &line).second) problem(r, "offers " + line.name + " twice");
    }
    for (size_t p = 0; p < plan_.parameters().size(); ++p) {
      const std::string& name = plan_.parameters()[p].name;
      const auto found = lines.find(name);
      if (found == lines.end()) {
        problem(r, "offers no " + name);
        continue;
      }
      const std::string shape = shape_text(plan_.shard_shape(p, rank)),
                        dtype = c10::toString(plan_.wire(p));
      if (found->second->shape != shape)
        problem(r, fmt::format("{} has shape {} instead of {}", name, found->second->shape, shape));
      if (found->second->dtype != dtype)
        problem(r, fmt::format("{} comes as {} instead of {}", name, found->second->dtype, dtype));
      lines.erase(found);
    }
    for (const auto& [name, line] : lines) problem(r, "offers " + name + ", which the model lacks");
  }
  if (problems.empty()) return bytes;
  fail(
      ErrorKind::kInput,
      "weight sync to version {} refused, {}; give the missing and correct the rest:\n  {}",
      version,
      engine == nullptr ? "nothing is served" : fmt::format("version {} serves on", engine->served),
      fmt::join(problems, "\n  "));
}

/// Bytes of this rank's elements of the bucket: by receiver, then by piece.
Tensor WeightSync::packed(const std::vector<Piece>& bucket,
                          const Index& offered,
                          std::vector<int64_t>& counts,
                          SyncReport& report) const {
  const int64_t own = group_.rank();
  counts.assign(static_cast<size_t>(group_.size()), 0);
  if (offered.empty()) return at::empty({0}, at::kByte);
  std::vector<std::vector<Copy>> copies;
  for (int64_t to = 0; to < group_.size(); ++to) {
    for (const Piece& piece : bucket) {
      copies.push_back(plan_.copies(piece, own, to));
      for (const Copy& copy : copies.back())
        counts[static_cast<size_t>(to)] += copy.count * plan_.wire_bytes(piece.parameter);
    }
  }
  int64_t total = 0;
  for (const int64_t count : counts) total += count;
  Tensor bytes = at::empty({total}, at::kByte);
  auto* out = bytes.mutable_data_ptr<uint8_t>();
  size_t next = 0;
  for (int64_t to = 0; to < group_.size(); ++to) {
    for (const Piece& piece : bucket) {
      const std::vector<Copy>& list = copies[next++];
      if (list.empty()) continue;
      const int64_t begin = list.front().shard, end = list.back().shard + list.back().count;
      const at::ScalarType wire = plan_.wire(piece.parameter);
      const Tensor values = offered[piece.parameter]
                                ->rows.reshape({-1})
                                .narrow(0, begin, end - begin)
                                .to(wire)
                                .contiguous();
      const auto* from = static_cast<const char*>(values.const_data_ptr());
      for (const Copy& copy : list) {
        const auto size = static_cast<size_t>(copy.count * plan_.wire_bytes(piece.parameter));
        std::memcpy(out, from + (copy.shard - begin) * plan_.wire_bytes(piece.parameter), size);
        out += size;
      }
      report.peak_buffer_bytes =
          std::max(report.peak_buffer_bytes, total + static_cast<int64_t>(values.nbytes()));
    }
  }
  return bytes;
}

void WeightSync::unpack(const std::vector<Piece>& bucket,
                        const Tensor& bytes,
                        const std::vector<int64_t>& counts,
                        EngineWeights& weights,
                        SyncReport& report) const {
  const auto* data = bytes.const_data_ptr<uint8_t>();
  std::vector<const uint8_t*> from;  // next bytes of each sender
  for (const int64_t count : counts) {
    from.push_back(data);
    data += count;
  }
  for (const Piece& piece : bucket) {
    std::vector<Arriving> arriving;
    int64_t elements = 0;
    for (int64_t r = 0; r < group_.size(); ++r) {
      for (const Copy& copy : plan_.copies(piece, r, group_.rank())) {
        arriving.push_back({copy, static_cast<size_t>(r)});
        elements += copy.count;
      }
    }
    if (elements == 0) continue;
    std::sort(arriving.begin(), arriving.end(), [](const Arriving& a, const Arriving& b) {
      return a.copy.part < b.copy.part;
    });
    const at::ScalarType wire = plan_.wire(piece.parameter);
    const Tensor values = at::empty({elements}, at::TensorOptions(wire));
    auto* to = static_cast<char*>(values.mutable_data_ptr());
    for (const Arriving& next : arriving) {
      const auto size = static_cast<size_t>(next.copy.count * plan_.wire_bytes(piece.parameter));
      std::memcpy(to, from[next.from], size);
      to += size;
      from[next.from] += size;
    }
    weights.put(plan_.parameters()[piece.parameter].name, arriving.front().copy.part, values);
    report.peak_buffer_bytes =
        std::max(report.peak_buffer_bytes,
                 static_cast<int64_t>(bytes.nbytes()) + static_cast<int64_t>(values.nbytes()));
  }
}

SyncReport WeightSync::run(int64_t version,
                           const std::vector<OfferedTensor>& offered,
                           EngineWeights* weights,
                           const std::set<std::string>& keep) {
  const at::NoGradGuard no_grad;
  const MemoryScope memory(MemoryKind::kExchange);
  const auto start = std::chrono::steady_clock::now();
  SyncReport report;
  report.version = version;
  report.buckets = static_cast<int64_t>(plan_.buckets().size());
  report.agreement_bytes = agree(version, offered, weights);

  Index index;
  if (!offered.empty()) {
    std::map<std::string, const OfferedTensor*> by_name;
    for (const OfferedTensor& tensor : offered) by_name.emplace(tensor.name, &tensor);
    for (const model::Parameter& parameter : plan_.parameters())
      index.push_back(by_name.at(parameter.name));
  }
  if (weights != nullptr) weights->begin_update(version, keep);
  const auto own = static_cast<size_t>(group_.rank());
  for (int64_t b = 0; b < report.buckets; ++b) {
    if (options_.progress) options_.progress(b, report.buckets);
    const std::vector<Piece>& bucket = plan_.buckets()[static_cast<size_t>(b)];
    std::vector<int64_t> send, receive(static_cast<size_t>(group_.size()), 0);
    Tensor bytes = packed(bucket, index, send, report);
    for (size_t r = 0; r < receive.size(); ++r) {
      for (const Piece& piece : bucket) {
        for (const Copy& copy : plan_.copies(piece, static_cast<int64_t>(r), group_.rank()))
          receive[r] += copy.count * plan_.wire_bytes(piece.parameter);
      }
      if (r != own) report.bytes_received += receive[r];
      if (r != own) report.bytes_sent += send[r];
    }
    report.bytes_copied += send[own];
    const auto sent = static_cast<int64_t>(bytes.nbytes());
    bytes = group_.all_to_all_rows(
        bytes, send, receive, fmt::format("weights of version {}, bucket {}", version, b));
    report.peak_buffer_bytes =
        std::max(report.peak_buffer_bytes, sent + static_cast<int64_t>(bytes.nbytes()));
    if (weights != nullptr) unpack(bucket, bytes, receive, *weights, report);
  }
  LOCKSTEP_CHECK(report.bytes_sent == plan_.bytes_sent(group_.rank()) &&
                     report.bytes_received == plan_.bytes_received(group_.rank()),
                 kInternal,
                 "weight sync: rank {} sent {} and received {} bytes, the plan says {} and {}",
                 group_.rank(),
                 report.bytes_sent,
                 report.bytes_received,
                 plan_.bytes_sent(group_.rank()),
                 plan_.bytes_received(group_.rank()));
  group_.barrier(fmt::format("weights of version {} are complete", version));
  if (weights != nullptr) {
    weights->commit_update();
    report.peak_staged_bytes = weights->peak_staged_bytes();
  }
  report.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  return report;
}

}  // namespace lockstep::harness

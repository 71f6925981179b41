#include "parallel/comm/ledger.hpp"

#include <algorithm>
#include <array>
#include <cstring>
#include <map>

#include "model/base/error.hpp"
#include "parallel/comm/group_impl.hpp"

namespace lockstep::parallel {
namespace {

std::map<std::string, LedgerTotals>& totals() {
  static std::map<std::string, LedgerTotals> all;
  return all;
}

/// A call as ranks tell it to each other.
struct Told {
  int64_t sequence;
  uint64_t chain;
  std::array<char, 112> text;
};

std::vector<char> gather(const GroupImpl& g, const void* data, int64_t bytes) {
  std::vector<char> all(static_cast<size_t>(bytes * g.size));
  const Rows rows(std::vector<int64_t>(static_cast<size_t>(g.size), 1));
  const Call call{g, CommOp::kAllGather, "ledgers"};
  const WorkPtr work = g.host->all_gather(data, all.data(), rows, bytes, call.until());
  wait(*work, call);
  return all;
}

template <typename T>
std::vector<T> gather_values(const GroupImpl& g, const std::vector<T>& mine) {
  const std::vector<char> bytes =
      gather(g, mine.data(), static_cast<int64_t>(mine.size() * sizeof(T)));
  std::vector<T> all(mine.size() * static_cast<size_t>(g.size));
  std::memcpy(all.data(), bytes.data(), bytes.size());
  return all;
}

std::vector<Told> told(const Ledger& ledger) {
  std::vector<Told> list(Ledger::kKept, Told{0, 0, {}});
  size_t i = 0;
  for (const LedgerEntry& entry : ledger.last()) {
    if (entry.sequence == 0) continue;
    Told& t = list[i++];
    t.sequence = entry.sequence;
    t.chain = entry.chain;
    const std::string text = describe(entry);
    text.copy(t.text.data(), t.text.size() - 1);
  }
  return list;
}

const Told* find(const std::vector<Told>& all, int64_t rank, int64_t sequence) {
  for (size_t i = 0; i < Ledger::kKept; ++i) {
    const Told& t = all[static_cast<size_t>(rank) * Ledger::kKept + i];
    if (t.sequence == sequence) return &t;
  }
  return nullptr;
}

LedgerDifference first_difference(const GroupImpl& g) {
  const std::vector<Told> all = gather_values(g, told(g.ledger));
  LedgerDifference difference;
  int64_t first = 0, last = 0;
  for (const Told& t : all) {
    if (t.sequence == 0) continue;
    first = first == 0 ? t.sequence : std::min(first, t.sequence);
    last = std::max(last, t.sequence);
  }
  for (int64_t s = first; s <= last; ++s) {
    const Told* zero = find(all, 0, s);
    for (int64_t r = 1; r < g.size; ++r) {
      const Told* other = find(all, r, s);
      const bool same = (zero == nullptr) == (other == nullptr) &&
                        (zero == nullptr || zero->chain == other->chain);
      if (same) continue;
      difference.sequence = s;
      difference.rank = r;
      difference.text =
          fmt::format("group {}: collective {} is not the same on all ranks", g.name, s);
      for (int64_t q = 0; q < g.size; ++q) {
        const Told* t = find(all, q, s);
        difference.calls.emplace_back(t == nullptr ? "no such call" : t->text.data());
        difference.text += fmt::format("; rank {}: {}", q, difference.calls.back());
      }
      return difference;
    }
  }
  difference.text =
      fmt::format("group {}: the collectives of its ranks differ, before the last {} calls",
                  g.name,
                  Ledger::kKept);
  return difference;
}

}  // namespace

std::string_view op_name(CommOp op) {
  constexpr std::string_view kNames[] = {"all-gather",
                                         "all-to-all",
                                         "reduce-scatter",
                                         "all-reduce",
                                         "broadcast",
                                         "barrier",
                                         "split",
                                         "send",
                                         "receive"};
  return kNames[static_cast<size_t>(op)];
}

std::string describe(const LedgerEntry& entry) {
  if (entry.sequence == 0) {
    return fmt::format("{} of {} ({} rank {})",
                       op_name(entry.op),
                       entry.what,
                       entry.op == CommOp::kSend ? "to" : "from",
                       entry.peer);
  }
  return fmt::format("call {}, {} of {}", entry.sequence, op_name(entry.op), entry.what);
}

uint64_t hash_bytes(uint64_t hash, const void* data, size_t size) noexcept {
  const auto* bytes = static_cast<const unsigned char*>(data);
  for (size_t i = 0; i < size; ++i) hash = (hash ^ bytes[i]) * 0x100000001b3ULL;
  return hash;
}

Ledger::Ledger(std::string group, int64_t size)
    : group_(std::move(group)), sent_(static_cast<size_t>(size), 0), received_(sent_) {}
Ledger::~Ledger() = default;

const LedgerEntry& Ledger::record(CommOp op,
                                  std::string_view what,
                                  int64_t bytes_sent,
                                  int64_t bytes_received,
                                  uint64_t size_hash,
                                  int64_t peer) {
  LedgerEntry entry;
  entry.op = op;
  entry.peer = peer;
  entry.bytes_sent = bytes_sent;
  entry.bytes_received = bytes_received;
  entry.what = what;
  if (is_collective(op)) {
    entry.sequence = ++collectives_;
    entry.hash =
        hash_value(hash_bytes(hash_value(size_hash, op), what.data(), what.size()), entry.sequence);
    chain_ = hash_value(hash_value(kHashStart, chain_), entry.hash);
  } else {
    ++(op == CommOp::kSend ? sent_ : received_)[static_cast<size_t>(peer)];
  }
  entry.chain = chain_;
  LedgerTotals& sum = totals()[group_];
  sum.group = group_;
  sum.size = std::max(sum.size, static_cast<int64_t>(sent_.size()));
  ++sum.calls;
  sum.bytes_sent += bytes_sent;
  sum.bytes_received += bytes_received;
  if (last_.size() == kKept) last_.pop_front();
  last_.push_back(std::move(entry));
  return last_.back();
}

void Ledger::add_seconds(double seconds) { totals()[group_].seconds += seconds; }

std::vector<LedgerTotals> ledger_totals() {
  std::vector<LedgerTotals> list;
  for (const auto& [_, sum] : totals()) list.push_back(sum);
  return list;
}

std::string ledger_table() {
  std::string text = fmt::format("{:<14} {:>5} {:>9} {:>16} {:>16} {:>10}\n",
                                 "group",
                                 "ranks",
                                 "calls",
                                 "bytes sent",
                                 "bytes received",
                                 "seconds");
  for (const LedgerTotals& sum : ledger_totals()) {
    text += fmt::format("{:<14} {:>5} {:>9} {:>16} {:>16} {:>10.3f}\n",
                        sum.group,
                        sum.size,
                        sum.calls,
                        sum.bytes_sent,
                        sum.bytes_received,
                        sum.seconds);
  }
  return text;
}

std::optional<LedgerDifference> compare_ledgers(const Group& group) {
  const GroupImpl& g = group.impl();
  if (g.size == 1) return std::nullopt;
  struct Head {
    int64_t collectives;
    uint64_t chain;
  };
  const std::vector<Head> heads =
      gather_values(g, std::vector<Head>{{g.ledger.collectives(), g.ledger.chain()}});
  for (const Head& head : heads) {
    if (head.collectives != heads[0].collectives || head.chain != heads[0].chain)
      return first_difference(g);
  }
  std::vector<int64_t> mine;
  for (int64_t r = 0; r < g.size; ++r) {
    mine.push_back(g.ledger.sent_to(r));
    mine.push_back(g.ledger.received_from(r));
  }
  const std::vector<int64_t> all = gather_values(g, mine);
  const auto count = [&](int64_t rank, int64_t peer, int64_t received) {
    return all[static_cast<size_t>((rank * g.size + peer) * 2 + received)];
  };
  for (int64_t from = 0; from < g.size; ++from) {
    for (int64_t to = 0; to < g.size; ++to) {
      const int64_t sent = count(from, to, 0), received = count(to, from, 1);
      if (sent == received) continue;
      LedgerDifference difference;
      difference.rank = to;
      difference.text =
          fmt::format("group {}: rank {} sent {} messages to rank {}, which received {}",
                      g.name,
                      from,
                      sent,
                      to,
                      received);
      return difference;
    }
  }
  return std::nullopt;
}

}  // namespace lockstep::parallel

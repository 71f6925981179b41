#include "harness/inference/scheduler.hpp"

#include <algorithm>

namespace lockstep::harness {
namespace {

CacheSizes with_prefix_slots(const SchedulerOptions& options) {
  CacheSizes sizes = options.caches;
  sizes.slots += options.prefix_entries;
  return sizes;
}

bool loses_pools(const Inference& engine) {
  return engine.numerics().is<model::Switch::kPrefillPool>("dropped");
}

}  // namespace

Scheduler::Scheduler(Inference& engine, const SchedulerOptions& options)
    : engine_(engine),
      options_(options),
      caches_(engine.make_caches(with_prefix_slots(options))),
      prefixes_(
          caches_, engine.config().index_kpool, options.prefix_block, options.prefix_entries) {
  LOCKSTEP_CHECK(options.token_budget >= 1 && options.max_running >= 1 &&
                     options.prefix_entries >= 0 && options.caches.slots >= 1,
                 kConfig,
                 "scheduler: a budget of {} tokens, {} running requests, {} slots: at least 1 each",
                 options.token_budget,
                 options.max_running,
                 options.caches.slots);
  LOCKSTEP_CHECK(
      !loses_pools(engine) || options.token_budget >= engine.config().index_kpool,
      kConfig,
      "scheduler: a budget of {} tokens holds no pool of {}, but D67 = dropped needs whole "
      "pools in a prefill chunk; raise the budget",
      options.token_budget,
      engine.config().index_kpool);
}

int64_t Scheduler::add(GenerateRequest request) {
  check_sampling(request.sampling);
  const auto prompt = static_cast<int64_t>(request.prompt.size());
  const int64_t longest = prompt + request.max_tokens;
  LOCKSTEP_CHECK(prompt >= 1 && request.max_tokens >= 1,
                 kInput,
                 "request: a prompt of {} tokens, {} tokens wanted: at least 1 each",
                 prompt,
                 request.max_tokens);
  for (const int64_t id : request.prompt) {
    LOCKSTEP_CHECK(id >= 0 && id < engine_.config().vocab_size,
                   kInput,
                   "request: token {} is outside the vocabulary of {}",
                   id,
                   engine_.config().vocab_size);
  }
  const CacheSizes need =
      cache_sizes(options_.caches.page_size, engine_.config().index_kpool, {longest});
  const int64_t index_pages =
      (longest / engine_.config().index_kpool + options_.caches.index_page - 1) /
      options_.caches.index_page;
  LOCKSTEP_CHECK(
      need.pages <= caches_.pages().count() && index_pages <= caches_.index_pages().count(),
      kInput,
      "request: {} tokens need {} pages and {} index pages, the caches have {} and {}; "
      "shorten it or enlarge them",
      longest,
      need.pages,
      index_pages,
      caches_.pages().count(),
      caches_.index_pages().count());
  auto entry = std::make_unique<Request>();
  entry->number = next_++;
  entry->tokens = request.prompt;
  entry->wanted = std::move(request);
  Request& added = *entry;
  waiting_.push_back(&added);
  requests_.emplace(added.number, std::move(entry));
  return added.number;
}

Scheduler::Request& Scheduler::at(int64_t number) {
  const auto found = requests_.find(number);
  LOCKSTEP_CHECK(found != requests_.end(), kInput, "scheduler: no request {}", number);
  return *found->second;
}

const Generated& Scheduler::result(int64_t request) const {
  const auto found = requests_.find(request);
  LOCKSTEP_CHECK(found != requests_.end(), kInput, "scheduler: no request {}", request);
  return found->second->out;
}

void Scheduler::remove(int64_t number) {
  Request& request = at(number);
  if (request.sequence.slot != 0) caches_.release(request.sequence);
  std::erase(running_, &request);
  std::erase(waiting_, &request);
  requests_.erase(number);
}

void Scheduler::preempt(Request& request, std::vector<Chosen>& chosen) {
  std::erase(running_, &request);
  std::erase_if(chosen, [&](const Chosen& c) { return c.request == &request; });
  caches_.release(request.sequence);
  ++request.out.preemptions;
  const auto place = std::find_if(waiting_.begin(), waiting_.end(), [&](const Request* other) {
    return other->number > request.number;
  });
  waiting_.insert(place, &request);
}

void Scheduler::preempt(int64_t number) {
  Request& request = at(number);
  std::vector<Chosen> none;
  if (std::find(running_.begin(), running_.end(), &request) != running_.end())
    preempt(request, none);
}

/// False when the request itself had to give way.
bool Scheduler::make_room(Request& request, int64_t tokens, std::vector<Chosen>& chosen) {
  while (!caches_.reserve(request.sequence, tokens)) {
    if (prefixes_.evict()) continue;
    Request& youngest = *running_.back();
    const bool itself = &youngest == &request;
    preempt(youngest, chosen);
    if (itself) return false;
  }
  return true;
}

int64_t Scheduler::chunk(const Request& request, int64_t budget) const {
  int64_t count = std::min(request.pending(), budget);
  // A pool that began in an earlier chunk would be lost (D67 = dropped): chunks end where pools do.
  const int64_t kpool = engine_.config().index_kpool;
  if (loses_pools(engine_) && count < request.pending())
    count = (request.sequence.length + count) / kpool * kpool - request.sequence.length;
  // States are stored after exactly a boundary's tokens, so a chunk ends there.
  if (prefixes_.enabled()) {
    const int64_t block = prefixes_.block();
    count = std::min(count, block - request.sequence.length % block);
  }
  return count;
}

bool Scheduler::admit(Request& request) {
  request.out.reused_tokens +=
      prefixes_.start(request.sequence, request.tokens, engine_.weights().version());
  const auto tokens = static_cast<int64_t>(request.tokens.size());
  while (!caches_.reserve(request.sequence, tokens)) {
    if (prefixes_.evict()) continue;
    request.out.reused_tokens -= request.sequence.length;
    caches_.release(request.sequence);
    return false;
  }
  return true;
}

bool Scheduler::step() {
  if (running_.empty() && waiting_.empty()) return false;
  std::vector<Chosen> chosen;
  int64_t budget = options_.token_budget;
  for (const bool decode : {true, false}) {
    const std::vector<Request*> order = running_;
    for (Request* request : order) {
      // Preempted by an older one in this step.
      if (std::find(running_.begin(), running_.end(), request) == running_.end()) continue;
      if (request->decodes() != decode || budget == 0) continue;
      const int64_t count = decode ? 1 : chunk(*request, budget);
      if (count <= 0 || !make_room(*request, request->sequence.length + count, chosen)) continue;
      chosen.push_back({request, count, decode});
      budget -= count;
    }
  }
  while (budget > 0 && !waiting_.empty() &&
         static_cast<int64_t>(running_.size()) < options_.max_running) {
    Request* request = waiting_.front();
    if (!admit(*request)) break;
    waiting_.pop_front();
    const auto place = std::find_if(running_.begin(), running_.end(), [&](const Request* other) {
      return other->number > request->number;
    });
    running_.insert(place, request);
    const int64_t count = chunk(*request, budget);
    if (count <= 0) break;
    chosen.push_back({request, count, false});
    budget -= count;
  }
  LOCKSTEP_CHECK(!chosen.empty(),
                 kInternal,
                 "scheduler: {} running and {} waiting requests, but none can go on",
                 running_.size(),
                 waiting_.size());
  std::vector<BatchItem> items;
  for (const Chosen& c : chosen) {
    const auto from = c.request->tokens.begin() + c.request->sequence.length;
    items.push_back(
        {.sequence = &c.request->sequence, .ids = {from, from + c.count}, .decode = c.decode});
  }
  const Batch batch(std::move(items), engine_.config().index_kpool);
  const Tensor hidden = engine_.step(caches_, batch);
  ++steps_;
  most_rows_ = std::max(most_rows_, batch.rows());
  for (const Chosen& c : chosen)
    prefixes_.store(c.request->sequence, c.request->tokens, engine_.weights().version());
  sample_next(chosen, batch, hidden);
  return true;
}

void Scheduler::sample_next(const std::vector<Chosen>& chosen,
                            const Batch& batch,
                            const Tensor& hidden) {
  std::vector<int64_t> rows;
  std::vector<Request*> ready;
  for (size_t i = 0; i < chosen.size(); ++i) {
    if (chosen[i].request->pending() > 0) continue;
    rows.push_back(batch.parts[i].end - 1);
    ready.push_back(chosen[i].request);
  }
  if (ready.empty()) return;
  const Tensor last = hidden.index_select(0, at::tensor(rows, at::kLong));
  const Tensor logits = engine_.logits(last);
  for (size_t i = 0; i < ready.size(); ++i) {
    Request& request = *ready[i];
    const auto row = static_cast<int64_t>(i);
    const Sampling& sampling = request.wanted.sampling;
    const int64_t id = sample(logits[row], sampling, static_cast<int64_t>(request.out.ids.size()));
    const double temperature = sampling.temperature > 0 ? sampling.temperature : 1.0;
    request.out.ids.push_back(id);
    request.out.logprobs.push_back(engine_.logprob(last.narrow(0, row, 1), id, temperature));
    request.out.versions.push_back(engine_.weights().version());
    request.tokens.push_back(id);
    const std::vector<int64_t>& stops = request.wanted.stop_ids;
    request.out.done = static_cast<int64_t>(request.out.ids.size()) == request.wanted.max_tokens ||
                       std::find(stops.begin(), stops.end(), id) != stops.end();
    if (!request.out.done) continue;
    caches_.release(request.sequence);
    std::erase(running_, &request);
  }
}

void Scheduler::update(const std::shared_ptr<const model::WeightSource>& source) {
  while (!running_.empty()) preempt(running_.back()->number);
  prefixes_.clear();
  engine_.update(source);
}

void Scheduler::check_idle() {
  LOCKSTEP_CHECK(running_.empty(), kInternal, "scheduler: {} requests still run", running_.size());
  prefixes_.clear();
  for (const auto& [what, pool] : {std::pair<const char*, const IdPool*>{"pages", &caches_.pages()},
                                   {"index pages", &caches_.index_pages()},
                                   {"slots", &caches_.slots()}}) {
    LOCKSTEP_CHECK(pool->free() == pool->count(),
                   kInternal,
                   "scheduler: {} of {} {} were not given back",
                   pool->count() - pool->free(),
                   pool->count(),
                   what);
  }
}

}  // namespace lockstep::harness

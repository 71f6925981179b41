// Continuous batching: many requests on one engine, a budget of tokens a step.
//
// Requests are served in order of arrival. A step takes one token of every request that decodes,
// then chunks of prompts, then admits waiting requests while there is room for all their tokens.
// When pages run out, stored prefixes go first, then the youngest running request is preempted: its
// pages and slot are given back, and later its prompt and the tokens it sampled are computed again.
// The oldest request is therefore never preempted for another, and a request that could not fit
// alone is refused at once: every request ends.
#pragma once

#include <deque>
#include <list>
#include <map>
#include <memory>
#include <vector>

#include "harness/inference/inference.hpp"
#include "harness/inference/prefix_cache.hpp"
#include "harness/inference/sampler.hpp"

namespace lockstep::harness {

struct SchedulerOptions {
  CacheSizes caches;
  int64_t token_budget = 512;  ///< rows of a step
  int64_t max_running = 32;    ///< requests at the same time
  int64_t prefix_entries = 0;  ///< stored prefixes (a slot each); 0: none
  int64_t prefix_block = 0;    ///< tokens between boundaries, rounded up to whole pages
};

struct GenerateRequest {
  std::vector<int64_t> prompt;
  int64_t max_tokens = 16;
  Sampling sampling;
  std::vector<int64_t> stop_ids;  ///< generation ends with one of these
};

struct Generated {
  std::vector<int64_t> ids;
  std::vector<double>
      logprobs;  ///< of each id under the sampling temperature (D60), as it was sampled
  std::vector<int64_t> versions;  ///< of the weights that sampled each id
  int64_t reused_tokens = 0;      ///< from stored prefixes
  int64_t preemptions = 0;
  bool done = false;
};

class Scheduler {
 public:
  /// Throws kConfig for sizes below 1. The engine must outlive the scheduler.
  Scheduler(Inference& engine, const SchedulerOptions& options);

  /// A new request; returns its number. Throws kInput for an empty prompt, an id outside the
  /// vocabulary, or a request that would not fit the caches if it were alone; kConfig for its
  /// sampling.
  int64_t add(GenerateRequest request);
  /// One step. False when no request is left.
  bool step();
  void run() {
    while (step()) {
    }
  }
  [[nodiscard]] const Generated& result(int64_t request) const;
  /// Forgets a request; gives its place back if it is still running.
  void remove(int64_t request);

  /// Preempts a running request: it starts again, sampled tokens are kept. For tests and for
  /// update().
  void preempt(int64_t request);
  /// New weights. Running requests go on with them: their caches are dropped and computed again,
  /// the tokens they sampled stay and keep the version they were sampled with. Stored prefixes of
  /// the old weights are dropped.
  void update(const std::shared_ptr<const model::WeightSource>& source);

  [[nodiscard]] const Caches& caches() const { return caches_; }
  [[nodiscard]] const PrefixCache& prefixes() const { return prefixes_; }
  [[nodiscard]] int64_t num_running() const { return static_cast<int64_t>(running_.size()); }
  [[nodiscard]] int64_t num_waiting() const { return static_cast<int64_t>(waiting_.size()); }
  [[nodiscard]] int64_t num_steps() const { return steps_; }
  [[nodiscard]] int64_t most_rows() const { return most_rows_; }
  /// Pages and slots that no request and no stored prefix holds are free. Throws kInternal when
  /// some leaked.
  void check_idle();

 private:
  struct Request {
    int64_t number;
    GenerateRequest wanted;
    std::vector<int64_t> tokens;  ///< prompt and generated
    Sequence sequence;
    Generated out;
    [[nodiscard]] int64_t pending() const {
      return static_cast<int64_t>(tokens.size()) - sequence.length;
    }
    [[nodiscard]] bool decodes() const { return !out.ids.empty() && pending() == 1; }
  };
  struct Chosen {
    Request* request;
    int64_t count;
    bool decode;
  };

  [[nodiscard]] Request& at(int64_t number);
  bool make_room(Request& request, int64_t tokens, std::vector<Chosen>& chosen);
  void preempt(Request& request, std::vector<Chosen>& chosen);
  bool admit(Request& request);
  [[nodiscard]] int64_t chunk(const Request& request, int64_t budget) const;
  void sample_next(const std::vector<Chosen>& chosen, const Batch& batch, const Tensor& hidden);

  Inference& engine_;
  SchedulerOptions options_;
  Caches caches_;
  PrefixCache prefixes_;
  std::map<int64_t, std::unique_ptr<Request>> requests_;
  std::vector<Request*> running_;  ///< by arrival
  std::deque<Request*> waiting_;   ///< by arrival
  int64_t next_ = 1, steps_ = 0, most_rows_ = 0;
};

}  // namespace lockstep::harness

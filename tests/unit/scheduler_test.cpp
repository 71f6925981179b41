// Sampling, continuous batching, preemption, stored prefixes, weights that change under way.
#include "harness/inference/scheduler.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <random>

#include "model/config/config_json.hpp"
#include "tests/support/compare.hpp"

namespace lockstep::tests {
namespace {

using harness::Generated;
using harness::GenerateRequest;
using harness::Inference;
using harness::Sampling;
using harness::Scheduler;
using harness::SchedulerOptions;

std::shared_ptr<const model::WeightSource> weights(uint64_t seed) {
  return model::seeded_source(model::preset_config("tiny"), seed);
}

/// Every row's bits are its own, however it was computed: what is expected below is equality.
Inference engine(uint64_t seed = 7) {
  harness::InferenceOptions options;
  options.numerics = model::Numerics::policy("invariant-f32");
  return {weights(seed), options, parallel::Mesh::single()};
}

constexpr int64_t kPage = 8, kPool = 4;

/// Caches with that many latent pages of 8 tokens, and as many index pages of 2 pools.
SchedulerOptions options(int64_t pages, int64_t slots, int64_t budget) {
  SchedulerOptions o;
  o.caches = {.page_size = kPage,
              .index_page = 2,
              .pages = pages,
              .index_pages = pages,
              .slots = slots,
              .shuffle = 5};
  o.token_budget = budget;
  o.max_running = slots;
  return o;
}

std::vector<int64_t> prompt(int64_t length, uint64_t seed) {
  const Tensor ids = harness::random_documents({length}, 131, 5, seed).ids;
  return {ids.const_data_ptr<int64_t>(), ids.const_data_ptr<int64_t>() + length};
}

GenerateRequest request(int64_t length, int64_t max_tokens, uint64_t seed) {
  return {.prompt = prompt(length, seed),
          .max_tokens = max_tokens,
          .sampling = {.temperature = 0.8, .top_p = 0.95, .seed = seed},
          .stop_ids = {}};
}

Generated alone(Inference& model, const GenerateRequest& wanted) {
  Scheduler scheduler(model, options(64, 1, 1024));
  const int64_t number = scheduler.add(wanted);
  scheduler.run();
  return scheduler.result(number);
}

void expect_same(const Generated& got, const Generated& want, const std::string& what) {
  EXPECT_TRUE(got.done) << what;
  EXPECT_EQ(got.ids, want.ids) << what;
  EXPECT_EQ(got.logprobs, want.logprobs) << what;
}

TEST(Sampler, GreedyTakesTheLowestOfEqualTokens) {
  const Tensor logits = at::tensor({0.5, 2.0, -1.0, 2.0}, at::kDouble);
  EXPECT_EQ(harness::sample(logits, {.temperature = 0}, 0), 1);
}

TEST(Sampler, FrequenciesFollowTheSoftmaxCutToTopP) {
  const Tensor logits = at::tensor({1.0, 0.0, 2.0, -3.0}, at::kDouble);
  const auto counts = [&](double temperature, double top_p) {
    std::vector<double> n(4, 0.0);
    for (int64_t i = 0; i < 20000; ++i)
      n[static_cast<size_t>(harness::sample(
          logits, {.temperature = temperature, .top_p = top_p, .seed = 3}, i))] += 1.0 / 20000;
    return n;
  };
  const Tensor p = (logits / 0.7).softmax(0);
  const std::vector<double> whole = counts(0.7, 1.0);
  for (int64_t i = 0; i < 4; ++i)
    EXPECT_NEAR(whole[static_cast<size_t>(i)], p[i].item<double>(), 0.01) << i;
  // Tokens 2 and 0 hold 0.90 of the mass; 0.8 needs both, 0.7 the first alone.
  const std::vector<double> two = counts(1.0, 0.8), one = counts(1.0, 0.6);
  EXPECT_EQ(two[1] + two[3], 0);
  EXPECT_NEAR(two[2], 1 / (1 + std::exp(-1.0)), 0.01);
  EXPECT_EQ(one[0] + one[1] + one[3], 0);
}

TEST(Sampler, RefusesBadOptionsAndNan) {
  const Tensor logits = at::tensor({1.0, 0.0}, at::kDouble);
  EXPECT_THROW(harness::sample(logits, {.temperature = -1}, 0), Error);
  EXPECT_THROW(harness::sample(logits, {.top_p = 0}, 0), Error);
  EXPECT_THROW(harness::sample(at::tensor({std::nan(""), 0.0}, at::kDouble), {}, 0), Error);
}

TEST(IdPool, CountsHoldersAndNamesWhatIsGivenTwice) {
  harness::IdPool pool("pages", 3, 9);
  const int64_t id = *pool.take();
  EXPECT_GE(id, 1);
  pool.hold(id);
  pool.give(id);
  EXPECT_EQ(pool.free(), 2);
  pool.give(id);
  EXPECT_EQ(pool.free(), 3);
  EXPECT_THROW(pool.give(id), Error);
  EXPECT_THROW(pool.hold(id), Error);
  EXPECT_THROW(pool.give(0), Error);
  for (int i = 0; i < 3; ++i) EXPECT_TRUE(pool.take().has_value());
  EXPECT_FALSE(pool.take().has_value());
}

TEST(Scheduler, ThirtyTwoRequestsTogetherEqualEachAlone) {
  Inference model = engine();
  std::vector<GenerateRequest> wanted;
  for (uint64_t i = 0; i < 32; ++i)
    wanted.push_back(request(1 + static_cast<int64_t>(i * 7 % 45), 6, 100 + i));
  std::vector<Generated> want;
  for (const GenerateRequest& one : wanted) want.push_back(alone(model, one));
  for (const int64_t budget : {64, 1024}) {
    Scheduler scheduler(model, options(32 * 8, 32, budget));
    for (const GenerateRequest& one : wanted) scheduler.add(one);
    int64_t most = 0;
    while (scheduler.step()) most = std::max(most, scheduler.num_running());
    if (budget == 1024) {
      EXPECT_EQ(most, 32);
    }
    EXPECT_LE(scheduler.most_rows(), budget);
    for (size_t i = 0; i < wanted.size(); ++i)
      expect_same(
          scheduler.result(static_cast<int64_t>(i) + 1), want[i], fmt::format("{} {}", budget, i));
    scheduler.check_idle();
  }
}

TEST(Scheduler, PreemptedRequestsGiveTheSameTokens) {
  Inference model = engine();
  // 9 pages for three requests of up to 5.
  Scheduler scheduler(model, options(9, 3, 32));
  std::vector<GenerateRequest> wanted;
  for (uint64_t i = 0; i < 3; ++i) wanted.push_back(request(16, 22, 40 + i));
  for (const GenerateRequest& one : wanted) scheduler.add(one);
  scheduler.run();
  int64_t preemptions = 0;
  for (size_t i = 0; i < wanted.size(); ++i) {
    const Generated& got = scheduler.result(static_cast<int64_t>(i) + 1);
    preemptions += got.preemptions;
    expect_same(got, alone(model, wanted[i]), std::to_string(i));
  }
  EXPECT_GT(preemptions, 0);
  EXPECT_EQ(scheduler.result(1).preemptions, 0) << "the oldest request gives way to nobody";
  scheduler.check_idle();
}

TEST(Scheduler, WhatCanNeverFitIsRefusedAtOnce) {
  Inference model = engine();
  Scheduler scheduler(model, options(4, 2, 32));
  EXPECT_THROW(scheduler.add(request(30, 3, 1)), Error);
  EXPECT_THROW(scheduler.add(request(0, 3, 1)), Error);
  EXPECT_THROW(scheduler.add({.prompt = {131}, .max_tokens = 1, .sampling = {}, .stop_ids = {}}),
               Error);
  EXPECT_EQ(scheduler.add(request(29, 3, 1)), 1);
  scheduler.run();
  EXPECT_TRUE(scheduler.result(1).done);
}

TEST(Scheduler, ALongPromptDoesNotHoldUpDecodingNorTheOtherWayRound) {
  Inference model = engine();
  Scheduler scheduler(model, options(64, 4, 8));
  const int64_t quick = scheduler.add(request(3, 12, 1)), slow = scheduler.add(request(120, 2, 2)),
                late = scheduler.add(request(2, 2, 3));
  int64_t quick_end = 0, slow_end = 0, late_end = 0;
  while (scheduler.step()) {
    const int64_t now = scheduler.num_steps();
    for (const auto& [number, end] :
         {std::pair{quick, &quick_end}, {slow, &slow_end}, {late, &late_end}})
      if (scheduler.result(number).done && *end == 0) *end = now;
  }
  EXPECT_LE(quick_end, 13);  // one token a step
  EXPECT_LE(slow_end, 25);
  EXPECT_GT(late_end, 0);
}

TEST(Scheduler, ChunksEndWherePoolsDoIfACutPoolWouldBeLost) {
  harness::InferenceOptions o;
  o.numerics = model::Numerics::policy("invariant-f32");
  o.numerics.set("prefill_pool", "dropped");
  Inference model(weights(7), o, parallel::Mesh::single());
  Scheduler scheduler(model, options(64, 3, 7));
  std::vector<GenerateRequest> wanted{request(50, 4, 1), request(33, 4, 2), request(3, 4, 3)};
  for (const GenerateRequest& one : wanted) scheduler.add(one);
  scheduler.run();
  for (size_t i = 0; i < wanted.size(); ++i)
    expect_same(
        scheduler.result(static_cast<int64_t>(i) + 1), alone(model, wanted[i]), std::to_string(i));
  EXPECT_THROW(Scheduler(model, options(64, 3, 3)), Error);
}

TEST(Scheduler, StopsAtAStopToken) {
  Inference model = engine();
  GenerateRequest wanted = request(10, 12, 9);
  const Generated whole = alone(model, wanted);
  wanted.stop_ids = {whole.ids[4]};
  const Generated got = alone(model, wanted);
  const auto first =
      std::find(whole.ids.begin(), whole.ids.end(), whole.ids[4]) - whole.ids.begin();
  EXPECT_EQ(static_cast<int64_t>(got.ids.size()), first + 1);
}

TEST(PrefixCache, B27StoredStatesAreThoseAfterExactlyTheBoundary) {
  Inference model = engine();
  SchedulerOptions o = options(64, 2, 13);
  o.prefix_entries = 8;
  o.prefix_block = 16;
  const std::vector<int64_t> tokens = prompt(45, 77);
  for (const bool interrupted : {false, true}) {
    Scheduler scheduler(model, o);
    ASSERT_EQ(scheduler.prefixes().block(), 16);
    const int64_t number = scheduler.add(
        {.prompt = tokens, .max_tokens = 2, .sampling = {.temperature = 0}, .stop_ids = {}});
    if (interrupted) {
      scheduler.step();
      scheduler.step();
      scheduler.preempt(number);
    }
    scheduler.run();
    ASSERT_GE(scheduler.prefixes().size(), 2);
    // A fresh run over each stored prefix leaves the same bytes in its slot.
    for (const auto& entry : scheduler.prefixes().entries()) {
      harness::Caches caches = model.make_caches(o.caches);
      harness::Sequence fresh;
      ASSERT_TRUE(caches.reserve(fresh, fresh.length + entry.sequence.length));
      model.step(caches, harness::Batch({{.sequence = &fresh, .ids = entry.tokens}}, kPool));
      for (int64_t layer = 0; layer < 3; ++layer) {
        const auto& stored = scheduler.caches().kda(layer);
        const auto& want = caches.kda(layer);
        EXPECT_TRUE(same_bytes(stored.state[entry.sequence.slot], want.state[fresh.slot]));
        EXPECT_TRUE(same_bytes(stored.conv[entry.sequence.slot], want.conv[fresh.slot]));
      }
    }
    // Prompts that share 16 and 32 tokens start there and give what cold ones give.
    for (const int64_t shared : {16, 32, 45}) {
      GenerateRequest other = request(45, 5, 31 + static_cast<uint64_t>(shared));
      std::copy_n(tokens.begin(), shared, other.prompt.begin());
      const int64_t again = scheduler.add(other);
      scheduler.run();
      EXPECT_EQ(scheduler.result(again).reused_tokens, std::min<int64_t>(shared, 32));
      expect_same(scheduler.result(again), alone(model, other), std::to_string(shared));
    }
    scheduler.check_idle();
  }
}

TEST(PrefixCache, B17NothingOfOldWeightsIsReused) {
  Inference model = engine(7);
  SchedulerOptions o = options(64, 2, 64);
  o.prefix_entries = 8;
  o.prefix_block = 8;
  Scheduler scheduler(model, o);
  const GenerateRequest wanted = request(40, 4, 5);
  scheduler.add(wanted);
  scheduler.run();
  EXPECT_GT(scheduler.prefixes().size(), 0);
  const int64_t warm = scheduler.add(wanted);
  scheduler.run();
  EXPECT_EQ(scheduler.result(warm).reused_tokens, 32);
  scheduler.update(weights(8));
  const int64_t after = scheduler.add(wanted);
  scheduler.run();
  EXPECT_EQ(scheduler.result(after).reused_tokens, 0);
  EXPECT_THAT(scheduler.result(after).versions, testing::Each(2));
  Inference cold = engine(8);
  expect_same(scheduler.result(after), alone(cold, wanted), "after the update");
}

TEST(Scheduler, RunningRequestsGoOnWithNewWeightsFromTheStart) {
  Inference model = engine(7);
  Scheduler scheduler(model, options(64, 2, 64));
  const GenerateRequest wanted = request(20, 8, 5);
  const int64_t number = scheduler.add(wanted);
  for (int i = 0; i < 4; ++i) scheduler.step();
  const std::vector<int64_t> before = scheduler.result(number).ids;
  ASSERT_EQ(before.size(), 4U);
  scheduler.update(weights(8));
  scheduler.run();
  const Generated& got = scheduler.result(number);
  EXPECT_EQ(got.versions, (std::vector<int64_t>{1, 1, 1, 1, 2, 2, 2, 2}));
  // What a cold engine with the new weights says after prompt and the tokens so far.
  Inference cold = engine(8);
  GenerateRequest rest = wanted;
  rest.prompt.insert(rest.prompt.end(), before.begin(), before.end());
  harness::Caches caches = cold.make_caches(options(64, 2, 64).caches);
  harness::Sequence sequence;
  ASSERT_TRUE(caches.reserve(sequence, 24));
  const Tensor h =
      cold.step(caches, harness::Batch({{.sequence = &sequence, .ids = rest.prompt}}, kPool));
  EXPECT_EQ(got.logprobs[4], cold.logprob(h.narrow(0, 23, 1), got.ids[4], 0.8));
}

TEST(Scheduler, SoakOfRandomRequestsLeavesNothingBehind) {
  Inference model = engine();
  SchedulerOptions o = options(40, 8, 48);
  o.prefix_entries = 4;
  o.prefix_block = 16;
  Scheduler scheduler(model, o);
  std::mt19937_64 random(2026);
  const char* wish = std::getenv("LOCKSTEP_SOAK");
  const int64_t total = wish != nullptr ? std::atoll(wish) : 200;
  std::map<int64_t, GenerateRequest> open;
  int64_t added = 0, finished = 0, checked = 0, preemptions = 0, reused = 0;
  while (finished < total) {
    while (added < total && static_cast<int64_t>(open.size()) < 20 && random() % 3 != 0) {
      GenerateRequest one = request(1 + static_cast<int64_t>(random() % 60),
                                    1 + static_cast<int64_t>(random() % 16),
                                    random() % 50);
      if (random() % 4 == 0) one.sampling.temperature = 0;
      open.emplace(scheduler.add(one), one);
      ++added;
    }
    scheduler.step();
    if (random() % 40 == 0 && !open.empty()) scheduler.preempt(open.begin()->first);
    for (auto entry = open.begin(); entry != open.end();) {
      const Generated& got = scheduler.result(entry->first);
      if (!got.done) {
        ++entry;
        continue;
      }
      preemptions += got.preemptions;
      reused += got.reused_tokens;
      if (++finished % 10 == 0) {
        expect_same(got, alone(model, entry->second), std::to_string(entry->first));
        ++checked;
      }
      scheduler.remove(entry->first);
      entry = open.erase(entry);
    }
  }
  EXPECT_FALSE(scheduler.step());
  EXPECT_GE(checked, total / 10);
  EXPECT_GT(preemptions, 0);
  EXPECT_GT(reused, 0);
  scheduler.check_idle();
}

}  // namespace
}  // namespace lockstep::tests

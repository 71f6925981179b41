// Times by operator: nesting, backward, the whole model, and what bench makes of them.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/mman.h>

#include <chrono>
#include <thread>

#include "harness/runner/bench.hpp"
#include "harness/trainer/trainer.hpp"
#include "model/base/heap.hpp"
#include "model/base/op_timer.hpp"
#include "model/base/torch.hpp"
#include "model/config/config_json.hpp"

namespace lockstep::tests {
namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

void pass_time(int milliseconds) {
  std::this_thread::sleep_for(std::chrono::milliseconds(milliseconds));
}

OpTime time_of(const OpTimer& timer, std::string_view name) {
  for (const OpTime& op : timer.times()) {
    if (op.name == name) return op;
  }
  ADD_FAILURE() << "no time of " << name;
  return {};
}

double sum_of(const OpTimer& timer) {
  double sum = 0;
  for (const OpTime& op : timer.times()) sum += op.forward_s + op.backward_s;
  return sum;
}

/// The identity; takes a while both ways.
struct Slow : torch::autograd::Function<Slow> {
  static Tensor forward(torch::autograd::AutogradContext* ctx, const Tensor& x, int64_t back_ms) {
    ctx->saved_data["ms"] = back_ms;
    return x.clone();
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* ctx,
                                                 torch::autograd::variable_list grads) {
    pass_time(static_cast<int>(ctx->saved_data["ms"].toInt()));
    return {grads[0], {}};
  }
};

TEST(OpTimer, AScopeIsChargedWithoutTheScopesInsideIt) {
  const auto start = Clock::now();
  const OpTimer timer;
  {
    const OpScope outer("outer");
    pass_time(10);
    {
      const OpScope inner("inner");
      pass_time(40);
    }
    const OpScope again("inner");
  }
  pass_time(20);
  const double wall = seconds_since(start);
  EXPECT_EQ(time_of(timer, "outer").calls, 1);
  EXPECT_EQ(time_of(timer, "inner").calls, 2);
  EXPECT_GE(time_of(timer, "outer").forward_s, 0.010);
  EXPECT_GE(time_of(timer, "inner").forward_s, 0.040);
  // Nothing counts twice, and the last sleep counts for nobody.
  EXPECT_LE(sum_of(timer), wall - 0.020);
}

TEST(OpTimer, BackwardIsChargedToTheScopeThatMadeTheNode) {
  const auto start = Clock::now();
  const OpTimer timer;
  Tensor x = at::ones({3}).requires_grad_(true), y;
  {
    const OpScope time("first");
    y = Slow::apply(x, 30) * 2;
  }
  y = Slow::apply(y, 25);  // in no scope
  {
    const OpScope time("second");
    y = Slow::apply(y, 10);
  }
  y.sum().backward();
  const OpTime first = time_of(timer, "first"), second = time_of(timer, "second");
  EXPECT_GE(first.backward_s, 0.030);
  EXPECT_GE(second.backward_s, 0.010);
  EXPECT_EQ(timer.times().size(), 2U);
  EXPECT_LE(sum_of(timer), seconds_since(start) - 0.025);
  EXPECT_EQ(x.grad()[0].item<float>(), 2);
}

TEST(OpTimer, APartOfAScopeCanBeGivenAway) {
  const OpTimer timer;
  {
    OpScope time("loop");
    pass_time(40);
    time.give("its other half", 0.75);
  }
  const double loop = time_of(timer, "loop").forward_s,
               other = time_of(timer, "its other half").forward_s;
  EXPECT_NEAR(other, 3 * loop, 0.02);
  EXPECT_GE(loop + other, 0.040);
}

TEST(OpTimer, WithoutATimerNothingIsMeasuredAndTwoOfAThreadAreRefused) {
  {
    const OpTimer timer;
    EXPECT_TRUE(op_timing());
    EXPECT_THROW(OpTimer(), Error);
    std::thread([] { EXPECT_FALSE(op_timing()); }).join();
  }
  EXPECT_FALSE(op_timing());
  const OpScope time("ignored");
  const OpTimer later;  // a scope opened before it is not its business
  EXPECT_TRUE(later.times().empty());
}

TEST(OpTimer, AScopeMayEndAfterItsTimer) {
  auto timer = std::make_unique<OpTimer>();
  {
    const OpScope time("longer");
    timer.reset();
    timer = std::make_unique<OpTimer>();
  }
  EXPECT_TRUE(timer->times().empty());
}

const std::vector<std::string> kNames = {"embedding",
                                         "hyper-connection in",
                                         "kda projections",
                                         "convolution",
                                         "kda",
                                         "kda gated norm",
                                         "hyper-connection out",
                                         "dense mlp",
                                         "router",
                                         "expert rows",
                                         "experts",
                                         "shared expert",
                                         "attention projections",
                                         "attention norms",
                                         "indexer projections",
                                         "indexer pooling",
                                         "indexer selection",
                                         "indexer scoring",
                                         "sparse attention",
                                         "final norm",
                                         "head",
                                         "gradients out"};

TEST(OpTimer, NamesEveryOperatorOfTheModelAndSumsToNoMoreThanTheWallTime) {
  const std::shared_ptr<const model::WeightSource> source =
      model::seeded_source(model::preset_config("tiny"), 7);
  const parallel::Mesh mesh = parallel::Mesh::single();
  harness::TrainerOptions options;
  options.grads = true;
  options.logits = false;
  const auto documents =
      harness::random_documents({70, 0, 131}, source->config().vocab_size, 0, 11);
  harness::Trainer trainer(source, options, mesh);
  const double plain = trainer.run(documents).loss;
  for (const bool recompute : {false, true}) {
    options.recompute = recompute;
    harness::Trainer timed(source, options, mesh);
    const auto start = Clock::now();
    const OpTimer timer;
    EXPECT_EQ(timed.run(documents).loss, plain);
    const double wall = seconds_since(start);
    std::vector<std::string> names;
    for (const OpTime& op : timer.times()) {
      names.push_back(op.name);
      EXPECT_GT(op.calls, 0) << op.name;
      EXPECT_GT(op.forward_s, 0) << op.name;
      const bool none = op.name.starts_with("indexer") || op.name == "gradients out";
      EXPECT_EQ(op.backward_s == 0, none) << op.name;
    }
    EXPECT_THAT(names, testing::UnorderedElementsAreArray(kNames));
    EXPECT_LE(sum_of(timer), wall);
    EXPECT_GT(sum_of(timer), 0.5 * wall);
  }
}

TEST(Bench, GrowthLeavesTheScoresOut) {
  harness::BenchPass from, to;
  from.seconds = 1;
  from.operators = {{"kda", 1, 0.4, 0.4}, {"indexer scoring", 1, 0.1, 0}};
  to.seconds = 14;
  to.operators = {{"kda", 1, 3.2, 4.0}, {"indexer scoring", 1, 6.2, 0}};
  const harness::Growth g = harness::growth(from, to);
  EXPECT_DOUBLE_EQ(g.all, 14);
  EXPECT_DOUBLE_EQ(g.scoring, 62);
  EXPECT_DOUBLE_EQ(g.without_scoring, 7.8 / 0.9);
  ASSERT_EQ(g.operators.size(), 3U);
  EXPECT_EQ(g.operators[0].first, "kda");
  EXPECT_DOUBLE_EQ(g.operators[0].second, 9);
  EXPECT_EQ(g.operators[2].first, "outside operators");
  EXPECT_NEAR(g.operators[2].second, 6, 1e-9);
  EXPECT_EQ(harness::growth({}, to).all, 0);
}

TEST(Bench, RowsAreNamedByTheirDocuments) {
  const auto name = [](std::vector<int64_t> documents) {
    harness::BenchRow row;
    row.documents = std::move(documents);
    return row.name();
  };
  EXPECT_EQ(name({4096}), "4096");
  EXPECT_EQ(name(harness::growth_rows(4096)[1]), "32768");
  EXPECT_EQ(name(harness::growth_rows(4096)[2]), "8 x 4096");
  EXPECT_EQ(name({3, 700}), "3 + 700");
}

TEST(Heap, APeakCanBeMeasuredAnew) {
  if (!reset_peak_memory()) GTEST_SKIP() << "this kernel has no such reset";
  const int64_t before = peak_memory_bytes();
  constexpr size_t kSize = size_t{96} << 20;
  // Straight from the kernel: a sanitizer keeps what is given back to the heap.
  void* block = mmap(
      nullptr, kSize, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
  ASSERT_NE(block, MAP_FAILED);
  ASSERT_EQ(munmap(block, kSize), 0);
  const int64_t peak = peak_memory_bytes();
  EXPECT_GE(peak, before + int64_t{90 << 20});
  ASSERT_TRUE(reset_peak_memory());
  EXPECT_LT(peak_memory_bytes(), peak - (80 << 20));
}

}  // namespace
}  // namespace lockstep::tests

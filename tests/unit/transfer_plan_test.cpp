// Which bytes go where in a weight sync: the table, against values moved one by one.
#include "harness/sync/transfer_plan.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "harness/inference/weights.hpp"
#include "model/config/config_json.hpp"
#include "parallel/mesh/layout.hpp"
#include "tests/support/tiny_model.hpp"

namespace lockstep::tests {
namespace {

using harness::consecutive_ranks;
using harness::Copy;
using harness::Piece;
using harness::SyncSides;
using harness::TransferPlan;
using model::Topology;

SyncSides sides(const Topology& from, int64_t tp, int64_t first, std::string_view policy) {
  return {tiny()->config(),
          model::Numerics::policy("fsdp-fp32-islands"),
          model::Numerics::policy(policy),
          from,
          {.tp = tp},
          consecutive_ranks(0, from.num_ranks()),
          consecutive_ranks(first, tp)};
}

TEST(TransferPlan, EveryElementOfEveryPartArrivesOnceInOrderFromAShardThatHasIt) {
  for (const Topology& from : {Topology{.fsdp = 3},
                               Topology{.fsdp = 2, .cp = 2, .ep = 4},
                               Topology{.dp = 2, .fsdp = 2, .tp = 2}}) {
    for (const int64_t first : {int64_t{0}, from.num_ranks()}) {
      const SyncSides both = sides(from, 2, first, "vllm-bf16");
      const TransferPlan plan(both, 5000);
      const int64_t world = first + from.num_ranks();
      std::map<std::pair<size_t, int64_t>, int64_t> arrived;  // by parameter and receiver
      for (const std::vector<Piece>& bucket : plan.buckets()) {
        std::vector<int64_t> sent(static_cast<size_t>(world)), received(sent);
        for (const Piece& piece : bucket) {
          for (int64_t to = 0; to < world; ++to) {
            std::vector<Copy> all;
            for (int64_t r = 0; r < world; ++r) {
              for (const Copy& copy : plan.copies(piece, r, to)) {
                all.push_back(copy);
                const auto bytes =
                    copy.count * static_cast<int64_t>(c10::elementSize(plan.wire(piece.parameter)));
                sent[static_cast<size_t>(r)] += bytes;
                received[static_cast<size_t>(to)] += bytes;
                int64_t shard = 1;
                for (const int64_t size : plan.shard_shape(piece.parameter, r)) shard *= size;
                EXPECT_LE(copy.shard + copy.count, shard);
              }
            }
            std::sort(all.begin(), all.end(), [](const Copy& a, const Copy& b) {
              return a.part < b.part;
            });
            for (const Copy& copy : all) {
              int64_t& next = arrived[{piece.parameter, to}];
              ASSERT_EQ(copy.part, next) << plan.parameters()[piece.parameter].name;
              next += copy.count;
              EXPECT_GE(copy.whole, piece.begin);
              EXPECT_LE(copy.whole + copy.count, piece.end);
            }
          }
        }
        EXPECT_THAT(sent, testing::Each(testing::Le(5000)));
        EXPECT_THAT(received, testing::Each(testing::Le(5000)));
      }
      for (int64_t rank = 0; rank < world; ++rank) {
        int64_t bytes = 0;
        for (const harness::Transfer& t : plan.transfers()) bytes += t.to == rank ? t.bytes : 0;
        EXPECT_EQ(bytes, plan.part_bytes(rank));
        if (!plan.serves(rank)) continue;
        for (size_t p = 0; p < plan.parameters().size(); ++p) {
          int64_t part = 1;
          for (const int64_t size :
               harness::engine_placement(both.config,
                                         both.engine,
                                         both.engine_topology,
                                         parallel::coordinates(both.engine_topology, rank - first),
                                         plan.parameters()[p])
                   .shape())
            part *= size;
          EXPECT_EQ((arrived[{p, rank}]), part) << plan.parameters()[p].name;
        }
      }
    }
  }
}

TEST(TransferPlan, WhatARankHasItselfItDoesNotSend) {
  // Two replicas, an engine of one rank in each: nothing crosses.
  SyncSides both = sides({.dp = 2}, 1, 0, "vllm-bf16");
  both.engine_ranks = {1};
  const TransferPlan plan(both, 1 << 20);
  EXPECT_EQ(plan.bytes_received(1), 0);
  // Elsewhere the replicas take turns.
  both.engine_ranks = {2};
  const TransferPlan away(both, 1 << 20);
  EXPECT_GT(away.bytes_sent(0), 0);
  EXPECT_GT(away.bytes_sent(1), 0);
  EXPECT_EQ(away.bytes_sent(0) + away.bytes_sent(1), away.part_bytes(2));
}

TEST(TransferPlan, DtypesOfTheWire) {
  const auto wire = [](const model::Numerics& num, const std::string& name) {
    for (const model::Parameter& parameter : model::expected_parameters(tiny()->config()))
      if (parameter.name == name) return harness::wire_dtype(parameter, num);
    ADD_FAILURE() << name;
    return at::kByte;
  };
  model::Numerics num = model::Numerics::policy("vllm-bf16");
  for (const char* name : {"layers.0.attn_hc.fn",
                           "layers.0.ffn_hc.base",
                           "layers.0.self_attn.A_log",
                           "layers.0.self_attn.dt_bias",
                           "layers.1.mlp.gate.e_score_correction_bias"})
    EXPECT_EQ(wire(num, name), at::kFloat) << name;
  for (const char* name : {"layers.0.self_attn.conv1d.weight",
                           "layers.1.mlp.gate.weight",
                           "layers.3.self_attn.indexer.k_norm.weight",
                           "embed_tokens.weight",
                           "layers.1.mlp.experts.down_proj"})
    EXPECT_EQ(wire(num, name), at::kBFloat16) << name;
  num.set("conv_weight_sync", "fp32");
  num.set("wire_dtype", "bf16");
  EXPECT_EQ(wire(num, "layers.0.self_attn.conv1d.weight"), at::kFloat);
  EXPECT_EQ(wire(num, "layers.0.self_attn.A_log"), at::kBFloat16);
  EXPECT_EQ(wire(model::Numerics::policy("float64"), "norm.weight"), at::kDouble);
  EXPECT_EQ(wire(model::Numerics::policy("invariant-bf16"), "layers.1.mlp.gate.weight"),
            at::kFloat);
}

TEST(TransferPlan, RefusesSidesThatDoNotFit) {
  SyncSides both = sides({.fsdp = 2}, 2, 0, "vllm-bf16");
  EXPECT_THROW(TransferPlan(both, 63), Error);
  both.engine_ranks = {0};
  EXPECT_THROW(TransferPlan(both, 64), Error);
  both.engine_topology = {.cp = 1, .tp = 1, .ep = 1};
  both.trainer_ranks = {0};
  EXPECT_THROW(TransferPlan(both, 64), Error);
}

}  // namespace
}  // namespace lockstep::tests

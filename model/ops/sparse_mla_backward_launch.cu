#include <cuda_runtime.h>

#include <algorithm>
#include <bit>
#include <cub/device/device_radix_sort.cuh>

#include "model/ops/sparse_mla_backward_kernel.cuh"
#include "model/ops/sparse_mla_cuda.hpp"
#include "model/ops/sparse_mla_launch.cuh"

namespace lockstep::model {
namespace {

using mla::backward::kChunks;

int64_t at_once(const SparseMlaBackwardArgs& a) {
  return a.tokens_at_once == 0 ? a.tokens : std::min(a.tokens, a.tokens_at_once);
}

MlaCudaResult check(const SparseMlaBackwardArgs& a) {
  if (a.tokens < 0 || a.keys < 0 || a.width < 0 || a.tokens_at_once < 0)
    return bad("tokens, keys, width and tokens_at_once must be >= 0");
  if (a.tokens >= int64_t{1} << 31 || a.keys >= int64_t{1} << 31 || a.width >= int64_t{1} << 31)
    return bad("tokens, keys and width must stay below 2^31: split the batch");
  if (a.width > 0 && at_once(a) >= (int64_t{1} << 31) / a.width)
    return bad("tokens_at_once times width must stay below 2^31: pass a smaller tokens_at_once");
  if (a.heads < 1 || a.heads > mla::kHeads) return bad("heads must be 1 to 64");
  if (!(a.scale > 0.0f)) return bad("scale must be positive");
  if (a.keys > 0 && a.dlatent_SR == nullptr) return bad("dlatent is null");
  if (misaligned(a.dlatent_SR)) return bad("dlatent: 16-byte alignment");
  if (a.tokens == 0) return {};
  if (a.q_THR == nullptr || a.a_THR == nullptr || a.da_THR == nullptr || a.dq_THR == nullptr)
    return bad("q, a, da or dq is null");
  if (a.lse_TH == nullptr) return bad("lse is null");
  if (a.width > 0 && a.selection_TW == nullptr) return bad("selection is null");
  if (a.width > 0 && a.keys > 0 && a.latent_SR == nullptr) return bad("latent is null");
  if (misaligned(a.q_THR) || misaligned(a.latent_SR) || misaligned(a.a_THR) ||
      misaligned(a.da_THR) || misaligned(a.dq_THR))
    return bad("q, latent, a, da and dq: 16-byte alignment");
  if (a.dq_THR == a.q_THR || a.dq_THR == a.a_THR || a.dq_THR == a.da_THR)
    return bad("dq may not overlap q, a or da");
  return {};
}

struct Workspace {
  mla::TokenPlan* plan;
  float2* stats;
  uint32_t *keys[2], *entries[2];
  int2* ranges;
  uint16_t* shares;
  int8_t* exponents;
  void* sort;
  size_t sort_bytes, bytes;
};

cudaError_t sort(const Workspace& w,
                 void* scratch,
                 size_t& bytes,
                 cub::DoubleBuffer<uint32_t>& keys,
                 cub::DoubleBuffer<uint32_t>& entries,
                 int64_t count,
                 int64_t rows,
                 cudaStream_t stream) {
  return cub::DeviceRadixSort::SortPairs(scratch,
                                         bytes,
                                         keys,
                                         entries,
                                         static_cast<int>(count),
                                         0,
                                         std::bit_width(static_cast<uint32_t>(rows)),
                                         stream);
}

cudaError_t lay_out(const SparseMlaBackwardArgs& a, void* base, Workspace& w) {
  size_t at = 0;
  const auto take = [&]<class T>(T*& pointer, size_t count) {
    pointer = reinterpret_cast<T*>(static_cast<unsigned char*>(base) + at);
    at += (count * sizeof(T) + 127) / 128 * 128;
  };
  const auto tokens = static_cast<size_t>(at_once(a));
  const size_t count = tokens * static_cast<size_t>(a.width);
  take(w.plan, tokens);
  take(w.stats, tokens * mla::kHeads);
  for (int i = 0; i < 2; ++i) take(w.keys[i], count), take(w.entries[i], count);
  take(w.ranges, static_cast<size_t>(a.keys));
  take(w.shares, count * mla::kRank);
  take(w.exponents, count * kChunks);
  cub::DoubleBuffer<uint32_t> keys, entries;
  w.sort_bytes = 0;
  const cudaError_t error =
      sort(w, nullptr, w.sort_bytes, keys, entries, static_cast<int64_t>(count), a.keys, nullptr);
  unsigned char* scratch = nullptr;
  take(scratch, w.sort_bytes);
  w.sort = scratch;
  w.bytes = at;
  return error;
}

unsigned blocks(int64_t items, int64_t per_block) {
  return static_cast<unsigned>((items + per_block - 1) / per_block);
}

cudaError_t run(const SparseMlaBackwardArgs& a,
                const Workspace& w,
                int64_t begin,
                int multiprocessors,
                cudaStream_t stream) {
  namespace kernels = mla::backward;
  kernels::Params p{};
  const int64_t tokens = std::min(at_once(a), a.tokens - begin), count = tokens * a.width;
  const int64_t first = begin * a.heads, first_element = first * mla::kRank;
  p.selection = {tokens,
                 static_cast<uint32_t>(a.keys),
                 static_cast<int>(a.width),
                 a.selection_TW + begin * a.width,
                 a.latent_SR,
                 w.plan};
  p.heads = a.heads;
  p.q = a.q_THR + first_element;
  p.a = a.a_THR + first_element;
  p.da = a.da_THR + first_element;
  p.lse = a.lse_TH + first;
  p.stats = w.stats;
  p.exponent_scale = a.scale * 1.44269504088896340736f;
  p.scale = a.scale;
  p.dq = a.dq_THR + first_element;
  p.shares = w.shares;
  p.exponents = w.exponents;

  mla::plan_tokens<<<blocks(tokens, mla::kPlanWarps), 32 * mla::kPlanWarps, 0, stream>>>(
      p.selection);
  kernels::stats_kernel<<<blocks(tokens * mla::kHeads, kernels::kStatsWarps),
                          32 * kernels::kStatsWarps,
                          0,
                          stream>>>(p);
  constexpr int kBytes = sizeof(kernels::Shared);
  cudaError_t error = cudaFuncSetAttribute(
      kernels::backward_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
  if (error != cudaSuccess) return error;
  kernels::backward_kernel<<<static_cast<unsigned>(std::min<int64_t>(tokens, multiprocessors)),
                             mla::kThreads,
                             kBytes,
                             stream>>>(p);

  kernels::list_entries<<<blocks(count, 256), 256, 0, stream>>>(
      p.selection, w.keys[0], w.entries[0]);
  cub::DoubleBuffer<uint32_t> keys(w.keys[0], w.keys[1]), entries(w.entries[0], w.entries[1]);
  size_t bytes = w.sort_bytes;
  error = sort(w, w.sort, bytes, keys, entries, count, a.keys, stream);
  if (error != cudaSuccess) return error;
  error = cudaMemsetAsync(w.ranges, 0, static_cast<size_t>(a.keys) * sizeof(int2), stream);
  if (error != cudaSuccess) return error;
  kernels::find_ranges<<<blocks(count, 256), 256, 0, stream>>>(
      keys.Current(), count, p.selection.keys, w.ranges);
  kernels::sum_shares<<<blocks(a.keys * 2, kernels::kSumThreads / 32),
                        kernels::kSumThreads,
                        0,
                        stream>>>(p, w.ranges, entries.Current(), a.dlatent_SR, begin == 0);
  return cudaGetLastError();
}

}  // namespace

size_t sparse_mla_backward_workspace_bytes(const SparseMlaBackwardArgs& args) {
  if (!check(args)) return 0;
  Workspace w{};
  return lay_out(args, nullptr, w) == cudaSuccess ? w.bytes : 0;
}

MlaCudaResult sparse_mla_backward(const SparseMlaBackwardArgs& a,
                                  void* workspace,
                                  size_t workspace_bytes,
                                  CUstream_st* stream) {
  if (const MlaCudaResult result = check(a); !result) return result;
  if (a.tokens == 0 || a.keys == 0 || a.width == 0) {
    cudaError_t error = cudaSuccess;
    if (a.keys > 0)
      error = cudaMemsetAsync(
          a.dlatent_SR, 0, static_cast<size_t>(a.keys) * mla::kRank * sizeof(float), stream);
    if (error == cudaSuccess && a.tokens > 0)
      error = cudaMemsetAsync(
          a.dq_THR, 0, static_cast<size_t>(a.tokens) * a.heads * mla::kRank * 2, stream);
    return error == cudaSuccess ? MlaCudaResult{} : failed(error);
  }
  int multiprocessors = 0;
  if (const MlaCudaResult result = find_device(multiprocessors); !result) return result;
  Workspace w{};
  cudaError_t error = lay_out(a, workspace, w);
  if (error != cudaSuccess) return failed(error);
  if (workspace == nullptr || workspace_bytes < w.bytes)
    return {
        MlaCudaStatus::kWorkspaceTooSmall, 0, "allocate sparse_mla_backward_workspace_bytes(args)"};
  if (reinterpret_cast<uintptr_t>(workspace) % 128 != 0)
    return bad("workspace must be 128-byte aligned");
  for (int64_t begin = 0; begin < a.tokens; begin += at_once(a)) {
    error = run(a, w, begin, multiprocessors, stream);
    if (error != cudaSuccess) return failed(error);
  }
  return {};
}

}  // namespace lockstep::model

#include <cuda_runtime.h>

#include <algorithm>
#include <initializer_list>

#include "model/ops/moe_cuda.hpp"
#include "model/ops/moe_rows_kernels.cuh"

namespace lockstep::model {
namespace {

using moe::RowsParams;

MoeCudaResult bad(const char* detail) { return {MoeCudaStatus::kBadArgument, 0, detail}; }
MoeCudaResult launched() {
  const cudaError_t e = cudaGetLastError();
  if (e == cudaSuccess) return {};
  return {MoeCudaStatus::kCudaError, static_cast<int>(e), cudaGetErrorString(e)};
}
int64_t parts_of(int64_t count) { return (count + moe::kOrderSlots - 1) / moe::kOrderSlots; }
size_t counts_bytes(int64_t count, int64_t experts) {
  return static_cast<size_t>((parts_of(count) * experts * 4 + 15) / 16 * 16);
}

MoeCudaResult check_sizes(int64_t tokens, int64_t slots) {
  if (tokens < 0) return bad("tokens must be >= 0");
  if (slots < 1 || slots > 32) return bad("slots must lie in [1, 32]");
  if (tokens * slots >= int64_t{1} << 31) return bad("tokens * slots must stay below 2^31");
  return {};
}
MoeCudaResult check_rows(const MoeRowsArgs& a, std::initializer_list<const void*> tensors) {
  if (const MoeCudaResult r = check_sizes(a.tokens, a.slots); !r) return r;
  if (a.width < 8 || a.width % 8 != 0 || a.width > 1 << 24)
    return bad("width must be a multiple of 8, up to 2^24");
  if (a.tokens == 0) return {};
  if (a.slot == nullptr || a.place == nullptr) return bad("slot and place must not be null");
  for (const void* t : tensors)
    if (t == nullptr || reinterpret_cast<uintptr_t>(t) % 16 != 0)
      return bad("tensors must not be null and must be 16-byte aligned");
  return {};
}
RowsParams params(const MoeRowsArgs& a) {
  RowsParams p{};
  p.tokens = a.tokens, p.slots = a.slots, p.width = a.width;
  p.slot = a.slot, p.place = a.place;
  return p;
}
unsigned row_blocks(const MoeRowsArgs& a) {
  return static_cast<unsigned>((a.tokens * a.slots + moe::kRowWarps - 1) / moe::kRowWarps);
}
dim3 token_blocks(const MoeRowsArgs& a) {
  return dim3(static_cast<unsigned>(a.tokens), static_cast<unsigned>((a.width + 1023) / 1024));
}

}  // namespace

size_t moe_order_workspace_bytes(int64_t tokens, int64_t slots, int64_t experts) {
  const int64_t count = tokens * slots;
  return counts_bytes(count, experts) + static_cast<size_t>(experts + count) * 8;
}

MoeCudaResult moe_order(const MoeOrderArgs& a,
                        void* workspace,
                        size_t workspace_bytes,
                        CUstream_st* stream) {
  if (const MoeCudaResult r = check_sizes(a.tokens, a.slots); !r) return r;
  if (a.experts < 1 || a.experts > moe::kOrderExperts) return bad("experts must lie in [1, 512]");
  if (a.offsets == nullptr) return bad("offsets is null");
  if (a.tokens > 0 &&
      (a.chosen == nullptr || a.token == nullptr || a.slot == nullptr || a.place == nullptr))
    return bad("chosen, token, slot and place must not be null");
  if (workspace == nullptr ||
      workspace_bytes < moe_order_workspace_bytes(a.tokens, a.slots, a.experts))
    return {MoeCudaStatus::kWorkspaceTooSmall, 0, "allocate moe_order_workspace_bytes()"};
  if (reinterpret_cast<uintptr_t>(workspace) % 16 != 0)
    return bad("workspace must be 16-byte aligned");
  moe::OrderParams p{};
  p.tokens = a.tokens, p.slots = a.slots, p.count = a.tokens * a.slots;
  p.experts = static_cast<int>(a.experts);
  p.parts = static_cast<int>(parts_of(p.count));
  p.chosen = a.chosen;
  p.token = a.token, p.slot = a.slot, p.place = a.place, p.offsets = a.offsets;
  unsigned char* at = static_cast<unsigned char*>(workspace);
  p.counts = reinterpret_cast<int*>(at);
  p.totals = reinterpret_cast<int64_t*>(at + counts_bytes(p.count, a.experts));
  p.row = p.totals + a.experts;
  const unsigned parts = static_cast<unsigned>(p.parts);
  if (parts > 0) moe::count_kernel<<<parts, 32, 0, stream>>>(p);
  moe::scan_kernel<<<static_cast<unsigned>(p.experts), 32, 0, stream>>>(p);
  const unsigned at_least_one = std::max(parts, 1u);
  moe::scatter_kernel<<<at_least_one, 32, 0, stream>>>(p);
  if (parts > 0)
    moe::place_kernel<<<static_cast<unsigned>((p.count + 255) / 256), 256, 0, stream>>>(p);
  return launched();
}

MoeCudaResult moe_gather(const MoeRowsArgs& a,
                         const uint16_t* x,
                         uint16_t* rows,
                         CUstream_st* stream) {
  if (const MoeCudaResult r = check_rows(a, {x, rows}); !r || a.tokens == 0) return r;
  RowsParams p = params(a);
  p.dy = x, p.drows = rows;
  moe::gather_kernel<<<token_blocks(a), 128, 0, stream>>>(p);
  return launched();
}

MoeCudaResult moe_gather_backward(const MoeRowsArgs& a,
                                  const uint16_t* drows,
                                  uint16_t* dx,
                                  CUstream_st* stream) {
  if (const MoeCudaResult r = check_rows(a, {drows, dx}); !r || a.tokens == 0) return r;
  RowsParams p = params(a);
  p.rows = drows, p.out = dx;
  moe::sum_kernel<false><<<token_blocks(a), 128, 0, stream>>>(p);
  return launched();
}

MoeCudaResult moe_combine(const MoeRowsArgs& a,
                          const uint16_t* rows,
                          const float* weights,
                          MoeCombineRounding rounding,
                          uint16_t* y,
                          CUstream_st* stream) {
  if (const MoeCudaResult r = check_rows(a, {rows, weights, y}); !r || a.tokens == 0) return r;
  RowsParams p = params(a);
  p.rows = rows, p.weights = weights, p.out = y;
  p.weighed = rounding.weighed, p.sum = rounding.sum;
  moe::sum_kernel<true><<<token_blocks(a), 128, 0, stream>>>(p);
  return launched();
}

MoeCudaResult moe_combine_backward(const MoeRowsArgs& a,
                                   const uint16_t* rows,
                                   const float* weights,
                                   const uint16_t* dy,
                                   uint16_t* drows,
                                   float* dweights,
                                   CUstream_st* stream) {
  if (const MoeCudaResult r = check_rows(a, {rows, weights, dy, drows, dweights});
      !r || a.tokens == 0)
    return r;
  RowsParams p = params(a);
  p.rows = rows, p.weights = weights, p.dy = dy, p.drows = drows, p.dweights = dweights;
  moe::combine_backward_kernel<<<row_blocks(a), moe::kRowWarps * 32, 0, stream>>>(p);
  return launched();
}

}  // namespace lockstep::model

#include <cuda_runtime.h>

#include <algorithm>
#include <initializer_list>

#include "model/ops/moe_cuda.hpp"
#include "model/ops/moe_gemm_kernel.cuh"
#include "model/ops/tensor_map.cuh"

namespace lockstep::model {
namespace {

using moe::Product;
using moe::ProductParams;

MoeCudaResult bad(const char* detail) { return {MoeCudaStatus::kBadArgument, 0, detail}; }
MoeCudaResult failed(cudaError_t e) {
  return {MoeCudaStatus::kCudaError, static_cast<int>(e), cudaGetErrorString(e)};
}
bool aligned(const void* p, size_t bytes) { return reinterpret_cast<uintptr_t>(p) % bytes == 0; }
constexpr size_t kCounterBytes = 128;
/// Maps and the counters behind them.
size_t map_bytes(const MoeShape& s, int tensors) {
  return static_cast<size_t>(s.experts) * tensors * sizeof(CUtensorMap) + kCounterBytes;
}
size_t matrix_bytes(const MoeShape& s, int64_t columns) {
  return (static_cast<size_t>(s.rows) * static_cast<size_t>(columns) * 2 + 127) / 128 * 128;
}
constexpr int kForwardTensors = 4, kBackwardTensors = 6;

MoeCudaResult check(const MoeShape& s) {
  if (s.rows < 0 || s.rows >= int64_t{1} << 31) return bad("rows must lie in [0, 2^31)");
  if (s.experts < 1 || s.experts > moe::kMaxExperts) return bad("experts must lie in [1, 512]");
  if (s.width < 128 || s.inner < 128 || s.width % 128 != 0 || s.inner % 128 != 0 ||
      s.width > 1 << 24 || s.inner > 1 << 24)
    return bad("width and inner must be multiples of 128, up to 2^24");
  if (s.offsets == nullptr) return bad("offsets is null");
  if (s.roundings < 1 || s.roundings > 3) return bad("roundings must be 1, 2 or 3");
  if (!(s.limit > 0.0f)) return bad("limit must be positive; infinity for no clamp");
  return {};
}

/// A contiguous tensor.
bool encode(const MapDevice& d,
            CUtensorMap* map,
            const void* base,
            int64_t columns,
            int64_t rows,
            int64_t depth) {
  return encode_slabs(d, map, base, columns, rows, depth, columns);
}

struct RowTensor {
  const void* base;
  int64_t columns;
};

/// Writes [tensor][expert] maps to `to`.
MoeCudaResult make_maps(const MapDevice& d,
                        const MoeShape& s,
                        std::initializer_list<RowTensor> tensors,
                        CUtensorMap* to,
                        CUstream_st* stream) {
  moe::MapParams p{};
  int count = 0;
  for (const RowTensor& t : tensors) {
    // A tensor that is not wanted has maps that nobody uses.
    const void* base = t.base != nullptr ? t.base : to;
    if (!encode(d, &p.whole[count], base, t.columns, std::max<int64_t>(s.rows, 1), 1))
      return failed(cudaErrorInvalidValue);
    p.base[count] = static_cast<const unsigned char*>(base);
    p.row_bytes[count] = t.columns * 2;
    ++count;
  }
  p.to = to;
  p.next = reinterpret_cast<int*>(to + s.experts * count);
  p.offsets = s.offsets;
  p.experts = static_cast<int>(s.experts);
  moe::map_kernel<<<dim3(static_cast<unsigned>(s.experts), static_cast<unsigned>(count)),
                    32,
                    0,
                    stream>>>(p);
  const cudaError_t error = cudaGetLastError();
  return error == cudaSuccess ? MoeCudaResult{} : failed(error);
}

template <Product kProduct, int kRoundings = 0>
MoeCudaResult launch(const MapDevice& d, const ProductParams& p, CUstream_st* stream) {
  const auto kernel = &moe::product_kernel<kProduct, kRoundings>;
  cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, moe::kSharedBytes);
  if (error != cudaSuccess) return failed(error);
  const unsigned blocks = static_cast<unsigned>(std::max(d.multiprocessors / 2 * 2, 2));
  kernel<<<blocks, moe::kThreads, moe::kSharedBytes, stream>>>(p);
  error = cudaGetLastError();
  return error == cudaSuccess ? MoeCudaResult{} : failed(error);
}
template <Product kProduct>
MoeCudaResult launch_rounding(int roundings,
                              const MapDevice& d,
                              const ProductParams& p,
                              CUstream_st* stream) {
  return roundings == 1   ? launch<kProduct, 1>(d, p, stream)
         : roundings == 2 ? launch<kProduct, 2>(d, p, stream)
                          : launch<kProduct, 3>(d, p, stream);
}

/// product: which counter.
ProductParams base_params(const MoeShape& s, CUtensorMap* maps, int tensors, int product) {
  ProductParams p{};
  p.offsets = s.offsets;
  p.next = reinterpret_cast<int*>(maps + s.experts * tensors) + product;
  p.experts = static_cast<int>(s.experts);
  p.inner = static_cast<int>(s.inner);
  p.limit = s.limit;
  return p;
}
int column_tiles(int64_t columns) {
  return static_cast<int>((columns + moe::kTileColumns - 1) / moe::kTileColumns);
}
int depth_tiles(int64_t depth) { return static_cast<int>(depth / moe::kTileDepth); }

MoeCudaResult check_device(const MapDevice& d, const void* workspace, size_t bytes, size_t wanted) {
  if (d.error != cudaSuccess) return failed(d.error);
  if (!d.hopper)
    return {MoeCudaStatus::kUnsupportedDevice, 0, "needs compute capability 9.0 (sm_90a code)"};
  if (workspace == nullptr || bytes < wanted)
    return {MoeCudaStatus::kWorkspaceTooSmall, 0, "allocate what the workspace function says"};
  if (!aligned(workspace, 128)) return bad("workspace must be 128-byte aligned");
  return {};
}

}  // namespace

size_t moe_experts_forward_workspace_bytes(const MoeShape& s) {
  return map_bytes(s, kForwardTensors) + matrix_bytes(s, s.inner);
}
size_t moe_experts_backward_workspace_bytes(const MoeShape& s) {
  return map_bytes(s, kBackwardTensors) + matrix_bytes(s, 3 * s.inner);
}

MoeCudaResult moe_experts_forward(const MoeExpertsForwardArgs& a,
                                  void* workspace,
                                  size_t workspace_bytes,
                                  CUstream_st* stream) {
  const MoeShape& s = a.shape;
  if (const MoeCudaResult r = check(s); !r) return r;
  if (s.rows == 0) return {};
  if (a.x == nullptr || a.gate_up == nullptr || a.down == nullptr || a.out == nullptr)
    return bad("x, gate_up, down and out must not be null");
  for (const void* q : {static_cast<const void*>(a.x),
                        static_cast<const void*>(a.gate_up),
                        static_cast<const void*>(a.down),
                        static_cast<const void*>(a.products),
                        static_cast<const void*>(a.out)})
    if (!aligned(q, 16)) return bad("all tensors: 16-byte alignment");
  const MapDevice d = find_map_device();
  if (const MoeCudaResult r =
          check_device(d, workspace, workspace_bytes, moe_experts_forward_workspace_bytes(s));
      !r)
    return r;
  CUtensorMap* maps = static_cast<CUtensorMap*>(workspace);
  void* h = static_cast<unsigned char*>(workspace) + map_bytes(s, kForwardTensors);
  const int64_t E = s.experts, D = s.width, I = s.inner;
  if (const MoeCudaResult r =
          make_maps(d, s, {{a.x, D}, {a.products, 2 * I}, {h, I}, {a.out, D}}, maps, stream);
      !r)
    return r;

  ProductParams p = base_params(s, maps, kForwardTensors, 0);
  if (!encode(d, &p.weights, a.gate_up, D, 2 * I, E)) return failed(cudaErrorInvalidValue);
  p.a = maps;
  p.kept = maps + E;
  p.hidden = maps + 2 * E;
  p.column_tiles = static_cast<int>(I / 128);
  p.depth_tiles = depth_tiles(D);
  p.keep = a.products != nullptr;
  if (const MoeCudaResult r = launch_rounding<Product::kGateUp>(s.roundings, d, p, stream); !r)
    return r;

  p = base_params(s, maps, kForwardTensors, 1);
  if (!encode(d, &p.weights, a.down, I, D, E)) return failed(cudaErrorInvalidValue);
  p.a = maps + 2 * E;
  p.out = maps + 3 * E;
  p.column_tiles = column_tiles(D);
  p.depth_tiles = depth_tiles(I);
  return launch<Product::kDown>(d, p, stream);
}

MoeCudaResult moe_experts_backward(const MoeExpertsBackwardArgs& a,
                                   void* workspace,
                                   size_t workspace_bytes,
                                   CUstream_st* stream) {
  const MoeShape& s = a.shape;
  if (const MoeCudaResult r = check(s); !r) return r;
  const int64_t E = s.experts, D = s.width, I = s.inner;
  const bool empty = s.rows == 0;  // gradients of weights are still written
  if (!empty && (a.x == nullptr || a.products == nullptr || a.dout == nullptr))
    return bad("x, products and dout must not be null");
  if (!empty && (a.gate_up == nullptr || a.down == nullptr))
    return bad("gate_up and down must not be null");
  for (const void* q : {static_cast<const void*>(a.x),
                        static_cast<const void*>(a.gate_up),
                        static_cast<const void*>(a.down),
                        static_cast<const void*>(a.products),
                        static_cast<const void*>(a.dout),
                        static_cast<const void*>(a.dx),
                        static_cast<const void*>(a.dgate_up),
                        static_cast<const void*>(a.ddown)})
    if (!aligned(q, 16)) return bad("all tensors: 16-byte alignment");
  const MapDevice d = find_map_device();
  if (const MoeCudaResult r =
          check_device(d, workspace, workspace_bytes, moe_experts_backward_workspace_bytes(s));
      !r)
    return r;
  if (empty) {
    const size_t bytes = static_cast<size_t>(E * D * I) * 2;
    cudaError_t error = cudaSuccess;
    if (a.dgate_up != nullptr) error = cudaMemsetAsync(a.dgate_up, 0, 2 * bytes, stream);
    if (error == cudaSuccess && a.ddown != nullptr)
      error = cudaMemsetAsync(a.ddown, 0, bytes, stream);
    return error == cudaSuccess ? MoeCudaResult{} : failed(error);
  }
  CUtensorMap* maps = static_cast<CUtensorMap*>(workspace);
  unsigned char* h = static_cast<unsigned char*>(workspace) + map_bytes(s, kBackwardTensors);
  unsigned char* dproducts = h + matrix_bytes(s, I);
  if (const MoeCudaResult r = make_maps(
          d,
          s,
          {{a.x, D}, {a.products, 2 * I}, {a.dout, D}, {h, I}, {dproducts, 2 * I}, {a.dx, D}},
          maps,
          stream);
      !r)
    return r;
  const CUtensorMap *x = maps, *products = maps + E, *dout = maps + 2 * E, *hidden = maps + 3 * E,
                    *gradient = maps + 4 * E, *dx = maps + 5 * E;

  ProductParams p = base_params(s, maps, kBackwardTensors, 0);
  if (!encode(d, &p.weights, a.down, I, D, E)) return failed(cudaErrorInvalidValue);
  p.a = dout;
  p.out = gradient;
  p.kept = products;
  p.hidden = hidden;
  p.column_tiles = column_tiles(I);
  p.depth_tiles = depth_tiles(D);
  if (const MoeCudaResult r = launch_rounding<Product::kHidden>(s.roundings, d, p, stream); !r)
    return r;

  if (a.dx != nullptr) {
    p = base_params(s, maps, kBackwardTensors, 1);
    if (!encode(d, &p.weights, a.gate_up, D, 2 * I, E)) return failed(cudaErrorInvalidValue);
    p.a = gradient;
    p.out = dx;
    p.column_tiles = column_tiles(D);
    p.depth_tiles = depth_tiles(2 * I);
    if (const MoeCudaResult r = launch<Product::kInput>(d, p, stream); !r) return r;
  }
  const auto weights = [&](int product,
                           uint16_t* to,
                           const CUtensorMap* left,
                           int64_t rows,
                           const CUtensorMap* right,
                           int64_t columns) -> MoeCudaResult {
    if (to == nullptr) return {};
    p = base_params(s, maps, kBackwardTensors, product);
    if (!encode(d, &p.weights, to, columns, rows, E)) return failed(cudaErrorInvalidValue);
    p.a = left;
    p.b = right;
    p.outer = static_cast<int>(rows);
    p.column_tiles = column_tiles(columns);
    return launch<Product::kWeights>(d, p, stream);
  };
  if (const MoeCudaResult r = weights(2, a.dgate_up, gradient, 2 * I, x, D); !r) return r;
  return weights(3, a.ddown, dout, D, hidden, I);
}

}  // namespace lockstep::model

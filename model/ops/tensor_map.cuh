// What launchers of kernels that copy by tensor maps share: the device, and the maps.
#pragma once

#include <cudaTypedefs.h>
#include <cuda_runtime.h>

#include <cstdint>

namespace lockstep::model {

using EncodeTensorMap = PFN_cuTensorMapEncodeTiled_v12000;

inline cudaError_t find_encoder(EncodeTensorMap& encode) {
  void* entry = nullptr;
  cudaDriverEntryPointQueryResult found;
  const cudaError_t error = cudaGetDriverEntryPointByVersion(
      "cuTensorMapEncodeTiled", &entry, 12000, cudaEnableDefault, &found);
  encode = reinterpret_cast<EncodeTensorMap>(entry);
  return error == cudaSuccess && entry == nullptr ? cudaErrorNotSupported : error;
}

/// The current device.
struct MapDevice {
  cudaError_t error = cudaSuccess;
  bool hopper = false;  ///< runs sm_90a code; without, there is no encoder
  int multiprocessors = 0;
  EncodeTensorMap encode = nullptr;
};
inline MapDevice find_map_device() {
  MapDevice d;
  int index = 0, major = 0;
  d.error = cudaGetDevice(&index);
  const auto query = [&](int* value, cudaDeviceAttr what) {
    if (d.error == cudaSuccess) d.error = cudaDeviceGetAttribute(value, what, index);
  };
  query(&major, cudaDevAttrComputeCapabilityMajor);
  query(&d.multiprocessors, cudaDevAttrMultiProcessorCount);
  d.hopper = d.error == cudaSuccess && major == 9;
  if (d.hopper) d.error = find_encoder(d.encode);
  return d;
}

/// A tensor [depth][rows][columns], rows `row_bytes` apart, and the boxes of 128 bytes by
/// `box_rows` that it is copied in.
struct MapShape {
  CUtensorMapDataType type;
  int64_t columns, rows, depth, row_bytes;
  int box_columns, box_rows;
};
inline bool encode_map(EncodeTensorMap encode,
                       CUtensorMap* map,
                       const void* base,
                       const MapShape& s) {
  const cuuint64_t dims[3] = {static_cast<cuuint64_t>(s.columns),
                              static_cast<cuuint64_t>(s.rows),
                              static_cast<cuuint64_t>(s.depth)};
  const cuuint64_t strides[2] = {static_cast<cuuint64_t>(s.row_bytes),
                                 static_cast<cuuint64_t>(s.row_bytes) * dims[1]};
  const cuuint32_t box[3] = {static_cast<cuuint32_t>(s.box_columns),
                             static_cast<cuuint32_t>(s.box_rows),
                             1},
                   steps[3] = {1, 1, 1};
  return encode(map,
                s.type,
                3,
                const_cast<void*>(base),
                dims,
                strides,
                box,
                steps,
                CU_TENSOR_MAP_INTERLEAVE_NONE,
                CU_TENSOR_MAP_SWIZZLE_128B,
                CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

/// Boxes of one slab of 64 x 64 in a bf16 tensor [depth][rows][columns], rows `stride` elements
/// apart.
inline bool encode_slabs(const MapDevice& d,
                         CUtensorMap* map,
                         const void* base,
                         int64_t columns,
                         int64_t rows,
                         int64_t depth,
                         int64_t stride) {
  return encode_map(d.encode,
                    map,
                    base,
                    {CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, columns, rows, depth, 2 * stride, 64, 64});
}

}  // namespace lockstep::model

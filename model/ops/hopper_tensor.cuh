#pragma once

// More thin wrappers around sm_90a instructions: tensor maps and the copies that use them, clusters
// of two blocks, the widest matrix product. Names follow the PTX instruction.

#include <cuda.h>

#include "model/ops/hopper.cuh"

namespace lockstep::model::hopper {

// ---- clusters ---------------------------------------------------------------------------------

LOCKSTEP_DEVICE uint32_t cluster_rank() {
  uint32_t rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}
/// Every thread of the cluster that has not ended.
LOCKSTEP_DEVICE void cluster_sync() {
  asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::: "memory");
}
/// `count` arrivals at the barrier that lies at this address in block `rank` of the cluster. Orders
/// no ordinary memory access between blocks: release.cluster would, by a fence of the whole device.
LOCKSTEP_DEVICE void barrier_arrive_at(uint32_t barrier, uint32_t rank, uint32_t count) {
  asm volatile(
      "{\n.reg .b32 remote;\n"
      "mapa.shared::cluster.u32 remote, %0, %1;\n"
      "mbarrier.arrive.shared::cluster.b64 _, [remote], %2;\n}\n" ::"r"(barrier),
      "r"(rank),
      "r"(count)
      : "memory");
}
/// A word to this address in block `rank` of the cluster; its bytes count at `barrier` there.
LOCKSTEP_DEVICE void store_shared_at(uint32_t address,
                                     uint32_t value,
                                     uint32_t barrier,
                                     uint32_t rank) {
  asm volatile(
      "{\n.reg .b32 to, bar;\n"
      "mapa.shared::cluster.u32 to, %0, %3;\n"
      "mapa.shared::cluster.u32 bar, %2, %3;\n"
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.u32 [to], %1, [bar];\n}\n" ::"r"(
          address),
      "r"(value),
      "r"(barrier),
      "r"(rank)
      : "memory");
}

// ---- tensor maps ------------------------------------------------------------------------------

/// Map in shared memory: another address, another size of dimension 1.
LOCKSTEP_DEVICE void tensor_map_set(uint32_t map, const void* address, uint32_t rows) {
  asm volatile("tensormap.replace.tile.global_address.shared::cta.b1024.b64 [%0], %1;" ::"r"(map),
               "l"(address)
               : "memory");
  asm volatile("tensormap.replace.tile.global_dim.shared::cta.b1024.b32 [%0], 1, %1;" ::"r"(map),
               "r"(rows)
               : "memory");
}
/// A warp hands a map in shared memory to global memory, for those that call tensor_map_acquire.
LOCKSTEP_DEVICE void tensor_map_release(CUtensorMap* to, uint32_t from) {
  asm volatile(
      "tensormap.cp_fenceproxy.global.shared::cta.tensormap::generic.release.gpu.sync.aligned "
      "[%0], [%1], 128;" ::"l"(to),
      "r"(from)
      : "memory");
}
LOCKSTEP_DEVICE void tensor_map_acquire(const CUtensorMap* map) {
  asm volatile("fence.proxy.tensormap::generic.acquire.gpu [%0], 128;" ::"l"(map) : "memory");
}

/// One box to this block's shared memory; what lies outside the tensor comes as zeros.
LOCKSTEP_DEVICE void tensor_load(
    uint32_t to, const CUtensorMap* map, int x, int y, int z, uint32_t bar) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%2, %3, %4}], [%5];" ::"r"(to),
      "l"(map),
      "r"(x),
      "r"(y),
      "r"(z),
      "r"(bar)
      : "memory");
}
/// The same to the same addresses in every block of `blocks` (a bit each).
LOCKSTEP_DEVICE void tensor_load_to(
    uint32_t to, const CUtensorMap* map, int x, int y, int z, uint32_t bar, uint16_t blocks) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      ".multicast::cluster [%0], [%1, {%2, %3, %4}], [%5], %6;" ::"r"(to),
      "l"(map),
      "r"(x),
      "r"(y),
      "r"(z),
      "r"(bar),
      "h"(blocks)
      : "memory");
}
/// One box to global memory; what lies outside the tensor is dropped.
LOCKSTEP_DEVICE void tensor_store(const CUtensorMap* map, int x, int y, int z, uint32_t from) {
  asm volatile(
      "cp.async.bulk.tensor.3d.global.shared::cta.tile.bulk_group [%0, {%1, %2, %3}], [%4];" ::"l"(
          map),
      "r"(x),
      "r"(y),
      "r"(z),
      "r"(from)
      : "memory");
}
/// The sources of all committed stores but the last kPending have been read.
template <int kPending>
LOCKSTEP_DEVICE void bulk_wait_read_but() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}

// ---- warpgroup matrix product -----------------------------------------------------------------

#define LOCKSTEP_WGMMA_256_D                                                             \
  "{"                                                                                    \
  "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,"   \
  "%23,%24,%25,%26,%27,%28,%29,%30,%31,%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43," \
  "%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63,%64," \
  "%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79,%80,%81,%82,%83,%84,%85," \
  "%86,%87,%88,%89,%90,%91,%92,%93,%94,%95,%96,%97,%98,%99,%100,%101,%102,%103,%104,"    \
  "%105,%106,%107,%108,%109,%110,%111,%112,%113,%114,%115,%116,%117,%118,%119,%120,"     \
  "%121,%122,%123,%124,%125,%126,%127"                                                   \
  "}"

/// d[64x256] (+)= a[64x16] b[16x256]; both in shared memory, each contraction-major or outer-major.
template <bool kOuterA, bool kOuterB>
LOCKSTEP_DEVICE void wgmma_256(float (&d)[128], uint64_t a, uint64_t b, bool accumulate) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %130, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 " LOCKSTEP_WGMMA_256_D
      ", %128, %129, p, 1, 1, %131, %132;\n}\n"
      : LOCKSTEP_D64(d, 0), LOCKSTEP_D64(d, 64)
      : "l"(a),
        "l"(b),
        "r"(static_cast<int>(accumulate)),
        "n"(kOuterA ? 1 : 0),
        "n"(kOuterB ? 1 : 0));
}

}  // namespace lockstep::model::hopper

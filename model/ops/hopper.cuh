#pragma once

// Thin wrappers around the sm_90a instructions that the kernels here use. No policy: names follow
// the PTX instruction, one line each.

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace lockstep::model::hopper {

#define LOCKSTEP_DEVICE __device__ __forceinline__

LOCKSTEP_DEVICE uint32_t smem_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// ---- arithmetic -------------------------------------------------------------------------------

LOCKSTEP_DEVICE float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
LOCKSTEP_DEVICE float reciprocal_approx(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
/// Two floats to packed bf16, first argument in the low half.
LOCKSTEP_DEVICE uint32_t pack_bf16(float low, float high) {
  uint32_t packed;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}
LOCKSTEP_DEVICE uint32_t pack_fp16(float low, float high) {
  uint32_t packed;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}
/// Elementwise product of packed bf16 pairs.
LOCKSTEP_DEVICE uint32_t multiply_bf16(uint32_t a, uint32_t b) {
  uint32_t product;
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(product) : "r"(a), "r"(b));
  return product;
}
LOCKSTEP_DEVICE float low_bf16(uint32_t packed) { return __uint_as_float(packed << 16); }
LOCKSTEP_DEVICE float high_bf16(uint32_t packed) { return __uint_as_float(packed & 0xffff0000u); }

/// The same value, but the compiler no longer knows that: keeps it from computing everything that
/// depends on the value ahead of a loop and holding the results in registers.
template <class T>
LOCKSTEP_DEVICE T opaque(T value) {
  asm volatile("" : "+r"(value));
  return value;
}

// ---- barriers and fences ----------------------------------------------------------------------

LOCKSTEP_DEVICE void barrier_init(uint32_t barrier, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
LOCKSTEP_DEVICE void barrier_expect_bytes(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}
LOCKSTEP_DEVICE void barrier_arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
LOCKSTEP_DEVICE void barrier_wait(uint32_t barrier, uint32_t parity) {
  asm volatile(
      "{\n.reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@done bra.uni finished;\n"
      "bra.uni again;\n"
      "finished:\n}\n" ::"r"(barrier),
      "r"(parity)
      : "memory");
}
LOCKSTEP_DEVICE void named_barrier(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
LOCKSTEP_DEVICE void named_barrier_arrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
LOCKSTEP_DEVICE void fence_barrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
/// Generic-proxy writes of this thread to shared memory become visible to wgmma and bulk copies.
LOCKSTEP_DEVICE void fence_async_shared() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
/// Global memory written by ordinary stores and seen by this thread, before bulk copies read it,
/// and the other way round.
LOCKSTEP_DEVICE void fence_async_global() {
  asm volatile("fence.proxy.async.global;" ::: "memory");
}

/// For launches with programmatic stream serialisation: the next kernel's blocks may start when
/// this one's have all got here; the other: everything the previous kernel wrote is there.
LOCKSTEP_DEVICE void launch_dependents() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}
LOCKSTEP_DEVICE void wait_for_previous_kernel() {
  asm volatile("griddepcontrol.wait;" ::: "memory");
}

LOCKSTEP_DEVICE int load_acquire(const int* pointer) {
  int value;
  asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(value) : "l"(pointer) : "memory");
  return value;
}
LOCKSTEP_DEVICE void store_release(int* pointer, int value) {
  asm volatile("st.release.gpu.global.s32 [%0], %1;" ::"l"(pointer), "r"(value) : "memory");
}

/// Plain flag accesses that are ordered by something else (say so where they are used).
LOCKSTEP_DEVICE int load_relaxed(const int* pointer) {
  int value;
  asm volatile("ld.relaxed.gpu.global.s32 %0, [%1];" : "=r"(value) : "l"(pointer) : "memory");
  return value;
}
LOCKSTEP_DEVICE void store_relaxed(int* pointer, int value) {
  asm volatile("st.relaxed.gpu.global.s32 [%0], %1;" ::"l"(pointer), "r"(value) : "memory");
}

// ---- copies -----------------------------------------------------------------------------------

LOCKSTEP_DEVICE void bulk_load(uint32_t destination,
                               const void* source,
                               uint32_t bytes,
                               uint32_t bar) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(destination),
      "l"(source),
      "r"(bytes),
      "r"(bar)
      : "memory");
}
LOCKSTEP_DEVICE void bulk_store(void* destination, uint32_t source, uint32_t bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(destination),
               "r"(source),
               "r"(bytes)
               : "memory");
}
LOCKSTEP_DEVICE void bulk_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
/// The sources of all committed stores have been read.
LOCKSTEP_DEVICE void bulk_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}
LOCKSTEP_DEVICE void bulk_wait_all() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

/// 16 bytes to shared memory; zeros when `valid` is false (the source is then not read).
LOCKSTEP_DEVICE void copy16(uint32_t destination, const void* source, bool valid) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(destination),
               "l"(source),
               "r"(valid ? 16 : 0)
               : "memory");
}
LOCKSTEP_DEVICE void copy16(uint32_t destination, const void* source) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(destination), "l"(source)
               : "memory");
}
/// This thread's arrival at `bar` (counted on initialisation) once its copies so far have landed.
LOCKSTEP_DEVICE void copy_arrive(uint32_t bar) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(bar) : "memory");
}
LOCKSTEP_DEVICE void copy_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int kPending>
LOCKSTEP_DEVICE void copy_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

LOCKSTEP_DEVICE void store_shared(uint32_t address, uint32_t a, uint32_t b) {
  asm volatile("st.shared.v2.b32 [%0], {%1, %2};" ::"r"(address), "r"(a), "r"(b) : "memory");
}
LOCKSTEP_DEVICE void store_shared(uint32_t address, uint32_t a) {
  asm volatile("st.shared.b32 [%0], %1;" ::"r"(address), "r"(a) : "memory");
}
LOCKSTEP_DEVICE void store_shared_zero16(uint32_t address) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};" ::"r"(address), "r"(0) : "memory");
}
LOCKSTEP_DEVICE uint32_t load_shared4(uint32_t address) {
  uint32_t value;
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(value) : "r"(address) : "memory");
  return value;
}
LOCKSTEP_DEVICE uint4 load_shared16(uint32_t address) {
  uint4 value;
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
               : "r"(address)
               : "memory");
  return value;
}

// ---- 8x8 matrix moves -------------------------------------------------------------------------

LOCKSTEP_DEVICE void load_matrix4(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}
LOCKSTEP_DEVICE void load_matrix2(uint32_t (&r)[2], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];"
               : "=r"(r[0]), "=r"(r[1])
               : "r"(address)
               : "memory");
}
LOCKSTEP_DEVICE void load_matrix4_transposed(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}
LOCKSTEP_DEVICE void store_matrix4(
    uint32_t address, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address),
               "r"(a),
               "r"(b),
               "r"(c),
               "r"(d)
               : "memory");
}
LOCKSTEP_DEVICE void store_matrix4_transposed(
    uint32_t address, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  asm volatile(
      "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address),
      "r"(a),
      "r"(b),
      "r"(c),
      "r"(d)
      : "memory");
}

// ---- warp matrix product, 16x8x16 -------------------------------------------------------------

LOCKSTEP_DEVICE void mma_bf16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
/// The same on plain pointers into register arrays (constant indices only).
LOCKSTEP_DEVICE void mma_bf16_at(float* d, const uint32_t* a, uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
/// 16x8x8, operands rounded to tf32 beforehand (to_tf32).
LOCKSTEP_DEVICE void mma_tf32(float (&d)[4], const uint4& a, uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b0), "r"(b1));
}
LOCKSTEP_DEVICE uint32_t to_tf32(float value) {
  uint32_t rounded;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(rounded) : "f"(value));
  return rounded;
}
LOCKSTEP_DEVICE void mma_fp16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// ---- warpgroup matrix product -----------------------------------------------------------------

/// Operand whose rows (M or N) are 128 bytes of the contraction index, 128-byte swizzle, 8-row
/// groups 1024 bytes apart. A k step of 16 is 32 bytes further.
LOCKSTEP_DEVICE uint64_t operand_k_major(uint32_t address) {
  return static_cast<uint64_t>((address & 0x3ffff) >> 4) | (uint64_t{1} << 16) |
         (uint64_t{1024 >> 4} << 32) | (uint64_t{1} << 62);
}
/// Operand whose contraction rows are 128 bytes (64 elements) of the outer index; further groups of
/// 64 outer elements lie `slab_bytes` apart. A k step of 16 is 2048 bytes further.
LOCKSTEP_DEVICE uint64_t operand_outer_major(uint32_t address, uint32_t slab_bytes) {
  return static_cast<uint64_t>((address & 0x3ffff) >> 4) |
         (static_cast<uint64_t>(slab_bytes >> 4) << 16) | (uint64_t{1024 >> 4} << 32) |
         (uint64_t{1} << 62);
}
LOCKSTEP_DEVICE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
LOCKSTEP_DEVICE void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
template <int kPending>
LOCKSTEP_DEVICE void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

/// Pins accumulators at this point of the program: without it the compiler may read them before the
/// wait that makes them valid, since nothing else ties the two.
template <int kCount>
LOCKSTEP_DEVICE void pin(float (&d)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

/// Ends the life of accumulators: the product that comes next does not read them, which the
/// compiler cannot know.
template <int kCount>
LOCKSTEP_DEVICE void forget(float (&d)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "=f"(d[i]));
}

#define LOCKSTEP_D8(d, i)                                                                     \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), \
      "+f"(d[i + 6]), "+f"(d[i + 7])
#define LOCKSTEP_D32(d, i) \
  LOCKSTEP_D8(d, i), LOCKSTEP_D8(d, i + 8), LOCKSTEP_D8(d, i + 16), LOCKSTEP_D8(d, i + 24)
#define LOCKSTEP_D64(d, i) LOCKSTEP_D32(d, i), LOCKSTEP_D32(d, i + 32)

/// d[64x64] (+)= sign * a[64x16] b[16x64]; a in registers, b contraction-major.
template <int kSign>
LOCKSTEP_DEVICE void wgmma_64(float (&d)[32], const uint32_t* a, uint64_t b, bool accumulate) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %37, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 "
      "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,"
      "%25,%26,%27,%28,%29,%30,%31}, {%32,%33,%34,%35}, %36, p, 1, %38, 0;\n}\n"
      : LOCKSTEP_D32(d, 0)
      : "r"(a[0]),
        "r"(a[1]),
        "r"(a[2]),
        "r"(a[3]),
        "l"(b),
        "r"(static_cast<int>(accumulate)),
        "n"(kSign));
}

#define LOCKSTEP_WGMMA_128_D                                                                     \
  "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,"  \
  "%25,%26,%27,%28,%29,%30,%31,%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47," \
  "%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63}"

/// d[64x128] += sign * a[64x16] b[16x128]; a in registers, b outer-major.
template <int kSign = 1>
LOCKSTEP_DEVICE void wgmma_128_outer(float (&d)[64], const uint32_t* a, uint64_t b) {
  asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 " LOCKSTEP_WGMMA_128_D
               ", {%64,%65,%66,%67}, %68, 1, 1, %69, 1;\n"
               : LOCKSTEP_D64(d, 0)
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(kSign));
}
/// d[64x64] (+)= a[64x16] b[16x64]; a in registers, b outer-major.
LOCKSTEP_DEVICE void wgmma_64_outer(float (&d)[32],
                                    const uint32_t* a,
                                    uint64_t b,
                                    bool accumulate) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %37, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 "
      "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,"
      "%25,%26,%27,%28,%29,%30,%31}, {%32,%33,%34,%35}, %36, p, 1, 1, 1;\n}\n"
      : LOCKSTEP_D32(d, 0)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(accumulate)));
}
/// d[64x64] (+)= a[64x16] b[16x64]; both in shared memory, contraction-major.
LOCKSTEP_DEVICE void wgmma_64_shared_k(float (&d)[32], uint64_t a, uint64_t b, bool accumulate) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %34, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 "
      "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,"
      "%25,%26,%27,%28,%29,%30,%31}, %32, %33, p, 1, 1, 0, 0;\n}\n"
      : LOCKSTEP_D32(d, 0)
      : "l"(a), "l"(b), "r"(static_cast<int>(accumulate)));
}
/// d[64x64] (+)= a[64x16] b[16x64]; a in shared memory contraction-major, b outer-major.
LOCKSTEP_DEVICE void wgmma_64_shared(float (&d)[32], uint64_t a, uint64_t b, bool accumulate) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %34, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 "
      "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,"
      "%25,%26,%27,%28,%29,%30,%31}, %32, %33, p, 1, 1, 0, 1;\n}\n"
      : LOCKSTEP_D32(d, 0)
      : "l"(a), "l"(b), "r"(static_cast<int>(accumulate)));
}

/// d[64x128] += a[64x16] b[16x128]; a in shared memory contraction-major, b outer-major.
LOCKSTEP_DEVICE void wgmma_128_shared(float (&d)[64], uint64_t a, uint64_t b) {
  asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 " LOCKSTEP_WGMMA_128_D
               ", %64, %65, 1, 1, 1, 0, 1;\n"
               : LOCKSTEP_D64(d, 0)
               : "l"(a), "l"(b));
}

/// The same with a outer-major, its 64 outer elements in one slab.
LOCKSTEP_DEVICE void wgmma_128_shared_outer(float (&d)[64], uint64_t a, uint64_t b) {
  asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 " LOCKSTEP_WGMMA_128_D
               ", %64, %65, 1, 1, 1, 1, 1;\n"
               : LOCKSTEP_D64(d, 0)
               : "l"(a), "l"(b));
}

template <int kRegisters>
LOCKSTEP_DEVICE void more_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
LOCKSTEP_DEVICE void fewer_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

}  // namespace lockstep::model::hopper

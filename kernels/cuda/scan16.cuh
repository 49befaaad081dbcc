// Helpers of the tensor-core scan (bfloat16 activations, 16 states): arithmetic, asynchronous copies, MMAs.
//
// The lane layout all its kernels share: a warp holds 16 channels x 16 states. Lane (g = lane / 4, s = lane % 4) owns channels
// 2g, 2g + 1 and states 2s, 2s + 1, 8 + 2s, 9 + 2s: 8 recurrences in registers, and exactly the A operand (row = channel,
// k = state) and the accumulator of m16n8 MMAs. Time advances in tiles of 8 tokens; lane s prepares tokens s and s + 4 of its
// group's channels, and column c of every MMA is token c / 2 + 4 (c % 2), so that results land on the lane that prepared them.
#pragma once
#include <cuda_bf16.h>
#include "params.h"

using bf16 = __nv_bfloat16;

constexpr int N16 = 16;         // states
constexpr int TILE = 8;         // tokens of a tile, the columns of one MMA
constexpr int WARP_CHANNELS = 16;
constexpr int WARPS = 4;        // of a block
constexpr int BLOCK_CHANNELS = WARPS * WARP_CHANNELS;
static_assert(BLOCK_CHANNELS == SCAN16_BLOCK_CHANNELS);
constexpr float LOG2E = 1.4426950408889634f, LN2 = 0.6931471805599453f;
constexpr float TF32_FIX = 1.000352f;  // tf32 operands are truncated: mean relative loss 2^-11 / (2 ln 2)
constexpr float LN2_TF32 = 0.693359375f;  // LN2 * TF32_FIX to 5e-5, and a tf32 itself

__device__ __forceinline__ float ex2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ __forceinline__ float rcp(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ __forceinline__ float sigmoid(float x) { return rcp(1.f + ex2(-x * LOG2E)); }

// max(x, 0) + log1p(u), u = e^-|x|; log1p(u) / u is a polynomial with relative error 1.5e-6. u serves the derivative.
__device__ __forceinline__ float softplus(float x, float& u) {
  u = ex2(-fabsf(x) * LOG2E);
  float p = fmaf(0.013814058f, u, -0.06540589f);
  p = fmaf(p, u, 0.14808221f);
  p = fmaf(p, u, -0.23443231f);
  p = fmaf(p, u, 0.33094785f);
  p = fmaf(p, u, -0.49985653f);
  p = fmaf(p, u, 0.99999851f);
  return fmaf(u, p, fmaxf(x, 0.f));
}

__device__ __forceinline__ float low(uint32_t v) { return __uint_as_float(v << 16); }
__device__ __forceinline__ float high(uint32_t v) { return __uint_as_float(v & 0xffff0000u); }
__device__ __forceinline__ float half_of(uint32_t v, int c) { return c ? high(v) : low(v); }
__device__ __forceinline__ uint32_t pack(float a, float b) {
  __nv_bfloat162 v = __floats2bfloat162_rn(a, b);
  return *(uint32_t*)&v;
}
// A number as two bfloat16: low half its leading part, high half the rest; 2^-17 together.
__device__ __forceinline__ uint32_t split(float w) {
  float h = high(__float_as_uint(w));
  return pack(h, w - h);
}
__device__ __forceinline__ uint32_t twice(uint32_t v, int upper) { return __byte_perm(v, v, upper ? 0x3232 : 0x1010); }

__device__ __forceinline__ uint32_t shared_address(const void* p) { return (uint32_t)__cvta_generic_to_shared(p); }
__device__ __forceinline__ void copy4(void* to, const void* from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(shared_address(to)), "l"(from) : "memory");
}
__device__ __forceinline__ void copy16(void* to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(to)), "l"(from) : "memory");
}
__device__ __forceinline__ void copies_issued() { asm volatile("cp.async.commit_group;" ::: "memory"); }
__device__ __forceinline__ void copies_arrived() { asm volatile("cp.async.wait_group 0;" ::: "memory"); }

// tf32, k = 8: the fp32 bits are passed as they are and truncated.
__device__ __forceinline__ void mma_tf32(float (&d)[4], float a0, float a1, float a2, float a3, float b0, float b1, float c0,
                                         float c1, float c2, float c3) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%10,%11,%12,%13};"
      : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
      : "r"(__float_as_uint(a0)), "r"(__float_as_uint(a1)), "r"(__float_as_uint(a2)), "r"(__float_as_uint(a3)),
        "r"(__float_as_uint(b0)), "r"(__float_as_uint(b1)), "f"(c0), "f"(c1), "f"(c2), "f"(c3));
}
// tf32, k = 4: factor, a tf32, times the sum over a lane group, in every column.
__device__ __forceinline__ void mma_sum4(float (&d)[4], float a0, float a1, float factor) {
  asm("mma.sync.aligned.m16n8k4.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3},{%4,%5},{%6},{%7,%7,%7,%7};"
      : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
      : "r"(__float_as_uint(a0)), "r"(__float_as_uint(a1)), "r"(__float_as_uint(factor)), "f"(0.f));
}
// bf16, k = 8: the outer product of one token. a: split numbers of the tile's 4 tokens, one a lane of the group; b: that token's
// row of B or C, doubled, in the lane that owns the token, zero in the others.
__device__ __forceinline__ void mma_outer(float (&d)[4], const uint32_t (&a)[2], uint32_t b, float c0, float c1, float c2,
                                          float c3) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3},{%4,%5},{%6},{%7,%8,%9,%10};"
      : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(b), "f"(c0), "f"(c1), "f"(c2), "f"(c3));
}
// bf16, k = 16.
__device__ __forceinline__ void mma_bf16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%10,%10,%10,%10};"
      : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(0.f));
}
__device__ __forceinline__ uint32_t transposed(uint32_t a) {
  uint32_t d;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(d) : "r"(a));
  return d;
}
__device__ __forceinline__ void load_transposed(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address));
}

// A lane's quad in A operand order <-> four 8 x 8 matrices of 16-byte rows in shared memory. Nothing else reads or writes those, so
// that these are ordered among themselves and by __syncwarp, and other loads may pass them.
__device__ __forceinline__ void put_quad(uint4* matrices, int lane, const uint32_t (&a)[4]) {
#if __CUDA_ARCH__ >= 900
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(shared_address(matrices + lane)),
               "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]));
#else
#pragma unroll
  for (int m = 0; m < 4; m++) ((uint32_t*)matrices)[32 * m + lane] = a[m];
  __syncwarp();
#endif
}
__device__ __forceinline__ void get_quad(uint32_t (&a)[4], const uint4* matrices, int lane) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3])
               : "r"(shared_address(matrices + lane)));
}

// Calls launch with whether there is a gate and a softplus, as types: a branch inside a tile would keep its tokens from overlapping.
template <bool X> struct Switch {
  static constexpr bool value = X;
};
template <class F> void with_switches(const ScanParams& p, F launch) {
  if (p.z.data && p.softplus) launch(Switch<true>(), Switch<true>());
  else if (p.z.data) launch(Switch<true>(), Switch<false>());
  else if (p.softplus) launch(Switch<false>(), Switch<true>());
  else launch(Switch<false>(), Switch<false>());
}

// Where a warp stands: its lane, channels and, per segment, the tensors from the segment's first token on.
struct Lane {
  int lane, g, s, column_token, channel, loaded;
  bool live;  // the last warps may lie past the last channel: they load channel `loaded` and count for nothing
  __device__ explicit Lane(int channels) {
    lane = threadIdx.x & 31, g = lane >> 2, s = lane & 3, column_token = (g >> 1) + 4 * (g & 1);
    channel = (blockIdx.x * WARPS + (threadIdx.x >> 5)) * WARP_CHANNELS + 2 * g;
    live = channel < channels;
    loaded = min(channel, channels - 2);
  }
};

__device__ __forceinline__ const char* at(const View& v, int slot, int row_length, int element) {
  const int row = slot / row_length;
  const char* p = (const char*)v.data + row * v.row_bytes + (uint64_t)(slot - row * row_length) * v.token_bytes + 2 * element;
  asm("" : "+l"(p));  // else the compiler adds v.data again for every token
  return p;
}
__device__ __forceinline__ const char* token(const char* first, const View& v, int t) {
  return first + (uint64_t)(uint32_t)t * v.token_bytes;
}

// Items are rows of the grid from the second on. The first makes padding zero, in one or more of the outputs.
__device__ __forceinline__ bool zero_padding(const ScanParams& p, void* a, void* b = nullptr, void* c = nullptr,
                                             int64_t c_token = 0, void* d = nullptr) {
  if (blockIdx.y > 0) return false;
  const int channel = blockIdx.x * BLOCK_CHANNELS + 2 * (threadIdx.x & 31);
  const int warp = threadIdx.x >> 5;
  const bool by_row = p.rows >= 4 * WARPS;  // warps share out rows, or each row's slots
  if (channel < p.channels)
    for (int row = by_row ? warp : 0; row < p.rows; row += by_row ? WARPS : 1)
      for (int slot = p.schedule.row_ends[row] + (by_row ? 0 : warp); slot < (row + 1) * p.row_length;
           slot += by_row ? 1 : WARPS) {
        const int64_t o = ((int64_t)slot * p.channels + channel) / 2;
        if (a) ((uint32_t*)a)[o] = 0u;
        if (b) ((uint32_t*)b)[o] = 0u;
        if (d) ((uint32_t*)d)[o] = 0u;
        if (c) ((uint32_t*)c)[(slot * c_token + channel) / 2] = 0u;
      }
  return true;
}

// A state's 8 numbers of a lane: channel c at [c][...], states 2s, 2s + 1, 8 + 2s, 9 + 2s. `states` is (D, 16) floats.
__device__ __forceinline__ void load_state(float (&h)[2][4], const float* states, const Lane& l) {
#pragma unroll
  for (int c = 0; c < 2; c++)
#pragma unroll
    for (int q = 0; q < 2; q++) {
      const float2 v = *(const float2*)(states + (int64_t)(l.loaded + c) * N16 + 8 * q + 2 * l.s);
      h[c][2 * q] = v.x, h[c][2 * q + 1] = v.y;
    }
}
__device__ __forceinline__ void store_state(float* states, const float (&h)[2][4], const Lane& l) {
  if (!l.live) return;
#pragma unroll
  for (int c = 0; c < 2; c++)
#pragma unroll
    for (int q = 0; q < 2; q++)
      *(float2*)(states + (int64_t)(l.channel + c) * N16 + 8 * q + 2 * l.s) = make_float2(h[c][2 * q], h[c][2 * q + 1]);
}
__device__ __forceinline__ void set_zero(float (&h)[2][4]) {
#pragma unroll
  for (int j = 0; j < 4; j++) h[0][j] = h[1][j] = 0.f;
}
__device__ __forceinline__ void load_decay(float (&A)[2][4], const ScanParams& p, const Lane& l) {
  load_state(A, p.A, l);
#pragma unroll
  for (int j = 0; j < 4; j++) A[0][j] *= LOG2E, A[1][j] *= LOG2E;
}
__device__ __forceinline__ float2 load_pair(const float* v, const Lane& l) {
  return v ? *(const float2*)(v + l.loaded) : make_float2(0.f, 0.f);
}
// The order of an MMA's A operand.
__device__ __forceinline__ void pack_state(uint32_t (&a)[4], const float (&h)[2][4]) {
  a[0] = pack(h[0][0], h[0][1]), a[1] = pack(h[1][0], h[1][1]), a[2] = pack(h[0][2], h[0][3]), a[3] = pack(h[1][2], h[1][3]);
}
__device__ __forceinline__ void unpack_state(float (&h)[2][4], const uint32_t (&a)[4]) {
  h[0][0] = low(a[0]), h[0][1] = high(a[0]), h[1][0] = low(a[1]), h[1][1] = high(a[1]);
  h[0][2] = low(a[2]), h[0][3] = high(a[2]), h[1][2] = low(a[3]), h[1][3] = high(a[3]);
}
// One token of the recurrence; with FROM_ZERO also of the one that started from zero. e: the step sizes of the lane's channels;
// w: split delta * u of the token's half of the tile.
template <bool FROM_ZERO>
__device__ __forceinline__ void advance(float (&h)[2][4], float (&zero)[2][4], float2 e, const float (&A)[2][4],
                                        const uint32_t (&w)[2], const uint32_t (&B)[2][2], int t, int s) {
  float wB[2][4];
#pragma unroll
  for (int q = 0; q < 2; q++) mma_outer(wB[q], w, s == (t & 3) ? B[q][t >> 2] : 0u, 0.f, 0.f, 0.f, 0.f);
#pragma unroll
  for (int j = 0; j < 4; j++)
#pragma unroll
    for (int c = 0; c < 2; c++) {
      const float a = ex2((c ? e.y : e.x) * A[c][j]), v = wB[j >> 1][2 * c + (j & 1)];
      h[c][j] = fmaf(h[c][j], a, v);
      if (FROM_ZERO) zero[c][j] = fmaf(zero[c][j], a, v);
    }
}
// The state after a segment that was walked from `start`: as `combine` of scan16_cut.cu has it, to the bit. sum: of the lane's own
// tokens' step sizes.
__device__ __forceinline__ void combine_segment(float (&h)[2][4], const float (&start)[2][4], const float (&zero)[2][4],
                                                const float (&sum)[2], const float (&A)[2][4]) {
#pragma unroll
  for (int c = 0; c < 2; c++) {
    float v = sum[c];
    v += __shfl_xor_sync(~0u, v, 1), v += __shfl_xor_sync(~0u, v, 2);
#pragma unroll
    for (int j = 0; j < 4; j++) h[c][j] = fmaf(start[c][j], ex2(v * A[c][j]), zero[c][j]);
  }
}
// Saved states: one for each SAVE_EVERY tokens of a document but its start, bf16, in A operand order. Documents never overlap there,
// because one of n tokens that starts at slot i has at most (n - 1) / SAVE_EVERY of them, from i / SAVE_EVERY on.
__device__ __forceinline__ uint4* saved_state(const ScanParams& p, int document_start, int place, const Lane& l) {
  const int64_t index = document_start / SAVE_EVERY + place / SAVE_EVERY - 1;
  return (uint4*)p.saved + (index * p.channels + l.loaded) * 2 + l.s;
}

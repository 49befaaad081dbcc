// What the tensor-core scan's kernels share (bfloat16 activations, 16 states): how a warp's lanes
// hold the states, arithmetic, asynchronous copies, MMAs.
//
// A warp holds 16 channels x 16 states of one segment, 8 float32 recurrences a lane:
//
//   lane = 4 group + member           states held by the member of each group
//                                     octet 0                  octet 1
//                                     0 1   2 3   4 5   6 7    8 9   10 11 12 13 14 15
//   channels 0, 1     group 0       | 0   | 1   | 2   | 3    | 0   | 1   | 2   | 3    |
//   channels 2, 3     group 1       | 4   | 5   | 6   | 7    | 4   | 5   | 6   | 7    |
//   ...                             |             ... lanes ...                       |
//   channels 14, 15   group 7       | 28  | 29  | 30  | 31   | 28  | 29  | 30  | 31   |
//
//   h[odd][state]: channel 2 group + odd, state 8 (state / 2) + 2 member + state % 2, that is
//   2 member, 2 member + 1, 8 + 2 member, 9 + 2 member.
//
// These are exactly the A operand (row = channel, k = state) and the accumulator of m16n8 MMAs, if
// row r of the MMA is channel 2 (r % 8) + r / 8. So outer products and sums over states or channels
// are MMAs on registers as they lie, and nothing is exchanged along time.
//
// Time advances in tiles of 8 tokens, in two halves of 4. Member m prepares tokens m (half 0) and
// m + 4 (half 1) of its group's two channels: dt, dt u, the gate, once per element. Column c of
// every MMA is token c / 2 + 4 (c % 2), so that results land on the lane that prepared the token:
//
//   column of an MMA       0  1  2  3  4  5  6  7
//   token of the tile      0  4  1  5  2  6  3  7
//   lands on member        0  0  1  1  2  2  3  3
//
// Numbers. The recurrence and its decays are float32 throughout. What is multiplied by B_t and C_t
// is bfloat16 twice (a leading part and the rest, 2^-17 together) or tf32.
#pragma once
#include <cuda_bf16.h>
#include "params.h"

using bf16 = __nv_bfloat16;

constexpr int N16 = 16;  // states
constexpr int TILE = 8;  // tokens of a tile, the columns of one MMA
constexpr int WARP_CHANNELS = 16;
constexpr int WARPS = 4;  // of a block
constexpr int BLOCK_CHANNELS = WARPS * WARP_CHANNELS;
static_assert(BLOCK_CHANNELS == SCAN16_BLOCK_CHANNELS);
constexpr float LOG2E = 1.4426950408889634f;
constexpr float LN2 = 0.6931471805599453f;
constexpr float TF32_FIX = 1.000352f;     // tf32 operands are truncated: mean relative loss
                                          // 2^-11 / (2 ln 2)
constexpr float LN2_TF32 = 0.693359375f;  // LN2 * TF32_FIX to 5e-5, and a tf32 itself

// The special-function unit takes 2^x and 1 / x, 16 a clock and multiprocessor.
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

// max(x, 0) + log1p(power), power = e^-|x|; log1p(power) / power is a polynomial with relative
// error 1.5e-6. The power serves the derivative.
__device__ __forceinline__ float softplus(float x, float& power) {
  power = ex2(-fabsf(x) * LOG2E);
  float series = fmaf(0.013814058f, power, -0.06540589f);
  series = fmaf(series, power, 0.14808221f);
  series = fmaf(series, power, -0.23443231f);
  series = fmaf(series, power, 0.33094785f);
  series = fmaf(series, power, -0.49985653f);
  series = fmaf(series, power, 0.99999851f);
  return fmaf(power, series, fmaxf(x, 0.f));
}

// Two bfloat16 in a word: of an even channel or state in the low half, of the odd one in the high.
__device__ __forceinline__ float low(uint32_t pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float high(uint32_t pair) { return __uint_as_float(pair & 0xffff0000u); }
__device__ __forceinline__ float element(uint32_t pair, int odd) {
  return odd ? high(pair) : low(pair);
}
__device__ __forceinline__ uint32_t pack(float even, float odd) {
  __nv_bfloat162 pair = __floats2bfloat162_rn(even, odd);
  return *(uint32_t*)&pair;
}
// A number as two bfloat16: low half its leading part, high half the rest; 2^-17 together.
__device__ __forceinline__ uint32_t split(float number) {
  float leading = high(__float_as_uint(number));
  return pack(leading, number - leading);
}
// One element of a pair, in both halves.
__device__ __forceinline__ uint32_t doubled(uint32_t pair, int odd) {
  return __byte_perm(pair, pair, odd ? 0x3232 : 0x1010);
}

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  return (uint32_t)__cvta_generic_to_shared(pointer);
}
// Copies from global to shared memory that the lane need not wait for.
__device__ __forceinline__ void copy4(void* to, const void* from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(shared_address(to)), "l"(from)
               : "memory");
}
__device__ __forceinline__ void copy16(void* to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(to)), "l"(from)
               : "memory");
}
__device__ __forceinline__ void copies_issued() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}
__device__ __forceinline__ void copies_arrived() {
  asm volatile("cp.async.wait_group 0;" ::: "memory");
}

// MMAs, d = a b + c in PTX's letters.
//
// tf32, k = 8: the fp32 bits are passed as they are and truncated.
__device__ __forceinline__ void mma_tf32(float (&d)[4], float a0, float a1, float a2, float a3,
                                         float b0, float b1, float c0, float c1, float c2,
                                         float c3) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 "
      "{%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%10,%11,%12,%13};"
      : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
      : "r"(__float_as_uint(a0)), "r"(__float_as_uint(a1)), "r"(__float_as_uint(a2)),
        "r"(__float_as_uint(a3)), "r"(__float_as_uint(b0)), "r"(__float_as_uint(b1)), "f"(c0),
        "f"(c1), "f"(c2), "f"(c3));
}
// tf32, k = 4: factor, a tf32, times the sum over a lane group, in every column.
__device__ __forceinline__ void mma_group_sum(float (&d)[4], float a0, float a1, float factor) {
  asm("mma.sync.aligned.m16n8k4.row.col.f32.tf32.tf32.f32 "
      "{%0,%1,%2,%3},{%4,%5},{%6},{%7,%7,%7,%7};"
      : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
      : "r"(__float_as_uint(a0)), "r"(__float_as_uint(a1)), "r"(__float_as_uint(factor)), "f"(0.f));
}
// bf16, k = 8: the outer product of one token. a: split numbers of the tile's 4 tokens, one a
// member of the group; b: that token's row of B or C, doubled, in the member that owns the token,
// zero in the others.
__device__ __forceinline__ void mma_outer(float (&d)[4], const uint32_t (&a)[2], uint32_t b,
                                          float c0, float c1, float c2, float c3) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32 "
      "{%0,%1,%2,%3},{%4,%5},{%6},{%7,%8,%9,%10};"
      : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(b), "f"(c0), "f"(c1), "f"(c2), "f"(c3));
}
// bf16, k = 16.
__device__ __forceinline__ void mma_bf16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0,
                                         uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
      "{%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%10,%10,%10,%10};"
      : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(0.f));
}

// An 8 x 8 matrix of 16-bit numbers, one word a lane, transposed.
__device__ __forceinline__ uint32_t transposed(uint32_t matrix) {
  uint32_t result;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(result) : "r"(matrix));
  return result;
}
// Four of them from shared memory, transposed.
__device__ __forceinline__ void load_transposed(uint32_t (&quad)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(quad[0]), "=r"(quad[1]), "=r"(quad[2]), "=r"(quad[3])
               : "r"(address));
}

// A lane's quad in A operand order <-> four 8 x 8 matrices of 16-byte rows in shared memory.
// Nothing else reads or writes those, so that these are ordered among themselves and by __syncwarp,
// and other loads may pass them.
__device__ __forceinline__ void put_quad(uint4* matrices, int lane, const uint32_t (&quad)[4]) {
#if __CUDA_ARCH__ >= 900
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(
                   shared_address(matrices + lane)),
               "r"(quad[0]), "r"(quad[1]), "r"(quad[2]), "r"(quad[3]));
#else
#pragma unroll
  for (int matrix = 0; matrix < 4; matrix++)
    ((uint32_t*)matrices)[32 * matrix + lane] = quad[matrix];
  __syncwarp();
#endif
}
__device__ __forceinline__ void get_quad(uint32_t (&quad)[4], const uint4* matrices, int lane) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(quad[0]), "=r"(quad[1]), "=r"(quad[2]), "=r"(quad[3])
               : "r"(shared_address(matrices + lane)));
}

// Calls launch with whether there is a gate and a softplus, as types: a branch inside a tile would
// keep its tokens from overlapping.
template <bool VALUE>
struct Switch {
  static constexpr bool value = VALUE;
};
template <class Launch>
void with_switches(const ScanParams& params, Launch launch) {
  if (params.z.data && params.softplus)
    launch(Switch<true>(), Switch<true>());
  else if (params.z.data)
    launch(Switch<true>(), Switch<false>());
  else if (params.softplus)
    launch(Switch<false>(), Switch<true>());
  else
    launch(Switch<false>(), Switch<false>());
}

// Where a lane stands.
struct Lane {
  int lane;          // 4 group + member
  int group;         // 0 to 7
  int member;        // 0 to 3
  int column_token;  // the token whose B and C this lane loads: of MMA column `group`
  int channel;       // the first of its two
  int loaded;        // the channel that it loads: the last warps may lie past the last channel ...
  bool live;         // ... and count for nothing
  __device__ explicit Lane(int channels) {
    lane = threadIdx.x & 31;
    group = lane >> 2;
    member = lane & 3;
    column_token = (group >> 1) + 4 * (group & 1);
    channel = (blockIdx.x * WARPS + (threadIdx.x >> 5)) * WARP_CHANNELS + 2 * group;
    live = channel < channels;
    loaded = min(channel, channels - 2);
  }
};

// The address of a slot's element in a (B, L, *) tensor, and of tokens after it in the same row.
__device__ __forceinline__ const char* slot_address(const View& view, int slot, int row_length,
                                                    int element) {
  const int row = slot / row_length;
  const char* address = (const char*)view.data + row * view.row_bytes +
                        (uint64_t)(slot - row * row_length) * view.token_bytes + 2 * element;
  asm("" : "+l"(address));  // else the compiler adds view.data again for every token
  return address;
}
__device__ __forceinline__ const char* token_address(const char* first, const View& view,
                                                     int token) {
  return first + (uint64_t)(uint32_t)token * view.token_bytes;
}

// Items are rows of the grid from the second on. The first makes padding zero, in up to three
// contiguous outputs and a strided one; null: none.
__device__ __forceinline__ bool zero_padding(const ScanParams& params, void* first,
                                             void* second = nullptr, void* strided = nullptr,
                                             int64_t strided_token = 0, void* third = nullptr) {
  if (blockIdx.y > 0) return false;
  const int channel = blockIdx.x * BLOCK_CHANNELS + 2 * (threadIdx.x & 31);
  const int warp = threadIdx.x >> 5;
  const bool by_row = params.rows >= 4 * WARPS;  // warps share out rows, or each row's slots
  if (channel < params.channels) {
    for (int row = by_row ? warp : 0; row < params.rows; row += by_row ? WARPS : 1) {
      for (int slot = params.schedule.row_ends[row] + (by_row ? 0 : warp);
           slot < (row + 1) * params.row_length; slot += by_row ? 1 : WARPS) {
        const int64_t pair = ((int64_t)slot * params.channels + channel) / 2;
        if (first) ((uint32_t*)first)[pair] = 0u;
        if (second) ((uint32_t*)second)[pair] = 0u;
        if (third) ((uint32_t*)third)[pair] = 0u;
        if (strided) ((uint32_t*)strided)[(slot * strided_token + channel) / 2] = 0u;
      }
    }
  }
  return true;
}

// Floats before the states, (D, 16), of a document or of a cut segment.
__device__ __forceinline__ int64_t states_before(const ScanParams& params, int index) {
  return (int64_t)index * params.channels * N16;
}
// A lane's 8 numbers of a (D, 16) float32 tensor; see the head for h[odd][state].
__device__ __forceinline__ void load_state(float (&h)[2][4], const float* states,
                                           const Lane& mine) {
#pragma unroll
  for (int odd = 0; odd < 2; odd++)
#pragma unroll
    for (int octet = 0; octet < 2; octet++) {
      const float2 pair = *(const float2*)(states + (int64_t)(mine.loaded + odd) * N16 + 8 * octet +
                                           2 * mine.member);
      h[odd][2 * octet] = pair.x;
      h[odd][2 * octet + 1] = pair.y;
    }
}
__device__ __forceinline__ void store_state(float* states, const float (&h)[2][4],
                                            const Lane& mine) {
  if (!mine.live) return;
#pragma unroll
  for (int odd = 0; odd < 2; odd++)
#pragma unroll
    for (int octet = 0; octet < 2; octet++) {
      *(float2*)(states + (int64_t)(mine.channel + odd) * N16 + 8 * octet + 2 * mine.member) =
          make_float2(h[odd][2 * octet], h[odd][2 * octet + 1]);
    }
}
__device__ __forceinline__ void set_zero(float (&h)[2][4]) {
#pragma unroll
  for (int state = 0; state < 4; state++)
    h[0][state] = h[1][state] = 0.f;
}
// A times log2(e), so that ex2(dt A) is the decay.
__device__ __forceinline__ void load_decay(float (&A)[2][4], const ScanParams& params,
                                           const Lane& mine) {
  load_state(A, params.A, mine);
#pragma unroll
  for (int state = 0; state < 4; state++) {
    A[0][state] *= LOG2E;
    A[1][state] *= LOG2E;
  }
}
// The two channels' numbers of a (D,) tensor; zero where it is absent.
__device__ __forceinline__ float2 load_pair(const float* vector, const Lane& mine) {
  return vector ? *(const float2*)(vector + mine.loaded) : make_float2(0.f, 0.f);
}
// A state as bfloat16, in the order of an MMA's A operand.
__device__ __forceinline__ void pack_state(uint32_t (&quad)[4], const float (&h)[2][4]) {
  quad[0] = pack(h[0][0], h[0][1]);
  quad[1] = pack(h[1][0], h[1][1]);
  quad[2] = pack(h[0][2], h[0][3]);
  quad[3] = pack(h[1][2], h[1][3]);
}
__device__ __forceinline__ void unpack_state(float (&h)[2][4], const uint32_t (&quad)[4]) {
  h[0][0] = low(quad[0]);
  h[0][1] = high(quad[0]);
  h[1][0] = low(quad[1]);
  h[1][1] = high(quad[1]);
  h[0][2] = low(quad[2]);
  h[0][3] = high(quad[2]);
  h[1][2] = low(quad[3]);
  h[1][3] = high(quad[3]);
}

// One token of the recurrence, h = exp(dt A) h + dt u B; with FROM_ZERO also of the one that
// started from zero. dt: of the lane's channels; drive: split dt u of the token's half of the tile;
// B: by octet and half.
template <bool FROM_ZERO>
__device__ __forceinline__ void advance(float (&h)[2][4], float (&from_zero)[2][4], float2 dt,
                                        const float (&A)[2][4], const uint32_t (&drive)[2],
                                        const uint32_t (&B)[2][2], int token, int member) {
  float added[2][4];
#pragma unroll
  for (int octet = 0; octet < 2; octet++) {
    mma_outer(added[octet], drive, member == (token & 3) ? B[octet][token >> 2] : 0u, 0.f, 0.f, 0.f,
              0.f);
  }
#pragma unroll
  for (int state = 0; state < 4; state++)
#pragma unroll
    for (int odd = 0; odd < 2; odd++) {
      const float decay = ex2((odd ? dt.y : dt.x) * A[odd][state]);
      const float term = added[state >> 1][2 * odd + (state & 1)];
      h[odd][state] = fmaf(h[odd][state], decay, term);
      if (FROM_ZERO) from_zero[odd][state] = fmaf(from_zero[odd][state], decay, term);
    }
}

// The state after a segment that was walked from `start`: as `combine` of scan16_cut.cu has it, to
// the bit. sum: of the lane's own tokens' dt.
__device__ __forceinline__ void combine_segment(float (&h)[2][4], const float (&start)[2][4],
                                                const float (&from_zero)[2][4],
                                                const float (&sum)[2], const float (&A)[2][4]) {
#pragma unroll
  for (int odd = 0; odd < 2; odd++) {
    float total = sum[odd];
    total += __shfl_xor_sync(~0u, total, 1);
    total += __shfl_xor_sync(~0u, total, 2);
#pragma unroll
    for (int state = 0; state < 4; state++)
      h[odd][state] = fmaf(start[odd][state], ex2(total * A[odd][state]), from_zero[odd][state]);
  }
}

// Saved states: one for each SAVE_EVERY tokens of a document but its start, bfloat16, in A operand
// order. Documents never overlap there, because one of n tokens that starts at slot i has at most
// (n - 1) / SAVE_EVERY of them, from i / SAVE_EVERY on.
__device__ __forceinline__ uint4* saved_state(const ScanParams& params, int document_start,
                                              int position, const Lane& mine) {
  const int64_t index = document_start / SAVE_EVERY + position / SAVE_EVERY - 1;
  return (uint4*)params.saved + (index * params.channels + mine.loaded) * 2 + mine.member;
}

// Start states of the pieces of long documents (bfloat16, 16 states); the mirror image gives the gradients they end with.
//
// Few or long documents leave the chip empty, so the schedule cuts them. `piece`: the state each piece but the last ends with when
// it starts from zero, and its sum of step sizes, whose exponential is the whole piece's decay; mapping and lane layout as the
// forward's. `combine`: one thread per 4 states of a channel walks a document's pieces in order.
// Bound: as the forward's, without output; runs only over pieces. Bytes: 4 per token and channel read (backward 6), states twice.
#include "scan16.cuh"

namespace {

struct Shared {
  float2 step[TILE * 12];
  uint32_t in[2][6][32], bc[2][2][32];
};

template <bool REVERSE, bool GATE, bool SOFTPLUS>
__global__ void __launch_bounds__(WARPS * 32, 6) piece(const __grid_constant__ ScanParams p) {
  __shared__ Shared shared[WARPS];
  let_next_start();
  if (blockIdx.y >= p.schedule.counts[2]) return;
  const int4 segment = p.schedule.segments[p.schedule.cut_segments[blockIdx.y]];
  const int document = document_of(segment), length = segment.y - segment.x;
  if (REVERSE ? segment.x == p.starts[document] : segment.y == p.ends[document]) return;
  const Lane l(p.channels);
  const int lane = l.lane, g = l.g, s = l.s;
  Shared& m = shared[threadIdx.x >> 5];
  float A[2][4], h[2][4], sum[2] = {};
  load_decay(A, p, l);
  set_zero(h);
  const float2 bias = load_pair(p.bias, l);
  const View& from = REVERSE ? p.dy : p.u;
  const View& outer = REVERSE ? p.C : p.B;
  const char *v = at(from, segment.x, p.row_length, l.loaded), *delta = at(p.delta, segment.x, p.row_length, l.loaded);
  const char* z = REVERSE && GATE ? at(p.z, segment.x, p.row_length, l.loaded) : nullptr;
  const char* b = at(outer, segment.x, p.row_length, 2 * s);

  auto stage = [&](int t0, int o) {
#pragma unroll
    for (int k = 0; k < 2; k++) {
      const int t = min(t0 + s + 4 * k, length - 1);
      copy4(&m.in[o][k][lane], token(v, from, t));
      copy4(&m.in[o][2 + k][lane], token(delta, p.delta, t));
      if (REVERSE && GATE) copy4(&m.in[o][4 + k][lane], token(z, p.z, t));
    }
    const char* bt = token(b, outer, min(t0 + l.column_token, length - 1));
    copy4(&m.bc[o][0][lane], bt);
    copy4(&m.bc[o][1][lane], bt + 16);
    copies_issued();
  };

  const int tiles = (length + TILE - 1) / TILE;
  stage(REVERSE ? (tiles - 1) * TILE : 0, 0);
  for (int n = 0, o = 0; n < tiles; n++, o ^= 1) {
    const int t0 = (REVERSE ? tiles - 1 - n : n) * TILE;
    copies_arrived();
    uint32_t w[2][2], row[2][2];
#pragma unroll
    for (int k = 0; k < 2; k++) {
      const bool inside = t0 + s + 4 * k < length;
      float e[2];
#pragma unroll
      for (int c = 0; c < 2; c++) {
        float unused;
        const float x = half_of(m.in[o][2 + k][lane], c) + (c ? bias.y : bias.x), vt = half_of(m.in[o][k][lane], c);
        e[c] = SOFTPLUS ? softplus(x, unused) : x;
        e[c] = inside ? e[c] : 0.f;
        sum[c] += e[c];
        if (REVERSE) {
          const float zt = half_of(m.in[o][4 + k][lane], c), gate = GATE ? vt * sigmoid(zt) * zt : vt;
          w[k][c] = split(inside ? gate : 0.f);
        } else {
          w[k][c] = split(e[c] * vt);
        }
      }
      m.step[(s + 4 * k) * 12 + g] = make_float2(e[0], e[1]);
    }
#pragma unroll
    for (int q = 0; q < 2; q++) {
      const uint32_t r = transposed(m.bc[o][q][lane]);
      row[q][0] = twice(r, 0), row[q][1] = twice(r, 1);
    }
    if (n + 1 < tiles) stage(REVERSE ? t0 - TILE : t0 + TILE, o ^ 1);
    __syncwarp();
#pragma unroll
    for (int i = 0; i < TILE; i++) {
      const int t = REVERSE ? TILE - 1 - i : i, k = t >> 2;
      const float2 e = m.step[t * 12 + g];
#pragma unroll
      for (int q = 0; q < 2; q++) {
        const uint32_t r = s == (t & 3) ? row[q][k] : 0u;
        float d[4];
        if (REVERSE) mma_outer(d, w[k], r, h[0][2 * q], h[0][2 * q + 1], h[1][2 * q], h[1][2 * q + 1]);
        else mma_outer(d, w[k], r, 0.f, 0.f, 0.f, 0.f);
#pragma unroll
        for (int j = 0; j < 2; j++) {
          const float a0 = ex2(e.x * A[0][2 * q + j]), a1 = ex2(e.y * A[1][2 * q + j]);
          h[0][2 * q + j] = REVERSE ? a0 * d[j] : fmaf(a0, h[0][2 * q + j], d[j]);
          h[1][2 * q + j] = REVERSE ? a1 * d[2 + j] : fmaf(a1, h[1][2 * q + j], d[2 + j]);
        }
      }
    }
    __syncwarp();
  }
  const int64_t place = (int64_t)segment.w * p.channels;
  store_state(p.cut_states + place * N16, h, l);
#pragma unroll
  for (int c = 0; c < 2; c++) {
    float v = sum[c];
    v += __shfl_xor_sync(~0u, v, 1), v += __shfl_xor_sync(~0u, v, 2);
    if (s == 0 && l.live) p.cut_sums[place + l.channel + c] = v;
  }
}

constexpr int AHEAD = 8;  // pieces whose end states are loaded together

template <bool REVERSE>
__global__ void __launch_bounds__(128) combine(const __grid_constant__ ScanParams p) {
  wait_for_previous();
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (blockIdx.y >= p.schedule.counts[3] || i >= p.channels * 4) return;
  const int4 pieces = p.schedule.cut_documents[blockIdx.y];
  const int64_t stride = (int64_t)p.channels * 4;
  const float4* first = (const float4*)(REVERSE ? p.dfinal : p.initial_state);
  float4 h = first ? first[pieces.z * stride + i] : make_float4(0.f, 0.f, 0.f, 0.f);
  float4 A = ((const float4*)p.A)[i];
  A.x *= LOG2E, A.y *= LOG2E, A.z *= LOG2E, A.w *= LOG2E;
  for (int n0 = 0; n0 < pieces.y; n0 += AHEAD) {
    float4 end[AHEAD];
    float sum[AHEAD];
    auto place = [&](int n) { return (int64_t)pieces.x + (REVERSE ? pieces.y - 1 - n : n); };
#pragma unroll
    for (int k = 0; k < AHEAD; k++)
      if (n0 + k + 1 < pieces.y) {  // the last has no end state
        end[k] = ((const float4*)p.cut_states)[place(n0 + k) * stride + i];
        sum[k] = p.cut_sums[place(n0 + k) * p.channels + (i >> 2)];
      }
#pragma unroll
    for (int k = 0; k < AHEAD; k++)
      if (n0 + k < pieces.y) {
        ((float4*)p.cut_states)[place(n0 + k) * stride + i] = h;
        h.x = fmaf(h.x, ex2(sum[k] * A.x), end[k].x), h.y = fmaf(h.y, ex2(sum[k] * A.y), end[k].y);
        h.z = fmaf(h.z, ex2(sum[k] * A.z), end[k].z), h.w = fmaf(h.w, ex2(sum[k] * A.w), end[k].w);
      }
  }
}

}  // namespace

void scan16_start_states(const ScanParams& p, bool reverse, cudaStream_t stream) {
  const dim3 pieces((p.channels + BLOCK_CHANNELS - 1) / BLOCK_CHANNELS, p.schedule.max_cut_segments);
  const dim3 documents((p.channels * 4 + 127) / 128, p.schedule.max_cut_documents);
  with_switches(p, [&](auto gate, auto softplus) {
    constexpr bool G = decltype(gate)::value, S = decltype(softplus)::value;
    (reverse ? piece<true, G, S> : piece<false, false, S>)<<<pieces, WARPS * 32, 0, stream>>>(p);
  });
  launch_behind(reverse ? combine<true> : combine<false>, documents, 128, 0, stream, p);
}

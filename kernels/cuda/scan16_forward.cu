// Forward of the selective scan, bfloat16 with 16 states.
//
// Mapping: one warp = 16 channels (lane layout: scan16.cuh) x one item of the schedule (a document, a segment of a long one, or several
// short ones), sequential over tokens in tiles of 8; no barrier between warps. A segment after which the document goes on is also
// walked from zero, one multiply-add more per state, so that its end is combined as scan16_cut.cu does. delta, softplus and the gate are computed once per
// element by the lane that owns the token; w_t (x) B_t and the sum over states are MMAs.
// Bound: 9.5 special-function operations per 16 channels' token and lane, 8 cycles each; 0.27 ms at 16384 tokens of 4096 channels.
// Bytes: u, delta, z, y once (2 each), 1 for saved states; B and C once per 64 channels, from L2.
#include "scan16.cuh"

namespace {

constexpr int PITCH = 12;  // of a token's step sizes: no bank conflicts, written or read

struct Shared {
  float2 step[TILE * PITCH];
  uint32_t in[2][6][32], bc[2][4][32];  // u, delta, z of two tokens; B and C: staged by each lane for itself, two buffers
  float4 constants[32];                 // bias and D of the lane's channels
};

// RESIDENT: blocks of a multiprocessor. Five hide most; where there are few, each is faster with the registers of four.
// COMBINES: whether any segment may have to be walked from zero too.
template <int RESIDENT, bool SAVE, bool COMBINES, bool GATE, bool SOFTPLUS>
__global__ void __launch_bounds__(WARPS * 32, RESIDENT) forward(const __grid_constant__ ScanParams p) {
  __shared__ Shared shared[WARPS];
  __shared__ float starts[COMBINES ? WARPS : 1][8][32];  // the state that a segment starts from
  const int number = blockIdx.y - 1;
  if (zero_padding(p, p.y) || number >= p.schedule.counts[0]) return;
  const Lane l(p.channels);
  const int lane = l.lane, g = l.g, s = l.s;
  Shared& m = shared[threadIdx.x >> 5];
  float A[2][4], h[2][4];
  load_decay(A, p, l);
  {
    const float2 bias = load_pair(p.bias, l), D = load_pair(p.D, l);
    m.constants[lane] = make_float4(bias.x, bias.y, D.x, D.y);
  }
  const int2 item = p.schedule.items[number];
  for (int i = item.x; i < item.y; i++) {
    const int4 segment = p.schedule.segments[i];
    const int length = segment.y - segment.x, document = document_of(segment), before = segment.x - p.starts[document];
    if (segment.w >= 0) load_state(h, p.cut_states + (int64_t)segment.w * p.channels * N16, l);
    else if (before > 0) {}  // the segment before ended with it
    else if (p.initial_state) load_state(h, p.initial_state + (int64_t)document * p.channels * N16, l);
    else set_zero(h);
    const char *u = at(p.u, segment.x, p.row_length, l.loaded), *delta = at(p.delta, segment.x, p.row_length, l.loaded);
    const char *z = GATE ? at(p.z, segment.x, p.row_length, l.loaded) : nullptr;
    const char *B = at(p.B, segment.x, p.row_length, 2 * s), *C = at(p.C, segment.x, p.row_length, 2 * s);
    bf16* y = (bf16*)p.y + (int64_t)segment.x * p.channels + l.channel;

    // Past the end the segment's last token is read again, and masked when it is used.
    auto stage = [&](int t0, int b) {
#pragma unroll
      for (int k = 0; k < 2; k++) {
        const int t = min(t0 + s + 4 * k, length - 1);
        copy4(&m.in[b][k][lane], token(u, p.u, t));
        copy4(&m.in[b][2 + k][lane], token(delta, p.delta, t));
        if (GATE) copy4(&m.in[b][4 + k][lane], token(z, p.z, t));
      }
      const int t = min(t0 + l.column_token, length - 1);
      const char *Bt = token(B, p.B, t), *Ct = token(C, p.C, t);
#pragma unroll
      for (int q = 0; q < 2; q++) {
        copy4(&m.bc[b][q][lane], Bt + 16 * q);
        copy4(&m.bc[b][2 + q][lane], Ct + 16 * q);
      }
      copies_issued();
    };

    const bool ends = segment.y == p.ends[document];
    auto walk = [&](auto combined) {
      constexpr bool COMBINED = decltype(combined)::value;
      float zero[2][4], sum[2] = {};
      set_zero(zero);
      if (COMBINED)
#pragma unroll
        for (int j = 0; j < 8; j++) starts[threadIdx.x >> 5][j][lane] = h[j >> 2][j & 3];
      stage(0, 0);
      int b = 0;
      for (int t0 = 0; t0 < length; t0 += TILE, b ^= 1) {
        copies_arrived();
        uint32_t w[2][2], Bt[2][2];
        const float4 constants = m.constants[lane];
#pragma unroll
        for (int k = 0; k < 2; k++) {
          const bool inside = t0 + s + 4 * k < length;
          float e[2];
#pragma unroll
          for (int c = 0; c < 2; c++) {
            float unused;
            const float x = half_of(m.in[b][2 + k][lane], c) + (c ? constants.y : constants.x);
            e[c] = SOFTPLUS ? softplus(x, unused) : x;
            e[c] = inside ? e[c] : 0.f;
            w[k][c] = split(e[c] * half_of(m.in[b][k][lane], c));
            if (COMBINED) sum[c] += e[c];
          }
          m.step[(s + 4 * k) * PITCH + g] = make_float2(e[0], e[1]);
        }
#pragma unroll
        for (int q = 0; q < 2; q++) {
          const uint32_t v = transposed(m.bc[b][q][lane]);
          Bt[q][0] = twice(v, 0), Bt[q][1] = twice(v, 1);
        }
        const uint32_t C0 = m.bc[b][2][lane], C1 = m.bc[b][3][lane];
        if (t0 + TILE < length) stage(t0 + TILE, b ^ 1);
        const int place = before + t0;
        if (SAVE && place % SAVE_EVERY == 0 && place > 0 && l.live) {
          uint32_t a[4];
          pack_state(a, h);
          *saved_state(p, segment.x - before, place, l) = make_uint4(a[0], a[1], a[2], a[3]);
        }
        __syncwarp();

        float y0[2], y1[2];
#pragma unroll
        for (int t = 0; t < TILE; t++) {
          const int k = t >> 2;
          const bool own = s == (t & 3);
          advance<COMBINED>(h, zero, m.step[t * PITCH + g], A, w[k], Bt, t, s);
          float q[4];
          mma_tf32(q, h[0][0], h[1][0], h[0][1], h[1][1], low(C0), high(C0), 0.f, 0.f, 0.f, 0.f);
          mma_tf32(q, h[0][2], h[1][2], h[0][3], h[1][3], low(C1), high(C1), q[0], q[1], q[2], q[3]);
          if (own) y0[k] = q[k], y1[k] = q[2 + k];
        }

        const float4 cD = m.constants[lane];
#pragma unroll
        for (int k = 0; k < 2; k++)
          if (t0 + s + 4 * k < length && l.live) {
            const uint32_t ut = m.in[b][k][lane];
            float o0 = fmaf(cD.z, low(ut), y0[k] * TF32_FIX), o1 = fmaf(cD.w, high(ut), y1[k] * TF32_FIX);
            if (GATE) {
              const uint32_t zt = m.in[b][4 + k][lane];
              o0 *= low(zt) * sigmoid(low(zt)), o1 *= high(zt) * sigmoid(high(zt));
            }
            *(uint32_t*)(y + (uint64_t)(uint32_t)(t0 + s + 4 * k) * (uint32_t)p.channels) = pack(o0, o1);
          }
        __syncwarp();
      }
      if (COMBINED) {
        float start[2][4];
#pragma unroll
        for (int j = 0; j < 8; j++) start[j >> 2][j & 3] = starts[threadIdx.x >> 5][j][lane];
        combine_segment(h, start, zero, sum, A);
      }
    };
    if (COMBINES && segment.z & ENDS_AT_CUT && (ends ? p.final_state != nullptr : segment.w < 0)) walk(Switch<COMBINES>());
    else walk(Switch<false>());
    if (p.final_state && ends) store_state(p.final_state + (int64_t)document * p.channels * N16, h, l);
  }
}

}  // namespace

void scan16_start_states(const ScanParams& p, bool reverse, cudaStream_t stream);

void scan16_forward(const ScanParams& p, cudaStream_t stream) {
  if (p.schedule.max_cut_segments) scan16_start_states(p, false, stream);
  const dim3 grid((p.channels + BLOCK_CHANNELS - 1) / BLOCK_CHANNELS, p.schedule.max_items + 1);
  const bool few = (int64_t)grid.x * p.documents <= 1024;
  with_switches(p, [&](auto gate, auto softplus) {
    constexpr bool G = decltype(gate)::value, S = decltype(softplus)::value;
    auto run = [&](auto combines) {
      constexpr bool C = decltype(combines)::value;
      const auto kernel = !p.saved ? forward<5, false, C, G, S> : few ? forward<4, true, C, G, S> : forward<5, true, C, G, S>;
      kernel<<<grid, WARPS * 32, 0, stream>>>(p);
    };
    p.schedule.combines ? run(Switch<true>()) : run(Switch<false>());
  });
}

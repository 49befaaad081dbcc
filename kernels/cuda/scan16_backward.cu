// Backward of the selective scan, bfloat16 with 16 states.
//
// Mapping: a block = 4 warps = 64 channels x one item of the schedule; lane layout: scan16.cuh. Segments are walked backwards in
// chunks of SAVE_EVERY tokens. A chunk is first scanned from its saved state, without output, and the state before every fourth
// token put in shared memory (as bf16: it starts no more than 4 tokens). Then groups of 4 tokens, the last first, are
// scanned again and walked back with all their states and decays in registers. dB and dC, sums over channels, are MMAs against
// the states and their gradients, transposed through shared memory, summed over the block's warps there and written as one
// partial per block: no atomics, the same bits every time.
// Bound: issue, about 165 instructions per 16 channels' token, 4 schedulers; 0.7 ms at 16384 tokens of 4096 channels.
// Bytes: u, delta, z, dy, du, ddelta, dz once (2 each), saved states 1, partials of dB and dC 2 written and 2 read.
#include "scan16.cuh"

namespace {

constexpr int GROUP = 4;                   // tokens walked back in registers
constexpr int TILES = SAVE_EVERY / TILE;   // of a chunk
constexpr int SUM_PITCH = 40;              // of a token's [dB | dC] when warps are summed: no bank conflicts

struct Warp {
  uint4 start[SAVE_EVERY / GROUP][32];  // states before each group
  uint4 exchange[GROUP][32];            // four 8 x 8 matrices a token, on their way to being transposed
  float2 step[TILES][TILE * 8];
  uint4 w[TILES][32];                   // delta * u of the lane's 2 tokens x 2 channels, split
  float4 slope[TILES][32];              // d step / d delta of the same
  uint32_t u[TILES][2][32], B[TILES][2][32];
  uint32_t in[6][32], in_C[2][32];      // staged by each lane for itself: u, delta, B; or z, dy and C
  float4 constants[32];                 // bias and D of the lane's channels
  float sums[2][TILE * SUM_PITCH];      // this warp's share of a tile's dB and dC; the other tile's may still be read
};

__global__ void __launch_bounds__(WARPS * 32, 3) backward(const __grid_constant__ ScanParams p) {
  extern __shared__ __align__(16) char dynamic[];
  if (blockIdx.y >= p.schedule.counts[0]) return;
  Warp* const warps = (Warp*)dynamic;
  const Lane l(p.channels);
  const int lane = l.lane, g = l.g, s = l.s, warp = threadIdx.x >> 5;
  Warp& m = warps[warp];
  // Which row of a token's four 8 x 8 matrices this lane addresses for ldmatrix: states 0-7 | 8-15 by even | odd channels.
  const int matrix_row = (lane & 7) + 8 * (((lane >> 3) & 1) * 2 + (lane >> 4));
  float A[2][4], dA[2][4], carry[2][4], dD[2] = {}, dbias[2] = {};
  load_decay(A, p, l);
  set_zero(dA);
  {
    const float2 bias = load_pair(p.bias, l), D = load_pair(p.D, l);
    m.constants[lane] = make_float4(bias.x, bias.y, D.x, D.y);
  }
  int turn = 0;
  const int2 item = p.schedule.items[blockIdx.y];
  for (int i = item.y - 1; i >= item.x; i--) {
    const int4 segment = p.schedule.segments[i];
    const int length = segment.y - segment.x, document = segment.z, before = segment.x - p.starts[document];
    const int64_t state = (int64_t)document * p.channels * N16;
    if (segment.w >= 0) load_state(carry, p.cut_states + (int64_t)segment.w * p.channels * N16, l);
    else if (p.dfinal) load_state(carry, p.dfinal + state, l);
    else set_zero(carry);
    if (!l.live) set_zero(carry);
    const char *u = at(p.u, segment.x, p.row_length, l.loaded), *delta = at(p.delta, segment.x, p.row_length, l.loaded);
    const char *z = p.z.data ? at(p.z, segment.x, p.row_length, l.loaded) : nullptr;
    const char* dy = at(p.dy, segment.x, p.row_length, l.loaded);
    const char *B = at(p.B, segment.x, p.row_length, 2 * s), *C = at(p.C, segment.x, p.row_length, 2 * s);
    const int64_t out = (int64_t)segment.x * p.channels + l.channel;

    // Past the end the segment's last token is read again, and masked when it is used.
    auto stage_scan = [&](int t0) {
#pragma unroll
      for (int k = 0; k < 2; k++) {
        const int t = min(t0 + s + 4 * k, length - 1);
        copy4(&m.in[k][lane], token(u, p.u, t));
        copy4(&m.in[2 + k][lane], token(delta, p.delta, t));
      }
      const char* Bt = token(B, p.B, min(t0 + l.column_token, length - 1));
      copy4(&m.in[4][lane], Bt), copy4(&m.in[5][lane], Bt + 16);
      copies_issued();
    };
    auto stage_walk = [&](int t0) {
#pragma unroll
      for (int k = 0; k < 2; k++) {
        const int t = min(t0 + s + 4 * k, length - 1);
        if (z) copy4(&m.in[k][lane], token(z, p.z, t));
        copy4(&m.in[2 + k][lane], token(dy, p.dy, t));
      }
      const char* Ct = token(C, p.C, min(t0 + l.column_token, length - 1));
      copy4(&m.in_C[0][lane], Ct), copy4(&m.in_C[1][lane], Ct + 16);
      copies_issued();
    };

    stage_scan((length - 1) / SAVE_EVERY * SAVE_EVERY);
    for (int c0 = (length - 1) / SAVE_EVERY * SAVE_EVERY; c0 >= 0; c0 -= SAVE_EVERY) {
      const int tiles = (min(SAVE_EVERY, length - c0) + TILE - 1) / TILE;
      {  // Scan.
        float h[2][4];
        uint32_t a[4];
        if (before + c0 > 0) {
          const uint4 v = *saved_state(p, segment.x - before, before + c0, l);
          a[0] = v.x, a[1] = v.y, a[2] = v.z, a[3] = v.w;
          unpack_state(h, a);
        } else if (p.initial_state) {
          load_state(h, p.initial_state + state, l);
        } else {
          set_zero(h);
        }
#pragma unroll 1
        for (int tile = 0; tile < tiles; tile++) {
          const int t0 = c0 + tile * TILE;
          copies_arrived();
          uint32_t w[2][2], Bt[2][2];
          {
            const float4 constants = m.constants[lane];
            float slope[2][2];
#pragma unroll
            for (int k = 0; k < 2; k++) {
              const bool inside = t0 + s + 4 * k < length && l.live;
              const uint32_t ut = m.in[k][lane], rd = m.in[2 + k][lane], rawB = m.in[4 + k][lane];
              float e[2];
#pragma unroll
              for (int c = 0; c < 2; c++) {
                const float x = half_of(rd, c) + (c ? constants.y : constants.x);
                if (p.softplus) {
                  float v;
                  e[c] = softplus(x, v);
                  slope[k][c] = (x >= 0.f ? 1.f : v) * rcp(1.f + v);
                } else {
                  e[c] = x, slope[k][c] = 1.f;
                }
                e[c] = inside ? e[c] : 0.f;
                w[k][c] = split(e[c] * half_of(ut, c));
              }
              m.step[tile][(s + 4 * k) * 8 + g] = make_float2(e[0], e[1]);
              m.u[tile][k][lane] = ut, m.B[tile][k][lane] = rawB;
              const uint32_t v = transposed(rawB);
              Bt[k][0] = twice(v, 0), Bt[k][1] = twice(v, 1);
            }
            m.w[tile][lane] = make_uint4(w[0][0], w[0][1], w[1][0], w[1][1]);
            m.slope[tile][lane] = make_float4(slope[0][0], slope[0][1], slope[1][0], slope[1][1]);
          }
          if (tile + 1 < tiles) stage_scan(t0 + TILE);
          else stage_walk(t0);
          __syncwarp();
#pragma unroll
          for (int k = 0; k < 2; k++) {
            pack_state(a, h);
            m.start[2 * tile + k][lane] = make_uint4(a[0], a[1], a[2], a[3]);
            if (k == 1 && tile + 1 == tiles) break;
#pragma unroll
            for (int t = 4 * k; t < 4 * k + 4; t++) advance(h, m.step[tile][t * 8 + g], A, w[k], Bt, t, s);
          }
        }
      }

#pragma unroll 1
      for (int tile = tiles - 1; tile >= 0; tile--) {  // Walk back.
        const int t0 = c0 + tile * TILE;
        copies_arrived();
        uint32_t gate[2][2], rawC[2], Ct[2][2], Bt[2][2], gate_columns[2], w_columns[2];
        float dgate[2][2];  // d out / d z, but for y
#pragma unroll
        for (int k = 0; k < 2; k++) {
          const bool inside = t0 + s + 4 * k < length && l.live;
#pragma unroll
          for (int c = 0; c < 2; c++) {
            float gt = inside ? half_of(m.in[2 + k][lane], c) : 0.f;
            if (z) {
              const float zt = half_of(m.in[k][lane], c), sz = sigmoid(zt), gs = gt * sz;
              gt = gs * zt, dgate[k][c] = gs * fmaf(zt, 1.f - sz, 1.f);
            }
            gate[k][c] = split(gt);
          }
          rawC[k] = m.in_C[k][lane];
          const uint32_t v = transposed(rawC[k]), b = transposed(m.B[tile][k][lane]);
          Ct[k][0] = twice(v, 0), Ct[k][1] = twice(v, 1), Bt[k][0] = twice(b, 0), Bt[k][1] = twice(b, 1);
        }
        if (tile > 0) stage_walk(t0 - TILE);
        else if (c0 > 0) stage_scan(c0 - SAVE_EVERY);
        const uint4 w4 = m.w[tile][lane];
        const uint32_t w[2][2] = {{w4.x, w4.y}, {w4.z, w4.w}};
#pragma unroll
        for (int c = 0; c < 2; c++) {
          gate_columns[c] = transposed(pack(low(gate[0][c]) + high(gate[0][c]), low(gate[1][c]) + high(gate[1][c])));
          w_columns[c] = transposed(pack(low(w[0][c]) + high(w[0][c]), low(w[1][c]) + high(w[1][c])));
        }
        float y[2][2], dw[2][2], dstep[2][2], dB[4], dC[4];  // of the lane's tokens: by channel; by state
#pragma unroll
        for (int k = 1; k >= 0; k--) {
          float h[GROUP][2][4], decay[GROUP][2][4];  // states before the group's tokens, and what those leave of them
          {
            const uint4 v = m.start[2 * tile + k][lane];
            const uint32_t a[4] = {v.x, v.y, v.z, v.w};
            unpack_state(h[0], a);
          }
#pragma unroll
          for (int t = 0; t < GROUP; t++) {
            const bool own = s == t;
            const float2 e = m.step[tile][(4 * k + t) * 8 + g];
            float wB[2][4], next[2][4];
#pragma unroll
            for (int q = 0; q < 2; q++) mma_outer(wB[q], w[k], own ? Bt[q][k] : 0u, 0.f, 0.f, 0.f, 0.f);
#pragma unroll
            for (int j = 0; j < 4; j++) {
              decay[t][0][j] = ex2(e.x * A[0][j]), decay[t][1][j] = ex2(e.y * A[1][j]);
              next[0][j] = fmaf(h[t][0][j], decay[t][0][j], wB[j >> 1][j & 1]);
              next[1][j] = fmaf(h[t][1][j], decay[t][1][j], wB[j >> 1][2 + (j & 1)]);
              if (t + 1 < GROUP) h[t + 1][0][j] = next[0][j], h[t + 1][1][j] = next[1][j];
            }
            uint32_t a[4];
            pack_state(a, next);
            put_quad(m.exchange[t], lane, a);
            if (z) {
              float q[4];
              mma_bf16(q, a, rawC[0], rawC[1]);
              if (own) y[k][0] = q[k], y[k][1] = q[2 + k];
            }
          }
          __syncwarp();
#pragma unroll
          for (int t = 0; t < GROUP; t++) {
            uint32_t a[4];
            float q[4];
            load_transposed(a, shared_address(m.exchange[t] + matrix_row));
            mma_bf16(q, a, gate_columns[0], gate_columns[1]);
            if (s == t) dC[k] = q[k], dC[2 + k] = q[2 + k];
          }
          __syncwarp();
#pragma unroll
          for (int t = GROUP - 1; t >= 0; t--) {
            const bool own = s == t;
            const float2 e = m.step[tile][(4 * k + t) * 8 + g];
            float x[2][4], dsum[2] = {};
#pragma unroll
            for (int q = 0; q < 2; q++) {  // x = carry + g C, the state's gradient
              float v[4];
              mma_outer(v, gate[k], own ? Ct[q][k] : 0u, carry[0][2 * q], carry[0][2 * q + 1], carry[1][2 * q],
                        carry[1][2 * q + 1]);
              x[0][2 * q] = v[0], x[0][2 * q + 1] = v[1], x[1][2 * q] = v[2], x[1][2 * q + 1] = v[3];
            }
#pragma unroll
            for (int j = 0; j < 4; j++)
#pragma unroll
              for (int c = 0; c < 2; c++) {
                carry[c][j] = x[c][j] * decay[t][c][j];
                const float v = carry[c][j] * h[t][c][j];
                dA[c][j] = fmaf(v, c ? e.y : e.x, dA[c][j]);
                dsum[c] = fmaf(v, A[c][j], dsum[c]);
              }
            uint32_t a[4];
            float q[4], r[4];
            pack_state(a, x);
            mma_bf16(q, a, m.B[tile][0][lane], m.B[tile][1][lane]);
            mma_sum4(r, dsum[0], dsum[1]);
            if (own) dw[k][0] = q[k], dw[k][1] = q[2 + k], dstep[k][0] = r[0], dstep[k][1] = r[2];
            put_quad(m.exchange[t], lane, a);
          }
          __syncwarp();
#pragma unroll
          for (int t = GROUP - 1; t >= 0; t--) {
            uint32_t a[4];
            float q[4];
            load_transposed(a, shared_address(m.exchange[t] + matrix_row));
            mma_bf16(q, a, w_columns[0], w_columns[1]);
            if (s == t) dB[k] = q[k], dB[2 + k] = q[2 + k];
          }
          __syncwarp();
        }
        float* sums = m.sums[turn] + s * SUM_PITCH + g;
#pragma unroll
        for (int k = 0; k < 2; k++) {
          sums[4 * k * SUM_PITCH] = dB[k], sums[4 * k * SUM_PITCH + 8] = dB[2 + k];
          sums[4 * k * SUM_PITCH + 16] = dC[k], sums[4 * k * SUM_PITCH + 24] = dC[2 + k];
        }
        {
          const float4 constants = m.constants[lane], slope4 = m.slope[tile][lane];
          const float slope[2][2] = {{slope4.x, slope4.y}, {slope4.z, slope4.w}};
#pragma unroll
          for (int k = 0; k < 2; k++)
            if (t0 + s + 4 * k < length && l.live) {
              const float2 e = m.step[tile][(s + 4 * k) * 8 + g];
              const uint32_t ut = m.u[tile][k][lane];
              float du[2], dd[2], dz[2];
#pragma unroll
              for (int c = 0; c < 2; c++) {
                const float v = half_of(ut, c), gt = low(gate[k][c]) + high(gate[k][c]), D = c ? constants.w : constants.z;
                dd[c] = fmaf(dw[k][c], v, dstep[k][c] * (LN2 * TF32_FIX)) * slope[k][c];
                du[c] = fmaf(dw[k][c], c ? e.y : e.x, gt * D);
                dz[c] = dgate[k][c] * fmaf(D, v, y[k][c]);
                dbias[c] += dd[c];
                dD[c] = fmaf(gt, v, dD[c]);
              }
              const int64_t o = out + (uint64_t)(uint32_t)(t0 + s + 4 * k) * (uint32_t)p.channels;
              *(uint32_t*)((bf16*)p.du + o) = pack(du[0], du[1]);
              *(uint32_t*)((bf16*)p.ddelta + o) = pack(dd[0], dd[1]);
              if (z) *(uint32_t*)((bf16*)p.dz + o) = pack(dz[0], dz[1]);
            }
        }
        __syncthreads();
#pragma unroll
        for (int o = 0; o < TILE / WARPS; o++) {  // one warp a token, one lane a column of [dB | dC]
          const int t = o * WARPS + warp;
          float v = 0.f;
#pragma unroll
          for (int n = 0; n < WARPS; n++) v += warps[n].sums[turn][t * SUM_PITCH + lane];
          if (t0 + t < length) p.partial_BC[(blockIdx.x * p.slots() + segment.x + t0 + t) * 2 * N16 + lane] = v;
        }
        turn ^= 1;
      }
    }
    if (p.dinitial && before == 0) store_state(p.dinitial + state, carry, l);
  }

  const int64_t place = (int64_t)blockIdx.y * p.channels;
  store_state(p.partial_A + place * N16, dA, l);
#pragma unroll
  for (int c = 0; c < 2; c++) {
    float a = dD[c], b = dbias[c];
    a += __shfl_xor_sync(~0u, a, 1), a += __shfl_xor_sync(~0u, a, 2);
    b += __shfl_xor_sync(~0u, b, 1), b += __shfl_xor_sync(~0u, b, 2);
    if (s == 0 && l.live) p.partial_D[place + l.channel + c] = a, p.partial_bias[place + l.channel + c] = b;
  }
}

}  // namespace

void scan16_start_states(const ScanParams& p, bool reverse, cudaStream_t stream);

void scan16_backward(const ScanParams& p, cudaStream_t stream) {
  if (p.schedule.max_cut_segments) scan16_start_states(p, true, stream);
  const dim3 grid((p.channels + BLOCK_CHANNELS - 1) / BLOCK_CHANNELS, p.schedule.max_items);
  const int bytes = WARPS * sizeof(Warp);
  cudaFuncSetAttribute(backward, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  backward<<<grid, WARPS * 32, bytes, stream>>>(p);
  scan_reduce(p, grid.x, stream);
}

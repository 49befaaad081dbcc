// Backward of the selective scan, bfloat16 with 16 states.
//
// Mapping: a block = 4 warps = 64 channels x one item of the schedule; lane layout: scan16.cuh. Segments are walked backwards in
// chunks of SAVE_EVERY tokens. A chunk is replayed from its saved state, tile by tile, its states kept in shared memory as bf16
// in the order of an MMA's A operand (they are never a recurrence's input); then its tiles are walked backwards. dB and dC, sums
// over channels, are MMAs against the states and their gradients, transposed by ldmatrix, summed over the block's warps in
// shared memory and written as one partial per block: no atomics, the same bits every time.
// Bound: issue, about 170 instructions per 16 channels' token, 4 schedulers; 0.78 ms at 16384 tokens of 4096 channels.
// Bytes: u, delta, z, dy, du, ddelta, dz once (2 each), saved states 1, partials of dB and dC 2 written and 2 read.
#include "scan16.cuh"

namespace {

constexpr int TILES = SAVE_EVERY / TILE;  // of a chunk
constexpr int SUM_PITCH = 40;             // of a token's [dB | dC] when warps are summed: no bank conflicts

struct Tile {  // by lane, but for the steps: what it knows of its 2 tokens x 2 channels
  float4 gate[32];       // gradients before the gate
  float4 slope[32];      // d step / d delta
  float2 step[TILE * 8];
  uint2 w[32];           // delta * u as bf16
  uint32_t u[2][32];
};

struct Warp {
  uint4 states[SAVE_EVERY + 1][32];  // before the chunk's first token, after it, ...: four 8 x 8 matrices each
  Tile tiles[TILES];
  uint32_t in[8][32];                // the next tile's u, delta, z, dy: staged by each lane for itself
  uint4 saved[32];                   // the next chunk's saved state
  float4 constants[8];               // bias and D of a lane group's channels
  // Once a tile has been walked, its states' place holds this warp's share of dB and dC.
  __device__ float* sums(int tile) { return (float*)states[tile * TILE + 1]; }
};

struct Block {
  Warp warps[WARPS];
  uint32_t bc[2][TILES][4][32];  // B and C of this chunk and the next, in the order of the lanes that read them
};

using Starts = float[8][32];

// COMBINES: whether any segment may have to be walked from zero too.
template <bool COMBINES, bool GATE, bool SOFTPLUS>
__global__ void __launch_bounds__(WARPS * 32, 2) backward(const __grid_constant__ ScanParams p) {
  extern __shared__ __align__(16) char dynamic[];
  let_next_start();
  const int number = blockIdx.y - 1;
  if (zero_padding(p, p.du, p.ddelta, p.dz, p.dz_token, p.y) || number >= p.schedule.counts[0]) return;
  Block& block = *(Block*)dynamic;
  const Lane l(p.channels);
  const int lane = l.lane, g = l.g, s = l.s, w = threadIdx.x >> 5;
  Warp& m = block.warps[w];
  float(*const starts)[32] = ((Starts*)(dynamic + sizeof(Block)))[w];  // the gradient that a segment starts from
  // Which row of a token's four 8 x 8 matrices this lane addresses for ldmatrix: states 0-7 | 8-15 by even | odd channels.
  const int matrix_row = (lane & 7) + 8 * (((lane >> 3) & 1) * 2 + (lane >> 4));
  float A[2][4], dA[2][4], carry[2][4], dD[2] = {}, dbias[2] = {};
  load_decay(A, p, l);
  set_zero(dA);
  {
    const float2 bias = load_pair(p.bias, l), D = load_pair(p.D, l);
    m.constants[g] = make_float4(bias.x, bias.y, D.x, D.y);
  }
  const int2 item = p.schedule.items[number];
  int parity = 0;
  for (int i = item.y - 1; i >= item.x; i--) {
    const int4 segment = p.schedule.segments[i];
    const int length = segment.y - segment.x, document = document_of(segment), before = segment.x - p.starts[document];
    const int64_t state = (int64_t)document * p.channels * N16;
    if (segment.w >= 0) load_state(carry, p.cut_states + (int64_t)segment.w * p.channels * N16, l);
    else if (segment.y < p.ends[document]) {}  // the segment behind began with it
    else if (p.dfinal) load_state(carry, p.dfinal + state, l);
    else set_zero(carry);
    if (!l.live) set_zero(carry);
    const char *u = at(p.u, segment.x, p.row_length, l.loaded), *delta = at(p.delta, segment.x, p.row_length, l.loaded);
    const char *z = GATE ? at(p.z, segment.x, p.row_length, l.loaded) : nullptr;
    const char* dy = at(p.dy, segment.x, p.row_length, l.loaded);
    const char *B = at(p.B, segment.x, p.row_length, 2 * s), *C = at(p.C, segment.x, p.row_length, 2 * s);
    const int64_t out = (int64_t)segment.x * p.channels + l.channel;
    char *const du_at = (char*)((bf16*)p.du + out), *const ddelta_at = (char*)((bf16*)p.ddelta + out);
    char* const dz_at = (char*)((bf16*)p.dz + segment.x * p.dz_token + l.channel);
    char* const y_at = (char*)((bf16*)p.y + out);
    float* const partial = p.partial_BC + (blockIdx.x * p.slots() + segment.x) * 2 * N16 + lane;

    // Past the end the segment's last token is read again, and masked when it is used.
    auto stage = [&](int t0) {
#pragma unroll
      for (int k = 0; k < 2; k++) {
        const int t = min(t0 + s + 4 * k, length - 1);
        copy4(&m.in[k][lane], token(u, p.u, t));
        copy4(&m.in[2 + k][lane], token(delta, p.delta, t));
        if (GATE) copy4(&m.in[4 + k][lane], token(z, p.z, t));
        copy4(&m.in[6 + k][lane], token(dy, p.dy, t));
      }
      copies_issued();
    };

    auto stage_chunk = [&](int c0) {  // B and C for the whole block, a tile a warp
      static_assert(TILES == WARPS);
      parity ^= 1;
      const int t = min(c0 + TILE * w + l.column_token, length - 1);
      const char *Bt = token(B, p.B, t), *Ct = token(C, p.C, t);
#pragma unroll
      for (int q = 0; q < 2; q++) {
        copy4(&block.bc[parity][w][q][lane], Bt + 16 * q);
        copy4(&block.bc[parity][w][2 + q][lane], Ct + 16 * q);
      }
      if (before + c0 > 0) copy16(&m.saved[lane], saved_state(p, segment.x - before, before + c0, l));
      stage(c0);
    };
    auto walk_segment = [&](auto combined) {
      constexpr bool COMBINED = decltype(combined)::value;
      float zero[2][4], sum[2] = {};
      set_zero(zero);
      if (COMBINED)
#pragma unroll
        for (int j = 0; j < 8; j++) starts[j][lane] = carry[j >> 2][j & 3];
      stage_chunk((length - 1) / SAVE_EVERY * SAVE_EVERY);
      for (int c0 = (length - 1) / SAVE_EVERY * SAVE_EVERY; c0 >= 0; c0 -= SAVE_EVERY) {
        const int tiles = (min(SAVE_EVERY, length - c0) + TILE - 1) / TILE;
        const auto& bc = block.bc[parity];
        {  // Replay.
          float h[2][4];
          uint32_t a[4];
          copies_arrived();
          if (before + c0 > 0) {
            const uint4 v = m.saved[lane];
            a[0] = v.x, a[1] = v.y, a[2] = v.z, a[3] = v.w;
            unpack_state(h, a);
          } else {
            if (p.initial_state) load_state(h, p.initial_state + state, l);
            else set_zero(h);
            pack_state(a, h);
            if (COMBINES && segment.z & STARTS_AT_CUT) unpack_state(h, a);  // as a pass that was not split has it saved
          }
          __syncthreads();  // other warps have summed the previous chunk; B and C are there
          put_quad(m.states[0], lane, a);
          for (int tile = 0; tile < tiles; tile++) {
            const int t0 = c0 + tile * TILE;
            Tile& here = m.tiles[tile];
            copies_arrived();
            uint32_t wt[2][2], Bt[2][2], rawC[2], ut[2];
            float dgate[2][2], silu[2][2];  // d out / d z and out, but for the ungated y
            {
              const float4 constants = m.constants[g];
              float gate[2][2], slope[2][2], w[2][2];
#pragma unroll
              for (int k = 0; k < 2; k++) {
                const bool inside = t0 + s + 4 * k < length && l.live;
                const uint32_t rz = m.in[4 + k][lane], rg = m.in[6 + k][lane], rd = m.in[2 + k][lane];
                ut[k] = m.in[k][lane];
                float e[2];
#pragma unroll
                for (int c = 0; c < 2; c++) {
                  const float x = half_of(rd, c) + (c ? constants.y : constants.x), dyt = inside ? half_of(rg, c) : 0.f;
                  if (SOFTPLUS) {
                    float v;
                    e[c] = softplus(x, v);
                    slope[k][c] = (x >= 0.f ? 1.f : v) * rcp(1.f + v);
                  } else {
                    e[c] = x, slope[k][c] = 1.f;
                  }
                  e[c] = inside ? e[c] : 0.f;
                  w[k][c] = e[c] * half_of(ut[k], c);
                  wt[k][c] = split(w[k][c]);
                  float gt = dyt;
                  if (GATE) {
                    const float zt = half_of(rz, c), sz = sigmoid(zt), gs = dyt * sz;
                    gt = gs * zt, dgate[k][c] = gs * fmaf(zt, 1.f - sz, 1.f), silu[k][c] = sz * zt;
                  }
                  gate[k][c] = gt;
                }
                here.step[(s + 4 * k) * 8 + g] = make_float2(e[0], e[1]);
                here.u[k][lane] = ut[k];
              }
              here.gate[lane] = make_float4(gate[0][0], gate[0][1], gate[1][0], gate[1][1]);
              here.w[lane] = make_uint2(pack(w[0][0], w[1][0]), pack(w[0][1], w[1][1]));
              here.slope[lane] = make_float4(slope[0][0], slope[0][1], slope[1][0], slope[1][1]);
            }
#pragma unroll
            for (int q = 0; q < 2; q++) {
              rawC[q] = bc[tile][2 + q][lane];
              const uint32_t v = transposed(bc[tile][q][lane]);
              Bt[q][0] = twice(v, 0), Bt[q][1] = twice(v, 1);
            }
            if (tile + 1 < tiles) stage(t0 + TILE);
            else if (c0 > 0) stage_chunk(c0 - SAVE_EVERY);
            __syncwarp();

            float2 e[TILE];
            float y[2][2];
#pragma unroll
            for (int t = 0; t < TILE; t++) e[t] = here.step[t * 8 + g];
#pragma unroll
            for (int t = 0; t < TILE; t++) {
              const int k = t >> 2;
              const bool own = s == (t & 3);
              advance<false>(h, h, e[t], A, wt[k], Bt, t, s);
              pack_state(a, h);
              put_quad(m.states[tile * TILE + t + 1], lane, a);
              if (GATE) {
                float q[4];
                mma_bf16(q, a, rawC[0], rawC[1]);
                if (own) y[k][0] = q[k], y[k][1] = q[2 + k];
              }
            }
            if (GATE) {
              const float4 constants = m.constants[g];
#pragma unroll
              for (int k = 0; k < 2; k++)
                if (t0 + s + 4 * k < length && l.live) {
                  const uint64_t t = t0 + s + 4 * k;
                  const float y0 = fmaf(constants.z, low(ut[k]), y[k][0]), y1 = fmaf(constants.w, high(ut[k]), y[k][1]);
                  *(uint32_t*)(dz_at + t * (uint32_t)(2 * p.dz_token)) = pack(dgate[k][0] * y0, dgate[k][1] * y1);
                  if (p.y) *(uint32_t*)(y_at + t * (uint32_t)(2 * p.channels)) = pack(silu[k][0] * y0, silu[k][1] * y1);
                }
            }
          }
        }

        for (int tile = tiles - 1; tile >= 0; tile--) {  // Walk back.
          const int t0 = c0 + tile * TILE;
          Tile& here = m.tiles[tile];
          if (COMBINED) {
#pragma unroll
            for (int k = 0; k < 2; k++) {
              const float2 e = here.step[(s + 4 * k) * 8 + g];
              sum[0] += e.x, sum[1] += e.y;
            }
          }
          uint32_t gate[2][2], Ct[2][2], rawB[2], gate_columns[2], w_columns[2];
          {
            const float4 gate4 = here.gate[lane];
            const uint2 w = here.w[lane];
            gate[0][0] = split(gate4.x), gate[0][1] = split(gate4.y), gate[1][0] = split(gate4.z), gate[1][1] = split(gate4.w);
            gate_columns[0] = transposed(pack(gate4.x, gate4.z)), gate_columns[1] = transposed(pack(gate4.y, gate4.w));
            w_columns[0] = transposed(w.x), w_columns[1] = transposed(w.y);
#pragma unroll
            for (int q = 0; q < 2; q++) {
              rawB[q] = bc[tile][q][lane];
              const uint32_t v = transposed(bc[tile][2 + q][lane]);
              Ct[q][0] = twice(v, 0), Ct[q][1] = twice(v, 1);
            }
          }
          float dw[2][2], dstep[2][2], dB[4], dC[4];  // of the lane's tokens: by channel; by state
          __syncwarp();
          // A half tile's shared reads stand between the other half's arithmetic, so that neither waits.
          float2 e[2][4];
          uint32_t before_t[2][4][4];
          auto read_states = [&](int k) {  // and dC from them
            const uint4* const slots = m.states[tile * TILE + 4 * k];
#pragma unroll
            for (int t = 0; t < 4; t++) e[k][t] = here.step[(4 * k + t) * 8 + g];
#pragma unroll
            for (int t = 0; t < 4; t++) {
              uint32_t a[4];
              float q[4];
              get_quad(before_t[k][t], slots + t * 32, lane);
              load_transposed(a, shared_address(slots + (t + 1) * 32 + matrix_row));
              mma_bf16(q, a, gate_columns[0], gate_columns[1]);
              if (s == t) dC[k] = q[k], dC[2 + k] = q[2 + k];
            }
          };
          auto walk = [&](int k) {  // the states' gradients take the places of the states after a token
            uint4* const slots = m.states[tile * TILE + 4 * k];
#pragma unroll
            for (int t = 3; t >= 0; t--) {
              const bool own = s == t;
              uint32_t a[4];
              float h[2][4], x[2][4], dsum[2] = {};
              unpack_state(h, before_t[k][t]);
#pragma unroll
              for (int q = 0; q < 2; q++) {  // x = carry + g C, the state's gradient
                float v[4];
                mma_outer(v, gate[k], own ? Ct[q][k] : 0u, carry[0][2 * q], carry[0][2 * q + 1], carry[1][2 * q],
                          carry[1][2 * q + 1]);
                x[0][2 * q] = v[0], x[0][2 * q + 1] = v[1], x[1][2 * q] = v[2], x[1][2 * q + 1] = v[3];
                if (COMBINED) {
                  mma_outer(v, gate[k], own ? Ct[q][k] : 0u, zero[0][2 * q], zero[0][2 * q + 1], zero[1][2 * q],
                            zero[1][2 * q + 1]);
                  zero[0][2 * q] = v[0], zero[0][2 * q + 1] = v[1], zero[1][2 * q] = v[2], zero[1][2 * q + 1] = v[3];
                }
              }
#pragma unroll
              for (int j = 0; j < 4; j++)
#pragma unroll
                for (int c = 0; c < 2; c++) {
                  const float et = c ? e[k][t].y : e[k][t].x, a = ex2(et * A[c][j]);
                  carry[c][j] = x[c][j] * a;
                  if (COMBINED) zero[c][j] *= a;
                  const float v = carry[c][j] * h[c][j];
                  dA[c][j] = fmaf(v, et, dA[c][j]);
                  dsum[c] = fmaf(v, A[c][j], dsum[c]);
                }
              float q[4], r[4];
              pack_state(a, x);
              mma_bf16(q, a, rawB[0], rawB[1]);
              mma_sum4(r, dsum[0], dsum[1], LN2_TF32);
              if (own) dw[k][0] = q[k], dw[k][1] = q[2 + k], dstep[k][0] = r[0], dstep[k][1] = r[2];
              put_quad(slots + (t + 1) * 32, lane, a);
            }
          };
          auto sum_B = [&](int k) {
            const uint4* const slots = m.states[tile * TILE + 4 * k];
#pragma unroll
            for (int t = 3; t >= 0; t--) {
              uint32_t a[4];
              float q[4];
              load_transposed(a, shared_address(slots + (t + 1) * 32 + matrix_row));
              mma_bf16(q, a, w_columns[0], w_columns[1]);
              if (s == t) dB[k] = q[k], dB[2 + k] = q[2 + k];
            }
          };
          read_states(1);
          __syncwarp();
          walk(1);
          __syncwarp();
          sum_B(1), read_states(0);
          __syncwarp();
          walk(0);
          __syncwarp();
          sum_B(0);
          __syncwarp();
          float* sums = m.sums(tile) + s * SUM_PITCH + g;
#pragma unroll
          for (int k = 0; k < 2; k++) {
            sums[4 * k * SUM_PITCH] = dB[k], sums[4 * k * SUM_PITCH + 8] = dB[2 + k];
            sums[4 * k * SUM_PITCH + 16] = dC[k], sums[4 * k * SUM_PITCH + 24] = dC[2 + k];
          }
          {
            const float4 constants = m.constants[g], slope4 = here.slope[lane], gate4 = here.gate[lane];
            const float gate[2][2] = {{gate4.x, gate4.y}, {gate4.z, gate4.w}};
            const float slope[2][2] = {{slope4.x, slope4.y}, {slope4.z, slope4.w}};
#pragma unroll
            for (int k = 0; k < 2; k++)
              if (t0 + s + 4 * k < length && l.live) {
                const float2 e = here.step[(s + 4 * k) * 8 + g];
                const uint32_t ut = here.u[k][lane];
                float du[2], dd[2];
#pragma unroll
                for (int c = 0; c < 2; c++) {
                  const float v = half_of(ut, c), gt = gate[k][c];
                  dd[c] = fmaf(dw[k][c], v, dstep[k][c]) * slope[k][c];
                  du[c] = fmaf(dw[k][c], c ? e.y : e.x, gt * (c ? constants.w : constants.z));
                  dbias[c] += dd[c];
                  dD[c] = fmaf(gt, v, dD[c]);
                }
                const uint64_t o = (uint64_t)(uint32_t)(t0 + s + 4 * k) * (uint32_t)(2 * p.channels);
                *(uint32_t*)(du_at + o) = pack(du[0], du[1]);
                *(uint32_t*)(ddelta_at + o) = pack(dd[0], dd[1]);
              }
          }
        }
        __syncthreads();
        float* const partials = partial + (uint64_t)(uint32_t)(c0 + w) * (2 * N16);
        auto sum_warps = [&](int t) {  // one warp a token, one lane a column of [dB | dC]
          float v = 0.f;
#pragma unroll
          for (int i = 0; i < WARPS; i++) v += block.warps[i].sums(t / TILE)[(t % TILE + w) * SUM_PITCH + lane];
          partials[t * 2 * N16] = v;
        };
        if (c0 + SAVE_EVERY <= length) {
#pragma unroll
          for (int t = 0; t < SAVE_EVERY; t += WARPS) sum_warps(t);
        } else {
          for (int t = 0; c0 + w + t < length; t += WARPS) sum_warps(t);
        }
      }
      if (COMBINED) {
        float start[2][4];
#pragma unroll
        for (int j = 0; j < 8; j++) start[j >> 2][j & 3] = starts[j][lane];
        combine_segment(carry, start, zero, sum, A);
      }
    };
    if (COMBINES && segment.z & STARTS_AT_CUT && (before > 0 ? segment.w < 0 : p.dinitial != nullptr)) walk_segment(Switch<COMBINES>());
    else walk_segment(Switch<false>());
    if (p.dinitial && before == 0) store_state(p.dinitial + state, carry, l);
  }

  const int64_t place = (int64_t)number * p.channels;
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
  const dim3 grid((p.channels + BLOCK_CHANNELS - 1) / BLOCK_CHANNELS, p.schedule.max_items + 1);
  constexpr int bytes = sizeof(Block) + WARPS * sizeof(Starts);
  static_assert(bytes <= 113 * 1024);  // BACKWARD_SHARED_BYTES in packmamba/ops/scan.py
  with_switches(p, [&](auto gate, auto softplus) {
    constexpr bool G = decltype(gate)::value, S = decltype(softplus)::value;
    const auto kernel = p.schedule.combines ? backward<true, G, S> : backward<false, G, S>;
    cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
    kernel<<<grid, WARPS * 32, bytes, stream>>>(p);
  });
  scan_reduce(p, grid.x, stream);
}

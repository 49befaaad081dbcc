// Backward of the packed depthwise convolution.
//
// Mapping: as the forward, tiles walked forward; the pre-activation is computed again; g, its gradient, stays in registers for W
// slots, and an input's gradient is whole W - 1 slots later. Past its end a tile goes on for W - 1 slots of the same document to
// finish its own. dweight and dbias: in registers over a tile, over a block's warps in shared memory, over blocks by a second
// kernel, in a fixed order: no atomics.
// Bound: bytes. Bytes: x and dy read once (and 2 (W - 1) slots a tile again, from L2), dx written once, 20 per 256 slots of partials.
#include "conv1d.cuh"

namespace {

constexpr int GROUP = 8;  // slots whose loads are issued together; at least W - 1
constexpr int VECTOR = 2;

// One slot: g from its pre-activation, then the gradient of the input W - 1 slots before, and, of own slots, of the parameters.
template <int W, int V> struct Slot {
  float weight[W][V], bias[V], x[W - 1][V], g[W - 1][V], dweight[W][V] = {}, dbias[V] = {};  // x, g: of the last W - 1 slots

  __device__ __forceinline__ void advance(float (&dx)[V], const float (&now)[V], const float (&dy)[V], bool silu, bool own) {
#pragma unroll
    for (int c = 0; c < V; c++) {
      float gt = dy[c];
      if (silu) {
        float pre = fmaf(weight[W - 1][c], now[c], bias[c]);
#pragma unroll
        for (int k = 0; k < W - 1; k++) pre = fmaf(weight[k][c], x[k][c], pre);
        const float s = fast_sigmoid(pre);
        gt *= s * fmaf(pre, 1.f - s, 1.f);
      }
      if (own) {
        dbias[c] += gt;
        dweight[W - 1][c] = fmaf(gt, now[c], dweight[W - 1][c]);
#pragma unroll
        for (int k = 0; k < W - 1; k++) dweight[k][c] = fmaf(gt, x[k][c], dweight[k][c]);
      }
      retire(dx, gt, now[c], c);
    }
  }
  __device__ __forceinline__ void retire(float (&dx)[V], float gt, float now, int c) {
    dx[c] = weight[0][c] * gt;
#pragma unroll
    for (int k = 0; k < W - 1; k++) {
      dx[c] = fmaf(weight[W - 1 - k][c], g[k][c], dx[c]);
      const int n = k + 1 < W - 1 ? k + 1 : 0;
      g[k][c] = k + 1 < W - 1 ? g[n][c] : gt, x[k][c] = k + 1 < W - 1 ? x[n][c] : now;
    }
  }
};

template <int W, int V> __device__ __forceinline__ void clear(float (&v)[W][V]) {
#pragma unroll
  for (int k = 0; k < W; k++)
#pragma unroll
    for (int c = 0; c < V; c++) v[k][c] = 0.f;
}

template <class T, int W, int V>
__global__ void __launch_bounds__(32 * TILES_PER_BLOCK, 6) backward(const __grid_constant__ ConvParams p) {
  __shared__ float sums[TILES_PER_BLOCK][32 * V];
  const int lane = threadIdx.x & 31, channel = (blockIdx.y * 32 + lane) * V;
  const Tile tile(p);
  Slot<W, V> slot;
  if (channel < p.channels && tile.index >= 0) {
    Walk walk(p, p.schedule.tile_documents[tile.index]);
    const T* x = row_base<T>(p.x, tile.first, p.row_length, channel);
    const T* dy = row_base<T>(p.dy, tile.first, p.row_length, channel);
    T* dx = (T*)p.dx + channel;
    load_weight<W, V>(slot.weight, slot.bias, p, channel);
    load_window<T, W, V>(slot.x, p, walk, tile.first, channel, x);
    auto finish = [&](float (&v)[V], int t) {  // a slot whose sum is whole, if it is this tile's
      if (t < tile.first || t >= tile.end || t < walk.start) return;
      const int k = t - (walk.end - (W - 1));
      if (p.dfinal && k >= 0)
#pragma unroll
        for (int c = 0; c < V; c++)
          v[c] += p.dfinal[((int64_t)walk.document * p.channels + channel + c) * (W - 1) + k];
      store(dx + (int64_t)t * p.dx_token, v);
    };
    for (int t0 = tile.first; t0 < tile.end; t0 += GROUP) {
      walk.reach(t0);
      const bool opens = t0 == tile.first;  // inputs before it are another tile's
      const int whole_from = opens ? t0 : t0 - (W - 1);
      if (walk.start <= whole_from && t0 + GROUP <= min(tile.end, walk.end - (W - 1))) {
        Vector<T, V> group_x[GROUP], group_dy[GROUP];
        load_group(group_x, x, p.x, t0), load_group(group_dy, dy, p.dy, t0);
        if (opens) clear(slot.g);
        T* to = dx + (int64_t)(t0 - (W - 1)) * p.dx_token;
#pragma unroll
        for (int i = 0; i < GROUP; i++) {
          float now[V], gy[V], whole[V];
          unpack(now, group_x[i]), unpack(gy, group_dy[i]);
          slot.advance(whole, now, gy, p.silu, true);
          if (i >= W - 1 || !opens) store(to + (int64_t)i * p.dx_token, whole);
        }
        continue;
      }
#pragma unroll 1
      for (int t = t0; t < min(t0 + GROUP, tile.end); t++) {
        walk.reach(t);
        float now[V], gy[V], whole[V] = {};
        if (t < walk.start) {  // padding
          store(dx + (int64_t)t * p.dx_token, whole);
          continue;
        }
        load(now, at_slot(x, p.x, t)), load(gy, at_slot(dy, p.dy, t));
        if (t == walk.start && t > tile.first) load_window<T, W, V>(slot.x, p, walk, t, channel, x);
        if (t == walk.start || t == tile.first) clear(slot.g);
        slot.advance(whole, now, gy, p.silu, true);
        finish(whole, t - (W - 1));
        if (t == walk.end - 1)
          for (int k = 0; k < W - 1; k++) {
#pragma unroll
            for (int c = 0; c < V; c++) slot.retire(whole, 0.f, 0.f, c);
            finish(whole, t - (W - 2) + k);
          }
      }
    }
    if (walk.start < tile.end && walk.end > tile.end) {  // the last document goes on: what its next slots owe the tile's last
      float now[W - 1][V] = {}, gy[W - 1][V] = {}, whole[V];
#pragma unroll
      for (int k = 0; k < W - 1; k++)
        if (tile.end + k < walk.end) load(now[k], at_slot(x, p.x, tile.end + k)), load(gy[k], at_slot(dy, p.dy, tile.end + k));
#pragma unroll
      for (int k = 0; k < W - 1; k++) {
        slot.advance(whole, now[k], gy[k], p.silu, false);
        finish(whole, tile.end + k - (W - 1));
      }
    }
  }
  // The block's share of dweight and dbias: (W + 1, D).
  for (int k = 0; k <= W; k++) {
#pragma unroll
    for (int c = 0; c < V; c++) {
      float v = slot.dbias[c];
#pragma unroll
      for (int j = 0; j < W; j++) v = j == k ? slot.dweight[j][c] : v;
      sums[threadIdx.x >> 5][lane * V + c] = v;
    }
    __syncthreads();
    for (int i = threadIdx.x; i < 32 * V; i += blockDim.x) {
      float v = 0.f;
      for (int w = 0; w < TILES_PER_BLOCK; w++) v += sums[w][i];
      const int c = blockIdx.y * 32 * V + i;
      if (c < p.channels) p.partial[((int64_t)blockIdx.x * (W + 1) + k) * p.channels + c] = v;
    }
    __syncthreads();
  }
}

// One thread a tap (or bias) and channel, over the blocks of tiles in order.
__global__ void __launch_bounds__(256) reduce(const __grid_constant__ ConvParams p, int blocks) {
  const int64_t i = (int64_t)blockIdx.x * 256 + threadIdx.x, stride = (int64_t)(p.width + 1) * p.channels;
  if (i >= stride) return;
  float v = 0.f;
#pragma unroll 8
  for (int b = 0; b < blocks; b++) v += p.partial[b * stride + i];
  const int k = i / p.channels, channel = i % p.channels;
  if (k < p.width) p.dweight[(int64_t)channel * p.width + k] = v;
  else if (p.dbias) p.dbias[channel] = v;
}

// One thread a document and channel: g of its first W - 1 slots, and a short document's part of the final state.
template <class T> __global__ void initial_states(const __grid_constant__ ConvParams p) {
  const int channel = blockIdx.x * blockDim.x + threadIdx.x, W = p.width;
  if (channel >= p.channels) return;
  float weight[4];
  for (int k = 0; k < W; k++) weight[k] = p.weight[(int64_t)channel * W + k];
  for (int d = blockIdx.y; d < p.documents; d += gridDim.y) {
    const int start = p.starts[d], length = p.ends[d] - start;
    const T* x = row_base<T>(p.x, start, p.row_length, channel);
    const T* dy = row_base<T>(p.dy, start, p.row_length, channel);
    const int64_t state = ((int64_t)d * p.channels + channel) * (W - 1);
    float out[3] = {};
    for (int t = 0; t < min(length, W - 1); t++) {
      float g = to_float(*at_slot(dy, p.dy, start + t));
      if (p.silu) {
        float pre = p.bias ? p.bias[channel] : 0.f;
        for (int k = 0; k < W; k++) {
          const int place = t - (W - 1) + k;
          const float v = place >= 0 ? to_float(*at_slot(x, p.x, start + place))
                                     : p.initial_state[state + W - 1 + place];
          pre = fmaf(weight[k], v, pre);
        }
        const float s = fast_sigmoid(pre);
        g *= s * fmaf(pre, 1.f - s, 1.f);
      }
      for (int k = t; k < W - 1; k++) out[k] = fmaf(weight[k - t], g, out[k]);
    }
    for (int k = 0; k < W - 1; k++) {
      if (p.dfinal && k >= length) out[k] += p.dfinal[state + k - length];
      p.dinitial[state + k] = out[k];
    }
  }
}

}  // namespace

int64_t conv_blocks(int rows, int row_length) {
  const int64_t tiles = (int64_t)rows * ((row_length + CONV_TILE - 1) / CONV_TILE);
  return (tiles + TILES_PER_BLOCK - 1) / TILES_PER_BLOCK;
}

void conv_backward(const ConvParams& p, cudaStream_t stream) {
  with_shape<VECTOR>(p, [&](auto t, auto width, auto vector) {
    constexpr int W = decltype(width)::value, V = decltype(vector)::value;
    backward<decltype(t), W, V><<<conv_grid(p, V), 32 * TILES_PER_BLOCK, 0, stream>>>(p);
  });
  const int64_t sums = (int64_t)(p.width + 1) * p.channels;
  reduce<<<(sums + 255) / 256, 256, 0, stream>>>(p, conv_blocks(p.rows, p.row_length));
  if (p.dinitial && p.documents)
    with_dtype(p.dtype, [&](auto t) {
      const dim3 grid((p.channels + 127) / 128, min(p.documents, 65535));
      initial_states<decltype(t)><<<grid, 128, 0, stream>>>(p);
    });
}

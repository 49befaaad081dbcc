// Backward of the packed depthwise convolution.
//
// Mapping: as the forward, tiles walked forward; the pre-activation is computed again, and g, its gradient, is spread over the
// inputs of the last W slots, whose sums wait in registers until they are whole. Past its end a tile goes on for W - 1 slots of
// the same document to finish its own. dweight and dbias: in registers over a tile, over a block's warps in shared memory, over
// blocks by a second kernel, in a fixed order: no atomics.
// Bound: bytes. Bytes: x and dy read once (and 2 (W - 1) slots a tile again, from L2), dx written once, 20 per 256 slots of partials.
#include "conv1d.cuh"

namespace {

constexpr int LOADS = 8;

template <class T, int W, int V>
__global__ void __launch_bounds__(32 * TILES_PER_BLOCK) backward(const __grid_constant__ ConvParams p) {
  __shared__ float sums[TILES_PER_BLOCK][32 * V];
  const int lane = threadIdx.x & 31, channel = (blockIdx.y * 32 + lane) * V;
  const bool live = channel < p.channels;
  const Tile tile(p);
  float dweight[W][V] = {}, dbias[V] = {};
  if (live && tile.index >= 0) {
    Walk walk(p, p.schedule.tile_documents[tile.index]);
    const T* x = row_base<T>(p.x, tile.first, p.row_length, channel);
    const T* dy = row_base<T>(p.dy, tile.first, p.row_length, channel);
    T* dx = (T*)p.dx + channel;
    float weight[W][V], bias[V], window[W - 1][V], waiting[W - 1][V] = {};  // of the inputs of slots t - (W - 1), ..., t - 1
    load_weight<W, V>(weight, bias, p, channel);
    load_window<T, W, V>(window, p, walk, tile.first, channel, x);

    auto finish = [&](float (&v)[V], int t) {  // a slot whose sum is whole
      if (t < tile.first || t >= tile.end || t < walk.start) return;
      const int k = t - (walk.end - (W - 1));
      if (p.dfinal && k >= 0)
#pragma unroll
        for (int c = 0; c < V; c++)
          v[c] += p.dfinal[((int64_t)walk.document * p.channels + channel + c) * (W - 1) + k];
      store(dx + (int64_t)t * p.channels, v);
    };
    // Whether slot t is still this tile's business: its own, or of the document that holds its last slot.
    const int row_end = (tile.first / p.row_length + 1) * p.row_length, reach = min(tile.end + W - 1, row_end);
    bool going = true;
    for (int t0 = tile.first; going && t0 < reach; t0 += LOADS) {
      Vector<T, V> next_x[LOADS], next_dy[LOADS];
#pragma unroll
      for (int i = 0; i < LOADS; i++)
        if (t0 + i < reach) {
          next_x[i] = *(const Vector<T, V>*)at_slot(x, p.x, t0 + i);
          next_dy[i] = *(const Vector<T, V>*)at_slot(dy, p.dy, t0 + i);
        }
#pragma unroll
      for (int i = 0; i < LOADS; i++) {
        const int t = t0 + i;
        if (!going || t >= reach) break;
        if (t >= tile.end && t >= walk.end) {
          going = false;
          break;
        }
        walk.reach(t);
        if (t < walk.start) {  // padding
          if (t >= tile.end) {
            going = false;
            break;
          }
          const float zero[V] = {};
          store(dx + (int64_t)t * p.channels, zero);
          continue;
        }
        if (t == walk.start) {
          if (t > tile.first) load_window<T, W, V>(window, p, walk, t, channel, x);
#pragma unroll
          for (int k = 0; k < W - 1; k++)
#pragma unroll
            for (int c = 0; c < V; c++) waiting[k][c] = 0.f;
        }
        float whole[V];
        const bool own = t < tile.end;
#pragma unroll
        for (int c = 0; c < V; c++) {
          const float now = to_float(next_x[i].v[c]);
          float g = to_float(next_dy[i].v[c]);
          if (p.silu) {
            float pre = fmaf(weight[W - 1][c], now, bias[c]);
#pragma unroll
            for (int k = 0; k < W - 1; k++) pre = fmaf(weight[k][c], window[k][c], pre);
            const float s = fast_sigmoid(pre);
            g *= s * fmaf(pre, 1.f - s, 1.f);
          }
          if (own) {
            dbias[c] += g;
            dweight[W - 1][c] = fmaf(g, now, dweight[W - 1][c]);
#pragma unroll
            for (int k = 0; k < W - 1; k++) dweight[k][c] = fmaf(g, window[k][c], dweight[k][c]);
          }
          whole[c] = fmaf(weight[0][c], g, waiting[0][c]);
#pragma unroll
          for (int k = 0; k < W - 1; k++) {
            waiting[k][c] = k + 1 < W - 1 ? fmaf(weight[k + 1][c], g, waiting[k + 1 < W - 1 ? k + 1 : 0][c]) : weight[W - 1][c] * g;
            window[k][c] = k + 1 < W - 1 ? window[k + 1 < W - 1 ? k + 1 : 0][c] : now;
          }
        }
        finish(whole, t - (W - 1));
        if (t == walk.end - 1)
#pragma unroll
          for (int k = 0; k < W - 1; k++) finish(waiting[k], t - (W - 2) + k);
      }
    }
  }
  // The block's share of dweight and dbias: (W + 1, D).
  for (int k = 0; k <= W; k++) {
#pragma unroll
    for (int c = 0; c < V; c++) {
      float v = dbias[c];
#pragma unroll
      for (int j = 0; j < W; j++) v = j == k ? dweight[j][c] : v;
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
  with_shape(p, [&](auto t, auto width, auto vector) {
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

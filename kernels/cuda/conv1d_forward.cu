// Forward of the packed depthwise convolution, and its final states.
//
// Mapping: a warp = one tile of CONV_TILE slots x 32 lanes of V channels, V = 4 where alignment allows; the last W - 1 inputs in
// registers, the loads of a group of slots issued together. Document boundaries are uniform over the warp: groups without one run
// without looking, in others the window is reset by selection.
// Bound: bytes. Bytes: x read once (and W - 1 slots a tile again, from L2), y written once, 4 per tile for the schedule.
#include "conv1d.cuh"

namespace {

constexpr int GROUP = 8;  // slots whose loads are issued together
constexpr int VECTOR = 4;

template <int W, int V>
__device__ __forceinline__ void output(float (&out)[V], const float (&weight)[W][V], const float (&bias)[V],
                                       float (&window)[W - 1][V], const float (&now)[V], bool silu) {
#pragma unroll
  for (int c = 0; c < V; c++) {
    out[c] = fmaf(weight[W - 1][c], now[c], bias[c]);
#pragma unroll
    for (int k = 0; k < W - 1; k++) {
      out[c] = fmaf(weight[k][c], window[k][c], out[c]);
      window[k][c] = k + 1 < W - 1 ? window[k + 1 < W - 1 ? k + 1 : 0][c] : now[c];
    }
    if (silu) out[c] *= fast_sigmoid(out[c]);
  }
}

template <class T, int W, int V>
__global__ void __launch_bounds__(32 * TILES_PER_BLOCK, 6) forward(const __grid_constant__ ConvParams p) {
  const int channel = (blockIdx.y * 32 + (threadIdx.x & 31)) * V;
  const Tile tile(p);
  if (channel >= p.channels || tile.index < 0) return;
  Walk walk(p, p.schedule.tile_documents[tile.index]);
  const T* x = row_base<T>(p.x, tile.first, p.row_length, channel);
  T* y = (T*)p.y + (int64_t)tile.first * p.channels + channel;
  float weight[W][V], bias[V], window[W - 1][V];
  load_weight<W, V>(weight, bias, p, channel);
  load_window<T, W, V>(window, p, walk, tile.first, channel, x);
  for (int t0 = tile.first; t0 < tile.end; t0 += GROUP, y += (int64_t)GROUP * p.channels) {
    walk.reach(t0);
    if (walk.start < t0 + (t0 == tile.first) && t0 + GROUP <= min(walk.end, tile.end)) {
      Vector<T, V> group[GROUP];
      load_group(group, x, p.x, t0);
#pragma unroll
      for (int i = 0; i < GROUP; i++) {
        float now[V], out[V];
        unpack(now, group[i]);
        output<W, V>(out, weight, bias, window, now, p.silu);
        store(y + (int64_t)i * p.channels, out);
      }
    } else {
#pragma unroll 1
      for (int i = 0; i < min(GROUP, tile.end - t0); i++) {
        const int t = t0 + i;
        walk.reach(t);
        float now[V], out[V] = {};
        if (t >= walk.start) {
          load(now, at_slot(x, p.x, t));
          if (t == walk.start && t > tile.first) load_window<T, W, V>(window, p, walk, t, channel, x);
          output<W, V>(out, weight, bias, window, now, p.silu);
        }
        store(y + (int64_t)i * p.channels, out);
      }
    }
  }
}

// One thread a document and channel.
template <class T> __global__ void final_states(const __grid_constant__ ConvParams p) {
  const int channel = blockIdx.x * blockDim.x + threadIdx.x, W = p.width;
  if (channel >= p.channels) return;
  for (int d = blockIdx.y; d < p.documents; d += gridDim.y) {
    const int start = p.starts[d], length = p.ends[d] - start;
    const T* x = row_base<T>(p.x, start, p.row_length, channel);
    const int64_t state = ((int64_t)d * p.channels + channel) * (W - 1);
    for (int k = 0; k < W - 1; k++) {
      const int place = length - (W - 1) + k;
      float v = 0.f;
      if (place >= 0) v = to_float(*at_slot(x, p.x, start + place));
      else if (p.initial_state) v = p.initial_state[state + length + k];
      p.final_state[state + k] = v;
    }
  }
}

}  // namespace

void conv_forward(const ConvParams& p, cudaStream_t stream) {
  with_shape<VECTOR>(p, [&](auto t, auto width, auto vector) {
    constexpr int W = decltype(width)::value, V = decltype(vector)::value;
    forward<decltype(t), W, V><<<conv_grid(p, V), 32 * TILES_PER_BLOCK, 0, stream>>>(p);
  });
  if (p.final_state && p.documents)
    with_dtype(p.dtype, [&](auto t) {
      const dim3 grid((p.channels + 127) / 128, min(p.documents, 65535));
      final_states<decltype(t)><<<grid, 128, 0, stream>>>(p);
    });
}

// The selective scan over packed documents: what its forward and its backward share.
//   dt = softplus(delta + bias);  h_t = exp(dt A) h_{t-1} + dt u B_t;
//   y_t = (C_t . h_t + D u) silu(z).
//
// Who holds what. A work item is a run of whole documents (a segment) times a group of channels,
// and one thread takes it:
//
//   tokens of a document     0         32        64                chunks of kChunk tokens
//                            | chunk   | chunk   | ..|             in turn
//   channels of a group      | block 0 | block 1 | ...             in turn: all blocks of a chunk
//                              lanes are neighbouring channels        before the next chunk
//   states of a block        | 0 - 15  | 16 - 31 | ...             tiles, in registers along the
//                              one vector a state                     tokens of a chunk
//
// B_t[n] and C_t[n] are the same for all lanes. Nothing is exchanged along time, and a document
// starts by choosing its state, so what came before it is never read.
//
// Bound: multiply-adds. An element (token, channel, state) takes one exponential and 4
// multiply-adds forward, one and 12 backward.
// Bytes: forward reads u, delta and z and writes y, once, and a state every kChunk tokens for the
// backward; backward reads those and dy and writes du, ddelta and dz. B and C: once a group of
// channels.
#pragma once
#include "tensors.h"

namespace packmamba {

constexpr int kChunk =
    32;  // tokens between saved states; the backward replays them. Python allocates accordingly
constexpr int kGroupChannels = 128;  // of a work item, more where there would be too many groups
constexpr int kMaxGroups = 32;       // bounds the partial sums of dB and dC
constexpr int kSegmentTokens = 256;  // joins short documents; bounds the partial sums of dA
constexpr int kPaddedChannels = 16;  // saved states are padded to this many channels
constexpr int kTogether =
    4;  // tokens, or states, whose exponentials are computed side by side; divides kChunk

template <class T>
struct ScanArguments {
  using R = accumulate_t<T>;
  Rows<const T> u, delta;  // (B, L, D)
  Rows<const T> B, C;      // (B, L, N)
  Rows<const T> z;         // (B, L, D) or absent: no gate
  const R* A;              // (D, N)
  const R* D;              // (D,) or null
  const R* delta_bias;     // (D,) or null
  const R* initial_state;  // (S, D, N) or null: zero
  bool softplus;           // whether dt is the softplus
  Documents documents;
  int64_t channels;  // D
  int64_t states;    // N

  ScanArguments(const Tensor& u, const Tensor& delta, const Tensor& A, const Tensor& B,
                const Tensor& C, const OptionalTensor& D, const OptionalTensor& z,
                const OptionalTensor& delta_bias, bool softplus, const Tensor& starts,
                const Tensor& ends, const OptionalTensor& initial_state)
      : u(u),
        delta(delta),
        B(B),
        C(C),
        z(z),
        A(pointer<const R>(A)),
        D(pointer<const R>(D)),
        delta_bias(pointer<const R>(delta_bias)),
        initial_state(pointer<const R>(initial_state)),
        softplus(softplus),
        documents(starts, ends, u),
        channels(A.size(0)),
        states(A.size(1)) {}
};

// How channels are cut into groups of blocks; a block is one vector of channels.
template <class R>
struct ChannelGroups {
  static constexpr int lanes = kLanes<R>;
  int64_t channels;   // D
  int64_t per_group;  // channels of a group
  int64_t count;      // groups

  explicit ChannelGroups(int64_t channels) : channels(channels) {
    const int64_t wide = (channels + kMaxGroups - 1) / kMaxGroups;
    per_group = (wide + kGroupChannels - 1) / kGroupChannels * kGroupChannels;
    count = (channels + per_group - 1) / per_group;
  }
  int64_t blocks_before(int64_t group) const { return group * (per_group / lanes); }
  int blocks(int64_t group) const {
    return int((std::min(channels, (group + 1) * per_group) - group * per_group + lanes - 1) /
               lanes);
  }
  int lanes_of(int64_t block) const {
    return int(std::min<int64_t>(lanes, channels - block * lanes));
  }
};

// Where the states saved of a document's chunk lie: one place more than chunks per document is
// always enough.
inline int64_t saved_chunk(int64_t document, int64_t start, int64_t chunk) {
  return document + start / kChunk + chunk;
}

// (channels, states) of a block with its channels on lanes: states vectors. Lanes past the last
// channel are zero.
template <class R>
void load_block(const R* from, int64_t states, int count, Vec<R>* to, R factor = 1) {
  for (int64_t state = 0; state < states; ++state) {
    R lanes[kLanes<R>] = {};
    for (int lane = 0; lane < count; ++lane)
      lanes[lane] = from[lane * states + state] * factor;
    to[state] = bit_load<Vec<R>>(lanes);
  }
}
template <class R>
void store_block(R* to, int64_t states, int count, const Vec<R>* from) {
  for (int64_t state = 0; state < states; ++state) {
    R lanes[kLanes<R>];
    std::memcpy(lanes, &from[state], sizeof lanes);
    for (int lane = 0; lane < count; ++lane)
      to[lane * states + state] = lanes[lane];
  }
}

// A as the kernels read it: [block][state] vectors, times `factor`.
template <class R>
std::vector<Vec<R>> blocks_of_A(const R* A, int64_t channels, int64_t states, R factor) {
  constexpr int lanes = kLanes<R>;
  std::vector<Vec<R>> blocks((channels + lanes - 1) / lanes * states);
  for (int64_t channel = 0; channel < channels; channel += lanes) {
    load_block(A + channel * states, states, int(std::min<int64_t>(lanes, channels - channel)),
               &blocks[channel / lanes * states], factor);
  }
  return blocks;
}

// B or C of a chunk's tokens as contiguous accumulation-type numbers.
template <class T>
void widen(const Rows<const T>& from, int64_t slot, int tokens, int64_t states,
           accumulate_t<T>* to) {
  for (int token = 0; token < tokens; ++token) {
    const T* row = from.at(slot + token);
    for (int64_t state = 0; state < states; ++state)
      to[token * states + state] = to_float(row[state]);
  }
}

// What a block's tokens of one chunk are before states come in.
template <class R>
struct Tokens {
  Vec<R> u[kChunk];
  Vec<R> raw[kChunk];    // delta + bias
  Vec<R> dt[kChunk];     // raw, or its softplus
  Vec<R> drive[kChunk];  // dt u
  Vec<R> z[kChunk];
};

template <class T>
void load_tokens(const ScanArguments<T>& in, int64_t slot, int tokens, int64_t channel, int count,
                 Tokens<accumulate_t<T>>& to) {
  using R = accumulate_t<T>;
  const Vec<R> bias = in.delta_bias ? load(in.delta_bias + channel, count) : Vec<R>{};
  const T* u = in.u.at(slot) + channel;
  const T* delta = in.delta.at(slot) + channel;
  for (int token = 0; token < tokens; ++token) {
    to.u[token] = load(u + token * in.u.token, count);
    to.raw[token] = load(delta + token * in.delta.token, count) + bias;
    to.dt[token] = to.raw[token];
  }
  if (in.softplus)
    for (int token = 0; token < tokens; token += kTogether)
      softplus_lanes<kTogether>(&to.raw[token], &to.dt[token]);
  for (int token = 0; token < tokens; ++token)
    to.drive[token] = to.dt[token] * to.u[token];
  if (!in.z) return;
  const T* z = in.z.at(slot) + channel;
  for (int token = 0; token < tokens; ++token)
    to.z[token] = load(z + token * in.z.token, count);
}

// Gates of a chunk's tokens, or of a few more.
template <class V>
void sigmoids(int tokens, const V* from, V* to) {
  for (int token = 0; token < tokens; token += kTogether)
    sigmoid_lanes<kTogether>(from + token, to + token);
}

// Calls tile(first state, constant of states) for 16, 8, 4 or 1 states at a time.
template <int widest, class Body>
void for_each_tile(int64_t states, const Body& body) {
  int64_t state = 0;
  if constexpr (widest >= 16)
    for (; state + 16 <= states; state += 16)
      body(state, std::integral_constant<int, 16>{});
  for (; state + 8 <= states; state += 8)
    body(state, std::integral_constant<int, 8>{});
  for (; state + 4 <= states; state += 4)
    body(state, std::integral_constant<int, 4>{});
  for (; state < states; ++state)
    body(state, std::integral_constant<int, 1>{});
}

// Gradients, contiguous.
template <class T>
struct ScanGradients {
  using R = accumulate_t<T>;
  T *u, *delta;      // (B, L, D)
  T *B, *C;          // (B, L, N)
  T* z;              // (B, L, D) or null
  R* A;              // (D, N)
  R* D;              // (D,) or null
  R* delta_bias;     // (D,) or null
  R* initial_state;  // (S, D, N) or null
};

}  // namespace packmamba

// The depthwise causal convolution over packed documents, forward and backward.
//
// Mapping: a work item is a run of pieces of documents times a group of channels; lanes are neighbouring channels. A block of
// tokens is walked for one vector of channels at a time, with taps, window and sums in registers, and the block's rows in L1.
// The backward walks from a piece's last token to its first, and begins with the W - 1 tokens after it.
// Bound: memory. Bytes: forward reads x and writes y; backward reads x and dy and writes dx.
#pragma once
#include "tensors.h"

namespace packmamba {

constexpr int kConvTokens = 16;          // of a block
constexpr int kConvGroup = 512;         // channels of a work item
constexpr int64_t kPieceTokens = 256;   // cuts long documents and joins short ones; bounds the partial sums of dweight

constexpr int64_t kLargeBytes = 32 << 20;  // an output that no cache would keep until it is read

template <class T> struct ConvArguments {
  using R = accumulate_t<T>;
  Rows<const T> x;
  const R *weight, *bias, *initial_state;
  bool silu;
  Documents documents;
  int64_t channels;
  int taps;

  ConvArguments(const Tensor& x, const Tensor& weight, const OptionalTensor& bias, const Tensor& starts, const Tensor& ends,
                const OptionalTensor& initial_state, bool silu)
      : x(x), weight(pointer<const R>(weight)), bias(pointer<const R>(bias)), initial_state(pointer<const R>(initial_state)),
        silu(silu), documents(starts, ends, x), channels(weight.size(0)), taps(int(weight.size(1))) {}
  bool large() const { return documents.slots * channels * int64_t(sizeof(T)) >= kLargeBytes; }
};

// Tokens [first, last) of a document.
struct Piece {
  int64_t document, first, last;
};

// Pieces, and where each work item's run of them begins (one more entry than items).
struct Pieces {
  std::vector<Piece> all;
  std::vector<int64_t> bounds;

  explicit Pieces(const Documents& documents) {
    int64_t tokens = kPieceTokens;
    for (int64_t s = 0; s < documents.count; ++s)
      for (int64_t t = documents.starts[s]; t < documents.ends[s]; t += kPieceTokens) {
        if (tokens >= kPieceTokens) bounds.push_back(int64_t(all.size())), tokens = 0;
        all.push_back({s, t, std::min<int64_t>(documents.ends[s], t + kPieceTokens)});
        tokens += all.back().last - t;
      }
    bounds.push_back(int64_t(all.size()));
  }
  int64_t items() const { return int64_t(bounds.size()) - 1; }
};

// One vector of channels of one document: its inputs, of which those before the document are its initial state. Where `plain`,
// the vector is full and no input lies before the document.
template <class T, int W> struct ConvBlock {
  using R = accumulate_t<T>;
  using V = Vec<R>;
  const T* x;  // of the document's first token
  const R* before;
  int64_t token, start, end;
  int count;
  bool large;
  V taps[W], bias;

  ConvBlock(const ConvArguments<T>& in, const T* first_row, const V* parameters, int64_t s, int64_t channel)
      : x(first_row + channel),
        before(in.initial_state ? in.initial_state + (s * in.channels + channel) * (W - 1) : nullptr), token(in.x.token),
        start(in.documents.starts[s]), end(in.documents.ends[s]),
        count(int(std::min<int64_t>(kLanes<R>, in.channels - channel))), large(in.large()) {
#pragma GCC unroll 4
    for (int k = 0; k < W; ++k) taps[k] = parameters[k];
    bias = parameters[W];
  }
  bool plain_from(int64_t slot) const { return slot - (W - 1) >= start && count == kLanes<R>; }
  static V gather(const R* from, int64_t place, int count) {
    R lanes[kLanes<R>] = {};
    for (int i = 0; i < count; ++i) lanes[i] = from[i * (W - 1) + place];
    return bit_load<V>(lanes);
  }
  template <bool plain> V read(const T* from) const { return plain ? load(from) : load(from, count); }
  template <bool plain> void write(T* to, V value) const {
    if (!plain) return store(to, value, count);
    return large ? stream(to, value) : store(to, value);
  }
  template <bool plain = false> V input(int64_t slot) const {
    if (plain || slot >= start) return read<plain>(x + (slot - start) * token);
    return before ? gather(before, W - 1 + slot - start, count) : V{};
  }
  template <bool plain> void inputs(int64_t slot, V* window) const {
#pragma GCC unroll 4
    for (int k = 0; k < W; ++k) window[k] = input<plain>(slot - (W - 1) + k);
  }
  V apply(const V* window) const {
    V sum = bias;
#pragma GCC unroll 4
    for (int k = 0; k < W; ++k) sum += taps[k] * window[k];
    return sum;
  }
};

// [block][W taps, then the bias] vectors.
template <class T, int W> std::vector<Vec<accumulate_t<T>>> conv_parameters(const ConvArguments<T>& in) {
  using R = accumulate_t<T>;
  std::vector<Vec<R>> parameters;
  for (int64_t c = 0; c < in.channels; c += kLanes<R>) {
    const int count = int(std::min<int64_t>(kLanes<R>, in.channels - c));
    for (int k = 0; k < W; ++k) {
      R lanes[kLanes<R>] = {};
      for (int i = 0; i < count; ++i) lanes[i] = in.weight[(c + i) * W + k];
      parameters.push_back(bit_load<Vec<R>>(lanes));
    }
    parameters.push_back(in.bias ? load(in.bias + c, count) : Vec<R>{});
  }
  return parameters;
}

template <bool plain, class T, int W>
void forward_tokens(const ConvBlock<T, W>& block, int64_t first, int64_t last, bool silu, T* y, int64_t channels) {
  using V = Vec<accumulate_t<T>>;
  for (int64_t t = first; t < last; ++t, y += channels) {
    V window[W];
    block.template inputs<plain>(t, window);
    V out = block.apply(window);
    if (silu) out *= sigmoid_lanes(out);
    block.template write<plain>(y, out);
  }
}

template <class T, int W> void conv_forward(const ConvArguments<T>& in, T* y, accumulate_t<T>* final_state) {
  using R = accumulate_t<T>;
  using V = Vec<R>;
  const int64_t channels = in.channels, groups = (channels + kConvGroup - 1) / kConvGroup;
  const Pieces pieces(in.documents);
  const auto parameters = conv_parameters<T, W>(in);
  zero_padding(y, channels, in.documents);
  constexpr int blocks = kConvGroup / kLanes<R>;
  for_each_item(pieces.items() * groups, Nothing{}, [&](Nothing&, int64_t item) {
    const int64_t from = item % groups * kConvGroup, to = std::min(channels, from + kConvGroup), run = item / groups;
    for (int64_t p = pieces.bounds[run]; p < pieces.bounds[run + 1]; ++p) {
      const Piece& piece = pieces.all[p];
      const T* rows = in.x.at(in.documents.starts[piece.document]);
      for (int64_t first = piece.first; first < piece.last; first += kConvTokens) {
        const int64_t last = std::min<int64_t>(piece.last, first + kConvTokens);
        for (int64_t c = from; c < to; c += kLanes<R>) {
          const ConvBlock<T, W> block(in, rows, &parameters[c / kLanes<R> * (W + 1)], piece.document, c);
          T* out = y + first * channels + c;
          const int64_t ahead = std::min<int64_t>(kConvTokens, piece.last - last);
          Ahead(last, ahead, from, to - from, int((c - from) / kLanes<R>), blocks).prefetch(in.x);
          if (block.plain_from(first))
            forward_tokens<true>(block, first, last, in.silu, out, channels);
          else
            forward_tokens<false>(block, first, last, in.silu, out, channels);
        }
      }
      end_stream();
      if (final_state == nullptr || piece.last != in.documents.ends[piece.document]) continue;
      for (int64_t c = from; c < to; c += kLanes<R>) {
        const ConvBlock<T, W> block(in, rows, &parameters[c / kLanes<R> * (W + 1)], piece.document, c);
        for (int k = 0; k < W - 1; ++k) {
          const V value = block.input(block.end - (W - 1) + k);
          for (int i = 0; i < block.count; ++i)
            final_state[(piece.document * channels + c + i) * (W - 1) + k] = value[i];
        }
      }
    }
  });
}

template <class T> struct ConvGradients {
  using R = accumulate_t<T>;
  T* x;
  R *weight, *bias, *initial_state;
};

// Where one vector of channels walks back over a piece.
template <class T, int W> struct BackwardPlaces {
  using R = accumulate_t<T>;
  const T* dy;  // of the document's first token
  int64_t dy_token;
  const R* dfinal;
  T* dx;  // of the slots
  int64_t channels;
  Vec<R>* next;  // gradients of the sums at the W - 1 tokens after the current one, nearest first
  Vec<R>* sums;  // of the taps, then the bias
};

// What input `slot` receives: from the sum there, whose gradient is `grad`, and from those after it. Moves on to the slot before.
template <class T, int W, class V = Vec<accumulate_t<T>>>
[[gnu::always_inline]] inline V step_back(const ConvBlock<T, W>& block, V* next, V grad) {
  V dx = block.taps[W - 1] * grad;
#pragma GCC unroll 4
  for (int j = 1; j < W; ++j) dx += block.taps[W - 1 - j] * next[j - 1];
#pragma GCC unroll 4
  for (int j = W - 2; j > 0; --j) next[j] = next[j - 1];
  next[0] = grad;
  return dx;
}
template <class T, int W, class V = Vec<accumulate_t<T>>>
V final_gradient(const ConvBlock<T, W>& block, const accumulate_t<T>* dfinal, int64_t slot) {
  const int64_t place = slot - (block.end - (W - 1));
  return dfinal && place >= 0 ? block.gather(dfinal, place, block.count) : V{};
}

// Tokens [first, last), from the last. Outside of the piece nothing is written: they only send back into it.
template <bool plain, class T, int W>
void backward_tokens(const ConvBlock<T, W>& block, const BackwardPlaces<T, W>& io, int64_t first, int64_t last, bool silu,
                     bool inside) {
  using R = accumulate_t<T>;
  using V = Vec<R>;
  V next[W - 1], sums[W + 1];
#pragma GCC unroll 4
  for (int j = 0; j < W - 1; ++j) next[j] = io.next[j];
#pragma GCC unroll 8
  for (int k = 0; k <= W; ++k) sums[k] = io.sums[k];
  for (int64_t t = last - 1; t >= first; --t) {
    V window[W], grad = block.template read<plain>(io.dy + (t - block.start) * io.dy_token);
    block.template inputs<plain>(t, window);
    if (silu) {
      const V sum = block.apply(window), gate = sigmoid_lanes(sum);
      grad *= gate * (R(1) + sum * (R(1) - gate));
    }
    V dx = step_back(block, next, grad);
    if (!inside) continue;
    if (!plain) dx += final_gradient(block, io.dfinal, t);
    block.template write<plain>(io.dx + t * io.channels, dx);
#pragma GCC unroll 4
    for (int k = 0; k < W; ++k) sums[k] += grad * window[k];
    sums[W] += grad;
  }
#pragma GCC unroll 4
  for (int j = 0; j < W - 1; ++j) io.next[j] = next[j];
#pragma GCC unroll 8
  for (int k = 0; k <= W; ++k) io.sums[k] = sums[k];
}

template <class T, int W>
void conv_backward(const ConvArguments<T>& in, Rows<const T> dy, const accumulate_t<T>* dfinal, const ConvGradients<T>& out) {
  using R = accumulate_t<T>;
  using V = Vec<R>;
  const int64_t channels = in.channels, groups = (channels + kConvGroup - 1) / kConvGroup;
  const Pieces pieces(in.documents);
  const auto parameters = conv_parameters<T, W>(in);
  const std::unique_ptr<R[]> part_weight(new R[pieces.items() * channels * W]), part_bias(new R[pieces.items() * channels]);
  zero_padding(out.x, channels, in.documents);
  constexpr int blocks = kConvGroup / kLanes<R>;
  struct Scratch {
    std::vector<V> next = std::vector<V>(blocks * (W - 1)), sums = std::vector<V>(blocks * (W + 1));
  };
  for_each_item(pieces.items() * groups, Scratch{}, [&](Scratch& scratch, int64_t item) {
    const int64_t from = item % groups * kConvGroup, to = std::min(channels, from + kConvGroup), run = item / groups;
    std::fill(scratch.sums.begin(), scratch.sums.end(), V{});
    for (int64_t p = pieces.bounds[run]; p < pieces.bounds[run + 1]; ++p) {
      const Piece& piece = pieces.all[p];
      const int64_t end = in.documents.ends[piece.document], start = in.documents.starts[piece.document];
      const T *rows = in.x.at(start), *dy_rows = dy.at(start);
      std::fill(scratch.next.begin(), scratch.next.end(), V{});
      // The tokens after the piece, for what they send back into it; then the piece, a block of tokens at a time.
      int64_t last = std::min(end, piece.last + W - 1);
      while (last > piece.first) {
        const bool inside = last <= piece.last;
        const int64_t first = inside ? std::max(piece.first, last - kConvTokens) : piece.last;
        for (int64_t c = from; c < to; c += kLanes<R>) {
          const int64_t b = (c - from) / kLanes<R>;
          const ConvBlock<T, W> block(in, rows, &parameters[c / kLanes<R> * (W + 1)], piece.document, c);
          const R* final_of_block = dfinal ? dfinal + (piece.document * channels + c) * (W - 1) : nullptr;
          const BackwardPlaces<T, W> io{dy_rows + c, dy.token, final_of_block, out.x + c, channels,
                                        &scratch.next[b * (W - 1)], &scratch.sums[b * (W + 1)]};
          const int64_t ahead = std::min<int64_t>(kConvTokens, first - piece.first);
          const Ahead before(first - ahead, ahead, from, to - from, int(b), blocks);
          before.prefetch(in.x);
          before.prefetch(dy);
          if (block.plain_from(first) && (!dfinal || last <= end - (W - 1)))
            backward_tokens<true>(block, io, first, last, in.silu, inside);
          else
            backward_tokens<false>(block, io, first, last, in.silu, inside);
          if (first == start && out.initial_state)
            for (int64_t t = start - 1; t >= start - (W - 1); --t) {
              const V value = step_back(block, io.next, V{}) + final_gradient(block, final_of_block, t);
              for (int i = 0; i < block.count; ++i)
                out.initial_state[(piece.document * channels + c + i) * (W - 1) + t - start + W - 1] = value[i];
            }
        }
        last = first;
      }
    }
    end_stream();
    for (int64_t c = from; c < to; c += kLanes<R>) {
      const V* sums = &scratch.sums[(c - from) / kLanes<R> * (W + 1)];
      const int count = int(std::min<int64_t>(kLanes<R>, channels - c));
      for (int i = 0; i < count; ++i)
        for (int k = 0; k < W; ++k) part_weight[(run * channels + c + i) * W + k] = sums[k][i];
      store(&part_bias[run * channels + c], sums[W], count);
    }
  });
  sum_parts(part_weight.get(), pieces.items(), channels * W, channels * W, out.weight);
  sum_parts(part_bias.get(), pieces.items(), channels, channels, out.bias);
}

// Calls body(constant W).
template <class Body> void with_taps(int taps, const Body& body) {
  if (taps == 2) body(std::integral_constant<int, 2>{});
  if (taps == 3) body(std::integral_constant<int, 3>{});
  if (taps == 4) body(std::integral_constant<int, 4>{});
}

}  // namespace packmamba

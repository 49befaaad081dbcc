// The depthwise causal convolution over packed documents, forward and backward.
//
// Mapping: a work item is a run of pieces of documents times a group of channels; lanes are neighbouring channels. A block of
// tokens of one cache line's channels is gathered, worked on one vector of channels at a time, and scattered.
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

// The channels of one cache line, in one document. A block of tokens is gathered from its rows into vectors, worked on one
// vector of channels at a time, and scattered to the rows of the output: each line is touched once, however rows lie.
template <class T, int W> struct ConvLine {
  using R = accumulate_t<T>;
  using V = Vec<R>;
  static constexpr int lanes = kLanes<R>, width = kLineBytes / int(sizeof(T)), vectors = width / lanes;
  using Rows = V[vectors][kConvTokens + W - 1];

  const T* x;  // of the document's first token
  const R* before;
  int64_t token, start, end, channels, channel;
  int count;
  bool large;

  ConvLine(const ConvArguments<T>& in, const T* first_row, int64_t s, int64_t channel)
      : x(first_row + channel),
        before(in.initial_state ? in.initial_state + (s * in.channels + channel) * (W - 1) : nullptr), token(in.x.token),
        start(in.documents.starts[s]), end(in.documents.ends[s]), channels(in.channels), channel(channel),
        count(int(std::min<int64_t>(width, in.channels - channel))), large(in.large()) {}
  int count_of(int vector) const { return std::clamp(count - vector * lanes, 0, lanes); }
  static void gather_row(const T* row, int count, V (*to)[kConvTokens + W - 1], int64_t place) {
    for (int v = 0; v < vectors; ++v)
      to[v][place] = count == width ? load(row + v * lanes) : load(row + v * lanes, std::clamp(count - v * lanes, 0, lanes));
  }
  // (S, D, W - 1) states of this line, as a row.
  V state(const R* from, int64_t place, int vector) const {
    R values[lanes] = {};
    for (int i = 0; i < count_of(vector); ++i) values[i] = from[(vector * lanes + i) * (W - 1) + place];
    return bit_load<V>(values);
  }
  void put_state(R* to, int64_t place, int vector, V value) const {
    for (int i = 0; i < count_of(vector); ++i) to[(vector * lanes + i) * (W - 1) + place] = value[i];
  }
  // The inputs at slots [first, last); those before the document are its initial state.
  void gather(int64_t first, int64_t last, Rows to) const {
    for (int64_t t = first; t < last; ++t)
      if (t >= start)
        gather_row(x + (t - start) * token, count, to, t - first);
      else
        for (int v = 0; v < vectors; ++v) to[v][t - first] = before ? state(before, W - 1 + t - start, v) : V{};
  }
  // To the slots [first, last) of a contiguous output.
  void scatter(const Rows from, int64_t first, int64_t last, T* out) const {
    out += first * channels + channel;
    const bool past = large && count == width && channels % width == 0 && reinterpret_cast<uintptr_t>(out) % kLineBytes == 0;
    for (int64_t t = 0; t < last - first; ++t, out += channels) {
      alignas(kLineBytes) T line[width];
      for (int v = 0; v < vectors; ++v) store(line + v * lanes, from[v][t]);
      if (past)
        stream_line(out, line);
      else
        std::memcpy(out, line, sizeof(T) * count);
    }
  }
};

// What is the same for every token of one vector of channels.
template <class V, int W> struct Filter {
  V taps[W], bias;
  explicit Filter(const V* parameters) : bias(parameters[W]) {
#pragma GCC unroll 4
    for (int k = 0; k < W; ++k) taps[k] = parameters[k];
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

template <class T, int W> void conv_forward(const ConvArguments<T>& in, T* y, accumulate_t<T>* final_state) {
  using Line = ConvLine<T, W>;
  using V = typename Line::V;
  const int64_t channels = in.channels, groups = (channels + kConvGroup - 1) / kConvGroup;
  const Pieces pieces(in.documents);
  const auto parameters = conv_parameters<T, W>(in);
  zero_padding(y, channels, in.documents);
  for_each_item(pieces.items() * groups, Nothing{}, [&](Nothing&, int64_t item) {
    const int64_t from = item % groups * kConvGroup, to = std::min(channels, from + kConvGroup), run = item / groups;
    typename Line::Rows window, out;
    for (int64_t p = pieces.bounds[run]; p < pieces.bounds[run + 1]; ++p) {
      const Piece& piece = pieces.all[p];
      const T* rows = in.x.at(in.documents.starts[piece.document]);
      for (int64_t first = piece.first; first < piece.last; first += kConvTokens) {
        const int64_t last = std::min<int64_t>(piece.last, first + kConvTokens);
        for (int64_t c = from; c < to; c += Line::width) {
          const Line line(in, rows, piece.document, c);
          const int64_t ahead = std::min<int64_t>(kConvTokens, piece.last - last);
          Ahead(last, ahead, from, to - from, int((c - from) / Line::width), kConvGroup / Line::width).prefetch(in.x);
          line.gather(first - (W - 1), last, window);
          for (int v = 0; v < Line::vectors && line.count_of(v) > 0; ++v) {
            const Filter<V, W> filter(&parameters[(c / Line::lanes + v) * (W + 1)]);
            for (int64_t t = 0; t < last - first; ++t) out[v][t] = filter.apply(&window[v][t]);
            if (in.silu)
              for (int64_t t = 0; t < last - first; ++t) out[v][t] *= sigmoid_lanes(out[v][t]);
          }
          line.scatter(out, first, last, y);
        }
      }
      end_stream();
      if (final_state == nullptr || piece.last != in.documents.ends[piece.document]) continue;
      for (int64_t c = from; c < to; c += Line::width) {
        const Line line(in, rows, piece.document, c);
        line.gather(piece.last - (W - 1), piece.last, window);
        for (int v = 0; v < Line::vectors; ++v)
          for (int k = 0; k < W - 1; ++k)
            line.put_state(final_state + (piece.document * channels + c) * (W - 1), k, v, window[v][k]);
      }
    }
  });
}

template <class T> struct ConvGradients {
  using R = accumulate_t<T>;
  T* x;
  R *weight, *bias, *initial_state;
};

// What an input receives: from the sum at its own slot, whose gradient is `grad`, and from those after it, nearest first in
// `next`, which moves on to the slot before.
template <class V, int W> [[gnu::always_inline]] inline V step_back(const Filter<V, W>& filter, V* next, V grad) {
  V dx = filter.taps[W - 1] * grad;
#pragma GCC unroll 4
  for (int j = 1; j < W; ++j) dx += filter.taps[W - 1 - j] * next[j - 1];
#pragma GCC unroll 4
  for (int j = W - 2; j > 0; --j) next[j] = next[j - 1];
  next[0] = grad;
  return dx;
}

// One vector of channels over `tokens` tokens, from the last: gradients of the outputs become those of the inputs. `sums` gathers
// the taps' gradients, then the bias's.
template <class V, int W>
void backward_tokens(const Filter<V, W>& filter, int64_t tokens, const V* window, V* gradients, V* next_tokens, V* all_sums, bool silu) {
  using R = std::decay_t<decltype(V{}[0])>;
  V next[W - 1], sums[W + 1];
#pragma GCC unroll 4
  for (int j = 0; j < W - 1; ++j) next[j] = next_tokens[j];
#pragma GCC unroll 8
  for (int k = 0; k <= W; ++k) sums[k] = all_sums[k];
  if (silu) {
    // In steps, each with few instructions from a token's first to its last, so that tokens overlap.
    V of_sum[kConvTokens];
    for (int64_t t = 0; t < tokens; ++t) of_sum[t] = filter.apply(window + t);
    for (int64_t t = 0; t < tokens; ++t) {
      const V sum = of_sum[t], gate = sigmoid_lanes(sum);
      gradients[t] *= gate * (R(1) + sum * (R(1) - gate));
    }
  }
  for (int64_t t = tokens - 1; t >= 0; --t) {
    const V grad = gradients[t];
    gradients[t] = step_back(filter, next, grad);
#pragma GCC unroll 4
    for (int k = 0; k < W; ++k) sums[k] += grad * window[t + k];
    sums[W] += grad;
  }
#pragma GCC unroll 4
  for (int j = 0; j < W - 1; ++j) next_tokens[j] = next[j];
#pragma GCC unroll 8
  for (int k = 0; k <= W; ++k) all_sums[k] = sums[k];
}

template <class T, int W>
void conv_backward(const ConvArguments<T>& in, Rows<const T> dy, const accumulate_t<T>* dfinal, const ConvGradients<T>& out) {
  using Line = ConvLine<T, W>;
  using R = typename Line::R;
  using V = typename Line::V;
  const int64_t channels = in.channels, groups = (channels + kConvGroup - 1) / kConvGroup;
  const Pieces pieces(in.documents);
  const auto parameters = conv_parameters<T, W>(in);
  const std::unique_ptr<R[]> part_weight(new R[pieces.items() * channels * W]), part_bias(new R[pieces.items() * channels]);
  zero_padding(out.x, channels, in.documents);
  constexpr int blocks = kConvGroup / Line::lanes;
  struct Scratch {
    std::vector<V> next = std::vector<V>(blocks * (W - 1)), sums = std::vector<V>(blocks * (W + 1));
  };
  for_each_item(pieces.items() * groups, Scratch{}, [&](Scratch& scratch, int64_t item) {
    const int64_t from = item % groups * kConvGroup, to = std::min(channels, from + kConvGroup), run = item / groups;
    typename Line::Rows window, gradients;
    V nowhere[W + 1] = {};
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
        for (int64_t c = from; c < to; c += Line::width) {
          const Line line(in, rows, piece.document, c);
          const R* dfinal_of_line = dfinal ? dfinal + (piece.document * channels + c) * (W - 1) : nullptr;
          const int64_t ahead = std::min<int64_t>(kConvTokens, first - piece.first);
          const Ahead before(first - ahead, ahead, from, to - from, int((c - from) / Line::width), kConvGroup / Line::width);
          before.prefetch(in.x);
          before.prefetch(dy);
          line.gather(first - (W - 1), last, window);
          for (int64_t t = first; t < last; ++t)
            Line::gather_row(dy_rows + (t - start) * dy.token + c, line.count, gradients, t - first);
          for (int v = 0; v < Line::vectors && line.count_of(v) > 0; ++v) {
            const int64_t block = (c - from) / Line::lanes + v;
            V *next = &scratch.next[block * (W - 1)], *sums = &scratch.sums[block * (W + 1)];
            const Filter<V, W> filter(&parameters[(c / Line::lanes + v) * (W + 1)]);
            backward_tokens(filter, last - first, window[v], gradients[v], next, inside ? sums : nowhere, in.silu);
            const auto from_final = [&](int64_t t) {
              const int64_t place = t - (end - (W - 1));
              return dfinal && place >= 0 ? line.state(dfinal_of_line, place, v) : V{};
            };
            for (int64_t t = std::max(first, end - (W - 1)); dfinal && t < last; ++t) gradients[v][t - first] += from_final(t);
            if (first == start && out.initial_state)
              for (int64_t t = start - 1; t >= start - (W - 1); --t)
                line.put_state(out.initial_state + (piece.document * channels + c) * (W - 1), t - start + W - 1, v,
                               step_back(filter, next, V{}) + from_final(t));
          }
          if (inside) line.scatter(gradients, first, last, out.x);
        }
        last = first;
      }
    }
    end_stream();
    for (int64_t c = from; c < to; c += Line::lanes) {
      const V* sums = &scratch.sums[(c - from) / Line::lanes * (W + 1)];
      const int count = int(std::min<int64_t>(Line::lanes, channels - c));
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

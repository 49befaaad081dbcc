// Vectors of the machine's width, conversions between storage and accumulation types, and the few
// functions that the kernels need.
//
//   storage type T          float16   bfloat16   float     double
//   accumulation type R     float     float      float     double
//   lanes of a Vec<R>       16        16         16        8        AVX-512, 64 bytes
//                           8         8          8         4        AVX, 32 bytes
//                           4         4          4         2        else, 16 bytes
//
// Written with GCC's vector extensions; intrinsics only where AVX-512 has an instruction that they
// cannot name. Lanes are neighbouring channels everywhere.
#pragma once
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace packmamba {

#if defined(__AVX512F__)
constexpr int kVectorBytes = 64;
#elif defined(__AVX__)
constexpr int kVectorBytes = 32;
#else
constexpr int kVectorBytes = 16;
#endif

// Storage types that are not C++'s own: the bits, converted at loads and stores.
struct bfloat16 {
  uint16_t bits;
};
struct float16 {
  uint16_t bits;
};

// What sums and states are kept in beside a storage type.
template <class T>
struct Accumulate {
  using type = float;
};
template <>
struct Accumulate<double> {
  using type = double;
};
template <class T>
using accumulate_t = typename Accumulate<T>::type;

template <class R, int bytes = kVectorBytes>
struct Lanes {
  typedef R type __attribute__((vector_size(bytes)));
};
template <class R>
using Vec = typename Lanes<R>::type;
template <class R>
constexpr int kLanes = kVectorBytes / int(sizeof(R));
template <class R>
using Int = std::conditional_t<sizeof(R) == 8, int64_t, int32_t>;

template <class V>
V bit_load(const void* from) {
  V value;
  std::memcpy(&value, from, sizeof value);
  return value;
}

template <class R>
Vec<R> broadcast(R value) {
  return value - Vec<R>{};
}

// GCC reads a value that it has not computed from memory again for every use, and loads are as
// scarce as multiply-adds.
template <class V>
[[gnu::always_inline]] inline V in_register(V value) {
#if defined(__x86_64__)
  asm("" : "+v"(value));
#endif
  return value;
}

inline float to_float(bfloat16 value) {
  const uint32_t bits = uint32_t(value.bits) << 16;
  return bit_load<float>(&bits);
}
#if defined(__F16C__)
inline float to_float(float16 value) { return _cvtsh_ss(value.bits); }
inline float16 to_float16(float value) { return {_cvtss_sh(value, _MM_FROUND_TO_NEAREST_INT)}; }
#else
#if defined(__aarch64__)
using Half = __fp16;  // g++ knows _Float16 from 13 on
#else
using Half = _Float16;  // g++ from 12 on
#endif
inline float to_float(float16 value) { return float(bit_load<Half>(&value.bits)); }
inline float16 to_float16(float value) {
  const Half half = Half(value);
  return bit_load<float16>(&half);
}
#endif
inline float to_float(float value) { return value; }
inline double to_float(double value) { return value; }

using Bits32 = Vec<uint32_t>;
using Bits16 = Lanes<uint16_t, kVectorBytes / 2>::type;

inline Vec<float> load(const float* from) { return bit_load<Vec<float>>(from); }
inline Vec<double> load(const double* from) { return bit_load<Vec<double>>(from); }
inline Vec<float> load(const bfloat16* from) {
  return (Vec<float>)(__builtin_convertvector(bit_load<Bits16>(from), Bits32) << 16);
}
inline Vec<float> load(const float16* from) {
#if defined(__AVX512F__)
  return (Vec<float>)_mm512_cvtph_ps(bit_load<__m256i>(from));
#else
  Vec<float> vector;
  for (int i = 0; i < kLanes<float>; ++i)
    vector[i] = to_float(from[i]);
  return vector;
#endif
}

inline void store(float* to, Vec<float> vector) { std::memcpy(to, &vector, sizeof vector); }
inline void store(double* to, Vec<double> vector) { std::memcpy(to, &vector, sizeof vector); }
inline void store(bfloat16* to, Vec<float> vector) {
  const Bits32 bits = (Bits32)vector;
  // Round to nearest even; a NaN stays one.
  Bits32 rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  rounded = (bits & 0x7fffffffu) > 0x7f800000u ? Bits32{} + 0x7fc0u : rounded;
  const Bits16 narrow = __builtin_convertvector(rounded, Bits16);
  std::memcpy(to, &narrow, sizeof narrow);
}
inline void store(float16* to, Vec<float> vector) {
#if defined(__AVX512F__)
  const __m256i narrow = _mm512_cvtps_ph((__m512)vector, _MM_FROUND_TO_NEAREST_INT);
  std::memcpy(to, &narrow, sizeof narrow);
#else
  for (int i = 0; i < kLanes<float>; ++i)
    to[i] = to_float16(vector[i]);
#endif
}

// Past the caches, for outputs larger than they are: lines that are soon written whole need not be
// read first. `to` is aligned to what is written.
constexpr int kLineBytes = 64;
template <class T>
inline void stream(T* to, Vec<accumulate_t<T>> vector) {
  constexpr int bytes = int(sizeof(T)) * kLanes<accumulate_t<T>>;
  T narrow[kLanes<accumulate_t<T>>];
  store(narrow, vector);
#if defined(__AVX512F__)
  if constexpr (bytes == 64)
    return _mm512_stream_si512(reinterpret_cast<__m512i*>(to), bit_load<__m512i>(narrow));
#endif
#if defined(__AVX__)
  if constexpr (bytes == 32)
    return _mm256_stream_si256(reinterpret_cast<__m256i*>(to), bit_load<__m256i>(narrow));
#endif
#if defined(__SSE2__)
  if constexpr (bytes == 16)
    return _mm_stream_si128(reinterpret_cast<__m128i*>(to), bit_load<__m128i>(narrow));
#endif
  std::memcpy(to, narrow, bytes);
}
inline void end_stream() {
#if defined(__SSE2__)
  _mm_sfence();
#endif
}

// The first `count` lanes; the others are zero, and memory past them is not touched.
template <class T>
Vec<accumulate_t<T>> load(const T* from, int count) {
  constexpr int lanes = kLanes<accumulate_t<T>>;
  if (count == lanes) return load(from);
  T padded[lanes] = {};
  std::memcpy(padded, from, sizeof(T) * count);
  return load(padded);
}
template <class T>
void store(T* to, Vec<accumulate_t<T>> vector, int count) {
  if (count == kLanes<accumulate_t<T>>) return store(to, vector);
  T padded[kLanes<accumulate_t<T>>];
  store(padded, vector);
  std::memcpy(to, padded, sizeof(T) * count);
}

// Halves of a pair of vectors, group by group: of every 2 * half lanes of a, then of b, the lower
// (upper) half.
template <class V, int half, bool upper, int... lane>
inline V half_groups(V a, V b, std::integer_sequence<int, lane...>) {
  constexpr int lanes = sizeof...(lane);
  constexpr int from[] = {(lane / (2 * half) * 2 * half + lane % half +
                           (lane % (2 * half) < half ? 0 : lanes) + (upper ? half : 0))...};
#if defined(__clang__)
  return __builtin_shufflevector(a, b, from[lane]...);
#else
  // g++ has the function above from 12 on, this one always.
  typedef Int<std::decay_t<decltype(a[0])>> Mask __attribute__((vector_size(sizeof(V))));
  return __builtin_shuffle(a, b, Mask{from[lane]...});
#endif
}
template <class V, int half>
inline void sum_halves(V* vectors) {
  using Sequence = std::make_integer_sequence<int, sizeof(V) / sizeof(V{}[0])>;
#pragma GCC unroll 8
  for (int i = 0; i < half; ++i) {
    vectors[i] = half_groups<V, half, false>(vectors[i], vectors[i + half], Sequence{}) +
                 half_groups<V, half, true>(vectors[i], vectors[i + half], Sequence{});
  }
  if constexpr (half > 1) sum_halves<V, half / 2>(vectors);
}
// Lane i of the result is the sum over the lanes of from[i]; always in the same order.
template <class R>
inline Vec<R> sum_lanes(const Vec<R>* from) {
  Vec<R> vectors[kLanes<R>];
  std::memcpy(vectors, from, sizeof vectors);
  sum_halves<Vec<R>, kLanes<R> / 2>(vectors);
  return vectors[0];
}

// 2^x = 2^exponent (1 + fraction q(fraction)) with x = exponent + fraction, |fraction| <= 1/2.
// Relative error of a normal result: float 2e-7 (q is the minimax polynomial of degree 4: 9e-8
// before rounding), double 4e-16 (Taylor). The factor `fraction` keeps decays near 1 as exact as
// their exponent. -inf gives 0, overflow gives inf, NaN stays.
template <class R>
struct Exp2;
template <>
struct Exp2<float> {
  static constexpr float coefficients[] = {0.693147f, 0.24022242f, 0.055507336f, 0.009671513f,
                                           0.0013264727f};
  static constexpr float shifter = 12582912.0f;  // 1.5 * 2^23: x + shifter is rounded
  static constexpr float low = -126;
  static constexpr float high = 128;
  static constexpr int mantissa = 23;
};
template <>
struct Exp2<double> {
  static constexpr double coefficients[] = {
      0.69314718055994531,   0.24022650695910071,   0.05550410866482158,    0.0096181291076284772,
      0.0013333558146428443, 0.0001540353039338161, 1.525273380405984e-5,   1.3215486790144309e-6,
      1.01780860092397e-7,   7.0549116208011233e-9, 4.4455382718708115e-10, 2.5678435993488205e-11,
      1.3691488853904129e-12};
  static constexpr double shifter = 6755399441055744.0;  // 1.5 * 2^52
  static constexpr double low = -1022;
  static constexpr double high = 1024;
  static constexpr int mantissa = 52;
};

#if defined(__AVX512F__)
inline Vec<float> round_lanes(Vec<float> x) {
  return (Vec<float>)_mm512_roundscale_ps((__m512)x, 8);
}
inline Vec<double> round_lanes(Vec<double> x) {
  return (Vec<double>)_mm512_roundscale_pd((__m512d)x, 8);
}
inline Vec<float> scale_lanes(Vec<float> x, Vec<float> exponent) {
  return (Vec<float>)_mm512_scalef_ps((__m512)x, (__m512)exponent);
}
inline Vec<double> scale_lanes(Vec<double> x, Vec<double> exponent) {
  return (Vec<double>)_mm512_scalef_pd((__m512d)x, (__m512d)exponent);
}
inline Vec<float> at_least(Vec<float> x, float low) {
  return (Vec<float>)_mm512_max_ps(_mm512_set1_ps(low), (__m512)x);
}
inline Vec<double> at_least(Vec<double> x, double low) {
  return (Vec<double>)_mm512_max_pd(_mm512_set1_pd(low), (__m512d)x);
}
#elif defined(__AVX__)
// x within [low, high]; a NaN stays. From comparisons GCC makes twice the instructions.
inline Vec<float> clamp(Vec<float> x, float low, float high) {
  return (Vec<float>)_mm256_max_ps(_mm256_set1_ps(low),
                                   _mm256_min_ps(_mm256_set1_ps(high), (__m256)x));
}
inline Vec<double> clamp(Vec<double> x, double low, double high) {
  return (Vec<double>)_mm256_max_pd(_mm256_set1_pd(low),
                                    _mm256_min_pd(_mm256_set1_pd(high), (__m256d)x));
}
#else
template <class V, class R>
V clamp(V x, R low, R high) {
  x = x > high ? broadcast(high) : x;
  return x < low ? broadcast(low) : x;
}
#endif

// For each j of n vectors. The functions below work on n vectors side by side, because a
// processor's scheduler holds fewer instructions than one vector's chain is long.
#define SIDE_BY_SIDE _Pragma("GCC unroll 16") for (int j = 0; j < n; ++j)

// exp2 in two parts; the exponent is in the form that join_exp2 takes.
template <int n, class V>
[[gnu::always_inline]] inline void split_exp2(const V* from, V* fraction, V* exponent) {
  using R = std::decay_t<decltype(from[0][0])>;
  using E = Exp2<R>;
  V x[n], rounded[n];
#if defined(__AVX512F__)
  SIDE_BY_SIDE x[j] = at_least(from[j], 2 * E::low);  // -inf - -inf would be NaN
  SIDE_BY_SIDE rounded[j] = round_lanes(x[j]);
  SIDE_BY_SIDE fraction[j] = x[j] - rounded[j];
#else
  // At the ends the fraction is 0 and the polynomial 1, whose exponent becomes inf's, or zero's.
  SIDE_BY_SIDE x[j] = clamp(from[j], E::low - 1, E::high);
  SIDE_BY_SIDE rounded[j] = x[j] + E::shifter;
  SIDE_BY_SIDE fraction[j] = x[j] - (rounded[j] - E::shifter);
#endif
  SIDE_BY_SIDE exponent[j] = rounded[j];
}
// 2^exponent (1 + fraction q(fraction)); of a NaN, anything.
template <int n, class V>
[[gnu::always_inline]] inline void join_exp2(const V* fraction, const V* exponent, V* to) {
  using R = std::decay_t<decltype(fraction[0][0])>;
  using E = Exp2<R>;
  constexpr int terms = sizeof(E::coefficients) / sizeof(R);
  V polynomial[n];
  const V highest = in_register(broadcast(E::coefficients[terms - 1]));
  SIDE_BY_SIDE polynomial[j] = highest;
#pragma GCC unroll 16
  for (int i = terms - 2; i >= -1; --i) {
    const V coefficient = in_register(broadcast(i < 0 ? R(1) : E::coefficients[i]));
    SIDE_BY_SIDE polynomial[j] = polynomial[j] * fraction[j] + coefficient;
  }
#if defined(__AVX512F__)
  SIDE_BY_SIDE to[j] = scale_lanes(polynomial[j], exponent[j]);
#else
  // The exponent to its place: what the shifter put above it is shifted out.
  typedef Int<R> Integers __attribute__((vector_size(kVectorBytes)));
  SIDE_BY_SIDE to[j] = (V)((Integers)polynomial[j] + ((Integers)exponent[j] << E::mantissa));
#endif
}
template <int n, class V>
[[gnu::always_inline]] inline void exp2_lanes(const V* x, V* to) {
  V fraction[n], exponent[n];
  split_exp2<n>(x, fraction, exponent);
  join_exp2<n>(fraction, exponent, to);
#if !defined(__AVX512F__)
  SIDE_BY_SIDE to[j] = fraction[j] == fraction[j] ? to[j] : fraction[j];
#endif
}
template <class V>
inline V exp2_lanes(V x) {
  V y;
  exp2_lanes<1>(&x, &y);
  return y;
}

// softplus(x) = max(x, 0) + log(1 + e), e = exp(-|x|); the logarithm as 2 atanh(ratio), ratio =
// e / (2 + e), whose series needs no split.
template <int n, class V>
[[gnu::always_inline]] inline void softplus_lanes(const V* x, V* to) {
  using R = std::decay_t<decltype(x[0][0])>;
  constexpr int terms = sizeof(R) == 8 ? 17 : 7;
  V power[n], ratio[n], square[n], series[n];
  SIDE_BY_SIDE power[j] = (x[j] > 0 ? -x[j] : x[j]) * R(1.4426950408889634);
  exp2_lanes<n>(power, ratio);
  SIDE_BY_SIDE ratio[j] = ratio[j] / (ratio[j] + R(2));
  SIDE_BY_SIDE square[j] = ratio[j] * ratio[j];
  SIDE_BY_SIDE series[j] = broadcast(R(1) / (2 * terms - 1));
#pragma GCC unroll 16
  for (int i = terms - 2; i >= 0; --i)
    SIDE_BY_SIDE series[j] = series[j] * square[j] + R(1) / (2 * i + 1);
  SIDE_BY_SIDE to[j] = (x[j] > 0 ? x[j] : V{}) + (ratio[j] + ratio[j]) * series[j];
}
template <int n, class V>
[[gnu::always_inline]] inline void sigmoid_lanes(const V* x, V* to) {
  using R = std::decay_t<decltype(x[0][0])>;
  V power[n];
  SIDE_BY_SIDE power[j] = x[j] * R(-1.4426950408889634);
  exp2_lanes<n>(power, to);
  SIDE_BY_SIDE to[j] = R(1) / (R(1) + to[j]);
}
template <class V>
V softplus_lanes(V x) {
  V y;
  softplus_lanes<1>(&x, &y);
  return y;
}
template <class V>
V sigmoid_lanes(V x) {
  V y;
  sigmoid_lanes<1>(&x, &y);
  return y;
}

}  // namespace packmamba

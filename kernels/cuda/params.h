// What Python hands to the kernels: plain pointers, sizes and strides. Nothing here knows PyTorch.
// Shape letters: B rows, L slots of a row, S documents, D channels, N states per channel, W taps.
#pragma once
#include <cuda_runtime.h>
#include <cstdint>

enum class Dtype : int { bfloat16, float16, float32 };

// A (B, L, *) tensor with unit stride along its last dimension. Null data: an absent argument.
struct View {
  const void* data;
  int64_t row_bytes;
  uint32_t token_bytes;
};

// Made once per batch by schedule.cu; every kernel of every layer reads it.
struct Schedule {
  const int* counts;     // items, segments, cut segments, cut documents
  const int4* segments;  // first slot, end slot, document, place among the cut segments or -1
  const int2* items;     // first segment, end segment; longest first
  const int4* cut_documents;  // first cut segment, how many, document
  const int* cut_segments;    // their place among all segments
  const int* row_ends;        // (B,) the slot after each row's last token
  const int* tile_documents;  // the first document that ends after each tile of CONV_TILE slots begins
  int max_items, max_cut_segments, max_cut_documents;  // capacities: grids are made from them
};

constexpr int CONV_TILE = 32;   // slots of a convolution tile
constexpr int SAVE_EVERY = 32;  // tokens between saved states, counted from a document's start

struct ScanParams {
  View u, delta, z, B, C, dy;
  const float *A, *D, *bias, *initial_state, *dfinal;
  const int *starts, *ends;
  Schedule schedule;
  void *y, *du, *ddelta, *dz, *dB, *dC;  // contiguous
  float *final_state, *dinitial;
  void* saved;                                        // states kept for the backward
  float *cut_states, *cut_sums;                       // of cut segments: (C, D, N) and (C, D)
  float *partial_BC, *partial_A, *partial_D, *partial_bias;  // (blocks, slots, 2 N), (items, D, N), (items, D) twice
  float *dA, *dD, *dbias;
  int channels, states, rows, row_length, documents;
  bool softplus;
  Dtype dtype;
  __host__ __device__ int64_t slots() const { return (int64_t)rows * row_length; }
};

struct ConvParams {
  View x, dy;
  const void *weight, *bias, *initial_state, *dfinal;
  const int *starts, *ends;
  Schedule schedule;
  void *y, *dx, *dweight, *dbias, *final_state, *dinitial;
  float* partial;  // (blocks of tiles, W + 1, D)
  int channels, width, rows, row_length, documents;
  bool silu, wide_weight, wide_bias, wide_state;  // wide: float32, else as x
  Dtype dtype;
  __host__ __device__ int64_t slots() const { return (int64_t)rows * row_length; }
};

void make_schedule(const int* starts, const int* ends, int documents, int rows, int row_length, int cut_above, int cut_length,
                   int window, int2* unsorted, const Schedule& schedule, cudaStream_t stream);
void zero_padding(void* data, int row_bytes, const int* row_ends, int rows, int row_length, cudaStream_t stream);

// bfloat16 with 16 states: tensor cores.
void scan16_forward(const ScanParams& p, bool cut, cudaStream_t stream);
void scan16_backward(const ScanParams& p, bool cut, cudaStream_t stream);
// Everything else.
void scan_forward(const ScanParams& p, cudaStream_t stream);
void scan_backward(const ScanParams& p, cudaStream_t stream);
void scan_reduce(const ScanParams& p, int channel_blocks, cudaStream_t stream);

void conv_forward(const ConvParams& p, cudaStream_t stream);
void conv_backward(const ConvParams& p, cudaStream_t stream);

// The schedule of a batch, made on the device so that the host need not wait; and what makes
// padding zero.
//
// `schedule`: one block of 1024 threads. Each list is made from the one before it, thread i taking
// elements i, i + 1024, ..., which it writes at places known from prefix sums: the same bits every
// time.
//
//   documents          | 0                       | 1 | 2 | 3         |   one thread each
//   segments           | 0         | 1         |2| 3 | 4 | 5         |   of cut_length tokens
//   items, unsorted    | 0         | 1         |2| 3     | 4         |
//                        document 0 is longer      1 and 2 begin in
//                        than cut_above: cut       one window
//   items              | 0         | 1         | 4         | 3     |2|   longest first
//
// The sort is a counting sort in quarter octaves of an item's tokens.
// Documents of no tokens, behind all slots, are absent: a graph's layouts have room for more than
// each batch has.
// Shared memory: 16 KiB of counters. Bound: latency; some microseconds, once a batch.
//
// `zero_tails`: blockIdx.y rows, blockIdx.x and threads along the bytes of a row's tail.
// Bytes: those of the padding.
#include "params.h"

namespace {

constexpr int THREADS = 1024;
constexpr int BUCKETS = 64;        // quarter octaves of an item's tokens
constexpr int SORT_THREADS = 256;  // each counts a run of items

// Exclusive sum over the block; total gets the block's sum.
__device__ int block_sum(int value, int& total) {
  __shared__ int warp_sums[THREADS / 32];
  const int lane = threadIdx.x & 31;
  const int warp = threadIdx.x >> 5;
  int inclusive = value;
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    const int up = __shfl_up_sync(~0u, inclusive, distance);
    if (lane >= distance) inclusive += up;
  }
  __syncthreads();
  if (lane == 31) warp_sums[warp] = inclusive;
  __syncthreads();
  int before = 0;
  total = 0;
  for (int i = 0; i < THREADS / 32; i++) {
    before += i < warp ? warp_sums[i] : 0;
    total += warp_sums[i];
  }
  return before + inclusive - value;
}

__device__ int bucket_of(int tokens) {  // 0 is the longest
  const int octave = 31 - __clz(tokens);
  const int quarter = (octave >= 2 ? tokens >> (octave - 2) : tokens << (2 - octave)) & 3;
  return max(0, BUCKETS - 1 - (4 * octave + quarter));
}

// The first document that ends after a slot: a binary search.
__device__ int first_ending_after(const int* ends, int documents, int64_t slot) {
  int low = 0;
  int high = documents;
  while (low < high) {
    const int middle = (low + high) / 2;
    if (ends[middle] > slot)
      high = middle;
    else
      low = middle + 1;
  }
  return low;
}

__global__ void __launch_bounds__(THREADS)
    schedule(const int* starts, const int* ends, const int* offsets,
             const __grid_constant__ Plan plan, const __grid_constant__ Schedule out) {
  const int documents = plan.documents;
  const int rows = plan.rows;
  const int row_length = plan.row_length;
  const int window = plan.window;
  int4* const segments = out.segments;
  int2* const unsorted = out.unsorted;
  __shared__ int counters[BUCKETS * SORT_THREADS / 4];
  const int thread = threadIdx.x;
  int total;

  // Documents into segments.
  int num_segments = 0;
  int num_cut_segments = 0;
  int num_cut_documents = 0;
  for (int base = 0; base < documents; base += THREADS) {
    const int document = base + thread;
    const int start = document < documents ? starts[document] : 0;
    const int end = document < documents ? ends[document] : 0;
    const int length = end - start;
    const int offset = offsets && document < documents ? offsets[document] : 0;
    const int past = offset % plan.cut_length;
    // To the first multiple of cut_length, or, where no token that saves a state lies there, to the
    // next one that does, in either scan.
    const int first_length = plan.cut_length - past / SAVE_EVERY_FLOAT * SAVE_EVERY_FLOAT;
    const int rest = length - first_length;
    const int pieces = rest > 0 ? 1 + (rest + plan.cut_length - 1) / plan.cut_length : length > 0;
    const bool cut = length > plan.cut_above && pieces > 1;
    int segment = num_segments + block_sum(pieces, total);
    num_segments += total;
    int place = num_cut_segments + block_sum(cut ? pieces : 0, total);
    num_cut_segments += total;
    const int cut_document = num_cut_documents + block_sum(cut, total);
    num_cut_documents += total;
    if (cut) out.cut_documents[cut_document] = make_int4(place, pieces, document, 0);
    int64_t first = start;
    int64_t next = start + (int64_t)first_length;
    for (int piece = 0; piece < pieces; piece++) {
      const bool starts_at_cut = piece > 0 || (offset > 0 && past == 0);
      const int flagged = with_flags(document, starts_at_cut, next <= end);
      segments[segment] =
          make_int4(first, min(next, (int64_t)end), flagged, cut ? place + piece : -1);
      if (cut) out.cut_segments[place + piece] = segment;
      segment++;
      first = next;
      next += plan.cut_length;
    }
  }
  __syncthreads();

  // Segments into items, in the order of slots. Each cut segment begins one, and of the others each
  // document's first, but where it is short and begins in the same window as the document before
  // it, short too.
  int num_items = 0;
  for (int base = 0; base < num_segments; base += THREADS) {
    const int index = base + thread;
    bool begins = false;
    if (index < num_segments) {
      const int4 segment = segments[index];
      const int4 segment_before = segments[max(index - 1, 0)];
      const int document = document_of(segment);
      const int document_before = document_of(segment_before);
      const int start = starts[document];
      const int start_before = starts[document_before];
      if (segment.x > start) {
        begins = segment.w >= 0;
      } else {
        begins = index == 0 || start / window != start_before / window ||
                 ends[document] - start > window || ends[document_before] - start_before > window ||
                 segment.w >= 0 || segment_before.w >= 0;
      }
    }
    const int item = num_items + block_sum(begins, total);
    num_items += total;
    if (begins) unsorted[item].x = index;
  }
  __syncthreads();
  for (int item = thread; item < num_items; item += THREADS)
    unsorted[item].y = item + 1 < num_items ? unsorted[item + 1].x : num_segments;
  __syncthreads();

  // Items, longest first: a counting sort, a quarter of the buckets at a time, each of SORT_THREADS
  // threads a run of items, counts in bucket-major order.
  auto tokens_of = [&](int item) {
    return segments[unsorted[item].y - 1].y - segments[unsorted[item].x].x;
  };
  const int run = (num_items + SORT_THREADS - 1) / SORT_THREADS;
  int placed = 0;
  for (int quarter = 0; quarter < 4; quarter++) {
    const int low = quarter * BUCKETS / 4;
    const int high = low + BUCKETS / 4;
    for (int i = thread; i < BUCKETS * SORT_THREADS / 4; i += THREADS)
      counters[i] = 0;
    __syncthreads();
    if (thread < SORT_THREADS) {
      for (int item = thread * run; item < min(num_items, (thread + 1) * run); item++) {
        const int bucket = bucket_of(tokens_of(item));
        if (bucket >= low && bucket < high) counters[(bucket - low) * SORT_THREADS + thread]++;
      }
    }
    __syncthreads();
    // Counts become places.
    constexpr int EACH = BUCKETS * SORT_THREADS / 4 / THREADS;
    int own = 0;
    for (int i = 0; i < EACH; i++)
      own += counters[thread * EACH + i];
    int place = placed + block_sum(own, total);
    placed += total;
    for (int i = 0; i < EACH; i++) {
      const int count = counters[thread * EACH + i];
      counters[thread * EACH + i] = place;
      place += count;
    }
    __syncthreads();
    if (thread < SORT_THREADS) {
      for (int item = thread * run; item < min(num_items, (thread + 1) * run); item++) {
        const int bucket = bucket_of(tokens_of(item));
        if (bucket >= low && bucket < high)
          out.items[counters[(bucket - low) * SORT_THREADS + thread]++] = unsorted[item];
      }
    }
    __syncthreads();
  }

  // What the convolution and the zeros of padding need.
  for (int row = thread; row < rows; row += THREADS) {
    const int64_t first = (int64_t)row * row_length;
    // No document crosses rows.
    const int last = first_ending_after(ends, documents, first + row_length) - 1;
    out.row_ends[row] = last >= 0 && ends[last] > first ? ends[last] : first;
  }
  const int tiles = (row_length + CONV_TILE - 1) / CONV_TILE;
  for (int64_t tile = thread; tile < (int64_t)rows * tiles; tile += THREADS) {
    out.tile_documents[tile] =
        first_ending_after(ends, documents, tile / tiles * row_length + tile % tiles * CONV_TILE);
  }
  if (thread == 0) {
    out.counts[0] = num_items;
    out.counts[1] = num_segments;
    out.counts[2] = num_cut_segments;
    out.counts[3] = num_cut_documents;
  }
}

template <class Word>
__global__ void zero_tails(char* data, int64_t token_bytes, int words, const int* row_ends,
                           int rows, int row_length) {
  const int64_t step = (int64_t)gridDim.x * blockDim.x;
  const int64_t thread = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
  for (int row = blockIdx.y; row < rows; row += gridDim.y) {
    const int64_t first = row_ends[row];
    const int64_t count = ((int64_t)(row + 1) * row_length - first) * words;
    for (int64_t i = thread; i < count; i += step)
      ((Word*)(data + (first + i / words) * token_bytes))[i % words] = Word{};
  }
}

}  // namespace

void make_schedule(const int* starts, const int* ends, const int* offsets, const Plan& plan,
                   const Schedule& out, cudaStream_t stream) {
  schedule<<<1, THREADS, 0, stream>>>(starts, ends, offsets, plan, out);
}

void zero_padding(void* data, int64_t token_bytes, int64_t width_bytes, const int* row_ends,
                  int rows, int row_length, cudaStream_t stream) {
  const dim3 grid(max(1, 256 / rows), min(rows, 65535));
  if (((uintptr_t)data | token_bytes | width_bytes) % 16 == 0) {
    zero_tails<uint4><<<grid, 256, 0, stream>>>((char*)data, token_bytes, width_bytes / 16,
                                                row_ends, rows, row_length);
  } else {
    zero_tails<uint16_t><<<grid, 256, 0, stream>>>((char*)data, token_bytes, width_bytes / 2,
                                                   row_ends, rows, row_length);
  }
}

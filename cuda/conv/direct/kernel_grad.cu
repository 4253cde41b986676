// The kernel gradient of a direct convolution with small groups of channels.
//
// The gradient is a sum over the pixels of all images for every tap, channel of a group and output.
// A thread has an output, neighbouring threads have neighbouring outputs, and a thread keeps its
// sums in registers while it loops over its part of the pixels. For windows of 3, 5 and 7 taps a
// thread has all sums of an output and loops down the rows of strips of columns (KernelGradRows):
// an entry of x meets the entries of the cotangent whose windows cover it, which the thread holds
// in registers. For other windows, and for f64, a thread has the sums of at most kSums taps
// (KernelGradDirect).
//
// Tensor cores compute depthwise convolution of 16-bit entries with large windows
// (direct/depthwise_kernel_grad.cu).
//
// The threads of a block that have the same output add up their sums. Blocks write these sums
// to a workspace, and a second kernel adds the sums of all blocks, always in the same order.
#include <type_traits>

#include "cuda/conv/add_parts.h"
#include "cuda/conv/direct/direct.cuh"

namespace jaxops::conv::cuda {
namespace {

constexpr int kThreads = 128;

// The parameters of all kernels.
struct Params {
  const void* image;
  const void* cotangent;
  void* result;  // of each split, one after the other, or of the whole sum
  im2col::Window dims[kDims];
  int image_rows, image_columns, rows, columns;
  int64_t image_pixel, pixel;  // entries between pixels of x, and of the cotangent
  FastDivider64 fan_out;
  int64_t fan_in;
  Slabs slabs;
  FastDivider64 sets;           // of taps and channels of a group, in blocks of their own
  FastDivider64 strips, parts;  // of columns and rows
  int part_rows;
  int64_t images, items;  // items are strips of parts of images
  int64_t splits;
  int64_t entries, size;  // of the result: for an output, and in total
  bool is_part, result_is_f32;
};

// The outputs and items of a thread.
struct Threads {
  int lanes, adjacent;  // of a block: threads across outputs, and threads for the same outputs
  int lane, number;
  int64_t slab, vector, set, split, begin, end;

  __device__ explicit Threads(const Params& p) {
    lanes = static_cast<int>(p.slabs.lanes.divisor());
    adjacent = kThreads / lanes;
    lane = threadIdx.x % lanes;
    number = threadIdx.x / lanes;
    uint64_t left = blockIdx.x;
    // Blocks for the same pixels are next to each other.
    set = p.sets.DivMod(left);
    slab = p.slabs.slabs.DivMod(left);
    vector = slab * lanes + lane;
    split = left;
    begin = p.items * split / p.splits + number;
    end = number < adjacent && vector < p.slabs.vectors ? p.items * (split + 1) / p.splits : 0;
  }
};

struct Item {
  int64_t image;
  int strip, row, rows;  // the first row of the cotangent, and the number of rows

  __device__ Item(const Params& p, uint64_t number) {
    strip = static_cast<int>(p.strips.DivMod(number));
    row = static_cast<int>(p.parts.DivMod(number)) * p.part_rows;
    rows = min(p.part_rows, p.rows - row);
    image = number;
  }
};

// Adds kCount sums of kVector outputs each over the threads of a block for these outputs, in the
// order of threads, and stores them: sum i is for entry `first` + i of the result's taps and
// channels.
template <typename T, int kCount, int kVector>
__device__ void StoreBlockSums(const Params& p, const Threads& t, int64_t first,
                               const Accumulator<T> (&sums)[kCount][kVector]) {
  using Acc = Accumulator<T>;
  __shared__ Acc all[kCount * kVector * kThreads];
  const int width = t.lanes * kVector;
  __syncthreads();
  if (t.number < t.adjacent) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
#pragma unroll
      for (int v = 0; v < kVector; ++v) {
        all[(i * t.adjacent + t.number) * width + t.lane * kVector + v] = sums[i][v];
      }
    }
  }
  __syncthreads();
  for (int j = threadIdx.x; j < kCount * width; j += kThreads) {
    const int i = j / width, output = j % width;
    const int64_t column = t.slab * width + output;
    if (column >= p.pixel || first + i >= p.entries) continue;
    Acc sum = 0;
    for (int k = 0; k < t.adjacent; ++k) sum += all[(i * t.adjacent + k) * width + output];
    const int64_t at = (first + i) * p.pixel + column;
    if (p.is_part) {
      static_cast<Acc*>(p.result)[t.split * p.size + at] = sum;
    } else {
      StoreSums<T, 1>(p.result, at, p.result_is_f32, {sum});
    }
  }
}

// --- square windows ------------------------------------------------------------------------------

// Blocks of a multiprocessor, as many as the registers for sums and held rows allow.
template <typename W>
constexpr int kLoopBlocks = W::kTaps > 3 || W::kFan > 1 ? 3
                            : W::kVector > 1            ? 4
                                                        : 5;

template <typename T, typename W>
__global__ void __launch_bounds__(kThreads, kLoopBlocks<W>)
    KernelGradRows(const __grid_constant__ Params p) {
  using Acc = Accumulator<T>;
  constexpr int kPixels = (W::kColumns - 1) * W::kStride + W::kTaps;
  constexpr int kHeld = W::kRamp + 1;  // rows of the cotangent that a row of x meets
  const Threads t(p);
  const int64_t output = t.vector * W::kVector;
  uint64_t group = output;
  p.fan_out.DivMod(group);
  Acc sums[W::kTaps][W::kTaps * W::kFan][W::kVector] = {};
  for (int64_t number = t.begin; number < t.end; number += t.adjacent) {
    const Item item(p, number);
    const int column = item.strip * W::kColumns;
    const int width = min(W::kColumns, p.columns - column);
    const int row = item.row * W::kStride - static_cast<int>(p.dims[0].low);
    Rows<T, kPixels, W::kEntries> image(
        p.image,
        item.image * p.image_rows * p.image_columns * p.image_pixel +
            static_cast<int64_t>(group) * W::kFan,
        row, min(p.image_rows, row + (item.rows - 1) * W::kStride + W::kTaps),
        column * W::kStride - static_cast<int>(p.dims[1].low), p.image_columns, p.image_pixel);
    Rows<T, W::kColumns, W::kVector> cotangent(
        p.cotangent, item.image * p.rows * p.columns * p.pixel + output, item.row,
        item.row + item.rows, column, p.columns, p.pixel);

    // held[m] is the row of the cotangent of m steps ago. The rows move, because unrolling the loop
    // until every row is back in its registers makes too much code for large windows.
    Acc held[kHeld][W::kColumns][W::kVector] = {};
    typename Rows<T, kPixels, W::kEntries>::Row next;
    typename Rows<T, W::kColumns, W::kVector>::Row next_held;
    image.LoadNext(next);
    cotangent.LoadNext(next_held);
#pragma unroll 1
    for (int step = 0; step < item.rows + W::kRamp; ++step) {
#pragma unroll
      for (int m = kHeld - 1; m > 0; --m) {
#pragma unroll
        for (int c = 0; c < W::kColumns; ++c) {
#pragma unroll
          for (int v = 0; v < W::kVector; ++v) held[m][c][v] = held[m - 1][c][v];
        }
      }
      next_held.WidenTo(held[0]);
      cotangent.LoadNext(next_held);
#pragma unroll
      for (int phase = 0; phase < W::kStride; ++phase) {
        Acc x[kPixels][W::kEntries];
        next.WidenTo(x);
        image.LoadNext(next);
        const auto add = [&](auto is_needed) {
#pragma unroll
          for (int m = 0; m < kHeld; ++m) {
            const int r = m * W::kStride + phase;
            if (r >= W::kTaps) continue;
#pragma unroll
            for (int c = 0; c < W::kColumns; ++c) {
              if (!is_needed(m, c)) continue;
#pragma unroll
              for (int s = 0; s < W::kTaps; ++s) {
#pragma unroll
                for (int i = 0; i < W::kFan; ++i) {
#pragma unroll
                  for (int v = 0; v < W::kVector; ++v) {
                    sums[r][s * W::kFan + i][v] += held[m][c][v] * x[c * W::kStride + s][i + v];
                  }
                }
              }
            }
          }
        };
        if (width == W::kColumns && step >= W::kRamp && step < item.rows) {
          add([](int, int) { return true; });
        } else {
          // Products for pixels that do not exist are skipped: an entry of x may be NaN, and a zero
          // times NaN is NaN.
          add([&](int m, int c) { return c < width && m <= step && step - m < item.rows; });
        }
      }
    }
  }
  constexpr int kRowSums = W::kTaps * W::kFan;
#pragma unroll
  for (int r = 0; r < W::kTaps; ++r) {
    StoreBlockSums<T>(p, t, r * kRowSums, sums[r]);
  }
}

// --- any window ----------------------------------------------------------------------------------

// A thread sums for at most kSums pairs of a tap and a channel of a group.
constexpr int kSums = 8;
constexpr int kStripColumns = 32;

template <typename T>
__global__ void __launch_bounds__(kThreads) KernelGradDirect(const __grid_constant__ Params p) {
  using Acc = Accumulator<T>;
  const Threads t(p);
  const int64_t first = t.set * kSums;
  const int64_t output = t.vector;
  uint64_t group = output;
  p.fan_out.DivMod(group);
  const T* x = static_cast<const T*>(p.image);
  const T* g = static_cast<const T*>(p.cotangent);
  int tap_row[kSums], tap_column[kSums];
  int64_t channel[kSums];
#pragma unroll
  for (int i = 0; i < kSums; ++i) {
    // Entries after the last repeat the last, and are not stored.
    const int64_t entry = min(first + i, p.entries - 1);
    const int tap = static_cast<int>(entry / p.fan_in), taps = static_cast<int>(p.dims[1].taps);
    channel[i] = static_cast<int64_t>(group) * p.fan_in + entry % p.fan_in;
    tap_row[i] = static_cast<int>(tap / taps * p.dims[0].dilation - p.dims[0].low);
    tap_column[i] = static_cast<int>(tap % taps * p.dims[1].dilation - p.dims[1].low);
  }
  Acc sums[kSums][1] = {};
  for (int64_t number = t.begin; number < t.end; number += t.adjacent) {
    const Item item(p, number);
    const int begin = item.strip * kStripColumns;
    const int end = min(begin + kStripColumns, p.columns);
    int64_t at[kSums];
    uint32_t have_row = 0;
#pragma unroll
    for (int i = 0; i < kSums; ++i) {
      const int row = static_cast<int>(item.row * p.dims[0].stride) + tap_row[i];
      at[i] =
          ((item.image * p.image_rows + row) * p.image_columns + tap_column[i]) * p.image_pixel +
          channel[i];
      if (static_cast<uint32_t>(row) < static_cast<uint32_t>(p.image_rows)) have_row |= 1u << i;
    }
    const int64_t row_begin = (item.image * p.rows + item.row) * p.columns * p.pixel + output;
    for (int c = begin; c < end; ++c) {
      const Acc of_g = Widen(g[row_begin + c * p.pixel]);
      const int x_begin = static_cast<int>(c * p.dims[1].stride);
      const int64_t of_begin = x_begin * p.image_pixel;
#pragma unroll
      for (int i = 0; i < kSums; ++i) {
        const int column = x_begin + tap_column[i];
        Acc of_x = 0;
        if ((have_row >> i & 1) &&
            static_cast<uint32_t>(column) < static_cast<uint32_t>(p.image_columns)) {
          of_x = Widen(x[at[i] + of_begin]);
        }
        sums[i][0] += of_g * of_x;
      }
    }
  }
  StoreBlockSums<T>(p, t, first, sums);
}

// --- plans and launches on the host --------------------------------------------------------------

// Blocks of a multiprocessor, if there are enough pixels for them.
constexpr int kTapsBlocks = 8;
// A thread's work before its loop, counted in rows.
constexpr int64_t kRowsBefore = 3;
constexpr int64_t kMaxParts = 64;

// Cuts up the sum for a square window W, or for any window if W is void. The choice of W and the
// number of splits depend on sizes alone.
template <typename W>
void Cut(Params& p, int processors) {
  int64_t blocks, columns, sets, max_parts = p.rows, min_parts = p.rows, ramp = 0, vector = 1;
  if constexpr (std::is_void_v<W>) {
    blocks = kTapsBlocks;
    columns = kStripColumns;
    sets = CeilDiv(p.entries, kSums);
  } else {
    blocks = kLoopBlocks<W>;
    columns = W::kColumns;
    sets = 1;
    max_parts = std::min<int64_t>(p.rows, kMaxParts);
    min_parts = 1;
    ramp = W::kRamp;
    vector = W::kVector;
  }
  p.slabs = Slabs(p.pixel / vector);
  p.sets = FastDivider64(sets);
  p.strips = FastDivider64(CeilDiv(p.columns, columns));
  const int64_t loops = p.images * p.strips.divisor();
  const int64_t adjacent = kThreads / p.slabs.lanes.divisor();
  const int64_t max_splits = std::max<int64_t>(
      1, blocks * processors / static_cast<int64_t>(p.slabs.slabs.divisor() * sets));
  int64_t least = 0;
  for (int64_t wanted = min_parts; wanted <= max_parts; ++wanted) {
    const int64_t part_rows = CeilDiv(p.rows, wanted);
    const int64_t parts = CeilDiv(p.rows, part_rows);
    const int64_t items = loops * parts;
    const int64_t splits = std::min(max_splits, CeilDiv(items, adjacent));
    const int64_t cost =
        CeilDiv(CeilDiv(items, splits), adjacent) * (part_rows + ramp + kRowsBefore);
    if (least != 0 && cost >= least) continue;
    least = cost;
    p.part_rows = static_cast<int>(part_rows);
    p.parts = FastDivider64(parts);
    p.items = items;
    p.splits = splits;
  }
  p.is_part = p.splits > 1;
}

template <typename T>
int64_t PartBytes(const Params& p) {
  return p.is_part ? p.splits * p.size * sizeof(Accumulator<T>) : 0;
}

template <typename T, typename W>
cudaError_t Run(cudaStream_t stream, const Params& p, const Call& call) {
  const int64_t blocks = p.splits * p.slabs.slabs.divisor() * p.sets.divisor();
  cudaError_t error;
  if constexpr (std::is_void_v<W>) {
    error = jaxops::cuda::Launch(&KernelGradDirect<T>, blocks, kThreads, 0, stream, p);
  } else {
    error = jaxops::cuda::Launch(&KernelGradRows<T, W>, blocks, kThreads, 0, stream, p);
  }
  if (error != cudaSuccess || !p.is_part) return error;
  return LaunchAddParts(stream, p.result, call.result, call.result_dtype, p.size,
                        static_cast<int>(p.splits));
}

// Calls `use` with the parameters without addresses, and with the types of an entry and of the
// square window.
template <typename Use>
auto WithPlan(const Call& call, int processors, Use&& use) {
  const im2col::Window& h = call.dims[0];
  const im2col::Window& w = call.dims[1];
  Params p{};
  std::copy_n(call.dims, kDims, p.dims);
  p.image_rows = static_cast<int>(h.in);
  p.image_columns = static_cast<int>(w.in);
  p.rows = static_cast<int>(h.out);
  p.columns = static_cast<int>(w.out);
  p.image_pixel = call.channels;
  p.pixel = call.outputs;
  p.fan_in = call.channels / call.groups;
  p.fan_out = FastDivider64(call.outputs / call.groups);
  p.entries = h.taps * w.taps * p.fan_in;
  p.size = p.entries * call.outputs;
  p.images = call.images;
  p.result_is_f32 = call.result_dtype == DType::kF32;
  const int64_t taps = SquareTaps(call), stride = w.stride;
  const bool has_pairs = p.fan_in == 1 && call.groups == call.outputs && call.channels % 2 == 0;
  return jaxops::cuda::DispatchFloat(call.dtype, [&]<typename T>(T) {
    const auto with = [&]<typename W>(std::type_identity<W>) {
      Cut<W>(p, processors);
      return use.template operator()<T, W>(p);
    };
    if constexpr (!std::is_same_v<T, double>) {
      const bool loops = stride <= 2 && AreNear(std::max(call.channels, call.outputs));
      // Pairs of 16-bit entries are as wide as one of f32.
      constexpr int kPair = sizeof(T) == 2 ? 2 : 1;
      const auto with_stride =
          [&]<int kTaps, int kFan, int kVector>(RowLoop<kTaps, 1, kFan, kVector, 4>) {
            return stride == 1 ? with(std::type_identity<RowLoop<kTaps, 1, kFan, kVector, 4>>())
                               : with(std::type_identity<RowLoop<kTaps, 2, kFan, kVector, 4>>());
          };
      if (taps == 3 && loops) {
        if (p.fan_in == 4) return with_stride(RowLoop<3, 1, 4, 1, 4>());
        if (has_pairs) return with_stride(RowLoop<3, 1, 1, kPair, 4>());
        if (p.fan_in == 1) return with_stride(RowLoop<3, 1, 1, 1, 4>());
      }
      if (taps == 5 && loops && p.fan_in == 1) return with_stride(RowLoop<5, 1, 1, 1, 4>());
      if (taps == 7 && loops && stride == 1 && p.fan_in == 1) {
        return with(std::type_identity<RowLoop<7, 1, 1, 1, 4>>());
      }
    }
    return with(std::type_identity<void>());
  });
}

}  // namespace

int64_t KernelGradDirectWorkspace(const Call& call, int processors) {
  return WithPlan(call, processors, [&]<typename T, typename W>(const Params& p) -> int64_t {
    return PartBytes<T>(p);
  });
}

cudaError_t LaunchKernelGradDirect(cudaStream_t stream, const Call& call, Space workspace,
                                   int processors) {
  if (call.dims[0].taps * call.dims[1].taps > kMaxTaps) return cudaErrorNotSupported;
  return WithPlan(call, processors, [&]<typename T, typename W>(Params& p) {
    if (workspace.bytes < PartBytes<T>(p)) return cudaErrorInvalidValue;
    p.image = call.image;
    p.cotangent = call.cotangent;
    p.result = p.is_part ? workspace.data : call.result;
    return Run<T, W>(stream, p, call);
  });
}

}  // namespace jaxops::conv::cuda

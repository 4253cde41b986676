// Direct convolution of small groups of channels, and its gradient by the image.
//
// Both are sums over taps and the channels of a group, of an image that is x or the cotangent, and
// one launch each. Of windows of 3, 5 and 7 taps a thread has a strip of columns and walks down the
// rows (WalkRows): a row of the image adds to those rows of the result whose windows cover it, of
// which the thread has the sums. The gradient by the image without strides is such a walk with the
// taps mirrored; with strides of 2 a row of the cotangent adds to the rows of its window
// (WalkCotangents). All other windows, and f64, are summed tap by tap (SumTaps).
#include "cuda/conv_direct.cuh"
#include "cuda/conv_results.cuh"

namespace jaxops::conv::cuda {
namespace {

constexpr int kThreads = 128;

// The channels of image and kernel that a channel of the result is summed of. In the kernel
// neighbours of each kind are so many entries apart.
struct Channels {
  FastDivider64 result_fan;  // of a group
  int64_t image_fan;
  int64_t tap, group, member, channel;

  Channels() = default;
  Channels(const Call& call, bool is_grad) {
    const int64_t fan_in = call.channels / call.groups, fan_out = call.outputs / call.groups;
    result_fan = FastDivider64(is_grad ? fan_in : fan_out);
    image_fan = is_grad ? fan_out : fan_in;
    tap = fan_in * call.outputs;
    group = fan_out;
    member = is_grad ? call.outputs : 1;
    channel = is_grad ? 1 : call.outputs;
  }

  // The first channel of the image for one of the result, and the first entry of the kernel.
  __device__ __forceinline__ void Find(uint64_t of_result, int64_t& of_image,
                                       int64_t& of_kernel) const {
    const int64_t in_group = result_fan.Peel(of_result);
    of_image = of_result * image_fan;
    of_kernel = of_result * group + in_group * member;
  }
};

// What all kernels are told.
struct Params {
  const void* image;
  const void* kernel;
  void* result;
  int image_rows, image_columns, result_rows, result_columns;
  int64_t image_pixel, result_pixel;  // entries between pixels, which are channels
  int64_t images;
  Channels channels;
  Slabs slabs;
  FastDivider64 strips;
  bool result_is_f32;
  Epilogue epilogue;
};

// --- walks ---------------------------------------------------------------------------------------

// The rows of the result come in groups: one, and in the gradient by the image with strides as many
// as these. Parts of them are walked down side by side.
struct WalkParams : Params {
  int first_row, first_column;  // of the image, for the first of the result
  // The first group, or strip, of the gradient by the image may begin before the image.
  int row_shift, column_shift;
  FastDivider64 parts;
  int groups, part_groups;
  bool is_mirrored;
};

// What a thread walks down.
struct Item {
  int64_t image, channel;
  int strip, part;
  bool exists;

  template <typename W>
  __device__ Item(const WalkParams& p, W) {
    uint64_t left = uint64_t{blockIdx.x} * kThreads + threadIdx.x;
    const int64_t lane = p.slabs.lanes.Peel(left);
    strip = static_cast<int>(p.strips.Peel(left));
    const int64_t pack = p.slabs.slabs.Peel(left) * p.slabs.lanes.divisor() + lane;
    part = static_cast<int>(p.parts.Peel(left));
    image = left;
    channel = pack * W::kPack;
    exists = image < p.images && pack < p.slabs.packs;
  }
};

// The kernel's entries for a thread.
template <typename T, typename W>
struct Weights {
  Accumulator<T> of[W::kTaps][W::kTaps][W::kFan][W::kPack];
  int64_t image_channel;

  __device__ Weights(const WalkParams& p, int64_t channel) {
    int64_t first;
    p.channels.Find(channel, image_channel, first);
    const T* kernel = static_cast<const T*>(p.kernel) + first;
#pragma unroll
    for (int r = 0; r < W::kTaps; ++r) {
#pragma unroll
      for (int s = 0; s < W::kTaps; ++s) {
        const int number = r * W::kTaps + s;
        const int tap = p.is_mirrored ? W::kTaps * W::kTaps - 1 - number : number;
#pragma unroll
        for (int i = 0; i < W::kFan; ++i) {
          const auto pack =
              LoadPack<W::kPack>(kernel + (tap * p.channels.tap + i * p.channels.channel));
#pragma unroll
          for (int v = 0; v < W::kPack; ++v) of[r][s][i][v] = Widen(pack.values[v]);
        }
      }
    }
  }

  __device__ bool AreFinite() const {
    bool are = true;
#pragma unroll
    for (int r = 0; r < W::kTaps; ++r) {
#pragma unroll
      for (int s = 0; s < W::kTaps; ++s) {
#pragma unroll
        for (int i = 0; i < W::kFan; ++i) {
#pragma unroll
          for (int v = 0; v < W::kPack; ++v) are &= isfinite(of[r][s][i][v]);
        }
      }
    }
    return are;
  }
};

// A strip of the result, of which a thread stores row after row.
template <typename T, typename W>
class Result {
 public:
  using Sums = Accumulator<T>[W::kColumns][W::kPack];

  // From a column on that may be before its first.
  __device__ Result(const WalkParams& p, const Item& item, int row, int column)
      : is_f32_(sizeof(T) == sizeof(float) || p.result_is_f32),
        exist_(Existing<W::kColumns>(column, p.result_columns)) {
    const int bytes = is_f32_ ? sizeof(float) : sizeof(T);
    const int64_t pixels = (item.image * p.result_rows + row) * p.result_columns + column;
    at_ = static_cast<char*>(p.result) + (pixels * p.result_pixel + item.channel) * bytes;
    pixel_bytes_ = static_cast<int>(p.result_pixel * bytes);
    row_bytes_ = p.result_columns * p.result_pixel * bytes;
  }

  __device__ __forceinline__ void StoreNext(bool exists, const Sums& sums) {
    if (exists && is_f32_) StoreAs<float>(sums);
    if (sizeof(T) != sizeof(float) && exists && !is_f32_) StoreAs<T>(sums);
    at_ += row_bytes_;
  }

 private:
  template <typename Out>
  __device__ __forceinline__ void StoreAs(const Sums& sums) {
    const auto store = [&](int c) {
      jaxops::cuda::Pack<Out, W::kPack> pack;
#pragma unroll
      for (int v = 0; v < W::kPack; ++v) pack.values[v] = Narrow<Out>(sums[c][v]);
      StorePack(reinterpret_cast<Out*>(at_ + int64_t{c} * pixel_bytes_), pack);
    };
    if (exist_ == (1u << W::kColumns) - 1) {
#pragma unroll
      for (int c = 0; c < W::kColumns; ++c) store(c);
    } else {
#pragma unroll
      for (int c = 0; c < W::kColumns; ++c) {
        if (exist_ >> c & 1) store(c);
      }
    }
  }

  char* at_;  // of the next row
  int64_t row_bytes_;
  int pixel_bytes_;
  bool is_f32_;
  uint32_t exist_;
};

// So many blocks of a multiprocessor as registers for the kernel and sums allow.
template <typename W>
constexpr int kWalkBlocks = W::kTaps == 7 ? 3 : 4;

template <typename T, typename W>
__global__ void __launch_bounds__(kThreads, kWalkBlocks<W>)
    WalkRows(const __grid_constant__ WalkParams p) {
  using Acc = Accumulator<T>;
  constexpr int kPixels = (W::kColumns - 1) * W::kStride + W::kTaps;
  // Of large windows the products for rows of other parts, and with zeros, are left out.
  constexpr bool kSkips = W::kTaps > 3;
  const Item item(p, W());
  if (!item.exists) return;
  const Weights<T, W> weights(p, item.channel);
  const bool needs_zeros = kSkips && !weights.AreFinite();
  const int column = item.strip * W::kColumns;
  const int begin = item.part * p.part_groups;
  const int rows = min(p.part_groups, p.groups - begin);
  const int first_row = begin * W::kStride + p.first_row;
  Rows<T, kPixels, W::kEntries> image(
      p.image, item.image * p.image_rows * p.image_columns * p.image_pixel + weights.image_channel,
      first_row, min(p.image_rows, first_row + (rows - 1) * W::kStride + W::kTaps),
      column * W::kStride + p.first_column, p.image_columns, p.image_pixel);
  Result<T, W> result(p, item, begin, column);

  // sums[m] are those of the row of the result whose window began m steps ago.
  Acc sums[W::kRamp + 1][W::kColumns][W::kPack] = {};
  typename Rows<T, kPixels, W::kEntries>::Row next;
  bool next_exists = image.LoadNext(next);
  // A step of the walk: a row of the result has begun, and one is done. Products are added for
  // those rows of the result for which they are needed.
  const auto walk = [&](int step, auto is_needed) {
#pragma unroll
    for (int phase = 0; phase < W::kStride; ++phase) {
      Acc x[kPixels][W::kEntries];
      next.WidenTo(x);
      const bool exists = next_exists;
      next_exists = image.LoadNext(next);
#pragma unroll
      for (int m = W::kRamp; m >= 0; --m) {
        if (phase == 0) {
#pragma unroll
          for (int c = 0; c < W::kColumns; ++c) {
#pragma unroll
            for (int v = 0; v < W::kPack; ++v) sums[m][c][v] = m > 0 ? sums[m - 1][c][v] : Acc{0};
          }
        }
        const int r = m * W::kStride + phase;
        if (r >= W::kTaps || !is_needed(m, exists)) continue;
#pragma unroll
        for (int s = 0; s < W::kTaps; ++s) {
#pragma unroll
          for (int i = 0; i < W::kFan; ++i) {
#pragma unroll
            for (int c = 0; c < W::kColumns; ++c) {
#pragma unroll
              for (int v = 0; v < W::kPack; ++v) {
                sums[m][c][v] += weights.of[r][s][i][v] * x[c * W::kStride + s][i + v];
              }
            }
          }
        }
      }
    }
    if (step >= W::kRamp) {
#pragma unroll
      for (int c = 0; c < W::kColumns; ++c) {
        Finish(p.epilogue, item.channel, W::kPack, sums[W::kRamp][c]);
      }
      result.StoreNext(true, sums[W::kRamp]);
    }
  };
  const auto all = [](int, bool) { return true; };
  for (int step = 0; step < rows + W::kRamp; ++step) {
    if constexpr (!kSkips) {
      walk(step, all);
    } else {
      // Steps of which all is needed have a loop of their own.
      for (; step >= W::kRamp && step < rows && (next_exists || needs_zeros); ++step) {
        walk(step, all);
      }
      if (step == rows + W::kRamp) break;
      walk(step, [&](int m, bool exists) {
        return (exists || needs_zeros) && m <= step && step - m < rows;
      });
    }
  }
}

template <typename T, typename W>
__global__ void __launch_bounds__(kThreads, kWalkBlocks<W>)
    WalkCotangents(const __grid_constant__ WalkParams p) {
  using Acc = Accumulator<T>;
  static_assert(W::kColumns % W::kStride == 0);
  constexpr int kPixels = W::kColumns / W::kStride + W::kRamp;
  const Item item(p, W());
  if (!item.exists) return;
  const Weights<T, W> weights(p, item.channel);
  const int column = item.strip * W::kColumns;
  const int begin = item.part * p.part_groups;
  const int groups = min(p.part_groups, p.groups - begin);
  const int first_row = begin + p.first_row;
  Rows<T, kPixels, W::kEntries> image(
      p.image, item.image * p.image_rows * p.image_columns * p.image_pixel + weights.image_channel,
      first_row, min(p.image_rows, first_row + groups + W::kRamp),
      column / W::kStride + p.first_column, p.image_columns, p.image_pixel);
  int row = begin * W::kStride + p.row_shift;
  Result<T, W> result(p, item, row, column + p.column_shift);

  // sums[r] are those of the row of the result that has tap r of the next row of the cotangent.
  Acc sums[W::kTaps][W::kColumns][W::kPack] = {};
  typename Rows<T, kPixels, W::kEntries>::Row next;
  image.LoadNext(next);
  for (int step = 0; step < groups + W::kRamp; ++step) {
    Acc g[kPixels][W::kEntries];
    next.WidenTo(g);
    image.LoadNext(next);
#pragma unroll
    for (int r = 0; r < W::kTaps; ++r) {
#pragma unroll
      for (int c = 0; c < W::kColumns; ++c) {
#pragma unroll
        for (int s = c % W::kStride; s < W::kTaps; s += W::kStride) {
#pragma unroll
          for (int i = 0; i < W::kFan; ++i) {
#pragma unroll
            for (int v = 0; v < W::kPack; ++v) {
              sums[r][c][v] += weights.of[r][s][i][v] * g[(c - s) / W::kStride + W::kRamp][i + v];
            }
          }
        }
      }
    }
    if (step >= W::kRamp) {
#pragma unroll
      for (int r = 0; r < W::kStride; ++r, ++row) {
        result.StoreNext(static_cast<uint32_t>(row) < static_cast<uint32_t>(p.result_rows),
                         sums[r]);
      }
    }
#pragma unroll
    for (int r = 0; r < W::kTaps; ++r) {
#pragma unroll
      for (int c = 0; c < W::kColumns; ++c) {
#pragma unroll
        for (int v = 0; v < W::kPack; ++v) {
          sums[r][c][v] = r + W::kStride < W::kTaps ? sums[r + W::kStride][c][v] : Acc{0};
        }
      }
    }
  }
}

// So many blocks keep a multiprocessor busy. What a thread does before it walks, in rows.
constexpr int64_t kBusyBlocks = 3, kRowsBefore = 3;
// How many ways to cut rows there are to choose from.
constexpr int64_t kTrials = 8;

// Cuts `groups` of rows into parts that take the least time, if `threads` walk down each, a step
// for every group and `ramp` more.
int CutRows(int64_t groups, int64_t threads, int64_t ramp) {
  const int64_t first =
      std::clamp<int64_t>(kBusyBlocks * kThreads * kProcessors / threads, 1, groups);
  int64_t best = groups, least = INT64_MAX;
  for (int64_t parts = first; parts <= std::min(groups, first + kTrials); ++parts) {
    const int64_t part = CeilDiv(groups, parts);
    const int64_t blocks = CeilDiv(threads * CeilDiv(groups, part), kThreads);
    const int64_t cost =
        std::max(CeilDiv(blocks, kProcessors), kBusyBlocks) * (part + ramp + kRowsBefore);
    if (cost < least) {
      least = cost;
      best = part;
    }
  }
  return static_cast<int>(best);
}

template <typename T, typename W, bool kOfCotangents>
cudaError_t LaunchWalk(cudaStream_t stream, const Params& common, const Call& call, bool is_grad) {
  WalkParams p{};
  static_cast<Params&>(p) = common;
  const auto place = [&](const im2col::Window& dim, int& first, int& shift) {
    const int64_t low = dim.low;
    if constexpr (kOfCotangents) {
      const int64_t before = low >= 0 ? low / W::kStride : -CeilDiv(-low, W::kStride);
      first = static_cast<int>(before - W::kRamp);
      shift = static_cast<int>(before * W::kStride - low);
    } else {
      first = static_cast<int>(is_grad ? low - (W::kTaps - 1) : -low);
    }
  };
  place(call.dims[0], p.first_row, p.row_shift);
  place(call.dims[1], p.first_column, p.column_shift);
  p.is_mirrored = is_grad && !kOfCotangents;
  p.slabs = Slabs(p.result_pixel / W::kPack);
  p.strips = FastDivider64(CeilDiv(p.result_columns - p.column_shift, W::kColumns));
  p.groups = static_cast<int>(CeilDiv(p.result_rows - p.row_shift, kOfCotangents ? W::kStride : 1));

  const int64_t threads = p.images * p.strips.divisor() * p.slabs.threads();
  p.part_groups = CutRows(p.groups, threads, W::kRamp);
  p.parts = FastDivider64(CeilDiv(p.groups, p.part_groups));
  const int64_t blocks = CeilDiv(threads * p.parts.divisor(), kThreads);
  if constexpr (kOfCotangents) {
    return jaxops::cuda::Launch(&WalkCotangents<T, W>, blocks, kThreads, 0, stream, p);
  } else {
    return jaxops::cuda::Launch(&WalkRows<T, W>, blocks, kThreads, 0, stream, p);
  }
}

// --- any window ----------------------------------------------------------------------------------

constexpr int kMaxStride = 8;

// One dimension of a sum. Results are numbered cells of each remainder by `result_step`. Entry t of
// the sum for a cell is entry cell * image_step + begin + t * entry_step of the image times tap
// first_tap + t * tap_step, where `begin`, `first_tap` and how many there are is that of the
// remainder.
struct Steps {
  int image_step, entry_step, tap_step;
  FastDivider64 result_step;
  struct {
    int begin, first_tap, taps;
  } of[kMaxStride];

  Steps() = default;
  Steps(const im2col::Window& w, bool is_grad) {
    const int dilation = static_cast<int>(w.dilation), taps = static_cast<int>(w.taps);
    const int low = static_cast<int>(w.low), stride = static_cast<int>(w.stride);
    if (!is_grad) {
      image_step = stride;
      entry_step = dilation;
      tap_step = 1;
      result_step = FastDivider64(1);
      of[0] = {-low, 0, taps};
      return;
    }
    // Taps that are a multiple of this apart meet the same remainder.
    image_step = 1;
    tap_step = 1;
    while (tap_step * dilation % stride != 0) ++tap_step;
    entry_step = -(tap_step * dilation / stride);
    result_step = FastDivider64(stride);
    for (int r = 0; r < stride; ++r) {
      of[r] = {0, 0, 0};
      for (int t = 0; t < std::min(taps, tap_step); ++t) {
        if ((r + low - t * dilation) % stride != 0) continue;
        of[r] = {(r + low - t * dilation) / stride, t,
                 static_cast<int>(CeilDiv(taps - t, tap_step))};
        break;
      }
    }
  }
};

struct TapsParams : Params {
  Steps rows, columns;
  FastDivider64 row_divider;  // rows of the result
  int kernel_columns;
};

constexpr int kStripColumns = 4;

template <typename T, int kPack>
__device__ __forceinline__ void Load(Accumulator<T> (&to)[kPack], const T* address) {
  Raw<T, kPack> raw;
  raw.Load(reinterpret_cast<const char*>(address));
  raw.WidenTo(to);
}

template <typename T, int kPack>
__global__ void __launch_bounds__(kThreads) SumTaps(const __grid_constant__ TapsParams p) {
  using Acc = Accumulator<T>;
  uint64_t left = uint64_t{blockIdx.x} * kThreads + threadIdx.x;
  const int64_t lane = p.slabs.lanes.Peel(left);
  const int column_rest = static_cast<int>(p.columns.result_step.Peel(left));
  const int first_cell = static_cast<int>(p.strips.Peel(left)) * kStripColumns;
  const int64_t pack = p.slabs.slabs.Peel(left) * p.slabs.lanes.divisor() + lane;
  const int row = static_cast<int>(p.row_divider.Peel(left));
  const int64_t image = left;
  const int column_step = static_cast<int>(p.columns.result_step.divisor());
  const int first_column = first_cell * column_step + column_rest;
  if (image >= p.images || pack >= p.slabs.packs || first_column >= p.result_columns) return;
  const int64_t channel = pack * kPack;
  int64_t image_channel, of_kernel;
  p.channels.Find(channel, image_channel, of_kernel);
  uint64_t row_cell = row;
  const int row_rest = static_cast<int>(p.rows.result_step.Peel(row_cell));

  const auto& of_row = p.rows.of[row_rest];
  const auto& of_column = p.columns.of[column_rest];
  const T* pixels = static_cast<const T*>(p.image);
  const T* kernel = static_cast<const T*>(p.kernel) + of_kernel;
  // Packs are of channels that are groups of their own.
  const int64_t fan = kPack > 1 ? 1 : p.channels.image_fan;
  const int64_t apart = p.columns.image_step * p.image_pixel;
  Acc sums[kStripColumns][kPack] = {};
  for (int r = 0; r < of_row.taps; ++r) {
    const int image_row =
        static_cast<int>(row_cell) * p.rows.image_step + of_row.begin + r * p.rows.entry_step;
    const bool has_row = static_cast<uint32_t>(image_row) < static_cast<uint32_t>(p.image_rows);
    const int tap_row = (of_row.first_tap + r * p.rows.tap_step) * p.kernel_columns;
    const int64_t of_image_row =
        (image * p.image_rows + image_row) * p.image_columns * p.image_pixel + image_channel;
    for (int s = 0; s < of_column.taps; ++s) {
      const int column =
          first_cell * p.columns.image_step + of_column.begin + s * p.columns.entry_step;
      const int64_t tap = tap_row + of_column.first_tap + s * p.columns.tap_step;
      int64_t at = of_image_row + column * p.image_pixel;
      int64_t of_tap = tap * p.channels.tap;
      for (int64_t i = 0; i < fan; ++i, ++at, of_tap += p.channels.channel) {
        Acc weight[kPack];
        Load(weight, kernel + of_tap);
#pragma unroll
        for (int c = 0; c < kStripColumns; ++c) {
          Acc x[kPack] = {};
          if (has_row && static_cast<uint32_t>(column + c * p.columns.image_step) <
                             static_cast<uint32_t>(p.image_columns)) {
            Load(x, pixels + (at + c * apart));
          }
#pragma unroll
          for (int v = 0; v < kPack; ++v) sums[c][v] += weight[v] * x[v];
        }
      }
    }
  }
  const int64_t at = (image * p.result_rows + row) * p.result_columns * p.result_pixel + channel;
#pragma unroll
  for (int c = 0; c < kStripColumns; ++c) {
    const int column = first_column + c * column_step;
    if (column < p.result_columns) {
      Finish(p.epilogue, channel, kPack, sums[c]);
      StoreSums<T>(p.result, at + column * p.result_pixel, p.result_is_f32, sums[c]);
    }
  }
}

template <typename T, int kPack>
cudaError_t LaunchTaps(cudaStream_t stream, const Params& common, const Call& call, bool is_grad) {
  const im2col::Window& h = call.dims[0];
  const im2col::Window& w = call.dims[1];
  if (std::max(h.stride, w.stride) > kMaxStride) return cudaErrorNotSupported;
  TapsParams p{};
  static_cast<Params&>(p) = common;
  p.rows = Steps(h, is_grad);
  p.columns = Steps(w, is_grad);
  p.row_divider = FastDivider64(p.result_rows);
  p.kernel_columns = static_cast<int>(w.taps);
  p.slabs = Slabs(p.result_pixel / kPack);
  const int64_t column_step = p.columns.result_step.divisor();
  p.strips = FastDivider64(CeilDiv(CeilDiv(p.result_columns, column_step), kStripColumns));
  const int64_t threads =
      p.images * p.result_rows * column_step * p.strips.divisor() * p.slabs.threads();
  return jaxops::cuda::Launch(&SumTaps<T, kPack>, CeilDiv(threads, kThreads), kThreads, 0, stream,
                              p);
}

// --- what the host decides -----------------------------------------------------------------------

template <typename T>
cudaError_t LaunchOf(cudaStream_t stream, const Params& p, const Call& call, bool is_grad) {
  const int64_t taps = SquareTaps(call), stride = call.dims[1].stride;
  const int64_t fan = p.channels.image_fan;
  const bool has_pairs = fan == 1 && p.channels.result_fan.divisor() == 1 && call.channels % 2 == 0;
  if constexpr (!std::is_same_v<T, double>) {
    const auto walk = [&]<typename W>(W) {
      return LaunchWalk<T, W, false>(stream, p, call, is_grad);
    };
    // Pairs of 16-bit entries are as wide as one of f32.
    constexpr int kPair = sizeof(T) == 2 ? 2 : 1;
    const auto with_stride = [&]<int kTaps, int kFan, int kPack>(Walk<kTaps, 1, kFan, kPack, 1>) {
      constexpr int kColumns = kFan > 1 ? 4 : 8;
      if (stride == 1) return walk(Walk<kTaps, 1, kFan, kPack, kColumns>());
      if (is_grad) {
        return LaunchWalk<T, Walk<kTaps, 2, kFan, kPack, kColumns>, true>(stream, p, call, true);
      }
      return walk(Walk<kTaps, 2, kFan, kPack, kColumns / 2>());
    };
    const bool walks = stride <= 2 && AreNear(std::max(call.channels, call.outputs));
    if (taps == 3 && walks) {
      if (fan == 4) return with_stride(Walk<3, 1, 4, 1, 1>());
      if (has_pairs) return with_stride(Walk<3, 1, 1, kPair, 1>());
      if (fan == 1) return with_stride(Walk<3, 1, 1, 1, 1>());
    }
    if (taps == 5 && walks && fan == 1) return with_stride(Walk<5, 1, 1, 1, 1>());
    if (taps == 7 && walks && stride == 1 && fan == 1) return walk(Walk<7, 1, 1, 1, 8>());
  }
  return has_pairs ? LaunchTaps<T, 2>(stream, p, call, is_grad)
                   : LaunchTaps<T, 1>(stream, p, call, is_grad);
}

cudaError_t LaunchSum(cudaStream_t stream, const Call& call, bool is_grad) {
  const im2col::Window& h = call.dims[0];
  const im2col::Window& w = call.dims[1];
  if (h.taps * w.taps > kMaxTaps) return cudaErrorNotSupported;
  Params p{};
  p.image = call.image;
  p.kernel = call.kernel;
  p.result = call.result;
  p.image_rows = static_cast<int>(is_grad ? h.out : h.in);
  p.image_columns = static_cast<int>(is_grad ? w.out : w.in);
  p.result_rows = static_cast<int>(is_grad ? h.in : h.out);
  p.result_columns = static_cast<int>(is_grad ? w.in : w.out);
  p.image_pixel = is_grad ? call.outputs : call.channels;
  p.result_pixel = is_grad ? call.channels : call.outputs;
  p.images = call.images;
  p.channels = Channels(call, is_grad);
  p.result_is_f32 = call.result_dtype == DType::kF32;
  p.epilogue = call.epilogue;
  return jaxops::cuda::DispatchFloat(
      call.dtype, [&](auto zero) { return LaunchOf<decltype(zero)>(stream, p, call, is_grad); });
}

}  // namespace

cudaError_t LaunchForwardDirect(cudaStream_t stream, const Call& call) {
  return LaunchSum(stream, call, false);
}

cudaError_t LaunchInputGradDirect(cudaStream_t stream, const Call& call) {
  return LaunchSum(stream, call, true);
}

}  // namespace jaxops::conv::cuda

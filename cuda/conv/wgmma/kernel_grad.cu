// The kernel gradient of a convolution on Hopper, as a matrix product over pixels.
//
// A row of the product is a tap and a channel, a column is an output, and the sum is over the
// pixels of all images: the transposed patches, which are never stored, times the cotangent. As in
// the forward product a bulk copy brings the rows of the image that the windows of some pixels
// touch, once for all taps, and an entry of a patch is an address; here ldmatrix also transposes.
// The cotangent of the same pixels is the right operand as it lies in shared memory.
//
// Fragments for every tap are as many bytes to read as the right operand, and both together bound
// the product. For 16-bit types, without strides and with more than 32 channels, stages are runs
// (struct Run): rows of the image one after the other, and the cotangent in rows of the same width,
// filled up with zeros. The windows of a tap are then the windows of another tap some entries
// further, whatever row they are in, and are themselves the right operand; the cotangent is the
// left operand, and one fragment of the cotangent serves all taps. The price is that the zeros are
// multiplied too. With strides, the entries of the image that are whole strides apart are an image
// without strides, a phase: a stage has a run of each phase, and a tap has one phase.
//
// A NaN or Inf of the image times the zeros between pixels is NaN, in the sums of taps that the NaN
// or Inf does not belong to, and for all outputs of a block. A block with such sums looks for a NaN
// or Inf next to these zeros. If the block finds one, it computes the sums of the taps that meet it
// again, with entries in registers that are zero where no pixel is.
//
// Float32 is multiplied as TF32, whose right operand must have pixels next to each other. A few
// warps transpose the cotangents of a stage in shared memory. The left operand may come from
// registers: a lane loads the entries of the image that it multiplies.
//
// A block has 64 outputs, up to 64 channels and some of the taps, and a range of the pixels. Such
// blocks are too few to fill a GPU unless pixels are split. The blocks of a cluster are splits of
// the same sums and add them up in each other's shared memory. Where a cluster is not enough, each
// cluster writes its part to a workspace and a second kernel adds the parts. The order is always
// the same.
#include "cuda/conv/add_parts.h"
#include "cuda/conv/wgmma/kernel_grad.cuh"

namespace jaxops::conv::cuda {
namespace kernel_grad {
namespace {

struct Barriers {
  uint64_t full[kMaxStages], empty[kMaxStages];
  uint64_t transposed[kMaxStages];  // for float32
  // The remaining members serve sums of runs that are not finite. Each member serves one vote.
  uint32_t are_nan, again, open;
  uint32_t whole[4 * kWarpgroups];  // bits of a warp: units that have a channel of only NaNs
  uint32_t places;                  // entries in the list that MeetNotFinite makes
};
static_assert(sizeof(Barriers) <= kBarrierBytes);

// Barriers of a block: kDone is for the warps that multiply, kReady for all warps, and kVote for
// the warps that multiply and the warp that copies.
[[maybe_unused]] constexpr int kDone = 1, kReady = 2, kVote = 3;

// Fills stages, and for each stage a table of the addresses where the windows of its pixels begin.
// The address is -1 where no pixel exists: next to the last column of the last strip and after the
// last row.
template <typename T>
__device__ void CopyStages(const Params& p, const Item& item, Barriers& barriers, int32_t* tables,
                           char* stages) {
  const int lane = threadIdx.x % 32;
  int row_of[kPixels / 32], column_of[kPixels / 32];
#pragma unroll
  for (int k = 0; k < kPixels / 32; ++k) {
    const int pixel = lane + 32 * k;
    const bool exists = pixel < p.stage_pixels;
    uint32_t row = pixel;
    const int column = p.strip_width.DivMod(row);
    row_of[k] = exists ? row : 0;
    column_of[k] = exists ? column : INT32_MAX;
  }

  Ring ring;
  for (int at = item.begin; at < item.end; ++at) {
    const int first = at * p.stage_rows;
    const Rows rows(p, first, first + p.stage_rows - 1);
    uint32_t pixel_image = first + lane;
    const int pixel_row = p.rows.DivMod(pixel_image);
    const int pixel_strip = pixel_image;
    const int pixel_column = p.strips.DivMod(pixel_image) * p.strip_width.divisor();
    const int bytes = rows.Of(p, pixel_strip, pixel_row) * p.pitch;
    const int left = p.columns - pixel_column;

    Wait(&barriers.empty[ring.stage], ring.parity ^ 1);
    char* image_stage = stages + ring.stage * (p.image_stage + p.cotangent_stage);
    const int stage_address = static_cast<int>(SharedAddress(image_stage));
    int32_t* table = tables + ring.stage * kPixels;
#pragma unroll
    for (int k = 0; k < kPixels / 32; ++k) {
      const int row_bytes = __shfl_sync(~0u, bytes, row_of[k]);
      const int row_left = __shfl_sync(~0u, left, row_of[k]);
      table[lane + 32 * k] =
          column_of[k] < row_left ? stage_address + row_bytes + column_of[k] * p.column_bytes : -1;
    }
    // Every lane releases its writes to the table.
    uint64_t* full = &barriers.full[ring.stage];
    if (lane == 0) {
      Expect(full, p.planes * rows.count * p.copy_bytes + p.cotangent_bytes);
    } else {
      ptx::mbarrier_arrive(full);
    }
    __syncwarp();

    if (lane < p.stage_rows) {
#pragma unroll
      for (int i = 0; i < kColumnPlanes<T>; ++i) {
        const int32_t from[4] = {item.column + i * kColumns / kColumnPlanes<T>, pixel_column,
                                 pixel_row, static_cast<int32_t>(pixel_image)};
        const int pixel = i * p.steps * kStepPixels<T> + lane * p.strip_width.divisor();
        ptx::cp_async_bulk_tensor(ptx::space_cluster, ptx::space_global,
                                  image_stage + p.image_stage + pixel * kRowBytes, &p.cotangent_map,
                                  from, full);
      }
    }
    for (int i = 0; i < p.planes; ++i) {
      CopyRows(p, p.image_map[0], rows, item.set, item.channel + i * p.row_bytes / sizeof(T),
               image_stage + i * p.plane_bytes, full);
    }
    ring.Advance(p.ring);
  }
}

// Fills stages with runs. A stage is the rows of an image that the windows of some rows of a strip
// touch, and the cotangent of these pixels with zeros next to them, so that rows of both have the
// same width.
[[maybe_unused]] __device__ void CopyRuns(const Params& p, const Item& item, int begin, int end,
                                          Barriers& barriers, Ring& ring, char* stages) {
  const bool copies = threadIdx.x % 32 == 0;
  // All lanes loop, so that the warp stays converged.
  for (int at = begin; at < end; ++at, ring.Advance(p.ring)) {
    Wait(&barriers.empty[ring.stage], ring.parity ^ 1);
    if (!copies) continue;
    uint32_t strip = at;
    const int row = p.runs.DivMod(strip) * p.stage_rows;
    uint32_t image = strip;
    strip = p.strips.DivMod(image);
    uint64_t* full = &barriers.full[ring.stage];
    Expect(full, p.image_bytes + p.cotangent_bytes);
    char* stage = stages + ring.stage * (p.image_stage + p.cotangent_stage);
    const int column = strip * p.strip_width.divisor();
    for (int i = 0; i < p.phases; ++i) {
      const Phase& phase = p.phase[i];
      const int32_t of_image[4] = {item.channel, column + item.set.column + phase.column,
                                   row + item.set.row + phase.row, static_cast<int32_t>(image)};
      ptx::cp_async_bulk_tensor(ptx::space_cluster, ptx::space_global, stage + phase.begin,
                                p.image_map + i, of_image, full);
    }
    const int32_t of_cotangent[5] = {item.column, 0, static_cast<int32_t>(strip), row,
                                     static_cast<int32_t>(image)};
    ptx::cp_async_bulk_tensor(ptx::space_cluster, ptx::space_global, stage + p.image_stage,
                              &p.cotangent_map, of_cotangent, full);
  }
}

// Transposes cotangents for products of TF32, which take the pixels of an output next to each
// other, in each step the pixels at even places first. Rows of 128 bytes, 32 pixels, are swizzled
// as bulk copies swizzle them.
[[maybe_unused]] __device__ void TransposeStages(const Params& p, const Item& item,
                                                 Barriers& barriers, char* stages) {
  const int lane = threadIdx.x % 32;
  constexpr int kLanePlanes = kColumnPlanes<float>;
  Ring ring;
  for (int at = item.begin; at < item.end; ++at) {
    Wait(&barriers.full[ring.stage], ring.parity);
    const char* from = stages + ring.stage * (p.image_stage + p.cotangent_stage) + p.image_stage;
    char* to = const_cast<char*>(from) + kLanePlanes * p.steps * kStepPixels<float> * kRowBytes;
    const int count = p.steps * 2 * kLanePlanes;
#pragma unroll 2
    for (int k = threadIdx.x / 32 - 1; k < count; k += kTransposers) {
      const int plane = k % kLanePlanes;
      const int quarter = k / kLanePlanes;  // four pixels
      const int first = plane * p.steps * 8 + quarter / 2 * 8 + quarter % 2;
      uint4 v;
      uint32_t* entries = &v.x;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int pixel = first + 2 * i;
        const int swizzled = pixel * kRowBytes + ((lane / 4) ^ (pixel % 8)) * 16 + lane % 4 * 4;
        entries[i] = Operand<float>(*reinterpret_cast<const uint32_t*>(from + swizzled));
      }
      const int output = plane * 32 + lane;
      *reinterpret_cast<uint4*>(to + (quarter / 8 * kColumns + output) * kRowBytes +
                                ((quarter % 8) ^ (output % 8)) * 16) = v;
    }
    ptx::fence_proxy_async(ptx::space_shared);
    ptx::mbarrier_arrive(&barriers.transposed[ring.stage]);
    ring.Advance(p.ring);
  }
}

[[maybe_unused]] __device__ inline void LoadPair(uint32_t address, uint32_t* to) {
  asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];" : "=r"(to[0]), "=r"(to[1]) : "r"(address));
}

// Selects a, or b where `sign` is negative, in a way that the compiler does not turn into a branch.
[[maybe_unused]] __device__ inline uint32_t SelectBySign(int32_t sign, uint32_t a, uint32_t b) {
  uint32_t selected;
  asm("slct.b32.s32 %0, %1, %2, %3;" : "=r"(selected) : "r"(a), "r"(b), "r"(sign));
  return selected;
}

// Sums kUnits blocks of 64 rows of the product from `first` on, in one of the warpgroups, which
// have `threads` threads together, and writes the sums over the stages.
template <typename T, int kUnits>
__device__ void MultiplyUnits(const Params& p, const Item& item, int first, int threads,
                              Barriers& barriers, const int32_t* tables, uint32_t zeros,
                              char* stages) {
  const int lane = threadIdx.x % 32;
  const int warp_row = threadIdx.x / 32 % 4 * 16;
  constexpr bool kIsFloat = std::is_same_v<T, float>;
  const int channels = p.block;
  // Swizzling is an exclusive or with these bits of an address, shifted: stages are aligned.
  uint32_t swizzle = Swizzle::OfRows(p.row_bytes).mask << 4;
  const uint64_t descriptor = MatrixDescriptor(kIsFloat ? 16 : 1024, 1024, kRowBytes);

  // Lanes give the addresses of 8 pixels and 8 channels each, in the order of the four matrices:
  // channels first. For float32 a lane loads two channels of two pixels itself.
  const int lane_pixel = kIsFloat ? lane % 4 * 2 : lane / 16 * 8 + lane % 8;
  const int lane_bytes = kIsFloat ? lane / 4 * 8 : lane / 8 % 2 * 16;
  uint32_t tap[kUnits];
#pragma unroll
  for (int u = 0; u < kUnits; ++u) {
    // Rows after the last tap repeat it, and are not stored.
    const int at = item.set.begin + ((first + u) * 64 + warp_row) / channels;
    const int bytes = warp_row % channels * static_cast<int>(sizeof(T));
    tap[u] = p.tap[min(at, item.set.end - 1)] + bytes / kRowBytes * p.plane_bytes +
             bytes % kRowBytes + lane_bytes;
    Keep(tap[u]);
  }
  Keep(swizzle);
  Keep(zeros);
  const uint32_t first_stage = SharedAddress(stages);

  float sums[kUnits][kColumns / 2] = {};
  uint32_t fragments[2][kUnits][4];
  int step = 0;
  int done = -1;  // the previous stage, if products in flight still use it
  int left = (item.end - item.begin) * p.steps;
  Ring ring;
  const int32_t* table = nullptr;
  uint64_t b = 0;
  const auto enter = [&] {
    Wait(&barriers.full[ring.stage], ring.parity);
    uint32_t cotangents =
        first_stage + ring.stage * (p.image_stage + p.cotangent_stage) + p.image_stage;
    if constexpr (kIsFloat) {
      Wait(&barriers.transposed[ring.stage], ring.parity);
      cotangents += kColumnPlanes<T> * p.steps * kStepPixels<T> * kRowBytes;
    }
    table = tables + ring.stage * kPixels + lane_pixel;
    b = At(descriptor, cotangents);
  };
  const auto multiply = [&](uint32_t (&a)[kUnits][4]) {
    // Pixels that do not exist are zeros here. Their cotangents are zeros too, but the bytes that a
    // stage has in their place need not be finite.
    const auto address = [&](int pixel, int u) {
      const uint32_t entry = pixel + tap[u];
      return SelectBySign(pixel, entry ^ (entry >> 3 & swizzle), zeros);
    };
    if constexpr (kIsFloat) {
      const int2 pixels = *reinterpret_cast<const int2*>(table);
      uint32_t loaded[kUnits][4];
#pragma unroll
      for (int u = 0; u < kUnits; ++u) {
        LoadPair(address(pixels.x, u), &loaded[u][0]);
        LoadPair(address(pixels.y, u), &loaded[u][2]);
      }
#pragma unroll
      for (int u = 0; u < kUnits; ++u) {
#pragma unroll
        for (int i = 0; i < 4; ++i) a[u][i] = Operand<T>(loaded[u][i]);
      }
    } else {
      const int pixel = *table;
#pragma unroll
      for (int u = 0; u < kUnits; ++u) LoadTransposed(a[u], address(pixel, u));
    }
    table += kStepPixels<T>;
    ProductsBegin();
#pragma unroll
    for (int u = 0; u < kUnits; ++u) Multiply<T, kColumns, !kIsFloat>(sums[u], a[u], b, 1);
    ProductsCommit();
    // The products of the previous step are done.
    ProductsWait<1>();
    if (done >= 0) Release(&barriers.empty[done]);
    done = -1;
    ++step;
    if constexpr (kIsFloat) {
      // A swizzled row has four steps.
      b += (step % 4 == 0 ? kColumns * kRowBytes - 3 * 32 : 32) >> 4;
    } else {
      b += 16 * 2 * kColumns >> 4;
    }
    --left;
    if (step == p.steps) {
      step = 0;
      done = ring.stage;
      ring.Advance(p.ring);
      if (left > 0) enter();  // while the last products are in flight
    }
  };
  if (left > 0) enter();
  // The fragments of a step are loaded while the products of the previous step are in flight.
  while (left > 0) {
    multiply(fragments[0]);
    if (left == 0) break;
    multiply(fragments[1]);
  }
  ProductsWait<0>();

  __barrier_sync_count(kDone, threads);  // no product of any warpgroup reads a stage any more
#pragma unroll
  for (int u = 0; u < kUnits; ++u) {
#pragma unroll
    for (int i = 0; i < kColumns / 2; i += 2) {
      const int row = (first + u) * 64 + warp_row +
                      (kIsFloat ? lane / 4 * 2 + i / 2 % 2 : i / 2 % 2 * 8 + lane / 4);
      const int column = i / 4 * 8 + lane % 4 * 2;
      *reinterpret_cast<float2*>(stages + SumBytes<false>(row, column)) = {sums[u][i],
                                                                           sums[u][i + 1]};
    }
  }
}

// Synchronizes warps at a barrier; all threads of a warp arrive together.
[[maybe_unused]] __device__ inline void SyncWarps(int barrier, int threads) {
  __syncwarp();
  __barrier_sync_count(barrier, threads);
}

// Returns the or of the bits of all threads that come to a barrier. A reduction in the barrier
// itself would do, but tools that check barriers expect all threads of a block at such a barrier.
[[maybe_unused]] __device__ inline uint32_t Vote(uint32_t& votes, uint32_t bits, int barrier,
                                                 int threads) {
  if (bits != 0) atomicOr(&votes, bits);
  SyncWarps(barrier, threads);
  return *const_cast<const volatile uint32_t*>(&votes);
}

[[maybe_unused]] __device__ inline void Clear(char* from, int bytes, int lane) {
  for (int i = lane * 16; i < bytes; i += 32 * 16) {
    *reinterpret_cast<uint4*>(from + i) = {0, 0, 0, 0};
  }
}

// Clears the bytes of stages that no copy writes, in warp `warp` of `warps` that share the work:
// the entries that fill up the last step of the cotangent and, for runs, of the image.
template <typename T, bool kRuns>
__device__ inline void ClearStages(const Params& p, int warp, int warps, char* stages) {
  const int lane = threadIdx.x % 32;
  const auto clear = [&](char* from, int bytes) { Clear(from, bytes, lane); };
  for (int i = warp; i < p.ring; i += warps) {
    char* stage = stages + i * (p.image_stage + p.cotangent_stage);
    if constexpr (kRuns) {
      for (int k = 0; k < p.phases; ++k) {
        const int from = p.phase[k].begin + p.phase[k].bytes;
        clear(stage + from, (k + 1 < p.phases ? p.phase[k + 1].begin : p.image_stage) - from);
      }
    }
    if constexpr (std::is_same_v<T, float>) {
      const int plane = p.steps * kStepPixels<T> * kRowBytes;
      const int copied = p.stage_pixels * kRowBytes;
      for (int k = 0; k < kColumnPlanes<T>; ++k) {
        clear(stage + p.image_stage + k * plane + copied, plane - copied);
      }
    } else {
      clear(stage + p.image_stage + p.cotangent_bytes, p.cotangent_stage - p.cotangent_bytes);
    }
  }
}

// A run and its pixels.
struct Run {
  int image, column, row;  // of the first pixel
  int rows, steps;
  bool is_last;  // of its strip

  __device__ Run(const Params& p, int number) {
    uint32_t strip = number;
    row = p.runs.DivMod(strip) * p.stage_rows;
    const int left = p.rows.divisor() - row;
    rows = min(p.stage_rows, left);
    is_last = left <= p.stage_rows;
    steps = is_last ? p.last_steps : p.steps;
    uint32_t of_images = strip;
    column = p.strips.DivMod(of_images) * p.strip_width.divisor();
    image = of_images;
  }
};

// Tells whether any of 16 bytes of entries is NaN or Inf.
template <typename T>
__device__ inline bool HasNotFinite(const uint4& entries) {
  constexpr uint32_t kExponent = std::is_same_v<T, __half> ? 0x7C00 : 0x7F80;
  const uint32_t pairs[] = {entries.x, entries.y, entries.z, entries.w};
  bool has = false;
#pragma unroll
  for (const uint32_t pair : pairs) {
    has |= (pair & kExponent) == kExponent || (pair >> 16 & kExponent) == kExponent;
  }
  return has;
}

// Returns the units of a block with a tap that meets an entry that is not finite with the zeros
// between the pixels of its runs, as far as this thread finds out. All warps that multiply call
// this function, with the same `candidates`, and list the entries that the units meet in this way
// in any run.
template <typename T>
__device__ __forceinline__ uint32_t MeetNotFinite(const Params& p, const Item& item,
                                                  uint32_t candidates, int threads,
                                                  uint32_t& places, uint32_t* list) {
  // An item of the list is the number of an entry in a stage and two bits for each unit that meets
  // the entry: one for runs that are the last of their strips, one for the other runs.
  constexpr int kEntryBits = 10;
  static_assert(kStagesBytes / 2 / kRowBytes <= 1 << kEntryBits);
  static_assert(sizeof(uint32_t) << kEntryBits <= kTableBytes);
  static_assert(kEntryBits + 2 * kBlockUnits <= 32);
  const int thread = threadIdx.x - 128;
  const FastDivider& columns = p.columns_of_row;
  const int width = p.strip_width.divisor(), runs = p.runs.divisor();
  const int last_rows = p.rows.divisor() - (runs - 1) * p.stage_rows;
#pragma unroll 1
  for (int i = 0; i < p.phases; ++i) {
    const Phase& phase = p.phase[i];
#pragma unroll 1
    for (int k = thread; k < phase.bytes / kRowBytes; k += threads) {
      uint32_t word = 0;
#pragma unroll 1
      for (int t = 0; t < item.set.end - item.set.begin; ++t) {
        const int from = p.tap[item.set.begin + t] - phase.begin;
        const int place = k - from / kRowBytes;
        if (!(candidates >> t & 1) || from < 0 || from >= phase.bytes || place < 0) continue;
        uint32_t row = place;
        const bool is_outside = columns.DivMod(row) >= width;
        const int of_row = row;
        if (place < p.last_steps * 16 && (is_outside || of_row >= last_rows)) {
          word |= 1u << (kEntryBits + t);
        }
        if (runs > 1 && place < p.steps * 16 && (is_outside || of_row >= p.stage_rows)) {
          word |= 1u << (kEntryBits + kBlockUnits + t);
        }
      }
      if (word != 0) list[atomicAdd(&places, 1)] = word | (phase.begin / kRowBytes + k);
    }
  }
  SyncWarps(kDone, threads);

  const int channel = item.channel + thread % 8 * 8;  // 8 threads share an entry
  if (channel >= p.channels) return 0;
  const T* image = static_cast<const T*>(p.image) + channel;
  const uint32_t count = *const_cast<const volatile uint32_t*>(&places);
  const uint32_t end = count * (item.end - item.begin);
  constexpr int kTogether = 8;  // entries in flight at once
  const int groups = threads / 8;
  uint32_t found = 0;
#pragma unroll 1
  for (uint32_t begin = thread / 8; begin < end; begin += kTogether * groups) {
    uint32_t units[kTogether];
    uint4 entries[kTogether];
#pragma unroll
    for (int j = 0; j < kTogether; ++j) {
      // Numbers after the last repeat the last.
      const uint32_t number = min(begin + j * groups, end - 1);
      const Run run(p, item.begin + number / count);
      const uint32_t word = list[number % count];
      const int entry = word & ((1 << kEntryBits) - 1);
      int i = 0;
      while (i + 1 < p.phases && p.phase[i + 1].begin <= entry * kRowBytes) ++i;
      const Phase& phase = p.phase[i];
      uint32_t row = entry - phase.begin / kRowBytes;
      const int column = columns.DivMod(row);
      const int y = (run.row + item.set.row + phase.row + static_cast<int>(row)) * p.stride_row +
                    phase.in_row;
      const int x = (run.column + item.set.column + phase.column + column) * p.stride_column +
                    phase.in_column;
      const bool exists = y >= 0 && y < p.image_rows && x >= 0 && x < p.image_columns;
      units[j] = exists ? word >> (run.is_last ? kEntryBits : kEntryBits + kBlockUnits) : 0;
      // Entries that do not exist read the first entry instead.
      const int64_t pixel =
          exists ? (run.image * int64_t{p.image_rows} + y) * p.image_columns + x : 0;
      entries[j] = *reinterpret_cast<const uint4*>(image + pixel * p.channels);
    }
#pragma unroll
    for (int j = 0; j < kTogether; ++j) found |= HasNotFinite<T>(entries[j]) ? units[j] : 0;
  }
  return found & ((1 << kBlockUnits) - 1);
}

// Adds the products of some stages to the sums of some taps of a block, with zeros in place of the
// entries that meet no pixel. A row of the sums is a channel and a column is an output.
template <typename T, int kUnits>
__device__ __forceinline__ void MultiplyPixels(const Params& p, const Item& item, const int* unit,
                                               int begin, int end, Barriers& barriers,
                                               uint32_t zeros, uint32_t first_stage, Ring& ring,
                                               float (*sums)[kColumns / 2]) {
  const int lane = threadIdx.x % 32;
  const int lane_pixel = lane / 16 * 8 + lane % 8;
  const int lane_channel = threadIdx.x / 32 % 4 * 16 + lane / 8 % 2 * 8;
  const uint64_t descriptor = MatrixDescriptor(1024, 1024, kRowBytes);
  const int width = p.strip_width.divisor();
  uint32_t tap[kUnits];
#pragma unroll
  for (int u = 0; u < kUnits; ++u) tap[u] = p.tap[item.set.begin + unit[u]] + lane_channel * 2;
  // The fragments of a step are loaded while the previous step is multiplied, if registers allow
  // that.
  constexpr bool kAhead = kUnits == 1;
  uint32_t fragments[kAhead ? 2 : 1][kUnits][4];
#pragma unroll 1
  for (int at = begin; at < end; ++at, ring.Advance(p.ring)) {
    const Run run(p, at);
    Wait(&barriers.full[ring.stage], ring.parity);
    const uint32_t stage = first_stage + ring.stage * (p.image_stage + p.cotangent_stage);
    uint64_t b = At(descriptor, stage + p.image_stage);
    int place = lane_pixel;
    const auto load = [&](uint32_t (&a)[kUnits][4]) {
      uint32_t row = place;
      const bool is_within = p.columns_of_row.DivMod(row) < width;
      const bool exists = is_within && static_cast<int>(row) < run.rows;
#pragma unroll
      for (int u = 0; u < kUnits; ++u) {
        const uint32_t entry = stage + tap[u] + place * kRowBytes;
        LoadTransposed(a[u], exists ? entry ^ Swizzle{7}(entry) : zeros);
      }
      place += 16;
    };
    const auto multiply = [&](uint32_t (&a)[kUnits][4], uint32_t (&next)[kUnits][4]) {
      ProductsBegin();
#pragma unroll
      for (int u = 0; u < kUnits; ++u) Multiply<T, kColumns, true>(sums[u], a[u], b, 1);
      ProductsCommit();
      if constexpr (kAhead) load(next);  // after the last step too: no pixel is there
      ProductsWait<0>();
      b += 16 * kRowBytes >> 4;
    };
    if constexpr (kAhead) load(fragments[0]);
#pragma unroll 1
    for (int step = 0; step < run.steps; ++step) {
      if constexpr (kAhead) {
        multiply(fragments[0], fragments[1]);
        if (++step == run.steps) break;
        multiply(fragments[1], fragments[0]);
      } else {
        load(fragments[0]);
        multiply(fragments[0], fragments[0]);
      }
    }
    Release(&barriers.empty[ring.stage]);
  }
}

// RowOfRuns and ColumnOfRuns tell where MultiplyRuns writes a sum of this lane: the row of a unit
// and the column.
[[maybe_unused]] __device__ inline int RowOfRuns(int i) {
  return i / 4 * 8 + threadIdx.x % 4 * 2 + i % 2;
}
[[maybe_unused]] __device__ inline int ColumnOfRuns(int i) {
  return threadIdx.x / 32 % 4 * 16 + i / 2 % 2 * 8 + threadIdx.x % 32 / 4;
}

// Computes sums of a warpgroup's units again that may be NaN only because zeros between pixels met
// an entry that is not finite: the sums with a bit in `candidates`, if such an entry is found. All
// warps that multiply call this function, and the warp that copies brings the stages again.
template <typename T, int kUnits>
__device__ __forceinline__ void SumAgain(const Params& p, const Item& item, int first, int threads,
                                         Barriers& barriers, Ring ring, uint32_t* list,
                                         uint32_t zeros, char* stages) {
  // A candidate has NaNs in all warps of a warpgroup. The barrier makes `candidates` the same for
  // all threads.
  SyncWarps(kDone, threads);
  uint32_t candidates = 0;
#pragma unroll
  for (int i = 0; i < kWarpgroups; ++i) {
    const volatile uint32_t* whole = barriers.whole + 4 * i;
    candidates |= whole[0] & whole[1] & whole[2] & whole[3];
  }
  uint32_t found = 0;
  if (candidates != 0) {
    found = MeetNotFinite<T>(p, item, candidates, threads, barriers.places, list);
  }
  found = Vote(barriers.again, found, kVote, threads + 32);
  if (found == 0) return;

  // Each list has four bits a unit. The units to compute again come first.
  uint32_t again = 0, others = 0;
  int count = 0, kept = 0;
#pragma unroll
  for (int u = 0; u < kUnits; ++u) {
    if (found >> (first + u) & 1) {
      again |= u << 4 * count++;
    } else {
      others |= u << 4 * kept++;
    }
  }
  again |= others << 4 * count;

  int unit[kUnits];
  float sums[kUnits][kColumns / 2];
#pragma unroll
  for (int u = 0; u < kUnits; ++u) {
    unit[u] = first + (again >> 4 * u & 15);
#pragma unroll
    for (int i = 0; i < kColumns / 2; ++i) {
      const char* left = stages + SumBytes<true>(unit[u] * 64 + RowOfRuns(i), ColumnOfRuns(i));
      sums[u][i] = u < count ? 0 : *reinterpret_cast<const float*>(left);
    }
  }
  SyncWarps(kDone, threads);
  // Sums were stored where no copy writes. Windows of pixels touch entries there that are padding.
  ClearStages<T, true>(p, threadIdx.x / 32 - 4, threads / 32, stages);
  ptx::fence_proxy_async(ptx::space_shared);
  SyncWarps(kVote, threads + 32);

  int begin = item.begin, end = item.begin + 1;
#pragma unroll 1
  while (true) {
    const auto multiply = [&](auto units) {
      MultiplyPixels<T, decltype(units)::value>(p, item, unit, begin, end, barriers, zeros,
                                                SharedAddress(stages), ring, sums);
    };
    switch (count) {
      case 1:
        multiply(std::integral_constant<int, 1>());
        break;
      case 2:
        multiply(std::integral_constant < int, kUnits<2 ? kUnits : 2>());
        break;
      case 3:
        multiply(std::integral_constant<int, kUnits>());
        break;
      default:
        for (int at = begin; at < end; ++at, ring.Advance(p.ring)) {
          Wait(&barriers.full[ring.stage], ring.parity);
          Release(&barriers.empty[ring.stage]);
        }
        break;
    }
    if (begin > item.begin) break;
    // Sums that are all NaN after the first stage remain NaN; a NaN of the cotangent is the usual
    // cause.
    const int lane = threadIdx.x % 32;
    const int channel = item.channel + threadIdx.x / 32 % 4 * 16 + lane / 4;
    const int output = item.column + lane % 4 * 2;
    bool open = false;
#pragma unroll
    for (int u = 0; u < kUnits; ++u) {
#pragma unroll
      for (int i = 0; i < kColumns / 2; ++i) {
        open |= u < count && !isnan(sums[u][i]) && channel + i / 2 % 2 * 8 < p.channels &&
                output + i / 4 * 8 + i % 2 < p.outputs;
      }
    }
    if (!Vote(barriers.open, open, kVote, threads + 32)) break;
    begin = end;
    end = item.end;
  }
  SyncWarps(kDone, threads);  // no product of any warpgroup reads a stage any more
#pragma unroll
  for (int u = 0; u < kUnits; ++u) {
#pragma unroll
    for (int i = 0; i < kColumns / 2; ++i) {
      // Rows and columns are swapped in the units that were computed again.
      const int row = u < count ? ColumnOfRuns(i) : RowOfRuns(i);
      const int column = u < count ? RowOfRuns(i) : ColumnOfRuns(i);
      *reinterpret_cast<float*>(stages + SumBytes<true>(unit[u] * 64 + row, column)) = sums[u][i];
    }
  }
}

// Sums like MultiplyUnits where stages are runs and a unit is a tap. The product is transposed: the
// left operand, the cotangent, serves all taps, whose windows are the right operand as they lie in
// shared memory, at one row offset for each tap.
template <typename T, int kUnits>
__device__ void MultiplyRuns(const Params& p, const Item& item, int first, int threads,
                             Barriers& barriers, uint32_t* list, uint32_t zeros, char* stages) {
  const int lane = threadIdx.x % 32;
  const int warp_output = threadIdx.x / 32 % 4 * 16;
  const uint64_t descriptor = MatrixDescriptor(1024, 1024, 128);

  // Lanes give the addresses of 8 pixels and 8 outputs each, outputs first.
  const uint32_t lane_bytes =
      (lane / 16 * 8 + lane % 8) * 2 * kColumns + warp_output * 2 + lane / 8 % 2 * 16;
  const uint32_t first_stage = SharedAddress(stages);
  uint32_t lane_cotangent = (lane_bytes ^ Swizzle{7}(lane_bytes)) + p.image_stage;
  uint32_t stage_bytes = p.image_stage + p.cotangent_stage;
  uint32_t steps = p.steps, last_steps = p.last_steps, runs = p.runs.divisor();
  uint32_t tap[kUnits];
#pragma unroll
  for (int u = 0; u < kUnits; ++u) {
    tap[u] = p.tap[item.set.begin + first + u] >> 4;
    Keep(tap[u]);
  }
  Keep(lane_cotangent);
  Keep(stage_bytes);
  Keep(steps);
  Keep(last_steps);
  Keep(runs);

  float sums[kUnits][kColumns / 2] = {};
  uint32_t fragments[2][4];
  const auto steps_before = [&](uint32_t stage) {
    const uint32_t run = p.runs.DivMod(stage);
    return stage * ((runs - 1) * steps + last_steps) + run * steps;
  };
  int left = steps_before(item.end) - steps_before(item.begin);
  uint32_t strip = item.begin;
  uint32_t run = p.runs.DivMod(strip);
  uint32_t step = 0;  // steps left in the stage
  int done = -1;      // the previous stage, if products in flight still use it
  Ring ring;
  uint32_t cotangent = 0, entries = 0;
  const auto enter = [&] {
    Wait(&barriers.full[ring.stage], ring.parity);
    const uint32_t stage = first_stage + ring.stage * stage_bytes;
    cotangent = stage + lane_cotangent;
    entries = static_cast<uint32_t>(At(descriptor, stage));
    const bool last = ++run == runs;
    step = last ? last_steps : steps;
    if (last) run = 0;
  };
  const auto multiply = [&](uint32_t (&a)[4]) {
    LoadTransposed(a, cotangent);
    cotangent += 16 * 2 * kColumns;
    ProductsBegin();
#pragma unroll
    for (int u = 0; u < kUnits; ++u) {
      // An address is in the lower half of a descriptor and has no carry to the upper half.
      const uint64_t b = (descriptor & 0xFFFFFFFF00000000) | (entries + tap[u]);
      Multiply<T, kColumns, true>(sums[u], a, b, 1);
    }
    ProductsCommit();
    // The products of the previous step are done.
    ProductsWait<1>();
    if (done >= 0) Release(&barriers.empty[done]);
    done = -1;
    entries += 16 * 128 >> 4;
    --left;
    if (--step == 0) {
      done = ring.stage;
      ring.Advance(p.ring);
      if (left > 0) enter();  // while the last products are in flight
    }
  };
  if (left > 0) enter();
  // The fragment of a step is loaded while the products of the previous step are in flight.
  while (left > 0) {
    multiply(fragments[0]);
    if (left == 0) break;
    multiply(fragments[1]);
  }
  ProductsWait<0>();

  // A tap's zeros between the pixels may have met a NaN or Inf that only other taps reach. The sums
  // of the tap are then NaN, and so is the total of these sums.
  bool has_nan = false;
#pragma unroll
  for (int u = 0; u < kUnits; ++u) {
    float total = 0;
#pragma unroll
    for (int i = 0; i < kColumns / 2; ++i) total += sums[u][i];
    has_nan |= isnan(total);
  }
  // The vote is also a barrier: after it no product of any warpgroup reads a stage.
  const bool any_nan = Vote(barriers.are_nan, has_nan, kVote, threads + 32) != 0;
#pragma unroll
  for (int u = 0; u < kUnits; ++u) {
#pragma unroll
    for (int i = 0; i < kColumns / 2; ++i) {
      const int row = (first + u) * 64 + RowOfRuns(i);
      *reinterpret_cast<float*>(stages + SumBytes<true>(row, ColumnOfRuns(i))) = sums[u][i];
    }
  }
  if (!any_nan) return;
  Release(&barriers.empty[done]);
  // A zero that meets a NaN or Inf of the image is NaN for all outputs. A NaN or Inf of the
  // cotangent is NaN for its own output only.
  uint32_t whole = 0;
#pragma unroll
  for (int u = 0; u < kUnits; ++u) {
    uint32_t channels = 0;  // one bit a channel
#pragma unroll
    for (int i = 0; i < kColumns / 2; i += 4) {
      channels |= (isnan(sums[u][i]) && isnan(sums[u][i + 2]) ? 1 : 0) << i / 2;
      channels |= (isnan(sums[u][i + 1]) && isnan(sums[u][i + 3]) ? 2 : 0) << i / 2;
    }
    // Lanes that are a multiple of four apart have other outputs of the same channels.
    for (int apart = 4; apart < 32; apart *= 2) channels &= __shfl_xor_sync(~0u, channels, apart);
    if (__any_sync(~0u, channels != 0)) whole |= 1u << (first + u);
  }
  if (lane == 0) barriers.whole[threadIdx.x / 32 - 4] = whole;
  SumAgain<T, kUnits>(p, item, first, threads, barriers, ring, list, zeros, stages);
}

// One warp of the first warpgroup copies.
constexpr int kThreads = 128 * (kWarpgroups + 1);

template <typename T, bool kRuns>
__global__ void __launch_bounds__(kThreads, 1) KernelGradWgmma(const __grid_constant__ Params p) {
#if JAXOPS_HAS_WGMMA
  extern __shared__ char shared[];
  char* aligned = shared + (1024 - SharedAddress(shared) % 1024) % 1024;
  Barriers& barriers = *reinterpret_cast<Barriers*>(aligned);
  char* zeros = aligned + kBarrierBytes;
  int32_t* tables = reinterpret_cast<int32_t*>(zeros + kZeroBytes);
  char* stages = aligned + kHeadBytes;
  const Item item(p);
  const int units = item.Units(p);

  // The first warp copies without waiting for the other warps, which clear the bytes that copies do
  // not write.
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (warp == 0) {
    if (lane < p.ring) {
      ptx::mbarrier_init(barriers.full + lane, kRuns ? 1 : 32);
      ptx::mbarrier_init(barriers.empty + lane, 4 * min(units, kWarpgroups));
      ptx::mbarrier_init(barriers.transposed + lane, 32 * kTransposers);
    }
    if constexpr (kRuns) {
      if (lane < 4 * kWarpgroups) barriers.whole[lane] = 0;
      if (lane == 0) barriers.are_nan = barriers.again = barriers.open = barriers.places = 0;
    }
    ptx::fence_mbarrier_init(ptx::sem_release, ptx::scope_cluster);
    ptx::fence_proxy_async(ptx::space_shared);
    __syncwarp();
    asm volatile("barrier.cta.arrive %0, %1;" ::"n"(kReady), "n"(kThreads) : "memory");
  } else {
    if (warp == kThreads / 32 - 1) Clear(zeros, kZeroBytes, lane);
    ClearStages<T, kRuns>(p, warp - 1, kThreads / 32 - 1, stages);
    // Products read the cleared bytes through the asynchronous proxy.
    ptx::fence_proxy_async(ptx::space_shared);
    __barrier_sync_count(kReady, kThreads);
  }

  if (threadIdx.x < 128) {
    GiveRegisters<56>();
    if (warp == 0) {
      if constexpr (kRuns) {
        Ring ring;
        CopyRuns(p, item, item.begin, item.end, barriers, ring, stages);
        // Sums that are NaN may have to be computed again, unless all of them are NaN.
        const int threads = 128 * min(units, kWarpgroups) + 32;
        if (Vote(barriers.are_nan, 0, kVote, threads) && Vote(barriers.again, 0, kVote, threads)) {
          SyncWarps(kVote, threads);
          CopyRuns(p, item, item.begin, item.begin + 1, barriers, ring, stages);
          if (Vote(barriers.open, 0, kVote, threads)) {
            CopyRuns(p, item, item.begin + 1, item.end, barriers, ring, stages);
          }
        }
      } else {
        CopyStages<T>(p, item, barriers, tables, stages);
      }
      __syncwarp();
    } else if constexpr (std::is_same_v<T, float>) {
      TransposeStages(p, item, barriers, stages);
      __syncwarp();
    }
    // The barriers of a cluster count all threads.
    SyncCluster();
    SyncCluster();
  } else {
    TakeRegisters<152>();
    // Units are shared out evenly; a warpgroup without units has no work.
    const int warpgroup = threadIdx.x / 128 - 1;
    const int least = units / kWarpgroups, more = units % kWarpgroups;
    const int first = warpgroup * least + min(warpgroup, more);
    const auto multiply = [&](auto count) {
      constexpr int kUnits = decltype(count)::value;
      const int threads = 128 * min(units, kWarpgroups);
      if constexpr (kRuns) {
        MultiplyRuns<T, kUnits>(p, item, first, threads, barriers,
                                reinterpret_cast<uint32_t*>(tables), SharedAddress(zeros), stages);
      } else {
        MultiplyUnits<T, kUnits>(p, item, first, threads, barriers, tables, SharedAddress(zeros),
                                 stages);
      }
    };
    switch (least + (warpgroup < more)) {
      case 1:
        multiply(std::integral_constant<int, 1>());
        break;
      case 2:
        multiply(std::integral_constant<int, 2>());
        break;
      case 3:
        multiply(std::integral_constant<int, 3>());
        break;
      default:
        break;
    }
    SyncCluster();
    AddCluster<T, kRuns>(p, item, units, stages);
    SyncCluster();  // no block ends while others read its sums
  }
#endif
}

// --- plans and launches on the host --------------------------------------------------------------

// Returns the estimated cycles of a stage: the larger of the cycles of its products and of bringing
// its operands, which arrive after a latency with at most all stages but one in flight.
int64_t StageCycles(int64_t product_cycles, int64_t bytes, int ring) {
  constexpr int64_t kStageCycles = 150, kBytesPerCycle = 26, kLatency = 1500;
  const int64_t copy_cycles = bytes / kBytesPerCycle;
  return kStageCycles +
         std::max({product_cycles, copy_cycles, (kLatency + copy_cycles) / (ring - 1)});
}

// Fills in how the sum is cut up with `stage_rows` rows of pixels in a stage; returns false where
// the stage does not fit. The strips are known.
bool LayRowStages(Params& p, DType dtype, const Tap* tap, int taps, int row_taps, Grouping grouping,
                  int stage_rows) {
  const int item = ItemBytes(dtype);
  FillSets(p, tap, taps, row_taps, grouping);
  if (!p.LayRows(tap, p.set, p.sets)) return false;
  p.stage_rows = stage_rows;
  p.stage_pixels = stage_rows * p.strip_width.divisor();
  p.steps = static_cast<int>(CeilDiv(p.stage_pixels * item, 32));
  p.cotangent_bytes = p.stage_pixels * item * kColumns;
  // Float32 has a second cotangent, transposed, in rows of four steps.
  p.cotangent_stage = p.steps * 32 * kColumns;
  if (dtype == DType::kF32) p.cotangent_stage += (p.steps + 3) / 4 * kRowBytes * kColumns;
  const int64_t plane = p.StageBytes(stage_rows, Touched(stage_rows, p.rows.divisor(), true));
  const int64_t image_stage = p.planes * plane;
  if (2 * (image_stage + p.cotangent_stage) > kStagesBytes) return false;
  p.plane_bytes = static_cast<int>(plane);
  p.image_stage = static_cast<int>(image_stage);
  p.image_bytes = p.image_stage;
  p.ring = std::min(kMaxStages, kStagesBytes / (p.image_stage + p.cotangent_stage));
  for (int s = 0; s < p.sets; ++s) {
    for (int t = p.set[s].begin; t < p.set[s].end; ++t) {
      p.tap[t] = p.TapBytes(tap[t], p.set[s]);
    }
  }
  return true;
}

// Plans stages of rows of pixels; returns false where they do not fit.
bool PlanRows(Params& p, const Call& call, const Tap* tap, int taps) {
  const im2col::Window& h = call.dims[0];
  const im2col::Window& w = call.dims[1];
  p.CutColumns(h.out, w.out, h.stride, w.stride);
  const int64_t pixel_rows = call.images * p.strips.divisor() * h.out;
  if (pixel_rows > INT32_MAX - 1024) return false;

  // The chosen number of rows wastes the smallest part of the last step; ties go to more rows.
  // Fewer rows are better than separate stages for taps, if the rows do not waste much more.
  struct Choice {
    int rows, steps;
  };
  Choice choices[kMaxStageRows];
  int count = 0;
  const int strip_width = p.strip_width.divisor();
  for (int rows = 1;
       rows <= std::min<int64_t>(kMaxStageRows, pixel_rows) && rows * strip_width <= kPixels;
       ++rows) {
    const int steps = static_cast<int>(CeilDiv(rows * strip_width * ItemBytes(call.dtype), 32));
    choices[count++] = {rows, steps};
  }
  std::sort(choices, choices + count, [](const Choice& a, const Choice& b) {
    const int difference = a.rows * b.steps - b.rows * a.steps;
    return difference != 0 ? difference > 0 : a.rows > b.rows;
  });
  bool fits = false;
  for (const bool any : {false, true}) {
    for (const Grouping grouping : {Grouping::kAll, Grouping::kRow, Grouping::kTap}) {
      for (int i = 0; i < count && !fits; ++i) {
        const bool wastes =
            4 * choices[i].rows * choices[0].steps < 3 * choices[0].rows * choices[i].steps;
        fits = (any || !wastes) && LayRowStages(p, call.dtype, tap, taps, static_cast<int>(w.taps),
                                                grouping, choices[i].rows);
      }
    }
  }
  p.stages = static_cast<int>(CeilDiv(pixel_rows, std::max(1, p.stage_rows)));
  return fits;
}

// Fills in how the sum is cut up into runs of `stage_rows` rows, of strips of this width, except
// the offsets of taps; returns false where the runs do not fit. The sets and phases are known.
bool LayRunStages(Params& p, const Call& call, const RunSpans& spans, int width, int stage_rows) {
  const im2col::Window& h = call.dims[0];
  const im2col::Window& w = call.dims[1];
  const int64_t columns = RunColumns(spans, call, width);
  if (columns > kMaxBox) return false;
  const int64_t steps = CeilDiv(stage_rows * columns, 16);
  int64_t image_stage = 0, image_bytes = 0;
  for (int i = 0; i < p.phases; ++i) {
    const Span& span = spans.most[i];
    const int64_t rows = stage_rows + span.rows - 1;
    if (rows > kMaxBox) return false;
    // Windows of the last step may touch this many entries of zeros.
    const int64_t after = steps * 16 - stage_rows * columns + span.columns - 1;
    p.phase[i].rows = static_cast<int>(rows);
    p.phase[i].begin = static_cast<int>(image_stage);
    p.phase[i].bytes = static_cast<int>(rows * columns * p.row_bytes);
    image_bytes += p.phase[i].bytes;
    image_stage += CeilDiv((rows * columns + after) * p.row_bytes, 1024) * 1024;
    if (image_stage > kStagesBytes) return false;
  }
  const int64_t cotangent_stage = steps * 16 * 2 * kColumns;
  if (2 * (image_stage + cotangent_stage) > kStagesBytes) return false;

  p.rows = FastDivider(h.out);
  p.columns = static_cast<int>(w.out);
  p.image_rows = static_cast<int>(h.in);
  p.image_columns = static_cast<int>(w.in);
  p.row_low = static_cast<int>(h.low);
  p.column_low = static_cast<int>(w.low);
  p.row_dilation = static_cast<int>(h.dilation);
  p.column_dilation = static_cast<int>(w.dilation);
  p.tap_columns = static_cast<int>(w.taps);
  p.strips = FastDivider(w.out / width);
  p.strip_width = FastDivider(width);
  p.runs = FastDivider(CeilDiv(h.out, stage_rows));
  p.stage_rows = stage_rows;
  p.run_columns = static_cast<int>(columns);
  p.columns_of_row = FastDivider(columns);
  p.steps = static_cast<int>(steps);
  const int64_t last_rows = h.out - (int64_t{p.runs.divisor()} - 1) * stage_rows;
  p.last_steps = static_cast<int>(CeilDiv(last_rows * columns, 16));
  p.stages = static_cast<int>(call.images * p.strips.divisor() * p.runs.divisor());
  p.image_bytes = static_cast<int>(image_bytes);
  p.image_stage = static_cast<int>(image_stage);
  p.cotangent_bytes = static_cast<int>(stage_rows * columns * 2 * kColumns);
  p.cotangent_stage = static_cast<int>(cotangent_stage);
  p.ring = std::min(kMaxStages, kStagesBytes / (p.image_stage + p.cotangent_stage));
  return true;
}

// Plans stages that are runs, and returns the estimated cycles, or INT64_MAX where the runs do not
// fit.
int64_t PlanRuns(Params& p, const Call& call, const Tap* all_taps, int taps, int processors) {
  if (call.dtype == DType::kF32 || p.row_bytes != kRowBytes) return INT64_MAX;
  const im2col::Window& h = call.dims[0];
  const im2col::Window& w = call.dims[1];
  if (call.images * h.out * w.out > INT32_MAX / 2) return INT64_MAX;
  Params q = p;
  // A single row or column has no neighbours.
  q.stride_row = static_cast<int>(h.out > 1 ? std::min<int64_t>(h.stride, kMaxPhases + 1) : 1);
  q.stride_column = static_cast<int>(w.out > 1 ? std::min<int64_t>(w.stride, kMaxPhases + 1) : 1);
  Tap tap[kMaxTaps];
  int phase_of[kMaxTaps];
  if (!FillPhases(q, call, all_taps, taps, tap, phase_of)) return INT64_MAX;
  const bool has_strides = q.stride_row > 1 || q.stride_column > 1;
  int64_t least = INT64_MAX;
  for (const Grouping grouping : {Grouping::kAll, Grouping::kRow, Grouping::kTap}) {
    FillSets(q, tap, taps, static_cast<int>(w.taps), grouping);
    if (has_strides && q.sets > 1) break;
    PlacePhases(q, tap, taps, phase_of);
    const RunSpans spans = RunSpansOf(q, call, tap, phase_of);
    const int64_t units = Units(q);
    for (int64_t width = std::min<int64_t>(w.out, kMaxBox); width >= 1; --width) {
      if (width < std::min<int64_t>(w.out, 16)) break;
      if (w.out % width != 0 || (w.taps > 1 && width < w.dilation)) continue;
      for (int rows = 1; rows <= std::min<int64_t>(h.out, kMaxStageRows); ++rows) {
        if (!LayRunStages(q, call, spans, static_cast<int>(width), rows)) break;
        constexpr int64_t kUnitCycles = 33;
        const int64_t cycles =
            StageCycles(q.steps * units * kUnitCycles, q.image_bytes + q.cotangent_bytes, q.ring);
        const int64_t last_less = (q.steps - q.last_steps) * units * kUnitCycles;
        const int64_t cost = Split(q, processors, cycles, last_less, least);
        if (cost < least) {
          least = cost;
          p = q;
        }
      }
    }
    if (least != INT64_MAX) break;
  }
  if (least != INT64_MAX) PlaceTaps(p, tap, phase_of);
  return least;
}

// Decides everything but addresses, from sizes and the number of processors alone.
bool Plan(Params& p, const Call& call, int processors) {
  const im2col::Window& h = call.dims[0];
  const im2col::Window& w = call.dims[1];
  const int item = ItemBytes(call.dtype);
  const int entries = 16 / item;
  // Other kernels are faster for float32 with at most 16 channels.
  if (call.dtype == DType::kF32 && call.channels <= 16) return false;
  if (h.taps * w.taps > kMaxTaps || call.groups != 1 || call.channels % entries ||
      call.outputs % entries) {
    return false;
  }
  if (call.images * h.out * w.out * h.taps * w.taps * call.channels * call.outputs == 0) {
    return false;
  }
  p.channels = static_cast<int>(call.channels);
  p.outputs = static_cast<int>(call.outputs);
  p.size = h.taps * w.taps * call.channels * call.outputs;
  p.block = ChannelBlock(call.channels);
  p.row_bytes = std::min(kRowBytes, item * p.block);
  p.planes = item * p.block / p.row_bytes;
  const int64_t channel_blocks = CeilDiv(call.channels, p.block);
  const int64_t column_tiles = CeilDiv(call.outputs, kColumns);
  if (channel_blocks * column_tiles * h.taps * w.taps > INT32_MAX / 8) return false;
  p.channel_blocks = static_cast<int>(channel_blocks);
  p.column_tiles = static_cast<int>(column_tiles);

  Tap tap[kMaxTaps];
  const int taps = FillTaps(tap, call);
  Params runs = p;
  const int64_t runs_cost = PlanRuns(runs, call, tap, taps, processors);
  runs.has_runs = true;
  int64_t rows_cost = INT64_MAX;
  if (PlanRows(p, call, tap, taps)) {
    constexpr int64_t kUnitCycles = 50;
    const int64_t cycles =
        StageCycles(p.steps * Units(p) * kUnitCycles, p.image_stage + p.cotangent_bytes, p.ring);
    rows_cost = Split(p, processors, cycles, 0, INT64_MAX);
  }
  if (runs_cost < rows_cost) p = runs;
  return std::min(runs_cost, rows_cost) != INT64_MAX;
}

auto PlanOf(const Call& call, int processors) {
  return KeptParams<Params>(PlanKey(call, processors),
                            [&](Params& p) { return Plan(p, call, processors); });
}

int64_t PartBytes(const Params& p) {
  const int64_t parts = p.splits / p.cluster;
  return parts > 1 ? parts * p.size * 4 : 0;
}

template <typename T>
cudaError_t Launch(cudaStream_t stream, const Params& p, const Call& call) {
  auto* kernel = &KernelGradWgmma<T, false>;
  if constexpr (!std::is_same_v<T, float>) {
    if (p.has_runs) kernel = &KernelGradWgmma<T, true>;
  }
  cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes);
  if (error != cudaSuccess) return error;
  const int64_t blocks = int64_t{p.channel_blocks} * p.column_tiles * p.sets * p.splits;
  error =
      jaxops::cuda::LaunchClusters(kernel, blocks, p.cluster, kThreads, kSharedBytes, stream, p);
  if (error != cudaSuccess || p.splits == p.cluster) return error;
  return LaunchAddParts(stream, p.result, call.result, call.result_dtype, p.size,
                        p.splits / p.cluster);
}

}  // namespace
}  // namespace kernel_grad

bool CanRunKernelGradWgmma(const Call& call, int processors) {
  return kernel_grad::PlanOf(call, processors)->has_value();
}

int64_t KernelGradWgmmaWorkspace(const Call& call, int processors) {
  const auto plan = kernel_grad::PlanOf(call, processors);
  return plan->has_value() ? kernel_grad::PartBytes(**plan) : 0;
}

cudaError_t LaunchKernelGradWgmma(cudaStream_t stream, const Call& call, Space workspace,
                                  int processors) {
  using namespace kernel_grad;  // NOLINT: the file implements this namespace
  const auto plan = PlanOf(call, processors);
  if (!plan->has_value()) return cudaErrorNotSupported;
  Params p = **plan;
  cudaError_t error = cudaSuccess;
  if (workspace.bytes < PartBytes(p)) return cudaErrorInvalidValue;
  const bool one_part = p.splits == p.cluster;
  p.result = one_part ? call.result : workspace.data;
  p.is_wide = !one_part || call.result_dtype == DType::kF32;
  p.image = call.image;
  p.cotangent = call.cotangent;

  const im2col::Window& h = call.dims[0];
  const im2col::Window& w = call.dims[1];
  if (p.has_runs) {
    for (int i = 0; i < p.phases; ++i) {
      const Phase& phase = p.phase[i];
      const int64_t first = (phase.in_row * w.in + phase.in_column) * call.channels;
      const int64_t pitch = w.in * call.channels;
      error = Map<4>(p.image_map[i], call.dtype, static_cast<const char*>(call.image) + 2 * first,
                     {call.channels, CeilDiv(w.in - phase.in_column, p.stride_column),
                      CeilDiv(h.in - phase.in_row, p.stride_row), call.images},
                     {p.row_bytes / 2, p.run_columns, phase.rows, 1}, {1, 1, 1, 1}, p.row_bytes,
                     {p.stride_column * call.channels, p.stride_row * pitch, h.in * pitch});
      if (error != cudaSuccess) return error;
    }
    // The map has a dimension for strips, so that pixels next to a strip are outside of its row,
    // and zeros.
    const int64_t width = p.strip_width.divisor();
    error = Map<5>(p.cotangent_map, call.dtype, call.cotangent,
                   {call.outputs, width, w.out / width, h.out, call.images},
                   {kColumns, p.run_columns, 1, p.stage_rows, 1}, {1, 1, 1, 1, 1}, 2 * kColumns);
  } else {
    error = MapRows(p.image_map[0], p, call.dtype, call.image,
                    {call.channels, w.in, h.in, call.images});
    if (error != cudaSuccess) return error;
    error = Map<4>(p.cotangent_map, call.dtype, call.cotangent,
                   {call.outputs, w.out, h.out, call.images},
                   {kRowBytes / ItemBytes(call.dtype), p.strip_width.divisor(), 1, 1}, {1, 1, 1, 1},
                   kRowBytes);
  }
  if (error != cudaSuccess) return error;
  switch (call.dtype) {
    case DType::kF16:
      return Launch<__half>(stream, p, call);
    case DType::kF32:
      return Launch<float>(stream, p, call);
    default:
      return Launch<__nv_bfloat16>(stream, p, call);
  }
}

}  // namespace jaxops::conv::cuda

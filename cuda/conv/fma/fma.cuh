// Code that the kernels of convolution by multiply-adds share: kernels of float32 that must not be
// rounded to TF32, and of float64.
//
// A block takes a tile of a matrix product. A warp takes a part of the tile as 8 by 4 lanes or 32
// by 1, and a lane takes some rows by some units of columns, of 16 bytes each: every access to
// shared memory has 16 bytes.
#ifndef JAXOPS_CUDA_CONV_FMA_FMA_CUH_
#define JAXOPS_CUDA_CONV_FMA_FMA_CUH_

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <type_traits>

#include "common/fast_divide.h"
#include "cuda/common/async_copy.cuh"
#include "cuda/common/launch.h"
#include "cuda/common/numeric.cuh"
#include "cuda/conv/families.h"
#include "cuda/conv/sum.h"

namespace jaxops::conv::cuda::fma {

using jaxops::cuda::CeilDiv;
using jaxops::cuda::CommitCopies;
using jaxops::cuda::CopyAsync;
using jaxops::cuda::DispatchBool;
using jaxops::cuda::SharedAddress;
using jaxops::cuda::WaitCopies;

constexpr int kUnitBytes = 16;
template <typename T>
constexpr int kUnit = kUnitBytes / sizeof(T);

template <typename T>
struct alignas(kUnitBytes) Unit {
  T entry[kUnit<T>];
};

// Entries of the sum that come to shared memory together.
constexpr int kChunkBytes = 64;
template <typename T>
constexpr int kChunk = kChunkBytes / sizeof(T);
constexpr int kAhead = 2;  // chunks in flight while one is multiplied
constexpr int kStages = kAhead + 1;
// The lanes of a warp find the entries of kSetChunks chunks together, one warp after the other. The
// entries of two such sets are known at a time.
constexpr int kSet = 32;
template <typename T>
constexpr int kSetChunks = kSet / kChunk<T>;

// A tile of the product. kBlocks blocks share a multiprocessor. A product takes kPercent of the
// time of multiply-adds alone with enough warps to hide latencies.
template <typename T_, int kRowWarps_, int kColumnWarps_, int kLaneRows_, int kThreadRows_,
          int kThreadUnits_, int kBlocks_, int kPercent_>
struct Tile {
  using T = T_;
  static constexpr int kRowWarps = kRowWarps_, kWarps = kRowWarps * kColumnWarps_;
  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kLaneRows = kLaneRows_, kLaneColumns = 32 / kLaneRows;
  static constexpr int kThreadRows = kThreadRows_, kThreadUnits = kThreadUnits_;
  static constexpr int kWarpRows = kLaneRows * kThreadRows;
  static constexpr int kWarpUnits = kLaneColumns * kThreadUnits;
  static constexpr int kRows = kRowWarps * kWarpRows;
  static constexpr int kUnits = kColumnWarps_ * kWarpUnits, kColumns = kUnits * kUnit<T>;
  static constexpr int kBlocks = kBlocks_, kPercent = kPercent_;
  // Tensor cores have multiply-adds of float64 at twice the rate.
  static constexpr bool kOnTensorCores =
      std::is_same_v<T, double> && kThreadUnits == 2 && kLaneColumns == 4;
  // Bytes from one row in shared memory to the next. Entries of eight rows that are written
  // together share no banks.
  static constexpr int kPitch = (kUnits + 1) * kUnitBytes;
};

// Reads the number of this thread of kThreads again, so that values that follow from it do not
// occupy registers over a loop whose sums need them.
template <int kThreads>
__device__ __forceinline__ int ThreadAnew() {
  uint32_t thread;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
  __builtin_assume(thread < kThreads);
  return thread;
}

// A thread's position in its block's tile: the lane's rows and its units of columns. Neighbouring
// lanes are arranged so that every quarter of a warp reads few different units, or units that share
// no banks. On tensor cores the instruction sets the arrangement.
template <typename Tile>
struct Lane {
  int warp_row, warp_unit, row, unit;

  __device__ Lane() {
    const int thread = ThreadAnew<Tile::kThreads>();
    const int lane = thread % 32, warp = thread / 32;
    warp_row = warp % Tile::kRowWarps * Tile::kWarpRows;
    warp_unit = warp / Tile::kRowWarps * Tile::kWarpUnits;
    if constexpr (Tile::kOnTensorCores) {
      row = lane / 4;
      unit = lane % 4 * 2;
    } else if constexpr (Tile::kLaneColumns == 1) {
      row = lane;
      unit = 0;
    } else {
      static_assert(Tile::kLaneColumns == 4);
      row = lane / 2 % 8;
      unit = lane % 2 + lane / 16 * 2;
    }
  }

  // Returns unit j of this thread's columns.
  __device__ int Column(int j) const {
    return warp_unit + j * (Tile::kOnTensorCores ? 1 : Tile::kLaneColumns) + unit;
  }
};

// A part of the position of an entry of a patch in the images. The part of a pixel and the part of
// a tap and a channel are added, modulo 2^64 and 2^32.
struct alignas(16) Place {
  uint64_t byte;
  uint32_t row, column;
};

// A row or column that is outside of the image in every sum of two places: rows and columns are
// less than 2^30, rows and columns of taps are greater than -2^30 and less than 2^31.
constexpr uint32_t kNowhere = 1u << 31;

// Images, and how they lie in memory.
struct Images {
  const char* data;
  int64_t row_bytes, image_bytes;
  int pixel_bytes;
  uint32_t rows, columns;

  __device__ bool Has(const Place& a, const Place& b) const {
    return a.row + b.row < rows && a.column + b.column < columns;
  }

  Place Of(const Tap& tap) const {
    return {static_cast<uint64_t>(tap.row) * row_bytes +
                static_cast<uint64_t>(tap.column) * pixel_bytes,
            static_cast<uint32_t>(tap.row), static_cast<uint32_t>(tap.column)};
  }
};

// Pixels of all images, counted by images, rows and columns, and the places of the entries that a
// tap at 0, 0 multiplies.
struct Pixels {
  FastDivider rows, columns;
  uint32_t stride_row, stride_column;
  int count;

  __device__ Place Of(const Images& images, int image, int row, int column) const {
    const uint32_t in_row = row * stride_row, in_column = column * stride_column;
    return {static_cast<uint64_t>(images.image_bytes) * image +
                static_cast<uint64_t>(images.row_bytes) * in_row +
                static_cast<uint64_t>(images.pixel_bytes) * in_column,
            in_row, in_column};
  }
};

// Calls find(number, at) for this lane's entry of the sum in a set and its index in two sets, if it
// is this warp's turn.
template <typename Tile, typename Find>
__device__ __forceinline__ void FindSet(int set, Find&& find) {
  const int thread = ThreadAnew<Tile::kThreads>();
  if (thread / 32 != set % Tile::kWarps) return;
  find(set * kSet + thread % 32, set % 2 * kSet + thread % 32);
}

// Returns the index of a chunk's first entry in two sets.
template <typename T>
__device__ __forceinline__ int InSets(int chunk) {
  return chunk % (2 * kSetChunks<T>)*kChunk<T>;
}

// FindFirstSets calls find(set) for the sets of the first chunks that are copied. FindNextSet calls
// it, while a chunk is multiplied, for the set that is needed next, whose place has been free since
// the last barrier.
template <typename T, typename Find>
__device__ __forceinline__ void FindFirstSets(int chunk, Find&& find) {
  for (int set = chunk / kSetChunks<T>; set <= (chunk + kAhead) / kSetChunks<T>; ++set) find(set);
}

template <typename T, typename Find>
__device__ __forceinline__ void FindNextSet(int chunk, Find&& find) {
  const int next = chunk + kAhead + 1;
  if (next % kSetChunks<T> == 0) find(next / kSetChunks<T>);
}

// Calls act(i) for this thread's numbers out of kCount.
template <int kCount, int kThreads, typename Act>
__device__ __forceinline__ void ForOwn(Act&& act) {
  const int thread = ThreadAnew<kThreads>();
#pragma unroll 8
  for (int pass = 0; pass < (kCount + kThreads - 1) / kThreads; ++pass) {
    const int i = pass * kThreads + thread;
    if (kCount % kThreads == 0 || i < kCount) act(i);
  }
}

template <typename T>
__device__ __forceinline__ Unit<T> Load(const char* address) {
  return *reinterpret_cast<const Unit<T>*>(address);
}

// Computes c += a b for 16 rows, 8 columns and 8 entries of the sum. `a` has a lane's rows of the
// first four entries and then of the others; `b0` and `b1` are these entries of its column.
__device__ __forceinline__ void MultiplyStep(double& c0, double& c1, double& c2, double& c3,
                                             const double (&a)[4], double b0, double b1) {
#if __CUDA_ARCH__ >= 900
  asm("mma.sync.aligned.m16n8k8.row.col.f64.f64.f64.f64 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+d"(c0), "+d"(c1), "+d"(c2), "+d"(c3)
      : "d"(a[0]), "d"(a[1]), "d"(a[2]), "d"(a[3]), "d"(b0), "d"(b1));
#else
  const auto multiply = [](double& left, double& right, double a, double b) {
    asm("mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64 {%0, %1}, {%2}, {%3}, {%0, %1};"
        : "+d"(left), "+d"(right)
        : "d"(a), "d"(b));
  };
  multiply(c0, c1, a[0], b0);
  multiply(c2, c3, a[1], b0);
  multiply(c0, c1, a[2], b1);
  multiply(c2, c3, a[3], b1);
#endif
}

// LoadColumns and MultiplyChunk multiply a chunk on tensor cores. A product may sum any four
// entries, if they are the same on both sides: each lane has two neighbouring entries and two
// neighbouring columns. `b` has the lane's columns of both products, and `load_rows` returns the
// lane's part of 16 rows for both.
template <typename Tile>
__device__ __forceinline__ void LoadColumns(const Lane<Tile>& lane, const char* columns,
                                            Unit<double> (&b)[2]) {
  columns += lane.unit * Tile::kPitch + (lane.warp_unit + lane.row) * kUnitBytes;
  b[0] = Load<double>(columns);
  b[1] = Load<double>(columns + Tile::kPitch);
}

template <typename Tile, typename LoadRows>
__device__ __forceinline__ void MultiplyChunk(const Unit<double> (&b)[2], LoadRows&& load_rows,
                                              Unit<double> (&sums)[Tile::kThreadRows][2]) {
  static_assert(kChunk<double> == 8);
#pragma unroll
  for (int i = 0; i < Tile::kThreadRows / 2; ++i) {
    double a[4];
    load_rows(i, a);
    Unit<double>(&first)[2] = sums[2 * i];
    Unit<double>(&second)[2] = sums[2 * i + 1];
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      MultiplyStep(first[0].entry[n], first[1].entry[n], second[0].entry[n], second[1].entry[n], a,
                   b[0].entry[n], b[1].entry[n]);
    }
  }
}

// Writes the first `left` entries; with `is_wide` these are a whole unit or none.
template <typename T>
__device__ __forceinline__ void Store(T* to, const Unit<T>& unit, int left, bool is_wide) {
  if (is_wide) {
    if (left > 0) *reinterpret_cast<Unit<T>*>(to) = unit;
    return;
  }
#pragma unroll
  for (int e = 0; e < kUnit<T>; ++e) {
    if (e < left) to[e] = unit.entry[e];
  }
}

// --- plans and launches on the host --------------------------------------------------------------

// Tells whether rows of `entries` entries, one after the other, are whole units.
template <typename T>
bool AreUnits(const void* data, int64_t all_entries, int64_t entries) {
  return reinterpret_cast<uintptr_t>(data) % kUnitBytes == 0 && all_entries % kUnit<T> == 0 &&
         entries % kUnit<T> == 0;
}

// Returns the warps of a processor with `load` blocks.
template <typename Tile>
int64_t Warps(int64_t load) {
  return std::min<int64_t>(load, Tile::kBlocks) * Tile::kWarps;
}

// Returns the estimated cycles of the products of blocks on one processor, for `chunks` chunks
// each, at a percentage of the time of multiply-adds alone.
template <typename Tile>
int64_t ProductCycles(int64_t load, int64_t chunks, int64_t percent) {
  using T = typename Tile::T;
  constexpr int64_t kPerCycle = sizeof(T) == 8 && !Tile::kOnTensorCores ? 64 : 128;
  const int64_t products = int64_t{Tile::kRows} * Tile::kColumns * kChunk<T>;
  return load * chunks * products / kPerCycle * percent / 100;
}

}  // namespace jaxops::conv::cuda::fma

#endif  // JAXOPS_CUDA_CONV_FMA_FMA_CUH_
